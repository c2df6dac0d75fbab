//! Inline ephemeral volumes: created by their pod's publish, deleted by its unpublish.

use std::{collections::HashMap, fs, io::ErrorKind, path::Path, time::Duration};

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use testkit::{
    Content, Fault as _, HungPool, MIB, Node, NodeSetup, Phase, Sandbox, StuckFile, Volume,
    crash_at_each_step, eventually, files_below, hex, loops_over, mounts_below, refused, run,
    story,
};
use tonic::Code::{
    AlreadyExists, DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound,
    ResourceExhausted, Unavailable,
};
use uring_csi::proto::csi::NodePublishVolumeRequest;

use crate::protection::protection_at;

/// As kubelet sends it for a pod's inline volume: no staging, a handle of its
/// own, and the pod's attributes.
pub fn inline(name: &str) -> Volume {
    Volume::filesystem(&format!("csi-{name:0>64}"), "ext4")
        .with("csi.storage.k8s.io/ephemeral", "true")
        .with("csi.storage.k8s.io/pod.name", "pod")
        .with("csi.storage.k8s.io/pod.uid", "uid")
        .with("pool", "main")
        .with("size", "64Mi")
}

/// A node that makes inline volumes, in a pool of its own.
pub fn with_inline(sandbox: &Sandbox) -> NodeSetup {
    let setup = NodeSetup {
        pools: vec![format!("main={},local", sandbox.pool("main").display())],
        ..NodeSetup::new(sandbox)
    };
    setup.arg("--inline-max-size=400Mi")
}

pub fn publish(node: &Node, volume: &Volume) -> NodePublishVolumeRequest {
    NodePublishVolumeRequest {
        staging_target_path: String::new(),
        ..node.publish_request(volume, "pod")
    }
}

/// The files in a pool.
fn images(sandbox: &Sandbox) -> Vec<String> {
    let pool = sandbox.pool("main");
    files_below(&pool)
        .iter()
        .filter(|file| fs::metadata(file).is_ok_and(|found| found.len() >= MIB))
        .map(|file| file.display().to_string())
        .collect()
}

#[test]
fn an_inline_volume_lives_as_long_as_its_pod() {
    story(async |sandbox| {
        let node = Node::start_with(sandbox, with_inline(sandbox)).await;
        let volume = inline("a");
        for _ in 0..2 {
            node.send_publish(publish(&node, &volume)).await.unwrap();
        }
        assert_eq!(images(sandbox).len(), 1);
        let target = node.target(&volume, "pod");
        assert_eq!(protection_at(&target), ["nosuid", "nodev"]);
        let content = Content::new("inline");
        content.write(&target.join("file"));
        assert_eq!(node.stats(&volume, &target).await.unwrap().len(), 2);

        // A new agent recovers it.
        node.kill9().await;
        node.restart().await;
        node.send_publish(publish(&node, &volume)).await.unwrap();
        content.assert_in(&target.join("file"));

        for _ in 0..2 {
            node.unpublish(&volume, "pod").await.unwrap();
        }
        assert!(!target.exists());
        assert_eq!(images(sandbox), [""; 0]);
        refused(node.stats(&volume, &target).await, NotFound, &[]);
        node.assert_clean().await;
    });
}

#[test]
fn a_read_only_inline_volume_is_not_written_and_its_secrets_are_not_kept() {
    story(async |sandbox| {
        let node = Node::start_with(sandbox, with_inline(sandbox)).await;
        let volume = inline("a");
        let secret = "hunter2";
        let request = NodePublishVolumeRequest {
            readonly: true,
            secrets: HashMap::from([("userKey".to_owned(), secret.to_owned())]),
            ..publish(&node, &volume)
        };
        node.send_publish(request).await.unwrap();
        let written = fs::write(node.target(&volume, "pod").join("file"), "x").unwrap_err();
        assert_eq!(written.kind(), ErrorKind::ReadOnlyFilesystem);
        let records = [&node.run_dir, &node.state_dir].map(|dir| files_below(dir));
        for file in records.iter().flatten() {
            let text = fs::read(file).unwrap();
            let text = String::from_utf8_lossy(&text);
            assert!(!text.contains(secret), "{}: {text}", file.display());
        }
        assert!(!node.log().contains(secret));
        node.unpublish(&volume, "pod").await.unwrap();
        node.assert_clean().await;
    });
}

