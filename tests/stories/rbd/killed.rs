//! SIGKILL at any instant: the next call after a restart finishes or undoes the work, and
//! pods keep running.

use std::{
    fs,
    time::{Duration, Instant},
};

use testkit::{
    Content, KINDS, MIB, Node, Rng, Volume, ceph_story, crash_lifecycle_at_each_step, files_below,
    kill_within, kinds_to_crash, mounts_below, rbds_of, rbds_over,
};

use super::{assert_nothing_staged, devices_over, encrypted, write_or_check};

#[test]
fn pods_outlive_the_agent() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let volumes = ["ext4", "block"].map(|kind| ceph.volume(kind));
        for volume in &volumes {
            let target = node.up(volume, "pod").await;
            write_or_check(volume, &target, &Content::new(&volume.handle), true);
        }
        let raw = node.target(&volumes[1], "pod");
        node.kill9().await;
        Content::new("meanwhile").write(&node.target(&volumes[0], "pod").join("meanwhile"));
        Content::new("meanwhile").write_at(&raw, 0).unwrap();
        node.restart().await;
        for volume in &volumes {
            // Kubelet calls for every volume again when it restarts itself.
            let target = node.up(volume, "pod").await;
            write_or_check(volume, &target, &Content::new(&volume.handle), false);
            assert!(!node.stats(volume, &target).await.unwrap().is_empty());
            assert_eq!(rbds_over(volume).len(), 1);
            node.down(volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn records_that_are_lost_are_rebuilt() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let volumes = ["ext4", "block"].map(|kind| ceph.volume(kind));
        let secret = encrypted::volume(ceph, "ext4");
        let volumes = [&volumes[0], &volumes[1], &secret];
        for repeats in [false, true] {
            for volume in volumes {
                let target = node.up(volume, "pod").await;
                write_or_check(volume, &target, &Content::new(&volume.handle), !repeats);
            }
            node.kill9().await;
            for file in files_below(&node.run_dir) {
                fs::remove_file(file).unwrap();
            }
            node.restart().await;
            for volume in volumes {
                if repeats {
                    node.up(volume, "pod").await;
                }
                let target = node.target(volume, "pod");
                assert!(!node.stats(volume, &target).await.unwrap().is_empty());
                node.down(volume, "pod").await;
                assert_nothing_staged(&node, volume);
                assert!(rbds_over(volume).is_empty());
            }
        }
        node.assert_clean().await;
    });
}

#[test]
fn killed_at_some_steps_of_a_blank_image() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let devices = |volume: &Volume| rbds_over(volume).len();
        for kind in kinds_to_crash() {
            let volume = ceph.one_after_another(|| ceph.volume(kind));
            crash_lifecycle_at_each_step(&node, 16, volume, devices, ceph.doubling()).await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn killed_at_some_steps_of_an_encrypted_image() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let devices = |volume: &Volume| rbds_over(volume).len();
        let volume = ceph.one_after_another(|| encrypted::volume(ceph, "ext4"));
        crash_lifecycle_at_each_step(&node, 32, volume, devices, ceph.doubling()).await;
        node.assert_clean().await;
    });
}

#[test]
fn killed_after_the_bind_of_a_raw_image() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let volume = ceph.volume("block");
        let mut deaths = 0;
        node.kill9().await;
        // Each begins where the one before died, as long as nothing is bound.
        for steps in 0.. {
            node.start_crashing_at(steps).await;
            if node.stage(&volume).await.is_ok() {
                break;
            }
            node.wait_for_exit().await;
            if mounts_below(&node.staging(&volume)).is_empty() {
                continue;
            }
            deaths += 1;
            node.restart().await;
            node.retry_until_ok("unstaged", async || node.unstage(&volume).await)
                .await;
            assert_nothing_staged(&node, &volume);
            assert!(rbds_over(&volume).is_empty());
            node.kill9().await;
        }
        // None at all in a build without debug assertions.
        assert!(deaths > 0, "it has died between the bind and its answer");
        node.kill9().await;
        node.restart().await;
        node.unstage(&volume).await.unwrap();
        node.assert_clean().await;
    });
}

#[test]
fn killed_at_any_instant() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let mut rng = Rng::new();
        for kind in ["xfs", "block"] {
            kill_in_each_call(&node, &mut rng, &ceph.volume(kind)).await;
        }
        assert!(rbds_of(sandbox.dir()).is_empty());
        node.assert_clean().await;
    });
}

