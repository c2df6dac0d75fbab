use std::{
    fs::File,
    os::unix::fs::FileExt,
    path::Path,
    process::{Command, Stdio},
};

use proptest::prelude::*;
use tempfile::NamedTempFile;

use super::*;

/// A sparse file of zeros.
fn image(bytes: u64) -> NamedTempFile {
    let image = NamedTempFile::new_in("/dev/shm").unwrap();
    image.as_file().set_len(bytes).unwrap();
    image
}

fn run(command: &str, path: &Path) {
    let mut words = command.split_whitespace();
    let output = Command::new(words.next().unwrap())
        .args(words)
        .arg(path)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    // e2fsck(8): errors were corrected. Removing the journal leaves an orphan file.
    let corrected = command.starts_with("e2fsck") && output.status.code() == Some(1);
    assert!(
        output.status.success() || corrected,
        "{command}: {output:?}"
    );
}

fn probe(file: &File) -> Content {
    let size = file.metadata().unwrap().len();
    content_of(file, size).unwrap()
}

fn made_by(command: &str, bytes: u64) -> (NamedTempFile, Content) {
    let image = image(bytes);
    run(command, image.path());
    let content = probe(image.as_file());
    (image, content)
}

fn info(content: Content) -> FsInfo {
    match content {
        Content::Fs(info) => info,
        other => panic!("{other:?} is not a file system"),
    }
}

#[test]
fn zeros_are_blank() {
    for size in [512, 4096, 300 * KIB, MIB, 100 * MIB + 512, 10 * GIB] {
        assert_eq!(probe(image(size).as_file()), Content::Blank, "{size}");
    }
    assert_eq!(classify(0, &[]), Content::Unknown { offset: 0 });
}

#[test]
fn file_systems_of_mkfs_are_recognised() {
    for (command, fs) in [
        (
            "mkfs.ext4 -q -U 00112233-4455-6677-8899-aabbccddeeff",
            FsType::Ext4,
        ),
        (
            "mkfs.ext4 -q -b 1024 -O ^metadata_csum,^64bit -U 00112233-4455-6677-8899-aabbccddeeff",
            FsType::Ext4,
        ),
        (
            "mkfs.ext3 -q -U 00112233-4455-6677-8899-aabbccddeeff",
            FsType::Ext4,
        ),
        (
            "mkfs.ext2 -q -U 00112233-4455-6677-8899-aabbccddeeff",
            FsType::Ext4,
        ),
        (
            "mkfs.xfs -q -m uuid=00112233-4455-6677-8899-aabbccddeeff",
            FsType::Xfs,
        ),
        (
            "mkfs.xfs -q -m crc=0,uuid=00112233-4455-6677-8899-aabbccddeeff",
            FsType::Xfs,
        ),
        (
            "mkfs.xfs -q -s size=4096 -m uuid=00112233-4455-6677-8899-aabbccddeeff",
            FsType::Xfs,
        ),
        (
            "mkfs.btrfs -q -U 00112233-4455-6677-8899-aabbccddeeff",
            FsType::Btrfs,
        ),
        (
            "mkfs.btrfs -q --csum xxhash -U 00112233-4455-6677-8899-aabbccddeeff",
            FsType::Btrfs,
        ),
    ] {
        let bytes = 320 * MIB;
        let (_image, content) = made_by(command, bytes);
        let info = info(content);
        assert_eq!(info.fs, fs, "{command}");
        assert_eq!(info.bytes, bytes, "{command}");
        assert_eq!(info.uuid[..3], [0x00, 0x11, 0x22], "{command}");
        assert!(!info.dirty && !info.needs_recovery, "{command}: {info:?}");
    }
}

