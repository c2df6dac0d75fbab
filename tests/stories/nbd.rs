//! Exports of NBD servers, on a kernel that has the driver: servers that are
//! what they should be, that go away and come back, that change, and that are
//! no servers at all.

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::net::UnixListener,
    time::Duration,
};

use tonic::Code::{
    Aborted, DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound, OutOfRange,
    Unavailable,
};

use crate::harness::{
    Content, Dice, MIB, NbdServer, Node, NodeSetup, Sandbox, Volume, eventually, kernel_has_nbd,
    kill_amid, nbds_over, refused, run, run_err, story,
};

const KINDS: [(&str, u64); 4] = [
    ("ext4", 64 * MIB),
    ("xfs", 320 * MIB),
    ("btrfs", 160 * MIB),
    ("block", 64 * MIB),
];

fn nbd_story(body: impl AsyncFnOnce(&Sandbox) + Send) {
    if kernel_has_nbd() {
        story(body);
    }
}

/// A volume over a blank export of its own.
fn volume(sandbox: &Sandbox, server: &NbdServer, name: &str, kind: &str) -> Volume {
    let bytes = KINDS
        .iter()
        .find(|(known, _)| *known == kind)
        .expect("a kind")
        .1;
    NbdServer::image(sandbox, name, bytes);
    server.over(match kind {
        "block" => Volume::block(name),
        kind => Volume::filesystem(name, kind),
    })
}

async fn health(node: &Node, volume: &Volume) -> Vec<String> {
    let path = node.target(volume, "pod");
    let found = node.health(volume, &path).await.expect("health");
    found.into_iter().map(|entry| entry.reason).collect()
}

async fn whole_life(node: &Node, volume: &Volume) {
    let content = Content::new(&volume.handle);
    for round in 0..2 {
        let target = node.up(volume, "pod").await;
        if volume.is_block() {
            if round == 0 {
                content.write_at(&target, MIB).unwrap();
            }
            content.is_at(&target, MIB);
        } else {
            if round == 0 {
                content.write(&target.join("file"));
            }
            content.is_in(&target.join("file"));
        }
        assert!(!node.stats(volume, &target).await.unwrap().is_empty());
        assert_eq!(health(node, volume).await, Vec::<String>::new());
        node.down(volume, "pod").await;
    }
}

#[test]
fn whole_lives_over_sockets_of_both_kinds_and_servers_of_both_makes() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        for tcp in [false, true] {
            let server = NbdServer::start_with(sandbox, tcp, &[]).await;
            for (kind, _) in KINDS {
                let volume = volume(sandbox, &server, &format!("{kind}-{tcp}"), kind);
                whole_life(&node, &volume).await;
                assert!(nbds_over(&format!(" {}", volume.handle)).is_empty());
            }
        }
        NbdServer::image(sandbox, "q", 64 * MIB);
        let server = NbdServer::qemu(sandbox, "q", &[]).await;
        whole_life(&node, &server.over(Volume::filesystem("q", "ext4"))).await;
        node.assert_clean().await;
    });
}

#[test]
fn sixteen_at_once() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        let volumes: Vec<_> = (0..16)
            .map(|n| volume(sandbox, &server, &format!("v{n}"), "ext4"))
            .collect();
        let ups = volumes.iter().map(|volume| node.up(volume, "pod"));
        futures_util::future::join_all(ups).await;
        assert_eq!(nbds_over(sandbox.dir().to_str().unwrap()).len(), 16);
        for volume in &volumes {
            Content::new(&volume.handle).write(&node.target(volume, "pod").join("file"));
        }
        let downs = volumes.iter().map(|volume| node.down(volume, "pod"));
        futures_util::future::join_all(downs).await;
        for volume in &volumes {
            let target = node.up(volume, "pod").await;
            Content::new(&volume.handle).is_in(&target.join("file"));
            node.down(volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn what_cannot_be_attached_is_refused_in_the_server_s_words() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        NbdServer::image(sandbox, "q", 64 * MIB);
        let server = NbdServer::qemu(sandbox, "q", &["-r"]).await;
        let unknown = server.over(Volume::filesystem("unknown", "ext4"));
        refused(
            node.stage(&unknown).await,
            NotFound,
            &["unknown", "the server has no export", "not present"],
        );
        let writable = server.over(Volume::filesystem("q", "ext4"));
        refused(
            node.stage(&writable).await,
            FailedPrecondition,
            &["served read-only"],
        );
        drop(server);
        refused(
            node.stage(&writable).await,
            Unavailable,
            &["cannot connect"],
        );
        let tls = Volume::filesystem("t", "ext4")
            .with("backend", "nbd")
            .with("uri", "nbds://host/t");
        refused(node.stage(&tls).await, InvalidArgument, &["uri", "TLS"]);
        let small = NbdServer::start(sandbox).await;
        NbdServer::image(sandbox, "tiny", 100);
        let tiny = small.over(Volume::filesystem("tiny", "ext4"));
        refused(node.stage(&tiny).await, FailedPrecondition, &["100 bytes"]);
        node.assert_clean().await;
    });
}