#[test]
fn an_inline_volume_keeps_its_size() {
    story(async |sandbox| {
        let node = Node::start_with(sandbox, with_inline(sandbox)).await;
        let volume = inline("a");
        node.send_publish(publish(&node, &volume)).await.unwrap();
        let size = || fs::metadata(&images(sandbox)[0]).unwrap().len();
        let before = size();
        let target = node.target(&volume, "pod");
        for bytes in [128 * MIB, 1024 * MIB] {
            let answer = node.expand(&volume, &target, bytes).await;
            refused(answer, FailedPrecondition, &["inline volume"]);
        }
        assert_eq!(size(), before);
        node.unpublish(&volume, "pod").await.unwrap();
        node.assert_clean().await;
    });
}

#[test]
fn the_image_of_an_inline_volume_is_deleted_once_its_pool_is_back() {
    story(async |sandbox| {
        let (real, pool) = (sandbox.pool("real"), sandbox.pool("main"));
        let [real, pool] = [&real, &pool].map(|path| path.to_str().unwrap());
        run(&["mount", "--bind", real, pool]);
        let node = Node::start_with(sandbox, with_inline(sandbox)).await;
        let volume = inline("away");
        node.send_publish(publish(&node, &volume)).await.unwrap();
        // The attached image keeps it alive.
        run(&["umount", "--lazy", pool]);
        let answer = node.unpublish(&volume, "pod").await;
        refused(answer, Unavailable, &["is it mounted?"]);
        assert!(!node.target(&volume, "pod").exists());
        node.kill9().await;
        node.restart().await;
        run(&["mount", "--bind", real, pool]);
        node.unpublish(&volume, "pod").await.unwrap();
        assert_eq!(images(sandbox), [""; 0]);
        node.assert_clean().await;
    });
}

#[test]
fn the_image_of_a_pod_that_is_gone_is_deleted_once_its_pool_is_back() {
    story(async |sandbox| {
        let (real, pool) = (sandbox.pool("real"), sandbox.pool("main"));
        let [real, pool] = [&real, &pool].map(|path| path.to_str().unwrap());
        run(&["mount", "--bind", real, pool]);
        let node = Node::start_with(sandbox, with_inline(sandbox)).await;
        let volume = inline("orphan");
        node.send_publish(publish(&node, &volume)).await.unwrap();
        node.kill9().await;
        let target = node.target(&volume, "pod");
        run(&["umount", target.to_str().unwrap()]);
        fs::remove_dir_all(target.ancestors().nth(3).unwrap()).unwrap();
        // The attached image keeps it alive.
        run(&["umount", "--lazy", pool]);
        node.restart().await;
        node.wait_for_log("cannot delete orphaned inline volume")
            .await;
        run(&["mount", "--bind", real, pool]);
        eventually("the image is deleted", async || {
            images(sandbox).is_empty().then_some(())
        })
        .await;
        node.assert_clean().await;
    });
}

