//! Blanking a device that holds a partial format and no data.

use std::{fs::File, io, path::Path};

use rustix::fs::{FallocateFlags, OFlags, fallocate, fsync};

use crate::{
    fs::probe,
    kernel::{Dev, block, sysfs},
};

/// Overwrites the regions that a probe reads with zeros, if they hold a partial format.
/// Returns whether it did. `is_it` checks that the opened device is the intended one. The
/// device must not be in use. Blocks while the device does not answer.
pub fn blank(node: &Path, dev: Dev, is_it: impl FnOnce() -> bool) -> io::Result<bool> {
    let flags = OFlags::RDWR | OFlags::EXCL;
    let file = File::from(block::open(node, dev, flags)?);
    if !is_it() {
        let why = format!("{} is another device by now", node.display());
        return Err(io::Error::new(io::ErrorKind::NotFound, why));
    }
    let size = sysfs::size_bytes(dev)?;
    if !probe::content_of(&file, size)?.is_partial_format() {
        return Ok(false);
    }
    let zeros = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    for region in probe::regions(size) {
        fallocate(&file, zeros, region.offset, region.len as u64)?;
    }
    fsync(&file)?;
    Ok(true)
}
