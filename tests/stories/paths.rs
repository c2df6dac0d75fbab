//! The allowed staging and target paths, and the content that they may have.

use std::{
    fs,
    os::unix::{fs::symlink, net::UnixListener},
    path::Path,
};

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use testkit::{MIB, Node, Volume, eventually, mounts_below, refused, story};
use tonic::Code::{Aborted, AlreadyExists, FailedPrecondition, InvalidArgument};
use uring_csi::proto::csi::{NodePublishVolumeRequest, NodeStageVolumeRequest};

fn mounted_at(path: &Path, root: &Path) -> usize {
    let mounts = mounts_below(root);
    mounts.iter().filter(|point| *point == path).count()
}

/// Waits until a call on the volume is in this step.
async fn is_in(node: &Node, volume: &Volume, step: &str) {
    let words = format!("in step {step} for");
    eventually("the step begins", async || {
        // Changes nothing where nothing is under way.
        let expanded = node.expand(volume, &node.staging(volume), 0).await;
        let error = expanded.err()?;
        error.message().contains(&words).then_some(())
    })
    .await;
}

#[test]
fn two_volumes_are_never_mounted_over_one_another() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let [a, b] = ["a", "b"].map(|name| sandbox.volume_in("main", name, "ext4", 16 * MIB));
        let staging = node.staging(&a);
        fs::create_dir_all(&staging).unwrap();
        let stage = |volume: &Volume| NodeStageVolumeRequest {
            staging_target_path: staging.display().to_string(),
            ..node.stage_request(volume)
        };
        // Each looked and found nothing there.
        let held = node.hold("mount", "a");
        let (first, ()) = tokio::join!(node.send_stage(stage(&a)), async {
            is_in(&node, &a, "mount").await;
            let words = ["volume b", "volume a", staging.to_str().unwrap()];
            refused(node.send_stage(stage(&b)).await, Aborted, &words);
            drop(held);
        });
        first.unwrap();
        refused(node.send_stage(stage(&b)).await, FailedPrecondition, &[]);
        assert_eq!(mounted_at(&staging, sandbox.dir()), 1);

        node.stage(&b).await.unwrap();
        let target = node.target(&a, "pod");
        let publish = |volume: &Volume| NodePublishVolumeRequest {
            target_path: target.display().to_string(),
            ..node.publish_request(volume, "pod")
        };
        let held = node.hold("bind", "a");
        let (first, ()) = tokio::join!(node.send_publish(publish(&a)), async {
            is_in(&node, &a, "bind").await;
            let words = ["volume b", "volume a", target.to_str().unwrap()];
            refused(node.send_publish(publish(&b)).await, Aborted, &words);
            drop(held);
        });
        first.unwrap();
        refused(node.send_publish(publish(&b)).await, AlreadyExists, &[]);
        assert_eq!(mounted_at(&target, sandbox.dir()), 1);
        node.down(&a, "pod").await;
        node.unstage(&b).await.unwrap();
        node.assert_clean().await;
    });
}

