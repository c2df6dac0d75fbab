//! Writing part of a file back, without its metadata (sync_file_range(2)): so that a file
//! written at length has little left for its fsync, and does not fill the page cache.

use std::{fs::File, io, ops::Range, os::fd::AsRawFd as _};

use rustix::io::Errno;

/// Starts to write back what a range has that is not on the disk.
pub fn start(file: &File, range: &Range<u64>) -> io::Result<()> {
    sync(file, range, libc::SYNC_FILE_RANGE_WRITE)
}

/// Waits until a range is written back. An error of the disk is reported here, and may not
/// be again by a later fsync of this descriptor.
pub fn finish(file: &File, range: &Range<u64>) -> io::Result<()> {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    sync(file, range, flags)
}

fn sync(file: &File, range: &Range<u64>, flags: libc::c_uint) -> io::Result<()> {
    let offset = |at: u64| libc::off64_t::try_from(at).map_err(io::Error::other);
    let (start, len) = (offset(range.start)?, offset(range.end - range.start)?);
    // SAFETY: it takes integers and accesses no memory of this process.
    let result = unsafe { libc::sync_file_range(file.as_raw_fd(), start, len, flags) };
    if result == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    // Where the kernel or the file system lacks it, the fsync does all of it.
    let lacks = [Errno::NOSYS, Errno::INVAL, Errno::SPIPE].map(|errno| Some(errno.raw_os_error()));
    if lacks.contains(&error.raw_os_error()) {
        return Ok(());
    }
    Err(error)
}
