//! Growing mounted file systems to the size of their device.
//!
//! All three grow by an ioctl on the mounted file system, and none reports "already
//! this large": ext4 demands a capability before it compares sizes, XFS interprets a
//! smaller number as a request to shrink, btrfs starts an operation. So [`grow`] reads the
//! size first and calls the ioctl only if there are bytes to gain: it is idempotent.

use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::FileExt,
    },
};

use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
    thread::CapabilitySet,
};

use super::{FsType, probe};
use crate::{
    Kind,
    kernel::{Dev, block, growth, sysfs},
};

/// The least gain in bytes for which a growth is tried: the largest block size of a file
/// system, which cannot use a smaller remainder of its device.
const MIN_GAIN: u64 = 64 << 10;

/// The least size in bytes to which the kernel resizes a btrfs (`btrfs_ioctl_resize` in
/// fs/btrfs/ioctl.c); mkfs makes smaller ones.
const BTRFS_LEAST: u64 = 256 << 20;

/// The size before and after growing; the two are equal if there was nothing to gain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Grown {
    /// Bytes before.
    pub before: u64,
    /// Bytes after.
    pub after: u64,
}

/// Why a file system did not grow.
#[derive(Debug, thiserror::Error)]
pub enum GrowError {
    /// The agent lacks a capability.
    #[error("growing a mounted {fs} requires {capability}; add it to the node agent's container")]
    NeedsCapability {
        fs: FsType,
        capability: &'static str,
    },
    /// ext4 has recorded errors.
    #[error(
        "ext4 has recorded errors and does not grow; unmount the volume and check it with e2fsck"
    )]
    HasErrors,
    /// The driver cannot choose which of several devices should grow.
    #[error("btrfs spans {devices} devices; grow it by hand with btrfs filesystem resize")]
    SeveralDevices { devices: usize },
    /// The kernel resizes no btrfs to so little.
    #[error("btrfs does not grow to less than {least} bytes; grow the volume to at least that")]
    TooSmall { least: u64 },
    /// Another operation on the whole file system is in progress.
    #[error("{fs} is busy with another resize or balance; retry after it")]
    Busy { fs: FsType },
    /// Any other failure of a system call.
    ///
    /// Remedy: read the kernel log (`journalctl -k`); the call is repeated.
    #[error("cannot {what} of the mounted {fs}")]
    Io {
        fs: FsType,
        what: &'static str,
        source: io::Error,
    },
}

impl GrowError {
    /// What the caller may do about it. Kubelet repeats no precondition before the volume
    /// is mounted anew.
    pub fn kind(&self) -> Kind {
        match self {
            Self::NeedsCapability { .. }
            | Self::HasErrors
            | Self::SeveralDevices { .. }
            | Self::TooSmall { .. } => Kind::Precondition,
            Self::Busy { .. } | Self::Io { .. } => Kind::Transient,
        }
    }
}

/// Whether the file system can grow on a device of this size. XFS may find the
/// remainder too small for another allocation group; [`grow`] then gains nothing.
pub fn needed(info: &probe::FsInfo, device_bytes: u64) -> bool {
    device_bytes.saturating_sub(info.bytes) >= MIN_GAIN
}

/// Grows the file system that is mounted at `mount_root` (a descriptor of its
/// root directory; `O_PATH` suffices) to its device's `device_bytes`.
pub fn grow(fs: FsType, mount_root: BorrowedFd<'_>, device_bytes: u64) -> Result<Grown, GrowError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(mount_root, ".", flags, Mode::empty())
        .map_err(|e| failed(fs, "open the root directory")(e.into()))?;
    match fs {
        FsType::Ext4 => ext4(&root, device_bytes),
        FsType::Xfs => xfs(&root, device_bytes),
        FsType::Btrfs => btrfs(&root, device_bytes),
    }
}

fn failed(fs: FsType, what: &'static str) -> impl Fn(io::Error) -> GrowError {
    move |source| match Errno::from_io_error(&source) {
        Some(Errno::AGAIN | Errno::BUSY) => GrowError::Busy { fs },
        _ => GrowError::Io { fs, what, source },
    }
}

