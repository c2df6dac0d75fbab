//! What volumes of every backend go through: growth, and an agent that is killed.

use std::{env, path::Path, time::Duration};

use tonic::{Code::Unavailable, Status};

use super::{Agent, Content, Dice, MIB, Node, Volume, eventually, refused};

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

/// Takes a volume through its life once for each step of the agent, which ends at
/// that step as if by SIGKILL, is started again, and finishes what it is called for.
/// `volume` gives a fresh volume for each; `attached`: the devices that it has.
/// Of `of` steps that follow each other, one is taken; with `EVERY_STEP` set, each.
pub async fn killed_at_each_step(
    node: &Node,
    of: usize,
    mut volume: impl FnMut() -> Volume,
    attached: impl Fn(&Volume) -> usize,
) {
    let of = env::var_os("EVERY_STEP").map_or(of, |_| 1);
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
    eventually(what, async || {
        if call().await.is_ok() {
            return Some(());
        }
        if node.has_ended() {
            *lives += 1;
            assert_eq!(*lives, 2, "{what}: it ends once");
            node.restart().await;
        }
        None
    })
    .await;
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
