//! Fencing with rbd-nbd, whose daemon may be replaced at any time by another, which is
//! another client of the cluster.

use std::{fs::File, os::unix::fs::FileExt as _, path::PathBuf, time::Duration};

use testkit::{
    Ceph, Content, KINDS, MIB, Node, Sandbox, Supervisor, Volume, eventually, nbds_over,
    own_cluster_story, refused, spec_of,
};
use tonic::Code::Unavailable;

use super::{Fencing, direct};

/// Fencing, on a node that has a supervisor.
async fn with_supervisor<'a>(sandbox: &Sandbox, ceph: &'a Ceph) -> (Fencing<'a>, Supervisor) {
    let mut it = Fencing::new(sandbox, ceph).await;
    it.node.terminate();
    it.node.wait_for_exit().await;
    let supervisor = Supervisor::start(sandbox).await;
    let socket = supervisor.socket().display().to_string();
    it.node = Node::start_with(sandbox, ceph.setup(sandbox).arg("--holder").arg(&socket)).await;
    (it, supervisor)
}

impl Fencing<'_> {
    /// A block volume that rbd-nbd serves, published to the node and staged there.
    async fn served(&self, name: &str) -> (Volume, PathBuf) {
        let volume = self.volume(name, "block").await.with("mounter", "rbd-nbd");
        let target = self.up(&self.node, "node-a", &volume).await;
        (volume, target)
    }

    /// The addresses of the clients that have the image open.
    fn clients(&self, volume: &Volume) -> Vec<String> {
        let status = ["status", "--format", "json", &spec_of(volume)];
        let status = self.ceph.cluster.rbd(&status);
        let status: serde_json::Value = serde_json::from_str(&status).unwrap();
        let watchers = status["watchers"].as_array().unwrap().iter();
        let address = |watcher: &serde_json::Value| watcher["address"].as_str().map(str::to_owned);
        watchers.filter_map(address).collect()
    }
}

/// The write of a fenced pod. librbd, which holds writes back, may report success; it does
/// not reach the image.
fn late(pod: &File) {
    let _ = pod
        .write_all_at(&[7; 4096], 0)
        .and_then(|()| pod.sync_all());
}

#[test]
fn fencing_an_nbd_backed_volume_affects_no_other() {
    own_cluster_story(async |sandbox, ceph| {
        let (it, _supervisor) = with_supervisor(sandbox, ceph).await;
        let (served, target) = it.served("served").await;
        let beside = it.volume("beside", "block").await;
        let content = Content::new("kept");
        let other = it.up(&it.node, "node-a", &beside).await;
        let pod = direct(&target);
        content.write_at(&target, 0).unwrap();
        let client = &it.clients(&served)[0];
        it.controller.unpublish(&served, "node-a").await.unwrap();
        assert!(it.blocklist().contains(client));
        late(&pod);
        drop(pod);
        content.write_at(&other, 0).unwrap();
        it.node.down(&served, "pod").await;

        let target = it.up(&it.node, "node-a", &served).await;
        content.assert_at(&target, 0);
        content.write_at(&target, MIB).unwrap();
        it.node.down(&served, "pod").await;
        it.controller.unpublish(&served, "node-a").await.unwrap();
        assert!(!it.blocklist().contains(client), "the client has ended");
        it.node.down(&beside, "pod").await;
        it.node.assert_clean().await;
    });
}

