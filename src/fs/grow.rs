//! Growing mounted file systems to the size of their device.
//!
//! All three do it by an ioctl on the mounted file system, and none of them
//! says "already as large" in a way of its own: ext4 asks for a capability
//! before it looks at the size, XFS takes a smaller number for a wish to shrink,
//! btrfs starts an operation. So the size is read first, and where nothing is to
//! be gained nothing is called. That makes growing safe to repeat.

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

/// What no file system can use at a device's end: no block is larger.
const LEAST_GAIN: u64 = 64 << 10;

/// What growing did; the same twice where there was nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Grown {
    /// Bytes of the file system before.
    pub before: u64,
    /// Bytes of the file system now.
    pub after: u64,
}

/// Why a file system did not grow.
#[derive(Debug, thiserror::Error)]
pub enum GrowError {
    /// The agent may not.
    #[error("growing a mounted {fs} takes {capability}; add it to the node agent's container")]
    NeedsCapability {
        /// The file system.
        fs: FsType,
        /// The capability's name.
        capability: &'static str,
    },
    /// ext4 noticed errors.
    #[error("ext4 has noted errors and does not grow; unmount the volume and check it with e2fsck")]
    HasErrors,
    /// Several devices: which one should grow is not ours to say.
    #[error("btrfs spans {devices} devices; grow it by hand with btrfs filesystem resize")]
    SeveralDevices {
        /// How many.
        devices: usize,
    },
    /// Another operation on the whole file system goes on.
    #[error("{fs} is at another resize or balance; try again after it")]
    Busy {
        /// The file system.
        fs: FsType,
    },
    /// Anything else.
    #[error("cannot {what} of the mounted {fs}")]
    Io {
        /// The file system.
        fs: FsType,
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
}

impl GrowError {
    /// What the caller may do about it. Kubelet repeats no precondition before the volume
    /// is mounted anew.
    pub fn kind(&self) -> Kind {
        match self {
            Self::NeedsCapability { .. } | Self::HasErrors | Self::SeveralDevices { .. } => {
                Kind::Precondition
            }
            Self::Busy { .. } | Self::Io { .. } => Kind::Transient,
        }
    }
}

/// Whether a file system may gain something on a device of that size. XFS may
/// find the rest too small for another allocation group; then [`grow`] says so.
pub fn needed(info: &probe::FsInfo, device_bytes: u64) -> bool {
    device_bytes.saturating_sub(info.bytes) >= LEAST_GAIN
}

/// Grows the file system that is mounted at `mount_root` (a descriptor of its
/// root directory, `O_PATH` will do) to its device's `device_bytes`.
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
/// cache while it is mounted. (statfs(2) leaves ext4's own tables out.)
fn ext4_size(root: &OwnedFd) -> io::Result<probe::ExtSize> {
    let dev = Dev::from_raw(rustix::fs::fstat(root)?.st_dev);
    let device = block::open(&sysfs::node_of(dev)?, dev, OFlags::RDONLY)?;
    let mut superblock = [0; probe::EXT_LEN];
    std::fs::File::from(device).read_exact_at(&mut superblock, probe::EXT_OFFSET)?;
    probe::ext_size(&superblock).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn xfs(root: &OwnedFd, device_bytes: u64) -> Result<Grown, GrowError> {
    /// `XFS_MIN_AG_BLOCKS`: the kernel leaves a smaller rest unused.
    const LEAST_GROUP: u64 = 64;
    let failed = |what| failed(FsType::Xfs, what);
    let read = || growth::xfs_geometry(root).map_err(failed("read the geometry"));
    let bytes =
        |geometry: &growth::XfsGeometry| geometry.data_blocks * u64::from(geometry.block_size);
    let geometry = read()?;
    let before = bytes(&geometry);
    let mut blocks = device_bytes / u64::from(geometry.block_size);
    let rest = blocks % u64::from(geometry.ag_blocks);
    if rest < LEAST_GROUP {
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
    growth::btrfs_resize(root, device.id, wanted).map_err(failed("change the size"))?;
    let after = read()?.bytes;
    // An operation that excludes this one is told by a positive result, which
    // no error number carries.
    if after < wanted {
        return Err(GrowError::Busy { fs: FsType::Btrfs });
    }
    Ok(Grown { before, after })
}

#[cfg(test)]
mod tests;
