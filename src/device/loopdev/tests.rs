use std::{
    collections::BTreeSet,
    fs::File,
    io::{Read, Seek, Write},
    os::unix::fs::OpenOptionsExt as _,
    process::Command,
    thread,
};

use tempfile::NamedTempFile;

use super::*;
use crate::device::scratch::{Scratch, options};

const MIB: u64 = 1 << 20;

/// Whether the device backs the file now.
fn backs(device: &LoopDevice, id: FileId) -> io::Result<bool> {
    let status = status_of(device.number)?;
    Ok(status.is_some_and(|(_, status)| is_over(&status, id)))
}

/// Detaches for certain: a look by a test beside this one is an opener too,
/// for as long as it takes.
fn let_go(device: &LoopDevice, id: FileId) {
    assert_ne!(detach(device, id, false).unwrap(), Detached::Already);
    while backs(device, id).unwrap() {
        thread::yield_now();
    }
}

#[test]
fn a_device_that_another_process_is_making_is_waited_for() {
    let control = loopctl::control().unwrap();
    // No other test's, and the kernel has a million.
    let number = 500_000 + std::process::id() % 500_000;
    let found = once_made(|| {
        let found = sysfs::dev_of(&format!("loop{number}"));
        if found.is_err() {
            loopctl::add(control, number).unwrap();
        }
        found
    });
    // A test beside this one may look at the device, or attach an image to it:
    // it is the first free one when those below are in use.
    while let Err(error) = loopctl::remove(control, number) {
        assert_eq!(error.raw_os_error(), Some(libc::EBUSY));
        thread::yield_now();
    }
    found.unwrap();
}

#[test]
fn the_read_only_mark_of_an_earlier_image_is_cleared() {
    let control = loopctl::control().unwrap();
    // As above.
    let number = 1_000_000 + std::process::id() % 40_000;
    if sysfs::dev_of(&format!("loop{number}")).is_err() {
        loopctl::add(control, number).unwrap();
    }
    // Exclusively: no test beside this one may attach an image to a device with the mark.
    let open = || {
        let mut options = File::options();
        options.read(true).custom_flags(libc::O_EXCL);
        options.open(node_of(number))
    };
    let node = once_made(open).unwrap();
    block::set_read_only(&node, true).unwrap();
    drop(node);
    let image = Scratch::image(MIB);
    let settings = loopctl::LoopSettings {
        sector_size: 0,
        flags: 0,
        name: b"marked",
    };
    let attached = configure(number, image.as_file(), &settings).unwrap();
    let (device, exclusive) = attached.expect("a writable device");
    assert!(!block::is_read_only(&exclusive).unwrap());
    drop((exclusive, Scratch { image, device }));
    while let Err(error) = loopctl::remove(control, number) {
        assert_eq!(error.raw_os_error(), Some(libc::EBUSY));
        thread::yield_now();
    }
}

#[test]
fn a_loop_device_is_found_resized_and_detached() {
    let image = Scratch::image(MIB);
    let id = FileId::of(image.as_file()).unwrap();
    assert_eq!(find(id, image.path()).unwrap(), []);

    let scratch = Scratch::over(image);
    let device = scratch.device.clone();
    assert_eq!(sysfs::node_of(device.dev).unwrap(), device.node);
    assert_eq!(
        scratch.found(),
        [AttachedLoop {
            device: device.clone(),
            read_only: false,
            direct_io: false,
            detaching: false,
            offset: 0,
            size_limit: 0,
        }]
    );

    let (found, name) = (scratch.found().pop(), scratch.image.path());
    assert_eq!(find_at(&device.node, id, name).unwrap(), found);
    assert_eq!(
        find_at(Path::new("/dev/loop-control"), id, name).unwrap(),
        None
    );
    let other = Scratch::new(MIB);
    assert_eq!(find_at(&other.device.node, id, name).unwrap(), None);

    scratch.image.as_file().set_len(2 * MIB).unwrap();
    assert_eq!(resize(&device).unwrap(), 2 * MIB);

    let_go(&device, id);
    assert_eq!(scratch.found(), []);
    assert_eq!(detach(&device, id, false).unwrap(), Detached::Already);
}

