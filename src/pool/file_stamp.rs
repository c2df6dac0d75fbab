//! Whether a small file is as it was read or written, by one statx(2).

use std::{os::fd::BorrowedFd, path::Path};

use rustix::{
    fs::{AtFlags, StatxFlags, statx},
    io::Errno,
};

/// Identifies a file and its last change. Two changes within one tick of the file system's
/// clock may leave the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp {
    dev: (u32, u32),
    ino: u64,
    changed: (i64, u32),
    size: u64,
    /// Its names; none is left of a file that was removed.
    pub links: u32,
}

impl FileStamp {
    /// The stamp of the file at `path` from `dir`; of the open file `dir` where `path` is empty.
    /// Where a server has the file, it is asked, as it is for an open.
    pub fn of(dir: BorrowedFd<'_>, path: &Path) -> Result<Self, Errno> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_FORCE_SYNC;
        let stat = statx(dir, path, flags, StatxFlags::BASIC_STATS)?;
        Ok(Self {
            dev: (stat.stx_dev_major, stat.stx_dev_minor),
            ino: stat.stx_ino,
            changed: (stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec),
            size: stat.stx_size,
            links: stat.stx_nlink,
        })
    }
}
