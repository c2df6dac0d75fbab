//! The common part of unit tests, stories and benches: an isolated environment
//! ([`Sandbox`]), the real binaries started in it ([`Agent`]), and callers that behave as
//! kubelet and the sidecars do ([`Node`], [`Controller`]).
//!
//! A story runs on a thread of its own in a mount namespace of its own, so that
//! stories run side by side, and their mounts are invisible outside. A story never
//! waits for a time, only for a condition ([`eventually`]).

// The ban on children is the product's, not its tests'; the rest is for an interface that
// others use.
#![allow(
    clippy::disallowed_methods,
    clippy::new_without_default,
    clippy::return_self_not_must_use,
    async_fn_in_trait,
    missing_docs
)]

mod agent;
mod bare;
mod ceph_csi;
mod cluster;
mod controller;
mod disk;
mod faults;
mod isolation;
mod kmip;
mod leaks;
mod lifecycle;
mod mirror;
mod nbd;
mod nfs;
mod node;
mod program_stubs;
mod rbd;
mod replayer;
mod resource_usage;
mod rng;
mod sandbox;
mod skipped;
mod stuck;
mod supervisor;
mod vault;
mod volume;
mod writer;

use std::{
    env,
    fmt::Debug,
    net::{TcpListener, TcpStream},
    panic::resume_unwind,
    thread,
    time::Duration,
};

pub use agent::{Agent, Machine, StepHold, program, request};
pub use bare::{BareContent, BareDevice, BareExport, BareImageFile, BareVolume};
pub use ceph_csi::{STAGE_FILE, ceph_csi_stage_file, publish_as_ceph_csi, unstage_as_ceph_csi};
pub use cluster::{MovedMonitors, TestCluster, output_despite_abort};
pub use controller::{
    Controller, ControllerSetup, claim, from_snapshot, from_volume, on_node, provisioned, range,
};
pub use disk::{
    Content, all_loops, can_resize_ext4, hex, leave_unwritten, loops_over, run, run_err, sha256,
    unmap_by_rbd,
};
pub use faults::{
    DeadNfsServer, DeadOsd, DeadServer, Fault, HungDirectories, HungFiles, HungPool, Phase,
    bytes_for,
};
pub use isolation::{
    HEALTHY, assert_fault_isolated, call_in_phase, grow_in_phase, healthy_volumes,
};
pub use kmip::KmipServer;
pub use leaks::{files_below, mounts_below};
pub use lifecycle::{
    GrowSource, crash_at_each_step, crash_lifecycle_at_each_step, file_systems_to_crash,
    grow_published, kill_during, kill_during_each_call, kill_within, kinds_to_crash,
};
pub use mirror::{MirrorDaemon, mirror_pool};
pub use nbd::{NbdServer, kernel_has_nbd, nbds_over};
pub use nfs::{NfsServer, SHARE, can_use_nfs};
pub use node::{Node, NodeSetup};
pub use program_stubs::{InterruptedProgram, LUKS_FORMAT, MKFS, ProgramStub};
pub use rbd::{
    Ceph, ImageOpener, KINDS, ceph_story, cluster_of_three_story, mapping_of, mappings_of,
    own_cluster_story, rbds_of, rbds_over, spec_of,
};
pub use replayer::Replayer;
pub use resource_usage::{ResourceUsage, resident_kib};
pub use rng::Rng;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
pub use sandbox::Sandbox;
pub use skipped::{report_not_tested, skip_test, skip_uninstalled};
pub use stuck::{NoOthersHang, StuckFile, StuckTree};
pub use supervisor::Supervisor;
use tonic::{Code, Status};
pub use vault::VaultServer;
pub use volume::{Mode, Volume};
pub use writer::Writer;

pub const MIB: u64 = 1 << 20;

/// The longest time of a story, also of one that hangs.
fn longest() -> Duration {
    // One that has every step is as many stories as there are steps.
    let times = env::var_os("EVERY_STEP").map_or(1, |_| 12);
    times * Duration::from_secs(600)
}

/// Runs `body` in a [`Sandbox`], on a thread and a runtime of its own.
pub fn story(body: impl AsyncFnOnce(&Sandbox) + Send) {
    // The test's name.
    let name = thread::current().name().unwrap_or_default().to_owned();
    let outcome = thread::scope(|scope| {
        let work = move || {
            // First of all: the runtime's own threads inherit the namespace.
            let sandbox = Sandbox::new();
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime")
                .block_on(async {
                    tokio::time::timeout(longest(), body(&sandbox))
                        .await
                        .expect("the story hangs");
                });
        };
        let story = thread::Builder::new().name(name).spawn_scoped(scope, work);
        story.expect("a thread").join()
    });
    if let Err(panic) = outcome {
        resume_unwind(panic);
    }
}

/// A TCP port that nothing listens on.
pub fn free_port() -> u16 {
    let free = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
    free.expect("a free port").port()
}

/// Connections to a port, as many, that send nothing. Waits until something listens on it.
pub async fn idle_clients(port: u16, many: usize) -> Vec<TcpStream> {
    // This process has the other ends.
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    setrlimit(Resource::Nofile, raised).expect("a higher limit");
    let address = ("127.0.0.1", port);
    let connect = async || TcpStream::connect(address).ok();
    let mut idle = vec![eventually("the port is served", connect).await];
    idle.resize_with(many, || TcpStream::connect(address).expect("a connection"));
    idle
}

/// Waits until `check` gives something; panics with `what` if that takes absurdly long.
pub async fn eventually<T>(what: &str, mut check: impl AsyncFnMut() -> Option<T>) -> T {
    let timeout = Duration::from_secs(300);
    tokio::time::timeout(timeout, async {
        loop {
            if let Some(found) = check().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
    .unwrap_or_else(|_| panic!("waited {timeout:?} in vain: {what}"))
}

/// The answer to a call whose user or key the cluster refuses. A monitor of Ceph 20.2 that is
/// asked by its older protocol (v1) may close the connection before it has sent the refusal;
/// the client asks again after three seconds, and the call may run out of time before that.
pub async fn refused_by_monitor<T>(
    mut call: impl AsyncFnMut() -> Result<T, Status>,
) -> Result<T, Status> {
    eventually("the monitor's refusal", async || match call().await {
        Err(status) if status.code() == Code::Unavailable => None,
        answer => Some(answer),
    })
    .await
}

/// Asserts that `result` is an error of this `code` whose sentence has each of `words`.
#[track_caller]
pub fn refused<T: Debug>(result: Result<T, Status>, code: Code, words: &[&str]) {
    let status = result.expect_err("the call should have been refused");
    assert_eq!(status.code(), code, "{status:?}");
    for word in words {
        assert!(
            status.message().contains(word),
            "{word:?} is not in {:?}",
            status.message()
        );
    }
    assert!(
        status.details().is_empty(),
        "CSI demands empty details: {status:?}"
    );
}
