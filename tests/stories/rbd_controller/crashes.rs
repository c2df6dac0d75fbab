//! SIGKILL to the controller at any instant: the sidecars' repeats finish the work, and
//! nothing is left behind.

use std::time::{Duration, Instant};

use testkit::{
    Controller, MIB, Rng, TestCluster, eventually, from_snapshot, from_volume, kill_during, story,
};

use super::{Ceph, GIB};

impl Ceph {
    /// A cluster that soon ends the watches of dead clients.
    fn forgetful(sandbox: &testkit::Sandbox) -> Option<Self> {
        let cluster = TestCluster::own()?;
        cluster.ceph(&["config", "set", "osd", "osd_client_watch_timeout", "2"]);
        Some(Self::over(sandbox, cluster))
    }

    /// The contents of the pool of volumes, snapshots and names, by object.
    fn left(&self) -> Vec<String> {
        const STAY: [&str; 4] = ["rbd_directory", "rbd_info", "rbd_children", "rbd_trash"];
        let mut left = Vec::new();
        for object in self.rados(&["ls"]).lines() {
            if object.starts_with("csi.volumes.")
                || object.starts_with("csi.snaps.")
                || object == "uring-csi.trash"
            {
                let keys = self.rados(&["listomapkeys", object]);
                left.extend(keys.lines().map(|key| format!("{object}: {key}")));
            } else if !STAY.contains(&object) && !object.starts_with("rbd_trash_") {
                left.push(object.to_owned());
            }
        }
        left
    }
}

/// Kills the controller amid a call, and repeats the call in its next life until it
/// succeeds.
async fn killed_amid<T>(
    controller: &Controller,
    rng: &mut Rng,
    call: impl AsyncFn() -> Result<T, tonic::Status>,
) -> T {
    kill_during(controller, rng, &call).await;
    controller.start().await;
    eventually("a repeat succeeds", async || call().await.ok()).await
}

/// Between two looks at what is left.
const LOOK_EVERY: Duration = Duration::from_millis(200);

#[test]
fn a_controller_may_be_killed_at_any_instant() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::forgetful(sandbox) else {
            return;
        };
        let mut setup = ceph.setup(sandbox);
        setup.args.extend(ceph.own_secret(sandbox));
        let controller = Controller::start_with(sandbox, setup).await;
        let mut rng = Rng::new();
        for round in 0..4 {
            let claim = |name: &str| ceph.claim(&format!("{name}{round}"), 64 * MIB);
            let source = claim("source");
            let source = async || controller.create(source.clone()).await;
            let source = killed_amid(&controller, &mut rng, source).await.volume_id;
            let name = format!("snapshot{round}");
            let take = async || controller.snapshot(&source, &name).await;
            let snapshot = killed_amid(&controller, &mut rng, take).await.snapshot_id;
            let mut volumes = vec![source.clone()];
            for (name, from) in [
                ("restored", from_snapshot(&snapshot)),
                ("cloned", from_volume(&source)),
            ] {
                let mut copy = claim(name);
                copy.volume_content_source = Some(from);
                let copy = async || controller.create(copy.clone()).await;
                volumes.push(killed_amid(&controller, &mut rng, copy).await.volume_id);
            }
            let grow = async || controller.expand(&source, GIB).await;
            let (bytes, _) = killed_amid(&controller, &mut rng, grow).await;
            assert_eq!(bytes.unsigned_abs(), GIB);
            // The two, and the temporary image between the clone and its source.
            assert_eq!(ceph.images().len(), 5);

            let delete = async || controller.delete_snapshot(&snapshot).await;
            killed_amid(&controller, &mut rng, delete).await;
            for volume in &volumes {
                let delete = async || controller.delete(volume).await;
                killed_amid(&controller, &mut rng, delete).await;
            }
            assert!(ceph.images().is_empty());
        }
        // A restarted manager repeats its tasks; the controller at each start. Each life
        // gets more time: the cluster keeps the watches of a dead life, and an image with a
        // watcher is not removed.
        let mut life = Duration::from_millis(500);
        let emptied = async || {
            let end = Instant::now() + life;
            loop {
                let left = ceph.left();
                if left.is_empty() {
                    return Some(());
                }
                if Instant::now() >= end {
                    println!("{left:?}");
                    break;
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
            controller.kill9().await;
            controller.start().await;
            life *= 2;
            None
        };
        eventually("nothing is left", emptied).await;
    });
}
