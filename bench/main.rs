//! What a volume costs on this node, beside the same steps by the usual programs.
//!
//! Every case runs several ways in one process run, on the same machine in the
//! same minute, so that their ratios hold where absolute times don't:
//!
//! - *socket*: the real agent, called as kubelet calls it, on a new connection
//!   each time (*kept*: on one that is kept);
//! - *in process*: the library, without gRPC;
//! - *exec*: `losetup`, `blkid`, `fsck`, `mkfs`, `mount`, `umount`, as drivers
//!   built on mount-utils run them.
//!
//! `cargo bench` for the numbers in PERFORMANCE.md, `cargo bench --bench node
//! -- --quick` for an answer within two minutes. Needs root.

// The ban on children is the product's, not its benches'.
#![allow(clippy::disallowed_methods, missing_docs)]

mod by_exec;
mod calls;
#[path = "../tests/stories/harness/mod.rs"]
#[allow(dead_code, unused_imports)] // The stories use what the benches don't.
mod harness;
mod life;
mod probe;
mod rig;

fn main() {
    let rig = rig::Rig::start();
    // Channels are made between the calls, too, and spawn their driver at once.
    let _inside = rig.runtime.enter();
    let mut criterion = criterion::Criterion::default()
        .sample_size(20)
        .warm_up_time(std::time::Duration::from_secs(1))
        .configure_from_args();
    life::first(&mut criterion, &rig);
    life::formatted(&mut criterion, &rig);
    life::at_once(&mut criterion, &rig);
    life::publish(&mut criterion, &rig);
    calls::stats(&mut criterion, &rig);
    probe::devices(&mut criterion, &rig);
    criterion.final_summary();
    rig.print_summary();
}
