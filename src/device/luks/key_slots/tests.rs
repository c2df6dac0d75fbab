//! cryptsetup changes a header in a file as it does on a device.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::Path,
    process::Command,
};

use super::{
    super::{PassphraseOrigin, failed},
    *,
};
use crate::kernel::Dev;

/// A header in a file, and beside it the stored passphrase.
struct Encrypted(tempfile::TempDir);

impl Encrypted {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let this = Self(dir);
        let image = this.0.path().join("image");
        File::create(&image).unwrap().set_len(20 << 20).unwrap();
        let under = BlockDev {
            dev: Dev { major: 0, minor: 0 },
            node: image,
        };
        let old = Secret::new("the first".to_owned());
        super::super::format(&under, &old, PassphraseOrigin::Random, "d").unwrap();
        store(this.0.path(), &old);
        this
    }

    fn slots(&self) -> KeySlots<'static> {
        slots_in(self.0.path())
    }

    fn stored(&self) -> Secret {
        stored_in(self.0.path())
    }

    fn rotate(&self) -> Result<(), LuksError> {
        rotate(self.0.path())
    }

    /// The slots that there are, of which the stored passphrase opens the first returned.
    fn opened(&self) -> (u32, Vec<u32>) {
        let slots = self.slots();
        let header = slots.header().unwrap();
        assert_eq!(header.rotations().count(), 0);
        let all: Vec<u32> = header.keyslots.into_keys().collect();
        let first = slots.opening(&all, &self.stored()).unwrap();
        (first.expect("the stored passphrase opens it"), all)
    }

    /// Wipes the key of a slot, which the metadata keeps.
    fn wipe(&self, slot: u32) {
        let node = &self.slots().node;
        let dump = cryptsetup("luksDump", &["--dump-json-metadata", node], node).unwrap();
        let dump: serde_json::Value = serde_json::from_slice(&dump).unwrap();
        let area = &dump["keyslots"][slot.to_string()]["area"];
        let number = |field: &str| area[field].as_str().unwrap().parse::<u64>().unwrap();
        let image = File::options().write(true).open(node).unwrap();
        let zeros = vec![0; usize::try_from(number("size")).unwrap()];
        image.write_all_at(&zeros, number("offset")).unwrap();
    }

    /// Adds an administrator's key to a slot.
    fn add(&self, slot: u32) {
        let key = Secret::new("an administrator's".to_owned());
        self.slots()
            .add((slot, 1000), &self.stored(), &key)
            .unwrap();
    }
}

fn slots_in(dir: &Path) -> KeySlots<'static> {
    let node = dir.join("image").display().to_string();
    KeySlots { node, domain: "d" }
}

fn stored_in(dir: &Path) -> Secret {
    Secret::new(fs::read_to_string(dir.join("stored")).unwrap())
}

fn store(dir: &Path, passphrase: &Secret) {
    fs::write(dir.join("storing"), passphrase.reveal()).unwrap();
    fs::rename(dir.join("storing"), dir.join("stored")).unwrap();
}

/// A rotation as the device's backend makes it.
fn rotate(dir: &Path) -> Result<(), LuksError> {
    let (slots, old) = (slots_in(dir), stored_in(dir));
    slots.finish(&old, || {
        store(dir, &old);
        Ok::<_, LuksError>(())
    })?;
    let new = crate::ceph::csi_format::encryption::generate();
    slots.replace(&old, &new, || {
        store(dir, &new);
        Ok(())
    })
}

#[test]
fn a_rotation_replaces_the_passphrase_in_its_slot() {
    let encrypted = Encrypted::new();
    for _ in 0..2 {
        let old = encrypted.stored();
        encrypted.rotate().unwrap();
        assert_eq!(encrypted.opened(), (0, vec![0]));
        assert_eq!(encrypted.slots().opening(&[0], &old).unwrap(), None);
    }
}

#[test]
fn the_keys_of_an_administrator_stay() {
    let encrypted = Encrypted::new();
    encrypted.add(1);
    encrypted.add(5);
    encrypted.rotate().unwrap();
    assert_eq!(encrypted.opened(), (0, vec![0, 1, 5]));
    // In the slot that a rotation prefers.
    let slots = encrypted.slots();
    let own = encrypted.stored();
    slots.add((7, 1000), &own, &own).unwrap();
    slots.kill(0, &own).unwrap();
    encrypted.add(0);
    encrypted.rotate().unwrap();
    let (current, all) = encrypted.opened();
    assert_eq!((current, all), (2, vec![0, 1, 2, 5]));
    // And back where it is free again.
    slots.kill(0, &encrypted.stored()).unwrap();
    encrypted.rotate().unwrap();
    assert_eq!(encrypted.opened(), (0, vec![0, 1, 5]));
}

#[test]
fn a_passphrase_that_opens_nothing_changes_nothing() {
    let encrypted = Encrypted::new();
    let before = fs::read(encrypted.0.path().join("image")).unwrap();
    let own = encrypted.stored();
    store(encrypted.0.path(), &Secret::new("another".to_owned()));
    let refused = encrypted.rotate().unwrap_err();
    assert!(matches!(refused, LuksError::Passphrase { .. }), "{refused}");
    assert!(before == fs::read(encrypted.0.path().join("image")).unwrap());
    // The only key is never killed.
    let refused = encrypted.slots().kill(0, &own).unwrap_err();
    assert!(matches!(refused, LuksError::Passphrase { .. }), "{refused}");
}

