//! Unstage: from a mount back to a source that nobody holds.

use std::{path::Path, rc::Rc, sync::Arc};

use super::{
    Error, Node, Outcome, already, layout, mounted,
    places::{absent_is_none, at_staging},
    publish::appears_at,
    record::{Phase, Record},
    spec::Use,
    task::{Progress, Volume},
    unmake,
};
use crate::{
    Detached, chain,
    device::{
        Device,
        descriptor_lock::{self, Unlock},
        holders, ready,
    },
    mount::{
        PathKind,
        path::SafePath,
        unmount::{self, UnmountError},
    },
};

/// `NodeUnstageVolume`. A volume that is not staged is success.
pub async fn unstage(
    node: &Rc<Node>,
    volume: &Volume,
    staging_path: &Path,
    progress: &Progress,
) -> Result<Outcome, Error> {
    let record = match volume.record() {
        Some(record) => record,
        None => match super::reconcile::rebuild(node, volume, staging_path, progress).await? {
            Some(record) => record,
            None => return Ok(Outcome::Done),
        },
    };
    progress.backend(record.source.backend());
    // What did not get that far has no place to insist on.
    if record.phase == Phase::Staged && record.staging_path != staging_path {
        return Err(volume.precondition(format!(
            "it is staged at {}, not at {}",
            record.staging_path.display(),
            staging_path.display()
        )));
    }
    if let Some(target) = node.live_target(volume, progress).await {
        return Err(volume.precondition(format!(
            "it is still published at {}; unpublish it first",
            target.display()
        )));
    }
    tear_down(node, volume, &record, progress).await?;
    Ok(Outcome::Done)
}

/// Unmounts, detaches, gives the source back and forgets, as far as there is
/// anything to unmount, detach, give back and forget.
pub async fn tear_down(
    node: &Rc<Node>,
    volume: &Volume,
    record: &Record,
    progress: &Progress,
) -> Result<(), Error> {
    let mut record = record.clone();
    record.phase = Phase::Unstaging;
    node.remember(volume, record.clone(), progress).await?;
    if let Some(device) = &record.device {
        // A lock over another image's device is not ours to take.
        if record.usage == Use::Block && record.source.is_still(device) {
            release_locks(node, volume, device, progress).await?;
        }
        if record.mounts() {
            unmount(node, volume, &record, device, progress).await?;
        }
        if record.usage != Use::Block
            && !record.read_only
            && let Err(error) = unmake::unmake(node, volume, &record, device, progress).await
        {
            // A device that is dead has to go all the same.
            tracing::warn!(volume_id = volume.id, error = %chain(&error), "cannot blank out what an interrupted mkfs may have left; see `uringctl format` if the volume is refused");
        }
    }
    detach(node, volume, &record, progress).await?;
    forget(node, volume, &record, progress).await
}

/// Forgets a volume of which nothing is attached, with an inline volume's image.
pub async fn forget(
    node: &Rc<Node>,
    volume: &Volume,
    record: &Record,
    progress: &Progress,
) -> Result<(), Error> {
    if record.inline.is_some() {
        let (backends, places) = (Arc::clone(&node.backends), node.places.clone());
        let record = record.clone();
        let delete = move || -> Result<(), Error> {
            let id = &record.volume_id;
            // The staging directory is our own, too.
            if let Some(place) = absent_is_none(places.staging(&record.staging_path))? {
                let removed = place.remove().map_err(at_staging)?;
                already(id, "remove the staging directory", removed);
            }
            let image = backends.inline_image(&record.source);
            let deleted = image.delete_inline(id);
            already(
                id,
                "delete",
                deleted.map_err(|error| Error::device(id, error))?,
            );
            Ok(())
        };
        node.lane(volume, progress, "delete", delete).await?;
    }
    if record.is_staged_below() {
        layout::clear(node, volume, record, progress).await?;
    }
    node.forget(volume, record.inline.is_some(), progress).await
}

