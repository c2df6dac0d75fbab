//! What every story stands on: a private corner of the machine ([`Sandbox`]),
//! the real binaries started in it ([`Agent`]), and callers that behave as
//! kubelet and the sidecars do ([`Node`], [`Controller`]).
//!
//! A story runs on a thread of its own in a mount namespace of its own, so that
//! stories run side by side and nothing they mount is seen outside. Nothing
//! waits for a time: whoever waits, waits for a condition ([`eventually`]).

mod agent;
#[path = "../../ceph/cluster.rs"]
mod ceph;
mod ceph_csi;
mod controller;
mod dice;
mod disk;
mod holder;
mod leaks;
mod nbd;
mod node;
mod rbd;
mod sandbox;
mod stuck;
mod volume;

use std::{env, fmt::Debug, panic::resume_unwind, path::Path, thread, time::Duration};

pub use agent::Agent;
pub use ceph::TestCluster;
pub use ceph_csi::{NOTE, note_of_ceph_csi, publish_as_ceph_csi, unstage_as_ceph_csi};
pub use controller::{
    Controller, ControllerSetup, claim, from_snapshot, from_volume, on_node, provisioned, range,
};
pub use dice::Dice;
pub use disk::{Content, all_loops, can_resize_ext4, hex, loops_over, run, run_err, sha256};
pub use holder::Holder;
pub use leaks::{files_below, mounts_below};
pub use nbd::{NbdServer, kernel_has_nbd, nbds_over};
pub use node::{Node, NodeSetup};
pub use rbd::{
    Ceph, KINDS, ceph_story, lonely_ceph_story, mapping_of, mappings_of, rbds_of, rbds_over,
    spec_of,
};
pub use sandbox::Sandbox;
pub use stuck::StuckFile;
use tonic::{Code, Status};
pub use volume::{Mode, Volume};

pub const MIB: u64 = 1 << 20;

/// No story may take longer, whatever hangs.
const LONGEST: Duration = Duration::from_secs(600);

/// Runs `body` in a [`Sandbox`], on a thread and a runtime of its own.
pub fn story(body: impl AsyncFnOnce(&Sandbox) + Send) {
    let outcome = thread::scope(|scope| {
        let story = scope.spawn(move || {
            // First of all: the runtime's own threads inherit the namespace.
            let sandbox = Sandbox::new();
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime")
                .block_on(async {
                    tokio::time::timeout(LONGEST, body(&sandbox))
                        .await
                        .expect("the story hangs");
                });
        });
        story.join()
    });
    if let Err(panic) = outcome {
        resume_unwind(panic);
    }
}

/// Says that a story is not told because `what` is not here, which fails it where
/// nothing may be left out: in the test kernel.
pub fn left_out(what: &str) {
    eprintln!("**** NOT TESTED: {what}");
    assert!(env::var_os("TEST_ALL").is_none(), "{what}");
}

