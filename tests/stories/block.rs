//! Raw block devices, with kubelet's way of holding on to them.

use std::{
    fs,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use crate::harness::{
    Content, MIB, Mode, Node, NodeSetup, Volume, loops_over, refused, run, run_err, story,
};

/// The device number behind a published path.
fn device_at(path: &Path) -> u64 {
    let found = fs::metadata(path).unwrap();
    assert!(found.file_type().is_block_device(), "{}", path.display());
    found.rdev()
}

/// What kubelet does after a publish (pkg/volume/util/volumepathhandler): the
/// published node bind-mounted on the global map path, and a loop device over
/// it that keeps the device open. Returns the map path and the lock.
fn kubelet_maps(node: &Node, volume: &Volume, pod: &str) -> (PathBuf, String) {
    let dir = node
        .kubelet
        .join("plugins/kubernetes.io/csi/volumeDevices")
        .join(&volume.spec)
        .join("dev");
    fs::create_dir_all(&dir).unwrap();
    let map = dir.join(pod);
    fs::write(&map, "").unwrap();
    let published = node.target(volume, pod);
    let text = map.to_str().unwrap();
    run(&["mount", "--bind", published.to_str().unwrap(), text]);
    let lock = run(&["losetup", "-f", "--show", text]);
    (map, lock.trim().to_owned())
}

#[test]
fn a_raw_volume_is_the_device_itself() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume_in("main", "raw", "block", 64 * MIB);
        let target = node.up(&volume, "one").await;
        let device = loops_over(&sandbox.image(&volume)).pop().unwrap();
        assert_eq!(device_at(&target), device_at(&device));
        let content = Content::new("raw");
        content.write_at(&target, 8 * MIB).unwrap();

        node.publish(&volume, "two").await.unwrap();
        assert_eq!(device_at(&node.target(&volume, "two")), device_at(&device));
        node.unpublish(&volume, "two").await.unwrap();
        node.down(&volume, "one").await;
        assert!(!target.exists());
        content.is_at(&sandbox.image(&volume), 8 * MIB);
        node.assert_clean().await;
    });
}

#[test]
fn read_only_means_that_the_device_cannot_be_written() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox
            .volume_in("main", "ro", "block", 64 * MIB)
            .mode(Mode::SingleNodeReaderOnly);
        let content = Content::new("precious");
        content.write_at(&sandbox.image(&volume), 0).unwrap();
        let target = node.up(&volume, "pod").await;
        content.is_at(&target, 0);
        assert!(Content::new("other").write_at(&target, 0).is_err());
        node.down(&volume, "pod").await;
        content.is_at(&sandbox.image(&volume), 0);
        node.assert_clean().await;
    });
}

#[test]
fn a_read_only_publish_is_read_only_or_refused() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume_in("main", "v", "block", 64 * MIB);
        node.stage(&volume).await.unwrap();
        // Another writer would have to be stopped for it: alone, it must hold.
        if node.publish_read_only(&volume, "pod").await.is_ok() {
            let written = Content::new("x").write_at(&node.target(&volume, "pod"), 0);
            assert!(written.is_err(), "a read-only device was written");
        }
        node.down(&volume, "pod").await;

        // The next writer writes.
        let target = node.up(&volume, "writer").await;
        Content::new("y").write_at(&target, 0).unwrap();
        node.down(&volume, "writer").await;
        node.assert_clean().await;
    });
}

#[test]
fn a_lock_of_this_pods_map_is_released_with_it() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume_in("main", "locked", "block", 64 * MIB);
        node.up(&volume, "one").await;
        node.publish(&volume, "two").await.unwrap();
        let (map_one, lock_one) = kubelet_maps(&node, &volume, "one");
        let (map_two, lock_two) = kubelet_maps(&node, &volume, "two");

        // Kubelet died between unmapping and detaching: the lock of pod one is
        // orphaned, that of pod two is in use.
        run(&["umount", map_one.to_str().unwrap()]);
        fs::remove_file(&map_one).unwrap();
        node.unpublish(&volume, "one").await.unwrap();
        assert!(
            run_err(&["losetup", &lock_one]).is_err(),
            "{lock_one} is left"
        );
        assert!(
            run_err(&["losetup", &lock_two]).is_ok(),
            "{lock_two} was taken away"
        );

        // While pod two is published the volume stays.
        let refusal = node.unstage(&volume).await.unwrap_err();
        assert!(!refusal.message().is_empty());
        assert!(run_err(&["losetup", &lock_two]).is_ok());

        // With no target left, any lock on the device is an orphan.
        run(&["umount", map_two.to_str().unwrap()]);
        node.unpublish(&volume, "two").await.unwrap();
        node.unstage(&volume).await.unwrap();
        assert!(
            run_err(&["losetup", &lock_two]).is_err(),
            "{lock_two} is left"
        );
        node.assert_clean().await;
    });
}

#[test]
fn a_device_that_somebody_holds_is_not_detached() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume_in("main", "held", "block", 64 * MIB);
        let target = node.up(&volume, "pod").await;
        let held = fs::File::open(&target).unwrap();
        node.unpublish(&volume, "pod").await.unwrap();
        let own = std::process::id().to_string();
        let exclusive = node.unstage(&volume).await;
        // A plain reader does not stand in the way of O_EXCL; whatever is
        // answered, the device must not vanish under the reader's feet and
        // be called unstaged.
        if exclusive.is_ok() {
            assert!(loops_over(&sandbox.image(&volume)).is_empty());
        } else {
            refused(exclusive, tonic::Code::Aborted, &[&own]);
        }
        drop(held);
        node.until_ok("unstaged once it is free", async || {
            node.unstage(&volume).await
        })
        .await;
        node.assert_clean().await;
    });
}

#[test]
fn the_agent_holds_the_lock_itself_where_told_so() {
    story(async |sandbox| {
        let setup = NodeSetup::new(sandbox).arg("--block-lock");
        let node = Node::start_with(sandbox, setup).await;
        let volume = sandbox.volume_in("main", "own", "block", 64 * MIB);
        node.up(&volume, "pod").await;
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}
