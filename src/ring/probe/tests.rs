use std::{
    fs::{File, OpenOptions},
    os::{fd::AsFd, unix::fs::OpenOptionsExt},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use super::*;
use crossbeam::channel::bounded;

mod stuck;

/// A loop device over `image`, detached when dropped.
struct TestLoop(PathBuf);

impl TestLoop {
    fn over(image: &Path) -> Self {
        let output = Command::new("losetup")
            .args(["--find", "--show"])
            .arg(image)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        Self(String::from_utf8(output.stdout).unwrap().trim().into())
    }

    fn open(&self) -> File {
        OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(&self.0)
            .unwrap()
    }
}

impl Drop for TestLoop {
    fn drop(&mut self) {
        Command::new("losetup")
            .arg("--detach")
            .arg(&self.0)
            .status()
            .unwrap();
    }
}

const SIZE: u64 = 4 << 20;

/// A directory in memory: LOOP_CONFIGURE syncs a file on a disk.
fn memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

/// An image with its number and the offset in every 512 bytes.
fn image(dir: &Path, number: u64, size: u64) -> PathBuf {
    let path = dir.join(format!("image-{number}"));
    let bytes: Vec<u8> = (0..size / 512)
        .flat_map(|sector| stamp(number, sector * 512))
        .collect();
    std::fs::write(&path, bytes).unwrap();
    path
}

fn stamp(number: u64, offset: u64) -> [u8; 512] {
    let mut sector = [0; 512];
    sector[..8].copy_from_slice(&number.to_le_bytes());
    sector[504..].copy_from_slice(&offset.to_le_bytes());
    sector
}

fn check(number: u64, region: Region, block: &Block) {
    assert_eq!(
        (block.offset, block.data.len()),
        (region.offset, region.len)
    );
    let offsets = (block.offset..).step_by(512);
    for (offset, sector) in offsets.zip(block.data.chunks(512)) {
        assert!(
            sector == &stamp(number, offset)[..sector.len()],
            "image {number} at {offset}"
        );
    }
}

fn regions() -> Vec<Region> {
    vec![
        Region {
            offset: 0,
            len: 256 << 10,
        },
        Region {
            offset: 1 << 20,
            len: 4096,
        },
        Region {
            offset: SIZE - (512 << 10),
            len: 512 << 10,
        },
    ]
}

#[test]
fn sixty_four_devices_at_once() {
    let dir = memory();
    let devices: Vec<_> = (0..64)
        .map(|number| TestLoop::over(&image(dir.path(), number, SIZE)))
        .collect();
    let prober = Prober::default();
    thread::scope(|scope| {
        for (number, device) in (0..).zip(&devices) {
            let prober = prober.clone();
            scope.spawn(move || {
                let file = device.open();
                let blocks = prober.read(file.as_fd(), &regions()).unwrap();
                for (region, block) in regions().into_iter().zip(&blocks) {
                    check(number, region, block);
                }
            });
        }
    });
}

#[test]
fn a_region_may_end_with_the_device_and_not_behind_it() {
    let dir = memory();
    let size = 64 * 1024 + 512;
    let device = TestLoop::over(&image(dir.path(), 7, size));
    let prober = Prober::default();
    let last = Region {
        offset: 64 * 1024,
        len: 512,
    };
    let file = device.open();
    let blocks = prober.read(file.as_fd(), &[last]).unwrap();
    check(7, last, &blocks[0]);

    let behind = Region {
        offset: 60 * 1024,
        len: 8192,
    };
    match prober.read(file.as_fd(), &[last, behind]) {
        Err(ProbeError::Short { end }) => assert_eq!(end, size),
        other => panic!("{other:?}"),
    }
    assert_eq!(prober.read(file.as_fd(), &[]).unwrap(), []);
}

#[test]
fn a_read_error_names_its_offset() {
    let dir = memory();
    let path = image(dir.path(), 7, SIZE);
    let device = TestLoop::over(&path);
    // The device keeps its size; a read beyond the file's end is an I/O error.
    OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    let prober = Prober::default();
    let file = device.open();
    match prober.read(file.as_fd(), &regions()) {
        Err(ProbeError::Read {
            offset,
            len,
            source,
        }) => {
            assert_eq!(source.raw_os_error(), Some(libc::EIO));
            assert!(offset >= 1 << 20, "{offset}");
            assert!(len > 0);
        }
        other => panic!("{other:?}"),
    }
    let intact = prober.read(file.as_fd(), &regions()[..1]).unwrap();
    check(7, regions()[0], &intact[0]);
}

#[test]
fn more_reads_than_the_ring_holds_wait_their_turn() {
    let dir = memory();
    let device = TestLoop::over(&image(dir.path(), 7, SIZE));
    let prober = Prober::default();
    let file = device.open();
    let many: Vec<_> = (0..2 * u64::from(ENTRIES))
        .map(|n| Region {
            offset: n % 1024 * 4096,
            len: 4096,
        })
        .collect();
    let blocks = prober.read(file.as_fd(), &many).unwrap();
    for (region, block) in many.iter().zip(&blocks) {
        check(7, *region, block);
    }
}

#[test]
fn a_ring_is_kept_for_the_next_call() {
    let dir = memory();
    let device = TestLoop::over(&image(dir.path(), 7, SIZE));
    let prober = Prober::default();
    let file = device.open();
    for _ in 0..3 {
        prober.read(file.as_fd(), &regions()).unwrap();
        assert_eq!(prober.idle.lock().unwrap().len(), 1);
    }
}

#[test]
fn hung_devices_delay_no_other_probe() {
    let dir = memory();
    let stuck = stuck::Image::mount(&dir.path().join("stuck"), SIZE);
    let dead: Vec<_> = (0..24).map(|_| TestLoop::over(stuck.path())).collect();
    let alive = TestLoop::over(&image(dir.path(), 7, SIZE));
    let prober = Prober::default();
    thread::scope(|scope| {
        // Dropped if the test fails, so that its threads end.
        let stuck = stuck;
        let waiting: Vec<_> = (dead.iter())
            .map(|device| {
                let prober = prober.clone();
                scope.spawn(move || {
                    let file = device.open();
                    prober.read(file.as_fd(), &regions())
                })
            })
            .collect();
        // Each device sends a read to the server before it is stuck.
        stuck.wait_for_reads(Duration::from_secs(60));
        for _ in 0..8 {
            let file = alive.open();
            let blocks = prober.read(file.as_fd(), &regions()).unwrap();
            check(7, regions()[2], &blocks[2]);
        }
        assert!(waiting.iter().all(|waiting| !waiting.is_finished()));
        stuck.abort();
        for waiting in waiting {
            match waiting.join().unwrap() {
                Err(ProbeError::Read { source, .. }) => {
                    assert_eq!(source.raw_os_error(), Some(libc::EIO));
                }
                other => panic!("{other:?}"),
            }
        }
    });
}

/// More files than the kernel has workers for one ring (`ENTRIES`); their rings and they
/// keep below a soft limit of 1024 descriptors.
const MANY: usize = 400;

#[test]
fn hundreds_of_reads_that_hang_leave_room_for_others() {
    let dir = memory();
    let stuck = stuck::Image::mount(&dir.path().join("stuck"), SIZE);
    let alive = TestLoop::over(&image(dir.path(), 7, SIZE));
    let prober = Prober::default();
    // Each read of the file itself, without a loop device, blocks the thread that submits.
    let open = |_| {
        OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(stuck.path())
            .unwrap()
    };
    let dead: Vec<_> = (0..MANY).map(open).collect();
    let first = [Region {
        offset: 0,
        len: 4096,
    }];
    let minute = Duration::from_secs(60);
    thread::scope(|scope| {
        let stuck = stuck;
        let waiting: Vec<_> = (dead.iter())
            .map(|file| {
                let prober = prober.clone();
                let read = move || prober.read(file.as_fd(), &first);
                let builder = thread::Builder::new().stack_size(64 << 10);
                builder.spawn_scoped(scope, read).unwrap()
            })
            .collect();
        for _ in 0..MANY {
            stuck.wait_for_reads(minute);
        }
        let (done, others) = bounded(1);
        let (reader, alive) = (prober.clone(), &alive);
        scope.spawn(move || {
            for _ in 0..8 {
                let file = alive.open();
                let blocks = reader.read(file.as_fd(), &regions()).unwrap();
                check(7, regions()[2], &blocks[2]);
            }
            done.send(()).unwrap();
        });
        // If this fails, dropping `stuck` ends the reads that hang, and so the threads.
        others.recv_timeout(minute).expect("others are held up");
        assert!(waiting.iter().all(|waiting| !waiting.is_finished()));
        stuck.abort();
        for waiting in waiting {
            let read = waiting.join().unwrap();
            assert!(matches!(read, Err(ProbeError::Read { .. })), "{read:?}");
        }
    });
}
