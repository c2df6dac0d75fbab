//! The mark that makes a device refuse writes (`BLKROSET`, `block/ioctl.c`).
//!
//! A raw volume that is published read-only has it: a read-only bind of a device node does not
//! stop a writer. It belongs to the device's number and outlives what the number was attached
//! for, also where another program set it, such as an rbd-nbd that was started read-only.
//!
//! [`Device::read_only`] says how the device was attached, and never speaks of the mark.

use super::{
    Device, Purpose,
    error::{DeviceError, io},
};
use crate::{
    error_chain,
    kernel::{
        block::{self, BlockDev},
        sysfs,
    },
};
use rustix::fs::OFlags;

/// Makes the whole device refuse writes, or take them again.
pub fn set(device: &BlockDev, read_only: bool) -> Result<(), DeviceError> {
    let is_read_only = || sysfs::is_read_only(device.dev).map_err(io("read the device's state"));
    if is_read_only()? == read_only {
        return Ok(());
    }
    block::open(&device.node, device.dev, OFlags::RDONLY)
        .and_then(|file| block::set_read_only(file, read_only))
        .map_err(io("set the device read-only or writable"))?;
    if is_read_only()? != read_only {
        let device = device.node.clone();
        return Err(DeviceError::AttachedReadOnly { device });
    }
    Ok(())
}

/// Clears a mark that was left on a device that is attached for writing, unless the device is
/// for a raw volume, whose publish sets the mark as it should be.
pub fn clear_left(device: &Device, purpose: Purpose) -> Result<(), DeviceError> {
    if device.read_only || purpose == Purpose::Raw {
        return Ok(());
    }
    set(&device.block(), false)
}

/// Clears the mark before a detach, from a device that still is the volume's. Raw volumes
/// alone are published by it. A mark that stays does not keep the device: the next attach
/// clears it.
pub fn clear_published(device: &Device, purpose: Purpose) {
    if device.read_only || purpose != Purpose::Raw || !device.still_matches() {
        return;
    }
    if let Err(error) = set(&device.block(), false) {
        let error = error_chain(&error);
        tracing::warn!(error, device = %device.node.display(), "cannot make the device writable");
    }
}
