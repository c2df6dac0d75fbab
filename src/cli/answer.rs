//! The output of a command: a table or a few lines of text, or JSON for scripts.

use std::{
    borrow::Cow,
    io::{self, Write},
};

use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;

use super::error::CliError;

/// A command's result. Its JSON is the serde form; field names are stable.
pub trait Answer: Serialize {
    /// The text form, without the last newline; may be empty.
    fn text(&self) -> String;

    /// What failed or is wrong besides, once the answer is printed.
    fn require_success(self) -> Result<(), CliError>
    where
        Self: Sized,
    {
        Ok(())
    }
}

/// Prints `answer` to stdout.
pub fn print(answer: &impl Answer, json: bool) -> io::Result<()> {
    let mut text = if json {
        serde_json::to_string_pretty(answer)?
    } else {
        printable(&answer.text()).into_owned()
    };
    if !text.is_empty() {
        text.push('\n');
    }
    write(text.as_bytes())
}

/// The text without characters that control a terminal: names of files and processes in it may
/// be a pod's. Lines and tabs stay.
pub fn printable(text: &str) -> Cow<'_, str> {
    let controls = |char: char| char.is_control() && !matches!(char, '\n' | '\t');
    if !text.contains(controls) {
        return text.into();
    }
    let mut shown = String::with_capacity(text.len());
    for char in text.chars() {
        if controls(char) {
            shown.extend(char.escape_default());
        } else {
            shown.push(char);
        }
    }
    shown.into()
}

/// Writes to stdout. A reader that has exited (`| head`) is no error.
pub fn write(bytes: &[u8]) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done,
    }
}

/// The columns of a terminal below which wrapped cells are harder to read than long lines.
/// Consoles without a size have none.
const NARROWEST: u16 = 40;

fn arrangement(width: Option<u16>) -> ContentArrangement {
    match width {
        Some(..NARROWEST) => ContentArrangement::Disabled,
        _ => ContentArrangement::Dynamic,
    }
}

/// A table under `header`, or `when_empty` where there are no rows. It has no borders,
/// so that awk, or a selection by mouse, gets the bare cells. On a terminal that is
/// narrower, long cells are wrapped; in a pipe each row is one line.
pub fn table<const N: usize>(
    header: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
    when_empty: &str,
) -> String {
    let table = filled(header, rows);
    if table.is_empty() {
        return when_empty.to_owned();
    }
    table.trim_fmt()
}

fn filled<const N: usize>(header: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> Table {
    let mut table = Table::new();
    let arrangement = arrangement(table.width());
    table
        .load_preset(presets::NOTHING)
        .set_content_arrangement(arrangement)
        .set_header(header);
    for row in rows {
        table.add_row(row.map(|cell| {
            if cell.is_empty() {
                "-".to_owned()
            } else {
                cell
            }
        }));
    }
    if let Some(first) = table.column_mut(0) {
        first.set_padding((0, 1));
    }
    table
}

/// `key: value` lines with the values in one column.
pub fn fields(fields: &[(&str, String)]) -> String {
    let width = fields.iter().map(|(key, _)| key.len()).max().unwrap_or(0) + 1;
    let lines: Vec<String> = fields
        .iter()
        .map(|(key, value)| {
            let value = if value.is_empty() { "-" } else { value };
            format!("{:width$} {value}", format!("{key}:"))
        })
        .collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_aligned_and_reports_that_it_is_empty() {
        let rows = [
            ["a".to_owned(), String::new()],
            ["long-name".to_owned(), "x".to_owned()],
        ];
        let text = table(["NAME", "DEVICE"], rows, "nothing");
        assert_eq!(text, "NAME       DEVICE\na          -\nlong-name  x");
        assert_eq!(table(["NAME"], [], "nothing here"), "nothing here");
    }

    #[test]
    fn no_text_controls_the_terminal() {
        let text = "process 7 (\x1b]0;title\x07\r\u{9b}2J)\n\tnext, ä";
        let shown = r"process 7 (\u{1b}]0;title\u{7}\r\u{9b}2J)";
        assert_eq!(printable(text), format!("{shown}\n\tnext, ä"));
        assert!(matches!(printable("as it is\n"), Cow::Borrowed(_)));
    }

    #[test]
    fn a_wide_table_is_wrapped_on_a_terminal_alone() {
        let rows = || [["data-1".to_owned(), "word ".repeat(40)]];
        assert_eq!(table(["NAME", "WHY"], rows(), "").lines().count(), 2);
        let on_terminal = filled(["NAME", "WHY"], rows()).set_width(80).trim_fmt();
        assert!(on_terminal.lines().count() > 2, "{on_terminal}");
        assert!(
            on_terminal.lines().all(|line| line.len() <= 80),
            "{on_terminal}"
        );
    }

    #[test]
    fn a_terminal_without_a_size_wraps_nothing() {
        for (width, wraps) in [
            (None, true),
            (Some(80), true),
            (Some(0), false),
            (Some(9), false),
        ] {
            let is_dynamic = matches!(arrangement(width), ContentArrangement::Dynamic);
            assert_eq!(is_dynamic, wraps, "{width:?}");
        }
    }

    #[test]
    fn fields_line_up() {
        let text = fields(&[("id", "v".to_owned()), ("path", String::new())]);
        assert_eq!(text, "id:   v\npath: -");
    }
}
