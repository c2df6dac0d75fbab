//! Mounted file systems: their type, size and group.

use std::path::Path;

use rustix::{
    fd::{AsFd as _, OwnedFd},
    fs::{Gid, Mode, OFlags, Uid, fchmod, fchown, fstat, openat},
};

use super::{already, context::OnLane, error::Cause, publish, record::Record, spec::RootAccess};
use crate::{
    device::{Device, Source},
    fs::{
        FsType,
        fscrypt::{EncryptedDirectory, FileEncryption},
        grow,
    },
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

/// Grows the volume's mounted file system to its device's size.
pub(super) fn grow(
    cx: OnLane<'_>,
    record: &Record,
    fs: FsType,
    size: u64,
) -> Result<grow::Grown, Cause> {
    cx.step("grow", || {
        // Without its mount the path leads to the node's own file system.
        let root = publish::open_staged(cx, record)?;
        Ok(grow::grow(fs, root.as_fd(), size)?)
    })
}

/// The encrypted directory of the file system that is mounted at the place.
pub(super) fn encrypted(
    place: &SafePath,
    names: EncryptedDirectory,
) -> Result<FileEncryption, Cause> {
    let failed = Cause::io(format!("open {}", place.path().display()));
    let root = place.open().map_err(failed)?;
    Ok(FileEncryption::below(root.as_fd(), names)?)
}

/// The directory that pods see: the root of the file system, or its encrypted directory.
fn shown(place: &SafePath, source: &Source) -> Result<OwnedFd, Cause> {
    let failed = Cause::io(format!("open {}", place.path().display()));
    match source.encrypted_directory() {
        Some(names) => Ok(encrypted(place, names)?.directory()?),
        None => place.open().map_err(failed),
    }
}

/// Gives the volume to a group, as kubelet would.
pub(super) fn own(place: &SafePath, source: &Source, group: FsGroup) -> Result<(), Cause> {
    already("chgrp", group.apply(shown(place, source)?.as_fd())?);
    Ok(())
}

/// Gives the volume's directory its owner and its permission bits, where they differ.
pub(super) fn set_root(place: &SafePath, source: &Source, root: RootAccess) -> Result<(), Cause> {
    let shown = shown(place, source)?;
    let path = place.path().display();
    let failed = Cause::io(format!("set the owner and the mode of {path}"));
    let set = || {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = openat(shown, ".", flags, Mode::empty())?;
        let now = fstat(&directory)?;
        if let Some((uid, gid)) = root.owner
            && (now.st_uid, now.st_gid) != (uid, gid)
        {
            fchown(
                &directory,
                Some(Uid::from_raw(uid)),
                Some(Gid::from_raw(gid)),
            )?;
        }
        // A change of the owner may clear bits.
        let now = Mode::from_raw_mode(fstat(&directory)?.st_mode);
        if let Some(mode) = root.mode.map(Mode::from_raw_mode)
            && now != mode
        {
            fchmod(&directory, mode)?;
        }
        Ok(())
    };
    set().map_err(failed)
}
