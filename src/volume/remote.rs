//! Sources without a block device: a server has their file system.
//!
//! While the server does not answer, looks at a mount wait for nothing (`STATX_DONT_SYNC`,
//! `O_PATH`, the mount table), nor does an unmount, but for that of a superblock's last
//! mount: it writes back what is not written yet, and ends the session with the server.

use std::{
    path::Path,
    sync::mpsc::{self, RecvTimeoutError},
};

use rustix::fd::{AsFd as _, BorrowedFd};
use serde::Deserialize;

use super::{
    context::OnLane,
    error::Cause,
    places::{absent_is_none, at_staging, is_kubelets},
    record::{Held, Record},
};
use crate::{
    Done,
    device::{self, Source},
    mount::{
        Mounted, PathKind, bind,
        path::SafePath,
        table::{self, MountEntry},
        unmount,
    },
};

/// The source's mount at the place, for a mount without a record.
pub(super) fn mounted(source: &Source, place: &SafePath) -> Result<Option<Mounted>, Cause> {
    let failed = || Cause::io(format!("look at {}", place.path().display()));
    let PathKind::Mount(mounted) = place.kind().map_err(failed())? else {
        return Ok(None);
    };
    let opened = place.open().map_err(failed())?;
    let entry = table::covering(opened.as_fd()).map_err(failed())?;
    Ok(source.is_mounted_as(&entry).then_some(mounted))
}

/// Unmounts a directory of a server, which may have died. The place is free at once, since
/// a detached mount keeps the superblock. Its end is that of the superblock, unless another
/// mount has it: that is waited for, but not for ever. Where as many already wait for the
/// server as may, nothing is unmounted.
pub(super) fn unmount(cx: OnLane<'_>, place: &SafePath) -> Result<Done, Cause> {
    if is_kept_by_staging(cx, place) {
        return Ok(unmount::unmount(place)?);
    }
    // A directory that its server has lost cannot be opened, and has nothing to write.
    let Ok(opened) = place.open() else {
        return Ok(unmount::unmount(place)?);
    };
    let wait = cx.node.config.remote_unmount;
    let server = server_of(opened.as_fd());
    let under_way = cx.node.write_backs.begin(&server, wait);
    let under_way = under_way.map_err(|count| Cause::ServerAway { server, count })?;
    let kept = bind::detached(opened.as_fd());
    drop(opened);
    let done = unmount::unmount(place)?;
    let Ok(kept) = kept else {
        return Ok(done);
    };
    let (ended, ends) = mpsc::channel::<()>();
    let end = move || {
        drop(kept);
        drop(under_way);
        drop(ended);
    };
    drop(cx.node.lanes.run(&cx.volume.id, "write-back", end));
    if ends.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
        tracing::warn!(
            volume_id = cx.volume.id,
            seconds = wait.as_secs(),
            "unmounted, but the server does not answer: what it does not have yet is written once it is back"
        );
    }
    Ok(done)
}

/// Whether the place is a target of the volume, whose superblock its staging mount keeps.
fn is_kept_by_staging(cx: OnLane<'_>, place: &SafePath) -> bool {
    let Some(record) = cx.volume.record() else {
        return false;
    };
    let at = record.mount_point();
    let staging = (cx.node.places.staging(&at).ok()).filter(|it| it.path() != place.path());
    let kind = staging.and_then(|staging| staging.kind().ok());
    matches!(kind, Some(PathKind::Mount(mounted)) if record.appears_at(&mounted))
}

/// The server of the mount, as its source names it.
fn server_of(opened: BorrowedFd<'_>) -> String {
    let source = table::covering(opened).map(|entry| entry.source.display().to_string());
    let source = source.unwrap_or_default();
    let server = source.split_once(":/").map(|(server, _)| server.to_owned());
    server.unwrap_or(source)
}

/// Where kubelet itself mounts directories of NFS servers, for pods that name no CSI driver.
pub(super) const IN_TREE: &str = "kubernetes.io~nfs";

/// What kubelet notes beside a volume that it has a CSI driver stage or publish
/// (pkg/volume/csi, `vol_data.json`).
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct VolumeData {
    #[serde(rename = "driverName")]
    driver: String,
    #[serde(rename = "volumeHandle")]
    handle: String,
}

const VOLUME_DATA: &str = "vol_data.json";

/// Refuses what kubelet has noted as another volume, mostly of another driver.
fn refuse_noted(cx: OnLane<'_>, path: &Path) -> Result<(), Cause> {
    let note = absent_is_none(cx.node.places.staging(&path.with_file_name(VOLUME_DATA)))?;
    let Some(text) = note.map_or(Ok(None), |note| note.read().map_err(at_staging))? else {
        return Ok(());
    };
    // One that cannot be parsed names no volume: kubelet itself unmounts nothing by it.
    let data: VolumeData = serde_json::from_slice(&text).unwrap_or_default();
    if data.driver == cx.node.config.driver_name && data.handle == cx.volume.id {
        return Ok(());
    }
    Err(Cause::precondition(format!(
        "what is mounted at {} is another volume: the {VOLUME_DATA} beside it names volume {:?} of \
         driver {:?}",
        path.display(),
        data.handle,
        data.driver
    )))
}

/// Refuses the mount of another volume, where a directory of a server is mounted that no
/// record knows. It names no volume itself, nor does the handle of a static volume name its
/// directory; and its unmount loses nothing. kubelet's note beside it names the volume, where
/// there is one. Where the administrator may have mounts, it must be the directory of the
/// volume's record: an agent may have died before it recorded the mount.
pub(super) fn refuse_others(
    cx: OnLane<'_>,
    record: Option<&Record>,
    place: &SafePath,
) -> Result<(), Cause> {
    let path = place.path();
    if is_kubelets(path, IN_TREE) {
        return Err(Cause::precondition(format!(
            "what is mounted at {} is a volume of kubelet's own, of no CSI driver",
            path.display()
        )));
    }
    let has = |held: &Held| held.targets.contains_key(path) || held.record.mount_point() == path;
    refuse_noted(cx, path)?;
    let volumes = cx.node.volumes();
    let mut others = volumes.values().filter(|it| it.id != cx.volume.id);
    if let Some(other) = others.find(|it| it.held().as_ref().is_some_and(has)) {
        return Err(Cause::precondition(format!(
            "volume {} is mounted at {}",
            other.id,
            path.display()
        )));
    }
    let entry = topmost(place);
    let is_its = |entry: &MountEntry| record.is_some_and(|it| it.source.is_mounted_as(entry));
    if cx.node.places.is_for_volumes(path) || entry.as_ref().is_some_and(is_its) {
        return Ok(());
    }
    let what = entry.map(|it| it.source.display().to_string());
    Err(Cause::precondition(format!(
        "{} is mounted at {}, which is not known to be this volume; unmount it by hand",
        what.as_deref().unwrap_or("a directory of a server"),
        path.display()
    )))
}

/// Whether what is mounted at the place is a directory of a server.
pub(super) fn is_remote(place: &SafePath) -> bool {
    topmost(place).is_some_and(|it| device::is_remote(&it.fs_type))
}

/// The mount at the place, also of a directory that its server has lost and that cannot be
/// opened.
fn topmost(place: &SafePath) -> Option<MountEntry> {
    let all = table::list().unwrap_or_default();
    let mut last_first = all.into_iter().rev();
    last_first.find(|it| it.mount_point == place.path())
}
