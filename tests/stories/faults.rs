//! A fault of a file, pool, server or OSD delays the eight volumes on it, and no others:
//! 56 others go through their whole lifecycle meanwhile. An hour's worth of kubelet's calls
//! to the eight takes no more threads, descriptors and memory than the first of them did,
//! and all eight recover when the fault ends.
//!
//! Each story picks one file system at random; with `EVERY_FS` set it takes all three, or the
//! one that it names.

use std::env;

use testkit::{
    Ceph, DeadNfsServer, DeadOsd, DeadServer, HEALTHY, HungDirectories, HungFiles, HungPool,
    NfsServer, Node, NodeSetup, Phase, Rng, Sandbox, StuckFile, assert_fault_isolated,
    can_resize_ext4, can_use_nfs, free_port, healthy_volumes, idle_clients, kernel_has_nbd,
    own_cluster_story, report_not_tested, story,
};

/// Clients that connect and send nothing.
const IDLE: usize = 2000;

/// The file systems of a story; none where it is skipped. On the test kernel, where each
/// takes minutes beside others, `make test-matrix` alone runs it, with `EVERY_FS`.
fn kinds(phase: Phase) -> Vec<&'static str> {
    one_or_every(phase, vec!["ext4", "xfs", "btrfs"])
}

/// The same where a btrfs does not hang.
fn kinds_but_btrfs(phase: Phase) -> Vec<&'static str> {
    one_or_every(phase, vec!["ext4", "xfs"])
}

/// The same of what hangs at the mount in writes alone: a btrfs is mounted without any.
fn kinds_where_writes_hang(phase: Phase) -> Vec<&'static str> {
    match phase {
        Phase::Mount => kinds_but_btrfs(phase),
        _ => kinds(phase),
    }
}