/// Kubelet makes the pod's directory before it publishes: an agent that deletes what an
/// earlier one has left must not take the volume from a pod that starts.
#[test]
fn the_image_of_a_pod_that_is_back_is_kept() {
    story(async |sandbox| {
        let (real, pool) = (sandbox.pool("real"), sandbox.pool("main"));
        let [real, pool] = [&real, &pool].map(|path| path.to_str().unwrap());
        run(&["mount", "--bind", real, pool]);
        let node = Node::start_with(sandbox, with_inline(sandbox)).await;
        let volume = inline("back");
        node.send_publish(publish(&node, &volume)).await.unwrap();
        let target = node.target(&volume, "pod");
        let content = Content::new("of the pod");
        content.write(&target.join("file"));
        node.kill9().await;
        run(&["umount", target.to_str().unwrap()]);
        fs::remove_dir_all(target.ancestors().nth(3).unwrap()).unwrap();
        // The attached image keeps it alive.
        run(&["umount", "--lazy", pool]);
        node.restart().await;
        node.wait_for_log("cannot delete orphaned inline volume")
            .await;
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        node.wait_for_log("is back; keeping the volume").await;
        run(&["mount", "--bind", real, pool]);
        node.send_publish(publish(&node, &volume)).await.unwrap();
        content.assert_in(&target.join("file"));
        node.unpublish(&volume, "pod").await.unwrap();
        assert_eq!(images(sandbox), [""; 0]);
        node.assert_clean().await;
    });
}

/// As a reboot leaves it. Kills the agent.
async fn lose_all_but_image_and_record(sandbox: &Sandbox, node: &Node, target: &Path) {
    node.kill9().await;
    for mount in mounts_below(&node.run_dir)
        .iter()
        .map(|it| &**it)
        .chain([target])
    {
        run(&["umount", mount.to_str().unwrap()]);
    }
    for device in loops_over(Path::new(&images(sandbox)[0])) {
        run(&["losetup", "--detach", device.to_str().unwrap()]);
    }
    let records = files_below(&node.state_dir.join("inline"));
    let file = records.first().expect("a record");
    let mut record: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    record["boot_id"] = json!("another");
    fs::write(file, record.to_string()).unwrap();
}

#[test]
fn an_inline_volume_outlives_a_publish_with_other_arguments() {
    story(async |sandbox| {
        let node = Node::start_with(sandbox, with_inline(sandbox)).await;
        let volume = inline("kept");
        node.send_publish(publish(&node, &volume)).await.unwrap();
        let target = node.target(&volume, "pod");
        let content = Content::new("before the reboot");
        content.write(&target.join("file"));
        let other = volume.clone().flags(&["noatime"]);
        let refuses = async || {
            let answer = node.send_publish(publish(&node, &other)).await;
            refused(answer, AlreadyExists, &["kept"]);
        };
        refuses().await;
        content.assert_in(&target.join("file"));
        lose_all_but_image_and_record(sandbox, &node, &target).await;
        node.restart().await;
        refuses().await;
        node.send_publish(publish(&node, &volume)).await.unwrap();
        content.assert_in(&target.join("file"));
        node.unpublish(&volume, "pod").await.unwrap();
        assert_eq!(images(sandbox), [""; 0]);
        node.assert_clean().await;
    });
}

#[test]
fn an_inline_volume_that_outlived_a_reboot_survives_a_publish_that_fails() {
    story(async |sandbox| {
        let node = Node::start_with(sandbox, with_inline(sandbox)).await;
        let volume = inline("kept");
        node.send_publish(publish(&node, &volume)).await.unwrap();
        let target = node.target(&volume, "pod");
        let content = Content::new("before the reboot");
        content.write(&target.join("file"));
        lose_all_but_image_and_record(sandbox, &node, &target).await;

        let at = target.to_str().unwrap();
        run(&["mount", "-t", "tmpfs", "none", at]);
        node.restart().await;
        for _ in 0..2 {
            let answer = node.send_publish(publish(&node, &volume)).await;
            let words = ["something else is mounted", "it stays as it was"];
            refused(answer, Unavailable, &words);
        }
        run(&["umount", at]);
        node.send_publish(publish(&node, &volume)).await.unwrap();
        content.assert_in(&target.join("file"));
        node.unpublish(&volume, "pod").await.unwrap();
        assert_eq!(images(sandbox), [""; 0]);
        node.assert_clean().await;
    });
}

