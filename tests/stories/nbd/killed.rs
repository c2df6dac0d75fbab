//! kill -9 of the agent, and of the server, at any instant of any step.

use std::{cell::Cell, fs, time::Duration};

use super::{blank, is_there, nbd_story};
use crate::harness::{
    Content, Dice, KINDS, NbdServer, Node, Volume, eventually, kill_amid, killed_amid_each,
    killed_at_each_step, nbds_over,
};

/// Makes a call during which the server is killed, and started again.
async fn server_dies_amid<T>(
    server: &mut NbdServer,
    dice: &mut Dice,
    call: impl AsyncFnOnce() -> T,
) -> T {
    let instant = Duration::from_micros(dice.below(25_000) as u64);
    let life = async {
        tokio::time::sleep(instant).await;
        server.kill9();
        server.restart().await;
    };
    tokio::join!(call(), life).0
}

#[test]
fn the_server_at_every_step() {
    nbd_story(async |sandbox| {
        let mut dice = Dice::new();
        let node = Node::start(sandbox).await;
        let mut server = NbdServer::start(sandbox).await;
        for (kind, _) in KINDS {
            let volume = blank(sandbox, &server, kind, kind);
            let content = Content::new(kind);
            // The first time mkfs is killed under, too.
            for round in 0..3 {
                let _ =
                    server_dies_amid(&mut server, &mut dice, async || node.stage(&volume).await)
                        .await;
                node.until_ok("staged", async || node.stage(&volume).await)
                    .await;
                let publish = async || node.publish(&volume, "pod").await;
                let _ = server_dies_amid(&mut server, &mut dice, publish).await;
                node.until_ok("published", publish).await;
                let target = node.target(&volume, "pod");
                if round == 0 {
                    content.put(&volume, &target);
                }
                is_there(&content, &volume, &target);
                let unpublish = async || node.unpublish(&volume, "pod").await;
                let _ = server_dies_amid(&mut server, &mut dice, unpublish).await;
                node.until_ok("unpublished", unpublish).await;
                let unstage = async || node.unstage(&volume).await;
                let _ = server_dies_amid(&mut server, &mut dice, unstage).await;
                node.until_ok("unstaged", unstage).await;
                assert!(nbds_over(&format!(" {}", volume.handle)).is_empty());
            }
        }
        node.assert_clean().await;
    });
}

#[test]
fn the_server_between_the_agent_s_steps() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let mut server = NbdServer::start(sandbox).await;
        for steps in 0.. {
            // Longer than the story waits: a connection that nobody renews fails it.
            let volume = blank(sandbox, &server, "v", "ext4").with("deadConnectionTimeout", "120");
            node.kill9().await;
            node.start_stalling(steps).await;
            let done = Cell::new(false);
            let staged = async {
                node.until_ok("staged", async || node.stage(&volume).await)
                    .await;
                done.set(true);
            };
            let meanwhile = async {
                let paused = async || (done.get() || node.stands_still()).then_some(());
                eventually("the agent stands still, or is done", paused).await;
                let stands = node.stands_still();
                if stands {
                    server.kill9();
                    server.restart().await;
                    node.go_on();
                }
                stands
            };
            let ((), stood) = tokio::join!(staged, meanwhile);
            if !stood {
                // It would at a later step.
                node.kill9().await;
                node.restart().await;
            }
            node.down(&volume, "pod").await;
            if !stood {
                // None at all in a build without debug assertions.
                assert!(steps > 5, "a stage has more than {steps} steps");
                break;
            }
        }
        node.assert_clean().await;
    });
}

#[test]
fn the_agent_at_every_step() {
    nbd_story(async |sandbox| {
        let mut dice = Dice::new();
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        for (kind, _) in KINDS {
            let volume = blank(sandbox, &server, kind, kind);
            let attached = || nbds_over(&format!(" {}", volume.handle)).len();
            let content = Content::new(kind);
            for round in 0..3 {
                killed_amid_each(&node, &mut dice, &volume, attached, |target| {
                    if round == 0 {
                        content.put(&volume, target);
                    }
                    is_there(&content, &volume, target);
                })
                .await;
            }
        }
        node.assert_clean().await;
    });
}

#[test]
fn the_agent_at_each_step_of_its_own() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        let mut last = None::<Volume>;
        let volume = || {
            // There is not room for all of them.
            if let Some(last) = &last {
                fs::remove_file(server.image_of(last)).unwrap();
            }
            last.insert(blank(sandbox, &server, "v", "ext4")).clone()
        };
        let attached = |volume: &Volume| nbds_over(&format!(" {}", volume.handle)).len();
        // Without growth: the next agent cannot replace the connections of a dead one,
        // and says so (growth_after_a_restart_is_proven_or_taken_back).
        killed_at_each_step(&node, 4, volume, attached, None).await;
        node.assert_clean().await;
    });
}

#[test]
fn both_at_once() {
    nbd_story(async |sandbox| {
        let mut dice = Dice::new();
        let node = Node::start(sandbox).await;
        let mut server = NbdServer::start(sandbox).await;
        // A killed agent whose thread waits for a dead server ends with this wait.
        let volume = blank(sandbox, &server, "v", "ext4").with("deadConnectionTimeout", "3");
        let content = Content::new("v");
        content.put(&volume, &node.up(&volume, "pod").await);
        node.down(&volume, "pod").await;
        for _ in 0..4 {
            let stage = async || node.stage(&volume).await;
            let mut fork = dice.fork();
            server_dies_amid(&mut server, &mut dice, async || {
                kill_amid(&node, &mut fork, stage).await;
            })
            .await;
            node.restart().await;
            node.until_ok("staged", stage).await;
            node.publish(&volume, "pod").await.unwrap();
            is_there(&content, &volume, &node.target(&volume, "pod"));
            node.unpublish(&volume, "pod").await.unwrap();
            let unstage = async || node.unstage(&volume).await;
            let mut fork = dice.fork();
            server_dies_amid(&mut server, &mut dice, async || {
                kill_amid(&node, &mut fork, unstage).await;
            })
            .await;
            node.restart().await;
            node.until_ok("unstaged", unstage).await;
        }
        node.assert_clean().await;
    });
}
