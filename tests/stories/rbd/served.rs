//! Images that rbd-nbd serves, its daemons kept by the holder. Each of the three
//! that take part dies alone: the agent, the holder, a daemon.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use tonic::Code::FailedPrecondition;

use super::{assert_nothing_staged, encrypted, kept, whole_life};
use crate::harness::{
    Ceph, Content, Holder, KINDS, MIB, Node, Sandbox, Volume, ceph_story, eventually, grown_in_use,
    nbds_over, rbds_over, refused,
};

async fn node_with(sandbox: &Sandbox, ceph: &Ceph, holder: &Holder) -> Node {
    let setup = ceph.setup(sandbox).arg("--alpha-capabilities");
    let socket = holder.socket().display().to_string();
    Node::start_with(sandbox, setup.arg("--holder").arg(&socket)).await
}

fn served(volume: Volume) -> Volume {
    volume.with("mounter", "rbd-nbd")
}

fn nbds(volume: &Volume) -> Vec<String> {
    nbds_over(&volume.handle)
}

/// What the agent says of a volume's health, by the first word of each.
async fn ailments(node: &Node, volume: &Volume, target: &Path) -> Vec<String> {
    let told = node.health(volume, target).await.unwrap();
    told.into_iter().map(|entry| entry.reason).collect()
}

#[test]
fn whole_lives_of_every_kind_by_rbd_nbd() {
    ceph_story(async |sandbox, ceph| {
        let holder = Holder::start(sandbox).await;
        let node = node_with(sandbox, ceph, &holder).await;
        for (kind, _) in KINDS {
            whole_life(&node, &served(ceph.volume(kind))).await;
        }
        let secret = served(encrypted::volume(ceph, "ext4"));
        whole_life(&node, &secret).await;
        for volume in ["ext4", "block"].map(|kind| served(ceph.volume(kind))) {
            for _ in 0..2 {
                node.up(&volume, "pod").await;
                assert_eq!(nbds(&volume).len(), 1);
                assert!(rbds_over(&volume).is_empty());
            }
            node.down(&volume, "pod").await;
            assert!(nbds(&volume).is_empty() && holder.held(&volume).await.is_none());
        }
        node.assert_clean().await;
    });
}

#[test]
fn each_of_three_processes_dies_and_data_stays() {
    ceph_story(async |sandbox, ceph| {
        let holder = Holder::start(sandbox).await;
        let node = node_with(sandbox, ceph, &holder).await;
        for kind in ["ext4", "block"] {
            let volume = served(ceph.volume(kind));
            let content = Content::new(&volume.handle);
            let target = node.up(&volume, "pod").await;
            kept(&volume, &target, &content, true);

            // The agent: nobody notices.
            node.kill9().await;
            write(&volume, &target, "without an agent");
            node.restart().await;
            assert!(ailments(&node, &volume, &target).await.is_empty());

            // A daemon, with requests under way: they are done by the next.
            holder.kill_daemon(&volume).await;
            write(&volume, &target, "without a daemon");

            // The holder: its daemons run on, and it is said that they are alone.
            holder.kill9().await;
            write(&volume, &target, "without a holder");
            holder.restart().await;
            until(&node, &volume, &target, &["ServerUnkept"]).await;

            // A stage brings the key, so that a daemon may die again.
            node.stage(&volume).await.unwrap();
            until(&node, &volume, &target, &[]).await;
            holder.kill_daemon(&volume).await;
            write(&volume, &target, "again");

            // All of them.
            node.kill9().await;
            holder.kill9().await;
            node.restart().await;
            holder.restart().await;
            holder.kill_daemon(&volume).await;
            until(&node, &volume, &target, &["ServerAway"]).await;
            reattach(&node, &holder, &volume, sandbox);
            until(&node, &volume, &target, &[]).await;

            kept(&volume, &target, &content, false);
            node.down(&volume, "pod").await;
            assert_nothing_staged(&node, &volume);
        }
        node.assert_clean().await;
    });
}

fn write(volume: &Volume, target: &Path, what: &str) {
    let content = Content::new(what);
    if volume.is_block() {
        content.write_at(target, 8 * MIB).unwrap();
        content.is_at(target, 8 * MIB);
    } else {
        content.write(&target.join("other"));
        content.is_in(&target.join("other"));
    }
}

async fn until(node: &Node, volume: &Volume, target: &Path, wanted: &[&str]) {
    eventually("the volume's health is told", async || {
        (ailments(node, volume, target).await == wanted).then_some(())
    })
    .await;
}

fn reattach(node: &Node, holder: &Holder, volume: &Volume, sandbox: &Sandbox) {
    let secrets: PathBuf = sandbox.dir().join("secret");
    std::fs::create_dir_all(&secrets).unwrap();
    for (name, value) in &volume.secrets {
        std::fs::write(secrets.join(name), value).unwrap();
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_uringctl"));
    let sockets = [
        ("--node-endpoint", node.socket()),
        ("--holder-endpoint", holder.socket()),
    ];
    for (flag, socket) in sockets {
        command.arg(flag).arg(socket);
    }
    let said = command
        .arg("--secrets")
        .arg(secrets)
        .args(["reattach", &volume.handle])
        .output();
    let said = said.unwrap();
    assert!(said.status.success(), "{said:?}");
}

#[test]
fn volumes_that_rbd_nbd_serves_grow_in_use() {
    ceph_story(async |sandbox, ceph| {
        let holder = Holder::start(sandbox).await;
        let node = node_with(sandbox, ceph, &holder).await;
        for (kind, small) in [KINDS[0], KINDS[1], KINDS[3]] {
            let volume = served(ceph.volume(kind));
            node.up(&volume, "pod").await;
            let grow = |bytes| ceph.resize(&volume, bytes);
            grown_in_use(&node, &volume, small, "was not grown", grow).await;
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn what_krbd_cannot_map_another_mounter_may() {
    ceph_story(async |sandbox, ceph| {
        let holder = Holder::start(sandbox).await;
        let node = node_with(sandbox, ceph, &holder).await;
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
        whole_life(&node, &volume).await;
        // Where krbd can, it does.
        let plain = either(ceph.volume("ext4"));
        node.up(&plain, "pod").await;
        assert_eq!((rbds_over(&plain).len(), nbds(&plain).len()), (1, 0));
        node.down(&plain, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn a_node_without_a_holder_says_what_it_lacks() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let volume = served(ceph.volume("ext4"));
        refused(node.stage(&volume).await, FailedPrecondition, &["--holder"]);
        node.assert_clean().await;
    });
}

#[test]
fn records_of_served_volumes_are_rebuilt() {
    ceph_story(async |sandbox, ceph| {
        let holder = Holder::start(sandbox).await;
        let node = node_with(sandbox, ceph, &holder).await;
        let volumes = ["ext4", "block"].map(|kind| served(ceph.volume(kind)));
        for volume in &volumes {
            let target = node.up(volume, "pod").await;
            kept(volume, &target, &Content::new(&volume.handle), true);
        }
        node.kill9().await;
        for file in crate::harness::files_below(&node.run_dir) {
            std::fs::remove_file(file).unwrap();
        }
        node.restart().await;
        for volume in &volumes {
            let target = node.up(volume, "pod").await;
            kept(volume, &target, &Content::new(&volume.handle), false);
            node.down(volume, "pod").await;
            assert!(nbds(volume).is_empty());
        }
        node.assert_clean().await;
    });
}
