//! Returning the space that a mounted file system does not use.
//!
//! The file system discards its free space, and the device passes that on: a loop device
//! punches holes into its image, krbd and rbd-nbd release objects, an NBD server does as it
//! likes. A file system of terabytes takes minutes, so it is done in parts, each of which
//! ends soon.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
};

use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};

use super::FsType;
use crate::kernel;

/// Bytes that are discarded at once.
const PART: u64 = 64 << 30;

/// Why a file system was not trimmed.
#[derive(Debug, thiserror::Error)]
pub enum TrimError {
    /// The file system, or the device below it, discards nothing.
    ///
    /// Remedy: none: volumes of that device are not trimmed; `lsblk --discard` shows which take
    /// discards.
    #[error(
        "its file system cannot return unused space: the device, or what is behind it, takes no discards"
    )]
    Unsupported,
    /// A system call failed.
    ///
    /// Remedy: read the kernel log (`journalctl -k`).
    #[error("cannot trim the file system")]
    Io(#[source] io::Error),
}

/// The parts of a file system on a device of this size. btrfs discards the space that it has
/// not allocated at each call, whatever the range, so it has one part.
pub fn parts(fs: Option<FsType>, device_bytes: u64) -> Vec<u64> {
    match fs {
        Some(FsType::Ext4 | FsType::Xfs) => {
            let count = device_bytes.div_ceil(PART).max(1);
            (0..count).map(|number| number * PART).collect()
        }
        Some(FsType::Btrfs) | None => vec![0],
    }
}

/// Discards the free space of the part that begins at `start`, of several or of one.
/// Returns how many bytes of it are free.
pub fn trim_part(
    mount_root: BorrowedFd<'_>,
    start: u64,
    only_part: bool,
) -> Result<u64, TrimError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(mount_root, ".", flags, Mode::empty())
        .map_err(|errno| TrimError::Io(errno.into()))?;
    let len = if only_part { u64::MAX } else { PART };
    match kernel::trim::trim(root.as_fd(), start, len) {
        Ok(free) => Ok(free),
        Err(error) => match Errno::from_io_error(&error) {
            // The file system ends before its device does.
            Some(Errno::INVAL) if start > 0 => Ok(0),
            Some(Errno::OPNOTSUPP | Errno::NOTTY) => Err(TrimError::Unsupported),
            _ => Err(TrimError::Io(error)),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_file_systems_are_trimmed_in_parts() {
        assert_eq!(parts(Some(FsType::Ext4), 1 << 20), [0]);
        assert_eq!(parts(Some(FsType::Xfs), 2 * PART + 1), [0, PART, 2 * PART]);
        assert_eq!(parts(Some(FsType::Btrfs), 2 * PART), [0]);
        assert_eq!(parts(None, 2 * PART), [0]);
    }
}
