//! What the others wait for while eight volumes hang, beside the same without the
//! fault: the rounds alternate, and in both the eight are called for again and again.

use std::{
    fs::File,
    io::Write as _,
    os::{
        fd::{AsFd as _, AsRawFd as _},
        unix::fs::OpenOptionsExt as _,
    },
    process::ChildStderr,
    time::{Duration, Instant},
};

use futures_util::{StreamExt as _, future::join_all, stream};
use testkit::{
    DeadNfsServer, DeadOsd, DeadServer, Fault, HEALTHY, HungDirectories, HungFiles, HungPool, Node,
    NodeSetup, Phase, Sandbox, Volume, call_in_phase, free_port, healthy_volumes, idle_clients,
    own_cluster_story, story,
};
use tokio::{net::unix::pipe::Receiver, task::JoinHandle};

/// p99 of a whole life beside the fault, in those without it, is at most this.
const LIMIT: f64 = 1.2;
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
const KIND: &str = "ext4";
/// Clients of `/metrics` that send nothing.
const IDLE: usize = 2000;

/// How long each call of each life took.
#[derive(Default)]
struct Times([Vec<Duration>; CALLS.len()]);

/// Whether it is only to be seen that it runs.
pub fn is_quick() -> bool {
    std::env::args().any(|arg| arg == "--quick")
}

/// Whether nothing is to hang (FAULTS=0).
pub fn are_left_out() -> bool {
    std::env::var("FAULTS").is_ok_and(|faults| faults == "0")
}

/// Prints a table for each thing that can hang on any machine; whether all kept
/// within [`LIMIT`].
pub fn of_files() -> bool {
    use Phase::{Mount, Probe, Publish, Unmount, Unpublish, Use};

    let mut kept = true;
    for phase in [Probe, Mount, Use, Unmount] {
        story(async |sandbox| {
            let fault = HungFiles::new(sandbox, KIND);
            let node = Node::start(sandbox).await;
            kept &= others(sandbox, &node, fault, "on files", phase).await;
        });
    }
    for phase in [Probe, Use, Unmount] {
        story(async |sandbox| {
            let fault = HungPool::new(sandbox, KIND);
            let node = Node::start_with(sandbox, HungPool::setup(sandbox)).await;
            kept &= others(sandbox, &node, fault, "in a pool", phase).await;
        });
    }
    story(async |sandbox| {
        let files = HungFiles::new(sandbox, KIND);
        let node = Node::prepare(sandbox, NodeSetup::new(sandbox));
        node.leave_log_unread();
        node.restart().await;
        let log = node.take_log_pipe();
        let mut reader = Some(read(&log));
        let besides = async |hangs: bool| {
            if let Some(reader) = reader.take() {
                reader.abort();
            }
            if hangs {
                fill(&log);
            } else {
                reader = Some(read(&log));
            }
        };
        let fault = HungBeside { files, besides };
        kept &= others(sandbox, &node, fault, "on files, the log unread", Probe).await;
    });
    story(async |sandbox| {
        let files = HungFiles::new(sandbox, KIND);
        let port = free_port();
        let listen = format!("--metrics-listen=127.0.0.1:{port}");
        let node = Node::start_with(sandbox, NodeSetup::new(sandbox).arg(&listen)).await;
        let mut idle = Vec::new();
        let besides = async |hangs: bool| {
            idle.clear();
            if hangs {
                idle = idle_clients(port, IDLE).await;
            }
        };
        let fault = HungBeside { files, besides };
        let name = format!("on files, {IDLE} idle clients of /metrics");
        kept &= others(sandbox, &node, fault, &name, Unmount).await;
    });
    for phase in [Publish, Unpublish] {
        story(async |sandbox| {
            let mut node = Node::prepare(sandbox, NodeSetup::new(sandbox));
            let fault = HungDirectories::new(sandbox, &node, &["pod"], KIND);
            node.start_first().await;
            kept &= others(sandbox, &node, fault, "on a root disk", phase).await;
        });
    }
    kept
}

/// The same of NBD servers that die.
pub fn of_servers() -> bool {
    let mut kept = true;
    for phase in some(&[Phase::Use, Phase::Probe, Phase::Mount, Phase::Unmount]) {
        story(async |sandbox| {
            let fault = DeadServer::new(sandbox, KIND, phase).await;
            let node = Node::start(sandbox).await;
            kept &= others(sandbox, &node, fault, "on an NBD server", phase).await;
        });
    }
    kept
}

/// The same of a pool on a device of device-mapper that is suspended.
pub fn of_mapped() -> bool {
    let mut kept = true;
    for phase in some(&[Phase::Probe, Phase::Unmount]) {
        story(async |sandbox| {
            let fault = HungPool::mapped(sandbox, KIND);
            let node = Node::start_with(sandbox, HungPool::setup(sandbox)).await;
            kept &= others(sandbox, &node, fault, "on a suspended device", phase).await;
        });
    }
    kept
}

/// The same of an NFS server that dies, or hangs.
pub fn of_nfs_servers() -> bool {
    let mut kept = true;
    for phase in some(&[Phase::Mount, Phase::Use, Phase::Unmount]) {
        story(async |sandbox| {
            let fault = DeadNfsServer::new(sandbox).await;
            let node = Node::start(sandbox).await;
            kept &= others(sandbox, &node, fault, "on an NFS server", phase).await;
        });
    }
    kept
}

