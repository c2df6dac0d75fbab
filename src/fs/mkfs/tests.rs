#![allow(clippy::disallowed_methods)]

use std::process::Command;

use proptest::prelude::*;

use super::*;
use crate::{
    device::scratch::Scratch,
    fs::probe::{self, Content},
};

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

#[test]
fn words_are_split_as_a_shell_does() {
    for (text, expected) in [
        ("", &[][..]),
        ("  -F\t-q ", &["-F", "-q"]),
        ("-L 'my disk' -q", &["-L", "my disk", "-q"]),
        (r#"-L "a \"b\" 'c'""#, &["-L", r#"a "b" 'c'"#]),
        (r"-L a\ b", &["-L", "a b"]),
        ("-L '' -E'a,b'=1", &["-L", "", "-Ea,b=1"]),
    ] {
        assert_eq!(split_options(text).unwrap(), words(expected), "{text}");
    }
    for open in ["'a", "\"a", "a\\", "\"a\\"] {
        assert!(matches!(
            split_options(open),
            Err(OptionError::Unterminated { .. })
        ));
    }
}

#[test]
fn options_are_spelt_out_and_force_is_ours() {
    for (fs, text, expected) in [
        (
            FsType::Ext4,
            "-m0 -Enodiscard,lazy_itable_init=1,lazy_journal_init=1",
            &[
                "-m",
                "0",
                "-E",
                "nodiscard,lazy_itable_init=1,lazy_journal_init=1",
            ][..],
        ),
        (FsType::Ext4, "-FFqL name -F", &["-q", "-L", "name"]),
        (
            FsType::Xfs,
            "-K -m reflink=0 -f",
            &["-K", "-m", "reflink=0"],
        ),
        (
            FsType::Btrfs,
            "--force --label=x --nodesize 32768 --csum=xxhash -M",
            &[
                "--label",
                "x",
                "--nodesize",
                "32768",
                "--csum",
                "xxhash",
                "-M",
            ],
        ),
    ] {
        assert_eq!(parse_options(fs, text).unwrap(), words(expected), "{text}");
    }
}

#[test]
fn what_does_something_else_is_refused() {
    for (fs, text) in [
        (FsType::Ext4, "/dev/sda"),
        (FsType::Ext4, "-- /dev/sda"),
        (FsType::Ext4, "-q -"),
        (FsType::Ext4, "-L"),
        (FsType::Ext4, "-qn"),
        (FsType::Ext4, "-d /etc"),
        (FsType::Ext4, "-E nodiscard,offset=4096"),
        (FsType::Ext4, "-J size=4,device=/dev/sda"),
        (FsType::Ext4, "-t ext2"),
        (FsType::Ext4, "-V"),
        (FsType::Ext4, "-Z"),
        (FsType::Xfs, "-N"),
        (FsType::Xfs, "-d agcount=4,name=/dev/sda"),
        (FsType::Xfs, "-l logdev=/dev/sda"),
        (FsType::Btrfs, "--rootdir /etc"),
        (FsType::Btrfs, "--help"),
        (FsType::Btrfs, "-O list-all"),
        (FsType::Btrfs, "--no-such"),
        (FsType::Btrfs, "/dev/sda"),
    ] {
        assert!(parse_options(fs, text).is_err(), "{fs} {text}");
    }
}

#[test]
fn command_lines_make_what_they_say() {
    let bytes = 320 << 20;
    for fs in FsType::ALL {
        for (options, zero) in [("", true), ("", false), ("-L name", false)] {
            let scratch = Scratch::new(bytes);
            let options = parse_options(fs, options).unwrap();
            let line = command(fs, &scratch.device.node, &options, zero);
            let made = Command::new(line.program)
                .args(&line.args)
                .output()
                .unwrap();
            assert!(made.status.success(), "{line}: {made:?}");

            let node = scratch.open();
            match probe::content_of(&node, bytes).unwrap() {
                Content::Fs(info) => assert_eq!((info.fs, info.dirty), (fs, false)),
                other => panic!("{line} made {other:?}"),
            }
        }
    }
}

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

proptest! {
    #[test]
    fn quoted_words_come_back(list in proptest::collection::vec(any::<String>(), 0..6)) {
        let text = list.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ");
        prop_assert_eq!(split_options(&text).unwrap(), list);
    }

    #[test]
    fn any_text_is_survived(text in any::<String>()) {
        let _ = split_options(&text);
    }

    /// Whatever is let through, the program reads as options and their values.
    #[test]
    fn what_is_let_through_has_no_operand(
        list in proptest::collection::vec("(-{0,2}[a-zA-Z]{1,3}(=[a-z/]{1,4})?|/dev/sda)", 0..6),
    ) {
        let text = list.join(" ");
        for fs in FsType::ALL {
            let Ok(args) = parse_options(fs, &text) else { continue };
            // Accepted once more as they are: nothing depends on how it was spelt.
            prop_assert_eq!(parse_options(fs, &args.iter().map(|word| quoted(word))
                .collect::<Vec<_>>().join(" ")).unwrap(), args);
        }
    }
}
