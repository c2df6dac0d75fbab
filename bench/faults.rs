//! What the others wait for while eight volumes hang, beside the same without the
//! fault: the rounds alternate, and in both the eight are called just as often.

use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, future::join_all, stream};

use crate::{
    harness::{Fault as _, HungFiles, Moment, Node, Volume},
    rig::Rig,
};

const OTHERS: usize = 56;
/// Of the others, so many live at once.
const AT_ONCE: usize = 8;
/// A volume that hangs is asked for so often.
const PAUSE: Duration = Duration::from_millis(100);
const CALLS: [&str; 6] = [
    "stage",
    "publish",
    "stats",
    "unpublish",
    "unstage",
    "whole life",
];

/// How long each call of each life took.
#[derive(Default)]
struct Times([Vec<Duration>; CALLS.len()]);

/// Prints the table.
pub fn others(rig: &Rig) {
    let quick = std::env::args().any(|arg| arg == "--quick");
    let rounds = if quick { 5 } else { 40 };
    let mut fault = HungFiles::new(&rig.sandbox, "ext4");
    let others: Vec<_> = (0..OTHERS)
        .map(|number| rig.sandbox.volume(&format!("other-{number}"), "ext4"))
        .collect();
    let node = &rig.node;
    let mut without = Times::default();
    let mut with = Times::default();
    rig.runtime.block_on(async {
        let hurt = fault.hurt().to_vec();
        // All are formatted.
        live(node, &others, &mut Times::default()).await;
        for _ in 0..rounds {
            staged(node, &hurt).await;
            beside(node, &hurt, live(node, &others, &mut without)).await;
            join_all(hurt.iter().map(|volume| node.unstage(volume))).await;
            fault.stop(Moment::Probe).await;
            beside(node, &hurt, live(node, &others, &mut with)).await;
            fault.resume().await;
            staged(node, &hurt).await;
        }
        join_all(hurt.iter().map(|volume| node.unstage(volume))).await;
    });
    println!("\n| {OTHERS} volumes while 8 hang | p50 | without | ratio | p99 | without | ratio |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: |");
    for (call, (with, without)) in CALLS.iter().zip(with.0.iter().zip(&without.0)) {
        print!("| {call}");
        for percent in [50, 99] {
            let [with, without] = [with, without].map(|times| percentile(times, percent));
            let ratio = with.as_secs_f64() / without.as_secs_f64();
            print!(" | {with:.1?} | {without:.1?} | {ratio:.2}");
        }
        println!(" |");
    }
}

async fn staged(node: &Node, volumes: &[Volume]) {
    join_all(
        volumes
            .iter()
            .map(|volume| node.until_ok("staged", async || node.stage(volume).await)),
    )
    .await;
}

/// Does `work` while the volumes are asked for again and again.
async fn beside(node: &Node, volumes: &[Volume], work: impl Future<Output = ()>) {
    let asked = volumes.iter().map(async |volume| {
        loop {
            let _ = node
                .within(Duration::from_secs(1), node.stage(volume))
                .await;
            tokio::time::sleep(PAUSE).await;
        }
    });
    tokio::select! {
        () = work => (),
        _ = join_all(asked) => unreachable!("they are asked without end"),
    }
}

async fn live(node: &Node, volumes: &[Volume], times: &mut Times) {
    let lives: Vec<_> = stream::iter(volumes)
        .map(|volume| life(node, volume))
        .buffer_unordered(AT_ONCE)
        .collect()
        .await;
    for life in lives {
        let all = life.iter().sum();
        for (of_call, took) in times.0.iter_mut().zip(life.into_iter().chain([all])) {
            of_call.push(took);
        }
    }
}

async fn life(node: &Node, volume: &Volume) -> [Duration; CALLS.len() - 1] {
    let target = node.target(volume, "pod");
    let mut last = Instant::now();
    let mut took = || {
        let begun = std::mem::replace(&mut last, Instant::now());
        last - begun
    };
    node.stage(volume).await.expect("staged");
    let stage = took();
    node.publish(volume, "pod").await.expect("published");
    let publish = took();
    node.stats(volume, &target).await.expect("stats");
    let stats = took();
    node.unpublish(volume, "pod").await.expect("unpublished");
    let unpublish = took();
    node.unstage(volume).await.expect("unstaged");
    [stage, publish, stats, unpublish, took()]
}

fn percentile(times: &[Duration], percent: usize) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort();
    sorted[(sorted.len() - 1) * percent / 100]
}