/// With either, the kernel or e2fsck would open another device of the node.
#[test]
fn an_ext4_that_reaches_beyond_its_device_is_foreign() {
    let (image, _) = made_by("mkfs.ext4 -q", 64 * MIB);
    let tool = |program: &str, args: &[&str]| {
        let run = Command::new(program).args(args).arg(image.path()).output();
        assert!(run.unwrap().status.success(), "{program} {args:?}");
    };
    let content = || content_of(image.as_file(), 64 * MIB).unwrap();
    let foreign = |word: &str| match content() {
        Content::Foreign { what } => assert!(what.contains(word), "{what}"),
        other => panic!("{other:?}"),
    };
    tool("tune2fs", &["-E", "mount_opts=journal_path=/dev/sda"]);
    foreign("mount options");
    tool("tune2fs", &["-E", "mount_opts="]);
    assert!(matches!(content(), Content::Fs(_)));

    tool("debugfs", &["-w", "-R", "ssv journal_inum 0"]);
    foreign("journal");
    tool("tune2fs", &["-f", "-O", "^has_journal"]);
    assert!(matches!(content(), Content::Fs(_)));
}

/// e2fsck opens the device that these fields name even if the journal is internal, or
/// there is none.
#[test]
fn an_ext4_that_names_another_device_without_need_is_foreign() {
    for made in ["mkfs.ext4 -q", "mkfs.ext4 -q -O ^has_journal"] {
        let (image, _) = made_by(made, 64 * MIB);
        for set in [
            "journal_uuid 00112233-4455-6677-8899-aabbccddeeff",
            "journal_dev 0x700",
        ] {
            let copy = NamedTempFile::new_in("/dev/shm").unwrap();
            std::fs::copy(image.path(), copy.path()).unwrap();
            let run = Command::new("debugfs")
                .args(["-w", "-R", &format!("ssv {set}")])
                .arg(copy.path())
                .output();
            assert!(run.unwrap().status.success(), "{set}");
            let content = probe(copy.as_file());
            assert!(
                matches!(content, Content::Foreign { what } if what.contains("journal")),
                "{made}, {set}: {content:?}"
            );
        }
    }
}

/// The content that the programs themselves write to the fields of an external journal.
#[test]
fn an_ext4_with_its_journal_inside_or_none_is_not_taken_for_one_with_it_elsewhere() {
    for made in [
        "mkfs.ext4 -q",
        "mkfs.ext2 -q",
        "mkfs.ext4 -q -b 1024 -O ^metadata_csum",
    ] {
        let (image, _) = made_by(made, 64 * MIB);
        for command in [
            "e2fsck -f -p",
            "tune2fs -U random",
            "e2fsck -f -p",
            "resize2fs",
            "tune2fs -O has_journal",
            "tune2fs -O ^has_journal",
            "e2fsck -f -p",
        ] {
            image.as_file().set_len(128 * MIB).unwrap();
            run(command, image.path());
            info(probe(image.as_file()));
        }
    }
}

#[test]
fn ext4_reports_a_needed_check_or_journal_replay() {
    let (image, clean) = made_by("mkfs.ext4 -q", 64 * MIB);
    for (field, value) in [("state", "3"), ("feature_incompat", "0x2c6")] {
        let request = format!("ssv {field} {value}");
        let set = Command::new("debugfs")
            .args(["-w", "-R", &request])
            .arg(image.path())
            .output()
            .unwrap();
        assert!(set.status.success());
    }
    let now = info(probe(image.as_file()));
    assert!(now.dirty && now.needs_recovery, "{now:?}");
    assert_eq!(
        FsInfo {
            dirty: false,
            needs_recovery: false,
            ..now
        },
        info(clean)
    );
}

#[test]
fn a_damaged_superblock_is_neither_a_file_system_nor_blank() {
    for (command, at) in [
        ("mkfs.ext4 -q", 1024 + 0x80),
        ("mkfs.xfs -q", 150),
        ("mkfs.btrfs -q", 64 * KIB + 0x70),
    ] {
        let (image, _) = made_by(command, 320 * MIB);
        image.as_file().write_all_at(&[0xA5; 4], at).unwrap();
        let content = probe(image.as_file());
        assert!(
            matches!(content, Content::Foreign { what } if what.contains("damaged")),
            "{command}: {content:?}"
        );
    }
}

#[test]
fn a_lost_superblock_is_found_by_its_backups() {
    for (command, bytes) in [("mkfs.ext4 -q", 320 * MIB), ("mkfs.btrfs -q", 320 * MIB)] {
        let (image, _) = made_by(command, bytes);
        let head = vec![0; usize::try_from(2 * MIB).unwrap()];
        image.as_file().write_all_at(&head, 0).unwrap();
        let content = probe(image.as_file());
        assert!(
            matches!(content, Content::Foreign { what } if what.contains("is missing")),
            "{command}: {content:?}"
        );
    }
}

