use std::os::unix::fs::FileExt as _;

use super::*;
use crate::{
    device::{loopdev, luks::PassphraseOrigin, scratch::Scratch},
    secret::Secret,
};

const MIB: u64 = 1 << 20;
/// What cryptsetup leaves for a header.
const HEADER: u64 = 16 * MIB;

/// It needs no dm-crypt: a device of noise stands for the open mapping.
#[test]
fn the_data_of_an_encrypted_device_is_found_also_after_the_device_has_grown() {
    let (lower, over) = (Scratch::new(HEADER + 32 * MIB), Scratch::new(32 * MIB));
    let under = BlockDev::of(lower.device.dev).unwrap();
    let passphrase = Secret::new("a passphrase".to_owned());
    luks::format(&under, &passphrase, PassphraseOrigin::Random, "cluster c").unwrap();
    over.open().write_all_at(b"noise", 0).unwrap();
    let device = Device {
        encrypted: Some(under.clone()),
        ..over.as_volume_s()
    };
    let content = || {
        let looked = content_of(&Prober::default(), &device, None);
        looked.unwrap().expect("nobody else uses it").0
    };
    let grow = |bytes: u64| {
        lower.image.as_file().set_len(bytes).unwrap();
        loopdev::resize(&lower.device).unwrap();
    };
    assert_eq!(content(), Content::Blank);
    // By so much that all that a wrong place shows is new.
    grow(HEADER + 64 * MIB);
    assert_eq!(content(), Content::Blank);
    lower.open().write_all_at(b"data", HEADER + MIB).unwrap();
    assert_eq!(content(), Content::Unknown { offset: 0 });

    // Without a header nothing is proven.
    let (blank, unproven) = (Scratch::new(HEADER + 32 * MIB), &mut device.clone());
    unproven.encrypted = Some(BlockDev::of(blank.device.dev).unwrap());
    let looked = content_of(&Prober::default(), unproven, None);
    assert_eq!(looked.unwrap().unwrap().0, Content::Unknown { offset: 0 });
}
