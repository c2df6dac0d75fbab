//! SIGKILL at any instant: the next call after a restart finishes or undoes the work, and
//! pods keep running.

use std::{fs, path::Path};

use testkit::{
    Content, Controller, MIB, Mode, Node, NodeSetup, Rng, Volume, all_loops, claim,
    crash_at_each_step, crash_lifecycle_at_each_step, eventually, file_systems_to_crash,
    files_below, kill_during, kill_during_each_call, loops_over, refused, run, story,
};
use tonic::{
    Code::{AlreadyExists, FailedPrecondition, Unavailable},
    Status,
};
use uring_csi::proto::admin::{FormatVolumeRequest, node_admin_client::NodeAdminClient};
use uuid::Uuid;

#[test]
fn pods_outlive_their_nodes_agent() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        let raw = sandbox.volume_in("main", "raw", "block", 64 * MIB);
        let target = node.up(&volume, "pod").await;
        let device = node.up(&raw, "pod").await;
        let [before, during, after] = ["before", "during", "after"].map(Content::new);
        before.write(&target.join("before"));
        before.write_at(&device, 0).unwrap();

        node.kill9().await;
        during.write(&target.join("during"));
        during.write_at(&device, MIB).unwrap();

        node.restart().await;
        after.write(&target.join("after"));
        // Kubelet calls for every volume again when it restarts itself.
        node.up(&volume, "pod").await;
        node.up(&raw, "pod").await;
        assert_eq!(loops_over(&sandbox.image(&volume)).len(), 1);
        assert_eq!(node.stats(&volume, &target).await.unwrap().len(), 2);
        for (content, name) in [(&before, "before"), (&during, "during"), (&after, "after")] {
            content.assert_in(&target.join(name));
        }
        during.assert_at(&device, MIB);
        node.down(&volume, "pod").await;
        node.down(&raw, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn directories_behind_symlinks_are_the_same_after_a_restart() {
    story(async |sandbox| {
        let mut setup = NodeSetup::new(sandbox);
        setup.symlinked = true;
        let node = Node::start_with(sandbox, setup).await;
        let volume = sandbox.volume("v", "ext4");
        let target = node.up(&volume, "pod").await;
        let content = Content::new("kept");
        content.write(&target.join("file"));

        node.kill9().await;
        node.restart().await;
        assert_eq!(node.stats(&volume, &target).await.unwrap().len(), 2);
        node.up(&volume, "pod").await;
        content.assert_in(&target.join("file"));
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn records_that_are_lost_are_rebuilt() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        let raw = sandbox.volume_in("main", "raw", "block", 64 * MIB);
        for volume in [&volume, &raw] {
            node.up(volume, "pod").await;
        }
        node.restart_without_records().await;
        for volume in [&volume, &raw] {
            node.down(volume, "pod").await;
            assert!(loops_over(&sandbox.image(volume)).is_empty());
        }
        node.assert_clean().await;
    });
}

#[test]
fn an_unstage_that_was_killed_binds_no_later_stage_to_its_arguments() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        let other = volume.clone().flags(&["noatime"]);
        node.stage(&volume).await.unwrap();
        node.kill9().await;
        node.restart().await;
        refused(node.stage(&other).await, AlreadyExists, &["v"]);

        node.kill9().await;
        // As far as an unstage comes before it is killed.
        run(&["umount", node.staging(&volume).to_str().unwrap()]);
        node.restart().await;
        node.stage(&other).await.unwrap();
        assert_eq!(loops_over(&sandbox.image(&volume)).len(), 1);
        node.unstage(&other).await.unwrap();
        node.assert_clean().await;
    });
}

#[test]
fn an_unstage_of_a_raw_volume_binds_no_later_stage_either() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume_in("main", "raw", "block", 64 * MIB);
        let other = volume.clone().mode(Mode::SingleNodeReaderOnly);
        let attached = || loops_over(&sandbox.image(&volume)).len();
        let mut free_while_attached = 0;
        for at in 0.. {
            node.stage(&volume).await.unwrap();
            node.kill9().await;
            node.start_crashing_at(at).await;
            let unstaged = node.unstage(&volume).await.is_ok();
            if unstaged {
                assert!(at > 4, "only {at} steps");
                break;
            }
            eventually("the agent ends", async || node.has_exited().then_some(())).await;
            let before = attached();
            node.restart().await;
            match node.stage(&other).await {
                Ok(()) => free_while_attached += before,
                // The unstage had not begun.
                Err(status) => assert_eq!(status.code(), AlreadyExists),
            }
            node.unstage(&volume).await.unwrap();
        }
        assert!(free_while_attached > 0);
        node.assert_clean().await;
    });
}

#[test]
fn an_unstage_without_a_record_waits_for_its_pool() {
    story(async |sandbox| {
        let (real, pool) = (sandbox.pool("real"), sandbox.pool("main"));
        let [real, pool] = [&real, &pool].map(|path| path.to_str().unwrap());
        run(&["mount", "--bind", real, pool]);
        let node = Node::start(sandbox).await;
        let volumes = ["block", "ext4"].map(|kind| {
            let id = Uuid::now_v7();
            let mut volume = sandbox.volume_in("main", &id.to_string(), kind, 64 * MIB);
            volume.handle = format!("vol.shared.main.{id}");
            volume
        });
        // Under any path in sysfs.
        let attached = |volume: &&Volume| {
            let image = Path::new(&volume.context["image"]).file_name();
            (all_loops().iter()).any(|(_, backing)| backing.file_name() == image)
        };
        for volume in &volumes {
            node.stage(volume).await.unwrap();
        }
        // The attached images keep it alive.
        run(&["umount", "--lazy", pool]);
        node.restart_without_records().await;
        for volume in &volumes {
            let answer = node.unstage(volume).await;
            refused(answer, Unavailable, &["main", "is it mounted?"]);
        }
        assert_eq!(volumes.iter().filter(attached).count(), 2);
        // What this node never had waits for no pool.
        for pool in ["main", "none"] {
            let handle = format!("vol.shared.{pool}.{}", Uuid::now_v7());
            let volume = Volume::filesystem(&handle, "ext4");
            node.unstage(&volume).await.unwrap();
        }
        run(&["mount", "--bind", real, pool]);
        for volume in &volumes {
            node.unstage(volume).await.unwrap();
        }
        assert_eq!(volumes.iter().filter(attached).count(), 0);
        node.assert_clean().await;
    });
}

