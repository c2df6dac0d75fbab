//! The agent is killed while volumes are in use.

use std::fs;

use testkit::{Content, KINDS, MIB, NbdServer, Node, eventually, nbds_over};

use super::{blank, health, nbd_story};

#[test]
fn pods_outlive_the_agent_and_a_server_that_moves_meanwhile() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let mut server = NbdServer::start(sandbox).await;
        let volumes = KINDS.map(|(kind, _)| blank(sandbox, &server, kind, kind));
        let write = |when: &str| {
            for volume in &volumes {
                let content = Content::new(&format!("{when} {}", volume.handle));
                let target = node.target(volume, "pod");
                if volume.is_block() {
                    content.write_at(&target, place(when)).unwrap();
                } else {
                    content.write(&target.join(when));
                }
            }
        };
        for volume in &volumes {
            node.up(volume, "pod").await;
        }
        write("before");
        node.kill9().await;
        write("during");
        // No agent receives the kernel's announcement.
        server.kill9();
        server.restart().await;
        node.restart().await;
        write("after");
        for volume in &volumes {
            node.up(volume, "pod").await;
        }
        assert_eq!(
            nbds_over(sandbox.dir().to_str().unwrap()).len(),
            KINDS.len()
        );
        fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
        for volume in &volumes {
            let target = node.target(volume, "pod");
            for when in ["before", "during", "after"] {
                let content = Content::new(&format!("{when} {}", volume.handle));
                if volume.is_block() {
                    content.assert_at(&target, place(when));
                } else {
                    content.assert_in(&target.join(when));
                }
            }
            node.down(volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

/// The offset of that write on a raw block device.
fn place(when: &str) -> u64 {
    match when {
        "before" => MIB,
        "during" => 3 * MIB,
        _ => 5 * MIB,
    }
}

#[test]
fn records_that_are_lost_are_rebuilt() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        let volumes = ["ext4", "block"].map(|kind| blank(sandbox, &server, kind, kind));
        for volume in &volumes {
            node.up(volume, "pod").await;
        }
        node.restart_without_records().await;
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
fn a_server_at_its_limit_of_clients_is_not_away() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let arguments = ["--filter=limit", "limit=1"];
        let mut server = NbdServer::start_with(sandbox, false, &arguments).await;
        let volume = blank(sandbox, &server, "v", "ext4").with("connections", "1");
        // The server may not have noticed yet that the last client has gone.
        node.retry_until_ok("staged", async || node.stage(&volume).await)
            .await;
        let target = node.up(&volume, "pod").await;
        node.kill9().await;
        node.restart().await;
        node.wait_for_log("no fresh connections, but the device works")
            .await;
        assert_eq!(health(&node, &volume).await, [""; 0]);
        Content::new("after").write(&target.join("file"));

        server.kill9();
        let is = async |away: bool| {
            eventually("health says so", async || {
                (health(&node, &volume).await.is_empty() != away).then_some(())
            })
            .await;
        };
        is(true).await;
        server.restart().await;
        is(false).await;
        Content::new("at last").write(&target.join("other"));
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}
