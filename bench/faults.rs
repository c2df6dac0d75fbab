//! What the others wait for while eight volumes hang (`faults/rounds.rs`): each file, pool,
//! server or OSD that can.

use std::{
    env,
    fs::File,
    io::Write as _,
    os::{
        fd::{AsFd as _, AsRawFd as _},
        unix::fs::OpenOptionsExt as _,
    },
    process::ChildStderr,
};

use testkit::{
    DeadNfsServer, DeadOsd, DeadServer, Fault, HungDirectories, HungFiles, HungPool, Node,
    NodeSetup, Phase, Volume, can_resize_ext4, free_port, idle_clients, own_cluster_story, story,
};
use tokio::{net::unix::pipe::Receiver, task::JoinHandle};

mod rounds;

use Phase::{Growth, Mount, Probe, Publish, Unmount, Unpublish, Use};
use rounds::{KIND, others};

/// Clients of `/metrics` that send nothing.
const IDLE: usize = 2000;

/// Whether it is only to be seen that it runs.
pub fn is_quick() -> bool {
    env::args().any(|arg| arg == "--quick")
}

/// What is to hang: FAULTS, which `scripts/bench.sh` checks.
fn choice() -> String {
    env::var("FAULTS").unwrap_or_default().to_lowercase()
}

/// Whether nothing is to hang (FAULTS=0).
pub fn are_left_out() -> bool {
    choice() == "0"
}

/// Whether these are the only cases (FAULTS=only, or the name of a phase).
pub fn are_alone() -> bool {
    !["", "0"].contains(&&*choice())
}

/// Those of the phases in which something is to hang.
fn chosen(phases: &[Phase]) -> Vec<Phase> {
    let choice = choice();
    let is_every = ["", "only"].contains(&&*choice);
    let is_named = |phase: Phase| format!("{phase:?}").to_lowercase() == choice;
    let phases = phases.iter().copied();
    phases
        .filter(|phase| is_every || is_named(*phase))
        .collect()
}

/// The same on the test kernel, which is slow: there one shows that it runs.
fn some(phases: &[Phase]) -> Vec<Phase> {
    let mut phases = chosen(phases);
    if is_quick() {
        phases.truncate(1);
    }
    phases
}

/// The file system of volumes that hang.
fn kind(phase: Phase) -> &'static str {
    match phase {
        Phase::Growth if !can_resize_ext4() => "xfs",
        _ => KIND,
    }
}

/// Prints a table for each thing that can hang on any machine; whether all kept
/// within [`LIMIT`].
pub fn of_files() -> bool {
    let mut kept = true;
    for phase in chosen(&[Probe, Mount, Use, Unmount, Growth]) {
        story(async |sandbox| {
            let fault = HungFiles::new(sandbox, kind(phase));
            let node = Node::start(sandbox).await;
            kept &= others(sandbox, &node, fault, "on files", phase).await;
        });
    }
    for phase in chosen(&[Probe, Use, Unmount, Growth]) {
        story(async |sandbox| {
            let fault = HungPool::new(sandbox, kind(phase));
            let node = Node::start_with(sandbox, HungPool::setup(sandbox)).await;
            kept &= others(sandbox, &node, fault, "in a pool", phase).await;
        });
    }
    for phase in chosen(&[Probe]) {
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
            kept &= others(sandbox, &node, fault, "on files, the log unread", phase).await;
        });
    }
    for phase in chosen(&[Unmount]) {
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
            kept &= others(sandbox, &node, fault, &name, phase).await;
        });
    }
    for phase in chosen(&[Publish, Unpublish]) {
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
    for phase in some(&[Use, Probe, Mount, Unmount, Growth]) {
        story(async |sandbox| {
            let fault = DeadServer::new(sandbox, kind(phase), phase).await;
            let node = Node::start(sandbox).await;
            kept &= others(sandbox, &node, fault, "on an NBD server", phase).await;
        });
    }
    kept
}

/// The same of a pool on a device of device-mapper that is suspended.
pub fn of_mapped() -> bool {
    let mut kept = true;
    for phase in some(&[Probe, Unmount, Growth]) {
        story(async |sandbox| {
            let fault = HungPool::mapped(sandbox, kind(phase));
            let node = Node::start_with(sandbox, HungPool::setup(sandbox)).await;
            kept &= others(sandbox, &node, fault, "on a suspended device", phase).await;
        });
    }
    kept
}

/// The same of an NFS server that dies, or hangs.
pub fn of_nfs_servers() -> bool {
    let mut kept = true;
    for phase in some(&[Mount, Use, Unmount]) {
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
    for phase in some(&[Use, Probe, Unmount, Growth]) {
        own_cluster_story(async |sandbox, ceph| {
            let node = ceph.node(sandbox).await;
            let fault = DeadOsd::new(ceph, kind(phase));
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
