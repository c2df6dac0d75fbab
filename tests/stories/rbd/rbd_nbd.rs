//! Images attached by rbd-nbd, whose daemons the supervisor runs.

mod deaths;
mod takeover;

use std::{fs, path::Path};

use rustix::{
    fs::{FlockOperation, flock},
    process::{Pid, Signal, kill_process},
};
use testkit::{
    Ceph, Content, KINDS, MIB, NbdServer, Node, NodeSetup, Sandbox, Supervisor, Volume, ceph_story,
    eventually, grow_published, nbds_over, rbds_over, refused, run, spec_of, unmap_by_rbd,
};
use tonic::Code::FailedPrecondition;

use super::{encrypted, lifecycle, write_or_check};
use crate::block::read_only_for_a_while;

pub async fn node_with(sandbox: &Sandbox, ceph: &Ceph, supervisor: &Supervisor) -> Node {
    let setup = ceph.setup(sandbox).arg("--alpha-capabilities");
    let socket = supervisor.socket().display().to_string();
    Node::start_with(sandbox, setup.arg("--holder").arg(&socket)).await
}

pub fn served(volume: Volume) -> Volume {
    volume.with("mounter", "rbd-nbd")
}

pub(super) fn nbds(volume: &Volume) -> Vec<String> {
    nbds_over(&volume.handle)
}

/// SIGKILL to the rbd-nbd of a volume whose device no supervisor has locked, and waits for
/// its end. The device is locked meanwhile: udevd has the partitions read again when the
/// daemon's descriptor of the device is closed. It may send that request while the daemon's
/// socket is still open, and no daemon answers it: each opener of the device then waits for
/// it, beyond the reattach timeout.
async fn kill_unlocked(volume: &Volume, daemon: Pid) {
    let device = nbds(volume).pop().expect("a device");
    let locked = fs::File::open(&device).unwrap();
    flock(&locked, FlockOperation::LockExclusive).unwrap();
    kill_process(daemon, Signal::KILL).unwrap();
    let process = Path::new("/proc").join(daemon.to_string());
    eventually("its rbd-nbd has ended", async || {
        (!process.exists()).then_some(())
    })
    .await;
}

#[test]
fn lifecycle_of_every_kind() {
    ceph_story(async |sandbox, ceph| {
        let supervisor = Supervisor::start(sandbox).await;
        let node = node_with(sandbox, ceph, &supervisor).await;
        for (kind, _) in KINDS {
            lifecycle(&node, &served(ceph.volume(kind))).await;
        }
        let secret = served(encrypted::volume(ceph, "ext4"));
        lifecycle(&node, &secret).await;
        for volume in ["ext4", "block"].map(|kind| served(ceph.volume(kind))) {
            for _ in 0..2 {
                node.up(&volume, "pod").await;
                assert_eq!(nbds(&volume).len(), 1);
                assert!(rbds_over(&volume).is_empty());
            }
            node.down(&volume, "pod").await;
            assert!(nbds(&volume).is_empty() && supervisor.status(&volume).await.is_none());
        }
        node.assert_clean().await;
    });
}

