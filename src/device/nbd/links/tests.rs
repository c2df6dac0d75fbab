//! On a kernel that has the driver.

use std::{env, fs};

use super::{
    super::client::tests::{NBDKIT, Running},
    *,
};

#[test]
fn a_device_is_looked_at_once_it_is_in_the_list() {
    if !fs::exists("/sys/module/nbd").unwrap() {
        assert!(env::var_os("TEST_ALL").is_none(), "nbd is not loaded");
        return;
    }
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
    // It is announced now, and to nobody.
    drop(server);
    let inserted = links.insert(&behind, &device, &options, Held::new(connections));
    driver.disconnect(index_of(device.dev).unwrap()).unwrap();
    inserted.unwrap();
    let event = lock(&links.0.events).as_mut().unwrap().try_recv();
    assert!(matches!(event, Ok(Event::Check(link)) if link.device.dev == device.dev));
}