#[test]
fn a_header_without_a_free_slot_is_refused() {
    let encrypted = Encrypted::new();
    for slot in 1..SLOTS {
        encrypted.add(slot);
    }
    let refused = encrypted.rotate().unwrap_err();
    assert!(matches!(refused, LuksError::NoSlot { .. }), "{refused}");
    encrypted.opened();
}

#[test]
fn a_passphrase_that_may_be_stored_is_kept() {
    let encrypted = Encrypted::new();
    let dir = encrypted.0.path();
    for stored in [false, true] {
        let old = encrypted.stored();
        let new = crate::ceph::csi_format::encryption::generate();
        let failed = encrypted.slots().replace(&old, &new, || {
            if stored {
                store(dir, &new);
            }
            Err(failed("store")(std::io::ErrorKind::TimedOut.into()))
        });
        failed.unwrap_err();
        // Either is there, whichever is stored.
        let slots = encrypted.slots();
        let all: Vec<u32> = slots.header().unwrap().keyslots.into_keys().collect();
        for passphrase in [&old, &new] {
            assert!(slots.opening(&all, passphrase).unwrap().is_some());
        }
        let kept = encrypted.stored();
        slots.finish(&kept, || Ok::<_, LuksError>(())).unwrap();
        let (_, all) = encrypted.opened();
        assert_eq!(all.len(), 1);
        encrypted.rotate().unwrap();
        assert_eq!(encrypted.opened(), (0, vec![0]));
    }
}

#[test]
#[ignore = "the victim of the test below"]
fn victim() {
    let dir = std::env::var("VICTIM_IMAGE").expect("run by the test below");
    rotate(Path::new(&dir)).unwrap();
}

/// Whether it was ended before it was done.
fn crashes(dir: &Path, at: usize) -> bool {
    let victim = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", "--test-threads=1"])
        .arg("device::luks::key_slots::tests::victim")
        .env("CRASH_AT", at.to_string())
        .env("VICTIM_IMAGE", dir)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&victim.stdout);
    let crashed = std::os::unix::process::ExitStatusExt::signal(&victim.status).is_some();
    assert!(crashed || victim.status.success(), "{said}");
    crashed
}

#[test]
fn a_key_added_after_a_killed_rotation_stays() {
    let of_administrator = Secret::new("an administrator's".to_owned());
    // It was killed before it had a key in slot 31, or after it had left slot 0.
    for slot in [31, 0] {
        let encrypted = Encrypted::new();
        let (slots, stored) = (encrypted.slots(), encrypted.stored());
        let replaced = slots.header().unwrap();
        let replaced = replaced.keyslots[&0].salt().unwrap();
        slots.add_token(&[0, 31], 4000, replaced).unwrap();
        if slot == 0 {
            slots.add((31, 4000), &stored, &stored).unwrap();
            slots.kill(0, &stored).unwrap();
        }
        encrypted.add(slot);
        encrypted.rotate().unwrap();
        let opens = slots.opening(&[slot], &of_administrator).unwrap();
        assert!(opens.is_some(), "slot {slot}");
        assert_eq!(encrypted.opened().1.len(), 2, "slot {slot}");
    }
}

/// cryptsetup removes a slot in two steps: it wipes the key, then changes the metadata.
#[test]
fn a_slot_that_a_killed_cryptsetup_has_wiped_is_removed() {
    // The slot of the replaced key, and the one aside.
    for slot in [0, 31] {
        let encrypted = Encrypted::new();
        let (slots, stored) = (encrypted.slots(), encrypted.stored());
        let header = slots.header().unwrap();
        let replaced = header.keyslots[&0].salt().unwrap();
        slots.add_token(&[0, 31], 4000, replaced).unwrap();
        slots.add((31, 4000), &stored, &stored).unwrap();
        if slot == 31 {
            slots.kill(0, &stored).unwrap();
            slots.add((0, 4000), &stored, &stored).unwrap();
        }
        encrypted.wipe(slot);
        assert_eq!(slots.opening(&[slot], &stored).unwrap(), None);
        encrypted.rotate().unwrap();
        assert_eq!(encrypted.opened(), (0, vec![0]), "slot {slot}");
    }
}

#[test]
fn a_rotation_may_be_killed_at_each_step() {
    let encrypted = Encrypted::new();
    encrypted.add(3);
    let dir = encrypted.0.path();
    let mut at = 0;
    while crashes(dir, at) {
        let slots = encrypted.slots();
        let all: Vec<u32> = slots.header().unwrap().keyslots.into_keys().collect();
        assert!(all.len() <= 3, "after step {at}: {all:?}");
        let opens = slots.opening(&all, &encrypted.stored()).unwrap();
        assert!(opens.is_some(), "after step {at}: {all:?}");
        // Every other time the next rotation is killed, too.
        if at % 2 == 0 {
            encrypted.rotate().unwrap();
            assert_eq!(encrypted.opened(), (0, vec![0, 3]), "after step {at}");
        }
        at += 1;
    }
    assert!(at > 6, "a rotation has more than {at} steps");
    assert_eq!(encrypted.opened(), (0, vec![0, 3]));
}
