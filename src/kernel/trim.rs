//! The ioctl by which a mounted file system tells its device which space is free.

use std::{io, os::fd::AsFd};

use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

/// `FITRIM` (`include/uapi/linux/fs.h`).
const FITRIM: Opcode = opcode::read_write::<FstrimRange>(b'X', 121);

/// `struct fstrim_range`.
#[repr(C)]
struct FstrimRange {
    start: u64,
    len: u64,
    min_len: u64,
}

const _: () = assert!(size_of::<FstrimRange>() == 24);

/// Discards the free space among `len` bytes from `start` on of a mounted file system, of
/// which `mounted` is a file or directory that was opened for reading. Returns how many
/// bytes it found free.
pub fn trim(mounted: impl AsFd, start: u64, len: u64) -> io::Result<u64> {
    let mut range = FstrimRange {
        start,
        len,
        min_len: 0,
    };
    // SAFETY: FITRIM reads and writes one struct fstrim_range.
    unsafe { ioctl(mounted, Updater::<FITRIM, _>::new(&mut range)) }?;
    Ok(range.len)
}
