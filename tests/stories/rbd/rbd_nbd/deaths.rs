//! The agent, the supervisor and a daemon are killed, and the cluster's OSD stops.

use std::{
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use testkit::{
    Content, MIB, Node, Rng, Sandbox, Supervisor, Volume, ceph_story, crash_lifecycle_at_each_step,
    eventually, kill_within, kinds_to_crash, own_cluster_story, program, refused,
};
use tonic::Code::{FailedPrecondition, Unavailable};

use super::{kill_unlocked, nbds, node_with, served};
use crate::{
    metrics::Scrape,
    rbd::{assert_nothing_staged, devices_over, encrypted, killed, outages, write_or_check},
};

fn volumes_that_are(state: &str) -> String {
    format!("uring_csi_supervised_volumes{{state=\"{state}\"}}")
}

fn restarts(reason: &str) -> String {
    format!("uring_csi_daemon_restarts_total{{reason=\"{reason}\",result=\"ok\"}}")
}

#[test]
fn data_survives_the_death_of_agent_supervisor_and_daemon() {
    ceph_story(async |sandbox, ceph| {
        let scrape = Scrape::new();
        let supervisor = Supervisor::start_with(sandbox, &[scrape.arg()]).await;
        let node = node_with(sandbox, ceph, &supervisor).await;
        for kind in ["ext4", "block"] {
            let volume = served(ceph.volume(kind));
            let content = Content::new(&volume.handle);
            let target = node.up(&volume, "pod").await;
            write_or_check(&volume, &target, &content, true);
            scrape
                .becomes(&volumes_that_are("served"), |count| count > 0.0)
                .await;

            // The agent: I/O continues.
            node.kill9().await;
            write(&volume, &target, "without an agent");
            node.restart().await;
            assert!(conditions(&node, &volume, &target).await.is_empty());

            // A daemon, with requests in flight: its successor completes them.
            supervisor.kill_daemon(&volume).await;
            write(&volume, &target, "without a daemon");
            scrape
                .becomes(&restarts("ended"), |count| count > 0.0)
                .await;

            // The supervisor: its daemons run on, and health reports that nothing restarts them.
            supervisor.kill9().await;
            write(&volume, &target, "without a supervisor");
            // Kubelet restarts: no supervisor takes the key, and no daemon needs it now.
            node.stage(&volume).await.unwrap();
            supervisor.restart().await;
            until(&node, &volume, &target, &["ServerUnkept"]).await;
            scrape
                .becomes(&volumes_that_are("keyless"), |count| count > 0.0)
                .await;

            // A stage brings the key, so that a daemon may die again.
            node.stage(&volume).await.unwrap();
            until(&node, &volume, &target, &[]).await;
            scrape
                .becomes(&restarts("adopted"), |count| count > 0.0)
                .await;
            supervisor.kill_daemon(&volume).await;
            write(&volume, &target, "again");

            // All of them.
            let daemon = supervisor.daemon(&volume).await;
            node.kill9().await;
            supervisor.kill9().await;
            kill_unlocked(&volume, daemon).await;
            node.restart().await;
            let said = "no rbd-nbd serves it";
            eventually("health reports that no daemon serves it", async || {
                let staged = node.stage(&volume).await;
                staged
                    .is_err()
                    .then(|| refused(staged, Unavailable, &[said]))
            })
            .await;
            supervisor.restart().await;
            until(&node, &volume, &target, &["ServerAway"]).await;
            scrape
                .becomes(&volumes_that_are("unserved"), |count| count > 0.0)
                .await;
            reattach(&node, &supervisor, &volume, sandbox);
            until(&node, &volume, &target, &[]).await;

            write_or_check(&volume, &target, &content, false);
            node.down(&volume, "pod").await;
            assert_nothing_staged(&node, &volume);
        }
        node.assert_clean().await;
    });
}

#[test]
fn the_agent_is_killed_at_some_steps_of_a_blank_image() {
    ceph_story(async |sandbox, ceph| {
        let supervisor = Supervisor::start(sandbox).await;
        let node = node_with(sandbox, ceph, &supervisor).await;
        let devices = |volume: &Volume| devices_over(volume).len();
        for kind in kinds_to_crash() {
            let volume = ceph.one_after_another(|| served(ceph.volume(kind)));
            crash_lifecycle_at_each_step(&node, 36, volume, devices, ceph.doubling()).await;
        }
        node.assert_clean().await;
    });
}

fn write(volume: &Volume, target: &Path, what: &str) {
    let content = Content::new(what);
    if volume.is_block() {
        content.write_at(target, 8 * MIB).unwrap();
        content.assert_at(target, 8 * MIB);
    } else {
        content.write(&target.join("other"));
        content.assert_in(&target.join("other"));
    }
}

async fn until(node: &Node, volume: &Volume, target: &Path, wanted: &[&str]) {
    eventually("health reports the volume's condition", async || {
        (conditions(node, volume, target).await == wanted).then_some(())
    })
    .await;
}

fn reattach(node: &Node, supervisor: &Supervisor, volume: &Volume, sandbox: &Sandbox) {
    let secrets: PathBuf = sandbox.dir().join("secret");
    std::fs::create_dir_all(&secrets).unwrap();
    for (name, value) in &volume.secrets {
        std::fs::write(secrets.join(name), value).unwrap();
    }
    let mut command = Command::new(program("uringctl"));
    let sockets = [
        ("--node-endpoint", node.socket()),
        ("--holder-endpoint", supervisor.socket()),
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

/// The reasons of a volume's conditions, as the agent reports them.
async fn conditions(node: &Node, volume: &Volume, target: &Path) -> Vec<String> {
    let health = node.health(volume, target).await.unwrap();
    health.into_iter().map(|entry| entry.reason).collect()
}

#[test]
fn the_agent_is_killed_at_any_instant() {
    ceph_story(async |sandbox, ceph| {
        let supervisor = Supervisor::start(sandbox).await;
        let node = node_with(sandbox, ceph, &supervisor).await;
        for kind in ["xfs", "block"] {
            let volume = served(ceph.volume(kind));
            killed::kill_in_each_call(&node, &mut Rng::new(), &volume).await;
            assert!(supervisor.status(&volume).await.is_none());
        }
        node.assert_clean().await;
    });
}

#[test]
fn the_agent_is_killed_in_the_first_stage_of_a_blank_image() {
    ceph_story(async |sandbox, ceph| {
        let supervisor = Supervisor::start(sandbox).await;
        let node = node_with(sandbox, ceph, &supervisor).await;
        killed::kill_in_first_stage(&node, 2, || served(ceph.volume("ext4"))).await;
        let secret = || served(encrypted::volume(ceph, "ext4"));
        killed::kill_in_first_stage(&node, 1, secret).await;
    });
}

#[test]
fn a_check_for_other_clients_missed_in_a_crash_is_made_later() {
    ceph_story(async |sandbox, ceph| {
        let supervisor = Supervisor::start(sandbox).await;
        let node = node_with(sandbox, ceph, &supervisor).await;
        let volume = served(ceph.volume("block"));
        // It dies as soon as there is a device: one step earlier there was none.
        node.kill9().await;
        for steps in 0.. {
            node.start_crashing_at(steps).await;
            let staged = node.stage(&volume).await;
            assert!(staged.is_err(), "the agent did not die during a stage");
            node.wait_for_exit().await;
            if !nbds(&volume).is_empty() {
                break;
            }
        }
        let other = ceph.open_elsewhere(&volume);
        node.restart().await;
        refused(node.stage(&volume).await, FailedPrecondition, &["in use"]);
        assert!(nbds(&volume).is_empty());
        drop(other);
        node.stage(&volume).await.unwrap();
        // The agent does not check a staged volume for other clients again.
        let other = ceph.open_elsewhere(&volume);
        node.kill9().await;
        node.restart().await;
        node.stage(&volume).await.unwrap();
        drop(other);
        node.unstage(&volume).await.unwrap();
        assert_nothing_staged(&node, &volume);
        node.assert_clean().await;
    });
}

#[test]
fn the_supervisor_is_killed_at_any_instant() {
    ceph_story(async |sandbox, ceph| {
        let supervisor = Supervisor::start(sandbox).await;
        let node = node_with(sandbox, ceph, &supervisor).await;
        let mut rng = Rng::new();
        for kind in ["ext4", "block"] {
            let volume = served(ceph.volume(kind));
            let content = Content::new(&volume.handle);
            let began = Instant::now();
            node.stage(&volume).await.unwrap();
            let longest = began.elapsed();
            node.unstage(&volume).await.unwrap();
            for round in 0..3 {
                let stage = async || node.stage(&volume).await;
                kill_within(longest, &supervisor, &mut rng, stage).await;
                supervisor.restart().await;
                node.retry_until_ok("staged", stage).await;
                assert_eq!(devices_over(&volume).len(), 1);
                node.publish(&volume, "pod").await.unwrap();
                write_or_check(&volume, &node.target(&volume, "pod"), &content, round == 0);
                node.unpublish(&volume, "pod").await.unwrap();

                let unstage = async || node.unstage(&volume).await;
                kill_within(longest / 2, &supervisor, &mut rng, unstage).await;
                supervisor.restart().await;
                node.retry_until_ok("unstaged", unstage).await;
                assert!(devices_over(&volume).is_empty());
                assert_nothing_staged(&node, &volume);
            }
        }
        node.assert_clean().await;
    });
}

#[test]
fn an_osd_that_stops_delays_and_loses_nothing() {
    own_cluster_story(async |sandbox, ceph| {
        let supervisor = Supervisor::start(sandbox).await;
        let node = node_with(sandbox, ceph, &supervisor).await;
        for kind in ["ext4", "block"] {
            let volume = served(ceph.volume(kind));
            let target = node.up(&volume, "pod").await;
            let writer = {
                let _stopped = ceph.stop();
                let writer = outages::write_in_thread(&volume, &target);
                thread::sleep(Duration::from_millis(300));
                assert!(!writer.is_finished());
                // Its requests wait in a daemon that is healthy.
                assert!(conditions(&node, &volume, &target).await.is_empty());
                writer
            };
            writer.join().unwrap();
            node.down(&volume, "pod").await;
            outages::is_kept(&node, &volume).await;
        }
        node.assert_clean().await;
    });
}
