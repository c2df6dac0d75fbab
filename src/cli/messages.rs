//! The book's page of errors, which scripts/reference.py takes from the errors of all programs: what
//! a message says, by its text.

use std::ops::Range;

use serde::Serialize;

const PAGE: &str = include_str!("../../docs/reference/errors.md");
/// The remedy of an error that only introduces another.
const OF_THE_CAUSE: &str = "that of the cause that follows";
/// Characters of a message, besides what programs fill in, from which on its text is recognised:
/// that of `cannot WHAT` would be found in most errors.
const SHORTEST: usize = 7;

/// A row of the page.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// With capitals and … for what a program fills in.
    pub message: String,
    pub cause: String,
    pub remedy: String,
}

/// The remedy of the last cause in an agent's message, unless the message names it.
pub fn remedy(message: &str) -> Option<String> {
    let message = one_line(message);
    let remedy = messages(&message).pop()?.remedy;
    span(&pieces(&remedy), &message).is_none().then_some(remedy)
}

/// By the conditions that it names, else by its messages, else by its code.
pub fn explanations(text: &str) -> Vec<Explanation> {
    let text = one_line(text);
    let conditions =
        rows("| `", 4).filter(|row| words(&text).any(|word| word == row[0].trim_matches('`')));
    let mut found: Vec<Explanation> = conditions.map(condition).collect();
    if found.is_empty() {
        found = messages(&text);
    }
    if found.is_empty() {
        found = rows("| ", 2)
            .filter(|row| has_code(&text, &row[0]))
            .map(code)
            .collect();
    }
    found
}

fn condition(row: Vec<String>) -> Explanation {
    let [message, severity, meaning, remedy] = <[String; 4]>::try_from(row).unwrap_or_default();
    let cause = if severity.is_empty() {
        meaning
    } else {
        format!("{meaning} ({severity})")
    };
    Explanation {
        message: message.trim_matches('`').to_owned(),
        cause,
        remedy,
    }
}

fn code(row: Vec<String>) -> Explanation {
    let [message, remedy] = <[String; 2]>::try_from(row).unwrap_or_default();
    Explanation {
        message,
        cause: String::new(),
        remedy,
    }
}

/// The errors in a text: where two have the same part of it, the one that says more of it.
fn messages(text: &str) -> Vec<Explanation> {
    let mut found: Vec<(Range<usize>, usize, Vec<String>)> = rows("| *", 4)
        .filter(|row| row[3] != OF_THE_CAUSE)
        .filter_map(|row| {
            let pieces = pieces(&row[0]);
            let length = length(&pieces);
            let at = span(&pieces, text)?;
            (length >= SHORTEST).then_some((at, length, row))
        })
        .collect();
    found.sort_by_key(|(at, length, _)| (usize::MAX - length, at.start));
    let mut kept: Vec<(Range<usize>, Explanation)> = Vec::new();
    for (at, _, row) in found {
        let is_free =
            |(other, _): &(Range<usize>, _)| at.end <= other.start || other.end <= at.start;
        if kept.iter().all(is_free) {
            let [message, _, cause, remedy] = <[String; 4]>::try_from(row).unwrap_or_default();
            kept.push((
                at,
                Explanation {
                    message,
                    cause,
                    remedy,
                },
            ));
        }
    }
    kept.sort_by_key(|(at, _)| at.start);
    kept.into_iter()
        .map(|(_, explanation)| explanation)
        .collect()
}

/// The cells of the page's rows that begin so and have so many.
fn rows(begin: &'static str, count: usize) -> impl Iterator<Item = Vec<String>> {
    PAGE.lines()
        .filter(move |line| line.starts_with(begin))
        .map(|line| {
            // A `|` within a cell is escaped.
            let line = line.replace("\\|", "\0");
            let line = line.trim().trim_start_matches('|');
            let cells = line.strip_suffix('|').unwrap_or(line).split('|');
            let cells = cells.map(|cell| cell.trim_matches(['*', ' ']).replace('\0', "|"));
            cells.map(|cell| without_links(&cell)).collect::<Vec<_>>()
        })
        .filter(move |cells| cells.len() == count)
}

/// The text of a cell, with the files of its links.
fn without_links(cell: &str) -> String {
    let mut text = cell.to_owned();
    while let Some((start, middle, end)) = link(&text) {
        let file = match &text[middle + 2..end] {
            own if own.starts_with('#') => format!("docs/reference/errors.md{own}"),
            other => match other.strip_prefix("../") {
                Some(above) => format!("docs/{above}"),
                None => format!("docs/reference/{other}"),
            },
        };
        let shown = format!("{} ({file})", &text[start + 1..middle]);
        text.replace_range(start..=end, &shown);
    }
    text
}

/// Where a Markdown link begins, has its `](`, and ends.
fn link(text: &str) -> Option<(usize, usize, usize)> {
    let middle = text.find("](")?;
    let start = text[..middle].rfind('[')?;
    let end = middle + text[middle..].find(')')?;
    Some((start, middle, end))
}

/// What a message has besides what programs fill in: capitals and `…`.
fn pieces(message: &str) -> Vec<String> {
    let mut pieces = vec![String::new()];
    let mut word = String::new();
    for char in message.chars().chain(['…']) {
        if char.is_ascii_uppercase() || (char == '_' && !word.is_empty()) {
            word.push(char);
            continue;
        }
        let is_filled_in = word.len() > 1 && !char.is_ascii_lowercase();
        let last = pieces.last_mut();
        match last {
            Some(last) if !is_filled_in => last.push_str(&word),
            _ => pieces.push(String::new()),
        }
        word.clear();
        match pieces.last_mut() {
            Some(last) if char != '…' => last.push(char),
            _ => pieces.push(String::new()),
        }
    }
    pieces.retain(|piece| !piece.trim().is_empty());
    pieces
}

