//! A device that stops answering delays its own volume and no other.

use std::{fs::File, os::unix::fs::FileExt as _, path::Path, time::Duration};

use sha2::{Digest as _, Sha256};
use testkit::{
    Content, Fault as _, HungDirectories, MIB, NoOthersHang, Node, NodeSetup, Phase, Sandbox,
    StuckFile, StuckTree, Volume, eventually, hex, loops_over, refused, run, run_err, story,
};
use tonic::{Code, Status};

use crate::fs_group::with_group;

/// Runs a story on a node with a volume over a file that can hang, and checks that both are
/// removed. Skipped where such a file is impossible.
fn stuck_story(body: impl AsyncFnOnce(&Sandbox, &Node, &StuckFile, &Volume) + Send) {
    if !StuckFile::possible() {
        return;
    }
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let image = sandbox.pool("main").join("stuck.img");
        let file = StuckFile::new(&image, 64 * MIB);
        let volume = Volume::filesystem("stuck", "ext4").over("main", "stuck.img");
        body(sandbox, &node, &file, &volume).await;
        file.remove().await;
        node.assert_clean().await;
    });
}

/// Makes a call until the answer names `step` as the one that hangs: on a busy machine the
/// deadline may pass in an earlier step. After each answer kubelet retries, and each
/// arrives before the caller's own deadline.
async fn assert_waits_in<T>(step: &str, call: impl AsyncFn() -> Result<T, Status>) {
    eventually(step, async || {
        let status = call().await.err().expect("the device hangs");
        let uncertain = [Code::Aborted, Code::Unavailable, Code::DeadlineExceeded];
        assert!(uncertain.contains(&status.code()), "{status:?}");
        status.message().contains(step).then_some(())
    })
    .await;
}

/// A whole life of another volume, while one is stuck.
async fn lifecycle_beside(node: &Node, sandbox: &Sandbox, name: &str) {
    let kubelets = node.timeout.replace(Duration::from_secs(60));
    let volume = sandbox.volume(name, "ext4");
    let target = node.up(&volume, "pod").await;
    Content::new(name).write(&target.join("file"));
    node.stats(&volume, &target).await.unwrap();
    node.down(&volume, "pod").await;
    node.timeout.set(kubelets);
}

#[test]
fn a_failure_after_the_deadline_is_in_the_log() {
    stuck_story(async |sandbox, node, file, volume| {
        let image = File::options().write(true).open(sandbox.image(volume));
        image.unwrap().write_all_at(b"data of others", 0).unwrap();
        file.stop_data();
        node.timeout.set(Duration::from_secs(3));
        assert_waits_in("probe", async || node.stage(volume).await).await;
        file.resume();
        node.wait_for_log("the call failed after its deadline")
            .await;
        node.timeout.set(Duration::from_secs(60));
        refused(
            node.stage(volume).await,
            Code::FailedPrecondition,
            &["unknown data"],
        );
    });
}

#[test]
fn a_device_hung_in_the_probe_is_reported() {
    stuck_story(async |sandbox, node, file, volume| {
        file.stop_data();
        node.timeout.set(Duration::from_secs(3));
        // A retry joins the work, and gets the same answer.
        let stage = async || node.stage(volume).await;
        tokio::join!(
            assert_waits_in("probe", stage),
            assert_waits_in("probe", stage)
        );
        assert_waits_in("probe", stage).await;
        // Another call is refused at once.
        let other = node.unstage(volume).await.unwrap_err();
        assert_eq!(other.code(), Code::Aborted, "{other:?}");
        assert!(other.message().contains("probe"), "{other:?}");
        lifecycle_beside(node, sandbox, "other").await;

        // The awaited answer arrives, and the work continues by itself.
        file.resume();
        node.retry_until_ok("staged", async || node.stage(volume).await)
            .await;
        node.retry_until_ok("unstaged", async || node.unstage(volume).await)
            .await;
    });
}

#[test]
fn a_device_hung_in_use_still_has_stats() {
    stuck_story(async |sandbox, node, file, volume| {
        let target = node.up(volume, "pod").await;
        std::fs::write(target.join("file"), "dirty").unwrap();
        file.stop_data();
        node.timeout.set(Duration::from_secs(3));
        node.stats(volume, &target)
            .await
            .expect("stats touch no device");
        node.health(volume, &target)
            .await
            .expect("health waits for no device");
        node.publish(volume, "two")
            .await
            .expect("a bind touches no device");
        for pod in ["pod", "two"] {
            node.unpublish(volume, pod).await.expect("nor does its end");
        }
        assert_waits_in("unmount", async || node.unstage(volume).await).await;
        let other = node.stage(volume).await.unwrap_err();
        assert_eq!(other.code(), Code::Aborted, "{other:?}");
        lifecycle_beside(node, sandbox, "other").await;
        assert_eq!(node.probe().await, Some(true));

        file.resume();
        node.retry_until_ok("unstaged", async || node.unstage(volume).await)
            .await;
    });
}

