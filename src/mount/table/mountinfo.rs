//! The lines of `/proc/PID/mountinfo`, proc_pid_mountinfo(5):
//!
//! ```text
//! 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 shared:2 - ext3 /dev/root rw,errors=continue
//! id │  │    │     │     │          └ any number      │ │    │         └ superblock's options
//!    │  dev  root  point own options                  │ type source
//!    parent                                           └ ends the optional fields
//! ```
//!
//! Space, tab, newline, backslash and `#` within a field are octal escapes.

use std::{ffi::OsString, io, os::unix::ffi::OsStringExt, path::PathBuf};

use super::MountEntry;

/// One line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// The mount.
    pub entry: MountEntry,
    /// See [`super::super_options`].
    pub super_options: String,
}

/// Parses a whole mountinfo.
pub fn parse(text: &[u8]) -> io::Result<Vec<Line>> {
    let lines = text.split(|byte| *byte == b'\n');
    lines
        .filter(|line| !line.is_empty())
        .map(|line| {
            parse_line(line).ok_or_else(|| {
                let line = String::from_utf8_lossy(line);
                let what = format!("{line:?} is not a line of mountinfo");
                io::Error::new(io::ErrorKind::InvalidData, what)
            })
        })
        .collect()
}

fn parse_line(line: &[u8]) -> Option<Line> {
    // A source may be empty: then two spaces follow each other.
    let mut fields = line.split(|byte| *byte == b' ');
    let id = number(fields.next()?)?;
    let parent = number(fields.next()?)?;
    let dev = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let root = path(fields.next()?);
    let mount_point = path(fields.next()?);
    let own_options = fields.next()?;
    let mut peer_group = None;
    for field in fields.by_ref().take_while(|field| *field != b"-") {
        if let Some(group) = field.strip_prefix(b"shared:") {
            peer_group = Some(number(group)?);
        }
    }
    let fs_type = text(fields.next()?);
    let source = match fields.next()? {
        b"" => "none".into(),
        source => OsString::from_vec(unescaped(source)),
    };
    let super_options = text(fields.next()?);
    if fields.next().is_some() {
        return None;
    }
    Some(Line {
        entry: MountEntry {
            id,
            parent,
            dev,
            root,
            mount_point,
            fs_type,
            source,
            own_read_only: is_read_only(own_options),
            read_only: is_read_only(own_options) || is_read_only(super_options.as_bytes()),
            peer_group,
        },
        super_options,
    })
}

/// Both lists of options begin with `ro` or `rw`.
fn is_read_only(options: &[u8]) -> bool {
    options.split(|byte| *byte == b',').next() == Some(b"ro")
}

fn number(field: &[u8]) -> Option<u32> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

fn path(field: &[u8]) -> PathBuf {
    OsString::from_vec(unescaped(field)).into()
}

fn text(field: &[u8]) -> String {
    String::from_utf8_lossy(&unescaped(field)).into_owned()
}

/// Replaces a backslash with three octal digits by their byte, and keeps any other
/// backslash.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        let (byte, after) = match (first, after) {
            (
                b'\\',
                [
                    a @ b'0'..=b'3',
                    b @ b'0'..=b'7',
                    c @ b'0'..=b'7',
                    after @ ..,
                ],
            ) => ((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'), after),
            _ => (first, after),
        };
        bytes.push(byte);
        rest = after;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use proptest::prelude::*;

    use super::*;
    use crate::kernel::Dev;

    /// Escapes a text as the kernel's mangle() does.
    fn escaped(text: &[u8]) -> Vec<u8> {
        let mut field = Vec::new();
        for &byte in text {
            if b" \t\n\\#".contains(&byte) {
                field.extend(format!("\\{byte:03o}").bytes());
            } else {
                field.push(byte);
            }
        }
        field
    }

    fn written(line: &Line) -> Vec<u8> {
        let entry = &line.entry;
        let own = if entry.read_only { "ro" } else { "rw" };
        let group = entry.peer_group.map(|group| format!("shared:{group} "));
        let shared = group.unwrap_or_default();
        let mut text = format!("{} {} {} ", entry.id, entry.parent, entry.dev).into_bytes();
        text.extend(escaped(entry.root.as_os_str().as_bytes()));
        text.push(b' ');
        text.extend(escaped(entry.mount_point.as_os_str().as_bytes()));
        text.extend(format!(" {own},noatime master:1 {shared}- {} ", entry.fs_type).bytes());
        text.extend(escaped(entry.source.as_bytes()));
        text.extend(format!(" {}\n", line.super_options).bytes());
        text
    }

    fn text() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(1u8.., 1..12)
    }

    prop_compose! {
        fn any_line()(
            id: u32, parent: u32, major: u32, minor: u32, read_only: bool,
            peer_group: Option<u32>,
            texts in [text(), text(), text()],
        ) -> Line {
            let [root, mount_point, source] = texts.map(OsString::from_vec);
            let entry = MountEntry {
                id, parent, dev: Dev { major, minor }, root: root.into(),
                mount_point: mount_point.into(), fs_type: "fuse.a".into(), source, read_only,
                own_read_only: read_only, peer_group,
            };
            Line { entry, super_options: "rw,data=ordered".into() }
        }
    }

    #[test]
    fn a_mount_of_a_read_only_superblock_is_read_only() {
        let text = b"36 35 98:0 / /mnt rw,noatime - ext4 /dev/vda ro,data=ordered\n";
        let [line] = &parse(text).expect("parsed")[..] else {
            panic!("not one line");
        };
        assert!(line.entry.read_only && !line.entry.own_read_only);
        assert_eq!(line.entry.peer_group, None);
        assert_eq!(line.super_options, "ro,data=ordered");
    }

    #[test]
    fn a_line_cut_short_is_an_error_that_shows_it() {
        let error = parse(b"36 35 98:0 / /mnt rw,noatime").expect_err("cut");
        assert!(error.to_string().contains("36 35 98:0"), "{error}");
    }

    proptest! {
        #[test]
        fn any_mountinfo_lines_read_back(lines in prop::collection::vec(any_line(), 0..4)) {
            let text: Vec<u8> = lines.iter().flat_map(written).collect();
            prop_assert_eq!(parse(&text).expect("parsed"), lines);
        }

        #[test]
        fn no_bytes_make_it_panic(text: Vec<u8>, line in "[0-9 :/a-z,\\\\-]{0,60}") {
            let _ = parse(&text);
            let _ = parse(line.as_bytes());
        }
    }
}
