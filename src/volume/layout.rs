//! Where a volume is staged.
//!
//! A volume's mount is at the staging path itself, and raw ones have none. A
//! backend that came after another driver stages as that one does: everything
//! below the staging path, under the volume's handle, beside a note of what it
//! is; so that each driver unstages what the other has staged.

use std::{
    path::{Path, PathBuf},
    rc::Rc,
};

use super::{
    Error, Node, STAGING, already,
    record::Record,
    spec::Stage,
    stage::at_staging,
    task::{Progress, Volume},
    unstage::absent_is_none,
};
use crate::{
    device::{NOTE, Source},
    mount::path::{Place, Roots},
};

/// Where a volume of this source is mounted that is staged at the path.
pub fn mount_point(source: &Source, staging_path: &Path, volume_id: &str) -> PathBuf {
    if source.is_staged_below() {
        staging_path.join(volume_id)
    } else {
        staging_path.to_owned()
    }
}

/// Whether a file may have this name.
pub fn is_one_name(id: &str) -> bool {
    Path::new(id).file_name().is_some_and(|name| name == id) && id.len() <= 255
}

/// Where the volume is to be mounted. Kubelet makes the staging directory, other
/// callers may leave that to us.
pub fn make_place(node: &Node, volume: &Volume, spec: &Stage) -> Result<Place, Error> {
    if spec.source.is_staged_below() {
        if !is_one_name(&volume.id) {
            return Err(Error::Invalid {
                field: "volume_id",
                why: "is no name for a directory, which a volume of this backend needs".to_owned(),
            });
        }
        let above = node.staging(&spec.staging_path)?;
        already(
            volume,
            "make the staging directory",
            above.make_dir(0o750).map_err(at_staging)?,
        );
    }
    node.staging(&mount_point(&spec.source, &spec.staging_path, &volume.id))
}

/// Leaves word of the volume for whichever driver unstages it.
pub async fn write_note(
    node: &Rc<Node>,
    volume: &Volume,
    record: &Record,
    progress: &Progress,
) -> Result<(), Error> {
    let Some(file) = record
        .device
        .as_ref()
        .and_then(|device| record.source.note(device))
    else {
        return Ok(());
    };
    let place = node.staging(&record.staging_path.join(file.name))?;
    node.lane(volume, progress, "write-note", move || {
        place.replace(&file.text)
    })
    .await
    .map_err(at_staging)
}

/// The note that is at the staging path, whoever left it.
pub fn read_note(roots: &Roots, staging_path: &Path) -> Result<Option<Vec<u8>>, Error> {
    let place = super::place(roots, STAGING, &staging_path.join(NOTE));
    let Some(place) = absent_is_none(place)? else {
        return Ok(None);
    };
    place.read().map_err(at_staging)
}

/// Removes what was made below the staging path: what the volume was mounted on,
/// and the note of it.
pub fn clear(node: &Node, volume: &Volume, record: &Record) -> Result<(), Error> {
    if let Some(place) = absent_is_none(node.staging(&record.mount_point()))? {
        let removed = place.remove().map_err(at_staging)?;
        already(volume, "remove the mount point", removed);
    }
    if let Some(name) = record.source.note_name()
        && let Some(place) = absent_is_none(node.staging(&record.staging_path.join(name)))?
    {
        let removed = place.unlink().map_err(at_staging)?;
        already(volume, "remove the note", removed);
    }
    Ok(())
}
