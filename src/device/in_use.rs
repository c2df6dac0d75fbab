//! Refusing a raw device that is in use.
//!
//! A file system is made or mounted only on a device without another exclusive opener,
//! which the probe checks. A raw device is published unprobed, so it is checked here: its
//! user would write below a mount.

use std::{ffi::OsStr, path::Path};

use rustix::fs::OFlags;

use super::{
    AttachOptions, Purpose,
    error::{DeviceError, io},
    openers,
};
use crate::{
    kernel::{Dev, block, sysfs},
    mount::table,
};

/// Refuses to publish a device raw that is mounted or open exclusively, unless by the
/// volume's own user.
pub fn refuse(node: &Path, dev: Dev, options: &AttachOptions) -> Result<(), DeviceError> {
    let is_own = options.staged || options.known.as_deref() == Some(node);
    if options.purpose != Purpose::Raw || is_own {
        return Ok(());
    }
    match block::open_exclusive(node, dev, OFlags::RDONLY) {
        Ok(_) => Ok(()),
        Err(error) if !block::is_busy(&error) => Err(io("open the device")(error)),
        Err(_) if is_published(dev)? => Ok(()),
        Err(_) => Err(DeviceError::Busy {
            device: node.to_owned(),
            openers: openers::openers(dev),
        }),
    }
}

/// Whether its node is bound to a path: an agent whose records are lost published it, so
/// a pod may have it open.
fn is_published(dev: Dev) -> Result<bool, DeviceError> {
    let name = sysfs::name_of(dev).map_err(io("find the device"))?;
    let mounts = table::list().map_err(io("list the mounts"))?;
    // devtmpfs' root is /dev.
    let is_its = |root: &Path| root.file_name() == Some(OsStr::new(&name));
    Ok(mounts
        .iter()
        .any(|entry| entry.fs_type == "devtmpfs" && is_its(&entry.root)))
}
