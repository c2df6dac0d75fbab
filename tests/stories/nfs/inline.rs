//! Shares as inline volumes of pods, as in csi-driver-nfs' `nginx-pod-inline-volume.yaml`.

use std::{fs, os::unix::fs::MetadataExt as _, path::PathBuf};

use testkit::{
    Content, NfsServer, Node, NodeSetup, SHARE, Sandbox, Volume, crash_at_each_step, eventually,
    refused, run,
};
use tonic::Code;

use super::{impatient_node_with, mounts_of, nfs_story};
use crate::{fs_group::with_group, inline::publish, protection::protection_at};

/// A node on which pods may mount the server's share.
async fn allowing_node(sandbox: &Sandbox, server: &NfsServer) -> Node {
    let setup = (NodeSetup::new(sandbox).arg("--volume-mount-group")).arg(&format!(
        "--nfs-inline=127.0.0.1:{}:{SHARE}/",
        server.port()
    ));
    impatient_node_with(sandbox, setup).await
}

/// As kubelet sends it.
fn inline(pod: &str) -> Volume {
    Volume::filesystem(&format!("csi-{pod:0>64}"), "")
        .with("csi.storage.k8s.io/ephemeral", "true")
        .with("csi.storage.k8s.io/pod.name", pod)
        .with("csi.storage.k8s.io/pod.uid", "uid")
        .with("server", "127.0.0.1")
        .with("share", SHARE)
        .with("mountOptions", "nfsvers=4.1,sec=sys")
}

async fn up(node: &Node, volume: &Volume) -> PathBuf {
    let published = node.send_publish(publish(node, volume)).await;
    published.expect("published");
    node.target(volume, "pod")
}

fn mounts(node: &Node) -> usize {
    mounts_of(node, &format!("127.0.0.1:{SHARE}")).len()
}

#[test]
fn pods_share_a_directory_by_inline_volumes() {
    nfs_story(async |sandbox| {
        let mut server = NfsServer::start(sandbox, "server").await;
        let node = allowing_node(sandbox, &server).await;
        let [one, other] = ["one", "other"].map(inline);
        let group = fs::metadata(server.export()).expect("the share").gid();
        let one = with_group(one, "4711");
        let (at_one, at_other) = (up(&node, &one).await, up(&node, &other).await);
        let found = fs::metadata(&at_one).expect("the share").gid();
        assert_eq!(found, group, "the share is not the pod's");
        assert_eq!(up(&node, &one).await, at_one);
        assert_eq!(protection_at(&at_one), ["nosuid", "nodev"]);
        let content = Content::new("inline");
        content.write(&at_one.join("file"));
        content.assert_in(&at_other.join("file"));
        let usage = node.stats(&one, &at_one).await.expect("statistics");
        assert!(usage[0].total > 0);

        // The server keeps what a pod has written.
        node.kill9().await;
        node.restart().await;
        node.stats(&one, &at_one).await.expect("statistics");
        node.unpublish(&one, "pod").await.expect("unpublished");
        node.unpublish(&one, "pod").await.expect("unpublished");
        assert!(!at_one.exists());
        content.assert_in(&at_other.join("file"));
        node.restart_without_records().await;
        node.unpublish(&other, "pod").await.expect("unpublished");
        assert_eq!(mounts(&node), 0);
        content.assert_in(&server.export().join("file"));

        // Its pod is gone before the agent is back.
        let target = up(&node, &one).await;
        node.kill9().await;
        run(&["umount", target.to_str().unwrap()]);
        fs::remove_dir(&target).expect("a directory");
        fs::remove_dir(target.parent().unwrap()).expect("the pod's directory");
        node.restart().await;
        eventually("the volume is deleted", async || {
            (mounts(&node) == 0).then_some(())
        })
        .await;

        // The delete may still be under way.
        let made = async || node.send_publish(publish(&node, &one)).await;
        node.retry_until_ok("published", made).await;
        server.kill9();
        node.unpublish(&one, "pod").await.expect("unpublished");
        assert_eq!(mounts(&node), 0);
        let answer = node.send_publish(publish(&node, &one)).await;
        refused(answer, Code::Unavailable, &["does not answer"]);
        server.restart().await;
        content.assert_in(&up(&node, &one).await.join("file"));
        node.unpublish(&one, "pod").await.expect("unpublished");
        node.assert_clean().await;
    });
}

#[test]
fn the_agent_of_an_inline_share_may_be_killed_at_each_step() {
    nfs_story(async |sandbox| {
        let server = NfsServer::start(sandbox, "server").await;
        let node = allowing_node(sandbox, &server).await;
        let mut pods = 0;
        crash_at_each_step(&node, 16, async |crashing| {
            pods += 1;
            // By NFS 4.0, as in `an_agent_killed_at_any_step_finishes_or_undoes`.
            let volume = inline(&pods.to_string()).with("mountOptions", "vers=4.0");
            let made = async || node.send_publish(publish(&node, &volume)).await;
            let unpublish = async || node.unpublish(&volume, "pod").await;
            crashing
                .complete("published", made, async || {
                    node.retry_until_ok("unpublished", unpublish).await;
                    assert_eq!(mounts(&node), 0);
                })
                .await;
            let file = node.target(&volume, "pod").join("file");
            Content::new("x").write(&file);
            crashing
                .complete("unpublished", unpublish, async || {
                    node.retry_until_ok("published", made).await;
                    Content::new("x").assert_in(&file);
                })
                .await;
            crashing.stop_crashing().await;
            assert_eq!(mounts(&node), 0);
            node.retry_until_ok("unpublished again", unpublish).await;
        })
        .await;
        node.assert_clean().await;
    });
}
