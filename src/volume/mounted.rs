//! Mounted file systems: their type, size and group.

use std::path::Path;

use rustix::fd::AsFd as _;

use super::{already, context::OnLane, error::Cause};
use crate::{
    device::Device,
    fs::{FsType, grow},
    kernel::Dev,
    mount::{PathKind, ownership::FsGroup, path::SafePath, table},
};

/// The file system of this device, if it is mounted at the place, and the `st_dev` of its
/// files: for a mount without a record.
pub(super) fn fs_of(place: &SafePath, device: &Device) -> Result<Option<(FsType, Dev)>, Cause> {
    let failed = || Cause::io(format!("look at {}", place.path().display()));
    let PathKind::Mount(mounted) = place.kind().map_err(failed())? else {
        return Ok(None);
    };
    let opened = place.open().map_err(failed())?;
    let entry = table::covering(opened.as_fd()).map_err(failed())?;
    // Another driver may have mounted it by another name of the device.
    let is_its = Path::new(&entry.source) == device.node || mounted.dev == device.dev;
    let fs = is_its.then(|| entry.fs_type.parse().ok()).flatten();
    Ok(fs.map(|fs| (fs, mounted.dev)))
}

/// Grows the file system that is mounted at the path to its device's size.
pub(super) fn grow(
    cx: OnLane<'_>,
    mount_point: &Path,
    fs: FsType,
    size: u64,
) -> Result<grow::Grown, Cause> {
    cx.step("grow", || {
        let place = cx.node.places.staging(mount_point)?;
        let failed = Cause::io(format!("open {}", place.path().display()));
        let root = place.open().map_err(failed)?;
        Ok(grow::grow(fs, root.as_fd(), size)?)
    })
}

/// Gives the volume to a group, as kubelet would.
pub(super) fn own(place: &SafePath, group: FsGroup) -> Result<(), Cause> {
    let failed = Cause::io(format!("open {}", place.path().display()));
    let root = place.open().map_err(failed)?;
    already("chgrp", group.apply(root.as_fd())?);
    Ok(())
}
