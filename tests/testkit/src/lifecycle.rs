//! The life of a volume of any backend: growth, and an agent that is killed or crashes.

use std::{
    cell::Cell,
    env,
    path::Path,
    time::{Duration, Instant},
};

use tonic::{
    Code::{FailedPrecondition, Unavailable},
    Status,
};

use super::{Agent, Content, KINDS, MIB, Node, Rng, Volume, can_resize_ext4, eventually, refused};

/// Grows a published volume, which has `small` bytes, to twice of that. `grow` has the
/// source grown to so many bytes, before which the node says `refusal`.
pub async fn grow_published(
    node: &Node,
    volume: &Volume,
    small: u64,
    refusal: &str,
    grow: impl FnOnce(u64),
) {
    let target = node.target(volume, "pod");
    let content = Content::new(&volume.handle);
    content.put(volume, &target);
    let large = 2 * small;
    refused(
        node.expand(volume, &target, large).await,
        Unavailable,
        &[refusal],
    );
    grow(large);
    for _ in 0..2 {
        let size = node.expand(volume, &target, large).await.unwrap();
        assert_eq!(size.unsigned_abs(), large);
    }
    if volume.is_block() {
        content.write_at(&target, large - MIB).unwrap();
        content.assert_at(&target, large - MIB);
    } else {
        let total = node.stats(volume, &target).await.unwrap()[0].total;
        assert!(total.unsigned_abs() > small + small / 2, "{total}");
    }
    content.assert_kept(volume, &target);
}

/// Makes a call and kills the agent at a random instant of it, or just after.
pub async fn kill_during<T>(agent: &Agent, rng: &mut Rng, call: impl AsyncFnOnce() -> T) {
    kill_within(Duration::from_millis(25), agent, rng, call).await;
}

/// Makes a volume's calls from stage to unstage, each in two lives of the agent:
/// killed amid the call, it is started again and called until the call succeeds.
/// `attached`: the volume's devices.
pub async fn kill_during_each_call(
    node: &Node,
    rng: &mut Rng,
    volume: &Volume,
    attached: impl Fn() -> usize,
    in_use: impl FnOnce(&Path),
) {
    let stage = async || node.stage(volume).await;
    kill_during(node, rng, stage).await;
    node.restart().await;
    node.retry_until_ok("staged", stage).await;
    assert_eq!(attached(), 1);
    let publish = async || node.publish(volume, "pod").await;
    kill_during(node, rng, publish).await;
    node.restart().await;
    node.retry_until_ok("published", publish).await;
    in_use(&node.target(volume, "pod"));
    let unpublish = async || node.unpublish(volume, "pod").await;
    kill_during(node, rng, unpublish).await;
    node.restart().await;
    node.retry_until_ok("unpublished", unpublish).await;
    let unstage = async || node.unstage(volume).await;
    kill_during(node, rng, unstage).await;
    node.restart().await;
    node.retry_until_ok("unstaged", unstage).await;
    assert_eq!(attached(), 0);
}

/// Grows a volume's source, where the node does not.
pub trait GrowSource {
    /// Makes it larger; its new size in bytes.
    fn grow(&self, volume: &Volume) -> u64;

    /// A later agent cannot grow a device that a dead one attached; its error names the
    /// remedy.
    async fn refused(&self, status: &Status) {
        panic!("growth was refused: {status:?}");
    }
}

impl<F: Fn(&Volume) -> u64> GrowSource for F {
    fn grow(&self, volume: &Volume) -> u64 {
        self(volume)
    }
}

/// The orchestrator's next call after an agent died in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Recovery {
    /// The same call.
    Retry,
    /// The opposite call, then the same again.
    UndoAndRetry,
}

/// The kinds of volumes in a crash story: a file system at random, and raw; with `EVERY_STEP`
/// set all, or the one that it names.
pub fn kinds_to_crash() -> Vec<&'static str> {
    let all = KINDS.map(|(kind, _)| kind);
    let Ok(named) = env::var("EVERY_STEP") else {
        return vec![all[Rng::new().below(3)], "block"];
    };
    match all.iter().find(|kind| **kind == named) {
        Some(kind) => vec![kind],
        None => all.to_vec(),
    }
}

/// The same without raw ones.
pub fn file_systems_to_crash() -> Vec<&'static str> {
    let mut kinds = kinds_to_crash();
    kinds.retain(|kind| *kind != "block");
    kinds
}

