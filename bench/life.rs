//! A volume's life: stage, publish, unpublish, unstage.

use std::{fs, thread};

use criterion::Criterion;
use futures_util::future::join_all;
use uring_csi::mount::{bind, options::MountOptions, path::Roots, unmount};

use crate::{
    by_exec::ByExec,
    harness::{MIB, Node, Volume},
    rig::Rig,
};

const GIB: u64 = 1024 * MIB;

async fn whole_life(node: &Node, volume: &Volume) {
    node.up(volume, "pod").await;
    node.down(volume, "pod").await;
}

/// The first life of a blank image of 1 GiB, with mkfs.
pub fn first(criterion: &mut Criterion, rig: &Rig) {
    const CASE: &str = "life of a 1 GiB ext4, the first, with mkfs";
    let mut group = criterion.benchmark_group(CASE);
    group.sample_size(10);
    let volume = rig.sandbox.volume_in("main", "first", "ext4", GIB);
    let image = rig.sandbox.image(&volume);
    let blank = || {
        fs::File::create(&image)
            .and_then(|image| image.set_len(GIB))
            .expect("an image");
    };
    let life = || rig.runtime.block_on(whole_life(&rig.node, &volume));
    rig.measure_between(&mut group, CASE, "socket", blank, life, || {});
    let exec = ByExec::new(rig.sandbox.dir(), "first", GIB);
    let blank = || exec.blank(GIB);
    rig.measure_between(&mut group, CASE, "exec", blank, || exec.whole_life(), || {});
    group.finish();
}

/// The life of an image that is formatted already.
pub fn formatted(criterion: &mut Criterion, rig: &Rig) {
    const CASE: &str = "life of a 1 GiB ext4, formatted";
    let mut group = criterion.benchmark_group(CASE);
    let volume = rig.sandbox.volume_in("main", "again", "ext4", GIB);
    let life = || rig.runtime.block_on(whole_life(&rig.node, &volume));
    life();
    rig.measure(&mut group, CASE, "socket", life);
    let exec = ByExec::new(rig.sandbox.dir(), "again", GIB);
    exec.whole_life();
    rig.measure(&mut group, CASE, "exec", || exec.whole_life());
    group.finish();
}

/// 32 of them at once.
pub fn at_once(criterion: &mut Criterion, rig: &Rig) {
    const CASE: &str = "32 lives at once, formatted";
    let mut group = criterion.benchmark_group(CASE);
    group.sample_size(10);
    let volumes: Vec<_> = (0..32)
        .map(|n| {
            rig.sandbox
                .volume_in("main", &format!("many-{n}"), "ext4", GIB)
        })
        .collect();
    let lives = || {
        let lives = volumes.iter().map(|volume| whole_life(&rig.node, volume));
        rig.runtime.block_on(join_all(lives));
    };
    lives();
    rig.measure(&mut group, CASE, "socket", lives);
    let execs: Vec<_> = (0..32)
        .map(|n| ByExec::new(rig.sandbox.dir(), &format!("many-{n}"), GIB))
        .collect();
    let lives = || {
        // Each thread's children inherit this thread's mount namespace.
        thread::scope(|scope| {
            for exec in &execs {
                scope.spawn(|| exec.whole_life());
            }
        });
    };
    lives();
    rig.measure(&mut group, CASE, "exec", lives);
    group.finish();
}

/// Publish and unpublish alone.
pub fn publish(criterion: &mut Criterion, rig: &Rig) {
    const CASE: &str = "publish and unpublish";
    let mut group = criterion.benchmark_group(CASE);
    let volume = rig.sandbox.volume("publish", "ext4");
    rig.runtime
        .block_on(rig.node.stage(&volume))
        .expect("staged");
    rig.measure(&mut group, CASE, "socket", || {
        rig.runtime.block_on(async {
            rig.node.publish(&volume, "pod").await.expect("published");
            rig.node
                .unpublish(&volume, "pod")
                .await
                .expect("unpublished");
        });
    });

    let roots = Roots::new(std::slice::from_ref(&rig.node.kubelet)).expect("a root");
    let staging = rig.node.staging(&volume);
    let target = rig.node.target(&volume, "in-process");
    fs::create_dir_all(target.parent().expect("a parent")).expect("a directory");
    let place =
        |path: &std::path::Path| roots.place(path.to_str().expect("UTF-8")).expect("a place");
    let options = MountOptions::default();
    rig.measure(&mut group, CASE, "in process", || {
        let source = place(&staging).open().expect("a mount");
        let target = place(&target);
        let _ = target.make_dir(0o750).expect("a directory");
        bind::bind(std::os::fd::AsFd::as_fd(&source), &target, &options, false).expect("bound");
        drop(source);
        let _ = unmount::unmount(&target).expect("unmounted");
        let _ = target.remove().expect("removed");
    });
    rig.runtime
        .block_on(rig.node.unstage(&volume))
        .expect("unstaged");

    let exec = ByExec::new(rig.sandbox.dir(), "publish", 64 * MIB);
    let device = exec.stage();
    rig.measure(&mut group, CASE, "exec", || {
        exec.publish();
        exec.unpublish();
    });
    exec.unstage(&device);
    group.finish();
}
