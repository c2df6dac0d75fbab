//! Directories of NFS servers, on a kernel that has the client: servers that work, that
//! die under I/O and return, or stay away.

mod inline;
mod version_3;

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    time::{Duration, Instant},
};

use testkit::{
    Content, Mode, NfsServer, Node, NodeSetup, Rng, SHARE, Sandbox, Volume, can_use_nfs,
    crash_lifecycle_at_each_step, eventually, kill_during_each_call, leave_unwritten, refused, run,
    story,
};
use tonic::Code;

use super::operator::Operator;

fn nfs_story(body: impl AsyncFnOnce(&Sandbox) + Send) {
    if can_use_nfs() {
        story(body);
    }
}

/// A node whose unmounts soon give up on dead servers.
async fn impatient_node(sandbox: &Sandbox) -> Node {
    impatient_node_with(sandbox, NodeSetup::new(sandbox)).await
}

async fn impatient_node_with(sandbox: &Sandbox, setup: NodeSetup) -> Node {
    Node::start_with(sandbox, setup.arg("--nfs-unmount-timeout=1")).await
}

async fn health(node: &Node, volume: &Volume) -> Vec<String> {
    let path = node.target(volume, "pod");
    let found = node.health(volume, &path).await.expect("health");
    found.into_iter().map(|entry| entry.reason).collect()
}

/// The mounts of a server's directory on a node.
fn mounts_of(node: &Node, source: &str) -> Vec<String> {
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo").expect("procfs");
    let kubelet = node.kubelet.display().to_string();
    let staged = node.run_dir.display().to_string();
    let is_below = |line: &str| line.contains(&kubelet) || line.contains(&staged);
    let ours = |line: &&str| is_below(line) && line.contains(&format!(" {source} "));
    mounts.lines().filter(ours).map(str::to_owned).collect()
}

#[test]
fn pods_of_two_nodes_share_a_volume_in_each_version() {
    nfs_story(async |sandbox| {
        let server = NfsServer::start(sandbox, "server").await;
        // Before the first node counts what there is.
        sandbox.kubelet("node-b");
        let a = Node::start(sandbox).await;
        let mut setup = NodeSetup::new(sandbox);
        setup.node_id = "node-b";
        let b = Node::start_with(sandbox, setup).await;
        for (flag, version) in [("", "4.2"), ("nfsvers=4.1", "4.1"), ("vers=4.0", "4.0")] {
            let volume = server
                .volume(&format!("v{version}"), &format!("ns/{version}"))
                .mode(Mode::MultiNodeMultiWriter)
                .flags(&[flag, "noatime"]);
            let (on_a, on_b) = (a.up(&volume, "pod").await, b.up(&volume, "pod").await);
            let source = format!("127.0.0.1:{SHARE}/ns/{version}");
            let mounts = mounts_of(&a, &source);
            assert_eq!(mounts.len(), 2, "{mounts:?}");
            assert!(
                mounts
                    .iter()
                    .all(|it| it.contains(&format!("vers={version},"))),
                "{mounts:?}"
            );

            let content = Content::new(&volume.handle);
            content.write(&on_a.join("file"));
            content.assert_in(&on_b.join("file"));
            content.assert_in(&server.export().join("ns").join(version).join("file"));
            for node in [&a, &b] {
                let target = node.target(&volume, "pod");
                let usage = node.stats(&volume, &target).await.expect("statistics");
                assert!(usage[0].total > 0);
                assert_eq!(health(node, &volume).await, Vec::<String>::new());
                let size = node
                    .expand(&volume, &target, 1 << 50)
                    .await
                    .expect("nothing to grow");
                assert_eq!(size, 1 << 50);
            }
            a.down(&volume, "pod").await;
            content.assert_in(&on_b.join("file"));
            b.down(&volume, "pod").await;
        }
        a.assert_clean().await;
        b.assert_clean().await;
    });
}

