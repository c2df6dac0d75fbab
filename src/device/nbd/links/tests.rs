//! On a kernel that has the driver.

use std::fs;

use super::{
    super::client::tests::{NBDKIT, Running},
    *,
};

/// Makes a device and tells whether its connections are looked at once it is in
/// the list; meanwhile the server dies, or not.
fn is_looked_at(dies: bool) -> bool {
    let server = Running::start(NBDKIT, 1 << 20);
    let links = Links::new("driver.test");
    let behind = links.behind(&server.export("disk"), "volume");
    let options = Options {
        connections: 1,
        request_seconds: 30,
        dead_seconds: 0,
        minimum_bytes: 0,
    };
    let driver = Driver::open().unwrap();
    let (device, connections) = attach(&driver, &behind, false, &options).unwrap();
    if dies {
        drop(server);
    }
    links
        .insert(&behind, &device, &options, Held::new(connections))
        .unwrap();
    let event = lock(&links.0.events).as_mut().unwrap().try_recv();
    driver.disconnect(index_of(device.dev).unwrap()).unwrap();
    matches!(event, Ok(Event::Check(link)) if link.device.dev == device.dev)
}

#[test]
fn a_server_that_died_before_its_device_was_in_the_list_is_noticed() {
    if !fs::exists("/sys/module/nbd").unwrap() {
        eprintln!("NOT TESTED: the kernel module nbd is not loaded");
        return;
    }
    assert!(!is_looked_at(false));
    assert!(is_looked_at(true));
}