/// The same of a Ceph cluster whose OSD stops.
pub fn of_osds() -> bool {
    let mut kept = true;
    for phase in some(&[Phase::Use, Phase::Probe, Phase::Unmount]) {
        own_cluster_story(async |sandbox, ceph| {
            let node = ceph.node(sandbox).await;
            let fault = DeadOsd::new(ceph, KIND);
            kept &= others(sandbox, &node, fault, "on an OSD", phase).await;
        });
    }
    kept
}

/// Files that hang, and another fault for as long as they do: `besides` begins it, and ends it.
struct HungBeside<B> {
    files: HungFiles,
    besides: B,
}

impl<B: AsyncFnMut(bool)> Fault for HungBeside<B> {
    fn affected(&self) -> &[Volume] {
        self.files.affected()
    }

    fn grow(&self, volume: &Volume, bytes: u64) {
        self.files.grow(volume, bytes);
    }

    async fn stop(&mut self, phase: Phase) {
        (self.besides)(true).await;
        self.files.stop(phase).await;
    }

    async fn resume(&mut self) {
        self.files.resume().await;
        (self.besides)(false).await;
    }
}

/// Reads a log, until it is aborted.
fn read(log: &ChildStderr) -> JoinHandle<()> {
    let log = log.as_fd().try_clone_to_owned().expect("a descriptor");
    let mut log = Receiver::from_owned_fd(log).expect("a pipe");
    tokio::spawn(async move {
        let _ = tokio::io::copy(&mut log, &mut tokio::io::sink()).await;
    })
}

/// Fills a log's pipe: no line fits in.
fn fill(log: &ChildStderr) {
    let mut pipe = File::options()
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(format!("/proc/self/fd/{}", log.as_raw_fd()))
        .expect("the pipe's other end");
    while pipe.write(b"\n").is_ok() {}
}

/// The test kernel is slow: there one shows that it runs.
fn some(phases: &[Phase]) -> impl Iterator<Item = Phase> {
    let many = if is_quick() { 1 } else { phases.len() };
    phases.iter().copied().take(many)
}

/// Prints the table; whether [`LIMIT`] was kept.
async fn others(
    sandbox: &Sandbox,
    node: &Node,
    mut fault: impl Fault,
    name: &str,
    phase: Phase,
) -> bool {
    let rounds = if is_quick() { 2 } else { 40 };
    let affected = fault.affected().to_vec();
    let others = healthy_volumes(sandbox, KIND);
    // All are formatted.
    live(node, &others, &mut Times::default()).await;
    let [mut without, mut with] = [(); 2].map(|()| Times::default());
    for _ in 0..rounds {
        for (hangs, times) in [(false, &mut without), (true, &mut with)] {
            up(node, &affected, phase).await;
            if hangs {
                fault.stop(phase).await;
            }
            join_all(
                affected
                    .iter()
                    .map(|volume| call_in_phase(node, volume, phase)),
            )
            .await;
            if hangs {
                fault.while_calls_hang(phase).await;
            }
            beside(node, &affected, phase, live(node, &others, times)).await;
            if hangs {
                fault.resume().await;
            }
            down(node, &affected, phase).await;
        }
    }
    println!(
        "\n| {HEALTHY} volumes while {} hang {name}, {phase:?} | p50 | without | ratio | p99 | without | ratio |",
        affected.len()
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

/// Brings volumes to that phase of their lives.
async fn up(node: &Node, volumes: &[Volume], phase: Phase) {
    join_all(volumes.iter().map(async |volume| {
        let target = node.up(volume, "pod").await;
        match phase {
            Phase::Probe | Phase::Mount => node.down(volume, "pod").await,
            Phase::Publish => node.unpublish(volume, "pod").await.expect("unpublished"),
            // Of a server that dies, the last ones are the answer.
            Phase::Use => drop(node.stats(volume, &target).await.expect("stats")),
            // Which is written when it is unmounted.
            Phase::Unmount => std::fs::write(target.join("late"), "late").expect("a write"),
            _ => {}
        }
    }))
    .await;
}

/// Ends the lives of volumes that have hung.
async fn down(node: &Node, volumes: &[Volume], phase: Phase) {
    join_all(volumes.iter().map(async |volume| {
        node.retry_until_ok("what it waited for", async || {
            call_in_phase(node, volume, phase).await
        })
        .await;
        node.retry_until_ok("unpublished", async || node.unpublish(volume, "pod").await)
            .await;
        node.retry_until_ok("unstaged", async || node.unstage(volume).await)
            .await;
    }))
    .await;
}

/// Does `work` while the volumes are called for again and again.
async fn beside(node: &Node, volumes: &[Volume], phase: Phase, work: impl Future<Output = ()>) {
    let calls = volumes.iter().map(async |volume| {
        loop {
            let _ = call_in_phase(node, volume, phase).await;
            tokio::time::sleep(PAUSE).await;
        }
    });
    tokio::select! {
        () = work => (),
        _ = join_all(calls) => unreachable!("they are asked without end"),
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
