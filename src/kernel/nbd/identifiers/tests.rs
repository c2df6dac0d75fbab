//! Tests that need the nbd driver. Other tests attach devices meanwhile, and udevd looks at
//! them.

use std::{fs, process::Command, thread};

use testkit::{run, run_err};

use super::{
    super::{index_of, tests::Attached},
    *,
};

type Found = Identifiers<String>;

fn over(events: Option<PendingUevents>) -> Found {
    Identifiers::with(|text| Some(text.to_owned()), events)
}

fn listening() -> Found {
    over(Some(PendingUevents::listen().unwrap()))
}

fn finds(identifiers: &Found, identifier: &str) -> Option<NbdDevice> {
    let found = identifiers.find(|it| it == identifier).unwrap();
    found.map(|(device, _)| device)
}

/// Attaches and disconnects devices beside it, as other processes do.
fn check(identifiers: &Found) {
    assert_eq!(finds(identifiers, "none"), None);
    let Some(it) = Attached::new() else {
        return;
    };
    let first = it.identifier.clone();
    assert_eq!(finds(identifiers, &first).as_ref(), Some(&it.device));
    drop(it);
    // It stays attached for as long as udevd has it open.
    while finds(identifiers, &first).is_some() {
        thread::yield_now();
    }
    let it = Attached::new().unwrap();
    assert_eq!(
        finds(identifiers, &it.identifier).as_ref(),
        Some(&it.device)
    );
    assert_eq!(finds(identifiers, &first), None);
}

#[test]
fn a_device_that_another_process_attached_is_found() {
    check(&listening());
}

#[test]
fn a_device_is_found_without_uevents() {
    for events in [None, Some(PendingUevents::deaf())] {
        let identifiers = over(events);
        check(&identifiers);
        assert!(!identifiers.table().hears);
    }
}

/// The identifiers of an attached device, which was found.
fn attached() -> Option<(Attached, u32, Found)> {
    let identifiers = listening();
    let it = Attached::new()?;
    assert!(finds(&identifiers, &it.identifier).is_some());
    assert!(identifiers.table().hears);
    let index = index_of(it.device.block.dev).unwrap();
    Some((it, index, identifiers))
}

/// As udevd does, which makes it look at the device again.
fn announce(index: u32) {
    fs::write(format!("/sys/block/nbd{index}/uevent"), "change").unwrap();
}

#[test]
fn only_devices_with_a_uevent_are_read_again() {
    let Some((it, index, identifiers)) = attached() else {
        return;
    };
    // A look finds it nevertheless where udevd has just announced it.
    loop {
        assert!(identifiers.table().known.remove(&index).is_some());
        if finds(&identifiers, &it.identifier).is_none() {
            break;
        }
    }
    announce(index);
    assert!(finds(&identifiers, &it.identifier).is_some());
}

#[test]
fn a_match_is_read_again() {
    let Some((_it, index, identifiers)) = attached() else {
        return;
    };
    let stale = "stale".to_owned();
    identifiers.table().known.insert(index, stale);
    assert_eq!(finds(&identifiers, "stale"), None);
}

#[test]
fn a_device_that_is_attached_without_an_identifier_is_read_at_each_look() {
    let Some((_it, _, identifiers)) = attached() else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let mut nbdkit = Command::new("nbdkit");
    nbdkit.args(["--exit-with-parent", "--foreground", "--unix"]);
    let mut server = nbdkit.arg(&socket).args(["memory", "1M"]).spawn().unwrap();
    while !socket.exists() {
        thread::yield_now();
    }
    // By netlink it would have an empty one. Others take the first devices.
    let connect = |index: &u32| {
        let (socket, node) = (socket.to_str().unwrap(), node(*index));
        run_err(&["nbd-client", "-nonetlink", "-unix", socket, &node]).is_ok()
    };
    let indexes: BTreeSet<_> = sysfs::numbers("nbd").unwrap().into_iter().collect();
    let index = indexes.into_iter().rev().find(connect).unwrap();
    let is_unsure = || {
        assert_eq!(finds(&identifiers, "none"), None);
        let table = identifiers.table();
        table.changed.contains(&index) && !table.known.contains_key(&index)
    };
    // nbd-client attaches it in the background.
    while !is_unsure() {
        thread::yield_now();
    }
    assert!(is_unsure());
    run(&["nbd-client", "-d", &node(index)]);
    server.kill().unwrap();
    server.wait().unwrap();
}

fn node(index: u32) -> String {
    format!("/dev/nbd{index}")
}

#[test]
fn lost_uevents_make_a_look_read_all() {
    let identifiers = over(Some(PendingUevents::narrow()));
    let Some(it) = Attached::new() else {
        return;
    };
    assert!(finds(&identifiers, &it.identifier).is_some());
    let index = index_of(it.device.block.dev).unwrap();
    announce(index);
    identifiers.table().listen();
    assert!(identifiers.table().hears);
    for _ in 0..64 {
        announce(index);
    }
    identifiers.table().listen();
    assert!(identifiers.table().all_changed);
    assert!(finds(&identifiers, &it.identifier).is_some());
}
