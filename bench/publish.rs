//! Publish and unpublish alone.

use std::{fs, os::fd::AsFd as _, path::Path, slice};

use criterion::Criterion;
use testkit::BareContent;
use uring_csi::internals::{MountOptions, Roots, bind, unmount};

use crate::{
    backends::{Backend, SIZE},
    rig::{Rig, timed},
};

/// Of a volume that is staged.
pub fn publish(criterion: &mut Criterion, rig: &Rig, over: &dyn Backend) {
    const CASE: &str = "publish and unpublish";
    let mut group = criterion.benchmark_group(CASE);
    let volume = over.volume("publish", "ext4");
    rig.runtime
        .block_on(rig.node.stage(&volume))
        .expect("staged");
    let by_socket = || {
        rig.runtime.block_on(async {
            rig.node.publish(&volume, "pod").await.expect("published");
            rig.node
                .unpublish(&volume, "pod")
                .await
                .expect("unpublished");
        });
    };
    rig.measure(&mut group, CASE, "socket", by_socket);

    let roots = Roots::new(slice::from_ref(&rig.node.kubelet)).expect("a root");
    let staging = rig.node.staging(&volume);
    let target = rig.node.target(&volume, "in-process");
    fs::create_dir_all(target.parent().expect("a parent")).expect("a directory");
    let place = |path: &Path| {
        roots
            .resolve(path.to_str().expect("UTF-8"))
            .expect("a place")
    };
    let options = MountOptions::default();
    let in_process = || {
        let source = place(&staging).open().expect("a mount");
        let target = place(&target);
        let _ = target.make_dir(0o750).expect("a directory");
        bind::bind(source.as_fd(), true, &target, &options, false).expect("bound");
        drop(source);
        let _ = unmount::unmount(&target).expect("unmounted");
        let _ = target.remove().expect("removed");
    };
    rig.measure(&mut group, CASE, "in process", in_process);

    let bare = over.bare("publish", SIZE, BareContent::Ext4);
    let device = bare.stage();
    let by_bare_calls = || {
        bare.publish(&device);
        bare.unpublish();
    };
    rig.measure(&mut group, CASE, "bare", by_bare_calls);
    let (ours, bare_time) = (|| timed(by_socket), || timed(by_bare_calls));
    rig.compare(CASE, ours, bare_time);
    let ours = || timed(in_process);
    rig.compare("publish and unpublish, in process", ours, bare_time);
    bare.unstage(&device);
    rig.runtime
        .block_on(rig.node.unstage(&volume))
        .expect("unstaged");

    let exec = over.exec("publish-exec", "ext4");
    let device = exec.stage();
    rig.measure(&mut group, CASE, "exec", || {
        exec.publish(&device);
        exec.unpublish();
    });
    exec.unstage(&device);
    group.finish();
}