#[test]
fn killed_at_any_instant_of_an_encrypted_volume() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let volume = encrypted::volume(ceph, "ext4");
        kill_in_each_call(&node, &mut Rng::new(), &volume).await;
        assert!(rbds_of(sandbox.dir()).is_empty());
        node.assert_clean().await;
    });
}

/// Full lives, with each call killed and repeated.
pub async fn kill_in_each_call(node: &Node, rng: &mut Rng, volume: &Volume) {
    let content = Content::new(&volume.handle);
    let first = Instant::now();
    node.stage(volume).await.unwrap();
    // A little longer than the longest: the first has to format.
    let staging = first.elapsed();
    node.unstage(volume).await.unwrap();
    let calls = Duration::from_millis(40);
    for round in 0..3 {
        kill_within(staging, node, rng, async || node.stage(volume).await).await;
        node.restart().await;
        node.retry_until_ok("staged", async || node.stage(volume).await)
            .await;
        assert_eq!(devices_over(volume).len(), 1);

        kill_within(calls, node, rng, async || node.publish(volume, "pod").await).await;
        node.restart().await;
        node.retry_until_ok("published", async || node.publish(volume, "pod").await)
            .await;
        write_or_check(volume, &node.target(volume, "pod"), &content, round == 0);

        kill_within(calls, node, rng, async || {
            node.unpublish(volume, "pod").await
        })
        .await;
        node.restart().await;
        node.retry_until_ok("unpublished", async || node.unpublish(volume, "pod").await)
            .await;

        kill_within(calls, node, rng, async || node.unstage(volume).await).await;
        node.restart().await;
        node.retry_until_ok("unstaged", async || node.unstage(volume).await)
            .await;
        assert!(devices_over(volume).is_empty());
        assert_nothing_staged(node, volume);
    }
}

#[test]
fn killed_in_the_first_stage_of_a_blank_image() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        kill_in_first_stage(&node, 6, || ceph.volume("ext4")).await;
    });
}

#[test]
fn killed_while_a_blank_image_is_encrypted() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        kill_in_first_stage(&node, 2, || encrypted::volume(ceph, "ext4")).await;
    });
}

/// The first stage of a blank image is killed, again and again.
pub async fn kill_in_first_stage(node: &Node, rounds: u32, blank: impl Fn() -> Volume) {
    let mut rng = Rng::new();
    let whole = blank();
    let began = Instant::now();
    node.stage(&whole).await.unwrap();
    let longest = began.elapsed();
    node.unstage(&whole).await.unwrap();
    for round in 0..rounds {
        let volume = blank();
        kill_within(longest, node, &mut rng, async || node.stage(&volume).await).await;
        node.restart().await;
        // Either kubelet stops trying, or it retries.
        if round % 2 == 0 {
            node.retry_until_ok("unstaged", async || node.unstage(&volume).await)
                .await;
            assert!(devices_over(&volume).is_empty());
            assert_nothing_staged(node, &volume);
        }
        node.retry_until_ok("staged", async || node.stage(&volume).await)
            .await;
        node.publish(&volume, "pod").await.unwrap();
        let content = Content::new(&volume.handle);
        write_or_check(&volume, &node.target(&volume, "pod"), &content, true);
        node.down(&volume, "pod").await;
    }
    node.assert_clean().await;
}

#[test]
fn killed_while_it_grows_a_volume() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let mut rng = Rng::new();
        for (kind, small) in [KINDS[0], KINDS[1]] {
            let volume = ceph.volume(kind);
            let target = node.up(&volume, "pod").await;
            let content = Content::new(kind);
            write_or_check(&volume, &target, &content, true);
            for step in 1..=3 {
                let bytes = small + 64 * step * MIB;
                ceph.resize(&volume, bytes);
                let longest = Duration::from_millis(20);
                kill_within(longest, &node, &mut rng, async || {
                    node.expand(&volume, &target, bytes).await
                })
                .await;
                node.restart().await;
                let size = node.expand(&volume, &target, bytes).await.unwrap();
                assert_eq!(size.unsigned_abs(), bytes);
                write_or_check(&volume, &target, &content, false);
            }
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}