/// Runs a story with an agent that ends at one of its steps as if by SIGKILL: once for
/// every `of`-th step, or with `EVERY_STEP` set for each.
pub async fn crash_at_each_step(
    node: &Node,
    of: usize,
    mut story: impl AsyncFnMut(&CrashingAgent<'_>),
) {
    let of = env::var_os("EVERY_STEP").map_or(of, |_| 1);
    for recovery in [Recovery::Retry, Recovery::UndoAndRetry] {
        let (begun, mut crashes) = (Instant::now(), 0);
        let mut at = Rng::new().below(of);
        loop {
            node.kill9().await;
            node.start_crashing_at(at).await;
            let crashing = CrashingAgent {
                node,
                recovery,
                has_crashed: Cell::new(false),
            };
            story(&crashing).await;
            if !crashing.has_crashed.get() {
                break;
            }
            crashes += 1;
            at += of;
        }
        // None at all in a build without debug assertions.
        assert!(at > 20, "the story has more than {at} steps");
        eprintln!(
            "crash matrix: {crashes} crashes, {recovery:?}, {} s",
            begun.elapsed().as_secs()
        );
    }
}

/// An agent that ends at one of its steps.
pub struct CrashingAgent<'a> {
    node: &'a Node,
    recovery: Recovery,
    has_crashed: Cell<bool>,
}

impl CrashingAgent<'_> {
    /// Makes a call until it succeeds. If the agent dies of it, it is started again, and
    /// `opposite` made first if the orchestrator would call that.
    pub async fn complete(
        &self,
        what: &str,
        call: impl AsyncFn() -> Result<(), Status>,
        opposite: impl AsyncFn(),
    ) {
        eventually(what, async || {
            if call().await.is_ok() {
                return Some(());
            }
            if self.node.has_exited() {
                assert!(!self.has_crashed.replace(true), "{what}: it ends once");
                self.node.restart().await;
                if self.recovery == Recovery::UndoAndRetry {
                    opposite().await;
                }
            }
            None
        })
        .await;
    }

    /// From here on the agent runs on.
    pub async fn stop_crashing(&self) {
        if !self.has_crashed.get() {
            // It may have died after its last answer.
            self.node.kill9().await;
            self.node.restart().await;
        }
    }
}

/// Takes a volume through its life once for each step of the agent ([`crash_at_each_step`]).
/// `volume` gives a fresh volume for each; `attached`: the devices that it has.
pub async fn crash_lifecycle_at_each_step(
    node: &Node,
    of: usize,
    mut volume: impl FnMut() -> Volume,
    attached: impl Fn(&Volume) -> usize,
    grow: impl GrowSource,
) {
    crash_at_each_step(node, of, async |crashing| {
        lifecycle(node, crashing, &volume(), &attached, &grow).await;
    })
    .await;
}

/// One life of a volume.
async fn lifecycle(
    node: &Node,
    crashing: &CrashingAgent<'_>,
    volume: &Volume,
    attached: impl Fn(&Volume) -> usize,
    grow: &impl GrowSource,
) {
    let content = Content::new(&volume.handle);
    let target = node.target(volume, "pod");
    let stage = async || node.stage(volume).await;
    let publish = async || node.publish(volume, "pod").await;
    let unpublish = async || node.unpublish(volume, "pod").await;
    let unstage = async || node.unstage(volume).await;
    let up = async || {
        node.retry_until_ok("staged", stage).await;
        node.retry_until_ok("published", publish).await;
    };
    let down = async || {
        node.retry_until_ok("unpublished", unpublish).await;
        node.retry_until_ok("unstaged", unstage).await;
        assert_eq!(attached(volume), 0);
    };
    crashing.complete("staged", stage, down).await;
    assert_eq!(attached(volume), 1);
    crashing
        .complete("published", publish, async || {
            node.retry_until_ok("unpublished", unpublish).await;
        })
        .await;
    content.put(volume, &target);
    if volume.fs_type() != "ext4" || can_resize_ext4() {
        let bytes = grow.grow(volume);
        let was_refused = Cell::new(false);
        let expand = async || {
            let grown = node.expand(volume, &target, bytes).await;
            if let Err(status) = &grown
                && status.code() == FailedPrecondition
                && !was_refused.replace(true)
            {
                grow.refused(status).await;
            }
            assert_eq!(grown?.unsigned_abs(), bytes);
            Ok(())
        };
        let opposite = async || {
            down().await;
            up().await;
        };
        crashing.complete("grown", expand, opposite).await;
    }
    crashing
        .complete("unpublished", unpublish, async || {
            node.retry_until_ok("published", publish).await;
            content.assert_kept(volume, &target);
        })
        .await;
    crashing
        .complete("unstaged", unstage, async || {
            up().await;
            content.assert_kept(volume, &target);
            node.retry_until_ok("unpublished", unpublish).await;
        })
        .await;
    assert_eq!(attached(volume), 0);
    crashing.stop_crashing().await;
    up().await;
    content.assert_kept(volume, &target);
    down().await;
}

/// As [`kill_during`], at an instant within `longest`.
pub async fn kill_within<T>(
    longest: Duration,
    agent: &Agent,
    rng: &mut Rng,
    call: impl AsyncFnOnce() -> T,
) {
    let instants = usize::try_from(longest.as_micros()).expect("not for ever");
    let instant = Duration::from_micros(rng.below(instants) as u64);
    tokio::join!(call(), async {
        tokio::time::sleep(instant).await;
        agent.kill9().await;
    });
}
