use std::{os::unix::fs::FileExt as _, process::Command};

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
fn mkfs_options_are_split_as_by_a_shell() {
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
            Err(MkfsOptionError::Unterminated { .. })
        ));
    }
}

#[test]
fn mkfs_options_are_normalised_and_force_is_dropped() {
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
fn mkfs_options_beyond_formatting_are_refused() {
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
        (FsType::Ext4, "-E root_owner=0:0"),
        (FsType::Ext4, "-E assume_storage_prezeroed"),
        (FsType::Ext4, "-O journal_dev"),
        (FsType::Ext4, "-O extent,^JOURNAL_DEV"),
        (FsType::Ext4, "-e panic"),
        (FsType::Ext4, "-l /list"),
        (FsType::Ext4, "-z /undo"),
        (FsType::Ext4, "-L /data"),
        (FsType::Ext4, "-L longer-than-sixteen"),
        (FsType::Ext4, "-U /uuid"),
        (FsType::Ext4, "-E stride=/etc"),
        (FsType::Ext4, "-E stride"),
        (FsType::Ext4, "-b -4096"),
        (FsType::Xfs, "-l name=/etc/passwd"),
        (FsType::Xfs, "-l file,name=disk"),
        (FsType::Xfs, "-l file"),
        (FsType::Xfs, "-r name=/dev/sda"),
        (FsType::Xfs, "-r rtdev=/dev/sda"),
        (FsType::Xfs, "-d file,size=1g"),
        (FsType::Xfs, "-c options=/etc/passwd"),
        (FsType::Xfs, "-p /etc/passwd"),
        (FsType::Xfs, "-m uuid=/etc"),
        (FsType::Xfs, "-fr rtdev=x"),
        (FsType::Btrfs, "-d /dev/sda"),
        (FsType::Btrfs, "-r/etc"),
        (FsType::Btrfs, "--quiet=/dev/sda"),
        (FsType::Btrfs, "--root=/etc"),
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
fn mkfs_command_lines_make_a_clean_file_system() {
    let bytes = 320 << 20;
    for fs in FsType::ALL {
        let mut cases = vec![("", true), ("", false), ("-L name", false)];
        if fs == FsType::Ext4 {
            cases.push(("-O ^huge_file", true));
        }
        for (options, zero) in cases {
            let scratch = Scratch::new(bytes);
            let options = parse_options(fs, options).unwrap();
            let encrypts_files = fs == FsType::Ext4;
            let line = command(fs, &scratch.device.node, &options, zero, encrypts_files);
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
            if encrypts_files {
                // EXT4_FEATURE_INCOMPAT_ENCRYPT in s_feature_incompat (linux/fs/ext4/ext4.h).
                let mut features = [0; 4];
                node.read_exact_at(&mut features, 1024 + 0x60).unwrap();
                assert_ne!(u32::from_le_bytes(features) & 0x10000, 0, "{line}");
            }
        }
    }
}

/// The words of a superblock with the features, by ext4.h, xfs_format.h and btrfs_tree.h.
fn features_of(fs: FsType, image: &std::path::Path) -> Vec<u64> {
    let file = std::fs::File::open(image).unwrap();
    let word = |at: u64, size: usize| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes[..size], at).unwrap();
        bytes
    };
    match fs {
        // s_feature_compat, s_feature_incompat, s_feature_ro_compat.
        FsType::Ext4 => [0x5C, 0x60, 0x64]
            .map(|at| u64::from_le_bytes(word(1024 + at, 4)))
            .into(),
        // sb_features2, and the same three.
        FsType::Xfs => [0xC8, 0xD0, 0xD8, 0xD4]
            .map(|at| u64::from_be_bytes(word(at, 4)) >> 32)
            .into(),
        // compat_flags, compat_ro_flags, incompat_flags. Of these, the first mount sets
        // BIG_METADATA, if mkfs has not.
        FsType::Btrfs => [(0xAC, 0), (0xB4, 0), (0xBC, 0x20)]
            .map(|(at, set)| u64::from_le_bytes(word(0x1_0000 + at, 8)) | set)
            .into(),
    }
}

fn learn_release(fs: FsType) {
    let Some(line) = release_command(fs) else {
        return;
    };
    let told = Command::new(line.program)
        .args(&line.args)
        .output()
        .unwrap();
    note_release(line.program, &String::from_utf8_lossy(&told.stdout));
    assert_eq!(release_command(fs).map(|line| line.program), None);
}

