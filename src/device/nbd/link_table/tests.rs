//! Tests that need the nbd driver.

use std::fs;

use testkit::skip_test;

use super::{
    super::client::tests::{NBDKIT, Running},
    *,
};

const OPTIONS: LinkOptions = LinkOptions {
    connections: 1,
    request_seconds: 30,
    dead_seconds: 0,
    minimum_bytes: 0,
};

/// A device that the test disconnects on Drop.
struct Attached {
    driver: Driver,
    server: Option<Running>,
    links: Links,
    identifier: Identifier,
    device: NbdDevice,
}

impl Attached {
    /// A link that is not in the list yet, and its connections.
    fn new() -> Option<(Self, LinkState)> {
        if !fs::exists("/sys/module/nbd").unwrap() {
            skip_test("the kernel module nbd is not loaded here");
            return None;
        }
        let server = Running::start(NBDKIT, 1 << 20);
        let links = Links::new("driver.test");
        let identifier = links.identifier(&server.export("disk"), "volume");
        let driver = Driver::open().unwrap();
        let (device, _, connections) =
            attach(&driver, &links.0.identifiers, &identifier, false, &OPTIONS).unwrap();
        let attached = Self {
            driver,
            server: Some(server),
            links,
            identifier,
            device,
        };
        Some((attached, LinkState::new(connections)))
    }

    fn insert(&self, state: LinkState) {
        let inserted = self
            .links
            .insert(&self.identifier, &self.device, &OPTIONS, 0, state);
        inserted.unwrap();
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let _ = self
            .driver
            .disconnect(index_of(self.device.block.dev).unwrap());
    }
}

#[test]
fn a_device_is_checked_once_it_is_in_the_list() {
    let Some((mut it, state)) = Attached::new() else {
        return;
    };
    // The announcement is lost: no socket listens yet.
    it.server = None;
    it.insert(state);
    let event = lock(&it.links.0.events).as_mut().unwrap().try_recv();
    assert!(
        matches!(event, Ok(Event::Check(link)) if link.device.block.dev == it.device.block.dev)
    );
}

#[test]
fn a_device_gets_its_size_once_no_connection_is_dead() {
    let Some((it, state)) = Attached::new() else {
        return;
    };
    it.insert(state);
    let link = it.links.of(&it.identifier.export).unwrap();
    let size = || sysfs::size_bytes(it.device.block.dev).unwrap();
    // As the kernel's receiver of a replaced connection does.
    lock(&link.state).connections[0].shut();
    assert!(!link.resize(&it.driver, 2 << 20).unwrap());
    assert_eq!(size(), 1 << 20);
    // The kernel may take a moment to notice.
    while !link.resize(&it.driver, 2 << 20).unwrap() {
        link.reconnect(&it.links).unwrap();
    }
    assert_eq!(size(), 2 << 20);
}
