//! A clone of an image where the file system cannot copy by reference, beside `cp` of the
//! same image.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::Path,
    process::Command,
};

use criterion::Criterion;
use testkit::{Controller, ControllerSetup, MIB, Volume, claim, from_volume, run};
use uring_csi::proto::csi::CreateVolumeRequest;

use crate::{faults, rig::Rig};

/// On the disk of `/var/tmp`, and in memory.
pub fn of_pools(criterion: &mut Criterion, rig: &Rig) {
    let disk = tempfile::tempdir_in("/var/tmp").expect("a directory");
    of_pool(
        criterion,
        rig,
        disk.path(),
        "Clone of a sparse image of 2 GiB, on a disk",
    );
    let memory = rig.sandbox.pool("copies");
    of_pool(
        criterion,
        rig,
        &memory,
        "Clone of a sparse image of 2 GiB, on tmpfs",
    );
}

/// With the image in the page cache, and not. Both ways end in an fsync.
fn of_pool(criterion: &mut Criterion, rig: &Rig, pool: &Path, case: &str) {
    let mut setup = ControllerSetup::new(&rig.sandbox);
    setup.name = "copies";
    setup.pools = vec![format!("main={},shared", pool.display())];
    let controller = rig
        .runtime
        .block_on(Controller::start_with(&rig.sandbox, setup));
    let block = Volume::block("any").capability;
    let size = if faults::is_quick() { 64 } else { 2048 } * MIB;
    let request = |name: &str| claim(name, "main", &block, size);
    let source = rig.runtime.block_on(controller.create(request("source")));
    let source = source.expect("a volume");
    let image = pool.join(&source.volume_context["image"]);
    fill(&image, size);

    for (case, prepare) in [
        (case.to_owned(), cached as fn(&Path)),
        (format!("{case}, not cached"), uncached),
    ] {
        let mut group = criterion.benchmark_group(&case);
        group.sample_size(10);
        let clone = CreateVolumeRequest {
            volume_content_source: Some(from_volume(&source.volume_id)),
            ..request("clone")
        };
        let copy = pool.join("copy");
        let paths = [&image, &copy].map(|path| path.to_str().expect("a path"));
        rig.measure_between(
            &mut group,
            &case,
            "socket",
            || prepare(&image),
            || {
                let made = rig.runtime.block_on(controller.create(clone.clone()));
                made.expect("a clone");
            },
            || {
                let made = rig.runtime.block_on(controller.create(clone.clone()));
                let id = made.expect("a clone").volume_id;
                rig.runtime
                    .block_on(controller.delete(&id))
                    .expect("deleted");
            },
        );
        rig.measure_between(
            &mut group,
            &case,
            "cp",
            || prepare(&image),
            || {
                run(&[&["cp", "--sparse=always", "--reflink=never"][..], &paths].concat());
                run(&["sync", paths[1]]);
            },
            || fs::remove_file(&copy).expect("removed"),
        );
        group.finish();
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
    settle();
}

fn uncached(_: &Path) {
    settle();
    fs::write("/proc/sys/vm/drop_caches", "1").expect("dropped");
}

/// What was deleted or written before belongs to no run.
fn settle() {
    let synced = Command::new("sync").status().expect("sync");
    assert!(synced.success());
}
