//! Tests that need the nbd driver.

use std::fs;

use super::{
    super::{index_of, tests::Attached},
    *,
};

type Found = Identifiers<String>;

fn over(events: Option<PendingUevents>) -> Found {
    Identifiers::with(|text| Some(text.to_owned()), events)
}

fn finds(identifiers: &Found, identifier: &str) -> Option<NbdDevice> {
    let found = identifiers.find(|it| it == identifier).unwrap();
    found.map(|(device, _)| device)
}

/// Attaches devices beside it, as other processes do.
fn check(identifiers: &Found) {
    assert_eq!(finds(identifiers, "none"), None);
    let Some(mut it) = Attached::new() else {
        return;
    };
    let before = it.identifier.clone();
    assert_eq!(finds(identifiers, &before).as_ref(), Some(&it.device));
    it.reattach();
    assert_eq!(finds(identifiers, &before), None);
    assert_eq!(
        finds(identifiers, &it.identifier).as_ref(),
        Some(&it.device)
    );
}

fn listening() -> PendingUevents {
    PendingUevents::listen().unwrap()
}

#[test]
fn a_device_that_another_process_attached_is_found() {
    check(&over(Some(listening())));
}

#[test]
fn a_device_is_found_without_uevents() {
    check(&over(None));
}

#[test]
fn only_devices_with_a_uevent_are_read_again() {
    let identifiers = over(Some(listening()));
    let Some(it) = Attached::new() else {
        return;
    };
    assert!(finds(&identifiers, &it.identifier).is_some());
    let index = index_of(it.device.block.dev).unwrap();
    // What a look at the device would find.
    let found = identifiers.table().known.remove(&index).unwrap();
    assert_eq!(found, it.identifier);
    assert_eq!(finds(&identifiers, &it.identifier), None);
    fs::write(format!("/sys/block/nbd{index}/uevent"), "change").unwrap();
    assert!(finds(&identifiers, &it.identifier).is_some());
}

#[test]
fn lost_uevents_make_a_look_read_all() {
    let identifiers = over(Some(PendingUevents::narrow()));
    assert_eq!(finds(&identifiers, "none"), None);
    let Some(it) = Attached::new() else {
        return;
    };
    let index = index_of(it.device.block.dev).unwrap();
    let before = identifiers.table().lost;
    // udevd looks at it after each.
    for _ in 0..64 {
        fs::write(format!("/sys/block/nbd{index}/uevent"), "change").unwrap();
    }
    assert!(finds(&identifiers, &it.identifier).is_some());
    assert!(identifiers.table().lost > before);
}

#[test]
fn an_attach_without_a_uevent_ends_the_listening() {
    let Some(it) = Attached::new() else {
        return;
    };
    let index = index_of(it.device.block.dev).unwrap();
    for (events, is_heard) in [(listening(), true), (PendingUevents::deaf(), false)] {
        let identifiers = over(Some(events));
        let announce = || {
            fs::write(format!("/sys/block/nbd{index}/uevent"), "change")?;
            Ok(index)
        };
        assert_eq!(identifiers.connect(announce).unwrap(), index);
        assert_eq!(identifiers.table().events.is_some(), is_heard);
        check(&identifiers);
    }
}
