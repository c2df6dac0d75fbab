//! Opening block devices, and their ioctls (`linux/fs.h`).

use std::{
    fs, io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{FileTypeExt as _, MetadataExt as _},
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FileType, Mode, OFlags},
    io::Errno,
    ioctl::{Getter, Opcode, Setter, ioctl, opcode},
};

use serde::{Deserialize, Serialize};

use super::{Dev, busy::retry_while_busy, sysfs};

/// Sets or clears the mark by which a device refuses writes.
pub const BLKROSET: Opcode = opcode::none(0x12, 93);
const BLKROGET: Opcode = opcode::none(0x12, 94);
const BLKGETSIZE64: Opcode = opcode::read::<usize>(0x12, 114);
const BLKGETDISKSEQ: Opcode = opcode::read::<u64>(0x12, 128);

/// A block device and its node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockDev {
    pub dev: Dev,
    /// The node below `/dev`, as the kernel names it.
    #[serde(rename = "path")]
    pub node: PathBuf,
}

impl BlockDev {
    /// The device of that number; fails if its node is missing or another device's.
    pub fn of(dev: Dev) -> io::Result<Self> {
        let node = sysfs::present_node_of(dev)?;
        Ok(Self { dev, node })
    }
}

/// The device's size in bytes (`BLKGETSIZE64`).
pub fn size_bytes(device: impl AsFd) -> io::Result<u64> {
    // SAFETY: BLKGETSIZE64 writes one u64 (its number says size_t, its
    // handler stores 64 bits on every architecture).
    let size = unsafe { ioctl(device, Getter::<BLKGETSIZE64, u64>::new()) }?;
    Ok(size)
}

/// The disk's sequence number (`BLKGETDISKSEQ`, Linux 5.15), which no other disk has
/// or had since the machine was booted: a loop device gets a new one whenever a backing
/// file is attached. None on an older kernel.
pub fn diskseq(device: impl AsFd) -> io::Result<Option<u64>> {
    // SAFETY: BLKGETDISKSEQ writes one u64.
    match unsafe { ioctl(device, Getter::<BLKGETDISKSEQ, u64>::new()) } {
        Ok(number) => Ok(Some(number)),
        Err(Errno::NOTTY | Errno::INVAL) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Whether the device refuses writes (`BLKROGET`).
pub fn is_read_only(device: impl AsFd) -> io::Result<bool> {
    // SAFETY: BLKROGET writes one int.
    let is_read_only = unsafe { ioctl(device, Getter::<BLKROGET, libc::c_int>::new()) }?;
    Ok(is_read_only != 0)
}

/// Makes the whole device read-only, or writable again (`BLKROSET`). Unlike a
/// read-only mount of its node this stops writers: from then on a process that has the
/// device open for writing gets `EPERM`.
pub fn set_read_only(device: impl AsFd, read_only: bool) -> io::Result<()> {
    let value = libc::c_int::from(read_only);
    // SAFETY: BLKROSET reads one int.
    unsafe { ioctl(device, Setter::<BLKROSET, _>::new(value)) }?;
    Ok(())
}

/// The device of a node, or of a symlink to one. It does not open the node.
pub fn dev_behind(node: &Path) -> io::Result<Dev> {
    let metadata = fs::metadata(node)?;
    if metadata.file_type().is_block_device() {
        Ok(Dev::from_raw(metadata.rdev()))
    } else {
        Err(io::ErrorKind::NotFound.into())
    }
}

/// Opens a node, and checks that the descriptor is of the device `dev`: a name in `/dev`
/// may be stale, or another device's.
pub fn open(node: &Path, dev: Dev, flags: OFlags) -> io::Result<OwnedFd> {
    let file = rustix::fs::open(node, flags | OFlags::CLOEXEC, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    let is_block = FileType::from_raw_mode(stat.st_mode).is_block_device();
    if is_block && Dev::from_raw(stat.st_rdev) == dev {
        Ok(file)
    } else {
        Err(io::Error::new(
            io::ErrorKind::NotFound,
            format!("{} is not the node of block device {dev}", node.display()),
        ))
    }
}

/// Opens a device as [`open`] does, exclusively: `EBUSY` where another opener has it
/// exclusively, such as a mount, device mapper or md. Some openers do for a moment only,
/// so this retries while busy.
pub fn open_exclusive(node: &Path, dev: Dev, flags: OFlags) -> io::Result<OwnedFd> {
    retry_while_busy(
        || open(node, dev, flags | OFlags::EXCL),
        |opened| opened.as_ref().is_err_and(is_busy),
    )
}

/// Whether the kernel answered `EBUSY`.
pub fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::BUSY.raw_os_error())
}
