//! A clone of an image where the file system cannot copy by reference, beside `cp` of the
//! same image.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use criterion::Criterion;
use testkit::{Controller, ControllerSetup, MIB, Volume, claim, from_volume, run};
use uring_csi::proto::csi::CreateVolumeRequest;

use crate::{
    faults,
    rig::{Rig, timed},
};

/// On the disk of `/var/tmp`, with the image in the page cache and not; and in memory.
pub fn of_pools(criterion: &mut Criterion, rig: &Rig) {
    const CASE: &str = "Clone of a sparse image of 2 GiB";
    let disk = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let on_disk = Pool::new(rig, disk.path());
    on_disk.compare(criterion, &format!("{CASE}, on a disk"), cached);
    on_disk.compare(
        criterion,
        &format!("{CASE}, on a disk, not cached"),
        uncached,
    );
    drop(on_disk);
    let in_memory = Pool::new(rig, &rig.sandbox.pool("copies"));
    in_memory.compare(criterion, &format!("{CASE}, on tmpfs"), settle);
}

/// One with an image, and its controller.
struct Pool<'a> {
    rig: &'a Rig,
    controller: Controller,
    clone: CreateVolumeRequest,
    image: PathBuf,
    copy: PathBuf,
}

impl<'a> Pool<'a> {
    fn new(rig: &'a Rig, pool: &Path) -> Self {
        let mut setup = ControllerSetup::new(&rig.sandbox);
        setup.name = "copies";
        setup.pools = vec![format!("main={},shared", pool.display())];
        let controller = Controller::start_with(&rig.sandbox, setup);
        let controller = rig.runtime.block_on(controller);
        let block = Volume::block("any").capability;
        let size = if faults::is_quick() { 64 } else { 2048 } * MIB;
        let request = |name: &str| claim(name, "main", &block, size);
        let source = rig.runtime.block_on(controller.create(request("source")));
        let source = source.expect("a volume");
        let image = pool.join(&source.volume_context["image"]);
        fill(&image, size);
        Self {
            rig,
            controller,
            clone: CreateVolumeRequest {
                volume_content_source: Some(from_volume(&source.volume_id)),
                ..request("clone")
            },
            image,
            copy: pool.join("copy"),
        }
    }

    /// Both ways end in an fsync.
    fn compare(&self, criterion: &mut Criterion, case: &str, prepare: fn(&Path)) {
        let Self { rig, copy, .. } = self;
        let prepare = || prepare(&self.image);
        let clone = || drop(self.cloned());
        let delete_clone = || {
            let id = self.cloned();
            let deleted = rig.runtime.block_on(self.controller.delete(&id));
            deleted.expect("deleted");
        };
        let paths = [&self.image, copy].map(|path| path.to_str().expect("a path"));
        let cp = || {
            run(&[&["cp", "--sparse=always", "--reflink=never"][..], &paths].concat());
            run(&["sync", paths[1]]);
        };
        let remove_copy = || fs::remove_file(copy).expect("removed");
        let mut group = criterion.benchmark_group(case);
        group.sample_size(10);
        rig.measure_between(&mut group, case, "socket", prepare, clone, delete_clone);
        rig.measure_between(&mut group, case, "cp", prepare, cp, remove_copy);
        group.finish();
        // Beside other load a disk differs by more than CI would let it.
        if !rig.guards_ratios() {
            let one = |copy: &dyn Fn(), remove: &dyn Fn()| {
                prepare();
                let took = timed(copy);
                remove();
                took
            };
            let case = format!("{case}, to cp");
            rig.compare(
                &case,
                || one(&clone, &delete_clone),
                || one(&cp, &remove_copy),
            );
        }
    }

    /// The id of the clone, which is made where it is missing.
    fn cloned(&self) -> String {
        let made = self.controller.create(self.clone.clone());
        self.rig.runtime.block_on(made).expect("a clone").volume_id
    }
}

/// Half data, a fifth zeros, the rest holes, in extents of 64 KiB to 16 MiB.
fn fill(image: &Path, size: u64) {
    let image = File::options().write(true).open(image).expect("an image");
    // Knuth's linear congruential generator.
    let mut state = 7_u64;
    let mut random = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        state >> 40
    };
    let mut data = vec![0; 16 << 20];
    data.fill_with(|| random().to_le_bytes()[0]);
    let zeros = vec![0; data.len()];
    let mut at = 0;
    while at < size {
        let len = (64 << 10 << (random() % 9)).min(size - at);
        let len = usize::try_from(len).expect("a length");
        match random() % 10 {
            0..5 => image.write_all_at(&data[..len], at).expect("a write"),
            5..7 => image.write_all_at(&zeros[..len], at).expect("a write"),
            _ => {}
        }
        at += len as u64;
    }
    image.sync_all().expect("a sync");
}

fn cached(image: &Path) {
    let read = fs::read(image).expect("the image");
    drop(read);
    settle(image);
}

fn uncached(image: &Path) {
    settle(image);
    fs::write("/proc/sys/vm/drop_caches", "1").expect("dropped");
}

/// What was deleted or written before belongs to no run.
fn settle(_: &Path) {
    let synced = Command::new("sync").status().expect("sync");
    assert!(synced.success());
}
