//! How long the I/O of a volume waits for the rbd-nbd that replaces a killed one.

use std::{
    cell::{Cell, RefCell},
    fs::File,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
};

use criterion::{Criterion, SamplingMode};
use testkit::{Node, Sandbox, Supervisor, Volume};

use crate::{
    backends::Backend,
    ceph::{Ceph, CephImages},
    rig::Rig,
};

/// A write to a raw volume, from the kill of its daemon on. Each is to a volume of its own, for a
/// supervisor replaces a daemon that dies again only later. Where a client has the image's
/// exclusive lock, it must be fenced first.
pub fn daemon(criterion: &mut Criterion, rig: &Rig, ceph: &Ceph) {
    let sandbox = Sandbox::new();
    let supervisor = rig.runtime.block_on(Supervisor::start(&sandbox));
    let socket = supervisor.socket().display().to_string();
    let setup = ceph.node(&sandbox).arg("--holder").arg(&socket);
    let node = rig.runtime.block_on(Node::start_with(&sandbox, setup));
    let images = CephImages {
        ceph,
        sandbox: &sandbox,
    };
    let made = Cell::new(0);
    for (what, features) in [
        ("without a lock", "layering"),
        ("with exclusive-lock", "layering,exclusive-lock"),
    ] {
        let case = format!("RBD: a write to a killed rbd-nbd, {what}");
        let mut group = criterion.benchmark_group(&case);
        group.sample_size(10).sampling_mode(SamplingMode::Flat);
        let in_use: RefCell<Option<(Volume, File)>> = RefCell::default();
        let up = || {
            made.set(made.get() + 1);
            let name = format!("killed-{}", made.get());
            let volume = images
                .volume(&name, "block")
                .with("mounter", "rbd-nbd")
                .with("imageFeatures", features);
            if features.contains("lock") {
                let image = format!("{}/{name}", ceph.cluster.pool);
                ceph.cluster
                    .rbd(&["feature", "enable", &image, "exclusive-lock"]);
            }
            let target = rig.runtime.block_on(node.up(&volume, "pod"));
            let device = File::options()
                .write(true)
                .custom_flags(libc::O_DSYNC)
                .open(target)
                .expect("the device");
            // Takes the lock.
            device.write_all_at(&[1; 4096], 0).expect("a write");
            in_use.replace(Some((volume, device)));
        };
        let write = || {
            let in_use = in_use.borrow();
            let (volume, device) = in_use.as_ref().expect("a volume");
            rig.runtime.block_on(supervisor.kill_daemon(volume));
            device.write_all_at(&[2; 4096], 0).expect("a write");
        };
        let down = || {
            let (volume, device) = in_use.take().expect("a volume");
            drop(device);
            rig.runtime
                .block_on(node.retry_until_down(&volume, &["pod"]));
        };
        rig.measure_between(&mut group, &case, "socket", up, write, down);
        group.finish();
    }
}
