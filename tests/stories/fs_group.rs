//! A pod's fsGroup, applied by the driver with `--volume-mount-group`.

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::Path,
};

use testkit::{Node, NodeSetup, Volume, refused, run, story};

const SETGID: u32 = 0o2000;

/// The volume in kubelet's request for a pod with an fsGroup.
pub fn with_group(mut volume: Volume, group: &str) -> Volume {
    let Some(uring_csi::proto::csi::volume_capability::AccessType::Mount(mount)) =
        &mut volume.capability.access_type
    else {
        panic!("a raw block device has no group");
    };
    group.clone_into(&mut mount.volume_mount_group);
    volume
}

/// As kubelet leaves it (pkg/volume/volume_linux.go): the group owns it, has the owner's
/// permissions, and owns new files below it as well.
fn assert_of_group(path: &Path, group: u32) {
    let found = fs::metadata(path).unwrap();
    let mode = found.permissions().mode();
    assert_eq!(found.gid(), group, "{}", path.display());
    if found.is_dir() {
        assert_eq!(mode & (SETGID | 0o070), SETGID | 0o070, "{mode:o}");
    } else {
        assert_eq!(mode & 0o060, 0o060, "{mode:o}");
    }
}

#[test]
fn the_group_owns_existing_and_new_files() {
    story(async |sandbox| {
        let setup = NodeSetup::new(sandbox).arg("--volume-mount-group");
        let node = Node::start_with(sandbox, setup).await;
        for kind in ["ext4", "xfs", "btrfs"] {
            let plain = sandbox.volume(kind, kind);
            let target = node.up(&plain, "pod").await;
            fs::create_dir(target.join("dir")).unwrap();
            fs::write(target.join("dir/file"), "x").unwrap();
            fs::set_permissions(target.join("dir/file"), fs::Permissions::from_mode(0o600))
                .unwrap();
            node.down(&plain, "pod").await;

            let volume = with_group(plain, "4711");
            let target = node.up(&volume, "pod").await;
            for name in ["", "dir", "dir/file"] {
                assert_of_group(&target.join(name), 4711);
            }
            fs::write(target.join("dir/new"), "x").unwrap();
            assert_eq!(fs::metadata(target.join("dir/new")).unwrap().gid(), 4711);
            node.down(&volume, "pod").await;
        }
        let wrong = with_group(sandbox.volume("wrong", "ext4"), "staff");
        refused(
            node.stage(&wrong).await,
            tonic::Code::InvalidArgument,
            &["volume_mount_group"],
        );
        node.assert_clean().await;
    });
}

#[test]
fn a_tree_that_is_deep_takes_few_descriptors() {
    story(async |sandbox| {
        let setup = NodeSetup::new(sandbox).arg("--volume-mount-group");
        let node = Node::start_with(sandbox, setup).await;
        for kind in ["ext4", "xfs", "btrfs"] {
            let plain = sandbox.volume(kind, kind);
            let target = node.up(&plain, "pod").await;
            let mut directory = target.clone();
            for _ in 0..300 {
                for beside in ["a", "b", "y", "z"] {
                    fs::create_dir_all(directory.join(beside)).unwrap();
                    fs::write(directory.join(beside).join("file"), "x").unwrap();
                }
                directory.push("down");
            }
            node.down(&plain, "pod").await;

            let open = fs::read_dir(format!("/proc/{}/fd", node.pid())).unwrap();
            let limit = format!("--nofile={}:", open.count() + 64);
            run(&["prlimit", "--pid", &node.pid().to_string(), &limit]);
            let volume = with_group(plain, "4711");
            let target = node.up(&volume, "pod").await;
            let path = target.to_str().unwrap();
            let all = run(&["find", path]);
            assert!(all.lines().count() >= 300 * 9, "{kind}");
            for is in [["-group", "4711"], ["-perm", "-060"]] {
                let others = run(&["find", path, "!", is[0], is[1]]);
                assert!(others.is_empty(), "{kind}, not {is:?}: {others}");
            }
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}