#[test]
fn read_only_exports_are_mounted_read_only() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        let volume = volume(sandbox, &server, "v", "ext4");
        let content = Content::new("read-only");
        content.write(&node.up(&volume, "pod").await.join("file"));
        node.down(&volume, "pod").await;
        drop(server);
        let server = NbdServer::qemu(sandbox, "v", &["-r"]).await;
        let reader = server
            .over(Volume::filesystem("v", "ext4"))
            .mode(crate::harness::Mode::SingleNodeReaderOnly);
        let target = node.up(&reader, "pod").await;
        content.is_in(&target.join("file"));
        assert!(fs::write(target.join("file"), "x").is_err());
        node.down(&reader, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn servers_that_hang_or_talk_rubbish_leave_nothing_behind() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let path = sandbox.dir().join("strange.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let strange = |name| {
            Volume::filesystem(name, "ext4")
                .with("backend", "nbd")
                .with("socket", path.to_str().unwrap())
        };
        let rubbish = strange("rubbish");
        let talk = std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().unwrap();
            peer.write_all(&[b'x'; 4096]).unwrap();
            drop(peer);
            // Accepts, and says no word until the other side is tired of it.
            let (mut peer, _) = listener.accept().unwrap();
            let _ = peer.read_to_end(&mut Vec::new());
        });
        refused(
            node.stage(&rubbish).await,
            FailedPrecondition,
            &["does not speak NBD"],
        );
        let silent = strange("silent");
        node.timeout.set(Duration::from_secs(2));
        refused(node.stage(&silent).await, DeadlineExceeded, &["attach"]);
        node.timeout.set(Duration::from_secs(60));
        // The same call joins what goes on.
        refused(
            node.stage(&silent).await,
            Unavailable,
            &["no answer within 10 s"],
        );
        talk.join().unwrap();
        node.assert_clean().await;
    });
}

