//! udevd opens every device that comes or changes, to see what is on it, whenever
//! it gets to it: between any two steps of ours.

use std::fs;

use futures_util::future::join_all;

use crate::harness::{Content, MIB, Node, story};

const VOLUMES: usize = 16;

#[test]
#[ignore = "needs a running udevd: make test-kernel"]
fn fresh_devices_are_used_at_once_though_udevd_opens_each() {
    // udev_ctrl_new() of systemd: where udevadm finds it.
    assert!(
        fs::exists("/run/udev/control").unwrap(),
        "no udevd runs here"
    );
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volumes: Vec<_> = (0..VOLUMES)
            .map(|number| {
                let kind = ["ext4", "xfs", "btrfs", "block"][number % 4];
                let bytes = if kind == "xfs" { 320 } else { 160 } * MIB;
                sandbox.volume_in("main", &format!("v{number}"), kind, bytes)
            })
            .collect();
        let content = Content::new("raced");
        for round in 0..3 {
            // No call is repeated: the first answer must be the right one.
            join_all(volumes.iter().map(async |volume| {
                let target = node.up(volume, "pod").await;
                match (volume.is_block(), round) {
                    (true, 0) => content.write_at(&target, 0).unwrap(),
                    (true, _) => content.is_at(&target, 0),
                    (false, 0) => content.write(&target.join("file")),
                    (false, _) => content.is_in(&target.join("file")),
                }
                node.down(volume, "pod").await;
            }))
            .await;
        }
        node.assert_clean().await;
    });
}