#[test]
fn a_release_is_the_first_number_with_a_dot() {
    for (told, expected) in [
        ("mkfs.xfs version 6.1.0\n", Some((6, 1))),
        (
            "mkfs.btrfs, part of btrfs-progs v6.14 \n-EXPERIMENTAL",
            Some((6, 14)),
        ),
        ("mkfs.xfs version 5.10.0-rc1", Some((5, 10))),
        ("mkfs.xfs: unknown option", None),
    ] {
        assert_eq!(told.split_whitespace().find_map(parse_release), expected);
    }
}

/// Fails where a release of the programs, or its configuration, has other defaults.
#[test]
fn the_features_of_a_file_system_are_the_same_with_every_release() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    for (fs, options, expected) in [
        (FsType::Ext4, "", &[0x3C, 0x2C2, 0x46B][..]),
        (FsType::Ext4, "-m 0 -L name", &[0x3C, 0x2C2, 0x46B]),
        // What a class asks for, it gets.
        (
            FsType::Ext4,
            "-O orphan_file,^64bit",
            &[0x103C, 0x242, 0x46B],
        ),
        (FsType::Xfs, "", &[0x18A, 0, 0xB, 0xD]),
        (
            FsType::Xfs,
            "-i size=1024 -m reflink=0",
            &[0x18A, 0, 0xB, 0x9],
        ),
        (
            FsType::Xfs,
            "-m rmapbt=1 -i sparse,nrext64=1",
            &[0x18A, 0, 0x2B, 0xF],
        ),
        (FsType::Btrfs, "", &[0, 3, 0x361]),
    ] {
        let file = std::fs::File::create(&image).unwrap();
        file.set_len(1 << 30).unwrap();
        let options = parse_options(fs, options).unwrap();
        learn_release(fs);
        let line = command(fs, &image, &options, true, false);
        let made = Command::new(line.program)
            .args(&line.args)
            .output()
            .unwrap();
        assert!(made.status.success(), "{line}: {made:?}");
        let features = features_of(fs, &image);
        assert_eq!(features, expected, "{line}: {features:x?}");
    }
}