#[test]
fn a_hung_state_directory_delays_only_inline_volumes() {
    if !StuckFile::possible() {
        return;
    }
    story(async |sandbox| {
        let mut node = Node::prepare(sandbox, with_inline(sandbox));
        let mut disk = HungPool::new(sandbox, "ext4");
        let hung = sandbox.pool(HungPool::NAME);
        fs::create_dir_all(&node.state_dir).unwrap();
        let hung = hung.to_str().unwrap();
        run(&["mount", "--bind", hung, node.state_dir.to_str().unwrap()]);
        node.start_first().await;
        disk.stop(Phase::Use).await;
        let kubelets = node.timeout.replace(Duration::from_secs(5));
        // More than the kernel has workers for a ring: four for each processor.
        let volumes: Vec<_> = (0..12).map(|number| inline(&number.to_string())).collect();
        let publishes = volumes
            .iter()
            .map(|it| node.send_publish(publish(&node, it)));
        for answer in futures_util::future::join_all(publishes).await {
            let status = answer.expect_err("the directory hangs");
            assert_eq!(status.code(), DeadlineExceeded, "{status:?}");
        }
        node.timeout.set(Duration::from_secs(60));
        let other = sandbox.volume("other", "ext4");
        let target = node.up(&other, "pod").await;
        Content::new("other").write(&target.join("file"));
        node.down(&other, "pod").await;
        fs::remove_file(sandbox.image(&other)).unwrap();

        disk.resume().await;
        node.timeout.set(kubelets);
        for volume in &volumes {
            let unpublish = async || node.unpublish(volume, "pod").await;
            node.retry_until_ok("unpublished", unpublish).await;
        }

        // The next agent cannot read what this one has written.
        let (kept, other) = (inline("kept"), sandbox.volume("next", "ext4"));
        node.send_publish(publish(&node, &kept)).await.unwrap();
        node.up(&other, "pod").await;
        node.kill9().await;
        // The kernel may have the records in memory.
        let held = node.hold("recover", "inline");
        disk.stop(Phase::Use).await;
        node.restart().await;
        node.down(&other, "pod").await;
        let target = node.up(&other, "pod").await;
        Content::new("next").write(&target.join("file"));
        node.wait_for_log("cannot read the records of inline volumes")
            .await;
        let target = node.target(&kept, "pod");
        node.timeout.set(Duration::from_secs(2));
        for answer in [
            node.unpublish(&kept, "pod").await,
            node.send_publish(publish(&node, &inline("new"))).await,
            node.stats(&kept, &target).await.map(drop),
        ] {
            let words = ["inline", "does not answer", "state-node-a"];
            refused(answer, Unavailable, &words);
        }
        drop(held);
        disk.resume().await;
        node.timeout.set(kubelets);
        let unpublish = async || node.unpublish(&kept, "pod").await;
        node.retry_until_ok("unpublished", unpublish).await;
        node.down(&other, "pod").await;
        fs::remove_file(sandbox.image(&other)).unwrap();
        assert_eq!(images(sandbox), [""; 0]);
        node.assert_clean().await;
    });
}

#[test]
fn a_state_directory_that_fails_delays_only_inline_volumes() {
    story(async |sandbox| {
        let mut node = Node::prepare(sandbox, with_inline(sandbox));
        // No directory can be there.
        let records = node.state_dir.join("inline");
        fs::create_dir_all(&node.state_dir).unwrap();
        fs::write(&records, "").unwrap();
        node.start_first().await;
        let other = sandbox.volume("other", "ext4");
        node.up(&other, "pod").await;
        node.down(&other, "pod").await;
        node.timeout.set(Duration::from_secs(2));
        let volume = inline("a");
        let answer = node.send_publish(publish(&node, &volume)).await;
        let words = ["inline", records.to_str().unwrap(), "exists"];
        refused(answer, Unavailable, &words);
        node.wait_for_log("cannot read the records of inline volumes")
            .await;

        fs::remove_file(&records).unwrap();
        node.timeout.set(Duration::from_secs(60));
        node.send_publish(publish(&node, &volume)).await.unwrap();
        node.unpublish(&volume, "pod").await.unwrap();
        fs::remove_file(sandbox.image(&other)).unwrap();
        assert_eq!(images(sandbox), [""; 0]);
        node.assert_clean().await;
    });
}

