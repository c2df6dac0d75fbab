//! What a volume costs on this node, beside the same steps by the usual programs.
//!
//! Every case runs several ways in one process run, on the same machine in the
//! same minute, so that their ratios hold where absolute times don't:
//!
//! - *socket*: the real agent, called as kubelet calls it, on a new connection
//!   each time (*kept*: on one that is kept);
//! - *in process*: the library, without gRPC;
//! - *bare*: the system calls that the case cannot do without;
//! - *exec*: what attaches (`losetup`, `nbd-client`, `rbd`), `blkid`, `fsck`, `mkfs`,
//!   `mount`, `umount`, as drivers built on mount-utils run them.
//!
//! `make bench` (scripts/bench.sh) for the numbers in PERFORMANCE.md, each
//! backend on a kernel that has it; the environment variable `BACKEND` says which one it
//! is here: `loop`, unless it is set; `nbd`; `rbd`, which is Ceph on the node; `ceph`, which
//! is Ceph in the controller and takes no driver; `pools`, image files in the controller; or
//! `nfs` and `mapped`, where NFS servers and devices of device-mapper hang.
//! Needs root.

// The ban on children is the product's, not its benches'.
#![allow(clippy::disallowed_methods, missing_docs)]

mod attach;
mod backends;
mod by_exec;
mod calls;
mod ceph;
mod copies;
mod faults;
mod killed;
mod life;
mod listings;
mod logs;
mod probe;
mod provision;
mod publish;
mod ratios;
mod rig;
mod scale;

use std::process::ExitCode;

use criterion::Criterion;
use testkit::{NbdServer, NodeSetup};

use backends::{Exports, Images};
use ceph::{Ceph, CephImages};
use rig::Rig;

fn main() -> ExitCode {
    let backend = std::env::var("BACKEND").unwrap_or_default();
    let backend = if backend.is_empty() { "loop" } else { &backend };
    let ceph = matches!(backend, "ceph" | "rbd").then(Ceph::start);
    let rig = Rig::start(backend, |sandbox| match &ceph {
        Some(ceph) => ceph.node(sandbox),
        None => NodeSetup::new(sandbox),
    });
    // Channels are made between the calls, too, and spawn their driver at once.
    let _inside = rig.runtime.enter();
    let mut criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(std::time::Duration::from_secs(1))
        .configure_from_args();
    let is_within = faults::are_alone() || {
        match (backend, &ceph) {
            ("loop", _) => images(&mut criterion, &rig),
            ("nbd", _) => exports(&mut criterion, &rig),
            ("pools", _) => {
                listings::of_pools(&mut criterion, &rig);
                copies::of_pools(&mut criterion, &rig);
            }
            ("ceph", Some(ceph)) => provisioning(&mut criterion, &rig, ceph),
            (_, Some(ceph)) => ceph_images(&mut criterion, &rig, ceph),
            ("nfs" | "mapped", _) => {}
            (other, None) => {
                panic!("BACKEND={other}: there are loop, pools, nbd, ceph, rbd, nfs and mapped")
            }
        }
        criterion.final_summary();
        rig.print_summary();
        rig.print_ratios()
    };
    let isolated = faults::are_left_out()
        || match backend {
            "loop" => !testkit::StuckFile::possible() || faults::of_files(),
            "nbd" => faults::of_servers(),
            "nfs" => faults::of_nfs_servers(),
            "mapped" => faults::of_mapped(),
            "rbd" => faults::of_osds(),
            _ => true,
        };
    // Of a few rounds p99 says nothing.
    if is_within && (isolated || faults::is_quick()) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn images(criterion: &mut Criterion, rig: &Rig) {
    let images = Images(&rig.sandbox);
    life::first(criterion, rig, &images);
    life::formatted(criterion, rig, &images)
        .compare_with_calls("life of a 1 GiB ext4, formatted, to bare and four empty calls");
    life::at_once(criterion, rig, &images, 32)
        .compare_with_calls("32 lives at once, formatted, to bare and four empty calls each");
    publish::publish(criterion, rig, &images);
    logs::json(criterion, rig, &images);
    calls::first(criterion, rig);
    calls::stats(criterion, rig);
    probe::devices(criterion, rig);
    let numbers: &[usize] = if faults::is_quick() {
        &[10, 100]
    } else {
        &[10, 100, 1000]
    };
    scale::volumes(rig, &images, numbers);
}

fn exports(criterion: &mut Criterion, rig: &Rig) {
    for tcp in [false, true] {
        let server = NbdServer::start_with(&rig.sandbox, tcp, &[]);
        let exports = Exports {
            sandbox: &rig.sandbox,
            server: rig.runtime.block_on(server),
        };
        if !tcp {
            // First: the images of the others stay, in memory.
            scale::volumes(rig, &exports, few_and_many());
        }
        attach::export(criterion, rig, &exports);
        life::formatted(criterion, rig, &exports);
        if !tcp {
            life::first(criterion, rig, &exports);
            life::raw(criterion, rig, &exports);
            life::at_once(criterion, rig, &exports, 16);
        }
    }
}

fn provisioning(criterion: &mut Criterion, rig: &Rig, ceph: &Ceph) {
    for many in [1, 8] {
        provision::create_and_delete(criterion, rig, ceph, many);
    }
}

fn ceph_images(criterion: &mut Criterion, rig: &Rig, ceph: &Ceph) {
    let images = CephImages {
        ceph,
        sandbox: &rig.sandbox,
    };
    if !faults::is_quick() {
        killed::daemon(criterion, rig, ceph);
    }
    attach::image(criterion, rig, &images);
    life::formatted(criterion, rig, &images);
    life::first(criterion, rig, &images);
    life::raw(criterion, rig, &images);
    life::at_once(criterion, rig, &images, 16);
    scale::volumes(rig, &images, few_and_many());
}

/// Numbers of volumes of a node whose devices have servers.
fn few_and_many() -> &'static [usize] {
    if faults::is_quick() {
        &[10]
    } else {
        &[10, 100, 200]
    }
}
