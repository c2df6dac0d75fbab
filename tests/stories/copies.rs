//! Snapshots and clones: their content, and when they are refused.

use testkit::{
    Content, Controller, ControllerSetup, MIB, Node, NodeSetup, Sandbox, Volume, claim,
    from_snapshot, from_volume, provisioned, refused, story,
};
use tonic::Code::{AlreadyExists, FailedPrecondition, NotFound};
use uring_csi::proto::csi::{CreateVolumeRequest, VolumeCapability};

/// A controller and a node over the same two shared pools: `main`, whose file
/// system cannot share blocks between files, and `reflink`, whose can.
async fn storage(sandbox: &Sandbox) -> (Controller, Node) {
    let reflink = sandbox.reflink_pool("reflink");
    let setup = ControllerSetup::new(sandbox).pool("reflink", &reflink);
    let controller = Controller::start_with(sandbox, setup).await;
    let shared = NodeSetup {
        pools: vec![
            format!("main={},shared", sandbox.pool("main").display()),
            format!("reflink={},shared", reflink.display()),
        ],
        ..NodeSetup::new(sandbox)
    };
    let node = Node::start_with(sandbox, shared).await;
    (controller, node)
}

fn capability(fs_type: &str) -> VolumeCapability {
    if fs_type == "block" {
        Volume::block("any").capability
    } else {
        Volume::filesystem("any", fs_type).capability
    }
}

fn size(fs_type: &str) -> u64 {
    if fs_type == "xfs" {
        320 * MIB
    } else {
        160 * MIB
    }
}

#[test]
fn snapshots_keep_the_data_of_their_moment() {
    story(async |sandbox| {
        let (controller, node) = storage(sandbox).await;
        for pool in ["main", "reflink"] {
            let capability = capability("ext4");
            let name = format!("source-{pool}");
            let made = controller
                .create(claim(&name, pool, &capability, 64 * MIB))
                .await
                .unwrap();
            let source = provisioned(&made, &capability);
            let (old, new) = (Content::new("old"), Content::new("new"));
            old.write(&node.up(&source, "pod").await.join("file"));
            node.down(&source, "pod").await;

            let snapshot = controller.snapshot(&source.handle, &name).await.unwrap();
            assert!(snapshot.ready_to_use);
            assert_eq!(snapshot.source_volume_id, source.handle);
            let again = controller.snapshot(&source.handle, &name).await.unwrap();
            assert_eq!(again.snapshot_id, snapshot.snapshot_id);
            new.write(&node.up(&source, "pod").await.join("file"));
            node.down(&source, "pod").await;

            // Deleting the source leaves its copies.
            controller.delete(&source.handle).await.unwrap();
            let restore = CreateVolumeRequest {
                volume_content_source: Some(from_snapshot(&snapshot.snapshot_id)),
                ..claim(&format!("restored-{pool}"), pool, &capability, 64 * MIB)
            };
            let made = controller.create(restore.clone()).await.unwrap();
            assert_eq!(
                made.content_source,
                Some(from_snapshot(&snapshot.snapshot_id))
            );
            let restored = provisioned(&made, &capability);
            let target = node.up(&restored, "pod").await;
            old.assert_in(&target.join("file"));
            node.down(&restored, "pod").await;

            controller
                .delete_snapshot(&snapshot.snapshot_id)
                .await
                .unwrap();
            controller
                .delete_snapshot(&snapshot.snapshot_id)
                .await
                .unwrap();
            let target = node.up(&restored, "pod").await;
            old.assert_in(&target.join("file"));
            node.down(&restored, "pod").await;
            controller.delete(&restored.handle).await.unwrap();

            let late = CreateVolumeRequest {
                name: format!("late-{pool}"),
                ..restore
            };
            refused(controller.create(late).await, NotFound, &[]);
        }
        node.assert_clean().await;
    });
}

#[test]
fn one_name_is_one_snapshot() {
    story(async |sandbox| {
        let (controller, _node) = storage(sandbox).await;
        let capability = capability("ext4");
        let mut ids = Vec::new();
        for name in ["one", "two"] {
            let request = claim(name, "main", &capability, 64 * MIB);
            ids.push(controller.create(request).await.unwrap().volume_id);
        }
        controller.snapshot(&ids[0], "name").await.unwrap();
        refused(
            controller.snapshot(&ids[1], "name").await,
            AlreadyExists,
            &["name"],
        );
        refused(
            controller.snapshot("never-ours", "other").await,
            NotFound,
            &["never-ours"],
        );
        controller.delete_snapshot("never-ours").await.unwrap();
    });
}

