//! The rounds with a fault, and without: they alternate, and in both the eight volumes are
//! called for again and again while the others live.

use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, future::join_all, stream};
use testkit::{
    Fault, HEALTHY, MIB, Node, Phase, Sandbox, Volume, bytes_for, call_in_phase, grow_in_phase,
    healthy_volumes,
};
use tonic::Status;

use super::is_quick;

/// p99 of a whole life beside the fault, in those without it, is at most this.
const LIMIT: f64 = 1.2;
/// Of the others, so many live at once.
const AT_ONCE: usize = 8;
/// A volume that hangs is asked for so often.
const PAUSE: Duration = Duration::from_millis(100);
/// A source grows by so much in each round.
const GROWTH: u64 = 16 * MIB;
const CALLS: [&str; 6] = [
    "stage",
    "publish",
    "stats",
    "unpublish",
    "unstage",
    "whole life",
];
pub const KIND: &str = "ext4";

/// How long each call of each life took.
#[derive(Default)]
struct Times([Vec<Duration>; CALLS.len()]);

/// Prints the table; whether [`LIMIT`] was kept. `make bench UPDATE=1` copies of it.
pub async fn others(
    sandbox: &Sandbox,
    node: &Node,
    mut fault: impl Fault,
    name: &str,
    phase: Phase,
) -> bool {
    let rounds = if is_quick() { 2 } else { 40 };
    let mut hurt = Hurt {
        node,
        volumes: fault.affected().to_vec(),
        phase,
        grown: 0,
    };
    let others = healthy_volumes(sandbox, KIND);
    // All are formatted.
    live(node, &others, &mut Times::default()).await;
    let [mut without, mut with] = [(); 2].map(|()| Times::default());
    for _ in 0..rounds {
        for (hangs, times) in [(false, &mut without), (true, &mut with)] {
            hurt.grown += GROWTH;
            hurt.up(&fault).await;
            if hangs {
                fault.stop(phase).await;
            }
            join_all(hurt.volumes.iter().map(|volume| hurt.call(volume))).await;
            if hangs {
                fault.while_calls_hang(phase).await;
            }
            hurt.beside(live(node, &others, times)).await;
            if hangs {
                fault.resume().await;
            }
            hurt.down().await;
        }
    }
    let phase = format!("{phase:?}").to_lowercase();
    let many = hurt.volumes.len();
    println!(
        "\n| {HEALTHY} volumes while {many} hang {name}, {phase} | p50 | without | ratio | p99 | without | ratio |"
    );
    println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: |");
    let mut ratio = 0.0;
    for (call, (with, without)) in CALLS.iter().zip(with.0.iter().zip(&without.0)) {
        print!("| {call}");
        for percent in [50, 99] {
            let [with, without] = [with, without].map(|times| percentile(times, percent));
            // The last is that of whole lives.
            ratio = with.as_secs_f64() / without.as_secs_f64();
            print!(" | {with:.1?} | {without:.1?} | {ratio:.2}");
        }
        println!(" |");
    }
    if ratio > LIMIT {
        println!("p99 of a whole life is more than {LIMIT} times what it is without the fault");
    }
    ratio <= LIMIT
}

/// The volumes that hang, and the phase of their lives in which they do.
struct Hurt<'a> {
    node: &'a Node,
    volumes: Vec<Volume>,
    phase: Phase,
    /// By so many bytes their sources have grown.
    grown: u64,
}

impl Hurt<'_> {
    fn bytes(&self, volume: &Volume) -> u64 {
        bytes_for(volume.fs_type()) + self.grown
    }

    /// Brings them to the phase.
    async fn up(&self, fault: &impl Fault) {
        let node = self.node;
        join_all(self.volumes.iter().map(async |volume| {
            let target = node.up(volume, "pod").await;
            match self.phase {
                Phase::Stage | Phase::Probe | Phase::Mount => node.down(volume, "pod").await,
                Phase::Publish => node.unpublish(volume, "pod").await.expect("unpublished"),
                // Of a server that dies, the last ones are the answer.
                Phase::Use => drop(node.stats(volume, &target).await.expect("stats")),
                // Which is written when it is unmounted.
                Phase::Unmount => std::fs::write(target.join("late"), "late").expect("a write"),
                Phase::Growth => fault.grow(volume, self.bytes(volume)),
                Phase::Unpublish => {}
            }
        }))
        .await;
    }

    /// The call that hangs.
    async fn call(&self, volume: &Volume) -> Result<(), Status> {
        match self.phase {
            Phase::Growth => grow_in_phase(self.node, volume, self.bytes(volume)).await,
            phase => call_in_phase(self.node, volume, phase).await,
        }
    }

    /// Does `work` while they are called for again and again.
    async fn beside(&self, work: impl Future<Output = ()>) {
        let calls = self.volumes.iter().map(async |volume| {
            loop {
                let _ = self.call(volume).await;
                tokio::time::sleep(PAUSE).await;
            }
        });
        tokio::select! {
            () = work => (),
            _ = join_all(calls) => unreachable!("they are asked without end"),
        }
    }

    /// Ends their lives.
    async fn down(&self) {
        let node = self.node;
        join_all(self.volumes.iter().map(async |volume| {
            node.retry_until_ok("what it waited for", async || self.call(volume).await)
                .await;
            node.retry_until_ok("unpublished", async || node.unpublish(volume, "pod").await)
                .await;
            node.retry_until_ok("unstaged", async || node.unstage(volume).await)
                .await;
        }))
        .await;
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