#[test]
fn refused_mkfs_options_are_named_with_the_reason() {
    for (fs, text, expected) in [
        (
            FsType::Xfs,
            "-l name=/etc/passwd",
            "mkfsOptions: -l name is not allowed: it names another device, or a file or directory",
        ),
        (
            FsType::Xfs,
            "-b block=4k",
            "mkfsOptions: -b block is not allowed for xfs; allowed are: size",
        ),
        (
            FsType::Ext4,
            "-e stop",
            "mkfsOptions: -e stop is not allowed for ext4; allowed are: continue, remount-ro",
        ),
        (
            FsType::Btrfs,
            "--nodesize /etc",
            "mkfsOptions: --nodesize \"/etc\": a number, perhaps with a unit, is expected",
        ),
    ] {
        let error = parse_options(fs, text).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
}

/// Runs the programs over an image in a directory of its own: each accepts or refuses
/// the allowed options, and writes to no file but the image.
#[test]
fn no_allowed_option_touches_another_file() {
    use proptest::{strategy::ValueTree as _, test_runner::TestRunner};
    let dir = tempfile::tempdir().unwrap();
    let (image, other) = (dir.path().join("image"), dir.path().join("other"));
    std::fs::write(&other, "theirs").unwrap();
    let mut runner = TestRunner::default();
    let mut some = || hostile_option().new_tree(&mut runner).unwrap().current();
    let mut allowed = std::collections::BTreeSet::new();
    // The parser refuses most of them.
    while allowed.len() < 40 {
        let text = some();
        for (number, fs) in FsType::ALL.into_iter().enumerate() {
            let args = parse_options(fs, &text).unwrap_or_default();
            if !args.is_empty() {
                allowed.insert((number, args));
            }
        }
    }
    for (number, args) in allowed {
        let file = std::fs::File::create(&image).unwrap();
        file.set_len(320 << 20).unwrap();
        let line = command(FsType::ALL[number], &image, &args, true, false);
        Command::new(line.program)
            .args(&line.args)
            .current_dir(dir.path())
            .output()
            .unwrap();
        assert_eq!(std::fs::read(&other).unwrap(), b"theirs", "{line}");
        let files = std::fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(files, 2, "{line}");
    }
}

/// Options of an attacker who tries to reach another file: the letters of all programs,
/// their suboptions that name files or devices and some that do not, and values that are
/// paths.
fn hostile_option() -> impl Strategy<Value = String> {
    let letter = prop::sample::select(
        "CDEFGIJKLMNORSTUVbcdefgijlmnopqrstvzh"
            .chars()
            .collect::<Vec<_>>(),
    );
    let long = prop::sample::select(vec![
        "--rootdir",
        "--data",
        "--label",
        "--features",
        "--shrink",
        "--help",
        "--nodesize",
        "--byte-count",
    ]);
    let suboption = prop::sample::select(vec![
        "name",
        "file",
        "logdev",
        "rtdev",
        "device",
        "offset",
        "journal_dev",
        "root_owner",
        "options",
        "list-all",
        "size",
        "su",
        "agcount",
        "internal",
        "nodiscard",
        "uuid",
        "reflink",
        "extent",
    ]);
    let value = prop::sample::select(vec![
        "/etc/passwd",
        "other",
        "./other",
        "../x",
        "/dev/sda",
        "4096",
        "1",
        "0",
        "single",
        "x",
        "file:other",
        "LABEL=x",
    ]);
    let suboptions = prop::collection::vec((suboption, prop::option::of(value.clone())), 1..3)
        .prop_map(|parts| {
            let parts = parts.into_iter().map(|(name, value)| match value {
                Some(value) => format!("{name}={value}"),
                None => name.to_owned(),
            });
            parts.collect::<Vec<_>>().join(",")
        });
    let value = prop_oneof![2 => suboptions, 1 => value.prop_map(str::to_owned)];
    let spelling = prop::sample::select(vec![" ", "", "=", " '", "'"]);
    let name =
        prop_oneof![4 => letter.prop_map(|c| format!("-{c}")), 1 => long.prop_map(str::to_owned)];
    (name, prop::option::of((spelling, value))).prop_map(|(name, value)| match value {
        Some((join, value)) if join.ends_with('\'') => format!("{name}{join}{value}'"),
        Some((join, value)) => format!("{name}{join}{value}"),
        None => name,
    })
}

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

proptest! {
    #[test]
    fn quoted_mkfs_options_parse_back(list in proptest::collection::vec(any::<String>(), 0..6)) {
        let text = list.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ");
        prop_assert_eq!(split_options(&text).unwrap(), list);
    }

    #[test]
    fn any_mkfs_options_are_split_without_a_panic(text in any::<String>()) {
        let _ = split_options(&text);
    }

    /// The rule behind the allow-list, stated independently: no file, no device, no other
    /// result than a file system.
    #[test]
    fn accepted_mkfs_options_name_no_file(list in prop::collection::vec(hostile_option(), 1..4)) {
        let text = list.join(" ");
        for fs in FsType::ALL {
            let Ok(args) = parse_options(fs, &text) else { continue };
            for (option, value) in args.iter().zip(args.iter().skip(1)) {
                prop_assert!(!value.contains('/'), "{} {:?}", fs, args);
                let parts = value.split(',').map(|part| part.split('=').next().unwrap());
                for part in parts.filter(|_| !["-L", "--label"].contains(&option.as_str())) {
                    let bad = [
                        "name", "file", "logdev", "rtdev", "device", "offset", "journal_dev",
                        "root_owner", "options", "list-all",
                    ];
                    prop_assert!(!bad.contains(&part), "{} {:?}", fs, args);
                }
            }
            let letters = args.iter().filter(|arg| arg.starts_with('-'));
            for option in letters {
                let bad: &[&str] = match fs {
                    FsType::Ext4 => &["-c", "-d", "-l", "-n", "-t", "-z", "-S", "-V"],
                    FsType::Xfs => &["-c", "-p", "-r", "-N", "-V"],
                    FsType::Btrfs => &["-r", "-b", "-V", "-h", "--rootdir", "--shrink", "--help"],
                };
                prop_assert!(!bad.contains(&option.as_str()), "{} {:?}", fs, args);
            }
            // The result does not depend on the spelling.
            let again = args.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ");
            prop_assert_eq!(parse_options(fs, &again).unwrap(), args);
        }
    }
}

#[test]
fn a_message_has_no_usage() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("image");
    std::fs::File::create(&file)
        .and_then(|file| file.set_len(512 << 20))
        .unwrap();
    for (fs, bad, word) in [
        (FsType::Xfs, ["-b", "size=3"], "3"),
        (FsType::Ext4, ["-b", "3"], "block size"),
        (FsType::Btrfs, ["-n", "3"], "3"),
    ] {
        let command = command(fs, &file, &bad.map(str::to_owned), true, false);
        let done = Command::new(command.program)
            .args(&command.args)
            .output()
            .unwrap();
        assert!(!done.status.success(), "{fs}");
        let output = String::from_utf8_lossy(&done.stderr);
        let said = message(&output);
        assert!(
            said.contains(word) && !said.contains("sage:"),
            "{fs}: {said}"
        );
        assert!(said.lines().count() < 5, "{fs}: {said}");
    }
    assert_eq!(message("Usage: mkfs\n"), "Usage: mkfs");
    assert_eq!(message(" killed\n"), "killed");
}