#[test]
fn a_node_may_be_killed_at_any_instant() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let mut rng = Rng::new();
        let mut volumes = vec![sandbox.volume_in("main", "raw", "block", 64 * MIB)];
        for kind in ["ext4", "xfs", "btrfs"] {
            volumes.push(sandbox.volume(kind, kind));
        }
        let content = Content::new("survives");
        for (round, volume) in volumes.iter().cycle().take(12).enumerate() {
            let attached = || loops_over(&sandbox.image(volume)).len();
            kill_during_each_call(&node, &mut rng, volume, attached, |target| {
                if round < volumes.len() {
                    content.put(volume, target);
                }
                content.assert_kept(volume, target);
            })
            .await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn a_node_may_be_killed_at_each_step() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let grow = |volume: &Volume| 2 * fs::metadata(sandbox.image(volume)).unwrap().len();
        for kind in ["ext4", "xfs", "btrfs", "block"] {
            let mut last = None::<Volume>;
            let volume = || {
                // There is not room for all of them.
                if let Some(last) = &last {
                    fs::remove_file(sandbox.image(last)).unwrap();
                }
                last.insert(sandbox.volume(kind, kind)).clone()
            };
            let attached = |volume: &Volume| loops_over(&sandbox.image(volume)).len();
            crash_lifecycle_at_each_step(&node, 12, volume, attached, grow).await;
        }
        node.assert_clean().await;
    });
}

/// `uringctl format`, of what is not blank.
async fn format(node: &Node, volume: &Volume) -> Result<(), Status> {
    let request = FormatVolumeRequest {
        volume_id: volume.handle.clone(),
        volume_context: volume.context.clone(),
        fs_type: volume.fs_type().to_owned(),
        confirm: volume.handle.clone(),
        ..Default::default()
    };
    let mut admin = NodeAdminClient::new(node.channel());
    admin.format_volume(request).await.map(drop)
}

#[test]
fn a_node_may_be_killed_at_each_step_of_a_format() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let [foreign, content] = ["foreign", "content"].map(Content::new);
        for kind in file_systems_to_crash() {
            let volume = sandbox.volume(kind, kind);
            let image = sandbox.image(&volume);
            let unstage = async || node.unstage(&volume).await;
            crash_at_each_step(&node, 12, async |crashing| {
                foreign.write_at(&image, 0).unwrap();
                let formatted = async || format(&node, &volume).await;
                crashing
                    .complete("formatted", formatted, async || {
                        // It finds what was there, or a format to finish.
                        eventually("staged or refused", async || {
                            let staged = node.stage(&volume).await.map_err(|s| s.code());
                            [Ok(()), Err(FailedPrecondition)]
                                .contains(&staged)
                                .then_some(())
                        })
                        .await;
                        node.retry_until_ok("unstaged", unstage).await;
                        assert!(loops_over(&image).is_empty());
                    })
                    .await;
                assert!(loops_over(&image).is_empty());
                crashing.stop_crashing().await;
                content.put(&volume, &node.up(&volume, "pod").await);
                node.down(&volume, "pod").await;
            })
            .await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn a_controller_may_be_killed_at_any_instant() {
    story(async |sandbox| {
        let controller = Controller::start(sandbox).await;
        let mut rng = Rng::new();
        let capability = Volume::block("any").capability;
        let pool = sandbox.pool("main");
        for round in 0..10 {
            let request = claim(&format!("v{round}"), "main", &capability, 64 * MIB);
            kill_during(&controller, &mut rng, async || {
                controller.create(request.clone()).await
            })
            .await;
            controller.start().await;
            let made = eventually("created", async || {
                controller.create(request.clone()).await.ok()
            })
            .await;
            kill_during(&controller, &mut rng, async || {
                controller.snapshot(&made.volume_id, &request.name).await
            })
            .await;
            controller.start().await;
            let snapshot = eventually("taken", async || {
                controller
                    .snapshot(&made.volume_id, &request.name)
                    .await
                    .ok()
            })
            .await;
            kill_during(&controller, &mut rng, async || {
                controller.delete(&made.volume_id).await
            })
            .await;
            controller.start().await;
            eventually("deleted", async || {
                controller.delete(&made.volume_id).await.ok()
            })
            .await;
            kill_during(&controller, &mut rng, async || {
                controller.delete_snapshot(&snapshot.snapshot_id).await
            })
            .await;
            controller.start().await;
            eventually("deleted", async || {
                controller.delete_snapshot(&snapshot.snapshot_id).await.ok()
            })
            .await;
        }
        let left: Vec<_> = files_below(&pool)
            .into_iter()
            .filter(|file| fs::metadata(file).is_ok_and(|found| found.len() >= MIB))
            .collect();
        assert!(left.is_empty(), "{left:?}");
    });
}