#[test]
fn an_inline_volume_whose_record_was_lost_is_deleted_with_its_pod() {
    story(async |sandbox| {
        let node = Node::start_with(sandbox, with_inline(sandbox)).await;
        for text in [None, Some("no record")] {
            let volume = inline(&format!("lost-{}", text.is_some()));
            node.send_publish(publish(&node, &volume)).await.unwrap();
            node.kill9().await;
            for record in files_below(&node.state_dir.join("inline")) {
                match text {
                    None => fs::remove_file(record).unwrap(),
                    Some(text) => fs::write(record, text).unwrap(),
                }
            }
            node.restart().await;
            node.unpublish(&volume, "pod").await.unwrap();
            assert!(images(sandbox).is_empty(), "{:?}", images(sandbox));
        }
        node.assert_clean().await;
    });
}

#[test]
fn an_inline_volume_that_cannot_be_made_leaves_nothing() {
    story(async |sandbox| {
        let node = Node::start_with(sandbox, with_inline(sandbox)).await;
        for (key, value) in [("size", "many"), ("size", "-1"), ("pool", "none")] {
            let volume = inline("bad").with(key, value);
            let answer = node.send_publish(publish(&node, &volume)).await;
            refused(answer, InvalidArgument, &[value]);
        }
        for (size, word) in [("401Mi", "--inline-max-size"), ("1000", "too few")] {
            let volume = inline("size").with("size", size);
            let answer = node.send_publish(publish(&node, &volume)).await;
            refused(answer, InvalidArgument, &["volume_context.size", word]);
        }
        let flags = inline("flags").flags(&["nosuchoption"]);
        let mut zfs = inline("zfs");
        zfs.capability = Volume::filesystem("any", "zfs").capability;
        for (volume, word) in [(flags, "nosuchoption"), (zfs, "zfs")] {
            let answer = node.send_publish(publish(&node, &volume)).await;
            refused(answer, InvalidArgument, &[word]);
        }
        assert_eq!(images(sandbox), [""; 0]);
        node.assert_clean().await;
    });
}

/// After a final error kubelet would not unpublish the volume.
#[test]
fn a_publish_that_is_not_undone_gets_no_final_error() {
    story(async |sandbox| {
        let node = Node::start_with(sandbox, with_inline(sandbox)).await;
        let volume = inline("left");
        let target = node.target(&volume, "pod");
        fs::create_dir_all(&target).unwrap();
        let at = target.to_str().unwrap();
        run(&["mount", "-t", "tmpfs", "none", at]);
        let staging = format!("inline-{}", hex(&Sha256::digest(&volume.handle)));
        let in_the_way = node.run_dir.join("staging").join(staging).join("file");
        fs::create_dir_all(in_the_way.parent().unwrap()).unwrap();
        fs::write(&in_the_way, "").unwrap();
        let answer = node.send_publish(publish(&node, &volume)).await;
        let words = ["something else is mounted", "its undo failed", "not empty"];
        refused(answer, Unavailable, &words);

        fs::remove_file(&in_the_way).unwrap();
        run(&["umount", at]);
        node.unpublish(&volume, "pod").await.unwrap();
        assert_eq!(images(sandbox), [""; 0]);
        node.assert_clean().await;
    });
}

