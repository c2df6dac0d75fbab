//! udevd opens every device that comes or changes, to see what is on it, whenever
//! it gets to it: between any two steps of ours.

use std::{fs, path::Path};

use futures_util::future::join_all;
use rustix::mount::{MountFlags, mount};

use crate::harness::{Content, MIB, Node, left_out, run, story};

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

/// A pod makes a file system with the UUID of one of the node's on its raw volume.
#[test]
fn by_the_shipped_rule_udev_leaves_what_pods_write_alone() {
    if !Path::new("/usr/lib/udev/rules.d/60-persistent-storage.rules").exists() {
        return left_out("udev is not installed here");
    }
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let raw = sandbox.volume_in("main", "raw", "block", 16 * MIB);
        let target = node.up(&raw, "pod").await;
        let uuid = "11111111-2222-4333-8444-555555555555";
        run(&["mkfs.ext4", "-q", "-U", uuid, target.to_str().unwrap()]);
        // udev's own records, rules and links, in this story's mount namespace.
        for dir in ["/run/udev", "/dev/disk"] {
            fs::create_dir_all(dir).unwrap();
            mount("tmpfs", dir, "tmpfs", MountFlags::empty(), None).unwrap();
        }
        let device = crate::harness::loops_over(&sandbox.image(&raw)).remove(0);
        let sysfs = Path::new("/sys/block").join(device.file_name().unwrap());
        let link = format!("/dev/disk/by-uuid/{uuid}");
        let told = || run(&["udevadm", "test", "-a", "change", sysfs.to_str().unwrap()]);
        let property = |told: &str, name: &str| {
            let mut lines = told.lines().map(str::trim);
            let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
            value.unwrap_or_default().to_owned()
        };
        let unasked = told();
        assert_eq!(property(&unasked, "ID_FS_TYPE"), "ext4", "{unasked}");
        assert!(property(&unasked, "DEVLINKS").contains(&link), "{unasked}");

        let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/host");
        let rule = "59-uring-csi.rules";
        fs::create_dir("/run/udev/rules.d").unwrap();
        let rules = Path::new("/run/udev/rules.d");
        fs::copy(Path::new(shipped).join(rule), rules.join(rule)).unwrap();
        let told = told();
        assert_eq!(property(&told, "ID_FS_TYPE"), "", "{told}");
        assert_eq!(property(&told, "SYSTEMD_READY"), "0", "{told}");
        assert!(!property(&told, "DEVLINKS").contains(&link), "{told}");
        node.down(&raw, "pod").await;
        node.assert_clean().await;
    });
}