#[test]
fn the_remains_of_a_killed_mkfs_are_a_partial_format() {
    // Each without its last write.
    for (command, at, bytes) in [
        ("mkfs.ext4 -q", 1024, &[0; 1024][..]),
        ("mkfs.xfs -q", 126, &[1]),
        ("mkfs.btrfs -q", 64 * KIB + 0x40, b"!"),
        ("mkfs.btrfs -q", 64 * KIB, &[0; 4096]),
    ] {
        let (image, whole) = made_by(command, 320 * MIB);
        assert!(!whole.is_partial_format(), "{command}");
        image.as_file().write_all_at(bytes, at).unwrap();
        let content = probe(image.as_file());
        assert!(content.is_partial_format(), "{command}: {content:?}");
    }
    // A damaged superblock is no partial format: its mkfs had ended.
    let (image, _) = made_by("mkfs.ext4 -q", 320 * MIB);
    image.as_file().write_all_at(&[0xA5], 1024 + 0x80).unwrap();
    assert!(!probe(image.as_file()).is_partial_format());
    assert!(!Content::Blank.is_partial_format());
}

#[test]
fn superblocks_of_two_file_systems_are_foreign() {
    let (image, _) = made_by("mkfs.btrfs -q", 320 * MIB);
    let mut other = vec![0; 4096];
    image.as_file().read_exact_at(&mut other, 64 * KIB).unwrap();
    run("mkfs.ext4 -q -F", image.path());
    image.as_file().write_all_at(&other, 64 * KIB).unwrap();
    let what = "superblocks of more than one file system";
    assert_eq!(probe(image.as_file()), Content::Foreign { what });
}

#[test]
fn foreign_signatures_are_named() {
    let size = 64 * MIB + 512;
    let last = size / ALIGN * ALIGN;
    for (at, bytes, what) in [
        (0, &b"LUKS\xBA\xBE\0\x02"[..], "LUKS"),
        (512, b"LABELONE", "LVM"),
        (4096, b"\xFC\x4E\x2B\xA9", "md"),
        (last - 8 * KIB, b"\xFC\x4E\x2B\xA9", "md"),
        (64 * MIB - 64 * KIB, b"\xFC\x4E\x2B\xA9", "md"),
        (size - 512, b"EFI PART", "GPT"),
        (size - 4096 + 60, b"\x83\x74\x02\x6D", "DRBD"),
        (0, b"bluestore block device\n", "BlueStore"),
        (32 * KIB + 1, b"CD001", "ISO"),
        (1024, b"\x10\x20\xF5\xF2", "F2FS"),
        (0, b"hsqs", "squashfs"),
        (3, b"NTFS    ", "NTFS"),
        (82, b"FAT32   ", "FAT"),
        (0, b"QFI\xFB", "qcow2"),
    ] {
        let image = image(size);
        image.as_file().write_all_at(bytes, at).unwrap();
        let content = probe(image.as_file());
        assert!(
            matches!(content, Content::Foreign { what: is } if is.contains(what)),
            "{what}: {content:?}"
        );
        assert!(!content.is_partial_format(), "{what}");
    }
}

#[test]
fn zfs_is_seen_by_each_of_its_labels() {
    let size = 64 * MIB + 4096;
    for label in [0, 64 * MIB - 512 * KIB, 64 * MIB - 256 * KIB] {
        let image = image(size);
        let write = |bytes: &[u8], at| image.as_file().write_all_at(bytes, at).unwrap();
        write(&[1, 1, 0, 0], label + 16 * KIB);
        write(&0x00BA_B10C_u64.to_be_bytes(), label + 132 * KIB);
        let content = probe(image.as_file());
        assert!(
            matches!(content, Content::Foreign { what } if what.contains("ZFS")),
            "{label}: {content:?}"
        );
    }
}