/// The first partition of an MBR, of type Linux, over all but the first MiB.
fn partition_table() -> [u8; 512] {
    let mut table = [0; 512];
    let entry: [u8; 16] = [0, 0, 0, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 8, 0, 0];
    table[446..462].copy_from_slice(&entry);
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    table
}

#[test]
fn no_partitions_of_an_image_are_scanned() {
    let mut image = Scratch::image(2 * MIB);
    image.write_all(&partition_table()).unwrap();
    let scratch = Scratch::over(image);
    let number = scratch.device.number;
    let sysfs = PathBuf::from(format!("/sys/block/loop{number}"));
    let scans = std::fs::read_to_string(sysfs.join("loop/partscan")).unwrap();
    assert_eq!(scans.trim(), "0");
    // The ioctl that udev and partition tools use.
    let rescan = Command::new("blockdev")
        .arg("--rereadpt")
        .arg(&scratch.device.node)
        .output()
        .unwrap();
    assert!(!rescan.status.success(), "{rescan:?}");
    assert!(!sysfs.join(format!("loop{number}p1")).exists());
}

#[test]
fn a_read_only_device_refuses_writes() {
    let image = Scratch::image(MIB);
    let read_only = File::open(image.path()).unwrap();
    assert!(matches!(
        attach(&read_only, &options(image.path())),
        Err(LoopError::ReadOnlyImage { .. })
    ));
    let options = LoopOptions {
        read_only: true,
        ..options(image.path())
    };
    let (device, _) = attach(&read_only, &options).unwrap();
    let scratch = Scratch { image, device };
    assert!(scratch.found()[0].read_only);
    // Some kernels refuse the open, others the write.
    let written = File::options()
        .write(true)
        .open(&scratch.device.node)
        .and_then(|mut node| {
            node.write_all(&[1; 4096])?;
            node.sync_all()
        });
    assert!(written.is_err());
    assert!(sysfs::is_read_only(scratch.device.dev).unwrap());
}

#[test]
fn a_writable_device_can_be_made_read_only_and_back() {
    let scratch = Scratch::new(MIB);
    let mut node = scratch.open();
    block::set_read_only(&node, true).unwrap();
    assert!(sysfs::is_read_only(scratch.device.dev).unwrap());
    assert!(
        node.write_all(&[1; 4096])
            .and_then(|()| node.sync_all())
            .is_err()
    );
    block::set_read_only(&node, false).unwrap();
    node.rewind().unwrap();
    node.write_all(&[7; 4096]).unwrap();
    node.sync_all().unwrap();
    let mut byte = [0];
    File::open(scratch.image.path())
        .unwrap()
        .read_exact(&mut byte)
        .unwrap();
    assert_eq!(byte, [7]);
}

#[test]
fn the_read_only_mark_of_a_raw_volume_goes_with_it() {
    let scratch = Scratch::new(MIB);
    let opener = scratch.open();
    for (was_raw, is_left) in [(false, true), (true, false)] {
        block::set_read_only(&opener, true).unwrap();
        let detached = detach(&scratch.device, scratch.id(), was_raw).unwrap();
        assert_eq!(detached, Detached::Deferred);
        assert_eq!(block::is_read_only(&opener).unwrap(), is_left);
    }
    block::set_read_only(&opener, false).unwrap();
}

#[test]
fn what_was_written_is_written_back_while_the_device_is_the_volume_s() {
    let image = NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    image.as_file().set_len(MIB).unwrap();
    let scratch = Scratch::over(image);
    let mut opened = File::options()
        .write(true)
        .open(&scratch.device.node)
        .unwrap();
    opened.write_all(&[7; 4096]).unwrap();
    drop(opened);
    write_back(&scratch.device, scratch.id()).unwrap();
    let other = FileId {
        ino: u64::MAX,
        ..scratch.id()
    };
    write_back(&scratch.device, other).unwrap();
    let_go(&scratch.device, scratch.id());
    write_back(&scratch.device, scratch.id()).unwrap();
}

