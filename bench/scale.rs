//! One node without volumes, with few and with many: each call, and staging them all beside
//! the bare system calls; the agent's restart; and what each volume takes of the agent's memory,
//! threads and descriptors.
//!
//! The volumes are copies of a formatted one. [`AT_ONCE`] callers work through them,
//! as kubelet does after a reboot; each call has a connection of its own. Staging them all is
//! timed the second time, when the kernel has made the devices, and while udevd is paused: on
//! one CPU its probes would take longer than the stages themselves.

use std::{
    fs, iter,
    path::Path,
    sync::Mutex,
    time::{Duration, Instant},
};

use futures_util::{StreamExt as _, stream};
use testkit::{BareContent, BareVolume, MIB, ResourceUsage, Volume, resident_kib};

use crate::{
    backends::Backend,
    life::on_threads,
    rig::{PausedUdevd, Rig, median},
};

/// Callers at once.
const AT_ONCE: usize = 16;

/// Of the agent, beside each number of volumes.
const RESTARTS: usize = 5;

const FIRST_ANSWER: &str = "restart: first answer";

/// Bytes of a volume, with a journal of one MiB: the test kernel has all of 200, and of their
/// bare twins, in memory.
const SIZE: u64 = 16 * MIB;

/// Prints a table, a column for each number of volumes, and for none.
pub fn volumes(rig: &Rig, over: &dyn Backend, numbers: &[usize]) {
    rig.runtime.block_on(async {
        over.blank("scale", SIZE);
        let template = over.known("scale", "ext4");
        rig.node.stage(&template).await.expect("staged");
        rig.node.unstage(&template).await.expect("unstaged");
    });
    let mut columns = vec![(0, rig.runtime.block_on(node_without(rig)))];
    for number in numbers {
        let values = rig.runtime.block_on(node_with(rig, over, *number));
        columns.push((*number, values));
    }
    print!("\n| {} |", over.title("a node with so many volumes"));
    for (number, _) in &columns {
        print!(" {number} |");
    }
    print!("\n| --- |");
    println!("{}", " ---: |".repeat(columns.len()));
    let (_, all) = columns.last().expect("a column");
    for (name, _) in all {
        print!("| {name} |");
        for (_, rows) in &columns {
            match rows.iter().find(|(row, _)| row == name) {
                Some((_, value)) => print!(" {value} |"),
                None => print!(" |"),
            }
        }
        println!();
    }
}

