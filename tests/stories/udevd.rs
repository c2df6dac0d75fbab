//! udevd opens every device that appears or changes, to probe it: between any two steps of
//! the agent.

use std::{
    fs,
    path::{Path, PathBuf},
};

use futures_util::future::join_all;
use rustix::mount::{MountFlags, mount};
use testkit::{Content, MIB, Node, Sandbox, loops_over, run, run_err, skip_test, story};

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
                    (true, _) => content.assert_at(&target, 0),
                    (false, 0) => content.write(&target.join("file")),
                    (false, _) => content.assert_in(&target.join("file")),
                }
                node.down(volume, "pod").await;
            }))
            .await;
        }
        node.assert_clean().await;
    });
}

/// udev's own records, rules and links, in the story's mount namespace.
struct Udev {
    sysfs: PathBuf,
}

const SYSTEMS: &str = "/usr/lib/udev/rules.d";
const RULES: &str = "/run/udev/rules.d";
const UUID: &str = "11111111-2222-4333-8444-555555555555";

impl Udev {
    /// For the device of this kernel name.
    fn of(device: &str) -> Self {
        for dir in ["/run/udev", "/dev/disk"] {
            fs::create_dir_all(dir).unwrap();
            mount("tmpfs", dir, "tmpfs", MountFlags::empty(), None).unwrap();
        }
        fs::create_dir(RULES).unwrap();
        let sysfs = Path::new("/sys/block").join(device);
        Self { sysfs }
    }

    fn is_installed() -> bool {
        Path::new(SYSTEMS)
            .join("60-persistent-storage.rules")
            .exists()
    }

    fn assert_looks(&self) {
        let properties = self.properties();
        assert_eq!(property(&properties, "ID_FS_TYPE"), "ext4", "{properties}");
        assert!(
            property(&properties, "DEVLINKS").contains(&link()),
            "{properties}"
        );
    }

    /// By the rules of `deploy/host`.
    fn assert_leaves_alone(&self) {
        let ours = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/host");
        let ours = fs::read_dir(ours).unwrap().map(|file| file.unwrap().path());
        for rule in ours {
            fs::copy(&rule, Path::new(RULES).join(rule.file_name().unwrap())).unwrap();
        }
        let properties = self.properties();
        assert_eq!(property(&properties, "ID_FS_TYPE"), "", "{properties}");
        assert_eq!(property(&properties, "SYSTEMD_READY"), "0", "{properties}");
        let lvm = property(&properties, "DM_UDEV_DISABLE_OTHER_RULES_FLAG");
        assert_eq!(lvm, "1", "{properties}");
        assert!(
            !property(&properties, "DEVLINKS").contains(&link()),
            "{properties}"
        );
    }

    /// The properties that udev sets when the device has changed.
    fn properties(&self) -> String {
        let sysfs = self.sysfs.to_str().unwrap();
        run(&["udevadm", "test", "-a", "change", sysfs])
    }
}

fn link() -> String {
    format!("/dev/disk/by-uuid/{UUID}")
}

fn property(properties: &str, name: &str) -> String {
    let mut lines = properties.lines().map(str::trim);
    let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    value.unwrap_or_default().to_owned()
}

/// A pod makes a file system with the UUID of one of the node's on its raw volume.
#[test]
fn by_the_shipped_rule_udev_ignores_data_of_pods() {
    if !Udev::is_installed() {
        return skip_test("udev is not installed here");
    }
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let raw = sandbox.volume_in("main", "raw", "block", 16 * MIB);
        let target = node.up(&raw, "pod").await;
        run(&["mkfs.ext4", "-q", "-U", UUID, target.to_str().unwrap()]);
        let device = loops_over(&sandbox.image(&raw)).remove(0);
        let udev = Udev::of(device.file_name().unwrap().to_str().unwrap());
        udev.assert_looks();
        udev.assert_leaves_alone();
        node.down(&raw, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
#[ignore = "takes device-mapper: make test-kernel"]
fn by_the_shipped_rules_udev_leaves_encrypted_volumes_alone() {
    encrypted_volumes_are_left_alone(&[]);
}

/// Debian's rules of device-mapper under the names that they have elsewhere.
#[test]
#[ignore = "takes device-mapper: make test-kernel"]
fn by_the_shipped_rules_udev_leaves_encrypted_volumes_alone_where_dm_rules_come_early() {
    encrypted_volumes_are_left_alone(&[
        ("55-dm.rules", "10-dm.rules"),
        ("60-persistent-storage-dm.rules", "13-dm-disk.rules"),
    ]);
}

fn encrypted_volumes_are_left_alone(renamed: &[(&str, &str)]) {
    story(async |sandbox| {
        let mapped = Mapped::new(sandbox);
        let udev = Udev::of(&mapped.kernel_name());
        for (from, to) in renamed {
            fs::copy(Path::new(SYSTEMS).join(from), Path::new(RULES).join(to)).unwrap();
            // Hides the system's rules.
            fs::write(Path::new(RULES).join(from), "").unwrap();
        }
        udev.assert_looks();
        udev.assert_leaves_alone();
    });
}

/// A mapping with the name of an open encrypted volume, with an ext4.
struct Mapped {
    name: String,
}

impl Mapped {
    fn new(sandbox: &Sandbox) -> Self {
        let file = sandbox.dir().join("mapped.disk");
        let file = file.to_str().unwrap();
        run(&["truncate", "--size=16M", file]);
        run(&["mkfs.ext4", "-q", "-U", UUID, file]);
        let below = run(&["losetup", "--find", "--show", file]);
        let unique = sandbox.dir().file_name().unwrap().display();
        let name = format!("luks-rbd-{unique}");
        let table = format!("0 {} linear {} 0", 16 * MIB / 512, below.trim());
        // As the agent's cryptsetup, it does not wait for udev.
        run(&[
            "dmsetup",
            "create",
            "--noudevsync",
            &name,
            "--table",
            &table,
        ]);
        Self { name }
    }

    /// `dm-0`, for instance.
    fn kernel_name(&self) -> String {
        let properties = run(&[
            "dmsetup",
            "info",
            "-c",
            "--noheadings",
            "-o",
            "blkdevname",
            &self.name,
        ]);
        properties.trim().to_owned()
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let _ = run_err(&["dmsetup", "remove", "--noudevsync", "--retry", &self.name]);
    }
}
