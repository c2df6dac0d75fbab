//! Mount points, by `/proc/PID/mountinfo`.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::ffi::OsStringExt as _,
    path::{Path, PathBuf},
};

/// All mount points that a process (an id, or `self`) sees.
pub fn mount_points(process: &str) -> io::Result<Vec<PathBuf>> {
    let table = fs::read(format!("/proc/{process}/mountinfo"))?;
    Ok(parse(&table))
}

/// Those at or below `dir` that this process sees.
pub fn mounted_below(dir: &Path) -> io::Result<Vec<PathBuf>> {
    // As the kernel names it, without symbolic links.
    let dir = fs::canonicalize(dir)?;
    let mut points = mount_points("self")?;
    points.retain(|point| point.starts_with(&dir));
    Ok(points)
}

/// The fifth field of each line (proc_pid_mountinfo(5)).
fn parse(table: &[u8]) -> Vec<PathBuf> {
    let lines = table.split(|byte| *byte == b'\n');
    let points = lines.filter_map(|line| line.split(|byte| *byte == b' ').nth(4));
    points
        .map(|point| OsString::from_vec(unescape(point)).into())
        .collect()
}

/// White space and the backslash are written as `\` and three octal digits.
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, after @ ..] = rest {
        rest = after;
        let octal = |digit: u8| (b'0'..=b'7').contains(&digit).then(|| digit - b'0');
        if let (b'\\', [a, b, c, behind @ ..]) = (*first, after)
            && let (Some(a @ 0..=3), Some(b), Some(c)) = (octal(*a), octal(*b), octal(*c))
        {
            plain.push(a * 64 + b * 8 + c);
            rest = behind;
        } else {
            plain.push(*first);
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn points_are_unescaped() {
        let table = b"36 35 98:0 /mnt1 /mnt/a\\040b\\134 rw master:1 - ext3 /dev/root rw\n37 x\n";
        assert_eq!(parse(table), [PathBuf::from("/mnt/a b\\")]);
    }

    #[test]
    fn this_process_sees_its_root() {
        let points = mount_points("self").unwrap();
        assert!(points.contains(&PathBuf::from("/")), "{points:?}");
    }

    proptest! {
        #[test]
        fn any_table_is_parsed(table in proptest::collection::vec(any::<u8>(), 0..200)) {
            parse(&table);
        }

        #[test]
        fn what_the_kernel_escapes_is_itself_again(path in "[ -~\t\n]{0,40}") {
            let escaped = |byte: u8| match byte {
                b' ' | b'\t' | b'\n' | b'\\' => format!("\\{byte:03o}"),
                _ => char::from(byte).to_string(),
            };
            let text: String = path.bytes().map(escaped).collect();
            prop_assert_eq!(unescape(text.as_bytes()), path.into_bytes());
        }
    }
}
