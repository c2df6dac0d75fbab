//! A volume's life: stage, publish, unpublish, unstage.

use std::{cell::RefCell, path::PathBuf, thread, time::Duration};

use criterion::Criterion;
use futures_util::future::join_all;
use testkit::{BareContent, BareVolume, Volume};

use crate::{
    backends::{Backend, SIZE},
    by_exec::ByExec,
    rig::Rig,
};

/// The first life of a blank volume of 1 GiB, with mkfs.
pub fn first(criterion: &mut Criterion, rig: &Rig, over: &dyn Backend) {
    let case = over.title("life of a 1 GiB ext4, the first, with mkfs");
    let mut lives = Lives::new(rig, over, "first", "ext4", 1).with_bare(over, BareContent::Blank);
    lives.blanked_by = Some(over);
    lives.measure(criterion, &case, 10);
    lives.compare_with_bare(&case);
}

/// The life of a volume that is formatted already.
pub fn formatted<'a>(criterion: &mut Criterion, rig: &'a Rig, over: &dyn Backend) -> Lives<'a> {
    let case = over.title("life of a 1 GiB ext4, formatted");
    let lives = Lives::new(rig, over, "again", "ext4", 1).formatted(over);
    lives.measure(criterion, &case, 20);
    lives.compare_with_bare(&case);
    lives
}

/// Many of them at once.
pub fn at_once<'a>(
    criterion: &mut Criterion,
    rig: &'a Rig,
    over: &dyn Backend,
    many: usize,
) -> Lives<'a> {
    let case = over.title(&format!("{many} lives at once, formatted"));
    let lives = Lives::new(rig, over, "many", "ext4", many).formatted(over);
    lives.measure(criterion, &case, 10);
    lives.compare_with_bare(&case);
    lives
}

/// The life of a raw block device.
pub fn raw(criterion: &mut Criterion, rig: &Rig, over: &dyn Backend) {
    let case = over.title("life of a raw block device");
    let lives = Lives::new(rig, over, "raw", "block", 1).with_bare(over, BareContent::Raw);
    lives.measure(criterion, &case, 20);
    lives.compare_with_bare(&case);
}

/// Volumes that live at once, and their like for the programs.
pub struct Lives<'a> {
    rig: &'a Rig,
    volumes: Vec<Volume>,
    bares: Vec<BareVolume>,
    execs: Vec<ByExec>,
    /// Where the programs' are attached.
    devices: RefCell<Vec<String>>,
    /// Where the bare ones are.
    nodes: RefCell<Vec<PathBuf>>,
    /// What makes the volumes blank before each life; none if they stay formatted.
    blanked_by: Option<&'a dyn Backend>,
}

impl<'a> Lives<'a> {
    fn new(rig: &'a Rig, over: &dyn Backend, name: &str, fs_type: &str, many: usize) -> Self {
        let numbered = |kind| (0..many).map(move |n| format!("{name}-{kind}-{n}"));
        Self {
            rig,
            volumes: numbered("socket")
                .map(|name| over.volume(&name, fs_type))
                .collect(),
            bares: Vec::new(),
            execs: numbered("exec")
                .map(|name| over.exec(&name, fs_type))
                .collect(),
            devices: RefCell::default(),
            nodes: RefCell::default(),
            blanked_by: None,
        }
    }

    fn with_bare(mut self, over: &dyn Backend, content: BareContent) -> Self {
        let bare = |exec: &ByExec| over.bare(&exec.name, SIZE, content);
        self.bares = self.execs.iter().map(bare).collect();
        self
    }

    /// After a first life.
    fn formatted(self, over: &dyn Backend) -> Self {
        let lives = self.with_bare(over, BareContent::Ext4);
        lives.up_by_socket();
        lives.down_by_socket();
        lives.up_by_exec();
        lives.down_by_exec();
        lives
    }

