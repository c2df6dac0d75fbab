//! Clusters that do not answer, that stop while volumes are in use, and that move.

use std::{net::TcpListener, thread, time::Duration};

use serde_json::json;
use testkit::{
    Ceph, Content, Node, Sandbox, Volume, ceph_story, eventually, own_cluster_story, rbds_of,
    refused, run,
};
use tonic::Code::{Aborted, DeadlineExceeded, Unavailable};

use super::lifecycle;

/// The longest time that kubelet waits while another volume's cluster is away.
const AT_ONCE: Duration = Duration::from_secs(30);

/// A volume of a cluster whose monitors are these.
pub(super) fn of_monitors(ceph: &Ceph, monitors: &[String]) -> Volume {
    let id = format!("{}-away", ceph.cluster_id);
    ceph.configure(&[ceph.entry(), json!({"clusterID": id, "monitors": monitors})]);
    ceph.volume("ext4").with("clusterID", &id)
}

/// A whole life of another cluster's volume, without delay.
async fn lifecycle_beside(node: &Node, volume: &Volume) {
    let kubelets = node.timeout.replace(AT_ONCE);
    lifecycle(node, volume).await;
    node.timeout.set(kubelets);
}

#[test]
fn silent_monitors_delay_only_their_own_volumes() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let monitors = [silent.local_addr().unwrap().to_string()];
        let away = of_monitors(ceph, &monitors);
        let here = ceph.volume("ext4");
        node.timeout.set(Duration::from_secs(3));
        let early = node.stage(&away).await;
        refused(early, DeadlineExceeded, &["attach"]);
        // While the stage is under way.
        lifecycle_beside(&node, &here).await;
        node.timeout.set(Duration::from_secs(60));
        refused(node.stage(&away).await, Unavailable, &[&monitors[0]]);
        assert!(rbds_of(sandbox.dir()).is_empty());
        node.assert_clean().await;
    });
}

#[test]
fn moved_monitors_are_found_by_a_changed_configuration() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let used = ceph.volume("ext4");
        let target = node.up(&used, "pod").await;
        let closed = ["127.0.0.1:1".to_owned()];
        let mut away = ceph.entry();
        away["monitors"] = json!(closed);
        ceph.configure(&[away]);
        let volume = ceph.volume("ext4");
        refused(node.stage(&volume).await, Unavailable, &[&closed[0]]);
        // The devices in use have their own connections.
        Content::new("used").write(&target.join("file"));
        node.publish(&used, "another").await.unwrap();
        node.unpublish(&used, "another").await.unwrap();
        // One monitor of several is enough.
        let mut moved = ceph.entry();
        moved["monitors"] = json!([&closed[..], &ceph.cluster.monitors].concat());
        ceph.configure(&[moved]);
        lifecycle(&node, &volume).await;
        // Unstage calls no monitor.
        std::fs::remove_file(ceph.config()).unwrap();
        node.down(&used, "pod").await;
        refused(node.stage(&volume).await, Unavailable, &["config.json"]);
        node.assert_clean().await;
    });
}

