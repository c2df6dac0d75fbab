//! Exports that cannot be attached, and devices that others use.

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::net::UnixListener,
    time::Duration,
};

use testkit::{
    Content, KINDS, MIB, Mode, NbdServer, Node, NodeSetup, Volume, nbds_over, refused, run, sha256,
    story,
};
use tonic::Code::{
    Aborted, DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound, Unavailable,
};

use super::{blank, lifecycle, nbd_story, over, own};

#[test]
fn exports_that_cannot_be_attached_are_refused_with_the_servers_message() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        NbdServer::image(sandbox, "q", 64 * MIB);
        let server = NbdServer::qemu(sandbox, false, "q", &["-r"]).await;
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
        refused(
            node.stage(&tls).await,
            InvalidArgument,
            &["uri", "TLS", "nbdkit -U"],
        );
        node.assert_clean().await;
    });
}

#[test]
fn exports_that_are_too_small_are_not_written() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        NbdServer::image(sandbox, "tiny", 100);
        refused(
            node.stage(&over(&server, "tiny", "ext4")).await,
            FailedPrecondition,
            &["100 bytes"],
        );
        for (kind, bytes) in KINDS {
            let volume = blank(sandbox, &server, kind, kind);
            let image = server.image_of(&volume);
            let before = sha256(&image).unwrap();
            let wanted = volume.clone().with("minSize", &(bytes + 1).to_string());
            refused(
                node.stage(&wanted).await,
                FailedPrecondition,
                &["minSize", &bytes.to_string(), &(bytes + 1).to_string()],
            );
            assert_eq!(sha256(&image).unwrap(), before);
            lifecycle(
                &node,
                &volume.with("minSize", &format!("{}Mi", bytes / MIB)),
            )
            .await;
        }
        let bad = over(&server, "bad", "ext4").with("minSize", "much");
        refused(node.stage(&bad).await, InvalidArgument, &["minSize"]);
        // An export without the end of its file system.
        for (kind, bytes) in KINDS.iter().filter(|(kind, _)| *kind != "block") {
            let volume = over(&server, &own(sandbox, kind), kind);
            let image = server.image_of(&volume);
            let file = fs::File::options().write(true).open(&image).unwrap();
            file.set_len(bytes - 8 * MIB).unwrap();
            let before = sha256(&image).unwrap();
            refused(
                node.stage(&volume).await,
                FailedPrecondition,
                &["export", "cut short", &bytes.to_string()],
            );
            assert_eq!(sha256(&image).unwrap(), before);
            file.set_len(*bytes).unwrap();
            let target = node.up(&volume, "pod").await;
            Content::new(&volume.handle).assert_in(&target.join("file"));
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn requests_that_the_driver_cannot_make_are_not_made() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let coarse = [
            "--filter=blocksize-policy",
            "blocksize-minimum=8192",
            "blocksize-preferred=8192",
        ];
        let server = NbdServer::start_with(sandbox, false, &coarse).await;
        refused(
            node.stage(&blank(sandbox, &server, "v", "ext4")).await,
            FailedPrecondition,
            &["8192 bytes at least"],
        );
        node.assert_clean().await;
    });
}

#[test]
fn tls_is_refused_and_a_tunnel_helps() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let keys = sandbox.dir().join("keys");
        fs::write(&keys, format!("node:{}\n", "5a".repeat(32))).unwrap();
        let key = format!("--tls-psk={}", keys.display());
        let server = NbdServer::start_with(sandbox, true, &["--tls=require", &key]).await;
        let volume = blank(sandbox, &server, "v", "ext4");
        refused(
            node.stage(&volume).await,
            FailedPrecondition,
            &["insists on TLS"],
        );
        let tunnel = NbdServer::tunnel(sandbox, &server, &volume.handle, &keys).await;
        lifecycle(&node, &over(&tunnel, &volume.handle, "ext4")).await;
        node.assert_clean().await;
    });
}

