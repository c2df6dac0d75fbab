//! The agent is killed while volumes are in use.

use std::fs;

use testkit::{Content, KINDS, MIB, NbdServer, Node, nbds_over};

use super::{blank, nbd_story};

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
