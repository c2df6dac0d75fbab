//! The story of a device, pool or server that fails: the calls to its volumes, and the
//! life of all others meanwhile.

use std::{cell::Cell, time::Duration};

use futures_util::future::{join_all, try_join_all};
use tonic::{Code, Status};
use uuid::Uuid;

use super::{
    Content, Fault, Node, Phase, ResourceUsage, Sandbox, StepHold, Volume, bytes_for, eventually,
    leave_unwritten, run,
};

/// With the eight that are affected, 64.
pub const HEALTHY: usize = 56;
/// Calls of one kind to a volume in an hour: kubelet doubles its pauses up to two minutes.
const CALLS_PER_HOUR: usize = 40;
/// Calls made at once, so that an hour of them takes seconds.
const CONCURRENT: usize = 8;
/// In place of kubelet's two minutes.
const DEADLINE: Duration = Duration::from_secs(1);

/// The allowance of later calls beyond the first: lanes that wait for work, connections
/// that are being closed, and memory that the allocator keeps.
const MARGIN: ResourceUsage = ResourceUsage {
    threads: 16,
    descriptors: 32,
    memory_kib: 16 << 10,
};
/// Within which threads and connections that end have ended.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(60);

/// Blank images in pool `main`. Those for XFS have been formatted: its log takes
/// 64 MiB in each, but of copies nothing is there.
pub fn healthy_volumes(sandbox: &Sandbox, kind: &str) -> Vec<Volume> {
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

/// The whole life of each volume, all at once, with kubelet's own deadlines.
async fn run_lifecycles(node: &Node, volumes: &[Volume]) {
    join_all(volumes.iter().map(async |volume| {
        retry_while_aborted(node, "staged", async || node.stage(volume).await).await;
        retry_while_aborted(node, "published", async || {
            node.publish(volume, "pod").await
        })
        .await;
        let target = node.target(volume, "pod");
        std::fs::write(target.join("file"), &volume.handle).expect("a write");
        // On one slow processor an NFS server may take longer than the agent waits for it.
        node.retry_until_ok("stats", async || {
            let usage = node.stats(volume, &target).await?;
            assert!(!usage.is_empty());
            Ok(())
        })
        .await;
        retry_while_aborted(node, "unpublished", async || {
            node.unpublish(volume, "pod").await
        })
        .await;
        retry_while_aborted(node, "unstaged", async || node.unstage(volume).await).await;
    }))
    .await;
    // One of which there is no record, but whose handle names its pool.
    let handle = format!("vol.shared.main.{}", Uuid::new_v4());
    let unknown = Volume::filesystem(&handle, "ext4");
    node.unstage(&unknown).await.expect("unstaged");
}

/// As kubelet, which retries after ABORTED: where 56 volumes share one slow processor, the
/// children that other calls begin keep a device busy for longer than the agent waits.
async fn retry_while_aborted(
    node: &Node,
    what: &str,
    mut call: impl AsyncFnMut() -> Result<(), Status>,
) {
    node.retry_until_ok(what, async || match call().await {
        Err(status) if status.code() != Code::Aborted => panic!("{what}: {status:?}"),
        answer => answer,
    })
    .await;
}

/// One of kubelet's calls to an affected volume.
pub async fn call_in_phase(node: &Node, volume: &Volume, phase: Phase) -> Result<(), Status> {
    let target = node.target(volume, "pod");
    match phase {
        Phase::Probe | Phase::Mount => node.with_timeout(DEADLINE, node.stage(volume)).await,
        Phase::Stage => {
            let stage = node.send_stage(node.stage_request(volume));
            node.with_timeout(DEADLINE, stage).await
        }
        Phase::Publish => {
            let publish = node.publish_again(volume, "pod");
            node.with_timeout(DEADLINE, publish).await
        }
        Phase::Unpublish => {
            node.with_timeout(DEADLINE, node.unpublish(volume, "pod"))
                .await
        }
        Phase::Use => {
            let usage = node.stats(volume, &target).await;
            usage.expect("stats wait for no device");
            let health = node.health(volume, &target).await;
            health.expect("health waits for no device");
            // As after a restart of kubelet.
            node.with_timeout(DEADLINE, node.stage(volume)).await?;
            node.with_timeout(DEADLINE, node.publish(volume, "pod"))
                .await
        }
        Phase::Unmount => {
            node.with_timeout(DEADLINE, node.unpublish(volume, "pod"))
                .await?;
            node.with_timeout(DEADLINE, node.unstage(volume)).await
        }
        Phase::Growth => grow_in_phase(node, volume, 2 * bytes_for(volume.fs_type())).await,
    }
}

/// The same of a volume whose source has grown to so many bytes.
pub async fn grow_in_phase(node: &Node, volume: &Volume, bytes: u64) -> Result<(), Status> {
    let target = node.target(volume, "pod");
    let growth = node.expand(volume, &target, bytes);
    node.with_timeout(DEADLINE, growth).await.map(drop)
}

/// Makes `many` calls to each affected volume. While the fault lasts none may get a final
/// answer.
async fn calls(node: &Node, fault: &impl Fault, phase: Phase, many: usize) {
    let one = async |volume: &Volume| {
        let Err(status) = call_in_phase(node, volume, phase).await else {
            assert!(fault.may_succeed(phase), "its device does not answer");
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
    for _ in 0..many.div_ceil(CONCURRENT) {
        let volumes = fault.affected().iter();
        let at_once = volumes.flat_map(|volume| (0..CONCURRENT).map(move |_| volume));
        let answers = try_join_all(at_once.map(one)).await;
        answers.expect("an answer that is not final");
    }
}

/// Calls for volumes until each is attached and probed, and waits before its mount.
async fn hold_at_the_mount(node: &Node, volumes: &[Volume]) -> Vec<StepHold> {
    let holds = volumes.iter().map(|of| node.hold("mount", &of.handle));
    let held = holds.collect();
    join_all(volumes.iter().map(async |volume| {
        eventually("it is about to be mounted", async || {
            let staged = call_in_phase(node, volume, Phase::Mount).await;
            let status = staged.expect_err("its mount is held up");
            status.message().contains("in step mount").then_some(())
        })
        .await;
    }))
    .await;
    held
}

/// Asserts that a fault affects its own volumes alone, on a node that is up. However this
/// ends, the fault ends first: the node's agent cannot end while its devices hang.
pub async fn assert_fault_isolated(
    node: &Node,
    mut fault: impl Fault,
    others: &[Volume],
    phase: Phase,
) {
    let affected = fault.affected().to_vec();
    // All live, and are formatted where they were blank.
    let kept = Content::new("kept");
    tokio::join!(
        run_lifecycles(node, others),
        join_all(affected.iter().map(async |volume| {
            let target = node.up(volume, "pod").await;
            kept.write(&target.join("kept"));
            // Of a server that dies, the last ones are the answer.
            node.stats(volume, &target).await.expect("stats");
            match phase {
                Phase::Stage | Phase::Probe | Phase::Mount => node.down(volume, "pod").await,
                Phase::Publish => node.unpublish(volume, "pod").await.expect("unpublished"),
                _ => {}
            }
        }))
    );
    for volume in &affected {
        if phase == Phase::Growth {
            fault.grow(volume, 2 * bytes_for(volume.fs_type()));
        }
        if phase == Phase::Unmount {
            // Which is written when it is unmounted.
            leave_unwritten(&node.target(volume, "pod").join("late"));
        }
    }
    if phase == Phase::Mount && fault.stops_at_the_mount() {
        let held = hold_at_the_mount(node, &affected).await;
        fault.stop(phase).await;
        drop(held);
    } else {
        fault.stop(phase).await;
    }

    calls(node, &fault, phase, CONCURRENT).await;
    fault.while_calls_hang(phase).await;
    tokio::join!(
        calls(node, &fault, phase, CONCURRENT),
        run_lifecycles(node, others)
    );
    let first = ResourceUsage::of(node.pid());
    tokio::join!(
        calls(node, &fault, phase, CALLS_PER_HOUR - 2 * CONCURRENT),
        run_lifecycles(node, others)
    );
    let last = Cell::new(first);
    let is_within = async || {
        last.set(ResourceUsage::of(node.pid()));
        last.get().is_within(&first, &MARGIN).then_some(())
    };
    tokio::time::timeout(SETTLE_TIMEOUT, eventually("it settles", is_within))
        .await
        .unwrap_or_else(|_| panic!("an hour's calls took {first:?} to {:?}", last.get()));
    println!("{phase:?}: {first:?} to {:?}", last.get());
    assert_eq!(node.probe().await, Some(true));

    fault.resume().await;
    join_all(affected.iter().map(async |volume| {
        node.retry_until_ok("the step that it waited for", async || {
            call_in_phase(node, volume, phase).await
        })
        .await;
        node.retry_until_ok("staged", async || node.stage(volume).await)
            .await;
        node.retry_until_ok("published", async || node.publish(volume, "last").await)
            .await;
        kept.assert_in(&node.target(volume, "last").join("kept"));
        node.retry_until_down(volume, &["pod", "last"]).await;
    }))
    .await;
    node.assert_clean().await;
}
