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
    mount::{Look, ownership::FsGroup, path::Place, table},
};

/// The file system of this device, where that is what is mounted at the place,
/// and the `st_dev` of its files: for a mount that no record tells of.
pub fn fs_of(
    volume: &Volume,
    place: &Place,
    device: &Device,
) -> Result<Option<(FsType, Dev)>, Error> {
    let failed = || volume.io(format!("look at {}", place.path().display()));
    let Look::Mount(mounted) = place.look().map_err(failed())? else {
        return Ok(None);
    };
    let opened = place.open().map_err(failed())?;
    let entry = table::covering(opened.as_fd()).map_err(failed())?;
    // Others may have mounted it by another of its names.
    let is_its = Path::new(&entry.source) == device.node || mounted.dev == device.dev;
    let fs = is_its.then(|| entry.fs_type.parse().ok()).flatten();
    Ok(fs.map(|fs| (fs, mounted.dev)))
}

/// Grows the file system that is mounted at the place to its device's size.
pub async fn grow(
    node: &Rc<Node>,
    volume: &Volume,
    place: &Place,
    fs: FsType,
    size: u64,
    progress: &Progress,
) -> Result<grow::Grown, Error> {
    let place = place.clone();
    let opening = volume.io(format!("open {}", place.path().display()));
    let grown = node
        .lane(volume, progress, "grow", move || {
            let root = place.open().map_err(Err)?;
            grow::grow(fs, root.as_fd(), size).map_err(Ok)
        })
        .await;
    match grown {
        Ok(grown) => Ok(grown),
        Err(Ok(source)) => Err(Error::Grow {
            volume: volume.id.clone(),
            source,
        }),
        Err(Err(error)) => Err(opening(error)),
    }
}

/// Gives the volume to a group, as kubelet would.
pub async fn own(
    node: &Rc<Node>,
    volume: &Volume,
    place: &Place,
    group: FsGroup,
    progress: &Progress,
) -> Result<(), Error> {
    let place = place.clone();
    let opening = volume.io(format!("open {}", place.path().display()));
    let owned = node
        .lane(volume, progress, "chgrp", move || match place.open() {
            Ok(root) => group.apply(root.as_fd()).map_err(Ok),
            Err(error) => Err(Err(error)),
        })
        .await;
    match owned {
        Ok(done) => {
            already(volume, "chgrp", done);
            Ok(())
        }
        Err(Ok(source)) => Err(Error::Ownership {
            volume: volume.id.clone(),
            source,
        }),
        Err(Err(error)) => Err(opening(error)),
    }
}
