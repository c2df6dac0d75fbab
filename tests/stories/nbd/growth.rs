//! Exports that become larger or smaller under their volumes.

use std::{
    fs,
    os::unix::fs::FileExt as _,
    os::unix::fs::OpenOptionsExt as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use testkit::{
    Content, KINDS, MIB, NbdServer, Node, Rng, Volume, eventually, grow_published, nbds_over,
    refused, run,
};
use tonic::Code::{FailedPrecondition, Unavailable};

use super::{blank, nbd_story};

#[test]
fn volumes_grow_in_use_and_never_shrink() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        for (kind, small) in KINDS {
            let volume = blank(sandbox, &server, kind, kind);
            let target = node.up(&volume, "pod").await;
            let image = fs::File::options()
                .write(true)
                .open(server.image_of(&volume))
                .unwrap();
            let grow = |bytes| image.set_len(bytes).unwrap();
            grow_published(&node, &volume, small, "grow the source first", grow).await;
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
fn growth_after_a_restart_is_verified_or_reverted() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let mut server = NbdServer::start(sandbox).await;
        let volume = blank(sandbox, &server, "v", "xfs");
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
        // A restarted server has no such connection.
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
fn a_failed_read_of_the_end_passes() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let fails = sandbox.dir().join("fails");
        let file = format!("error-file={}", fails.display());
        let args = ["--filter=error", "error-pread-rate=100%", &file];
        let server = NbdServer::start_with(sandbox, false, &args).await;
        let volume = blank(sandbox, &server, "v", "ext4");
        let target = node.up(&volume, "pod").await;
        fs::write(&fails, "").unwrap();
        refused(
            node.expand(&volume, &target, 0).await,
            Unavailable,
            &["read the end of"],
        );
        fs::remove_file(&fails).unwrap();
        node.expand(&volume, &target, 0).await.unwrap();
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

/// Reads from a device, past every cache, until `stop` is set.
fn read_on(device: &std::path::Path, stop: &AtomicBool) {
    let file = fs::File::options()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(device)
        .expect("a device");
    let mut memory = vec![0; 8192];
    let start = memory.as_ptr().align_offset(4096);
    while !stop.load(Relaxed) {
        // A server that dies may cost one of them.
        let _ = file.read_exact_at(&mut memory[start..start + 4096], 0);
    }
}

#[test]
fn growth_under_load_is_done_in_one_call() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        // A request in flight on a connection that is replaced waits that long.
        let volume = blank(sandbox, &server, "v", "block").with("requestTimeout", "1");
        let target = node.up(&volume, "pod").await;
        let image = fs::File::options()
            .write(true)
            .open(server.image_of(&volume))
            .unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let reader = || {
            let (target, stop) = (target.clone(), Arc::clone(&stop));
            std::thread::spawn(move || read_on(&target, &stop))
        };
        let readers: Vec<_> = (0..4).map(|_| reader()).collect();
        for round in 1..=12 {
            let bytes = (64 + round) * MIB;
            image.set_len(bytes).unwrap();
            let grown = node.expand(&volume, &target, bytes).await.unwrap();
            assert_eq!(grown.unsigned_abs(), bytes);
        }
        stop.store(true, Relaxed);
        for reader in readers {
            reader.join().unwrap();
        }
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn a_server_that_dies_during_growth_delays_no_other() {
    nbd_story(async |sandbox| {
        let mut rng = Rng::new();
        let node = Node::start(sandbox).await;
        let patient = |volume: Volume| volume.with("deadConnectionTimeout", "300");
        let mut other = NbdServer::start(sandbox).await;
        let bystander = patient(blank(sandbox, &other, "bystander", "ext4"));
        let file = node.up(&bystander, "pod").await.join("file");
        for round in 0..6 {
            let mut server = NbdServer::start(sandbox).await;
            let volume = patient(blank(sandbox, &server, &format!("v{round}"), "block"));
            let target = node.up(&volume, "pod").await;
            let image = fs::File::options()
                .write(true)
                .open(server.image_of(&volume))
                .unwrap();
            image.set_len(128 * MIB).unwrap();
            let stop = Arc::new(AtomicBool::new(false));
            let reader = {
                let (target, stop) = (target.clone(), Arc::clone(&stop));
                std::thread::spawn(move || read_on(&target, &stop))
            };
            let begin = Instant::now();
            let instant = Duration::from_micros(rng.below(20_000) as u64);
            let deaths = async {
                tokio::time::sleep(instant).await;
                server.kill9();
                other.kill9();
                server.restart().await;
                other.restart().await;
            };
            // It grows or it does not; in the worst case its requests fail.
            let (_, ()) = tokio::join!(node.expand(&volume, &target, 128 * MIB), deaths);
            Content::new(&round.to_string()).write(&file);
            let waited = begin.elapsed();
            assert!(waited < Duration::from_secs(60), "{instant:?}: {waited:?}");
            stop.store(true, Relaxed);
            reader.join().unwrap();
            node.down(&volume, "pod").await;
        }
        node.down(&bystander, "pod").await;
        node.assert_clean().await;
    });
}
