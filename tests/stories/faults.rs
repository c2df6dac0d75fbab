//! What a dead thing holds up: the eight volumes that stand on it, for as long as it
//! is dead. Meanwhile 56 others live whole lives, an hour's worth of kubelet's calls to
//! the eight takes no more of the machine than the first of them did, and when the
//! thing comes back all ends well.
//!
//! Each story has one file system by turns; with `EVERY_FS` set, each has all three.

use std::{cell::Cell, env, net::TcpStream, time::Duration};

use futures_util::future::{join_all, try_join_all};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tonic::{Code, Status};
use uuid::Uuid;

use crate::{
    harness::{
        Ceph, Content, DeadOsd, DeadServer, Dice, Fault, Footprint, HungDirectories, HungFiles,
        HungPool, Moment, Node, NodeSetup, Sandbox, StuckFile, Volume, bytes_for, can_resize_ext4,
        eventually, kernel_has_nbd, lonely_ceph_story, run, story,
    },
    telling::free_port,
};

/// With the eight that are hurt, 64.
const HEALTHY: usize = 56;
/// Clients that connect and say nothing.
const IDLE: usize = 2000;
/// Of each call to a volume in an hour: kubelet doubles its pauses up to two minutes.
const HOURLY: usize = 40;
/// So many of those at a time, which is how the hour passes in seconds.
const AT_ONCE: usize = 8;
/// Kubelet's two minutes, likewise.
const DEADLINE: Duration = Duration::from_secs(1);

/// What later calls may take beyond the first: lanes that wait for work, connections
/// that are just being closed, and what the allocator keeps.
const ROOM: Footprint = Footprint {
    threads: 16,
    descriptors: 32,
    memory_kib: 16 << 10,
};
/// Within which what ends has ended.
const SETTLED: Duration = Duration::from_secs(60);