#[test]
fn pods_notice_nothing_of_a_server_that_comes_back() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        for tcp in [false, true] {
            let mut server = NbdServer::start_with(sandbox, tcp, &[]).await;
            let volume = volume(sandbox, &server, &format!("v{tcp}"), "ext4");
            let target = node.up(&volume, "pod").await;
            for round in 0..3 {
                let content = Content::new(&round.to_string());
                let file = target.join(format!("file{round}"));
                server.kill9();
                let writer = {
                    let (content, file) = (Content::new(&round.to_string()), file.clone());
                    std::thread::spawn(move || content.write(&file))
                };
                eventually("the node says so", async || {
                    health(&node, &volume)
                        .await
                        .contains(&"ServerAway".to_owned())
                        .then_some(())
                })
                .await;
                server.restart().await;
                writer.join().unwrap();
                run(&["sh", "-c", "echo 3 > /proc/sys/vm/drop_caches"]);
                content.is_in(&file);
                eventually("the node says so", async || {
                    health(&node, &volume).await.is_empty().then_some(())
                })
                .await;
            }
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn a_server_that_stays_away_is_an_error_and_the_volume_still_goes() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        for kind in ["ext4", "xfs", "block"] {
            let mut server = NbdServer::start(sandbox).await;
            let volume = volume(sandbox, &server, kind, kind).with("deadConnectionTimeout", "2");
            let target = node.up(&volume, "pod").await;
            server.kill9();
            let written = if volume.is_block() {
                Content::new("lost").write_at(&target, 0)
            } else {
                fs::File::create(target.join("lost")).and_then(|file| file.sync_all())
            };
            written.unwrap_err();
            eventually("health says so", async || {
                let path = node.target(&volume, "pod");
                let found = node.health(&volume, &path).await.expect("health");
                let away = found
                    .into_iter()
                    .find(|entry| entry.reason == "ServerAway")?;
                away.message.contains("fail").then_some(())
            })
            .await;
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn volumes_grow_in_use_and_never_shrink() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        for (kind, small) in KINDS {
            let volume = volume(sandbox, &server, kind, kind);
            let target = node.up(&volume, "pod").await;
            let content = Content::new(kind);
            if kind != "block" {
                content.write(&target.join("file"));
            }
            refused(
                node.expand(&volume, &target, 2 * small).await,
                OutOfRange,
                &["grow the source first"],
            );
            let image = fs::File::options()
                .write(true)
                .open(server.image_of(&volume))
                .unwrap();
            image.set_len(2 * small).unwrap();
            let size = node.expand(&volume, &target, 2 * small).await.unwrap();
            assert_eq!(size.unsigned_abs(), 2 * small);
            let again = node.expand(&volume, &target, 2 * small).await.unwrap();
            assert_eq!(again, size);
            if kind == "block" {
                content.write_at(&target, 2 * small - MIB).unwrap();
                content.is_at(&target, 2 * small - MIB);
            } else {
                let total = node.stats(&volume, &target).await.unwrap()[0].total;
                assert!(total.unsigned_abs() > small + small / 2, "{kind}: {total}");
                content.is_in(&target.join("file"));
            }
            image.set_len(small).unwrap();
            refused(
                node.expand(&volume, &target, 0).await,
                FailedPrecondition,
                &["shrunk"],
            );
            image.set_len(2 * small).unwrap();
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn growth_after_a_restart_is_proven_or_taken_back() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let mut server = NbdServer::start(sandbox).await;
        let volume = volume(sandbox, &server, "v", "xfs");
        let small = 320 * MIB;
        let target = node.up(&volume, "pod").await;
        node.kill9().await;
        node.restart().await;
        let image = fs::File::options()
            .write(true)
            .open(server.image_of(&volume))
            .unwrap();
        image.set_len(2 * small).unwrap();
        // nbdkit holds old connections to the old size.
        refused(
            node.expand(&volume, &target, 2 * small).await,
            FailedPrecondition,
            &["an earlier agent"],
        );
        let device = nbds_over(sandbox.dir().to_str().unwrap()).pop().unwrap();
        let bytes = run(&["blockdev", "--getsize64", &device]);
        assert_eq!(bytes.trim(), small.to_string());
        // A server that comes back has none.
        server.kill9();
        server.restart().await;
        eventually("connections are this agent's", async || {
            node.expand(&volume, &target, 2 * small).await.ok()
        })
        .await;
        Content::new("grown").write(&target.join("file"));
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn pods_outlive_the_agent_and_a_server_that_moves_meanwhile() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let mut server = NbdServer::start(sandbox).await;
        let volume = volume(sandbox, &server, "v", "ext4");
        let raw = self::volume(sandbox, &server, "raw", "block");
        let target = node.up(&volume, "pod").await;
        let device = node.up(&raw, "pod").await;
        let [before, during, after] = ["before", "during", "after"].map(Content::new);
        before.write(&target.join("before"));
        node.kill9().await;
        during.write(&target.join("during"));
        during.write_at(&device, MIB).unwrap();
        // Nobody hears the kernel tell of it.
        server.kill9();
        server.restart().await;
        node.restart().await;
        after.write(&target.join("after"));
        node.up(&volume, "pod").await;
        node.up(&raw, "pod").await;
        assert_eq!(nbds_over(sandbox.dir().to_str().unwrap()).len(), 2);
        run(&["sh", "-c", "echo 3 > /proc/sys/vm/drop_caches"]);
        for (content, name) in [(&before, "before"), (&during, "during"), (&after, "after")] {
            content.is_in(&target.join(name));
        }
        during.is_at(&device, MIB);
        node.down(&volume, "pod").await;
        node.down(&raw, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn records_that_are_lost_are_rebuilt() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        // By its handle: no other story's volume may have the same.
        let volumes =
            ["ext4", "block"].map(|kind| volume(sandbox, &server, &format!("lost-{kind}"), kind));
        for volume in &volumes {
            node.up(volume, "pod").await;
        }
        node.kill9().await;
        for file in crate::harness::files_below(&node.run_dir) {
            fs::remove_file(file).unwrap();
        }
        node.restart().await;
        for volume in &volumes {
            node.down(volume, "pod").await;
        }
        assert_eq!(
            nbds_over(sandbox.dir().to_str().unwrap()),
            Vec::<String>::new()
        );
        node.assert_clean().await;
    });
}

#[test]
fn killed_at_any_instant() {
    nbd_story(async |sandbox| {
        let mut dice = Dice::new();
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        let volume = volume(sandbox, &server, "v", "ext4");
        let content = Content::new("v");
        content.write(&node.up(&volume, "pod").await.join("file"));
        node.down(&volume, "pod").await;
        for _ in 0..8 {
            kill_amid(&node, &mut dice, async || node.stage(&volume).await).await;
            node.restart().await;
            node.until_ok("staged", async || node.stage(&volume).await)
                .await;
            assert_eq!(nbds_over(sandbox.dir().to_str().unwrap()).len(), 1);
            node.publish(&volume, "pod").await.unwrap();
            content.is_in(&node.target(&volume, "pod").join("file"));
            node.unpublish(&volume, "pod").await.unwrap();
            kill_amid(&node, &mut dice, async || node.unstage(&volume).await).await;
            node.restart().await;
            node.until_ok("unstaged", async || node.unstage(&volume).await)
                .await;
            assert_eq!(
                nbds_over(sandbox.dir().to_str().unwrap()),
                Vec::<String>::new()
            );
        }
        node.assert_clean().await;
    });
}

#[test]
fn slow_and_failing_servers_cost_time_and_no_data() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let slow = ["--filter=delay", "rdelay=5ms", "wdelay=5ms"];
        let server = NbdServer::start_with(sandbox, false, &slow).await;
        whole_life(&node, &volume(sandbox, &server, "slow", "ext4")).await;
        drop(server);
        let failing = ["--filter=error", "error=EIO", "error-pread-rate=100%"];
        let server = NbdServer::start_with(sandbox, false, &failing).await;
        let volume = volume(sandbox, &server, "failing", "ext4");
        // What cannot be read is not proven blank.
        refused(node.stage(&volume).await, Unavailable, &["read"]);
        node.assert_clean().await;
    });
}