/// The file system of the other volumes. A btrfs whose mount hangs in a read has the kernel's
/// `uuid_mutex`, for which the mounts of all others wait.
fn kind_beside(kind: &'static str, phase: Phase) -> &'static str {
    match (kind, phase) {
        ("btrfs", Phase::Mount) => "ext4",
        _ => kind,
    }
}

fn one_or_every(phase: Phase, mut kinds: Vec<&'static str>) -> Vec<&'static str> {
    if !every_fs() {
        report_not_tested("only make test-matrix tests this; it sets EVERY_FS");
        return Vec::new();
    }
    kinds.retain(|kind| phase != Phase::Growth || *kind != "ext4" || can_resize_ext4());
    match env::var("EVERY_FS") {
        Ok(named) if kinds.contains(&&*named) => kinds.retain(|kind| *kind == named),
        Ok(_) => {}
        Err(_) => kinds = vec![kinds[Rng::new().below(kinds.len())]],
    }
    kinds
}

fn every_fs() -> bool {
    env::var_os("TEST_ALL").is_none() || env::var_os("EVERY_FS").is_some()
}

#[test]
fn hung_files_delay_only_their_own_volumes_at_the_probe() {
    hung_files(Phase::Probe);
}

#[test]
fn hung_files_delay_only_their_own_volumes_at_the_mount() {
    hung_files(Phase::Mount);
}

#[test]
fn hung_files_delay_only_their_own_volumes_in_use() {
    hung_files(Phase::Use);
}

#[test]
fn hung_files_delay_only_their_own_volumes_at_the_unmount() {
    hung_files(Phase::Unmount);
}

#[test]
fn hung_files_delay_only_their_own_volumes_at_growth() {
    hung_files(Phase::Growth);
}

/// The log lines about the volumes that hang.
#[test]
fn an_unread_log_delays_no_volume() {
    hung_files_on(Phase::Probe, async |sandbox| {
        let node = Node::start(sandbox).await;
        node.kill9().await;
        node.leave_log_unread();
        node.restart().await;
        (node, ())
    });
}

/// While they hold connections to `/metrics` open and send nothing.
#[test]
fn idle_metrics_clients_delay_no_volume() {
    hung_files_on(Phase::Unmount, async |sandbox| {
        let port = free_port();
        let listen = format!("--metrics-listen=127.0.0.1:{port}");
        let node = Node::start_with(sandbox, NodeSetup::new(sandbox).arg(&listen)).await;
        let idle = idle_clients(port, IDLE).await;
        (node, idle)
    });
}

fn hung_files(phase: Phase) {
    hung_files_on(phase, async |sandbox| (Node::start(sandbox).await, ()));
}

/// The same on a node with another fault, which lasts as long as `T`.
fn hung_files_on<T>(phase: Phase, start: impl AsyncFn(&Sandbox) -> (Node, T) + Sync) {
    if !StuckFile::possible() {
        return;
    }
    for kind in kinds_where_writes_hang(phase) {
        story(async |sandbox| {
            // Their mounts are there before the node.
            let fault = HungFiles::new(sandbox, kind);
            let (node, _besides) = start(sandbox).await;
            let others = healthy_volumes(sandbox, kind);
            assert_fault_isolated(&node, fault, &others, phase).await;
        });
    }
}

#[test]
fn a_hung_root_disk_delays_only_volumes_staged_on_it() {
    hung_directories(Phase::Stage, &[]);
}

#[test]
fn a_hung_root_disk_delays_only_volumes_published_on_it() {
    hung_directories(Phase::Publish, &["pod", "last"]);
}

#[test]
fn a_hung_root_disk_delays_only_volumes_unpublished_on_it() {
    hung_directories(Phase::Unpublish, &["pod", "last"]);
}

#[test]
fn a_hung_root_disk_delays_only_volumes_unstaged_on_it() {
    hung_directories(Phase::Unmount, &[]);
}

/// The directories of these pods are on the disk, and those where volumes are staged.
fn hung_directories(phase: Phase, pods: &[&str]) {
    if !StuckFile::possible() {
        return;
    }
    for kind in kinds(phase) {
        story(async |sandbox| {
            let mut node = Node::prepare(sandbox, NodeSetup::new(sandbox));
            let fault = HungDirectories::new(sandbox, &node, pods, kind);
            node.start_first().await;
            let others = healthy_volumes(sandbox, kind);
            assert_fault_isolated(&node, fault, &others, phase).await;
        });
    }
}

#[test]
fn a_hung_pool_delays_only_its_own_volumes_at_the_probe() {
    hung_pool_but_btrfs(Phase::Probe);
}

#[test]
fn a_hung_pool_delays_only_its_own_volumes_at_the_mount() {
    hung_pool_but_btrfs(Phase::Mount);
}

/// What the stage of a btrfs reads, the page cache has of the file below the disk.
fn hung_pool_but_btrfs(phase: Phase) {
    hung_pool_with(kinds_but_btrfs(phase), phase, HungPool::new);
}

#[test]
fn a_hung_pool_delays_only_its_own_volumes_in_use() {
    hung_pool(Phase::Use, HungPool::new);
}

#[test]
fn a_hung_pool_delays_only_its_own_volumes_at_the_unmount() {
    hung_pool(Phase::Unmount, HungPool::new);
}

#[test]
fn a_hung_pool_delays_only_its_own_volumes_at_growth() {
    hung_pool(Phase::Growth, HungPool::new);
}

#[test]
#[ignore = "takes device-mapper: make test-kernel"]
fn a_suspended_device_delays_only_its_own_volumes_at_the_probe() {
    hung_pool(Phase::Probe, HungPool::mapped);
}

#[test]
#[ignore = "takes device-mapper: make test-kernel"]
fn a_suspended_device_delays_only_its_own_volumes_at_the_mount() {
    hung_pool(Phase::Mount, HungPool::mapped);
}

#[test]
#[ignore = "takes device-mapper: make test-kernel"]
fn a_suspended_device_delays_only_its_own_volumes_in_use() {
    hung_pool(Phase::Use, HungPool::mapped);
}

#[test]
#[ignore = "takes device-mapper: make test-kernel"]
fn a_suspended_device_delays_only_its_own_volumes_at_the_unmount() {
    hung_pool(Phase::Unmount, HungPool::mapped);
}

#[test]
#[ignore = "takes device-mapper: make test-kernel"]
fn a_suspended_device_delays_only_its_own_volumes_at_growth() {
    hung_pool(Phase::Growth, HungPool::mapped);
}

fn hung_pool(phase: Phase, make: fn(&Sandbox, &str) -> HungPool) {
    hung_pool_with(kinds(phase), phase, make);
}

fn hung_pool_with(kinds: Vec<&'static str>, phase: Phase, make: fn(&Sandbox, &str) -> HungPool) {
    if !StuckFile::possible() {
        return;
    }
    for kind in kinds {
        story(async |sandbox| {
            let fault = make(sandbox, kind);
            let node = Node::start_with(sandbox, HungPool::setup(sandbox)).await;
            let others = healthy_volumes(sandbox, kind_beside(kind, phase));
            assert_fault_isolated(&node, fault, &others, phase).await;
        });
    }
}

#[test]
fn a_dead_server_delays_only_its_own_volumes_at_the_probe() {
    dead_server(Phase::Probe);
}

#[test]
fn a_dead_server_delays_only_its_own_volumes_at_the_mount() {
    dead_server(Phase::Mount);
}

#[test]
fn a_dead_server_delays_only_its_own_volumes_in_use() {
    dead_server(Phase::Use);
}

#[test]
fn a_dead_server_delays_only_its_own_volumes_at_the_unmount() {
    dead_server(Phase::Unmount);
}

#[test]
fn a_dead_server_delays_only_its_own_volumes_at_growth() {
    dead_server(Phase::Growth);
}

fn dead_server(phase: Phase) {
    if !kernel_has_nbd() {
        return;
    }
    let kinds = match phase {
        // The test kernel always has it.
        Phase::Unmount if !every_fs() => vec!["ext4"],
        _ => kinds_where_writes_hang(phase),
    };
    for kind in kinds {
        story(async |sandbox| {
            // As with hung files, there are mounts of its own.
            let fault = DeadServer::new(sandbox, kind, phase).await;
            let node = Node::start(sandbox).await;
            let others = healthy_volumes(sandbox, kind);
            assert_fault_isolated(&node, fault, &others, phase).await;
        });
    }
}

#[test]
fn a_dead_nfs_server_delays_only_its_own_volumes_at_the_mount() {
    dead_nfs_server(Phase::Mount);
}

#[test]
fn a_dead_nfs_server_delays_only_its_own_volumes_in_use() {
    dead_nfs_server(Phase::Use);
}

#[test]
fn a_dead_nfs_server_delays_only_its_own_volumes_at_the_unmount() {
    dead_nfs_server(Phase::Unmount);
}

/// Others are volumes of a live server, too.
fn dead_nfs_server(phase: Phase) {
    if !can_use_nfs() {
        return;
    }
    // The test kernel always has one, beside few others.
    let (all, kind) = match phase {
        Phase::Mount if !every_fs() => (16, "ext4"),
        _ => match kinds(phase).first() {
            Some(kind) => (HEALTHY, *kind),
            None => return,
        },
    };
    story(async |sandbox| {
        let fault = DeadNfsServer::new(sandbox).await;
        let live = NfsServer::start(sandbox, "live-server").await;
        let setup = NodeSetup::new(sandbox).arg("--nfs-unmount-timeout=1");
        let node = Node::start_with(sandbox, setup).await;
        let mut others = healthy_volumes(sandbox, kind);
        others.truncate(all / 2);
        others.extend((others.len()..all).map(|number| {
            let name = format!("healthy{number}");
            live.volume(&name, &name)
        }));
        assert_fault_isolated(&node, fault, &others, phase).await;
    });
}

#[test]
fn a_dead_osd_delays_only_its_own_volumes_at_the_map() {
    dead_osd(Phase::Probe);
}

#[test]
fn a_dead_osd_delays_only_its_own_volumes_at_the_mount() {
    dead_osd(Phase::Mount);
}

#[test]
fn a_dead_osd_delays_only_its_own_volumes_in_use() {
    dead_osd(Phase::Use);
}

#[test]
fn a_dead_osd_delays_only_its_own_volumes_at_the_unmount() {
    dead_osd(Phase::Unmount);
}

#[test]
fn a_dead_osd_delays_only_its_own_volumes_at_growth() {
    dead_osd(Phase::Growth);
}

fn dead_osd(phase: Phase) {
    for kind in kinds(phase) {
        own_cluster_story(async |sandbox, ceph| {
            let node = ceph.node(sandbox).await;
            let fault = DeadOsd::new(ceph, kind);
            let beside = kind_beside(kind, phase);
            let mut others = healthy_volumes(sandbox, beside);
            // The kernel's driver has locks that all clusters share.
            let other = Ceph::another(sandbox);
            others.truncate(HEALTHY - 4);
            others.extend((0..4).map(|_| other.volume(beside)));
            assert_fault_isolated(&node, fault, &others, phase).await;
        });
    }
}
