//! Volumes that grow while a pod uses them, and clones that are larger than their source.

use std::{fs, path::Path};

use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};
use testkit::{
    Content, Controller, ControllerSetup, MIB, Node, NodeSetup, Sandbox, Volume, can_resize_ext4,
    claim, loops_over, provisioned, refused, run, story,
};
use tonic::Code::{FailedPrecondition, InvalidArgument};

/// As the controller does in a shared pool.
fn enlarge(sandbox: &Sandbox, volume: &Volume, bytes: u64) {
    fs::File::options()
        .write(true)
        .open(sandbox.image(volume))
        .and_then(|image| image.set_len(bytes))
        .unwrap();
}

async fn total(node: &Node, volume: &Volume, path: &Path) -> u64 {
    let usage = node.stats(volume, path).await.unwrap();
    u64::try_from(usage[0].total).unwrap()
}

#[test]
fn xfs_grows_in_use() {
    grows_in_use("xfs", 320 * MIB, 640 * MIB);
}

#[test]
fn btrfs_grows_in_use() {
    grows_in_use("btrfs", 160 * MIB, 320 * MIB);
}

#[test]
#[ignore = "takes CAP_SYS_RESOURCE: make test-kernel"]
fn ext4_grows_in_use() {
    grows_in_use("ext4", 64 * MIB, 128 * MIB);
}