#[test]
fn volumes_of_one_share_are_told_apart() {
    nfs_story(async |sandbox| {
        let server = NfsServer::start(sandbox, "server").await;
        let node = Node::start(sandbox).await;
        let [one, other] = ["one", "other"].map(|name| server.volume(name, name));
        let (at_one, at_other) = (node.up(&one, "pod").await, node.up(&other, "pod").await);
        // Two handles of one directory are two volumes.
        let again = server.volume("again", "one");
        let at_again = node.up(&again, "pod").await;
        let content = Content::new("one");
        content.write(&at_one.join("file"));
        content.assert_in(&at_again.join("file"));
        assert!(!at_other.join("file").exists());

        let status = node.unpublish_at(&other, &at_one).await;
        refused(
            status,
            Code::FailedPrecondition,
            &["something else is mounted"],
        );
        let status = node.unstage_at(&other, &node.staging(&one)).await;
        refused(status, Code::FailedPrecondition, &["it is staged at"]);
        node.kill9().await;
        node.restart().await;
        for volume in [&other, &one, &again] {
            let status = node.unstage(volume).await;
            refused(status, Code::FailedPrecondition, &["still published"]);
        }
        node.down(&one, "pod").await;
        let status = node.unstage(&again).await;
        refused(status, Code::FailedPrecondition, &["still published"]);
        content.assert_in(&at_again.join("file"));
        node.publish(&other, "second").await.expect("published");
        node.unpublish(&other, "second").await.expect("unpublished");
        node.down(&other, "pod").await;
        node.down(&again, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn read_only_and_permissions_are_as_requested() {
    nfs_story(async |sandbox| {
        let server = NfsServer::start(sandbox, "server").await;
        let node = Node::start(sandbox).await;
        let volume = server.volume("v", "v").with("mountPermissions", "2770");
        let target = node.up(&volume, "pod").await;
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o7777;
        assert_eq!(mode(&target), 0o2770);
        assert_eq!(mode(&server.export().join("v")), 0o2770);
        fs::write(target.join("file"), "text").expect("written");
        node.publish_read_only(&volume, "reader")
            .await
            .expect("published");
        let reader = node.target(&volume, "reader");
        assert_eq!(
            fs::read_to_string(reader.join("file")).expect("read"),
            "text"
        );
        fs::write(reader.join("file"), "other").expect_err("read-only");
        node.unpublish(&volume, "reader")
            .await
            .expect("unpublished");
        node.down(&volume, "pod").await;

        let readers = server.volume("r", "v").mode(Mode::MultiNodeReaderOnly);
        let target = node.up(&readers, "pod").await;
        fs::write(target.join("file"), "other").expect_err("read-only");
        node.down(&readers, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn repeats_are_answered_and_calls_that_contradict_are_refused() {
    nfs_story(async |sandbox| {
        let server = NfsServer::start(sandbox, "server").await;
        let node = Node::start(sandbox).await;
        let volume = server.volume("v", "v").flags(&["noatime"]);
        let other = server.volume("v", "other");
        let target = node.up(&volume, "pod").await;
        node.stage(&volume).await.expect("staged already");
        let publish = node.publish(&volume, "pod").await;
        publish.expect("published already");
        for wrong in [
            volume.clone().flags(&["noatime", "soft"]),
            volume.clone().mode(Mode::MultiNodeReaderOnly),
            other.flags(&["noatime"]),
        ] {
            refused(node.stage(&wrong).await, Code::AlreadyExists, &["staged"]);
        }
        let status = node.publish_read_only(&volume, "pod").await;
        refused(status, Code::AlreadyExists, &["published"]);
        refused(
            node.unstage(&volume).await,
            Code::FailedPrecondition,
            &["still published"],
        );
        let elsewhere = node.target(&volume, "elsewhere");
        refused(node.stats(&volume, &elsewhere).await, Code::NotFound, &[]);
        let grown = node.expand(&volume, &elsewhere, 1 << 50).await;
        refused(grown, Code::NotFound, &[]);
        for _ in 0..2 {
            node.down(&volume, "pod").await;
        }
        refused(node.stats(&volume, &target).await, Code::NotFound, &[]);
        refused(
            node.publish(&volume, "pod").await,
            Code::FailedPrecondition,
            &["stage it first"],
        );

        let single = volume.mode(Mode::SingleNodeSingleWriter);
        node.up(&single, "pod").await;
        refused(
            node.publish(&single, "second").await,
            Code::FailedPrecondition,
            &["allows one target"],
        );
        node.down(&single, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn what_cannot_be_mounted_is_refused_and_leaves_nothing() {
    nfs_story(async |sandbox| {
        let server = NfsServer::start(sandbox, "server").await;
        let node = Node::start(sandbox).await;
        let volume = || server.volume("v", "v");
        for (volume, code, words) in [
            (
                volume().flags(&["addr=10.0.0.1"]),
                Code::InvalidArgument,
                "the volume names its server",
            ),
            (
                volume().flags(&["fsc"]),
                Code::InvalidArgument,
                "not allowed for nfs",
            ),
            (
                volume().with("mountOptions", "mounthost=x"),
                Code::InvalidArgument,
                "mounthost",
            ),
            (
                volume().with("subDir", "../v"),
                Code::InvalidArgument,
                "subDir",
            ),
            (
                server.known_volume("v", "missing"),
                Code::FailedPrecondition,
                "missing",
            ),
            (
                volume().with("mountOptions", "port=1"),
                Code::Unavailable,
                "does not answer",
            ),
            (
                volume().with("server", "name.invalid"),
                Code::Unavailable,
                "does not answer",
            ),
            (
                volume().flags(&["sec=krb5", "soft", "timeo=1", "retrans=1"]),
                Code::FailedPrecondition,
                "cannot mount",
            ),
        ] {
            refused(node.stage(&volume).await, code, &[words]);
        }
        let mut raw = Volume::block("raw");
        raw.context = volume().context;
        refused(
            node.stage(&raw).await,
            Code::InvalidArgument,
            &["no block device"],
        );
        let other = Volume {
            capability: Volume::filesystem("v", "ext4").capability,
            ..volume()
        };
        refused(node.stage(&other).await, Code::InvalidArgument, &["ext4"]);
        node.assert_clean().await;
    });
}

#[test]
fn io_goes_on_after_a_server_was_killed_under_it() {
    nfs_story(async |sandbox| {
        let mut server = NfsServer::start(sandbox, "server").await;
        let healthy = NfsServer::start(sandbox, "healthy").await;
        let node = Node::start(sandbox).await;
        let volume = server.volume("v", "v");
        let target = node.up(&volume, "pod").await;
        let before = node.stats(&volume, &target).await.expect("statistics");
        let operator = Operator::with_sockets(node.socket(), node.socket());
        let age = || {
            let stats = operator.json(&["stats", target.to_str().expect("a path")]);
            stats["age_ms"].as_u64()
        };
        assert_eq!(age(), None);
        for round in 0..2 {
            let file = target.join(format!("file{round}"));
            server.kill9();
            let writer = {
                let file = file.clone();
                std::thread::spawn(move || Content::new(&round.to_string()).write(&file))
            };
            // The last statistics, within the time that the kernel would wait.
            let begun = Instant::now();
            let usage = node.stats(&volume, &target).await.expect("statistics");
            assert!(begun.elapsed() < Duration::from_secs(30));
            assert_eq!(usage[0].total, before[0].total);
            assert!(age() >= Some(2000), "it waits so long for the server");
            eventually("health says so", async || {
                let found = health(&node, &volume).await;
                found.contains(&"FileSystemStuck".to_owned()).then_some(())
            })
            .await;
            node.wait_for_log("the file system waits for its server")
                .await;

            // Neither another server's volume nor another pod waits for it.
            let other = healthy.volume(&format!("other{round}"), "other");
            let at = node.up(&other, "pod").await;
            Content::new("other").write(&at.join("file"));
            node.down(&other, "pod").await;
            node.publish(&volume, "second").await.expect("published");
            node.unpublish(&volume, "second")
                .await
                .expect("unpublished");
            assert!(!writer.is_finished());

            server.restart().await;
            writer.join().expect("written");
            run(&["sh", "-c", "echo 3 > /proc/sys/vm/drop_caches"]);
            Content::new(&round.to_string()).assert_in(&file);
            eventually("health says so", async || {
                health(&node, &volume).await.is_empty().then_some(())
            })
            .await;
        }
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn a_dead_servers_volume_is_unstaged_and_staged_again_after_its_return() {
    nfs_story(async |sandbox| {
        let mut server = NfsServer::start(sandbox, "server").await;
        let node = impatient_node(sandbox).await;
        let volume = server.volume("v", "v");
        for restarts in [false, true] {
            let target = node.up(&volume, "pod").await;
            Content::new("kept").write(&target.join("kept"));
            leave_unwritten(&target.join("late"));
            server.kill9();
            if restarts {
                node.kill9().await;
                node.restart().await;
            }
            node.unpublish(&volume, "pod").await.expect("unpublished");
            let staging = node.staging(&volume);
            let unstage = async || node.unstage(&volume).await;
            node.retry_until_ok("unstaged", unstage).await;
            assert!(mounts_of(&node, &format!("127.0.0.1:{SHARE}/v")).is_empty());
            assert!(!staging.join("kept").exists());
            node.wait_for_log("unmounted, but the server does not answer")
                .await;
            let status = node.stage(&volume).await;
            refused(status, Code::Unavailable, &["does not answer"]);

            server.restart().await;
            let late = server.export().join("v/late");
            eventually("it is written", async || {
                let read = fs::read(&late).expect("made before");
                read.starts_with(b"late").then_some(())
            })
            .await;
            let target = node.up(&volume, "pod").await;
            Content::new("kept").assert_in(&target.join("kept"));
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn a_directory_that_its_server_lost_is_unmounted() {
    nfs_story(async |sandbox| {
        let server = NfsServer::start(sandbox, "server").await;
        let node = Node::start(sandbox).await;
        let volume = server.volume("v", "v");
        let target = node.up(&volume, "pod").await;
        fs::remove_dir(server.export().join("v")).expect("removed");
        eventually("the client knows", async || fs::read_dir(&target).err()).await;
        node.kill9().await;
        node.restart().await;
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn mounts_of_csi_driver_nfs_are_unpublished() {
    nfs_story(async |sandbox| {
        let server = NfsServer::start(sandbox, "server").await;
        let node = Node::start(sandbox).await;
        let volume = server.volume("127.0.0.1#share#v##", "v");
        let target = node.target(&volume, "pod");
        fs::create_dir_all(&target).expect("made");
        let options = format!("vers=4.1,addr=127.0.0.1,port={}", server.port());
        let source = format!("127.0.0.1:{SHARE}/v");
        let path = target.to_str().expect("UTF-8");
        run(&["mount", "-i", "-t", "nfs", "-o", &options, &source, path]);
        node.unpublish(&volume, "pod").await.expect("unpublished");
        assert!(!target.exists());
        node.unstage(&volume).await.expect("never staged");

        // By kubelet's note beside it, whose volume it is.
        fs::create_dir_all(&target).expect("made");
        run(&["mount", "-i", "-t", "nfs", "-o", &options, &source, path]);
        let beside = target.with_file_name("vol_data.json");
        let ours = "block.uring-csi.dev";
        for (driver, handle) in [("nfs.csi.k8s.io", &*volume.handle), (ours, "another")] {
            let data = format!(r#"{{"driverName":"{driver}","volumeHandle":"{handle}"}}"#);
            fs::write(&beside, data).expect("written");
            for status in [
                node.unpublish(&volume, "pod").await,
                node.unstage_at(&volume, &target).await,
            ] {
                refused(status, Code::FailedPrecondition, &[path, driver, handle]);
            }
        }
        assert_eq!(mounts_of(&node, &source).len(), 1);
        let data = format!(
            r#"{{"driverName":"{ours}","volumeHandle":"{}"}}"#,
            volume.handle
        );
        fs::write(&beside, data).expect("written");
        node.unpublish(&volume, "pod").await.expect("unpublished");
        assert!(!target.exists());
        fs::remove_file(&beside).expect("removed");

        // Kubelet's own are not of any driver.
        let theirs = node.kubelet.join("pods/uid/volumes/kubernetes.io~nfs/data");
        fs::create_dir_all(&theirs).expect("made");
        let path = theirs.to_str().expect("UTF-8");
        run(&["mount", "-i", "-t", "nfs", "-o", &options, &source, path]);
        for status in [
            node.unpublish_at(&volume, &theirs).await,
            node.unstage_at(&volume, &theirs).await,
        ] {
            refused(status, Code::FailedPrecondition, &["kubelet's own", path]);
        }
        assert_eq!(mounts_of(&node, &source).len(), 1);
        run(&["umount", path]);

        // And the agent's own, once its records are lost.
        node.up(&volume, "pod").await;
        node.restart_without_records().await;
        node.down(&volume, "pod").await;
        assert!(mounts_of(&node, &source).is_empty());
        node.assert_clean().await;
    });
}

#[test]
fn an_agent_killed_at_any_step_finishes_or_undoes() {
    nfs_story(async |sandbox| {
        let server = NfsServer::start(sandbox, "server").await;
        let node = Node::start(sandbox).await;
        // By NFS 4.0, which has no sessions: where the kill interrupted a request of the
        // kernel's, the next access to a mount with sessions got EIO, once.
        let mut made = 0;
        let source = |volume: &Volume| format!("127.0.0.1:{SHARE}/{}", volume.handle);
        let volume = || {
            made += 1;
            let name = format!("v{made}");
            server.volume(&name, &name).flags(&["vers=4.0"])
        };
        let staged = |volume: &Volume| {
            let staging = node.staging(volume).display().to_string();
            let all = mounts_of(&node, &source(volume));
            all.iter().filter(|line| line.contains(&staging)).count()
        };
        let grow = |_: &Volume| 1 << 50;
        crash_lifecycle_at_each_step(&node, 5, volume, staged, grow).await;
        let volume = server.volume("killed", "killed").flags(&["vers=4.0"]);
        let content = Content::new("killed");
        for _ in 0..5 {
            let in_use = |target: &Path| {
                content.write(&target.join("file"));
                content.assert_in(&target.join("file"));
            };
            kill_during_each_call(&node, &mut Rng::new(), &volume, || staged(&volume), in_use)
                .await;
        }
        node.assert_clean().await;
    });
}
