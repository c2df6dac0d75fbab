//! What a dead thing holds up: the eight volumes that stand on it, for as long as it
//! is dead. Meanwhile 56 others live whole lives, an hour's worth of kubelet's calls to
//! the eight takes no more of the machine than the first of them did, and when the
//! thing comes back all ends well.
//!
//! Each story has one file system by turns; with `EVERY_FS` set, each has all three.

use std::{env, net::TcpStream};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use testkit::{
    Ceph, DeadOsd, DeadServer, Dice, HEALTHY, HungDirectories, HungFiles, HungPool, Moment, Node,
    NodeSetup, Sandbox, StuckFile, can_resize_ext4, eventually, healthy,
    hurts_its_own_volumes_alone, kernel_has_nbd, lonely_ceph_story, not_tested, story,
};

use crate::telling::free_port;

/// Clients that connect and say nothing.
const IDLE: usize = 2000;

/// The file systems to tell a story on: none where it is not told. In the test kernel,
/// where each takes minutes beside others, they are told in `make test-matrix` alone,
/// which sets `EVERY_FS`.
fn kinds(moment: Moment) -> Vec<&'static str> {
    if !all_are_told() {
        not_tested("told in make test-matrix alone, which sets EVERY_FS");
        return Vec::new();
    }
    let mut kinds = vec!["ext4", "xfs", "btrfs"];
    kinds.retain(|kind| match moment {
        Moment::Growth => *kind != "ext4" || can_resize_ext4(),
        // Btrfs is mounted without a write.
        Moment::Mount => *kind != "btrfs",
        _ => true,
    });
    if env::var_os("EVERY_FS").is_none() {
        kinds = vec![kinds[Dice::new().below(kinds.len())]];
    }
    kinds
}

fn all_are_told() -> bool {
    env::var_os("TEST_ALL").is_none() || env::var_os("EVERY_FS").is_some()
}

#[test]
fn hung_files_hold_up_their_own_volumes_at_the_probe() {
    hung_files(Moment::Probe);
}

#[test]
fn hung_files_hold_up_their_own_volumes_at_the_mount() {
    hung_files(Moment::Mount);
}

#[test]
fn hung_files_hold_up_their_own_volumes_in_use() {
    hung_files(Moment::Use);
}

#[test]
fn hung_files_hold_up_their_own_volumes_at_the_unmount() {
    hung_files(Moment::Unmount);
}

#[test]
fn hung_files_hold_up_their_own_volumes_at_growth() {
    hung_files(Moment::Growth);
}

/// Whatever is logged of the volumes that hang.
#[test]
fn a_log_that_nobody_reads_holds_up_nobody() {
    hung_files_on(Moment::Probe, async |sandbox| {
        let node = Node::start(sandbox).await;
        node.kill9().await;
        node.unread();
        node.restart().await;
        (node, ())
    });
}

/// While they hold connections to `/metrics` open and say nothing.
#[test]
fn idle_clients_of_metrics_hold_up_nobody() {
    hung_files_on(Moment::Unmount, async |sandbox| {
        // This process has the other ends.
        let limit = getrlimit(Resource::Nofile);
        let raised = Rlimit {
            current: limit.maximum,
            ..limit
        };
        setrlimit(Resource::Nofile, raised).expect("a higher limit");
        let address = ("127.0.0.1", free_port());
        let listen = format!("--metrics-listen=127.0.0.1:{}", address.1);
        let node = Node::start_with(sandbox, NodeSetup::new(sandbox).arg(&listen)).await;
        let connect = async || TcpStream::connect(address).ok();
        let mut idle = vec![eventually("metrics are served", connect).await];
        idle.resize_with(IDLE, || TcpStream::connect(address).expect("a connection"));
        (node, idle)
    });
}

fn hung_files(moment: Moment) {
    hung_files_on(moment, async |sandbox| (Node::start(sandbox).await, ()));
}

/// On a node that suffers something besides, for as long as what comes with it is there.
fn hung_files_on<T>(moment: Moment, start: impl AsyncFn(&Sandbox) -> (Node, T) + Sync) {
    if !StuckFile::possible() {
        return;
    }
    for kind in kinds(moment) {
        story(async |sandbox| {
            // Their mounts are there before the node.
            let fault = HungFiles::new(sandbox, kind);
            let (node, _besides) = start(sandbox).await;
            let others = healthy(sandbox, kind);
            hurts_its_own_volumes_alone(&node, fault, &others, moment).await;
        });
    }
}

#[test]
fn a_hung_root_disk_holds_up_the_volumes_that_are_published_on_it() {
    hung_directories(Moment::Publish);
}

#[test]
fn a_hung_root_disk_holds_up_the_volumes_that_are_unpublished_on_it() {
    hung_directories(Moment::Unpublish);
}