#[test]
fn a_dead_file_server_delays_only_its_own_volumes() {
    stuck_story(async |sandbox, node, file, volume| {
        let target = node.up(volume, "pod").await;
        file.stop_all();
        node.timeout.set(Duration::from_secs(3));
        node.stats(volume, &target)
            .await
            .expect("stats ask no file server");
        // The node cannot even examine a second volume of that pool.
        let image = sandbox.pool("main").join("second.img");
        let second = StuckFile::new(&image, 64 * MIB);
        second.stop_all();
        let new = Volume::filesystem("second", "ext4").over("main", "second.img");
        assert_waits_in("attach", async || node.stage(&new).await).await;
        lifecycle_beside(node, sandbox, "other").await;
        assert_eq!(node.probe().await, Some(true));

        file.resume();
        second.resume();
        node.retry_until_ok("staged", async || node.stage(&new).await)
            .await;
        for (volume, pod) in [(volume, "pod"), (&new, "none")] {
            node.retry_until_ok("down", async || {
                node.unpublish(volume, pod).await?;
                node.unstage(volume).await
            })
            .await;
        }
        second.remove().await;
    });
}

#[test]
fn an_agent_killed_with_a_stuck_thread_is_replaced() {
    stuck_story(async |sandbox, node, file, volume| {
        file.stop_data();
        node.timeout.set(Duration::from_secs(3));
        // In the attach already, where udevd reads the device first.
        assert_waits_in("in step", async || node.stage(volume).await).await;
        // The process cannot end before its thread does; its socket stays open.
        let dying = node.kill_and_detach();
        node.restart().await;
        lifecycle_beside(node, sandbox, "other").await;
        file.resume();
        eventually("the old agent has ended", async || {
            dying.is_gone().then_some(())
        })
        .await;
        node.retry_until_ok("staged", async || node.stage(volume).await)
            .await;
        node.retry_until_ok("unstaged", async || node.unstage(volume).await)
            .await;
    });
}