    fn measure(&self, criterion: &mut Criterion, case: &str, samples: usize) {
        let mut group = criterion.benchmark_group(case);
        group.sample_size(samples);
        self.rig.measure_life(
            &mut group,
            case,
            "socket",
            || self.blank_for_socket(),
            || self.up_by_socket(),
            || self.down_by_socket(),
        );
        self.rig.measure_life(
            &mut group,
            case,
            "bare",
            || self.blank_for_bare(),
            || self.up_bare(),
            || self.down_bare(),
        );
        self.rig.measure_life(
            &mut group,
            case,
            "exec",
            || self.blank(self.execs.iter().map(|exec| &exec.name)),
            || self.up_by_exec(),
            || self.down_by_exec(),
        );
        group.finish();
    }

    fn blank<'n>(&self, names: impl Iterator<Item = &'n String>) {
        if let Some(over) = self.blanked_by {
            names.for_each(|name| over.blank(name, SIZE));
        }
    }

    fn blank_for_socket(&self) {
        self.blank(self.volumes.iter().map(|volume| &volume.handle));
    }

    fn blank_for_bare(&self) {
        if let Some(over) = self.blanked_by {
            // Made anew, it is blank.
            self.execs
                .iter()
                .for_each(|exec| drop(over.bare_device(&exec.name, SIZE)));
        }
    }

    fn compare_with_bare(&self, case: &str) {
        let by_socket = || {
            self.blank_for_socket();
            self.time_by_socket()
        };
        let bare = || {
            self.blank_for_bare();
            self.rig
                .time_of_life(|| self.up_bare(), || self.down_bare())
        };
        self.rig.compare(case, by_socket, bare);
    }

    /// Compares with the bare calls and as many empty calls, on new connections, as a life
    /// has: what of the difference to the bare calls is not gRPC's. CI guards the ratio to
    /// the bare calls alone.
    pub fn compare_with_calls(&self, case: &str) {
        if self.rig.guards_ratios() {
            return;
        }
        let two_calls = || {
            for _ in 0..2 {
                let calls = self.volumes.iter().map(|_| self.rig.call_for_nothing());
                self.rig.runtime.block_on(join_all(calls));
            }
        };
        let up = || {
            self.up_bare();
            two_calls();
        };
        let down = || {
            self.down_bare();
            two_calls();
        };
        self.rig.compare(
            case,
            || self.time_by_socket(),
            || self.rig.time_of_life(up, down),
        );
    }

    fn time_by_socket(&self) -> Duration {
        self.rig
            .time_of_life(|| self.up_by_socket(), || self.down_by_socket())
    }

    fn up_by_socket(&self) {
        let node = &self.rig.node;
        let ups = self.volumes.iter().map(|volume| node.up(volume, "pod"));
        self.rig.runtime.block_on(join_all(ups));
    }

    fn down_by_socket(&self) {
        let node = &self.rig.node;
        let downs = self.volumes.iter().map(|volume| node.down(volume, "pod"));
        self.rig.runtime.block_on(join_all(downs));
    }

    fn up_bare(&self) {
        *self.nodes.borrow_mut() = on_threads(self.bares.iter(), BareVolume::up);
    }

    fn down_bare(&self) {
        let nodes = self.nodes.take();
        on_threads(self.bares.iter().zip(&nodes), |(bare, node)| {
            bare.down(node);
        });
    }

    fn up_by_exec(&self) {
        *self.devices.borrow_mut() = on_threads(self.execs.iter(), |exec| {
            let device = exec.stage();
            exec.publish(&device);
            device
        });
    }

    fn down_by_exec(&self) {
        let devices = self.devices.take();
        on_threads(self.execs.iter().zip(&devices), |(exec, device)| {
            exec.unpublish();
            exec.unstage(device);
        });
    }
}

/// All at once, on threads whose children are in this one's mount namespace.
pub fn on_threads<T: Send, R: Send>(
    items: impl Iterator<Item = T>,
    run: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let run = &run;
    thread::scope(|scope| {
        let threads: Vec<_> = items.map(|item| scope.spawn(move || run(item))).collect();
        let ended = threads.into_iter().map(thread::ScopedJoinHandle::join);
        ended.map(|result| result.expect("no panic")).collect()
    })
}