fn length(pieces: &[String]) -> usize {
    let lengths = pieces.iter().map(|piece| piece.trim().chars().count());
    lengths.sum()
}

/// The shortest part of the text that has all pieces in their order, and ends first.
fn span(pieces: &[String], text: &str) -> Option<Range<usize>> {
    let mut end = 0;
    for piece in pieces {
        end += text[end..].find(piece.as_str())? + piece.len();
    }
    let mut start = end;
    for piece in pieces.iter().rev() {
        start = text[..start].rfind(piece.as_str())?;
    }
    Some(start..end)
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|char: char| !char.is_alphanumeric() && char != '_')
}

/// Whether a text names the code, also as events write it: `code = FailedPrecondition`. A code
/// of one word counts there alone: `mount: Internal error` has none.
fn has_code(text: &str, code: &str) -> bool {
    if !code.starts_with(char::is_uppercase) {
        return false;
    }
    let name: String = code
        .split('_')
        .map(|word| word[..1].to_owned() + &word[1..].to_lowercase())
        .collect();
    let is_plain = code.contains('_') || text == name;
    words(text).any(|word| word == code || is_plain && word == name)
        || text
            .split("code = ")
            .skip(1)
            .any(|rest| words(rest).next() == Some(name.as_str()))
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn explained(text: &str) -> Vec<Explanation> {
        let found = explanations(text);
        assert!(!found.is_empty(), "{text}");
        found
    }

    #[test]
    fn an_event_is_explained_by_each_of_its_errors() {
        let event = "MountVolume.SetUp failed for volume \"pvc-1\" : rpc error: code = \
            FailedPrecondition desc = volume pool/a: /dev/loop7 holds xfs, which is neither blank \
            nor ext4; it is left as it is (`uringctl format` destroys it on request)";
        let found = explained(event);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].remedy.contains("--confirm VOLUME"), "{found:?}");
        let two = explained(
            "the server of nas:/export does not answer: io_uring is disabled on this node \
             (sysctl kernel.io_uring_disabled is 2)",
        );
        assert_eq!(two.len(), 2, "{two:?}");
        assert!(two[0].message.contains("does not answer"), "{two:?}");
    }

    #[test]
    fn the_longer_of_two_messages_wins() {
        let busy = explained("/dev/loop7 is busy, nothing was disconnected: process 7 (dd)");
        assert_eq!(busy.len(), 1, "{busy:?}");
        assert!(busy[0].message.contains("nothing was disconnected"));
    }

    #[test]
    fn conditions_and_codes_are_explained() {
        let conditions = PAGE.lines().filter(|line| line.starts_with("| `")).count();
        assert_eq!(rows("| `", 4).count(), conditions);
        for row in rows("| `", 4) {
            let name = row[0].trim_matches('`');
            let found = explained(&format!("data-1 is unhealthy: {name}"));
            assert_eq!(found[0].message, name);
            assert!(!found[0].cause.ends_with("()"), "{found:?}");
            assert!(!found[0].remedy.contains("]("), "{found:?}");
        }
        let codes = rows("| ", 2).filter(|row| row[0].starts_with(char::is_uppercase));
        let codes: Vec<String> = codes.map(|row| row[0].clone()).collect();
        assert!(codes.len() > 9, "{codes:?}");
        for code in codes {
            assert_eq!(explained(&code)[0].message, code);
        }
        for (text, code) in [
            (
                "rpc error: code = FailedPrecondition desc = x",
                "FAILED_PRECONDITION",
            ),
            ("FailedPrecondition", "FAILED_PRECONDITION"),
            ("rpc error: code = Internal desc = x", "INTERNAL"),
            ("Internal", "INTERNAL"),
        ] {
            assert_eq!(explained(text)[0].message, code, "{text}");
        }
    }

    /// The page promises that of all but generic ones.
    #[test]
    fn each_message_is_explained() {
        let all = PAGE.lines().filter(|line| line.starts_with("| *")).count();
        assert_eq!(rows("| *", 4).count(), all);
        let mut generic = 0;
        for row in rows("| *", 4) {
            if row[3] == OF_THE_CAUSE || length(&pieces(&row[0])) < SHORTEST {
                generic += 1;
                continue;
            }
            let found = explained(&row[0]);
            assert!(
                found
                    .iter()
                    .any(|one| pieces(&one.message) == pieces(&row[0])),
                "{row:?}: {found:?}"
            );
        }
        assert!(generic * 10 < all, "{generic} of {all}");
        assert_eq!(explained("/dev/loop7 is busy")[0].message, "DEVICE is busy");
    }

    #[test]
    fn what_no_error_says_is_not_explained() {
        assert!(explanations("all is well").is_empty());
        for text in [
            "cannot open the door",
            "mount: Internal error",
            "the transfer was aborted",
        ] {
            assert!(explanations(text).is_empty(), "{text}");
        }
    }

    #[test]
    fn a_remedy_that_a_message_names_is_not_repeated() {
        let named = "its source has 5 bytes, and 6 are required; grow the source first";
        assert_eq!(remedy(named), None);
        let silent = remedy("volume a: the passphrase does not open /dev/loop3");
        assert!(silent.is_some_and(|remedy| remedy.contains("Secret")));
        let by_its_cause = "this node does not have the pool: there is no pool \"b\" here, only a; \
            check the `pool` parameter and --pool";
        assert_eq!(remedy(by_its_cause), None);
    }
}
