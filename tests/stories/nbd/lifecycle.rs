//! The whole lifecycle of a volume, with each kind of server.

use std::fs;

use testkit::{Content, KINDS, MIB, NbdServer, Node, nbds_over, run};

use super::{blank, lifecycle, nbd_story, over, own};
use crate::block::read_only_for_a_while;

#[test]
fn lifecycle_with_nbdkit_over_unix_and_tcp() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        for tcp in [false, true] {
            let server = NbdServer::start_with(sandbox, tcp, &[]).await;
            for (kind, _) in KINDS {
                let volume = blank(sandbox, &server, &format!("{kind}-{tcp}"), kind);
                lifecycle(&node, &volume).await;
                assert!(nbds_over(&format!(" {}", volume.handle)).is_empty());
            }
        }
        node.assert_clean().await;
    });
}

#[test]
fn lifecycle_with_qemu_nbd_over_unix_and_tcp() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        for tcp in [false, true] {
            for (kind, bytes) in KINDS {
                let name = own(sandbox, &format!("{kind}-{tcp}"));
                NbdServer::image(sandbox, &name, bytes);
                let server = NbdServer::qemu(sandbox, tcp, &name, &[]).await;
                lifecycle(&node, &over(&server, &name, kind)).await;
            }
        }
        node.assert_clean().await;
    });
}

#[test]
fn sixteen_volumes_at_once() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        let volumes: Vec<_> = (0..16)
            .map(|n| blank(sandbox, &server, &format!("v{n}"), "ext4"))
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
            Content::new(&volume.handle).assert_in(&target.join("file"));
            node.down(volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn a_server_that_cannot_write_zeroes_is_not_asked_to() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        // A device that had a server with WRITE_ZEROES sends it to a later server, too.
        let able = NbdServer::start(sandbox).await;
        lifecycle(&node, &blank(sandbox, &able, "able", "block")).await;
        let unable = NbdServer::start_with(sandbox, false, &["--filter=nozero"]).await;
        let volumes = ["one", "other"].map(|name| blank(sandbox, &unable, name, "block"));
        let ups = volumes.iter().map(|volume| node.up(volume, "pod"));
        for target in futures_util::future::join_all(ups).await {
            let target = target.to_str().expect("UTF-8");
            run(&["blkdiscard", "--zeroout", "--length", "1M", target]);
        }
        for volume in &volumes {
            let most = attribute(&volume.handle, "queue/write_zeroes_max_bytes");
            assert_eq!(most, "0");
            node.down(volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn a_raw_volume_is_read_only_for_a_while() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        read_only_for_a_while(&node, &blank(sandbox, &server, "v", "block")).await;
        node.assert_clean().await;
    });
}

/// As after an rbd-nbd that was started read-only.
#[test]
fn a_number_that_was_marked_read_only_is_written() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        let volume = blank(sandbox, &server, "v", "ext4");
        let device_of = || nbds_over(&format!(" {}", volume.handle)).pop();
        let mut marked = None;
        // Another test may have got the number meanwhile.
        for _ in 0..20 {
            let target = node.up(&volume, "pod").await;
            fs::write(target.join("file"), "x").unwrap();
            let device = device_of().expect("a device");
            let is_again = marked.as_ref() == Some(&device);
            // What is mounted is still written: only writes to the node fail.
            run(&["blockdev", "--setro", &device]);
            node.down(&volume, "pod").await;
            marked = Some(device);
            if is_again {
                break;
            }
        }
        run(&["blockdev", "--setrw", &marked.unwrap()]);
        node.assert_clean().await;
    });
}

/// An attribute of the volume's device in sysfs.
fn attribute(volume: &str, name: &str) -> String {
    let device = nbds_over(&format!(" {volume}")).pop().expect("a device");
    let device = device.trim_start_matches("/dev/");
    let text = std::fs::read_to_string(format!("/sys/block/{device}/{name}"));
    text.expect("sysfs").trim().to_owned()
}

#[test]
fn several_connections_are_made_where_the_export_allows_them() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let one = ["--filter=multi-conn", "multi-conn-mode=disable"];
        // More connections than CPUs are useless.
        let cpus = std::thread::available_parallelism().unwrap().get();
        for (name, args, wanted) in [("many", &[][..], cpus.min(5)), ("one", &one[..], 1)] {
            let server = NbdServer::start_with(sandbox, true, args).await;
            let volume = blank(sandbox, &server, name, "ext4").with("connections", "5");
            let target = node.up(&volume, "pod").await;
            Content::new(name).write(&target.join("file"));
            let device = nbds_over(&format!(" {}", volume.handle))
                .pop()
                .expect("a device");
            let queues = std::fs::read_dir(device.replace("/dev", "/sys/block") + "/mq");
            assert_eq!(queues.expect("sysfs").count(), wanted, "{name}");
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn requests_keep_to_the_servers_block_sizes() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let strict = [
            "--filter=blocksize-policy",
            "blocksize-error-policy=error",
            "blocksize-minimum=4096",
            "blocksize-preferred=4096",
            "blocksize-maximum=64K",
        ];
        let server = NbdServer::start_with(sandbox, false, &strict).await;
        for (kind, _) in KINDS {
            let volume = blank(sandbox, &server, kind, kind);
            node.up(&volume, "pod").await;
            assert_eq!(
                attribute(&volume.handle, "queue/logical_block_size"),
                "4096"
            );
            let largest: u32 = attribute(&volume.handle, "queue/max_sectors_kb")
                .parse()
                .unwrap();
            assert!(largest <= 64, "{largest}");
            node.down(&volume, "pod").await;
            lifecycle(&node, &volume).await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn lifecycle_with_a_slow_server() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let slow = ["--filter=delay", "rdelay=5ms", "wdelay=5ms"];
        let server = NbdServer::start_with(sandbox, false, &slow).await;
        for kind in ["ext4", "block"] {
            lifecycle(&node, &blank(sandbox, &server, kind, kind)).await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn lifecycle_with_a_server_that_fails_at_times() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let failing = sandbox.dir().join("failing");
        let trigger = format!("error-file={}", failing.display());
        let args = ["--filter=error", "error=EIO", "error-rate=100%", &trigger];
        let server = NbdServer::start_with(sandbox, false, &args).await;
        for kind in ["ext4", "xfs", "block"] {
            let volume = blank(sandbox, &server, kind, kind);
            let content = Content::new(kind);
            // Unreadable content is not proven blank, and is not overwritten.
            let fails = || std::fs::write(&failing, "").unwrap();
            let works = || std::fs::remove_file(&failing).unwrap();
            if kind != "block" {
                fails();
                let image = server.image_of(&volume);
                let before = testkit::sha256(&image).unwrap();
                let refusal = node.stage(&volume).await.unwrap_err();
                assert!(refusal.message().contains("read"), "{refusal:?}");
                assert_eq!(testkit::sha256(&image).unwrap(), before);
                works();
            }
            let target = node.up(&volume, "pod").await;
            content.put(&volume, &target);
            // In use: the pod's write fails, and the volume still ends.
            fails();
            let written = if volume.is_block() {
                content.write_at(&target, 8 * MIB)
            } else {
                std::fs::File::create(target.join("lost")).and_then(|file| file.sync_all())
            };
            written.unwrap_err();
            node.unpublish(&volume, "pod").await.unwrap();
            works();
            node.retry_until_ok("unstaged", async || node.unstage(&volume).await)
                .await;
            let target = node.up(&volume, "pod").await;
            super::is_there(&content, &volume, &target);
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}
