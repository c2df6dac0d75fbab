//! The story of a dead thing: what its volumes and the others live through.

use std::{cell::Cell, time::Duration};

use futures_util::future::{join_all, try_join_all};
use tonic::{Code, Status};
use uuid::Uuid;

use super::{Content, Fault, Footprint, Moment, Node, Sandbox, Volume, bytes_for, eventually, run};

/// With the eight that are hurt, 64.
pub const HEALTHY: usize = 56;
/// Of each call to a volume in an hour: kubelet doubles its pauses up to two minutes.
const HOURLY: usize = 40;
/// So many of those at a time, which is how the hour passes in seconds.
const AT_ONCE: usize = 8;
/// Kubelet's two minutes, likewise.
const DEADLINE: Duration = Duration::from_secs(1);

/// What later calls may take beyond the first: lanes that wait for work, connections
/// that are just being closed, and what the allocator keeps.
const ROOM: Footprint = Footprint {
    threads: 16,
    descriptors: 32,
    memory_kib: 16 << 10,
};
/// Within which what ends has ended.
const SETTLED: Duration = Duration::from_secs(60);

/// Blank images in pool `main`. Those for XFS have been formatted: its log takes
/// 64 MiB in each, but of copies nothing is there.
pub fn healthy(sandbox: &Sandbox, kind: &str) -> Vec<Volume> {
    let volumes: Vec<_> = (0..HEALTHY)
        .map(|number| sandbox.volume_in("main", &format!("healthy{number}"), kind, bytes_for(kind)))
        .collect();
    if kind == "xfs" {
        let template = sandbox.image(&volumes[0]).display().to_string();
        run(&["mkfs.xfs", "-q", &template]);
        run(&["fallocate", "--dig-holes", &template]);
        for volume in &volumes[1..] {
            let image = sandbox.image(volume).display().to_string();
            run(&["cp", "--sparse=always", &template, &image]);
        }
    }
    volumes
}

/// A whole life of each of them, at once, with kubelet's own deadlines.
async fn all_live(node: &Node, volumes: &[Volume]) {
    join_all(volumes.iter().map(async |volume| {
        again(node, "staged", async || node.stage(volume).await).await;
        again(node, "published", async || {
            node.publish(volume, "pod").await
        })
        .await;
        let target = node.target(volume, "pod");
        std::fs::write(target.join("file"), &volume.handle).expect("a write");
        let usage = node.stats(volume, &target).await.expect("stats");
        assert!(!usage.is_empty());
        again(node, "unpublished", async || {
            node.unpublish(volume, "pod").await
        })
        .await;
        again(node, "unstaged", async || node.unstage(volume).await).await;
    }))
    .await;
    // One of which there is no record, but whose handle names its pool.
    let handle = format!("vol.shared.main.{}", Uuid::new_v4());
    let unknown = Volume::filesystem(&handle, "ext4");
    node.unstage(&unknown).await.expect("unstaged");
}

/// As kubelet, which comes back after ABORTED: where 56 volumes share one slow
/// processor, the children that other calls begin keep a device busy for longer than
/// the agent waits.
async fn again(node: &Node, what: &str, mut call: impl AsyncFnMut() -> Result<(), Status>) {
    node.until_ok(what, async || match call().await {
        Err(status) if status.code() != Code::Aborted => panic!("{what}: {status:?}"),
        answer => answer,
    })
    .await;
}

/// One of kubelet's calls to a hurt volume.
pub async fn call(node: &Node, volume: &Volume, moment: Moment) -> Result<(), Status> {
    let target = node.target(volume, "pod");
    match moment {
        Moment::Probe | Moment::Mount => node.within(DEADLINE, node.stage(volume)).await,
        Moment::Publish => {
            let publish = node.publish_again(volume, "pod");
            node.within(DEADLINE, publish).await
        }
        Moment::Unpublish => node.within(DEADLINE, node.unpublish(volume, "pod")).await,
        Moment::Use => {
            let usage = node.stats(volume, &target).await;
            usage.expect("stats wait for no device");
            let health = node.health(volume, &target).await;
            health.expect("health waits for no device");
            // As after a restart of kubelet.
            node.within(DEADLINE, node.stage(volume)).await?;
            node.within(DEADLINE, node.publish(volume, "pod")).await
        }
        Moment::Unmount => {
            node.within(DEADLINE, node.unpublish(volume, "pod")).await?;
            node.within(DEADLINE, node.unstage(volume)).await
        }
        Moment::Growth => {
            let bytes = 2 * bytes_for(volume.fs_type());
            let growth = node.expand(volume, &target, bytes);
            node.within(DEADLINE, growth).await.map(drop)
        }
    }
}

