//! Making a device blank, of which it is known that what is on it is nobody's data.

use std::{io, path::Path};

use rustix::fs::{FallocateFlags, OFlags, fallocate, fsync};

use super::sysfs;
use crate::{
    fs::probe,
    kernel::{Dev, block},
};

/// Writes zeros where a probe looks; nobody else may have the device in use. May
/// be stuck for as long as the device does not answer.
pub fn blank(node: &Path, dev: Dev) -> io::Result<()> {
    let file = block::open(node, dev, OFlags::RDWR | OFlags::EXCL)?;
    let zeros = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    for region in probe::regions(sysfs::size_bytes(dev)?) {
        fallocate(&file, zeros, region.offset, region.len as u64)?;
    }
    fsync(&file)?;
    Ok(())
}
