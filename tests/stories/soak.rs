//! Many concurrent callers, for long, with and without SIGKILLs: after any order of calls
//! nothing is left behind and no data is lost.

use std::cell::Cell;

use futures_util::future::join_all;
use testkit::{
    Content, MIB, NbdServer, NfsServer, Node, Rng, Sandbox, Volume, can_use_nfs, ceph_story,
    kernel_has_nbd, story,
};
use tonic::{Code, Status};

const CALLERS: usize = 64;
const VOLUMES: usize = 32;
const PODS: [&str; 2] = ["one", "two"];

/// The number of calls; `SOAK_OPERATIONS` makes it minutes' worth.
fn operations() -> usize {
    std::env::var("SOAK_OPERATIONS")
        .ok()
        .and_then(|count| count.parse().ok())
        .unwrap_or(1500)
}

#[test]
fn many_callers_leave_nothing_behind() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        soak(&node, &images(sandbox), None).await;
    });
}

#[test]
fn many_callers_and_kills_leave_nothing_behind() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        soak_with_kills(&node, &images(sandbox)).await;
    });
}

fn images(sandbox: &Sandbox) -> Vec<Volume> {
    volumes(|number, kind| sandbox.volume_in("main", &format!("v{number}"), kind, 16 * MIB))
}

#[test]
fn nbd_exports_outlive_many_callers_and_kills() {
    if !kernel_has_nbd() {
        return;
    }
    story(async |sandbox| {
        let server = NbdServer::start(sandbox).await;
        let node = Node::start(sandbox).await;
        let exports = volumes(|number, kind| {
            let name = format!("soak-{number}");
            NbdServer::image(sandbox, &name, 16 * MIB);
            server.over(match kind {
                "block" => Volume::block(&name),
                kind => Volume::filesystem(&name, kind),
            })
        });
        soak_with_kills(&node, &exports).await;
    });
}

#[test]
fn nfs_directories_outlive_many_callers_and_kills() {
    if !can_use_nfs() {
        return;
    }
    story(async |sandbox| {
        let server = NfsServer::start(sandbox, "server").await;
        let node = Node::start(sandbox).await;
        let directories = volumes(|number, _| {
            let name = format!("soak-{number}");
            server.volume(&name, &name)
        });
        soak_with_kills(&node, &directories).await;
    });
}

#[test]
fn rbd_images_outlive_many_callers_and_kills() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let images = volumes(|_, kind| ceph.volume_of(kind, 16 * MIB, &[]));
        soak_with_kills(&node, &images).await;
    });
}

/// Of their numbers and kinds.
fn volumes(make: impl Fn(usize, &str) -> Volume) -> Vec<Volume> {
    let kind = |number| if number % 4 == 0 { "block" } else { "ext4" };
    (0..VOLUMES)
        .map(|number| make(number, kind(number)))
        .collect()
}

async fn soak_with_kills(node: &Node, volumes: &[Volume]) {
    soak(node, volumes, Some(operations() / 6)).await;
}

async fn soak(node: &Node, volumes: &[Volume], between_kills: Option<usize>) {
    let mut rng = Rng::new();
    let content = Content::new("soak");
    join_all(volumes.iter().map(async |volume| {
        let target = node.up(volume, "first").await;
        if volume.is_block() {
            content.write_at(&target, 0).unwrap();
        } else {
            content.write(&target.join("file"));
        }
        node.down(volume, "first").await;
    }))
    .await;

    let left = Cell::new(operations());
    let callers = (0..CALLERS).map(|_| {
        let mut rng = rng.fork();
        let left = &left;
        async move {
            while let Some(fewer) = left.get().checked_sub(1) {
                left.set(fewer);
                let volume = &volumes[rng.below(VOLUMES)];
                let pod = PODS[rng.below(PODS.len())];
                let outcome = one_call(node, volume, pod, rng.below(6)).await;
                assert_expected(outcome, between_kills.is_some());
            }
        }
    });
    let killer = async {
        while let Some(between_kills) = between_kills {
            let next = left.get().saturating_sub(between_kills);
            if next == 0 {
                break;
            }
            while left.get() > next {
                tokio::task::yield_now().await;
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
            node.kill9().await;
            node.restart().await;
        }
    };
    tokio::join!(join_all(callers), killer);

    // Every volume has its first content, and can be unstaged.
    join_all(volumes.iter().map(async |volume| {
        node.retry_until_ok("staged", async || node.stage(volume).await)
            .await;
        node.retry_until_ok("published", async || node.publish(volume, "last").await)
            .await;
        let target = node.target(volume, "last");
        if volume.is_block() {
            content.assert_at(&target, 0);
        } else {
            content.assert_in(&target.join("file"));
        }
        let [one, two] = PODS;
        node.retry_until_down(volume, &[one, two, "last"]).await;
    }))
    .await;
    node.assert_clean().await;
}

async fn one_call(node: &Node, volume: &Volume, pod: &str, verb: usize) -> Result<(), Status> {
    match verb {
        0 => node.stage(volume).await,
        1 | 2 => node.publish(volume, pod).await,
        3 => node.unpublish(volume, pod).await,
        4 => node.unstage(volume).await,
        _ => {
            let target = node.target(volume, pod);
            node.stats(volume, &target).await.map(drop)
        }
    }
}

/// Calls in any order meet volumes in any state: not staged, in use, busy with
/// another call. Any other code is a fault.
fn assert_expected(outcome: Result<(), Status>, killed: bool) {
    let Err(status) = outcome else { return };
    let by_order = [Code::Aborted, Code::FailedPrecondition, Code::NotFound];
    // The connection broke, or no agent listened.
    let by_kill = [
        Code::Unavailable,
        Code::Unknown,
        Code::Cancelled,
        Code::Internal,
    ];
    let broken = killed && by_kill.contains(&status.code());
    assert!(by_order.contains(&status.code()) || broken, "{status:?}");
}
