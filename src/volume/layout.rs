//! Where a volume is staged.
//!
//! A volume's mount is at the staging path itself, and raw ones have none. A
//! backend that succeeds another driver stages as that one does: everything below the
//! staging path, under the volume's handle, beside a stage file that describes the
//! volume; so each driver can unstage the other's volumes.

use std::path::Path;

use super::{
    already,
    context::OnLane,
    error::Cause,
    places::{Places, absent_is_none, at_staging},
    record::Record,
    spec::{Stage, mount_point},
};
use crate::{device::STAGE_FILE, mount::path::SafePath};

/// Whether this is a valid file name.
pub(super) fn is_one_name(id: &str) -> bool {
    Path::new(id).file_name().is_some_and(|name| name == id) && id.len() <= 255
}

/// Where the volume is to be mounted. Makes the staging directory if the caller, unlike
/// kubelet, did not.
pub(super) fn make_place(
    places: &Places,
    volume_id: &str,
    spec: &Stage,
) -> Result<SafePath, Cause> {
    if spec.source.is_staged_below() {
        if !is_one_name(volume_id) {
            return Err(Cause::Invalid {
                field: "volume_id",
                why: "is no name for a directory, which a volume of this backend needs".to_owned(),
            });
        }
        let above = places.staging(&spec.staging_path)?;
        already(
            "make the staging directory",
            above.make_dir(0o750).map_err(at_staging)?,
        );
    }
    let at = mount_point(&spec.source, &spec.staging_path, volume_id);
    places.staging(&at)
}

/// Writes the stage file of the volume, for the driver that unstages it.
pub(super) fn write_stage_file(cx: OnLane<'_>, record: &Record) -> Result<(), Cause> {
    let Some(file) = record
        .device
        .as_ref()
        .and_then(|device| record.source.stage_file(device))
    else {
        return Ok(());
    };
    let path = record.staging_path.join(file.name);
    cx.step("write-note", || {
        let place = cx.node.places.staging(&path)?;
        place.replace(&file.text).map_err(at_staging)
    })
}

/// The stage file at the staging path, whichever driver wrote it. Blocks.
pub(super) fn read_stage_file(
    places: &Places,
    staging_path: &Path,
) -> Result<Option<Vec<u8>>, Cause> {
    let Some(place) = absent_is_none(places.staging(&staging_path.join(STAGE_FILE)))? else {
        return Ok(None);
    };
    place.read().map_err(at_staging)
}

/// Removes what a stage made below the staging path: the mount point and the stage file.
pub(super) fn clear(cx: OnLane<'_>, record: &Record) -> Result<(), Cause> {
    let places = &cx.node.places;
    cx.step("clear", || {
        remove_mount_point(places, &record.mount_point())?;
        if let Some(name) = record.source.stage_file_name()
            && let Some(place) = absent_is_none(places.staging(&record.staging_path.join(name)))?
        {
            remove_stage_file(&place)?;
        }
        Ok(())
    })
}

/// Removes a stage file that describes nothing, with the empty mount point beside it: those of
/// a volume that is not staged. Beside another volume's mount point the file is that volume's.
pub(super) fn clear_left(cx: OnLane<'_>, staging_path: &Path) -> Result<(), Cause> {
    let (places, id) = (&cx.node.places, &cx.volume.id);
    cx.step("clear", || {
        let file = absent_is_none(places.staging(&staging_path.join(STAGE_FILE)))?;
        let Some(file) = file else {
            return Ok(());
        };
        if file.read().map_err(at_staging)?.is_none() {
            return Ok(());
        }
        let staging = places.staging(staging_path)?;
        if staging.has_others(&[STAGE_FILE, id]).map_err(at_staging)? {
            return Ok(());
        }
        if is_one_name(id) {
            remove_mount_point(places, &staging_path.join(id))?;
        }
        // Last, since it says that the directory beside it is the volume's mount point.
        remove_stage_file(&file)
    })
}

fn remove_mount_point(places: &Places, at: &Path) -> Result<(), Cause> {
    if let Some(place) = absent_is_none(places.staging(at))? {
        let removed = place.remove().map_err(at_staging)?;
        already("remove the mount point", removed);
    }
    Ok(())
}

fn remove_stage_file(file: &SafePath) -> Result<(), Cause> {
    let removed = file.unlink().map_err(at_staging)?;
    already("remove the stage file", removed);
    Ok(())
}