#[test]
fn partition_tables_and_swap_of_the_real_tools_are_named() {
    for (label, what) in [("dos", "partition table"), ("gpt", "GPT")] {
        let image = image(64 * MIB);
        let script = format!("label: {label}\n,16M\n");
        // Otherwise it ends with a sync(2), which writes what other tests leave unwritten.
        let shell = format!("sfdisk -q --no-tell-kernel {}", image.path().display());
        let mut child = Command::new("sh")
            .args(["-c", &shell])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), script.as_bytes()).unwrap();
        assert!(child.wait().unwrap().success());
        let content = probe(image.as_file());
        assert!(
            matches!(content, Content::Foreign { what: is } if is.contains(what)),
            "{label}: {content:?}"
        );
    }
    let (_image, content) = made_by("mkswap", 64 * MIB);
    assert_eq!(content, Content::Foreign { what: "swap space" });
}

#[test]
fn signatures_at_the_end_count_outside_the_file_system_only() {
    let size = 320 * MIB;
    let (image, within) = made_by("mkfs.ext4 -q", size);
    let mark = |at| image.as_file().write_all_at(b"EFI PART", at).unwrap();
    mark(size - 512);
    assert_eq!(probe(image.as_file()), within);
    image.as_file().set_len(size + MIB).unwrap();
    mark(size + MIB - 512);
    assert!(matches!(probe(image.as_file()), Content::Foreign { .. }));
}

#[test]
fn unknown_data_is_located() {
    let image = image(MIB + 8192);
    image.as_file().write_all_at(&[9], 100_000).unwrap();
    assert_eq!(probe(image.as_file()), Content::Unknown { offset: 100_000 });
}

#[test]
fn a_region_that_was_not_read_is_not_blank() {
    let size = 100 * MIB;
    let mut blocks: Vec<_> = regions(size)
        .into_iter()
        .map(|region| Block {
            offset: region.offset,
            data: vec![0; region.len],
        })
        .collect();
    assert_eq!(classify(size, &blocks), Content::Blank);
    blocks[1].data.pop();
    let offset = blocks[1].offset;
    assert_eq!(classify(size, &blocks), Content::Unknown { offset });
}

fn patches() -> impl Strategy<Value = Vec<(u64, Vec<u8>)>> {
    let places = prop_oneof![
        Just(0),
        Just(1024),
        Just(1024 + 0x18),
        Just(1024 + 0x38),
        Just(64 * KIB),
        Just(64 * KIB + 0x40),
        0..256 * KIB
    ];
    let bytes = prop_oneof![
        Just(b"XFSB".to_vec()),
        Just(vec![0x53, 0xEF]),
        Just(b"_BHRfS_M".to_vec()),
        proptest::collection::vec(any::<u8>(), 1..600),
    ];
    proptest::collection::vec((places, bytes), 0..6)
}

proptest! {
    #[test]
    fn regions_are_aligned_apart_and_within(size in 0_u64..1 << 51) {
        let mut end = 0;
        for region in regions(size) {
            prop_assert_eq!(region.offset % ALIGN, 0);
            prop_assert!(region.offset >= end && region.len > 0);
            end = region.offset + region.len as u64;
            prop_assert!(end == size || (end < size && end % ALIGN == 0));
        }
        prop_assert_eq!(end, size);
    }

    #[test]
    fn only_zeros_are_blank_and_nothing_panics(size in 512_u64..80 * MIB, patches in patches()) {
        let mut blocks: Vec<_> = regions(size)
            .into_iter()
            .map(|region| Block { offset: region.offset, data: vec![0; region.len] })
            .collect();
        for (at, bytes) in patches {
            let at = usize::try_from(at).unwrap();
            let head = &mut blocks[0].data;
            if let Some(place) = head.get_mut(at..at + bytes.len()) {
                place.copy_from_slice(&bytes);
            }
        }
        let zeros = blocks.iter().all(|block| block.data.iter().all(|byte| *byte == 0));
        prop_assert_eq!(classify(size, &blocks) == Content::Blank, zeros);
    }

    #[test]
    fn any_blocks_are_classified_without_a_panic(
        size in any::<u64>(),
        blocks in proptest::collection::vec(
            (any::<u64>(), proptest::collection::vec(any::<u8>(), 0..2048)), 0..4),
    ) {
        let blocks: Vec<_> = blocks
            .into_iter()
            .map(|(offset, data)| Block { offset, data })
            .collect();
        prop_assert_ne!(classify(size, &blocks), Content::Blank);
    }
}