/// Waits until `check` gives something; panics with `what` if that takes absurdly long.
pub async fn eventually<T>(what: &str, mut check: impl AsyncFnMut() -> Option<T>) -> T {
    let patience = Duration::from_secs(90);
    tokio::time::timeout(patience, async {
        loop {
            if let Some(found) = check().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
    .unwrap_or_else(|_| panic!("waited {patience:?} in vain: {what}"))
}

/// Asserts that `result` is an error of this `code` whose sentence has each of `words`.
#[track_caller]
pub fn refused<T: Debug>(result: Result<T, Status>, code: Code, words: &[&str]) {
    let status = result.expect_err("the call should have been refused");
    assert_eq!(status.code(), code, "{status:?}");
    for word in words {
        assert!(
            status.message().contains(word),
            "{word:?} is not in {:?}",
            status.message()
        );
    }
    assert!(
        status.details().is_empty(),
        "CSI demands empty details: {status:?}"
    );
}

/// Makes a call and kills the agent at some instant of it, or just after.
pub async fn kill_amid<T>(agent: &Agent, dice: &mut Dice, call: impl AsyncFnOnce() -> T) {
    kill_within(Duration::from_millis(25), agent, dice, call).await;
}

/// Makes a volume's calls from stage to unstage, each in two lives of the agent:
/// killed amid the call, it is started again and called until the call succeeds.
/// `attached`: the devices that the volume has.
pub async fn killed_amid_each(
    node: &Node,
    dice: &mut Dice,
    volume: &Volume,
    attached: impl Fn() -> usize,
    in_use: impl FnOnce(&Path),
) {
    let stage = async || node.stage(volume).await;
    kill_amid(node, dice, stage).await;
    node.restart().await;
    node.until_ok("staged", stage).await;
    assert_eq!(attached(), 1);
    let publish = async || node.publish(volume, "pod").await;
    kill_amid(node, dice, publish).await;
    node.restart().await;
    node.until_ok("published", publish).await;
    in_use(&node.target(volume, "pod"));
    let unpublish = async || node.unpublish(volume, "pod").await;
    kill_amid(node, dice, unpublish).await;
    node.restart().await;
    node.until_ok("unpublished", unpublish).await;
    let unstage = async || node.unstage(volume).await;
    kill_amid(node, dice, unstage).await;
    node.restart().await;
    node.until_ok("unstaged", unstage).await;
    assert_eq!(attached(), 0);
}

/// Takes a volume through its life once for each step of the agent, which ends at
/// that step as if by SIGKILL, is started again, and finishes what it is called for.
/// `volume` gives a fresh volume for each; `attached`: the devices that it has.
/// Of `of` steps that follow each other, one is taken.
pub async fn killed_at_each_step(
    node: &Node,
    of: usize,
    mut volume: impl FnMut() -> Volume,
    attached: impl Fn(&Volume) -> usize,
) {
    let mut at = Dice::new().below(of);
    loop {
        let volume = volume();
        let content = Content::new(&volume.handle);
        node.kill9().await;
        node.start_doomed(at).await;
        let mut lives = 1;
        finished(node, &mut lives, "staged", async || {
            node.stage(&volume).await
        })
        .await;
        assert_eq!(attached(&volume), 1);
        finished(node, &mut lives, "published", async || {
            node.publish(&volume, "pod").await
        })
        .await;
        content.put(&volume, &node.target(&volume, "pod"));
        finished(node, &mut lives, "unpublished", async || {
            node.unpublish(&volume, "pod").await
        })
        .await;
        finished(node, &mut lives, "unstaged", async || {
            node.unstage(&volume).await
        })
        .await;
        assert_eq!(attached(&volume), 0);
        if lives == 1 {
            // It may have died after its last answer.
            node.kill9().await;
            node.restart().await;
        }
        let target = node.up(&volume, "pod").await;
        content.is_kept(&volume, &target);
        node.down(&volume, "pod").await;
        if lives == 1 {
            break;
        }
        at += of;
    }
    // None at all in a build without debug assertions.
    assert!(at > 20, "a life has more than {at} steps");
}

/// Makes a call until it succeeds; where it fails, the agent must have died of it.
async fn finished(
    node: &Node,
    lives: &mut u32,
    what: &str,
    call: impl AsyncFn() -> Result<(), Status>,
) {
    if let Err(status) = call().await {
        assert_eq!(*lives, 1, "not {what}: {status:?}");
        node.ended().await;
        *lives += 1;
        node.restart().await;
        node.until_ok(what, call).await;
    }
}

/// As [`kill_amid`], for calls that take so long.
pub async fn kill_within<T>(
    longest: Duration,
    agent: &Agent,
    dice: &mut Dice,
    call: impl AsyncFnOnce() -> T,
) {
    let instants = usize::try_from(longest.as_micros()).expect("not for ever");
    let instant = Duration::from_micros(dice.below(instants) as u64);
    tokio::join!(call(), async {
        tokio::time::sleep(instant).await;
        agent.kill9().await;
    });
}
