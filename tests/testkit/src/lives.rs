//! What volumes of every backend go through: growth, and an agent that is killed.

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

use super::{Agent, Content, Dice, MIB, Node, Volume, can_resize_ext4, eventually, refused};

/// Grows a published volume, which has `small` bytes, to twice of that. `grow` has the
/// source grown to so many bytes, before which the node says `refusal`.
pub async fn grown_in_use(
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
        content.is_at(&target, large - MIB);
    } else {
        let total = node.stats(volume, &target).await.unwrap()[0].total;
        assert!(total.unsigned_abs() > small + small / 2, "{total}");
    }
    content.is_kept(volume, &target);
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

/// How a volume's source becomes larger where that is not for the node to do.
pub trait Grow {
    /// Makes it larger; its new size in bytes.
    fn grow(&self, volume: &Volume) -> u64;

    /// A later agent cannot grow what a dead one attached, and has said what it takes.
    async fn refused(&self, status: &Status) {
        panic!("growth was refused: {status:?}");
    }
}

impl<F: Fn(&Volume) -> u64> Grow for F {
    fn grow(&self, volume: &Volume) -> u64 {
        self(volume)
    }
}

/// What an orchestrator calls for once an agent has died in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// The same again.
    Same,
    /// What undoes it, then the same again.
    Opposite,
}

/// Tells a story once for each step of the agent, which ends at that step as if by
/// SIGKILL. Of `of` steps that follow each other, one is taken; with `EVERY_STEP` set,
/// each.
pub async fn at_each_step(node: &Node, of: usize, mut story: impl AsyncFnMut(&Doomed<'_>)) {
    let of = env::var_os("EVERY_STEP").map_or(of, |_| 1);
    for then in [Then::Same, Then::Opposite] {
        let (begun, mut deaths) = (Instant::now(), 0);
        let mut at = Dice::new().below(of);
        loop {
            node.kill9().await;
            node.start_doomed(at).await;
            let doomed = Doomed {
                node,
                then,
                has_died: Cell::new(false),
            };
            story(&doomed).await;
            if !doomed.has_died.get() {
                break;
            }
            deaths += 1;
            at += of;
        }
        // None at all in a build without debug assertions.
        assert!(at > 20, "the story has more than {at} steps");
        eprintln!(
            "crash matrix: {deaths} deaths, {then:?}, {} s",
            begun.elapsed().as_secs()
        );
    }
}

/// An agent that ends at one of its steps.
pub struct Doomed<'a> {
    node: &'a Node,
    then: Then,
    has_died: Cell<bool>,
}

impl Doomed<'_> {
    /// Makes a call until it succeeds. Where the agent dies of it, it is started again,
    /// and `opposite` made first where that is what the orchestrator calls for.
    pub async fn finished(
        &self,
        what: &str,
        call: impl AsyncFn() -> Result<(), Status>,
        opposite: impl AsyncFn(),
    ) {
        eventually(what, async || {
            if call().await.is_ok() {
                return Some(());
            }
            if self.node.has_ended() {
                assert!(!self.has_died.replace(true), "{what}: it ends once");
                self.node.restart().await;
                if self.then == Then::Opposite {
                    opposite().await;
                }
            }
            None
        })
        .await;
    }

    /// From here on it does not end any more.
    pub async fn outlived(&self) {
        if !self.has_died.get() {
            // It may have died after its last answer.
            self.node.kill9().await;
            self.node.restart().await;
        }
    }
}

/// Takes a volume through its life once for each step of the agent ([`at_each_step`]).
/// `volume` gives a fresh volume for each; `attached`: the devices that it has.
pub async fn killed_at_each_step(
    node: &Node,
    of: usize,
    mut volume: impl FnMut() -> Volume,
    attached: impl Fn(&Volume) -> usize,
    grow: impl Grow,
) {
    at_each_step(node, of, async |doomed| {
        live(node, doomed, &volume(), &attached, &grow).await;
    })
    .await;
}

/// One of those lives.
async fn live(
    node: &Node,
    doomed: &Doomed<'_>,
    volume: &Volume,
    attached: impl Fn(&Volume) -> usize,
    grow: &impl Grow,
) {
    let content = Content::new(&volume.handle);
    let target = node.target(volume, "pod");
    let stage = async || node.stage(volume).await;
    let publish = async || node.publish(volume, "pod").await;
    let unpublish = async || node.unpublish(volume, "pod").await;
    let unstage = async || node.unstage(volume).await;
    let up = async || {
        node.until_ok("staged", stage).await;
        node.until_ok("published", publish).await;
    };
    let down = async || {
        node.until_ok("unpublished", unpublish).await;
        node.until_ok("unstaged", unstage).await;
        assert_eq!(attached(volume), 0);
    };
    doomed.finished("staged", stage, down).await;
    assert_eq!(attached(volume), 1);
    doomed
        .finished("published", publish, async || {
            node.until_ok("unpublished", unpublish).await;
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
        doomed.finished("grown", expand, opposite).await;
    }
    doomed
        .finished("unpublished", unpublish, async || {
            node.until_ok("published", publish).await;
            content.is_kept(volume, &target);
        })
        .await;
    doomed
        .finished("unstaged", unstage, async || {
            up().await;
            content.is_kept(volume, &target);
            node.until_ok("unpublished", unpublish).await;
        })
        .await;
    assert_eq!(attached(volume), 0);
    doomed.outlived().await;
    up().await;
    content.is_kept(volume, &target);
    down().await;
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