#[test]
fn the_replacement_of_a_dead_daemon_is_fenced() {
    own_cluster_story(async |sandbox, ceph| {
        let (it, supervisor) = with_supervisor(sandbox, ceph).await;
        let (volume, target) = it.served("v").await;
        let content = Content::new("kept");
        let pod = direct(&target);
        let first = it.clients(&volume);
        supervisor.kill_daemon(&volume).await;
        // It waits for the next.
        content.write_at(&target, 0).unwrap();
        let next = it.clients(&volume);
        let next = next.into_iter().find(|one| !first.contains(one)).unwrap();
        eventually("it is registered", async || {
            (it.entry(sandbox, &volume)["address"] == *next).then_some(())
        })
        .await;
        eventually("the supervisor has the dead one blocklisted", async || {
            it.blocklist().contains(&first[0]).then_some(())
        })
        .await;
        let blocklist = it.blocklist();
        assert!(!blocklist.contains(&next), "{blocklist}");

        // The daemon alone is left.
        it.node.kill9().await;
        supervisor.kill9().await;
        eventually("it is fenced", async || {
            it.controller.unpublish(&volume, "node-a").await.ok()
        })
        .await;
        let fenced = it.blocklist();
        assert!(fenced.contains(&next), "{fenced}");
        late(&pod);
        drop(pod);

        // The node is back, and was not rebooted.
        supervisor.restart().await;
        it.node.restart().await;
        it.node.down(&volume, "pod").await;
        let target = it.up(&it.node, "node-a", &volume).await;
        content.assert_at(&target, 0);
        content.write_at(&target, MIB).unwrap();
        it.node.down(&volume, "pod").await;
        it.controller.unpublish(&volume, "node-a").await.unwrap();
        assert!(!it.blocklist().contains(&next), "the client has ended");
        it.node.assert_clean().await;
    });
}

#[test]
fn an_unregistered_daemon_is_fenced() {
    own_cluster_story(async |sandbox, ceph| {
        let (it, supervisor) = with_supervisor(sandbox, ceph).await;
        let volume = it.volume("v", "block").await.with("mounter", "rbd-nbd");
        let mut stage = it.node.stage_request(&volume);
        stage.publish_context = it.controller.publish(&volume, "node-a").await.unwrap();
        std::fs::create_dir_all(it.node.staging(&volume)).unwrap();
        // It has registered that a daemon is starting, and the daemon runs. If another
        // process took its device, it has not got that far.
        supervisor.kill9().await;
        let mut entry = serde_json::Value::Null;
        while entry["starting"].is_null() {
            supervisor.restart_crashing_at(1).await;
            it.node.send_stage(stage.clone()).await.unwrap_err();
            supervisor.wait_for_exit().await;
            entry = it.entry(sandbox, &volume);
        }
        assert!(entry["address"].is_null(), "{entry}");
        it.node.kill9().await;
        let client = it.clients(&volume).pop().unwrap();
        let content = Content::new("kept");
        let device = PathBuf::from(&nbds_over(&volume.handle)[0]);
        let pod = direct(&device);
        content.write_at(&device, 0).unwrap();

        // Its node may be about to end it, for two minutes.
        let unpublished = it.controller.unpublish(&volume, "node-a");
        let waited = tokio::time::timeout(Duration::from_secs(60), unpublished).await;
        waited.unwrap_err();
        assert!(!it.blocklist().contains(&client));
        eventually("it is fenced", async || {
            it.controller.unpublish(&volume, "node-a").await.ok()
        })
        .await;
        assert!(it.blocklist().contains(&client));
        late(&pod);
        drop(pod);

        supervisor.restart().await;
        it.node.restart().await;
        it.node.unstage(&volume).await.unwrap();
        let target = it.up(&it.node, "node-a", &volume).await;
        content.assert_at(&target, 0);
        it.node.down(&volume, "pod").await;
        it.controller.unpublish(&volume, "node-a").await.unwrap();
        assert!(!it.blocklist().contains(&client), "the client has ended");
        it.node.assert_clean().await;
    });
}