fn ext4(root: &OwnedFd, device_bytes: u64) -> Result<Grown, GrowError> {
    let failed = |what| failed(FsType::Ext4, what);
    let read = || ext4_size(root).map_err(failed("read the superblock"));
    let size = read()?;
    let before = size.bytes();
    let blocks = device_bytes / size.block_size;
    if blocks <= size.blocks {
        return Ok(Grown {
            before,
            after: before,
        });
    }
    match growth::ext4_resize(root, blocks) {
        Ok(()) => {}
        Err(e) if Errno::from_io_error(&e) == Some(Errno::PERM) => {
            let ours = rustix::thread::capabilities(None)
                .map_err(|e| failed("ask for the capabilities to grow")(e.into()))?;
            return Err(if ours.effective.contains(CapabilitySet::SYS_RESOURCE) {
                GrowError::HasErrors
            } else {
                GrowError::NeedsCapability {
                    fs: FsType::Ext4,
                    capability: "CAP_SYS_RESOURCE",
                }
            });
        }
        Err(e) => return Err(failed("change the size")(e)),
    }
    let after = read()?.bytes();
    Ok(Grown { before, after })
}

/// The size in ext4's superblock, as the kernel keeps it in the device's page
/// cache while it is mounted. (statfs(2) does not count ext4's own tables.)
fn ext4_size(root: &OwnedFd) -> io::Result<probe::ExtSize> {
    let dev = Dev::from_raw(rustix::fs::fstat(root)?.st_dev);
    let device = block::open(&sysfs::node_of(dev)?, dev, OFlags::RDONLY)?;
    let mut superblock = [0; probe::EXT_LEN];
    std::fs::File::from(device).read_exact_at(&mut superblock, probe::EXT_OFFSET)?;
    probe::ext_size(&superblock).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn xfs(root: &OwnedFd, device_bytes: u64) -> Result<Grown, GrowError> {
    /// `XFS_MIN_AG_BLOCKS`: the kernel leaves a smaller remainder unused.
    const MIN_GROUP: u64 = 64;
    let failed = |what| failed(FsType::Xfs, what);
    let read = || growth::xfs_geometry(root).map_err(failed("read the geometry"));
    let bytes =
        |geometry: &growth::XfsGeometry| geometry.data_blocks * u64::from(geometry.block_size);
    let geometry = read()?;
    let before = bytes(&geometry);
    let mut blocks = device_bytes / u64::from(geometry.block_size);
    let rest = blocks % u64::from(geometry.ag_blocks);
    if rest < MIN_GROUP {
        blocks -= rest;
    }
    if blocks <= geometry.data_blocks {
        return Ok(Grown {
            before,
            after: before,
        });
    }
    growth::xfs_grow(root, blocks, geometry.inode_max_percent)
        .map_err(failed("change the size"))?;
    let after = bytes(&read()?);
    Ok(Grown { before, after })
}

fn btrfs(root: &OwnedFd, device_bytes: u64) -> Result<Grown, GrowError> {
    let failed = |what| failed(FsType::Btrfs, what);
    let read = || {
        let devices = growth::btrfs_devices(root.as_fd()).map_err(failed("list the devices"))?;
        match devices[..] {
            [device] => Ok(device),
            _ => Err(GrowError::SeveralDevices {
                devices: devices.len(),
            }),
        }
    };
    let device = read()?;
    let before = device.bytes;
    let sector = u64::from(device.sector_size);
    let wanted = device_bytes / sector * sector;
    if wanted <= before {
        return Ok(Grown {
            before,
            after: before,
        });
    }
    if wanted < BTRFS_LEAST {
        let least = BTRFS_LEAST;
        return Err(GrowError::TooSmall { least });
    }
    growth::btrfs_resize(root, device.id, wanted).map_err(failed("change the size"))?;
    let after = read()?.bytes;
    // btrfs reports a conflicting operation by a positive result, not by an errno.
    if after < wanted {
        return Err(GrowError::Busy { fs: FsType::Btrfs });
    }
    Ok(Grown { before, after })
}

#[cfg(test)]
mod tests;