#[test]
fn sector_size_and_direct_io_are_as_asked() {
    let image = NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    image.as_file().set_len(MIB).unwrap();
    let options = LoopOptions {
        direct_io: true,
        sector_size: 4096,
        ..options(image.path())
    };
    let (device, _) = attach(image.as_file(), &options).unwrap();
    let scratch = Scratch { image, device };
    assert!(scratch.found()[0].direct_io);
    assert_eq!(rustix::fs::ioctl_blksszget(scratch.open()).unwrap(), 4096);
}

#[test]
fn a_claimed_device_stays_attached() {
    let scratch = Scratch::new(MIB);
    let claim = scratch.device.open(OFlags::RDONLY | OFlags::EXCL).unwrap();
    assert!(matches!(
        detach(&scratch.device, scratch.id(), false),
        Err(LoopError::Busy { .. })
    ));
    drop(claim);
    let_go(&scratch.device, scratch.id());
}

#[test]
fn an_opener_defers_the_detach() {
    let scratch = Scratch::new(MIB);
    let opener = scratch.open();
    assert_eq!(
        detach(&scratch.device, scratch.id(), false).unwrap(),
        Detached::Deferred
    );
    assert!(scratch.found()[0].detaching);
    drop(opener);
    while backs(&scratch.device, scratch.id()).unwrap() {
        thread::yield_now();
    }
}

#[test]
fn a_loop_device_of_another_file_is_not_detached() {
    let (one, other) = (Scratch::new(MIB), Scratch::new(MIB));
    assert_eq!(
        detach(&other.device, one.id(), false).unwrap(),
        Detached::Already
    );
    let _claim = other.device.open(OFlags::RDONLY | OFlags::EXCL).unwrap();
    assert_eq!(
        detach(&other.device, one.id(), false).unwrap(),
        Detached::Already
    );
    assert!(backs(&other.device, other.id()).unwrap());
}

#[test]
fn attaches_at_once_get_a_device_each() {
    let scratches: Vec<_> = thread::scope(|scope| {
        let all: Vec<_> = (0..12).map(|_| scope.spawn(|| Scratch::new(MIB))).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    for scratch in &scratches {
        let found = scratch.found();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].device, scratch.device);
    }
    let numbers: BTreeSet<_> = scratches.iter().map(|one| one.device.number).collect();
    assert_eq!(numbers.len(), scratches.len());
}

#[test]
fn a_reserved_loop_number_is_skipped() {
    let control = loopctl::control().unwrap();
    let reserved = reserved::Reserved::take(control, 0).unwrap();
    let scratch = Scratch::new(MIB);
    assert_ne!(scratch.device.number, reserved.get());
}

#[test]
fn a_lock_is_found_by_its_device_and_removed() {
    let scratch = Scratch::new(MIB);
    let dev = scratch.device.dev;
    assert_eq!(locks_on(dev, &[]).unwrap(), []);
    let node = scratch.device.node.clone();
    let elsewhere = Scratch::new(MIB);
    let _ = lock_over(dev, &node, elsewhere.open().as_fd()).unwrap_err();
    // The path tells nothing.
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let opened = rustix::fs::open(&node, flags, Mode::empty()).unwrap();
    let device = lock_over(dev, Path::new("/dev/null"), opened.as_fd()).unwrap();
    drop(opened);
    let lock = DescriptorLock {
        device,
        backing_path: scratch.device.node.clone(),
    };
    assert_eq!(locks_on(dev, &[]).unwrap(), std::slice::from_ref(&lock));
    // A lock keeps the device open: it does not let go of its file.
    assert_eq!(
        detach(&scratch.device, scratch.id(), false).unwrap(),
        Detached::Deferred
    );
    let elsewhere = Dev {
        major: 7,
        minor: dev.minor + 1,
    };
    assert_eq!(unlock(&lock, elsewhere).unwrap(), Detached::Already);
    assert_ne!(unlock(&lock, dev).unwrap(), Detached::Already);
    while !locks_on(dev, &[]).unwrap().is_empty() || backs(&scratch.device, scratch.id()).unwrap() {
        thread::yield_now();
    }
}

#[test]
fn errors_name_the_device_and_the_image() {
    let image = Scratch::image(MIB);
    let options = LoopOptions {
        sector_size: 1000,
        ..options(image.path())
    };
    let error = attach(image.as_file(), &options).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains(&image.path().display().to_string()) && text.contains("/dev/loop"),
        "{text}"
    );
}
