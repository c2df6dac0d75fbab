//! From a source to a device that is ready.

use std::{cell::Cell, time::Duration};

use criterion::{BenchmarkGroup, Criterion, measurement::WallTime};
use uring_csi::internals::{LinkOptions, Links};

use crate::{
    backends::{Backend, Exports, SIZE},
    rig::{Rig, timed},
};

/// An export, in process, too.
pub fn export(criterion: &mut Criterion, rig: &Rig, over: &Exports<'_>) {
    attach(criterion, rig, over, "an export", |group, case| {
        let links = Links::new("bench");
        let export = over.export("map");
        let identifier = links.identifier(&export, "map");
        let options = LinkOptions {
            connections: 2,
            request_seconds: 30,
            dead_seconds: 300,
            minimum_bytes: 0,
        };
        let device = Cell::new(None);
        let up = || {
            let (attached, _) = links
                .attach(&identifier, false, &options)
                .expect("attached");
            device.set(Some(attached));
        };
        let down = || {
            let device = device.take().expect("a device");
            let _ = links.detach(&identifier, &device.block).expect("detached");
        };
        rig.measure_between(group, case, "in process", || {}, up, down);
    });
}

/// An image.
pub fn image(criterion: &mut Criterion, rig: &Rig, over: &dyn Backend) {
    attach(criterion, rig, over, "an image", |_, _| {});
}

/// Attach alone; detaching is not timed.
fn attach(
    criterion: &mut Criterion,
    rig: &Rig,
    over: &dyn Backend,
    source: &str,
    in_process: impl FnOnce(&mut BenchmarkGroup<'_, WallTime>, &str),
) {
    let case = over.title(&format!("from {source} to a device"));
    let mut group = criterion.benchmark_group(&case);
    let Rig { runtime, node, .. } = rig;
    let volume = over.volume("map", "block");
    let stage = || runtime.block_on(node.stage(&volume)).expect("staged");
    let unstage = || runtime.block_on(node.unstage(&volume)).expect("unstaged");
    rig.measure_between(&mut group, &case, "socket", || {}, stage, unstage);
    in_process(&mut group, &case);

    let bare = over.bare_device("map", SIZE);
    let node = Cell::new(None);
    let up = || node.set(Some(bare.attach()));
    let down = || bare.detach(&node.take().expect("a device"));
    rig.measure_between(&mut group, &case, "bare", || {}, up, down);
    let first = |up: &dyn Fn(), down: &dyn Fn()| -> Duration {
        let took = timed(up);
        down();
        took
    };
    // Beside udevd, whose look at what was detached falls into the next attach, the ratio says
    // nothing.
    if !rig.guards_ratios() {
        rig.compare(&case, || first(&stage, &unstage), || first(&up, &down));
    }

    let exec = over.exec("map-exec", "block");
    let device = Cell::new(None);
    let up = || device.set(Some(exec.attach()));
    let down = || exec.detach(&device.take().expect("a device"));
    rig.measure_between(&mut group, &case, "exec", || {}, up, down);
    group.finish();
}