/// The file systems to tell a story on: none where it is not told.
fn kinds(moment: Moment) -> Vec<&'static str> {
    if !is_told() {
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

/// Whether a story is told here. In the test kernel, where each takes minutes beside
/// others, they are told in `make test-matrix` alone, which sets `EVERY_FS`.
fn is_told() -> bool {
    let in_test_kernel = env::var_os("TEST_ALL").is_some();
    let is_told = !in_test_kernel || env::var_os("EVERY_FS").is_some();
    if !is_told {
        println!("told in make test-matrix");
    }
    is_told
}

/// Blank images in pool `main`. Those for XFS have been formatted: its log takes
/// 64 MiB in each, but of copies nothing is there.
fn healthy(sandbox: &Sandbox, kind: &str) -> Vec<Volume> {
    let volumes: Vec<_> = (0..HEALTHY)
        .map(|number| sandbox.volume_in("main", &format!("healthy{number}"), kind, bytes_for(kind)))
        .collect();
    if kind == "xfs" {
        let template = sandbox.image(&volumes[0]).display().to_string();
        run(&["mkfs.xfs", "-q", &template]);
        run(&["fallocate", "--dig-holes", &template]);
        for volume in &volumes[1..] {
            let image = sandbox.image(volume).display().to_string();
            run(&["cp", "--sparse=always", &template, &image]);
        }
    }
    volumes
}

/// A whole life of each of them, at once, with kubelet's own deadlines.
async fn all_live(node: &Node, volumes: &[Volume]) {
    join_all(volumes.iter().map(async |volume| {
        again(node, "staged", async || node.stage(volume).await).await;
        again(node, "published", async || {
            node.publish(volume, "pod").await
        })
        .await;
        let target = node.target(volume, "pod");
        std::fs::write(target.join("file"), &volume.handle).expect("a write");
        let usage = node.stats(volume, &target).await.expect("stats");
        assert!(!usage.is_empty());
        again(node, "unpublished", async || {
            node.unpublish(volume, "pod").await
        })
        .await;
        again(node, "unstaged", async || node.unstage(volume).await).await;
    }))
    .await;
    // One of which there is no record, but whose handle names its pool.
    let handle = format!("vol.shared.main.{}", Uuid::new_v4());
    let unknown = Volume::filesystem(&handle, "ext4");
    node.unstage(&unknown).await.expect("unstaged");
}

/// As kubelet, which comes back after ABORTED: where 56 volumes share one slow
/// processor, the children that other calls begin keep a device busy for longer than
/// the agent waits.
async fn again(node: &Node, what: &str, mut call: impl AsyncFnMut() -> Result<(), Status>) {
    node.until_ok(what, async || match call().await {
        Err(status) if status.code() != Code::Aborted => panic!("{what}: {status:?}"),
        answer => answer,
    })
    .await;
}

/// One of kubelet's calls to a hurt volume.
async fn call(node: &Node, volume: &Volume, moment: Moment) -> Result<(), Status> {
    let target = node.target(volume, "pod");
    match moment {
        Moment::Probe | Moment::Mount => node.within(DEADLINE, node.stage(volume)).await,
        Moment::Publish => {
            let publish = node.publish_again(volume, "pod");
            node.within(DEADLINE, publish).await
        }
        Moment::Unpublish => node.within(DEADLINE, node.unpublish(volume, "pod")).await,
        Moment::Use => {
            let usage = node.stats(volume, &target).await;
            usage.expect("stats wait for no device");
            let health = node.health(volume, &target).await;
            health.expect("health waits for no device");
            // As after a restart of kubelet.
            node.within(DEADLINE, node.stage(volume)).await?;
            node.within(DEADLINE, node.publish(volume, "pod")).await
        }
        Moment::Unmount => {
            node.within(DEADLINE, node.unpublish(volume, "pod")).await?;
            node.within(DEADLINE, node.unstage(volume)).await
        }
        Moment::Growth => {
            let bytes = 2 * bytes_for(volume.fs_type());
            let growth = node.expand(volume, &target, bytes);
            node.within(DEADLINE, growth).await.map(drop)
        }
    }
}

/// So many calls to each volume of the fault, none of which may be told anything final
/// while it is dead.
async fn calls(node: &Node, fault: &impl Fault, moment: Moment, many: usize) {
    let one = async |volume: &Volume| {
        let Err(status) = call(node, volume, moment).await else {
            assert_eq!(moment, Moment::Use, "its device does not answer");
            return Ok(());
        };
        let uncertain = [
            Code::Aborted,
            Code::Unavailable,
            Code::DeadlineExceeded,
            // The caller's own end of its waiting.
            Code::Cancelled,
        ];
        let is_so = uncertain.contains(&status.code());
        is_so.then_some(()).ok_or(status)
    };
    for _ in 0..many.div_ceil(AT_ONCE) {
        let volumes = fault.hurt().iter();
        let at_once = volumes.flat_map(|volume| (0..AT_ONCE).map(move |_| volume));
        let answers = try_join_all(at_once.map(one)).await;
        answers.expect("an answer that is not final");
    }
}

/// The story of a fault, told of a node that is up. However it ends, the fault does
/// first: the node's agent is waited for, which hangs with what it has on its devices.
async fn hurts_its_own_volumes_alone(
    node: &Node,
    mut fault: impl Fault,
    others: &[Volume],
    moment: Moment,
) {
    let hurt = fault.hurt().to_vec();
    // All live, and are formatted where they were blank.
    let kept = Content::new("kept");
    tokio::join!(
        all_live(node, others),
        join_all(hurt.iter().map(async |volume| {
            let target = node.up(volume, "pod").await;
            kept.write(&target.join("kept"));
            match moment {
                Moment::Probe | Moment::Mount => node.down(volume, "pod").await,
                Moment::Publish => node.unpublish(volume, "pod").await.expect("unpublished"),
                _ => {}
            }
        }))
    );
    for volume in &hurt {
        if moment == Moment::Growth {
            fault.grow(volume, 2 * bytes_for(volume.fs_type()));
        }
        if moment == Moment::Unmount {
            // Which is written when it is unmounted.
            std::fs::write(node.target(volume, "pod").join("late"), "late").expect("a write");
        }
    }
    fault.stop(moment).await;

    calls(node, &fault, moment, AT_ONCE).await;
    fault.meanwhile(moment).await;
    tokio::join!(calls(node, &fault, moment, AT_ONCE), all_live(node, others));
    let first = Footprint::of(node.pid());
    tokio::join!(
        calls(node, &fault, moment, HOURLY - 2 * AT_ONCE),
        all_live(node, others)
    );
    let last = Cell::new(first);
    let is_within = async || {
        last.set(Footprint::of(node.pid()));
        last.get().is_within(&first, &ROOM).then_some(())
    };
    tokio::time::timeout(SETTLED, eventually("it settles", is_within))
        .await
        .unwrap_or_else(|_| panic!("an hour's calls took {first:?} to {:?}", last.get()));
    println!("{moment:?}: {first:?} to {:?}", last.get());
    assert_eq!(node.probe().await, Some(true));

    fault.resume().await;
    join_all(hurt.iter().map(async |volume| {
        node.until_ok("what it waited for", async || {
            call(node, volume, moment).await
        })
        .await;
        node.until_ok("staged", async || node.stage(volume).await)
            .await;
        node.until_ok("published", async || node.publish(volume, "last").await)
            .await;
        kept.is_in(&node.target(volume, "last").join("kept"));
        for pod in ["pod", "last"] {
            node.until_ok("unpublished", async || node.unpublish(volume, pod).await)
                .await;
        }
        node.until_ok("unstaged", async || node.unstage(volume).await)
            .await;
    }))
    .await;
    node.assert_clean().await;
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
#[ignore = "takes device-mapper: make test-kernel"]
fn a_suspended_device_holds_up_its_own_volumes_at_the_probe() {
    hung_pool(Moment::Probe, HungPool::mapped);
}

#[test]
#[ignore = "takes device-mapper: make test-kernel"]
fn a_suspended_device_holds_up_its_own_volumes_at_the_unmount() {
    hung_pool(Moment::Unmount, HungPool::mapped);
}

fn hung_pool(moment: Moment, make: fn(&Sandbox, &str) -> HungPool) {
    if !StuckFile::possible() {
        return;
    }
    for kind in kinds(moment) {
        story(async |sandbox| {
            let fault = make(sandbox, kind);
            let mut setup = NodeSetup::new(sandbox);
            let pool = sandbox.pool(HungPool::NAME);
            setup
                .pools
                .push(format!("{}={},shared", HungPool::NAME, pool.display()));
            let node = Node::start_with(sandbox, setup).await;
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
    for kind in kinds(moment) {
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