#[test]
fn a_clone_is_mounted_beside_its_source() {
    story(async |sandbox| {
        let (controller, node) = storage(sandbox).await;
        for kind in ["ext4", "xfs", "btrfs"] {
            let capability = capability(kind);
            let request = claim(kind, "reflink", &capability, size(kind));
            let made = controller.create(request).await.unwrap();
            let source = provisioned(&made, &capability);
            let content = Content::new(kind);
            content.write(&node.up(&source, "pod").await.join("file"));
            node.down(&source, "pod").await;

            let request = CreateVolumeRequest {
                volume_content_source: Some(from_volume(&source.handle)),
                ..claim(&format!("{kind}-clone"), "reflink", &capability, size(kind))
            };
            let made = controller.create(request).await.unwrap();
            let clone = provisioned(&made, &capability);

            // Both have the same file system UUID.
            let first = node.up(&source, "first").await;
            let second = node.up(&clone, "second").await;
            content.assert_in(&first.join("file"));
            content.assert_in(&second.join("file"));
            Content::new("mine").write(&second.join("file"));
            content.assert_in(&first.join("file"));
            node.down(&source, "first").await;
            node.down(&clone, "second").await;
            for volume in [source, clone] {
                controller.delete(&volume.handle).await.unwrap();
            }
        }
        node.assert_clean().await;
    });
}

#[test]
fn a_clone_may_be_larger_never_smaller() {
    story(async |sandbox| {
        let (controller, node) = storage(sandbox).await;
        let capability = capability("xfs");
        let request = claim("source", "reflink", &capability, 320 * MIB);
        let made = controller.create(request).await.unwrap();
        let source = provisioned(&made, &capability);
        let content = Content::new("clone");
        content.write(&node.up(&source, "pod").await.join("file"));
        node.down(&source, "pod").await;

        let clone_of = |name: &str, bytes| CreateVolumeRequest {
            volume_content_source: Some(from_volume(&source.handle)),
            ..claim(name, "reflink", &capability, bytes)
        };
        let made = controller
            .create(clone_of("larger", 640 * MIB))
            .await
            .unwrap();
        assert_eq!(u64::try_from(made.capacity_bytes).unwrap(), 640 * MIB);
        let larger = provisioned(&made, &capability);
        let target = node.up(&larger, "pod").await;
        content.assert_in(&target.join("file"));
        let usage = node.stats(&larger, &target).await.unwrap();
        assert!(
            u64::try_from(usage[0].total).unwrap() > 500 * MIB,
            "{usage:?}"
        );
        node.down(&larger, "pod").await;

        let mut smaller = clone_of("smaller", 64 * MIB);
        smaller.capacity_range.as_mut().unwrap().limit_bytes = 128 << 20;
        refused(
            controller.create(smaller).await,
            tonic::Code::OutOfRange,
            &[],
        );
        node.assert_clean().await;
    });
}

#[test]
fn an_image_in_use_is_copied_atomically_or_not_at_all() {
    story(async |sandbox| {
        let (controller, node) = storage(sandbox).await;
        for (pool, at_once) in [("reflink", true), ("main", false)] {
            let capability = capability("block");
            let request = claim(pool, pool, &capability, 64 * MIB);
            let made = controller.create(request).await.unwrap();
            let volume = provisioned(&made, &capability);
            node.up(&volume, "pod").await;
            let snapshot = controller.snapshot(&volume.handle, pool).await;
            let clone = CreateVolumeRequest {
                volume_content_source: Some(from_volume(&volume.handle)),
                ..claim(&format!("clone-{pool}"), pool, &capability, 64 * MIB)
            };
            let clone = controller.create(clone).await;
            if at_once {
                assert!(snapshot.unwrap().ready_to_use);
                clone.unwrap();
            } else {
                refused(snapshot, FailedPrecondition, &["node-a"]);
                refused(clone, FailedPrecondition, &["node-a"]);
            }
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}