type Rows = Vec<(&'static str, String)>;

/// The rows that take no volume, of an agent that has had none.
async fn node_without(rig: &Rig) -> Rows {
    let (answers, _) = restarts(rig, &[]).await;
    let mut rows = vec![(FIRST_ANSWER, format!("{answers:.1?}"))];
    rows.extend(resources(rig.node.pid()));
    rows
}

async fn node_with(rig: &Rig, over: &dyn Backend, number: usize) -> Rows {
    let node = &rig.node;
    let names = (0..number).map(|n| format!("scale-{number}-{n}"));
    let volume = |name: String| {
        over.copy("scale", &name);
        over.known(&name, "ext4")
    };
    let volumes: Vec<_> = names.map(volume).collect();
    let bare: Vec<_> = (0..number)
        .map(|n| over.bare(&format!("scale-{number}-{n}"), SIZE, BareContent::Ext4))
        .collect();
    stage_bare(&bare);
    stage_all(rig, &volumes).await;
    unstage_all(rig, &volumes).await;
    let before = cpu_time(node.pid());

    let (stage, all) = stage_all(rig, &volumes).await;
    let publish = timed(&volumes, async |volume| {
        node.publish(volume, "pod").await.expect("published");
    })
    .await;
    let republish = timed(&volumes, async |volume| {
        node.publish(volume, "other").await.expect("published");
        node.unpublish(volume, "other").await.expect("unpublished");
    })
    .await;
    let stats = timed(&volumes, async |volume| {
        let target = node.target(volume, "pod");
        node.stats(volume, &target).await.expect("stats");
    })
    .await;
    let again = timed(&volumes, async |volume| {
        node.stage(volume).await.expect("staged");
    })
    .await;
    let of_all = cpu_time(node.pid()).saturating_sub(before);
    let resources = resources(node.pid());

    let (answers, recovered) = restarts(rig, &volumes).await;

    let unpublish = timed(&volumes, async |volume| {
        node.unpublish(volume, "pod").await.expect("unpublished");
    })
    .await;
    let unstage = unstage_all(rig, &volumes).await;
    let (bare_each, bare) = stage_bare(&bare);
    for volume in &volumes {
        over.discard(&volume.handle);
    }
    let to_bare = all.as_secs_f64() / bare.as_secs_f64();
    let of_one = of_all / u32::try_from(number).expect("a number");
    let each = |times: &[Duration]| format!("{:.1?}", median(times));
    let mut rows = vec![
        ("stage of all", format!("{all:.1?}")),
        ("stage of all, to bare", format!("{to_bare:.2}")),
        ("stage, p50", each(&stage)),
        (
            "stage, p50 of the last tenth to the first's",
            format!("{:.2}", growth(&stage)),
        ),
        (
            "bare calls, p50 of the last tenth to the first's",
            format!("{:.2}", growth(&bare_each)),
        ),
        ("publish, p50", each(&publish)),
        (
            "publish and unpublish of a second target, p50",
            each(&republish),
        ),
        ("stats, p50", each(&stats)),
        ("stage again, p50", each(&again)),
        (FIRST_ANSWER, format!("{answers:.1?}")),
        ("restart: all volumes recovered", format!("{recovered:.1?}")),
        ("unpublish, p50", each(&unpublish)),
        ("unstage, p50", each(&unstage)),
        (
            "the agent's CPU time a volume, until the restart",
            format!("{of_one:.1?}"),
        ),
    ];
    rows.extend(resources);
    rows
}

fn resources(pid: u32) -> Rows {
    let usage = ResourceUsage::of(pid);
    vec![
        (
            "the agent's memory of its own",
            format!("{:.1} MiB", mib(usage.memory_kib)),
        ),
        (
            "its resident memory, with the program's pages",
            format!("{:.1} MiB", mib(resident_kib(pid))),
        ),
        ("its threads", usage.threads.to_string()),
        ("its descriptors", usage.descriptors.to_string()),
    ]
}

/// The time of each volume's stage, and of all.
async fn stage_all(rig: &Rig, volumes: &[Volume]) -> (Vec<Duration>, Duration) {
    let _udevd = PausedUdevd::new();
    let begun = Instant::now();
    let each = timed(volumes, async |volume| {
        rig.node.stage(volume).await.expect("staged");
    })
    .await;
    (each, begun.elapsed())
}

async fn unstage_all(rig: &Rig, volumes: &[Volume]) -> Vec<Duration> {
    timed(volumes, async |volume| {
        rig.node.unstage(volume).await.expect("unstaged");
    })
    .await
}

/// How long as many callers take to stage them by the system calls that this takes: each, in
/// the order in which they ended, and all.
fn stage_bare(volumes: &[BareVolume]) -> (Vec<Duration>, Duration) {
    let waiting = Mutex::new(volumes.iter());
    let took = Mutex::new(Vec::with_capacity(volumes.len()));
    let stage_some = |_| {
        let next = || waiting.lock().expect("no panic").next();
        let stage = |volume: &BareVolume| {
            let begun = Instant::now();
            let node = volume.stage();
            took.lock().expect("no panic").push(begun.elapsed());
            node
        };
        let staged = iter::from_fn(next).map(|volume| (volume, stage(volume)));
        staged.collect::<Vec<_>>()
    };
    let udevd = PausedUdevd::new();
    let begun = Instant::now();
    let staged = on_threads(0..AT_ONCE, stage_some);
    let all = begun.elapsed();
    drop(udevd);
    for (volume, node) in staged.into_iter().flatten() {
        volume.unstage(&node);
    }
    (took.into_inner().expect("no panic"), all)
}

/// How many times the median of the last tenth is that of the first.
fn growth(times: &[Duration]) -> f64 {
    let tenth = times.len().div_ceil(10);
    let (first, last) = (&times[..tenth], &times[times.len() - tenth..]);
    median(last).as_secs_f64() / median(first).as_secs_f64()
}

/// The time of each volume's call, in the order in which they ended.
async fn timed(volumes: &[Volume], call: impl AsyncFn(&Volume)) -> Vec<Duration> {
    let call = &call;
    let one = async |volume| {
        let begun = Instant::now();
        call(volume).await;
        begun.elapsed()
    };
    let calls = volumes.iter().map(one);
    stream::iter(calls)
        .buffer_unordered(AT_ONCE)
        .collect()
        .await
}

/// The medians of some restarts.
async fn restarts(rig: &Rig, volumes: &[Volume]) -> (Duration, Duration) {
    let [mut answers, mut recovered] = [(); 2].map(|()| Vec::new());
    for _ in 0..RESTARTS {
        let (answer, all) = restart(rig, volumes).await;
        answers.push(answer);
        recovered.push(all);
    }
    (median(&answers), median(&recovered))
}

/// Kills the agent and starts another: the times until it answers Probe, and until it has
/// answered for each volume.
async fn restart(rig: &Rig, volumes: &[Volume]) -> (Duration, Duration) {
    let node = &rig.node;
    node.kill9().await;
    let begun = Instant::now();
    node.spawn();
    while node.probe().await.is_none() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let answers = begun.elapsed();
    timed(volumes, async |volume| {
        node.stage(volume).await.expect("staged");
    })
    .await;
    (answers, begun.elapsed())
}

/// The CPU time of the process (proc_pid_stat(5)).
fn cpu_time(pid: u32) -> Duration {
    let stat = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat"));
    let stat = stat.expect("procfs");
    let fields = stat.rsplit(')').next().expect("the name's end");
    let ticks = fields.split_ascii_whitespace().skip(11).take(2);
    let ticks: u64 = ticks
        .map(|ticks| ticks.parse::<u64>().expect("ticks"))
        .sum();
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
fn mib(kib: usize) -> f64 {
    kib as f64 / 1024.0
}
