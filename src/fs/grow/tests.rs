use std::{path::Path, process::Command};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::*;
use crate::{
    device::{loopdev, scratch::Scratch},
    kernel::mounts::private_namespace,
};

const BEFORE: u64 = 320 << 20;
const AFTER: u64 = 640 << 20;

/// A file system that is mounted from a loop device of its own.
struct Mounted {
    scratch: Scratch,
    directory: tempfile::TempDir,
}

impl Mounted {
    fn new(mkfs: &[&str], fs: FsType) -> Self {
        private_namespace();
        let image = Scratch::image(BEFORE);
        let made = Command::new(mkfs[0])
            .args(&mkfs[1..])
            .arg("-q")
            .arg(image.path())
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");
        let scratch = Scratch::over(image);
        let directory = tempfile::tempdir().unwrap();
        mount(
            &scratch.device.node,
            directory.path(),
            fs.as_str(),
            MountFlags::empty(),
            None,
        )
        .unwrap();
        Self { scratch, directory }
    }

    fn root(&self) -> OwnedFd {
        open_path(self.directory.path())
    }

    fn enlarge(&self, bytes: u64) {
        self.scratch.image.as_file().set_len(bytes).unwrap();
        assert_eq!(loopdev::resize(&self.scratch.device).unwrap(), bytes);
    }

    fn capacity(&self) -> u64 {
        let stat = rustix::fs::statvfs(self.directory.path()).unwrap();
        stat.f_blocks * stat.f_frsize
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(self.directory.path(), UnmountFlags::empty());
    }
}

fn open_path(path: &Path) -> OwnedFd {
    rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

fn same(bytes: u64) -> Grown {
    Grown {
        before: bytes,
        after: bytes,
    }
}

fn grows(mkfs: &[&str], fs: FsType) {
    let mounted = Mounted::new(mkfs, fs);
    let root = mounted.root();
    let small = mounted.capacity();
    assert_eq!(grow(fs, root.as_fd(), BEFORE).unwrap(), same(BEFORE));
    assert_eq!(grow(fs, root.as_fd(), BEFORE / 2).unwrap(), same(BEFORE));
    // A remainder that is smaller than a block of any file system.
    mounted.enlarge(AFTER + 512);
    let grown = Grown {
        before: BEFORE,
        after: AFTER,
    };
    assert_eq!(grow(fs, root.as_fd(), AFTER + 512).unwrap(), grown);
    assert_eq!(grow(fs, root.as_fd(), AFTER + 512).unwrap(), same(AFTER));
    assert!(mounted.capacity() > small + (AFTER - BEFORE) / 2);
}

#[test]
fn xfs_grows_once_and_keeps_its_share_of_inodes() {
    grows(&["mkfs.xfs"], FsType::Xfs);

    let mounted = Mounted::new(&["mkfs.xfs", "-i", "maxpct=7"], FsType::Xfs);
    mounted.enlarge(AFTER);
    let root = mounted.root();
    assert_eq!(grow(FsType::Xfs, root.as_fd(), AFTER).unwrap().after, AFTER);
    let root = rustix::fs::open(mounted.directory.path(), OFlags::RDONLY, Mode::empty()).unwrap();
    assert_eq!(growth::xfs_geometry(root).unwrap().inode_max_percent, 7);
}

#[test]
fn btrfs_grows_once() {
    grows(&["mkfs.btrfs"], FsType::Btrfs);
}

#[test]
fn ext4_grows_once_or_names_the_capability_it_takes() {
    let ours = rustix::thread::capabilities(None).unwrap().effective;
    if ours.contains(CapabilitySet::SYS_RESOURCE) {
        grows(&["mkfs.ext4"], FsType::Ext4);
        return;
    }
    let mounted = Mounted::new(&["mkfs.ext4"], FsType::Ext4);
    let root = mounted.root();
    assert_eq!(
        grow(FsType::Ext4, root.as_fd(), BEFORE).unwrap(),
        same(BEFORE)
    );
    mounted.enlarge(AFTER);
    let error = grow(FsType::Ext4, root.as_fd(), AFTER).unwrap_err();
    assert!(matches!(error, GrowError::NeedsCapability { .. }));
    assert!(error.to_string().contains("CAP_SYS_RESOURCE"));
}

#[test]
fn a_gain_too_small_to_use_needs_no_growth() {
    let info = probe::FsInfo {
        fs: FsType::Xfs,
        uuid: [0; 16],
        bytes: BEFORE,
        dirty: false,
        needs_recovery: false,
    };
    assert!(!needed(&info, BEFORE / 2));
    assert!(!needed(&info, BEFORE + 4096));
    assert!(needed(&info, BEFORE + (1 << 20)));
}