#[test]
fn ext4_does_not_grow_in_use_without_the_capability() {
    story(async |sandbox| {
        if can_resize_ext4() {
            // Dropped in this thread, and so in the agent that it starts.
            remove_capability_from_bounding_set(CapabilitySet::SYS_RESOURCE).unwrap();
        }
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        let target = node.up(&volume, "pod").await;
        let content = Content::new("small");
        content.write(&target.join("file"));
        enlarge(sandbox, &volume, 128 * MIB);
        refused(
            node.expand(&volume, &target, 128 * MIB).await,
            FailedPrecondition,
            &["CAP_SYS_RESOURCE"],
        );
        content.assert_in(&target.join("file"));
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

/// Below the mount that is gone is a directory of the node's own file system.
#[test]
fn only_the_volumes_own_file_system_grows() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        let target = node.up(&volume, "pod").await;
        run(&["umount", node.staging(&volume).to_str().unwrap()]);
        enlarge(sandbox, &volume, 128 * MIB);
        let answer = node.expand(&volume, &target, 128 * MIB).await;
        refused(answer, FailedPrecondition, &["is gone", "stage it again"]);
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

fn grows_in_use(kind: &'static str, small: u64, large: u64) {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume_in("main", "v", kind, small);
        let target = node.up(&volume, "pod").await;
        let content = Content::new(kind);
        content.write(&target.join("file"));
        let before = total(&node, &volume, &target).await;

        enlarge(sandbox, &volume, large);
        for _ in 0..2 {
            let bytes = node.expand(&volume, &target, large).await.unwrap();
            assert_eq!(u64::try_from(bytes).unwrap(), large);
        }
        let after = total(&node, &volume, &target).await;
        assert!(after > before + (large - small) / 2, "{before} -> {after}");
        content.assert_in(&target.join("file"));
        node.down(&volume, "pod").await;

        let target = node.up(&volume, "pod").await;
        content.assert_in(&target.join("file"));
        assert_eq!(total(&node, &volume, &target).await, after);
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn a_raw_device_grows_in_use() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume_in("main", "raw", "block", 64 * MIB);
        let target = node.up(&volume, "pod").await;
        enlarge(sandbox, &volume, 128 * MIB);
        let bytes = node.expand(&volume, &target, 128 * MIB).await.unwrap();
        assert_eq!(u64::try_from(bytes).unwrap(), 128 * MIB);
        let device = loops_over(&sandbox.image(&volume)).pop().unwrap();
        let bytes = run(&["blockdev", "--getsize64", device.to_str().unwrap()]);
        assert_eq!(bytes.trim(), (128 * MIB).to_string());
        Content::new("end").write_at(&target, 127 * MIB).unwrap();
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn a_file_system_smaller_than_its_device_grows_when_staged() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        for (kind, small, large) in [
            ("xfs", 320 * MIB, 640 * MIB),
            ("btrfs", 160 * MIB, 320 * MIB),
        ] {
            let volume = sandbox.volume_in("main", kind, kind, small);
            let content = Content::new(kind);
            content.write(&node.up(&volume, "pod").await.join("file"));
            node.down(&volume, "pod").await;

            enlarge(sandbox, &volume, large);
            let target = node.up(&volume, "pod").await;
            let after = total(&node, &volume, &target).await;
            assert!(after > u64::midpoint(small, large), "{kind}: {after}");
            content.assert_in(&target.join("file"));
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

/// The kernel resizes no btrfs to less than 256 MiB.
#[test]
fn a_btrfs_that_is_too_small_to_grow_is_staged() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume_in("main", "v", "btrfs", 128 * MIB);
        let target = node.up(&volume, "pod").await;
        let content = Content::new("small");
        content.write(&target.join("file"));
        enlarge(sandbox, &volume, 200 * MIB);
        refused(
            node.expand(&volume, &target, 200 * MIB).await,
            FailedPrecondition,
            &["268435456"],
        );
        node.down(&volume, "pod").await;

        let target = node.up(&volume, "pod").await;
        content.assert_in(&target.join("file"));
        enlarge(sandbox, &volume, 256 * MIB);
        node.expand(&volume, &target, 256 * MIB).await.unwrap();
        assert!(total(&node, &volume, &target).await > 200 * MIB);
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn a_growth_names_the_access_type_of_the_volume() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let raw = sandbox.volume_in("main", "raw", "block", 64 * MIB);
        let mounted = sandbox.volume("v", "ext4");
        for (volume, other) in [(&raw, &mounted), (&mounted, &raw)] {
            let target = node.up(volume, "pod").await;
            let mut wrong = volume.clone();
            wrong.capability = other.capability.clone();
            refused(
                node.expand(&wrong, &target, 0).await,
                InvalidArgument,
                &["volume_capability"],
            );
            node.expand(volume, &target, 0).await.unwrap();
            node.down(volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

/// In a local pool the node grows the image itself, if the controller that gets the call
/// does not reach the pool.
#[test]
fn a_node_lets_no_volume_grow_beyond_its_pool() {
    story(async |sandbox| {
        let pools = vec![format!(
            "main={},local",
            sandbox.reflink_pool("main").display()
        )];
        let setup = NodeSetup::new(sandbox);
        let beside = ControllerSetup {
            pools: pools.clone(),
            args: vec!["--node-id".to_owned(), setup.node_id.to_owned()],
            ..ControllerSetup::new(sandbox)
        };
        let controller = Controller::start_with(sandbox, beside).await;
        let node = Node::start_with(sandbox, NodeSetup { pools, ..setup }).await;
        let capability = Volume::block("any").capability;
        let made = async |name, overcommit: &str| {
            let mut request = claim(name, "main", &capability, 64 * MIB);
            let parameters = &mut request.parameters;
            parameters.insert("overcommit".to_owned(), overcommit.to_owned());
            let made = controller.create(request).await.unwrap();
            provisioned(&made, &capability)
        };
        let too_much = 15 << 40;

        let thin = made("thin", "false").await;
        let target = node.up(&thin, "pod").await;
        let size_of_device = || {
            let device = loops_over(&sandbox.image(&thin)).pop().unwrap();
            let bytes = run(&["blockdev", "--getsize64", device.to_str().unwrap()]);
            bytes.trim().parse::<u64>().unwrap()
        };
        let answer = node.expand(&thin, &target, too_much).await;
        refused(
            answer,
            FailedPrecondition,
            &["available beyond", "free space"],
        );
        assert_eq!(size_of_device(), 64 * MIB);
        let image = fs::metadata(sandbox.image(&thin)).unwrap();
        assert_eq!(image.len(), 64 * MIB);
        node.expand(&thin, &target, 128 * MIB).await.unwrap();
        assert_eq!(size_of_device(), 128 * MIB);

        let over = made("over", "true").await;
        let other = node.up(&over, "pod").await;
        let bytes = node.expand(&over, &other, too_much).await.unwrap();
        assert_eq!(u64::try_from(bytes).unwrap(), too_much);
        // A volume that exceeds the pool leaves no space to others.
        let answer = node.expand(&thin, &target, 129 * MIB).await;
        refused(answer, FailedPrecondition, &["has 0 bytes available"]);
        for volume in [&thin, &over] {
            node.down(volume, "pod").await;
        }
        node.assert_clean().await;
    });
}
