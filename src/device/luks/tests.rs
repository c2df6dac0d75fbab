use std::os::unix::fs::FileExt as _;

use testkit::skip_test;

use super::*;
use crate::device::scratch::Scratch;

const MIB: u64 = 1 << 20;
const DOMAIN: &str = "cluster c";

/// Closed when dropped.
struct Name(String);

impl Name {
    /// Of this test's own; none where the kernel has no dm-crypt.
    fn new(test: &str) -> Option<Self> {
        if fs::exists("/sys/module/dm_crypt").unwrap() {
            return Some(Self(format!("uring-csi-{test}-{}", std::process::id())));
        }
        skip_test("the kernel module dm_crypt is not loaded here");
        None
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        // A test that failed half-way says so itself.
        let _ = close(&self.0);
    }
}

fn node(scratch: &Scratch) -> BlockDev {
    BlockDev::of(scratch.device.dev).unwrap()
}

fn secret(text: &str) -> Secret {
    Secret::new(text.to_owned())
}

#[test]
fn a_blank_device_is_formatted_opened_grown_and_closed() {
    let Some(name) = Name::new("life") else {
        return;
    };
    let scratch = Scratch::new(64 * MIB);
    let (under, passphrase) = (node(&scratch), secret("a passphrase"));
    assert_eq!(look(&under).unwrap(), LuksContent::Blank);
    format(&under, &passphrase, PassphraseOrigin::People, DOMAIN).unwrap();
    assert_eq!(look(&under).unwrap(), LuksContent::Header);

    let refused = open(&under, &name.0, &secret("another"), false, DOMAIN);
    assert!(
        matches!(refused, Err(LuksError::Passphrase { .. })),
        "{refused:?}"
    );
    let (over, done) = open(&under, &name.0, &passphrase, false, DOMAIN).unwrap();
    assert_eq!(done, Done::Now);
    assert_eq!(
        open(&under, &name.0, &passphrase, false, DOMAIN).unwrap(),
        (over.clone(), Done::Already)
    );
    let mapping = find(&name.0).unwrap().unwrap();
    assert_eq!((mapping.over, mapping.under), (over.dev, under.dev));

    let size = sysfs::size_bytes(over.dev).unwrap();
    let file = File::options()
        .read(true)
        .write(true)
        .open(&over.node)
        .unwrap();
    file.write_all_at(b"some text", 4096).unwrap();
    let refused = close(&name.0);
    assert!(
        matches!(refused, Err(LuksError::Busy { .. })),
        "{refused:?}"
    );
    drop(file);
    scratch.image.as_file().set_len(96 * MIB).unwrap();
    crate::device::loopdev::resize(&scratch.device).unwrap();
    // As a raw volume that is published read-only.
    let mark = |it| block::set_read_only(File::open(&over.node).unwrap(), it).unwrap();
    mark(true);
    let refused = resize(&name.0);
    assert!(
        matches!(refused, Err(LuksError::ReadOnly { .. })),
        "{refused:?}"
    );
    find_open(&under, &name.0, false).unwrap().unwrap();
    mark(false);
    assert!(!sysfs::is_read_only(over.dev).unwrap());
    assert_eq!(resize(&name.0).unwrap(), size + 32 * MIB);

    assert_eq!(close(&name.0).unwrap(), Done::Now);
    assert_eq!(close(&name.0).unwrap(), Done::Already);
    let (over, _) = open(&under, &name.0, &passphrase, true, DOMAIN).unwrap();
    let mut text = [0; 9];
    let file = File::open(&over.node).unwrap();
    file.read_exact_at(&mut text, 4096).unwrap();
    assert_eq!(&text, b"some text");
    assert!(sysfs::is_read_only(over.dev).unwrap());
}

/// What a cryptsetup leaves that is killed in luksOpen: a mapping without a table, or with one
/// that is not in force yet.
#[test]
fn a_mapping_whose_open_was_interrupted_is_opened_and_closed() {
    let Some(name) = Name::new("interrupted") else {
        return;
    };
    let scratch = Scratch::new(32 * MIB);
    let (under, passphrase) = (node(&scratch), secret("a passphrase"));
    format(&under, &passphrase, PassphraseOrigin::Random, DOMAIN).unwrap();
    let dmsetup =
        |action, args: &[&str]| run_program("dmsetup", action, args, &name.0, b"", || {}).is_ok();
    let uuid = format!("CRYPT-LUKS2-{:032}-{}", 1, name.0);
    let table = format!("0 1024 linear {} 0", under.node.display());
    let is_there = || dmsetup("info", &[&name.0]);
    for with_table in [false, true] {
        let leave = || {
            assert!(dmsetup("create", &[&name.0, "--notable", "--uuid", &uuid]));
            assert!(!with_table || dmsetup("load", &[&name.0, "--table", &table]));
        };
        leave();
        let (over, done) = open(&under, &name.0, &passphrase, false, DOMAIN).unwrap();
        assert_eq!(done, Done::Now, "with a table: {with_table}");
        assert!(sysfs::size_bytes(over.dev).unwrap() > 0);
        assert_eq!(close(&name.0).unwrap(), Done::Now);
        if with_table {
            leave();
            assert_eq!(close(&name.0).unwrap(), Done::Now);
        }
        assert!(!is_there());
    }
}