#[test]
fn a_device_in_use_elsewhere_is_not_disconnected() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        let volume = volume(sandbox, &server, "v", "ext4");
        let target = node.up(&volume, "pod").await;
        node.unpublish(&volume, "pod").await.unwrap();
        let _ = target;
        // Another mount of the file system that the node knows nothing of.
        let elsewhere = sandbox.dir().join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        let elsewhere = elsewhere.to_str().unwrap();
        run(&[
            "mount",
            "--bind",
            node.staging(&volume).to_str().unwrap(),
            elsewhere,
        ]);
        let device = nbds_over(sandbox.dir().to_str().unwrap()).pop().unwrap();
        refused(
            node.unstage(&volume).await,
            Aborted,
            &[&device, "nothing was disconnected"],
        );
        Content::new("alive").write(&std::path::Path::new(elsewhere).join("file"));
        run(&["umount", elsewhere]);
        node.unstage(&volume).await.unwrap();
        assert!(
            run_err(&["blockdev", "--getsize64", &device]).is_ok_and(|size| size.trim() == "0")
        );
        node.assert_clean().await;
    });
}

#[test]
fn a_kernel_without_the_driver_is_named() {
    if std::path::Path::new("/sys/module/nbd").exists() {
        return;
    }
    story(async |sandbox| {
        let node = Node::start_with(sandbox, NodeSetup::new(sandbox)).await;
        let volume = Volume::filesystem("v", "ext4")
            .with("backend", "nbd")
            .with("uri", "nbd://127.0.0.1/v");
        refused(
            node.stage(&volume).await,
            Unavailable,
            &["kernel module \"nbd\""],
        );
        node.assert_clean().await;
    });
}