/// The kernel writes a device's data at its last close, and rbd-nbd has the device open.
#[test]
fn what_a_pod_wrote_without_a_sync_survives_an_unstage() {
    ceph_story(async |sandbox, ceph| {
        let supervisor = Supervisor::start(sandbox).await;
        let node = node_with(sandbox, ceph, &supervisor).await;
        let volume = served(ceph.volume("block"));
        let content = Content::new("unsynced");
        let target = node.up(&volume, "pod").await;
        drop(content.write_unsynced(&target, 0).unwrap());
        node.down(&volume, "pod").await;
        content.assert_at(&node.up(&volume, "pod").await, 0);
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn rbd_nbd_gets_no_requests_that_only_an_export_allowed() {
    ceph_story(async |sandbox, ceph| {
        let supervisor = Supervisor::start(sandbox).await;
        let node = node_with(sandbox, ceph, &supervisor).await;
        let server = NbdServer::start(sandbox).await;
        let name = ceph.image_name();
        NbdServer::image(sandbox, &name, 64 * MIB);
        // Its device still sends WRITE_ZEROES, after which rbd-nbd answers no request.
        lifecycle(&node, &server.over(Volume::filesystem(&name, "ext4"))).await;
        let images = [(); 2].map(|()| served(ceph.volume("block")));
        let ups = images.iter().map(|image| node.up(image, "pod"));
        for target in futures_util::future::join_all(ups).await {
            let target = target.to_str().expect("UTF-8");
            run(&["blkdiscard", "--zeroout", "--length", "1M", target]);
        }
        for image in &images {
            node.down(image, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn volumes_grow_in_use() {
    ceph_story(async |sandbox, ceph| {
        let supervisor = Supervisor::start(sandbox).await;
        let node = node_with(sandbox, ceph, &supervisor).await;
        for (kind, small) in [KINDS[0], KINDS[1], KINDS[3]] {
            let volume = served(ceph.volume(kind));
            node.up(&volume, "pod").await;
            let grow = |bytes| ceph.resize(&volume, bytes);
            grow_published(&node, &volume, small, "was not grown", grow).await;
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn try_other_mounters_falls_back_to_rbd_nbd() {
    ceph_story(async |sandbox, ceph| {
        let supervisor = Supervisor::start(sandbox).await;
        let node = node_with(sandbox, ceph, &supervisor).await;
        let features = "layering,exclusive-lock,journaling";
        let args = ["--image-feature", features];
        let volume = ceph
            .volume_of("ext4", 64 * MIB, &args)
            .with("imageFeatures", features);
        refused(
            node.stage(&volume).await,
            FailedPrecondition,
            &["journaling"],
        );
        let either = |volume: Volume| volume.with("tryOtherMounters", "true");
        let volume = either(volume);
        lifecycle(&node, &volume).await;
        // krbd maps the image if it can.
        let plain = either(ceph.volume("ext4"));
        node.up(&plain, "pod").await;
        assert_eq!((rbds_over(&plain).len(), nbds(&plain).len()), (1, 0));
        node.down(&plain, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn a_node_without_a_supervisor_names_the_flag() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let volume = served(ceph.volume("ext4"));
        refused(node.stage(&volume).await, FailedPrecondition, &["--holder"]);
        node.assert_clean().await;
    });
}

#[test]
fn records_that_are_lost_are_rebuilt() {
    ceph_story(async |sandbox, ceph| {
        let supervisor = Supervisor::start(sandbox).await;
        let node = node_with(sandbox, ceph, &supervisor).await;
        let volumes = ["ext4", "block"].map(|kind| served(ceph.volume(kind)));
        for volume in &volumes {
            let target = node.up(volume, "pod").await;
            write_or_check(volume, &target, &Content::new(&volume.handle), true);
        }
        node.kill9().await;
        for file in testkit::files_below(&node.run_dir) {
            std::fs::remove_file(file).unwrap();
        }
        node.restart().await;
        for volume in &volumes {
            let target = node.up(volume, "pod").await;
            write_or_check(volume, &target, &Content::new(&volume.handle), false);
            node.down(volume, "pod").await;
            assert!(nbds(volume).is_empty());
        }
        node.assert_clean().await;
    });
}

#[test]
fn sixteen_volumes_at_once() {
    ceph_story(async |sandbox, ceph| {
        let supervisor = Supervisor::start(sandbox).await;
        let node = node_with(sandbox, ceph, &supervisor).await;
        let volumes: Vec<_> = lifecycle::sixteen(ceph).into_iter().map(served).collect();
        lifecycle::at_once(&node, &volumes).await;
        for volume in &volumes {
            assert!(nbds(volume).is_empty() && supervisor.status(volume).await.is_none());
        }
        node.assert_clean().await;
    });
}

#[test]
fn read_only_and_encrypted_volumes_work() {
    ceph_story(async |sandbox, ceph| {
        let supervisor = Supervisor::start(sandbox).await;
        let node = node_with(sandbox, ceph, &supervisor).await;
        for kind in ["ext4", "xfs", "block"] {
            lifecycle::read_and_not_written(&node, &served(ceph.volume(kind))).await;
        }
        for volume in [ceph.volume("block"), encrypted::volume(ceph, "block")] {
            read_only_for_a_while(&node, &served(volume)).await;
        }
        for kind in ["xfs", "block"] {
            lifecycle(&node, &served(encrypted::volume(ceph, kind))).await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn clones_have_what_their_source_had_and_keep_their_own() {
    ceph_story(async |sandbox, ceph| {
        let supervisor = Supervisor::start(sandbox).await;
        let node = node_with(sandbox, ceph, &supervisor).await;
        for kind in ["ext4", "xfs", "block"] {
            lifecycle::cloned(&node, ceph, kind, served).await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn one_image_has_one_driver_and_one_writer() {
    ceph_story(async |sandbox, ceph| {
        let supervisor = Supervisor::start(sandbox).await;
        let another = Node::start_with(
            sandbox,
            NodeSetup {
                node_id: "node-b",
                ..ceph.setup(sandbox)
            },
        )
        .await;
        let node = node_with(sandbox, ceph, &supervisor).await;
        let plain = ceph.volume("ext4");
        let volume = served(plain.clone());
        // By the program that mapped it first.
        let device = ceph.map_by_rbd(&plain, "noudev");
        let named = device.to_str().unwrap();
        refused(node.stage(&volume).await, FailedPrecondition, &[named]);
        assert!(nbds(&volume).is_empty());
        unmap_by_rbd(&device);

        node.up(&volume, "pod").await;
        let mut alias = ceph.over(&plain.context["imageName"], "ext4");
        alias.secrets.clone_from(&volume.secrets);
        refused(
            another.stage(&alias).await,
            FailedPrecondition,
            &["rbd-nbd"],
        );
        assert!(rbds_over(&alias).is_empty());
        node.down(&volume, "pod").await;

        // A client elsewhere, before the map.
        let other = ceph.open_elsewhere(&volume);
        let watching = ceph.cluster.rbd(&["status", &spec_of(&volume)]);
        assert!(watching.contains("watcher="), "{watching}");
        refused(node.stage(&volume).await, FailedPrecondition, &["in use"]);
        assert!(nbds(&volume).is_empty());
        drop(other);
        lifecycle(&node, &volume).await;
        node.assert_clean().await;
    });
}
