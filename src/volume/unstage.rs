//! Unstage: from a mount back to a detached source.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use super::{
    Outcome, already,
    attach::purpose_of,
    context::{Context, OnLane},
    error::Cause,
    layout, mounted,
    places::{absent_is_none, at_staging},
    reconcile,
    record::{Phase, Record},
    remote,
    spec::Use,
    unmake,
};
use crate::{
    Detached, Done,
    device::{
        Device, DeviceError, Source,
        descriptor_lock::{self, Unlock},
        openers::{self, Opener},
        ready,
    },
    error_chain,
    mount::{
        PathKind,
        path::SafePath,
        unmount::{self, UnmountError},
    },
    observe::logs,
};

/// `NodeUnstageVolume`. A volume that is not staged is success.
pub(super) async fn unstage(cx: Context<'_>, staging_path: &Path) -> Result<Outcome, Cause> {
    if let Some(record) = cx.volume.record() {
        refuse_elsewhere(&record, staging_path)?;
    }
    let path = staging_path.to_owned();
    cx.on_lane(|cx| Box::pin(on_lane(cx, path))).await
}

/// Refuses a path at which the volume is not staged. A stage that did not finish has no
/// staging path yet.
fn refuse_elsewhere(record: &Record, staging_path: &Path) -> Result<(), Cause> {
    if record.phase != Phase::Staged || record.staging_path == staging_path {
        return Ok(());
    }
    Err(Cause::precondition(format!(
        "it is staged at {}, not at {}",
        record.staging_path.display(),
        staging_path.display()
    )))
}

async fn on_lane(cx: OnLane<'_>, staging_path: PathBuf) -> Result<Outcome, Cause> {
    let record = match cx.volume.record() {
        Some(record) => record,
        None if unmount_unknown(cx, &staging_path)? == Done::Now => return Ok(Outcome::Done),
        None => {
            let Some(found) = reconcile::rebuild(cx, &staging_path)? else {
                layout::clear_left(cx, &staging_path)?;
                return Ok(Outcome::Done);
            };
            found
        }
    };
    cx.progress.backend(record.source.backend());
    refuse_elsewhere(&record, &staging_path)?;
    if let Some(target) = cx.live_target() {
        return Err(Cause::precondition(format!(
            "it is still published at {}; unpublish it first",
            target.display()
        )));
    }
    let begun = Instant::now();
    tear_down(cx, &record).await?;
    tracing::info!(
        volume_id = record.volume_id,
        source = %record.source,
        micros = logs::micros(begun.elapsed()),
        "unstaged"
    );
    Ok(Outcome::Done)
}

/// Unmounts, detaches, releases the source and forgets the volume; skips what is done.
pub(super) async fn tear_down(cx: OnLane<'_>, record: &Record) -> Result<(), Cause> {
    let mut record = record.clone();
    let is_staged = record.phase == Phase::Staged;
    record.phase = Phase::Unstaging;
    if is_staged && !record.found && record.inline.is_none() && record.mounts() {
        // The file still says staged. An agent that reads it after a crash looks whether the
        // volume is mounted, and goes on from there in any case.
        cx.volume.hold_record(record.clone());
    } else {
        cx.remember(&record).await?;
    }
    if let Some(device) = &record.device {
        // A lock over another image's device stays.
        if record.usage == Use::Block && record.source.is_still(device) {
            release_locks(cx, device)?;
        }
        if record.mounts() {
            unmount(cx, &record, device)?;
        }
        if record.usage != Use::Block
            && !record.read_only
            && let Err(error) = unmake::unmake(cx, &record, device)
        {
            // A dead device must be detached all the same.
            tracing::warn!(volume_id = cx.volume.id, error = %error_chain(&error), "cannot blank a partial format; see `uringctl format` if the volume is refused");
        }
    }
    if !record.source.has_device() {
        unmount_remote(cx, &record)?;
    }
    detach(cx, &record).await?;
    forget(cx, &record).await?;
    Ok(())
}

/// Forgets a detached volume; deletes an inline volume's image.
pub(super) async fn forget(cx: OnLane<'_>, record: &Record) -> Result<(), Cause> {
    if record.inline.is_some() {
        cx.step("delete", || {
            remove_own(cx, &record.staging_path)?;
            if record.source.has_device() {
                let image = cx.node.backends.inline_image(&record.source);
                already("delete", image.delete_inline(&record.volume_id)?);
            }
            Ok::<_, Cause>(())
        })?;
    }
    if record.is_staged_below() {
        layout::clear(cx, record)?;
    }
    cx.forget(record).await
}

/// Unmounts the volume where it is staged, if that is what is mounted there. This may
/// be the superblock's last mount, which writes everything back and can hang with the
/// device.
fn unmount(cx: OnLane<'_>, record: &Record, device: &Device) -> Result<(), Cause> {
    cx.step("look", || {
        let Some(place) = absent_is_none(cx.node.places.staging(&record.mount_point()))? else {
            return Ok(());
        };
        if !is_mounted(record, &place, device)? {
            return Ok(());
        }
        let done = cx.step("unmount", || unmount::unmount(&place));
        let done = done.map_err(|error| match error {
            UnmountError::Busy { users, .. } => Cause::Busy {
                device: device.node.clone(),
                openers: (users.into_iter().map(Opener::User))
                    .chain(openers::openers(device.dev))
                    .collect(),
            },
            UnmountError::Io { .. } => error.into(),
        })?;
        already("unmount", done);
        Ok(())
    })
}

