//! SIGKILL to the agent and to the server at any instant.

use std::{cell::Cell, fs, time::Duration};

use testkit::{
    Content, GrowSource, KINDS, NbdServer, Node, Rng, Volume, bytes_for,
    crash_lifecycle_at_each_step, eventually, kill_during, kill_during_each_call, kinds_to_crash,
    nbds_over,
};
use tokio::sync::Mutex;
use tonic::Status;

use super::{blank, is_there, nbd_story};

/// Makes a call during which the server is killed, and started again.
async fn kill_server_during<T>(
    server: &mut NbdServer,
    rng: &mut Rng,
    call: impl AsyncFnOnce() -> T,
) -> T {
    let instant = Duration::from_micros(rng.below(25_000) as u64);
    let life = async {
        tokio::time::sleep(instant).await;
        server.kill9();
        server.restart().await;
    };
    tokio::join!(call(), life).0
}

#[test]
fn the_server_is_killed_during_each_call() {
    nbd_story(async |sandbox| {
        let mut rng = Rng::new();
        let node = Node::start(sandbox).await;
        let mut server = NbdServer::start(sandbox).await;
        for (kind, _) in KINDS {
            let volume = blank(sandbox, &server, kind, kind);
            let content = Content::new(kind);
            // In the first round mkfs may lose the server, too.
            for round in 0..3 {
                let _ =
                    kill_server_during(&mut server, &mut rng, async || node.stage(&volume).await)
                        .await;
                node.retry_until_ok("staged", async || node.stage(&volume).await)
                    .await;
                let publish = async || node.publish(&volume, "pod").await;
                let _ = kill_server_during(&mut server, &mut rng, publish).await;
                node.retry_until_ok("published", publish).await;
                let target = node.target(&volume, "pod");
                if round == 0 {
                    content.put(&volume, &target);
                }
                is_there(&content, &volume, &target);
                let unpublish = async || node.unpublish(&volume, "pod").await;
                let _ = kill_server_during(&mut server, &mut rng, unpublish).await;
                node.retry_until_ok("unpublished", unpublish).await;
                let unstage = async || node.unstage(&volume).await;
                let _ = kill_server_during(&mut server, &mut rng, unstage).await;
                node.retry_until_ok("unstaged", unstage).await;
                assert!(nbds_over(&format!(" {}", volume.handle)).is_empty());
            }
        }
        node.assert_clean().await;
    });
}

#[test]
fn the_server_is_killed_between_the_agents_steps() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let mut server = NbdServer::start(sandbox).await;
        for steps in 0.. {
            // Longer than the story: a connection that the agent does not renew fails it.
            let volume = blank(sandbox, &server, "v", "ext4").with("deadConnectionTimeout", "120");
            node.kill9().await;
            node.start_stopping_at(steps).await;
            let done = Cell::new(false);
            let staged = async {
                node.retry_until_ok("staged", async || node.stage(&volume).await)
                    .await;
                done.set(true);
            };
            let meanwhile = async {
                let paused = async || (done.get() || node.is_stopped()).then_some(());
                eventually("the agent stands still, or is done", paused).await;
                let stands = node.is_stopped();
                if stands {
                    server.kill9();
                    server.restart().await;
                    node.resume();
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
fn the_agent_is_killed_during_each_call() {
    nbd_story(async |sandbox| {
        let mut rng = Rng::new();
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        for (kind, _) in KINDS {
            let volume = blank(sandbox, &server, kind, kind);
            let attached = || nbds_over(&format!(" {}", volume.handle)).len();
            let content = Content::new(kind);
            for round in 0..3 {
                kill_during_each_call(&node, &mut rng, &volume, attached, |target| {
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

/// A server that sends an export's size in the handshake alone. An agent does not replace
/// connections of an earlier one, and grows nothing over those: the server's clients
/// connect anew once it is restarted.
struct Growing<'a>(&'a Mutex<NbdServer>);

impl GrowSource for Growing<'_> {
    fn grow(&self, volume: &Volume) -> u64 {
        let bytes = 2 * bytes_for(volume.fs_type());
        let image = self.0.try_lock().unwrap().image_of(volume);
        let image = fs::File::options().write(true).open(image).unwrap();
        image.set_len(bytes).unwrap();
        bytes
    }

    async fn refused(&self, status: &Status) {
        assert!(status.message().contains("an earlier agent"), "{status:?}");
        let mut server = self.0.lock().await;
        server.kill9();
        server.restart().await;
    }
}

#[test]
fn the_agent_is_killed_at_each_of_its_steps() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        let attached = |volume: &Volume| nbds_over(&format!(" {}", volume.handle)).len();
        let volumes = kinds_to_crash().into_iter();
        let volumes = volumes.map(|kind| blank(sandbox, &server, kind, kind));
        let volumes = volumes.map(|volume| (server.image_of(&volume), volume));
        let volumes = volumes.collect::<Vec<_>>();
        let server = Mutex::new(server);
        for (image, volume) in &volumes {
            let fresh = || {
                // There is not room for all of them.
                fs::remove_file(image).unwrap();
                NbdServer::image(sandbox, &volume.handle, bytes_for(volume.fs_type()));
                volume.clone()
            };
            let growing = Growing(&server);
            crash_lifecycle_at_each_step(&node, 8, fresh, attached, growing).await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn server_and_agent_are_killed_at_once() {
    nbd_story(async |sandbox| {
        let mut rng = Rng::new();
        let node = Node::start(sandbox).await;
        let mut server = NbdServer::start(sandbox).await;
        // A killed agent whose thread waits for a dead server ends with this wait.
        let volume = blank(sandbox, &server, "v", "ext4").with("deadConnectionTimeout", "3");
        let content = Content::new("v");
        content.put(&volume, &node.up(&volume, "pod").await);
        node.down(&volume, "pod").await;
        for _ in 0..4 {
            let stage = async || node.stage(&volume).await;
            let mut fork = rng.fork();
            kill_server_during(&mut server, &mut rng, async || {
                kill_during(&node, &mut fork, stage).await;
            })
            .await;
            node.restart().await;
            node.retry_until_ok("staged", stage).await;
            node.publish(&volume, "pod").await.unwrap();
            is_there(&content, &volume, &node.target(&volume, "pod"));
            node.unpublish(&volume, "pod").await.unwrap();
            let unstage = async || node.unstage(&volume).await;
            let mut fork = rng.fork();
            kill_server_during(&mut server, &mut rng, async || {
                kill_during(&node, &mut fork, unstage).await;
            })
            .await;
            node.restart().await;
            node.retry_until_ok("unstaged", unstage).await;
        }
        node.assert_clean().await;
    });
}