fn hung_directories(moment: Moment) {
    if !StuckFile::possible() {
        return;
    }
    for kind in kinds(moment) {
        story(async |sandbox| {
            let mut node = Node::prepare(sandbox, NodeSetup::new(sandbox));
            let fault = HungDirectories::new(sandbox, &node, &["pod", "last"], kind);
            node.begin().await;
            let others = healthy(sandbox, kind);
            hurts_its_own_volumes_alone(&node, fault, &others, moment).await;
        });
    }
}

#[test]
fn a_hung_pool_holds_up_its_own_volumes_at_the_probe() {
    hung_pool(Moment::Probe, HungPool::new);
}

#[test]
fn a_hung_pool_holds_up_its_own_volumes_in_use() {
    hung_pool(Moment::Use, HungPool::new);
}

#[test]
fn a_hung_pool_holds_up_its_own_volumes_at_the_unmount() {
    hung_pool(Moment::Unmount, HungPool::new);
}

#[test]
fn a_hung_pool_holds_up_its_own_volumes_at_growth() {
    hung_pool(Moment::Growth, HungPool::new);
}

#[test]
#[ignore = "takes device-mapper: make test-kernel"]
fn a_suspended_device_holds_up_its_own_volumes_at_the_probe() {
    hung_pool(Moment::Probe, HungPool::mapped);
}

#[test]
#[ignore = "takes device-mapper: make test-kernel"]
fn a_suspended_device_holds_up_its_own_volumes_at_the_unmount() {
    hung_pool(Moment::Unmount, HungPool::mapped);
}

#[test]
#[ignore = "takes device-mapper: make test-kernel"]
fn a_suspended_device_holds_up_its_own_volumes_at_growth() {
    hung_pool(Moment::Growth, HungPool::mapped);
}

fn hung_pool(moment: Moment, make: fn(&Sandbox, &str) -> HungPool) {
    if !StuckFile::possible() {
        return;
    }
    for kind in kinds(moment) {
        story(async |sandbox| {
            let fault = make(sandbox, kind);
            let node = Node::start_with(sandbox, HungPool::setup(sandbox)).await;
            let others = healthy(sandbox, kind);
            hurts_its_own_volumes_alone(&node, fault, &others, moment).await;
        });
    }
}

#[test]
fn a_dead_server_holds_up_its_own_volumes_at_the_probe() {
    dead_server(Moment::Probe);
}

#[test]
fn a_dead_server_holds_up_its_own_volumes_at_the_mount() {
    dead_server(Moment::Mount);
}

#[test]
fn a_dead_server_holds_up_its_own_volumes_in_use() {
    dead_server(Moment::Use);
}

#[test]
fn a_dead_server_holds_up_its_own_volumes_at_the_unmount() {
    dead_server(Moment::Unmount);
}

#[test]
fn a_dead_server_holds_up_its_own_volumes_at_growth() {
    dead_server(Moment::Growth);
}

fn dead_server(moment: Moment) {
    if !kernel_has_nbd() {
        return;
    }
    let kinds = match moment {
        // The one that the test kernel is never without.
        Moment::Unmount if !all_are_told() => vec!["ext4"],
        _ => kinds(moment),
    };
    for kind in kinds {
        story(async |sandbox| {
            // As with hung files, there are mounts of its own.
            let fault = DeadServer::new(sandbox, kind, moment).await;
            let node = Node::start(sandbox).await;
            let others = healthy(sandbox, kind);
            hurts_its_own_volumes_alone(&node, fault, &others, moment).await;
        });
    }
}

#[test]
fn a_dead_osd_holds_up_its_own_volumes_at_the_map() {
    dead_osd(Moment::Probe);
}

#[test]
fn a_dead_osd_holds_up_its_own_volumes_in_use() {
    dead_osd(Moment::Use);
}

#[test]
fn a_dead_osd_holds_up_its_own_volumes_at_the_unmount() {
    dead_osd(Moment::Unmount);
}

#[test]
fn a_dead_osd_holds_up_its_own_volumes_at_growth() {
    dead_osd(Moment::Growth);
}

fn dead_osd(moment: Moment) {
    for kind in kinds(moment) {
        lonely_ceph_story(async |sandbox, ceph| {
            let node = ceph.node(sandbox).await;
            let fault = DeadOsd::new(ceph, kind);
            let mut others = healthy(sandbox, kind);
            // The kernel's driver has locks that all clusters share.
            let other = Ceph::another(sandbox);
            others.truncate(HEALTHY - 4);
            others.extend((0..4).map(|_| other.volume(kind)));
            hurts_its_own_volumes_alone(&node, fault, &others, moment).await;
        });
    }
}
