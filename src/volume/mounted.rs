//! File systems that are mounted: which one it is, its size, and whose.

use std::{path::Path, rc::Rc};

use rustix::fd::AsFd as _;

use super::{
    Error, Node, already,
    task::{Progress, Volume},
};
use crate::{
    device::Device,
    fs::{FsType, grow},
    kernel::Dev,
    mount::{PathKind, ownership::FsGroup, path::SafePath, table},
};

/// The file system of this device, where that is what is mounted at the place,
/// and the `st_dev` of its files: for a mount that no record tells of. On the volume's
/// lane.
pub fn fs_of(
    volume_id: &str,
    place: &SafePath,
    device: &Device,
) -> Result<Option<(FsType, Dev)>, Error> {
    let failed = || Error::io(volume_id, format!("look at {}", place.path().display()));
    let PathKind::Mount(mounted) = place.kind().map_err(failed())? else {
        return Ok(None);
    };
    let opened = place.open().map_err(failed())?;
    let entry = table::covering(opened.as_fd()).map_err(failed())?;
    // Others may have mounted it by another of its names.
    let is_its = Path::new(&entry.source) == device.node || mounted.dev == device.dev;
    let fs = is_its.then(|| entry.fs_type.parse().ok()).flatten();
    Ok(fs.map(|fs| (fs, mounted.dev)))
}

/// Grows the file system that is mounted at the path to its device's size.
pub async fn grow(
    node: &Rc<Node>,
    volume: &Volume,
    mount_point: &Path,
    fs: FsType,
    size: u64,
    progress: &Progress,
) -> Result<grow::Grown, Error> {
    let (places, path, id) = (
        node.places.clone(),
        mount_point.to_owned(),
        volume.id.clone(),
    );
    let grow = move || {
        let place = places.staging(&path)?;
        let failed = Error::io(&id, format!("open {}", place.path().display()));
        let root = place.open().map_err(failed)?;
        let grown = grow::grow(fs, root.as_fd(), size);
        grown.map_err(|source| Error::Grow { volume: id, source })
    };
    node.lane(volume, progress, "grow", grow).await
}

/// Gives the volume to a group, as kubelet would. On the volume's lane.
pub fn own(volume_id: &str, place: &SafePath, group: FsGroup) -> Result<(), Error> {
    let failed = Error::io(volume_id, format!("open {}", place.path().display()));
    let root = place.open().map_err(failed)?;
    let owned = group.apply(root.as_fd());
    let done = owned.map_err(|source| Error::Ownership {
        volume: volume_id.to_owned(),
        source,
    })?;
    already(volume_id, "chgrp", done);
    Ok(())
}
