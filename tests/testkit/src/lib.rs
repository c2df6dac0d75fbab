//! What unit tests, stories and benches share: a private corner of the machine ([`Sandbox`]),
//! the real binaries started in it ([`Agent`]), and callers that behave as
//! kubelet and the sidecars do ([`Node`], [`Controller`]).
//!
//! A story runs on a thread of its own in a mount namespace of its own, so that
//! stories run side by side and nothing they mount is seen outside. Nothing
//! waits for a time: whoever waits, waits for a condition ([`eventually`]).

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
mod ceph_csi;
mod cluster;
mod controller;
mod dice;
mod disk;
mod faults;
mod footprint;
mod halfway;
mod holder;
mod hurt;
mod leaks;
mod left_out;
mod lives;
mod nbd;
mod node;
mod rbd;
mod sandbox;
mod stuck;
mod volume;

use std::{env, fmt::Debug, panic::resume_unwind, thread, time::Duration};

pub use agent::{Agent, Machine, program, request};
pub use ceph_csi::{NOTE, note_of_ceph_csi, publish_as_ceph_csi, unstage_as_ceph_csi};
pub use cluster::{TestCluster, answer_of};
pub use controller::{
    Controller, ControllerSetup, claim, from_snapshot, from_volume, on_node, provisioned, range,
};
pub use dice::Dice;
pub use disk::{Content, all_loops, can_resize_ext4, hex, loops_over, run, run_err, sha256};
pub use faults::{
    DeadOsd, DeadServer, Fault, HungDirectories, HungFiles, HungPool, Moment, bytes_for,
};
pub use footprint::Footprint;
pub use halfway::{Halfway, LUKS_FORMAT, MKFS, StandIn};
pub use holder::Holder;
pub use hurt::{HEALTHY, call, healthy, hurts_its_own_volumes_alone};
pub use leaks::{files_below, mounts_below};
pub use left_out::{left_out, not_tested};
pub use lives::{
    Grow, at_each_step, grown_in_use, kill_amid, kill_within, killed_amid_each, killed_at_each_step,
};
pub use nbd::{NbdServer, kernel_has_nbd, nbds_over};
pub use node::{Node, NodeSetup};
pub use rbd::{
    Ceph, KINDS, ceph_story, lonely_ceph_story, mapping_of, mappings_of, rbds_of, rbds_over,
    spec_of,
};
pub use sandbox::Sandbox;
pub use stuck::{StuckFile, StuckTree};
use tonic::{Code, Status};
pub use volume::{Mode, Volume};

pub const MIB: u64 = 1 << 20;

/// No story may take longer, whatever hangs.
fn longest() -> Duration {
    // One that has every step is as many stories as there are steps.
    let times = env::var_os("EVERY_STEP").map_or(1, |_| 12);
    times * Duration::from_secs(600)
}

/// Runs `body` in a [`Sandbox`], on a thread and a runtime of its own.
pub fn story(body: impl AsyncFnOnce(&Sandbox) + Send) {
    let outcome = thread::scope(|scope| {
        let story = scope.spawn(move || {
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
        });
        story.join()
    });
    if let Err(panic) = outcome {
        resume_unwind(panic);
    }
}

/// Waits until `check` gives something; panics with `what` if that takes absurdly long.
pub async fn eventually<T>(what: &str, mut check: impl AsyncFnMut() -> Option<T>) -> T {
    let timeout = Duration::from_secs(90);
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