#[test]
fn nothing_is_published_or_unpublished_at_a_staging_path() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume_in("main", "v", "ext4", 16 * MIB);
        let raw = sandbox.volume_in("main", "raw", "block", 16 * MIB);
        for volume in [&volume, &raw] {
            let target = node.up(volume, "pod").await;
            let staging = node.staging(volume);
            for path in [staging.clone(), staging.join("below")] {
                let mut publish = node.publish_request(volume, "other");
                publish.target_path = path.display().to_string();
                let words = ["target_path", staging.to_str().unwrap()];
                refused(node.send_publish(publish).await, InvalidArgument, &words);
                refused(
                    node.unpublish_at(volume, &path).await,
                    InvalidArgument,
                    &words,
                );
            }
            let of_staging = usize::from(!volume.is_block());
            assert_eq!(mounted_at(&staging, sandbox.dir()), of_staging);
            assert_eq!(mounted_at(&target, sandbox.dir()), 1);
            node.down(volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn a_raw_volume_is_not_staged_where_another_volume_is() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume_in("main", "v", "ext4", 16 * MIB);
        let [raw, other] =
            ["raw", "other"].map(|name| sandbox.volume_in("main", name, "block", 16 * MIB));
        let target = node.up(&volume, "pod").await;
        node.stage(&raw).await.unwrap();
        let taken = [node.staging(&volume), target, node.staging(&raw)];
        for path in &taken {
            let mut stage = node.stage_request(&other);
            stage.staging_target_path = path.display().to_string();
            let words = ["staging_target_path", path.to_str().unwrap()];
            refused(node.send_stage(stage).await, InvalidArgument, &words);
        }
        let mut publish = node.publish_request(&volume, "other");
        publish.target_path = taken[2].display().to_string();
        let words = ["target_path", taken[2].to_str().unwrap()];
        refused(node.send_publish(publish).await, InvalidArgument, &words);
        node.down(&volume, "pod").await;
        node.unstage(&raw).await.unwrap();
        node.assert_clean().await;
    });
}

/// A staging mount that an operator took away, with its directory.
#[test]
fn a_volume_without_its_staging_mount_must_be_staged_again() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume_in("main", "v", "ext4", 16 * MIB);
        node.stage(&volume).await.unwrap();
        let staging = node.staging(&volume);
        rustix::mount::unmount(&staging, rustix::mount::UnmountFlags::empty()).unwrap();
        let words = ["is gone", "stage it again"];
        for _ in 0..2 {
            refused(
                node.publish(&volume, "pod").await,
                FailedPrecondition,
                &words,
            );
            let _ = fs::remove_dir(&staging);
        }
        node.up(&volume, "pod").await;
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

/// A file at the target path is not followed, not opened, not mounted over and not removed.
#[test]
fn files_and_nodes_at_a_target_are_left_alone() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume_in("main", "v", "ext4", 16 * MIB);
        let raw = sandbox.volume_in("main", "raw", "block", 16 * MIB);
        let theirs = sandbox.dir().join("theirs");
        fs::create_dir(&theirs).unwrap();
        fs::write(theirs.join("file"), "").unwrap();
        let nodes = [
            (FileType::Fifo, makedev(0, 0)),
            (FileType::CharacterDevice, makedev(1, 5)),
            (FileType::BlockDevice, makedev(7, 0)),
        ];
        for volume in [&volume, &raw] {
            node.stage(volume).await.unwrap();
            let target = node.target(volume, "pod");
            fs::create_dir_all(target.parent().unwrap()).unwrap();
            for kind in 0..7 {
                match kind {
                    0 => symlink(&theirs, &target).unwrap(),
                    1 => symlink(theirs.join("file"), &target).unwrap(),
                    2 => symlink(theirs.join("new"), &target).unwrap(),
                    // Bound elsewhere, as a socket's path is short.
                    3 => {
                        let socket = sandbox.dir().join("s");
                        drop(UnixListener::bind(&socket).unwrap());
                        fs::hard_link(&socket, &target)
                            .or_else(|_| symlink(&socket, &target))
                            .unwrap();
                        fs::remove_file(socket).unwrap();
                    }
                    other => {
                        let (kind, number) = nodes[other - 4];
                        mknodat(CWD, &target, kind, Mode::RWXU, number).unwrap();
                    }
                }
                let words = ["target_path", target.to_str().unwrap()];
                refused(
                    node.publish(volume, "pod").await,
                    FailedPrecondition,
                    &words,
                );
                refused(
                    node.unpublish(volume, "pod").await,
                    FailedPrecondition,
                    &words,
                );
                fs::remove_file(&target).unwrap();
            }
            node.unstage(volume).await.unwrap();
        }
        assert_eq!(fs::read_dir(&theirs).unwrap().count(), 1);
        node.assert_clean().await;
    });
}
