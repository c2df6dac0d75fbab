//! Descriptor locks: loop devices over the node of a published device, which
//! keep its number from going to another one.

use std::{
    os::fd::BorrowedFd,
    path::{Path, PathBuf},
};

use super::{
    error::{DeviceError, io},
    loopdev::{self, DescriptorLock},
};
use crate::{Done, kernel::Dev};

/// Which descriptor locks over a device to release: loop devices over its node,
/// taken by kubelet or by [`lock`].
#[derive(Clone, Debug)]
pub enum Unlock {
    /// Those over these paths.
    Over(Vec<PathBuf>),
    All,
}

/// Releases descriptor locks over a device; returns the released locks.
pub fn unlock(dev: Dev, which: &Unlock) -> Result<Vec<DescriptorLock>, DeviceError> {
    let known: &[PathBuf] = match which {
        Unlock::Over(paths) => paths,
        Unlock::All => &[],
    };
    let mut locks = loopdev::locks_on(dev, known).map_err(io("list the loop devices"))?;
    if let Unlock::Over(paths) = which {
        locks.retain(|lock| paths.contains(&lock.backing_path));
    }
    for lock in &locks {
        let _ = loopdev::unlock(lock, dev)?;
    }
    Ok(locks)
}

/// Takes kubelet's descriptor lock over the node of `dev` that is published at the path and
/// open as `node`, unless it is taken.
pub fn lock(dev: Dev, path: &Path, node: BorrowedFd<'_>) -> Result<Done, DeviceError> {
    let locks = loopdev::locks_on(dev, &[path.to_owned()]).map_err(io("list the loop devices"))?;
    if locks.iter().any(|lock| lock.backing_path == path) {
        return Ok(Done::Already);
    }
    loopdev::lock_over(dev, path, node)?;
    Ok(Done::Now)
}