/// So many calls to each volume of the fault, none of which may be told anything final
/// while it is dead.
async fn calls(node: &Node, fault: &impl Fault, moment: Moment, many: usize) {
    let one = async |volume: &Volume| {
        let Err(status) = call(node, volume, moment).await else {
            assert_eq!(moment, Moment::Use, "its device does not answer");
            return Ok(());
        };
        let uncertain = [
            Code::Aborted,
            Code::Unavailable,
            Code::DeadlineExceeded,
            // The caller's own end of its waiting.
            Code::Cancelled,
        ];
        let is_so = uncertain.contains(&status.code());
        is_so.then_some(()).ok_or(status)
    };
    for _ in 0..many.div_ceil(AT_ONCE) {
        let volumes = fault.hurt().iter();
        let at_once = volumes.flat_map(|volume| (0..AT_ONCE).map(move |_| volume));
        let answers = try_join_all(at_once.map(one)).await;
        answers.expect("an answer that is not final");
    }
}

/// The story of a fault, told of a node that is up. However it ends, the fault does
/// first: the node's agent is waited for, which hangs with what it has on its devices.
pub async fn hurts_its_own_volumes_alone(
    node: &Node,
    mut fault: impl Fault,
    others: &[Volume],
    moment: Moment,
) {
    let hurt = fault.hurt().to_vec();
    // All live, and are formatted where they were blank.
    let kept = Content::new("kept");
    tokio::join!(
        all_live(node, others),
        join_all(hurt.iter().map(async |volume| {
            let target = node.up(volume, "pod").await;
            kept.write(&target.join("kept"));
            match moment {
                Moment::Probe | Moment::Mount => node.down(volume, "pod").await,
                Moment::Publish => node.unpublish(volume, "pod").await.expect("unpublished"),
                _ => {}
            }
        }))
    );
    for volume in &hurt {
        if moment == Moment::Growth {
            fault.grow(volume, 2 * bytes_for(volume.fs_type()));
        }
        if moment == Moment::Unmount {
            // Which is written when it is unmounted.
            std::fs::write(node.target(volume, "pod").join("late"), "late").expect("a write");
        }
    }
    fault.stop(moment).await;

    calls(node, &fault, moment, AT_ONCE).await;
    fault.meanwhile(moment).await;
    tokio::join!(calls(node, &fault, moment, AT_ONCE), all_live(node, others));
    let first = Footprint::of(node.pid());
    tokio::join!(
        calls(node, &fault, moment, HOURLY - 2 * AT_ONCE),
        all_live(node, others)
    );
    let last = Cell::new(first);
    let is_within = async || {
        last.set(Footprint::of(node.pid()));
        last.get().is_within(&first, &ROOM).then_some(())
    };
    tokio::time::timeout(SETTLED, eventually("it settles", is_within))
        .await
        .unwrap_or_else(|_| panic!("an hour's calls took {first:?} to {:?}", last.get()));
    println!("{moment:?}: {first:?} to {:?}", last.get());
    assert_eq!(node.probe().await, Some(true));

    fault.resume().await;
    join_all(hurt.iter().map(async |volume| {
        node.until_ok("what it waited for", async || {
            call(node, volume, moment).await
        })
        .await;
        node.until_ok("staged", async || node.stage(volume).await)
            .await;
        node.until_ok("published", async || node.publish(volume, "last").await)
            .await;
        kept.is_in(&node.target(volume, "last").join("kept"));
        node.until_down(volume, &["pod", "last"]).await;
    }))
    .await;
    node.assert_clean().await;
}
