//! Locks: loop devices over the nodes of block devices.
//!
//! kubelet puts one over the node of a published block volume. It keeps the
//! device open, so that its number can't be given to another device while a pod
//! knows it by that number. kubelet removes its locks itself, unless it was
//! restarted at the wrong moment.

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
    path::{Path, PathBuf},
};

use rustix::{fs::OFlags, io::Errno};

use super::{LoopDevice, LoopError, LoopOptions, attach, backing_path, configured, is, release};
use crate::{
    Detached,
    kernel::{Dev, block, sysfs},
};

/// A loop device over a block device's node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DescriptorLock {
    /// The loop device.
    pub device: LoopDevice,
    /// The node's path, as far as it can be seen from here.
    pub backing_path: PathBuf,
}

impl DescriptorLock {
    /// Whether it still lies where it was found. Never waits for the device.
    pub fn is_held(&self) -> bool {
        backing_path(self.device.number).is_ok_and(|path| path == self.backing_path)
    }
}

/// Puts a loop device over a node of `dev`, as kubelet does, so that the device's number
/// can't be given to another one. The node is at the path, and open as `node`, which may be
/// `O_PATH`: the path may lead elsewhere by now.
pub fn lock_over(dev: Dev, path: &Path, node: BorrowedFd<'_>) -> Result<LoopDevice, LoopError> {
    let refused = |source| LoopError::Attach {
        image: path.to_owned(),
        node: PathBuf::from("a loop device"),
        source,
    };
    let opened = format!("/proc/self/fd/{}", node.as_raw_fd());
    // A lock neither reads nor writes.
    let file = block::open(Path::new(&opened), dev, OFlags::RDONLY).map_err(refused)?;
    let options = LoopOptions {
        read_only: true,
        direct_io: false,
        sector_size: 0,
        name: path,
    };
    Ok(attach(&file.into(), &options)?.0)
}

/// The locks over a block device: over the paths in `known`, and over any other
/// where kubelet and people have theirs, below a directory `volumeDevices` or
/// `/dev`. What lies elsewhere is not asked: an image's file system may hang.
pub fn locks_on(dev: Dev, known: &[PathBuf]) -> io::Result<Vec<DescriptorLock>> {
    let usual = |path: &Path| {
        path.starts_with("/dev")
            || path.iter().any(|part| part == "volumeDevices")
            // Once kubelet has unmounted its map file, what was mounted there
            // is the root of no tree.
            || path == Path::new("/")
    };
    let found = configured(
        sysfs::numbers("loop")?,
        |backing| usual(backing) || known.iter().any(|path| path == backing),
        |status| status.rdevice == dev.to_raw(),
        // The kernel asks the backing file's file system, and that of a device's node
        // does not die.
        |error| {
            [Errno::NOTCONN, Errno::STALE, Errno::IO]
                .iter()
                .any(|errno| is(error, *errno))
        },
    )?;
    Ok(found
        .into_iter()
        .map(|(device, _)| DescriptorLock {
            backing_path: backing_path(device.number).unwrap_or_default(),
            device,
        })
        .collect())
}

/// Removes a lock if it still is one over `dev`.
pub fn unlock(lock: &DescriptorLock, dev: Dev) -> Result<Detached, LoopError> {
    release(&lock.device, false, |status| status.rdevice == dev.to_raw())
}