#[test]
fn a_frozen_osd_delays_and_loses_nothing() {
    own_cluster_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let other = Ceph::another(sandbox);
        for kind in ["ext4", "block"] {
            let [used, fresh] = [(); 2].map(|()| ceph.volume(kind));
            let target = node.up(&used, "pod").await;
            let writer = {
                let _frozen = ceph.freeze();
                let writer = write_in_thread(&used, &target);
                // A map calls the OSD.
                node.timeout.set(Duration::from_secs(3));
                let late = node.stage(&fresh).await.unwrap_err();
                assert_eq!(late.code(), DeadlineExceeded, "{late:?}");
                let busy = node.unstage(&fresh).await.unwrap_err();
                assert_eq!(busy.code(), Aborted, "{busy:?}");
                // None of these do.
                assert!(!node.stats(&used, &target).await.unwrap().is_empty());
                node.publish(&used, "another").await.unwrap();
                node.unpublish(&used, "another").await.unwrap();
                lifecycle_beside(&node, &other.volume("ext4")).await;
                assert!(!writer.is_finished());
                writer
            };
            node.timeout.set(Duration::from_secs(60));
            writer.join().unwrap();
            node.retry_until_ok("staged", async || node.stage(&fresh).await)
                .await;
            node.publish(&fresh, "pod").await.unwrap();
            for volume in [&used, &fresh] {
                node.down(volume, "pod").await;
            }
            is_kept(&node, &used).await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn an_osd_that_restarts_under_a_volume_loses_nothing() {
    own_cluster_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        for kind in ["ext4", "xfs"] {
            let volume = ceph.volume(kind);
            let target = node.up(&volume, "pod").await;
            let writer = {
                let _stopped = ceph.stop();
                let writer = write_in_thread(&volume, &target);
                thread::sleep(Duration::from_millis(300));
                assert!(!writer.is_finished());
                writer
            };
            writer.join().unwrap();
            node.down(&volume, "pod").await;
            is_kept(&node, &volume).await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn an_agent_killed_while_the_osd_is_frozen_is_succeeded() {
    own_cluster_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let volume = ceph.volume("ext4");
        let dying = {
            let _frozen = ceph.freeze();
            node.timeout.set(Duration::from_secs(4));
            let late = node.stage(&volume).await.unwrap_err();
            assert_eq!(late.code(), DeadlineExceeded, "{late:?}");
            // One of its threads is in the driver, where no signal reaches it.
            let dying = node.kill_and_detach();
            node.restart().await;
            let early = node.stage(&volume).await.unwrap_err();
            assert!(
                [Aborted, Unavailable, DeadlineExceeded].contains(&early.code()),
                "{early:?}"
            );
            assert!(rbds_of(sandbox.dir()).len() <= 1);
            dying
        };
        node.timeout.set(Duration::from_secs(60));
        node.retry_until_ok("staged", async || node.stage(&volume).await)
            .await;
        assert_eq!(
            rbds_of(sandbox.dir()).len(),
            1,
            "one map, of the old agent or the new"
        );
        eventually("the old agent has ended", async || {
            dying.is_gone().then_some(())
        })
        .await;
        node.unstage(&volume).await.unwrap();
        node.assert_clean().await;
    });
}

#[test]
fn a_blocklisted_node_unstages() {
    own_cluster_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let volume = ceph.volume("ext4");
        let target = node.up(&volume, "pod").await;
        Content::new("before").write(&target.join("file"));
        blocklist_node(sandbox, ceph);
        std::fs::File::create(target.join("lost"))
            .and_then(|file| file.sync_all())
            .unwrap_err();
        node.unpublish(&volume, "pod").await.unwrap();
        node.retry_until_ok("unstaged", async || node.unstage(&volume).await)
            .await;
        node.assert_clean().await;
    });
}

/// Blocklists the clients that the driver has for a sandbox's images.
fn blocklist_node(sandbox: &Sandbox, ceph: &Ceph) {
    for device in rbds_of(sandbox.dir()) {
        let id = device.to_str().unwrap().trim_start_matches("/dev/rbd");
        let address = format!("/sys/bus/rbd/devices/{id}/client_addr");
        let address = std::fs::read_to_string(address).unwrap();
        ceph.cluster
            .ceph(&["osd", "blocklist", "add", address.trim()]);
    }
}

/// Checks the data of [`write_in_thread`] on the device, without the page cache.
pub async fn is_kept(node: &Node, volume: &Volume) {
    run(&["sh", "-c", "echo 3 > /proc/sys/vm/drop_caches"]);
    let target = node.up(volume, "pod").await;
    let content = Content::new(&volume.handle);
    if volume.is_block() {
        content.assert_at(&target, 0);
    } else {
        content.assert_in(&target.join("file"));
    }
    node.down(volume, "pod").await;
}

pub fn write_in_thread(volume: &Volume, target: &std::path::Path) -> thread::JoinHandle<()> {
    let content = Content::new(&volume.handle);
    let (target, is_block) = (target.to_owned(), volume.is_block());
    thread::spawn(move || {
        if is_block {
            content.write_at(&target, 0).unwrap();
        } else {
            content.write(&target.join("file"));
        }
    })
}
