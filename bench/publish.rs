//! Publish and unpublish alone.

use std::{fs, os::fd::AsFd as _, path::Path, slice};

use criterion::Criterion;
use uring_csi::internals::{MountOptions, Roots, bind, unmount};

use crate::{backends::Backend, rig::Rig};

/// Of a volume that is staged.
pub fn publish(criterion: &mut Criterion, rig: &Rig, over: &dyn Backend) {
    const CASE: &str = "publish and unpublish";
    let mut group = criterion.benchmark_group(CASE);
    let volume = over.volume("publish", "ext4");
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
    rig.measure(&mut group, CASE, "in process", || {
        let source = place(&staging).open().expect("a mount");
        let target = place(&target);
        let _ = target.make_dir(0o750).expect("a directory");
        bind::bind(source.as_fd(), &target, &options, false).expect("bound");
        drop(source);
        let _ = unmount::unmount(&target).expect("unmounted");
        let _ = target.remove().expect("removed");
    });
    rig.runtime
        .block_on(rig.node.unstage(&volume))
        .expect("unstaged");

    if let Some(bare) = over.bare("publish") {
        let device = bare.stage();
        rig.measure(&mut group, CASE, "bare", || {
            bare.publish();
            bare.unpublish();
        });
        bare.unstage(&device);
    }

    let exec = over.exec("publish-exec", "ext4");
    let device = exec.stage();
    rig.measure(&mut group, CASE, "exec", || {
        exec.publish(&device);
        exec.unpublish();
    });
    exec.unstage(&device);
    group.finish();
}