#[test]
fn a_handle_of_any_length_and_characters_is_opened() {
    assert_eq!(name_of("0001-0024-c"), "luks-rbd-0001-0024-c");
    let [first, second] = ["a", "b"].map(|end| name_of(&format!("{}{end}", "x".repeat(127))));
    assert_ne!(first, second);
    for handle in ["x".repeat(118), "x".repeat(119), "an image Ω".to_owned()] {
        let handle = format!("{}{}", &handle, std::process::id());
        let Some(_) = Name::new("any") else {
            return;
        };
        let name = Name(name_of(&handle));
        assert!(name.0.len() <= LONGEST_NAME);
        let scratch = Scratch::new(32 * MIB);
        let (under, passphrase) = (node(&scratch), secret("a passphrase"));
        format(&under, &passphrase, PassphraseOrigin::Random, DOMAIN).unwrap();
        let opened = open(&under, &name.0, &passphrase, false, DOMAIN);
        assert_eq!(opened.unwrap().1, Done::Now);
    }
}

#[test]
fn a_mapping_over_another_device_is_not_taken_for_this() {
    let Some(name) = Name::new("other") else {
        return;
    };
    let (one, other) = (Scratch::new(32 * MIB), Scratch::new(32 * MIB));
    let passphrase = secret("a passphrase");
    for scratch in [&one, &other] {
        format(
            &node(scratch),
            &passphrase,
            PassphraseOrigin::Random,
            DOMAIN,
        )
        .unwrap();
    }
    let _ = open(&node(&one), &name.0, &passphrase, false, DOMAIN).unwrap();
    let refused = open(&node(&other), &name.0, &passphrase, false, DOMAIN);
    assert!(
        matches!(refused, Err(LuksError::Other { .. })),
        "{refused:?}"
    );
}

#[test]
fn a_device_with_data_is_not_taken_for_blank() {
    let scratch = Scratch::new(4 * MIB);
    scratch.open().write_all_at(b"data", MIB).unwrap();
    assert_eq!(look(&node(&scratch)).unwrap(), LuksContent::Unknown(MIB));
    let under = node(&scratch);
    let path = under.node.to_string_lossy();
    let made = exec::run("mke2fs", &["-q", "-F", &path], &[], b"", || {}).unwrap();
    assert!(made.status.success());
    let refused = look(&node(&scratch)).unwrap_err();
    assert!(matches!(refused, LuksError::Foreign { .. }), "{refused}");
}

#[test]
fn a_partial_luks_header_is_recognised() {
    let Some(name) = Name::new("key") else {
        return;
    };
    let scratch = Scratch::new(32 * MIB);
    let under = node(&scratch);
    format(&under, &secret("one"), PassphraseOrigin::Random, DOMAIN).unwrap();
    assert!(is_whole(&under).unwrap());
    let path = under.node.to_string_lossy();
    cryptsetup("luksErase", &["--batch-mode", &path], &path).unwrap();
    let is_refused = |under: &BlockDev| {
        assert_eq!(look(under).unwrap(), LuksContent::Header);
        assert!(!is_whole(under).unwrap());
        let refused = open(under, &name.0, &secret("one"), false, DOMAIN);
        assert!(
            matches!(refused, Err(LuksError::Unfinished { .. })),
            "{refused:?}"
        );
    };
    is_refused(&under);
    // Before there is a checksum.
    let scratch = Scratch::new(32 * MIB);
    scratch
        .open()
        .write_all_at(b"LUKS\xBA\xBE\0\x02\0\0\0\0\0\0\x40", 0)
        .unwrap();
    is_refused(&node(&scratch));
}

#[test]
fn a_mapping_being_removed_is_ignored() {
    let block = tempfile::tempdir().unwrap();
    let device = block.path().join("dm-7");
    fs::create_dir_all(device.join("dm")).unwrap();
    for (file, text) in [
        ("dev", "254:7\n"),
        ("dm/name", "some\n"),
        ("dm/uuid", "CRYPT-LUKS2-some\n"),
    ] {
        fs::write(device.join(file), text).unwrap();
    }
    let found = || mappings(block.path()).unwrap().pop();
    assert!(found().is_none(), "without a directory of what is below");
    let slaves = device.join("slaves");
    fs::create_dir(&slaves).unwrap();
    assert!(found().is_none(), "with nothing in it");
    fs::create_dir(slaves.join("rbd0")).unwrap();
    assert!(found().is_none(), "that has no number");
    fs::write(slaves.join("rbd0/dev"), "252:0\n").unwrap();
    let mapping = found().unwrap();
    assert_eq!(mapping.name, "some");
    assert_eq!((mapping.over.minor, mapping.under.major), (7, 252));
}