/// A pod's author needs no right on the node, and mkfs runs as root on it.
#[test]
fn inline_attributes_reach_only_the_pods_own_volume() {
    story(async |sandbox| {
        let node = Node::start_with(sandbox, with_inline(sandbox)).await;
        let theirs = sandbox.dir().join("theirs");
        fs::write(&theirs, "theirs").unwrap();
        let path = theirs.display();
        for (key, value) in [
            ("mkfsOptions", format!("-l name={path},size=64m")),
            ("mkfsOptions", format!("-r name={path},size=64m")),
            ("mkfsOptions", "-L label".to_owned()),
            ("backend", "loop".to_owned()),
            ("image", "disk.img".to_owned()),
            ("uri", format!("nbd+unix:///?socket={path}")),
            ("directIO", "false".to_owned()),
            ("k8s.io/x", "x".to_owned()),
            ("../size", "1Gi".to_owned()),
        ] {
            let mut volume = inline("hostile").with(key, &value);
            volume.capability = Volume::filesystem("any", "xfs").capability;
            let answer = node.send_publish(publish(&node, &volume)).await;
            refused(answer, InvalidArgument, &[key, "fsType, pool, size"]);
        }
        for option in ["suid", "ro,dev", "context=a:b:c:s0"] {
            let volume = inline("hostile").flags(&[option]);
            let answer = node.send_publish(publish(&node, &volume)).await;
            let word = option.split([',', '=']).next_back().expect("a word");
            refused(answer, InvalidArgument, &["mount_flags", word]);
        }
        assert_eq!(fs::read(&theirs).unwrap(), b"theirs");
        assert_eq!(images(sandbox), [""; 0]);
        node.assert_clean().await;
    });
}

#[test]
fn a_pod_mounts_no_share_and_by_no_option_that_the_node_does_not_allow() {
    story(async |sandbox| {
        let setup = NodeSetup::new(sandbox)
            .arg("--nfs-inline=127.0.0.1:/scratch,127.0.0.1:1:/closed,other:/");
        let node = Node::start_with(sandbox, setup).await;
        let allowed = || {
            let mut volume = Volume::filesystem("csi-nfs", "");
            (volume.context).insert("csi.storage.k8s.io/ephemeral".to_owned(), "true".to_owned());
            volume.with("server", "127.0.0.1").with("share", "/scratch")
        };
        for (key, value, code, words) in [
            ("share", "/", FailedPrecondition, "--nfs-inline"),
            (
                "share",
                "/scratch/below",
                FailedPrecondition,
                "--nfs-inline",
            ),
            ("share", "/scratch/../x", InvalidArgument, "share"),
            ("server", "127.0.0.2", FailedPrecondition, "--nfs-inline"),
            (
                "subDir",
                "x",
                InvalidArgument,
                "mountOptions, server, share",
            ),
            (
                "mountPermissions",
                "7777",
                InvalidArgument,
                "mountPermissions",
            ),
            ("size", "1Gi", InvalidArgument, "size"),
            ("backend", "nfs", InvalidArgument, "backend"),
            ("mountOptions", "suid", InvalidArgument, "suid"),
            ("mountOptions", "ro,dev", InvalidArgument, "dev"),
            ("mountOptions", "addr=127.0.0.2", InvalidArgument, "addr"),
            ("mountOptions", "context=x", InvalidArgument, "context"),
            ("server", "", InvalidArgument, "volume_context.server"),
            ("share", "", InvalidArgument, "volume_context.share"),
            ("mountOptions", "port=1", InvalidArgument, "port=1"),
            (
                "mountOptions",
                "ro,mountport=1",
                InvalidArgument,
                "mountport",
            ),
            ("mountOptions", "proto=udp", InvalidArgument, "proto"),
            ("mountOptions", "sec=none", InvalidArgument, "sec"),
            ("mountOptions", "nconnect=16", InvalidArgument, "nconnect"),
            // Only this reaches the server's address, where nothing listens.
            ("share", "/closed", Unavailable, "does not answer"),
        ] {
            let volume = allowed().with(key, value);
            let answer = node.send_publish(publish(&node, &volume)).await;
            refused(answer, code, &[words]);
        }
        let mut raw = allowed();
        raw.capability = Volume::block("raw").capability;
        let answer = node.send_publish(publish(&node, &raw)).await;
        refused(answer, InvalidArgument, &["no block device"]);
        node.assert_clean().await;
    });
}

