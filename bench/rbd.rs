//! Stage and unstage of Ceph images, beside the bare calls and programs.

use std::cell::RefCell;

use criterion::Criterion;
use futures_util::future::join_all;

use crate::{
    backends::Backend,
    by_exec::ByExec,
    ceph::{Bare, CephImages},
    life::on_threads,
    rig::Rig,
};

/// Of so many formatted ext4 volumes at once.
pub fn stage(criterion: &mut Criterion, rig: &Rig, over: &CephImages<'_>, many: usize) {
    let case = over.title(&format!(
        "stage and unstage of a formatted ext4, {many} at once"
    ));
    let mut group = criterion.benchmark_group(&case);
    group.sample_size(10);
    let Rig { runtime, node, .. } = rig;
    let names: Vec<_> = (0..many).map(|n| format!("stage-{many}-{n}")).collect();
    let volumes: Vec<_> = names.iter().map(|name| over.volume(name, "ext4")).collect();
    let up = || {
        let stages = volumes.iter().map(|volume| node.stage(volume));
        for staged in runtime.block_on(join_all(stages)) {
            staged.expect("staged");
        }
    };
    let down = || {
        let unstages = volumes.iter().map(|volume| node.unstage(volume));
        for unstaged in runtime.block_on(join_all(unstages)) {
            unstaged.expect("unstaged");
        }
    };
    // Makes the file systems.
    up();
    down();
    rig.measure_life(&mut group, &case, "socket", || {}, up, down);

    let bares: Vec<_> = names.iter().map(|name| Bare::new(over, name)).collect();
    let up = || drop(on_threads(bares.iter(), Bare::up));
    let down = || drop(on_threads(bares.iter(), Bare::down));
    rig.measure_life(&mut group, &case, "bare calls", || {}, up, down);

    let exec = |name: &String| over.exec(&format!("{name}-exec"), "ext4");
    let execs: Vec<_> = names.iter().map(exec).collect();
    let devices = RefCell::default();
    let up = || *devices.borrow_mut() = on_threads(execs.iter(), ByExec::stage);
    let down = || {
        let devices: Vec<String> = devices.take();
        on_threads(execs.iter().zip(&devices), |(exec, device)| {
            exec.unstage(device);
        });
    };
    up();
    down();
    rig.measure_life(&mut group, &case, "exec", || {}, up, down);
    group.finish();
}
