//! NBD servers that stop, for a while or for good.

use std::{cell::Cell, fs, os::unix::net::UnixListener, time::Duration};

use testkit::{Content, NbdServer, Node, NodeSetup, eventually, nbds_over, run};

use super::{blank, health, nbd_story};
use crate::metrics::Scrape;

#[test]
fn io_continues_once_a_server_is_back() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        for tcp in [false, true] {
            let mut server = NbdServer::start_with(sandbox, tcp, &[]).await;
            let volume = blank(sandbox, &server, &format!("v{tcp}"), "ext4");
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
                content.assert_in(&file);
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
fn the_metrics_count_volumes_without_a_server() {
    nbd_story(async |sandbox| {
        let scrape = Scrape::new();
        let setup = NodeSetup::new(sandbox).arg(&scrape.arg());
        let node = Node::start_with(sandbox, setup).await;
        let mut server = NbdServer::start(sandbox).await;
        let volume = blank(sandbox, &server, "v", "ext4");
        node.up(&volume, "pod").await;
        let away = "uring_csi_volume_conditions{reason=\"ServerAway\"}";
        let lost = "uring_csi_nbd_connections_lost_total";
        scrape.becomes(away, |count| count < 1.0).await;
        assert_eq!(scrape.value(lost), Some(0.0));
        server.kill9();
        scrape.becomes(away, |count| count > 0.0).await;
        assert_eq!(scrape.value(lost), Some(1.0));
        let which = format!(
            "uring_csi_volume_condition_info{{volume_id=\"{}\",reason=\"ServerAway\"}}",
            volume.handle
        );
        assert_eq!(scrape.value(&which), Some(1.0));
        server.restart().await;
        scrape.becomes(away, |count| count < 1.0).await;
        assert_eq!(scrape.value(&which), None);
        assert_eq!(scrape.value(lost), Some(1.0));
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

/// A server that accepts connections and says nothing holds an attempt for seconds.
#[test]
fn of_a_silent_servers_volumes_one_is_reconnected_at_once() {
    nbd_story(async |sandbox| {
        let scrape = Scrape::new();
        let setup = NodeSetup::new(sandbox).arg(&scrape.arg());
        let node = Node::start_with(sandbox, setup).await;
        let mut server = NbdServer::start(sandbox).await;
        let volumes = ["one", "two"].map(|name| blank(sandbox, &server, name, "block"));
        for volume in &volumes {
            node.up(volume, "pod").await;
        }
        server.kill9();
        let silent = UnixListener::bind(&volumes[0].context["socket"]).expect("a socket");
        let waiting = "uring_csi_admission_waiting{step=\"reconnect\"}";
        scrape.becomes(waiting, |count| count > 0.0).await;
        drop(silent);
        server.kill9();
        server.restart().await;
        for volume in &volumes {
            eventually("the volume is healthy", async || {
                health(&node, volume).await.is_empty().then_some(())
            })
            .await;
            node.down(volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn a_server_that_stays_away_fails_io_and_the_volume_unstages() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        for kind in ["ext4", "xfs", "block"] {
            let mut server = NbdServer::start(sandbox).await;
            let volume = blank(sandbox, &server, kind, kind).with("deadConnectionTimeout", "2");
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
fn a_server_that_returns_with_another_export_is_not_used() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let mut server = NbdServer::start(sandbox).await;
        let volume = blank(sandbox, &server, "v", "ext4");
        let content = Content::new("v");
        let target = node.up(&volume, "pod").await;
        content.write(&target.join("file"));
        let image = fs::File::options()
            .write(true)
            .open(server.image_of(&volume))
            .unwrap();
        let size = image.metadata().unwrap().len();
        server.kill9();
        image.set_len(size / 2).unwrap();
        server.restart().await;
        eventually("health says why", async || {
            let path = node.target(&volume, "pod");
            let found = node.health(&volume, &path).await.expect("health");
            let said = found.iter().any(|entry| entry.message.contains("shrunk"));
            said.then_some(())
        })
        .await;
        image.set_len(size).unwrap();
        eventually("it is used again", async || {
            health(&node, &volume).await.is_empty().then_some(())
        })
        .await;
        Content::new("more").write(&target.join("more"));
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

/// More steps than a stage has until its device is probed.
const STEPS: usize = 40;

#[test]
fn a_dead_connection_in_a_probe_delays_no_other_first_mount() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let mut server = NbdServer::start(sandbox).await;
        let stood = Cell::new(0);
        for steps in 0..STEPS {
            let name = format!("v{steps}");
            let volume =
                blank(sandbox, &server, &name, "ext4").with("deadConnectionTimeout", "120");
            node.kill9().await;
            node.start_stopping_at(steps).await;
            let ended = Cell::new(false);
            let stage = async {
                let _ = node.stage(&volume).await;
                ended.set(true);
            };
            // The server ends when the agent is at this step; then the agent may or may not
            // probe the volume.
            let meanwhile = async {
                let paused = async || (ended.get() || node.is_stopped()).then_some(());
                eventually("the agent is stopped, or has staged the volume", paused).await;
                stood.set(stood.get() + usize::from(node.is_stopped()));
                // The first opener of a device reads its partitions.
                for device in nbds_over(&format!(" {}", volume.handle)) {
                    fs::File::open(device).expect("it is attached");
                }
                server.kill9();
                node.resume();
                let probed = eventually("the volume is probed, or refused", async || {
                    if ended.get() {
                        return Some(false);
                    }
                    let error = node.unstage(&volume).await.err()?;
                    error.message().contains("step probe").then_some(true)
                })
                .await;
                if probed {
                    let kubelets = node.timeout.replace(Duration::from_secs(30));
                    for other in ["one", "two"] {
                        let other = sandbox.volume(other, "ext4");
                        let target = node.up(&other, "pod").await;
                        Content::new("other").write(&target.join("file"));
                        node.down(&other, "pod").await;
                    }
                    node.timeout.set(kubelets);
                    assert!(!ended.get(), "the volume's device was dead all the time");
                }
                server.restart().await;
                probed
            };
            let ((), probed) = tokio::join!(stage, meanwhile);
            node.retry_until_ok("staged", async || node.stage(&volume).await)
                .await;
            node.unstage(&volume).await.unwrap();
            if probed {
                node.assert_clean().await;
                return;
            }
        }
        // A build without debug assertions stops nowhere.
        assert_eq!(stood.get(), 0, "none of these steps was a probe");
    });
}