#[test]
fn read_only_exports_are_mounted_read_only() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        let volume = blank(sandbox, &server, "v", "ext4");
        let content = Content::new("read-only");
        content.write(&node.up(&volume, "pod").await.join("file"));
        node.down(&volume, "pod").await;
        drop(server);
        let server = NbdServer::qemu(sandbox, false, &volume.handle, &["-r"]).await;
        let reader = over(&server, &volume.handle, "ext4").mode(Mode::SingleNodeReaderOnly);
        let target = node.up(&reader, "pod").await;
        content.assert_in(&target.join("file"));
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
            // Accepts, and sends nothing until the agent closes the connection.
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
        // The same call joins the work.
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
fn a_device_in_use_elsewhere_is_not_disconnected() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        let volume = blank(sandbox, &server, "v", "ext4");
        node.up(&volume, "pod").await;
        node.unpublish(&volume, "pod").await.unwrap();
        // Another mount of the file system, unknown to the agent.
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
        assert!(nbds_over(sandbox.dir().to_str().unwrap()).is_empty());
        node.assert_clean().await;
    });
}

#[test]
fn an_open_device_is_disconnected_once_it_is_closed() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        let volume = blank(sandbox, &server, "v", "block");
        node.up(&volume, "pod").await;
        node.unpublish(&volume, "pod").await.unwrap();
        let device = nbds_over(sandbox.dir().to_str().unwrap()).pop().unwrap();
        let opener = fs::File::open(&device).unwrap();
        node.timeout.set(Duration::from_secs(2));
        refused(node.unstage(&volume).await, DeadlineExceeded, &["gone"]);
        node.timeout.set(Duration::from_secs(60));
        // The kernel reports the disconnect; the same call waits for that.
        tokio::join!(async { node.unstage(&volume).await.unwrap() }, async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            drop(opener);
        });
        node.assert_clean().await;
    });
}

#[test]
fn drivers_of_other_names_keep_their_devices() {
    nbd_story(async |sandbox| {
        let other = NodeSetup {
            node_id: "node-b",
            ..NodeSetup::new(sandbox)
        };
        let other = other.arg("--driver-name").arg("other.example.com");
        let other = Node::start_with(sandbox, other).await;
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        let volume = blank(sandbox, &server, "v", "ext4");
        let target = node.up(&volume, "pod").await;
        let content = Content::new("v");
        content.write(&target.join("file"));
        refused(
            other.stage(&volume).await,
            FailedPrecondition,
            &["attached", "by the driver block.uring-csi.dev"],
        );
        // It has no such volume, though another has that handle.
        other.unstage(&volume).await.unwrap();
        super::is_there(&content, &volume, &target);
        node.down(&volume, "pod").await;
        lifecycle(&other, &volume).await;
        node.assert_clean().await;
    });
}

#[test]
fn the_device_of_another_volume_is_not_used() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        let volume = blank(sandbox, &server, "v", "ext4");
        let content = Content::new("v");
        let target = node.up(&volume, "pod").await;
        content.write(&target.join("file"));
        let mut other = volume.clone();
        (other.handle, other.spec) = ("other".to_owned(), "pv-other".to_owned());
        node.restart_without_records().await;
        refused(
            node.stage(&other).await,
            FailedPrecondition,
            &["attached", &format!("for volume {}", volume.handle)],
        );
        node.unstage(&other).await.unwrap();
        super::is_there(&content, &volume, &target);
        node.down(&volume, "pod").await;
        lifecycle(&node, &other).await;
        node.assert_clean().await;
    });
}

#[test]
fn a_device_mounted_elsewhere_is_not_published() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        let volume = blank(sandbox, &server, "v", "block");
        let device = node.up(&volume, "pod").await;
        run(&["mkfs.ext4", "-q", device.to_str().unwrap()]);
        let nbd = run(&["lsblk", "-nro", "NAME", device.to_str().unwrap()]);
        let nbd = format!("/dev/{}", nbd.trim());
        node.unpublish(&volume, "pod").await.unwrap();
        let theirs = sandbox.dir().join("theirs");
        fs::create_dir(&theirs).unwrap();
        run(&["mount", &nbd, theirs.to_str().unwrap()]);
        node.restart_without_records().await;
        refused(
            node.stage(&volume).await,
            Aborted,
            &[&nbd, "ext4 is mounted at", theirs.to_str().unwrap()],
        );
        run(&["umount", theirs.to_str().unwrap()]);
        node.stage(&volume).await.unwrap();
        node.unstage(&volume).await.unwrap();
        node.assert_clean().await;
    });
}

#[test]
fn a_missing_kernel_module_is_named() {
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