#[test]
fn no_daemon_is_started_for_a_volume_no_longer_published() {
    own_cluster_story(async |sandbox, ceph| {
        let (it, supervisor) = with_supervisor(sandbox, ceph).await;
        let (volume, target) = it.served("v").await;
        let content = Content::new("kept");
        content.write_at(&target, 0).unwrap();
        // The node was cut off, so that the image had no watcher when it was unpublished;
        // and it is published again, and may have had another client meanwhile.
        let withdrawn = async |again: bool| {
            it.rados(&volume, &["rmomapkey", "uring-csi.node.node-a"]);
            if again {
                it.controller.publish(&volume, "node-a").await.unwrap();
            }
            supervisor.kill_daemon(&volume).await;
            let said = "is not published to node node-a";
            eventually("the report names the reason", async || {
                let held = supervisor.status(&volume).await.unwrap();
                (held.pid == 0 && held.trouble.contains(said)).then_some(())
            })
            .await;
        };
        withdrawn(false).await;
        let mut stage = it.node.stage_request(&volume);
        stage.publish_context = [("fencing".to_owned(), "true".to_owned())].into();
        let staged = it.node.send_stage(stage).await;
        refused(staged, Unavailable, &["not published to node node-a"]);
        for again in [false, true] {
            if again {
                withdrawn(true).await;
            }
            let target = it.up(&it.node, "node-a", &volume).await;
            content.assert_at(&target, 0);
            let held = supervisor.status(&volume).await.unwrap();
            assert!(held.pid != 0 && held.trouble.is_empty(), "{held:?}");
        }
        it.node.down(&volume, "pod").await;
        assert!(nbds_over(&volume.handle).is_empty());
        eventually(
            "the watches of those that were killed are over",
            async || it.controller.unpublish(&volume, "node-a").await.ok(),
        )
        .await;
        it.node.assert_clean().await;
    });
}

#[test]
fn each_replacement_daemon_is_registered() {
    own_cluster_story(async |sandbox, ceph| {
        let (it, supervisor) = with_supervisor(sandbox, ceph).await;
        let (volume, target) = it.served("v").await;
        let entry = || it.entry(sandbox, &volume);
        let registered = || entry()["address"].as_str().map(str::to_owned);
        let assert_registered = || assert!(it.clients(&volume).contains(&registered().unwrap()));
        assert_registered();

        // The next supervisor replaces the daemon of its dead predecessor, and registers the
        // new one. Until it runs, no client can be registered.
        let first = registered();
        supervisor.kill9().await;
        let mut stage = it.node.stage_request(&volume);
        stage.publish_context = it.controller.publish(&volume, "node-a").await.unwrap();
        let without = it.node.send_stage(stage.clone()).await;
        refused(without, Unavailable, &["uring-csi-holder does not answer"]);
        supervisor.restart().await;
        it.node.send_stage(stage).await.unwrap();
        assert_registered();
        assert_ne!(registered(), first);

        // It grows.
        let large = 2 * KINDS[3].1;
        ceph.resize(&volume, large);
        let size = it.node.expand(&volume, &target, large).await.unwrap();
        assert_eq!(size.unsigned_abs(), large);
        assert_registered();

        // A daemon that fails to start is not reported as starting.
        let (name, away) = (spec_of(&volume), format!("{}/away", it.pool));
        ceph.cluster.rbd(&["rename", &name, &away]);
        supervisor.kill_daemon(&volume).await;
        eventually("the report has no daemon", async || {
            let held = supervisor.status(&volume).await.unwrap();
            let entry = entry();
            let is_none = entry["address"].is_null() && entry["starting"].is_null();
            (held.pid == 0 && held.trouble.contains("no image") && is_none).then_some(())
        })
        .await;
        ceph.cluster.rbd(&["rename", &away, &name]);
        eventually("it starts again", async || {
            let held = supervisor.status(&volume).await.unwrap();
            (held.pid != 0 && held.trouble.is_empty()).then_some(())
        })
        .await;
        assert_registered();
        it.node.down(&volume, "pod").await;
        eventually("the watch of the one that was killed is over", async || {
            it.controller.unpublish(&volume, "node-a").await.ok()
        })
        .await;
        it.node.assert_clean().await;
    });
}