#[test]
fn a_hung_statfs_delays_only_its_own_volume() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let [known, unknown] = ["known", "unknown"]
            .map(|name| (node.hold("statfs", name), sandbox.volume(name, "ext4")));
        let mut targets = Vec::new();
        for (_, volume) in [&known, &unknown] {
            targets.push(node.up(volume, "pod").await);
        }
        drop(known.0);
        let before = node.stats(&known.1, &targets[0]).await.unwrap();
        // An error at another path says nothing of this one.
        let elsewhere = node.target(&known.1, "elsewhere");
        refused(node.stats(&known.1, &elsewhere).await, Code::NotFound, &[]);
        node.publish(&known.1, "second").await.unwrap();
        let held = node.hold("statfs", "known");
        // The last answer, if there is one, at whichever of the volume's paths.
        let second = node.target(&known.1, "second");
        for path in [&targets[0], &second] {
            assert_eq!(node.stats(&known.1, path).await.unwrap(), before);
        }
        node.unpublish(&known.1, "second").await.unwrap();
        let answer = node.stats(&known.1, &second).await;
        refused(answer, Code::Unavailable, &["waits"]);
        let (first, retry) = tokio::join!(
            node.stats(&unknown.1, &targets[1]),
            node.stats(&unknown.1, &targets[1])
        );
        for answer in [first, retry] {
            refused(answer, Code::Unavailable, &["unknown", "waits"]);
        }
        let health = node.health(&unknown.1, &targets[1]).await.unwrap();
        assert_eq!(health[0].reason, "FileSystemStuck", "{health:?}");
        // The statistics keep no target busy: another pod follows this one.
        node.unpublish(&unknown.1, "pod").await.unwrap();
        node.publish(&unknown.1, "pod").await.unwrap();
        lifecycle_beside(&node, sandbox, "other").await;
        assert_eq!(node.probe().await, Some(true));

        drop((held, unknown.0));
        let stats = async || node.stats(&unknown.1, &targets[1]).await.map(drop);
        node.retry_until_ok("stats", stats).await;
        let health = node.health(&unknown.1, &targets[1]).await.unwrap();
        assert_eq!(health, []);
        for volume in [&known.1, &unknown.1] {
            node.retry_until_ok("down", async || {
                node.unpublish(volume, "pod").await?;
                node.unstage(volume).await
            })
            .await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn statistics_below_a_hung_directory_delay_only_their_own_volume() {
    if !StuckFile::possible() {
        return;
    }
    story(async |sandbox| {
        let mut node = Node::prepare(sandbox, NodeSetup::new(sandbox));
        let mut fault = HungDirectories::new(sandbox, &node, &["pod"], "ext4");
        node.start_first().await;
        let [known, unknown] = [0, 1].map(|number| fault.affected()[number].clone());
        let targets = [node.up(&known, "pod").await, node.up(&unknown, "pod").await];
        let before = node.stats(&known, &targets[0]).await.unwrap();
        fault.stop(Phase::Use).await;
        assert_eq!(node.stats(&known, &targets[0]).await.unwrap(), before);
        let answer = node.stats(&unknown, &targets[1]).await;
        refused(answer, Code::Unavailable, &["affected1", "waits"]);
        for (volume, target) in [&known, &unknown].into_iter().zip(&targets) {
            let health = node.health(volume, target).await.unwrap();
            assert_eq!(health[0].reason, "FileSystemStuck", "{health:?}");
        }
        lifecycle_beside(&node, sandbox, "other").await;
        assert_eq!(node.probe().await, Some(true));

        fault.resume().await;
        let stats = async || node.stats(&unknown, &targets[1]).await.map(drop);
        node.retry_until_ok("stats", stats).await;
        let health = node.health(&unknown, &targets[1]).await.unwrap();
        assert_eq!(health, []);
        for volume in [&known, &unknown] {
            node.down(volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn a_hung_pool_delays_no_unstage_in_another_pool() {
    if !StuckFile::possible() {
        return;
    }
    story(async |sandbox| {
        let dead = sandbox.pool("dead");
        let mut setup = NodeSetup::new(sandbox);
        setup.pools.push(format!("dead={},shared", dead.display()));
        let node = Node::start_with(sandbox, setup).await;
        let mut volume = sandbox.volume("v", "block");
        volume.handle = "vol.shared.main.01234567-89ab-4cde-8f01-23456789abcd".to_owned();
        node.stage(&volume).await.unwrap();
        let claim_of = |image: &str| {
            let claims = dead.join(".uring-csi/claims").join(image);
            std::fs::create_dir_all(&claims).unwrap();
            let hash = &hex(&Sha256::digest("node-a"))[..12];
            claims.join(format!("{hash}.json"))
        };
        // An agent that starts releases claims of earlier boots once: not the next one.
        let stale = claim_of("stale.img");
        std::fs::write(&stale, "").unwrap();
        node.restart_without_records().await;
        while stale.exists() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        // This node's claims in the other pool.
        let claim = StuckFile::new(&claim_of("other.img"), 4096);
        claim.stop_all();
        node.timeout.set(Duration::from_secs(20));
        node.unstage(&volume).await.expect("its pool is another");
        claim.resume();
        claim.remove().await;
        std::fs::remove_dir_all(dead.join(".uring-csi")).unwrap();
        node.assert_clean().await;
    });
}

#[test]
fn a_hung_pool_delays_no_unstage_of_what_cannot_be_in_it() {
    if !StuckFile::possible() {
        return;
    }
    // It examines all attached files, of any name.
    let _alone = NoOthersHang::wait();
    story(async |sandbox| {
        let (real, main) = (sandbox.pool("real"), sandbox.pool("main"));
        let [real, main] = [&real, &main].map(|path| path.to_str().unwrap());
        run(&["mount", "--bind", real, main]);
        let dead = sandbox.pool("dead");
        let disk = StuckTree::new(&dead);
        let mut setup = NodeSetup::new(sandbox);
        setup.pools.push(format!("dead={},shared", dead.display()));
        let node = Node::start_with(sandbox, setup).await;
        // Resumes before the agent is awaited, also if this fails.
        let disk = disk;
        let volumes = [("raw", "block"), ("v", "ext4")].map(|(name, kind)| {
            let image = sandbox.volume_in("main", name, kind, 64 * MIB);
            Volume {
                handle: format!("static-{name}"),
                ..image
            }
        });
        for volume in &volumes {
            node.up(volume, "pod").await;
        }
        node.restart_without_records().await;
        // The attached image now has a path that does not identify it, and so has a
        // stranger's.
        run(&["umount", "--lazy", main]);
        run(&["mount", "--bind", real, main]);
        let strange = sandbox.dir().join("strange.img");
        std::fs::File::create(&strange)
            .unwrap()
            .set_len(MIB)
            .unwrap();
        run(&["losetup", "--find", strange.to_str().unwrap()]);
        disk.stop_all();
        node.timeout.set(Duration::from_secs(20));
        let ceph_s = "0001-0004-ceph-0000000000000002-01234567-89ab-4cde-8f01-23456789abcd";
        let down = async |volume: &Volume| node.down(volume, "pod").await;
        for handle in [ceph_s, "static-of-another-backend"] {
            down(&Volume::filesystem(handle, "ext4")).await;
        }
        for volume in &volumes {
            down(volume).await;
        }
        disk.resume();
        run(&["losetup", "-d", loops_over(&strange)[0].to_str().unwrap()]);
        node.assert_clean().await;
    });
}

/// Which loop devices a volume without a record may have, only the devices themselves tell.
#[test]
fn a_strangers_hung_loop_device_delays_no_unstage() {
    if !StuckFile::possible() {
        return;
    }
    story(async |sandbox| {
        let other = sandbox.pool("other");
        run(&["mount", "-t", "tmpfs", "none", other.to_str().unwrap()]);
        let mut setup = NodeSetup::new(sandbox);
        setup
            .pools
            .push(format!("other={},shared", other.display()));
        let node = Node::start_with(sandbox, setup).await;
        let strange = sandbox.dir().join("strange.img");
        let file = StuckFile::new(&strange, MIB);
        run(&["losetup", "--find", strange.to_str().unwrap()]);
        let device = loops_over(&strange)[0].clone();
        file.stop_all();
        node.timeout.set(Duration::from_secs(20));
        for handle in ["static-one", "static-two"] {
            let volume = Volume::filesystem(handle, "ext4");
            node.unstage(&volume).await.expect("it has no such device");
        }
        file.resume();
        run(&["losetup", "-d", device.to_str().unwrap()]);
        file.remove().await;
        node.assert_clean().await;
    });
}

/// The end of a pod waits for no work for another pod: neither a repeated stage of its
/// volume nor a change of group.
#[test]
fn unpublish_waits_for_no_other_work_on_its_volume() {
    if !StuckFile::possible() {
        return;
    }
    story(async |sandbox| {
        let setup = NodeSetup::new(sandbox).arg("--volume-mount-group");
        let node = Node::start_with(sandbox, setup).await;
        let image = sandbox.pool("main").join("stuck.img");
        let file = StuckFile::new(&image, 64 * MIB);
        let volume = Volume::filesystem("stuck", "ext4").over("main", "stuck.img");
        // The page cache has none of it at the next stage.
        let target = node.up(&volume, "one").await;
        std::fs::create_dir(target.join("directory")).unwrap();
        node.down(&volume, "one").await;

        let kubelets = node.timeout.replace(Duration::from_secs(3));
        file.stop_data();
        assert_waits_in("in step", async || node.stage(&volume).await).await;
        node.unpublish(&volume, "one").await.unwrap();
        file.resume();
        node.retry_until_ok("staged", async || node.stage(&volume).await)
            .await;

        node.publish(&volume, "one").await.unwrap();
        file.stop_data();
        let grouped = with_group(volume.clone(), "4711");
        assert_waits_in("chgrp", async || node.publish(&grouped, "two").await).await;
        node.unpublish(&volume, "one").await.unwrap();
        assert!(!node.target(&volume, "one").exists());
        // A call on its own target, or one that changes the volume, waits.
        for other in [
            node.unpublish(&volume, "two").await,
            node.publish(&volume, "three").await,
            node.unstage(&volume).await,
        ] {
            assert_eq!(other.unwrap_err().code(), Code::Aborted);
        }
        file.resume();
        node.timeout.set(kubelets);
        node.retry_until_ok("published", async || node.publish(&grouped, "two").await)
            .await;
        node.down(&volume, "two").await;
        file.remove().await;
        node.assert_clean().await;
    });
}

#[test]
fn a_program_on_a_hung_disk_delays_only_its_own_volume() {
    if !StuckFile::possible() {
        return;
    }
    story(async |sandbox| {
        // Searched before the directory that the program is in.
        let programs = Path::new("/usr/local/sbin");
        run(&["mount", "-t", "tmpfs", "none", "/usr/local/sbin"]);
        let node = Node::start(sandbox).await;
        let program = StuckFile::new(&programs.join("mkfs.ext4"), 4096);
        program.stop_data();
        let volume = sandbox.volume("v", "ext4");
        node.timeout.set(Duration::from_secs(3));
        assert_waits_in("mkfs", async || node.stage(&volume).await).await;
        node.timeout.set(Duration::from_secs(60));
        let other = sandbox.volume("other", "xfs");
        let target = node.up(&other, "pod").await;
        node.stats(&other, &target).await.unwrap();
        node.down(&other, "pod").await;
        assert_eq!(node.probe().await, Some(true));

        // The file there is no program; then it is removed.
        program.resume();
        let removed = async || run_err(&["umount", "/usr/local/sbin/mkfs.ext4"]).ok();
        eventually("no call begins it", removed).await;
        node.retry_until_ok("staged", async || node.stage(&volume).await)
            .await;
        node.unstage(&volume).await.unwrap();
        run(&["umount", "/usr/local/sbin"]);
        node.assert_clean().await;
    });
}
