//! Other users of an image: on this node, by the mapped devices; elsewhere, by the image's
//! watchers.

use std::time::{Duration, Instant};

use testkit::{
    Ceph, Content, ImageOpener, Mode, ceph_story, own_cluster_story, rbds_of, rbds_over, refused,
    run, spec_of, unmap_by_rbd,
};
use tonic::Code::{Aborted, FailedPrecondition};

use super::{lifecycle, write_or_check};

#[test]
fn another_client_is_waited_for() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let volume = ceph.volume("ext4");
        let other = ceph.open_elsewhere(&volume);
        node.timeout.set(Duration::from_secs(4));
        node.stage(&volume).await.unwrap_err();
        assert!(
            rbds_of(sandbox.dir()).is_empty(),
            "not mapped beside another writer"
        );
        drop(other);
        node.timeout.set(Duration::from_secs(20));
        let began = Instant::now();
        node.retry_until_ok("staged", async || node.stage(&volume).await)
            .await;
        assert!(
            began.elapsed() < Duration::from_secs(10),
            "{:?}",
            began.elapsed()
        );
        node.unstage(&volume).await.unwrap();
        lifecycle(&node, &volume).await;
        node.assert_clean().await;
    });
}

#[test]
fn another_client_that_stays_is_named() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let volume = ceph.volume("ext4");
        let readers = volume.clone().mode(Mode::MultiNodeReaderOnly);
        let raw = ceph.volume("block").mode(Mode::MultiNodeMultiWriter);
        lifecycle(&node, &volume).await;
        let others = [&volume, &raw].map(|volume| ceph.open_elsewhere(volume));
        let watching = ceph.cluster.rbd(&["status", &spec_of(&volume)]);
        let address = watching
            .split("watcher=")
            .nth(1)
            .and_then(|rest| rest.split(' ').next());
        let address = address.unwrap_or_else(|| panic!("{watching}"));
        // Several may have it at a time, or it is not written.
        for volume in [&readers, &raw] {
            node.up(volume, "pod").await;
            node.down(volume, "pod").await;
        }
        let named = node.stage(&volume).await;
        refused(named, FailedPrecondition, &[address]);
        drop(others);
        lifecycle(&node, &volume).await;
        node.assert_clean().await;
    });
}

#[test]
fn a_mirrored_image_is_refused_to_a_second_writer_as_any_other() {
    own_cluster_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let volume = ceph.volume("ext4");
        let of = |key| &*volume.context[key];
        let rbd = |args: &[&str]| ceph.cluster.rbd(&[&["mirror"], args].concat());
        rbd(&["pool", "enable", of("pool"), "image"]);
        rbd(&["image", "enable", &spec_of(&volume), "snapshot"]);
        let _daemon = ImageOpener::mirroring(&ceph.cluster, of("pool"), of("imageName"));
        lifecycle(&node, &volume).await;
        let other = ceph.open_elsewhere(&volume);
        refused(node.stage(&volume).await, FailedPrecondition, &["in use"]);
        drop(other);
        lifecycle(&node, &volume).await;
        node.assert_clean().await;
    });
}

#[test]
fn a_client_that_died_is_waited_for() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let volume = ceph.volume("ext4");
        ceph.open_elsewhere(&volume).kill9();
        // The cluster forgets it within half a minute.
        node.up(&volume, "pod").await;
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn an_image_mapped_by_the_rbd_command_is_recognised() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        for kind in ["ext4", "block"] {
            let volume = ceph.volume(kind);
            let device = ceph.map_by_rbd(&volume, "noudev");
            let target = node.up(&volume, "pod").await;
            assert_eq!(rbds_over(&volume), [device]);
            write_or_check(&volume, &target, &Content::new(kind), true);
            node.down(&volume, "pod").await;
            assert!(rbds_over(&volume).is_empty());

            let device = ceph.map_by_rbd(&volume, "noudev,ro");
            refused(
                node.stage(&volume).await,
                FailedPrecondition,
                &["read-only", device.to_str().unwrap()],
            );
            unmap_by_rbd(&device);
        }
        node.assert_clean().await;
    });
}

#[test]
fn equal_image_names_in_two_clusters_are_distinct() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let other = Ceph::another(sandbox);
        let volume = ceph.volume("ext4");
        let name = &volume.context["imageName"];
        let spec = format!("{}/{name}", other.cluster.pool);
        let create = ["create", "-s", "64M", "--image-feature", "layering", &spec];
        other.cluster.rbd(&create);
        let theirs = other.over(name, "ext4");
        let targets = [node.up(&volume, "pod").await, node.up(&theirs, "pod").await];
        assert_eq!(rbds_of(sandbox.dir()).len(), 2);
        for (volume, target) in [&volume, &theirs].into_iter().zip(&targets) {
            write_or_check(volume, target, &Content::new(&volume.handle), true);
        }
        for volume in [&theirs, &volume] {
            node.down(volume, "pod").await;
            assert_eq!(
                rbds_of(sandbox.dir()).len(),
                usize::from(volume.handle == theirs.handle)
            );
        }
        for volume in [&volume, &theirs] {
            let target = node.up(volume, "pod").await;
            write_or_check(volume, &target, &Content::new(&volume.handle), false);
            node.down(volume, "pod").await;
        }

        // Mapped by another program, which does not name the volume: the fsid tells.
        let mapped = other.map_by_rbd(&theirs, "noudev");
        let target = node.up(&volume, "pod").await;
        write_or_check(&volume, &target, &Content::new(&volume.handle), false);
        assert_eq!(rbds_of(sandbox.dir()).len(), 2);
        node.down(&volume, "pod").await;
        assert_eq!(rbds_of(sandbox.dir()), std::slice::from_ref(&mapped));
        unmap_by_rbd(&mapped);
        lifecycle(&node, &ceph.volume("ext4")).await;
        node.assert_clean().await;
    });
}

#[test]
fn a_device_in_use_elsewhere_stays_mapped() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let volume = ceph.volume("ext4");
        node.up(&volume, "pod").await;
        node.unpublish(&volume, "pod").await.unwrap();
        // Another mount of the file system, unknown to the agent.
        let elsewhere = sandbox.dir().join("elsewhere");
        std::fs::create_dir(&elsewhere).unwrap();
        let point = node.staging(&volume).join(&volume.handle);
        let [from, to] = [&point, &elsewhere].map(|path| path.to_str().unwrap());
        run(&["mount", "--bind", from, to]);
        let device = rbds_over(&volume).pop().unwrap();
        let named = node.unstage(&volume).await;
        refused(named, Aborted, &[device.to_str().unwrap(), to]);
        Content::new("alive").write(&elsewhere.join("file"));
        run(&["umount", to]);
        node.unstage(&volume).await.unwrap();
        node.assert_clean().await;
    });
}
