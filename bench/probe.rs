//! Telling what is on 32 devices.

use std::{
    fs::File,
    os::fd::AsFd as _,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    thread,
};

use criterion::Criterion;
use testkit::{MIB, run};
use uring_csi::internals::{Content, Prober, classify, regions};

use crate::rig::{Rig, timed};

const DEVICES: usize = 32;
const SIZE: u64 = 64 * MIB;
/// Of the memory that O_DIRECT reads into.
const ALIGN: usize = 4096;

/// One ring for all, against a call for each region, and `blkid` for each device.
pub fn devices(criterion: &mut Criterion, rig: &Rig) {
    const CASE: &str = "probe of 32 devices";
    let mut group = criterion.benchmark_group(CASE);
    let devices: Vec<String> = (0..DEVICES)
        .map(|number| {
            let image = rig.sandbox.dir().join(format!("probe-{number}.img"));
            File::create(&image)
                .and_then(|image| image.set_len(SIZE))
                .expect("an image");
            let image = image.to_str().expect("UTF-8");
            run(&["mkfs.ext4", "-q", "-F", image]);
            run(&["losetup", "-f", "--show", image]).trim().to_owned()
        })
        .collect();

    let prober = Prober::default();
    let in_process = || {
        thread::scope(|scope| {
            for device in &devices {
                scope.spawn(|| assert!(matches!(probe(&prober, device), Content::Fs(_))));
            }
        });
    };
    let bare = || {
        thread::scope(|scope| {
            for device in &devices {
                scope.spawn(|| read_one_by_one(device));
            }
        });
    };
    rig.measure(&mut group, CASE, "in process", in_process);
    rig.measure(&mut group, CASE, "bare", bare);
    rig.measure(&mut group, CASE, "exec", || {
        thread::scope(|scope| {
            for device in &devices {
                scope.spawn(|| run(&["blkid", "-p", "-o", "export", device]));
            }
        });
    });
    group.finish();
    rig.compare(CASE, || timed(in_process), || timed(bare));
    for device in &devices {
        run(&["losetup", "-d", device]);
    }
}

fn open(device: &str) -> File {
    File::options()
        .read(true)
        .custom_flags(rustix::fs::OFlags::DIRECT.bits().cast_signed())
        .open(device)
        .expect("a device")
}

/// The same blocks, a system call for each region.
fn read_one_by_one(device: &str) {
    let file = open(device);
    for region in regions(SIZE) {
        let mut memory = vec![0; region.len + ALIGN];
        let start = memory.as_ptr().align_offset(ALIGN);
        let blocks = &mut memory[start..start + region.len];
        file.read_exact_at(blocks, region.offset)
            .expect("its blocks");
    }
}

fn probe(prober: &Prober, device: &str) -> Content {
    let file = open(device);
    let read = prober
        .read(file.as_fd(), &regions(SIZE))
        .expect("its blocks");
    classify(SIZE, &read)
}