/// Unmounts the directory of a server that is mounted at the path without a record. It has
/// no device to release.
fn unmount_unknown(cx: OnLane<'_>, staging_path: &Path) -> Result<Done, Cause> {
    cx.step("look", || {
        let Some(place) = absent_is_none(cx.node.places.staging(staging_path))? else {
            return Ok(Done::Already);
        };
        let look = place.kind();
        let look = look.map_err(Cause::io(format!("look at {}", place.path().display())))?;
        match look {
            PathKind::Mount(_) if remote::is_remote(&place) => {
                remote::refuse_others(cx, None, &place)?;
                cx.step("unmount", || remote::unmount(cx, &place))
            }
            _ => Ok(Done::Already),
        }
    })
}

/// Ends an inline volume that was published at the target, if there is one without a record:
/// a directory of a server, an image whose record was lost, or its staging directory alone.
pub(super) async fn end_unknown_inline(cx: OnLane<'_>, target: &Path) -> Result<(), Cause> {
    let staging_path = cx.node.inline_staging(&cx.volume.id);
    let _ = unmount_unknown(cx, &staging_path)?;
    // Also after a kill between the unmount and this.
    let left = cx.step("look", || -> Result<Option<PathKind>, Cause> {
        let Some(place) = absent_is_none(cx.node.places.staging(&staging_path))? else {
            return Ok(None);
        };
        let look = place.kind();
        let look = look.map_err(Cause::io(format!("look at {}", place.path().display())))?;
        Ok(Some(look))
    })?;
    match left {
        Some(PathKind::Mount(_)) => {
            let found = reconcile::rebuild(cx, &staging_path)?;
            if let Some(mut record) = found.filter(|it| matches!(it.source, Source::Loop(_))) {
                let live = cx.live_target();
                let is_published = live.is_some();
                record.inline = Some(live.unwrap_or_else(|| target.to_owned()));
                cx.volume.hold_record(record.clone());
                if !is_published {
                    tear_down(cx, &record).await?;
                }
            }
        }
        Some(PathKind::Dir) => cx.step("delete", || remove_own(cx, &staging_path))?,
        _ => {}
    }
    Ok(())
}

/// Removes the staging directory of an inline volume, which is the agent's own.
fn remove_own(cx: OnLane<'_>, staging_path: &Path) -> Result<(), Cause> {
    if let Some(place) = absent_is_none(cx.node.places.staging(staging_path))? {
        let removed = place.remove().map_err(at_staging)?;
        already("remove the staging directory", removed);
    }
    Ok(())
}

/// Unmounts a source without a block device where it is staged.
fn unmount_remote(cx: OnLane<'_>, record: &Record) -> Result<(), Cause> {
    cx.step("look", || {
        let Some(place) = absent_is_none(cx.node.places.staging(&record.mount_point()))? else {
            return Ok(());
        };
        let look = place.kind();
        let look = look.map_err(Cause::io(format!("look at {}", place.path().display())))?;
        let PathKind::Mount(mounted) = look else {
            return Ok(());
        };
        // An agent may have died between the mount and its record.
        let is_its = record.appears_at(&mounted)
            || record.root_dev.is_none() && remote::mounted(&record.source, &place)?.is_some();
        if is_its {
            let done = cx.step("unmount", || remote::unmount(cx, &place))?;
            already("unmount", done);
        }
        Ok(())
    })
}

/// Whether the volume is what is mounted where it is staged.
fn is_mounted(record: &Record, place: &SafePath, device: &Device) -> Result<bool, Cause> {
    if record.usage == Use::Block {
        let look = place.kind();
        let look = look.map_err(Cause::io(format!("look at {}", place.path().display())))?;
        return Ok(matches!(look, PathKind::Mount(mounted) if record.appears_at(&mounted)));
    }
    let look = place.kind();
    let look = look.map_err(Cause::io(format!("look at {}", place.path().display())))?;
    match look {
        PathKind::Mount(mounted) if mounted.dev == device.dev => Ok(true),
        // btrfs has a number of its own.
        PathKind::Mount(_) => Ok(mounted::fs_of(place, device)?.is_some()),
        _ => Ok(false),
    }
}

/// Releases every descriptor lock that is left over the device. Called when no target is
/// left, so no lock is of use any more.
fn release_locks(cx: OnLane<'_>, device: &Device) -> Result<(), Cause> {
    let unlock = || descriptor_lock::unlock(device.dev, &Unlock::All);
    for lock in cx.step("unlock", unlock)? {
        tracing::info!(volume_id = cx.volume.id, lock = %lock.device.node.display(), backing = %lock.backing_path.display(), "released an orphaned descriptor lock");
    }
    Ok(())
}

async fn detach(cx: OnLane<'_>, record: &Record) -> Result<(), Cause> {
    let (backends, source, id) = (&cx.node.backends, &record.source, &cx.volume.id);
    let (device, detached) = cx.step("detach", || {
        let device = match &record.device {
            Some(device) => Some(device.clone()),
            None => backends.left_by(source, id)?,
        };
        let detached = if let Some(device) = &device {
            backends.detach(source, device, id, purpose_of(&record.usage))?
        } else {
            backends.bind(source).release(id)?;
            Detached::Already
        };
        Ok::<_, DeviceError>((device, detached))
    })?;
    if let (Some(device), Detached::Deferred) = (device, detached) {
        // Another opener delays the detach: udevd for a moment, or one of these.
        let openers = cx.step("holders", || openers::openers(device.dev));
        let detached = async {
            cx.progress.waits_for(format!(
                "{}: {}",
                device.node.display(),
                openers::describe(&openers)
            ));
            ready::gone(&cx.node.uevents, source, &device).await
        };
        cx.wait("gone", detached).await.map_err(Cause::io(format!(
            "wait for {} to go",
            device.node.display()
        )))?;
        cx.step("release", || backends.bind(source).release(id))?;
    }
    Ok(())
}