/// Unmounts the volume where it is staged, if that is what is mounted there. This may
/// be the superblock's last mount, which writes everything back and can hang with the
/// device.
async fn unmount(
    node: &Rc<Node>,
    volume: &Volume,
    record: &Record,
    device: &Device,
    progress: &Progress,
) -> Result<(), Error> {
    let (places, record, device) = (node.places.clone(), record.clone(), device.clone());
    let steps = progress.clone();
    let unmount = move || {
        let id = &record.volume_id;
        let Some(place) = absent_is_none(places.staging(&record.mount_point()))? else {
            return Ok(());
        };
        if !is_mounted(&record, &place, &device)? {
            return Ok(());
        }
        let done = steps.step_on_lane("unmount", || unmount::unmount(&place));
        let done = done.map_err(|error| match error {
            UnmountError::Busy { .. } => Error::Busy {
                volume: id.clone(),
                device: device.node.clone(),
                holders: holders::holders(device.dev),
            },
            source @ UnmountError::Io { .. } => Error::Unmount {
                volume: id.clone(),
                source,
            },
        })?;
        already(id, "unmount", done);
        Ok(())
    };
    node.lane(volume, progress, "look", unmount).await
}

/// Whether the volume is what is mounted where it is staged.
fn is_mounted(record: &Record, place: &SafePath, device: &Device) -> Result<bool, Error> {
    let id = &record.volume_id;
    if record.usage == Use::Block {
        let look = place.kind();
        let look = look.map_err(Error::io(id, format!("look at {}", place.path().display())))?;
        return Ok(
            matches!(look, PathKind::Mount(mounted) if appears_at(record, device, &mounted)),
        );
    }
    Ok(mounted::fs_of(id, place, device)?.is_some())
}

/// Releases every descriptor lock that is left over the device. Called when no
/// target is left, so no lock can still serve anybody.
async fn release_locks(
    node: &Rc<Node>,
    volume: &Volume,
    device: &Device,
    progress: &Progress,
) -> Result<(), Error> {
    let dev = device.dev;
    let released = node
        .lane(volume, progress, "unlock", move || {
            descriptor_lock::unlock(dev, &Unlock::All)
        })
        .await
        .map_err(|error| volume.device(error))?;
    for lock in released {
        tracing::info!(volume_id = volume.id, lock = %lock.device.node.display(), backing = %lock.backing_path.display(), "released an orphaned descriptor lock");
    }
    Ok(())
}

async fn detach(
    node: &Rc<Node>,
    volume: &Volume,
    record: &Record,
    progress: &Progress,
) -> Result<(), Error> {
    let backends = Arc::clone(&node.backends);
    let (source, known, id) = (
        record.source.clone(),
        record.device.clone(),
        volume.id.clone(),
    );
    let (device, detached) = node
        .lane(volume, progress, "detach", move || {
            let device = match known {
                Some(device) => Some(device),
                None => backends.left_by(&source, &id)?,
            };
            let detached = if let Some(device) = &device {
                backends.detach(&source, device, &id)?
            } else {
                backends.bind(&source).release(&id)?;
                Detached::Already
            };
            Ok((device, detached))
        })
        .await
        .map_err(|error| volume.device(error))?;
    if let (Some(device), Detached::Deferred) = (device, detached) {
        // Somebody has it open: udevd for a moment, or whoever is named here.
        let dev = device.dev;
        let held_by = node
            .lane(volume, progress, "holders", move || holders::holders(dev))
            .await;
        let gone = async {
            progress.waits_for(format!(
                "{}: {}",
                device.node.display(),
                holders::describe(&held_by)
            ));
            ready::gone(&node.uevents, &record.source, &device).await
        };
        progress
            .step("gone", gone)
            .await
            .map_err(volume.io(format!("wait for {} to go", device.node.display())))?;
        let backends = Arc::clone(&node.backends);
        let (source, id) = (record.source.clone(), volume.id.clone());
        node.lane(volume, progress, "release", move || {
            backends.bind(&source).release(&id)
        })
        .await
        .map_err(|error| volume.device(error))?;
    }
    Ok(())
}