#[test]
fn pods_have_inline_volumes_only_where_the_node_allows_it() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = inline("off");
        let answer = node.send_publish(publish(&node, &volume)).await;
        refused(answer, FailedPrecondition, &["--inline-max-size"]);
        assert_eq!(images(sandbox), [""; 0]);
        node.assert_clean().await;

        let shared = NodeSetup::new(sandbox).arg("--inline-max-size=1Gi");
        node.kill9().await;
        let node = Node::start_with(sandbox, shared).await;
        let answer = node.send_publish(publish(&node, &volume)).await;
        refused(answer, InvalidArgument, &["volume_context.pool", "shared"]);
        assert_eq!(images(sandbox), [""; 0]);
        node.assert_clean().await;
    });
}

/// A small pool on a file system of its own: pods fill it, and no further.
#[test]
fn inline_volumes_never_overcommit_their_pool() {
    story(async |sandbox| {
        let pool = sandbox.reflink_pool("main");
        let setup = NodeSetup {
            pools: vec![format!("main={},local", pool.display())],
            ..NodeSetup::new(sandbox)
        };
        let node = Node::start_with(sandbox, setup.arg("--inline-max-size=1Ti")).await;
        let fs = rustix::fs::statvfs(&pool).unwrap();
        let half = (fs.f_bavail * fs.f_frsize / 100 * 45).to_string();
        let volumes = ["a", "b", "c"].map(|name| inline(name).with("size", &half));
        for volume in &volumes[..2] {
            node.send_publish(publish(&node, volume)).await.unwrap();
        }
        let answer = node.send_publish(publish(&node, &volumes[2])).await;
        refused(
            answer,
            ResourceExhausted,
            &["available beyond", "free space"],
        );
        // The existing volume stays, also when it is published again.
        node.send_publish(publish(&node, &volumes[1]))
            .await
            .unwrap();
        node.unpublish(&volumes[0], "pod").await.unwrap();
        node.send_publish(publish(&node, &volumes[2]))
            .await
            .unwrap();
        for volume in &volumes[1..] {
            node.unpublish(volume, "pod").await.unwrap();
        }
        node.assert_clean().await;
    });
}

#[test]
fn an_inline_volume_survives_a_kill_at_any_step() {
    story(async |sandbox| {
        let node = Node::start_with(sandbox, with_inline(sandbox)).await;
        let mut rng = testkit::Rng::new();
        for round in 0..6 {
            let volume = inline(&round.to_string());
            testkit::kill_during(&node, &mut rng, async || {
                node.send_publish(publish(&node, &volume)).await
            })
            .await;
            node.restart().await;
            node.retry_until_ok("published", async || {
                node.send_publish(publish(&node, &volume)).await
            })
            .await;
            Content::new("x").write(&node.target(&volume, "pod").join("file"));
            testkit::kill_during(&node, &mut rng, async || {
                node.unpublish(&volume, "pod").await
            })
            .await;
            node.restart().await;
            node.retry_until_ok("unpublished", async || node.unpublish(&volume, "pod").await)
                .await;
            assert_eq!(images(sandbox), [""; 0]);
        }
        node.assert_clean().await;
    });
}

#[test]
fn the_agent_of_an_inline_volume_may_be_killed_at_each_step() {
    story(async |sandbox| {
        let node = Node::start_with(sandbox, with_inline(sandbox)).await;
        let mut pods = 0;
        crash_at_each_step(&node, 8, async |crashing| {
            pods += 1;
            let volume = inline(&pods.to_string());
            let made = async || node.send_publish(publish(&node, &volume)).await;
            let unpublish = async || node.unpublish(&volume, "pod").await;
            crashing
                .complete("published", made, async || {
                    node.retry_until_ok("unpublished", unpublish).await;
                    assert_eq!(images(sandbox), [""; 0]);
                })
                .await;
            let file = node.target(&volume, "pod").join("file");
            Content::new("x").write(&file);
            crashing
                .complete("unpublished", unpublish, async || {
                    node.retry_until_ok("published", made).await;
                    // Its data may be lost.
                    Content::new("y").write(&file);
                })
                .await;
            crashing.stop_crashing().await;
            // The next agent has nothing left to delete.
            assert_eq!(images(sandbox), [""; 0]);
            node.retry_until_ok("unpublished again", unpublish).await;
        })
        .await;
        node.assert_clean().await;
    });
}
