//! The snapshots on an image: those that an interrupted copy has left, which a delete removes,
//! and those of its users, which keep it.

use uuid::Uuid;

use super::error::RbdError;
use crate::ceph::{
    client::{
        rados::IoCtx,
        rbd::{Image, SnapshotKind},
    },
    csi_format::journal::{self, JournalKind, TEMPORARY},
};

/// The snapshots that copies have left on an image of that name, and those of its users.
pub fn sort_snapshots(
    pool: &IoCtx,
    name: &str,
    image: &Image,
) -> Result<(Vec<String>, Vec<String>), RbdError> {
    let (mut left, mut others) = (Vec::new(), Vec::new());
    for snapshot in image.snapshots()? {
        match snapshot.kind {
            SnapshotKind::User if is_of_a_copy(pool, name, &snapshot.name)? => {
                left.push(snapshot.name);
            }
            SnapshotKind::User => others.push(snapshot.name),
            _ => {}
        }
    }
    Ok((left, others))
}

/// Whether a snapshot of an image is that of a copy ([`copies`](super::copies)): it has the
/// name of the image that the copy makes of it.
fn is_of_a_copy(pool: &IoCtx, image: &str, snapshot: &str) -> Result<bool, RbdError> {
    let uuid = |name: &str| {
        let at = name.len().checked_sub(36)?;
        Uuid::try_parse(name.get(at..)?).ok()
    };
    if let Some(copy) = snapshot.strip_suffix(TEMPORARY) {
        return Ok(uuid(copy).is_some());
    }
    let Some(uuid) = uuid(snapshot) else {
        return Ok(false);
    };
    // The last snapshot of a copy: that of a snapshot's image, or of the image between.
    if image.strip_suffix(TEMPORARY).unwrap_or(image) == snapshot {
        return Ok(true);
    }
    let entry = journal::read(JournalKind::Snapshot, pool, uuid)?;
    Ok(entry.is_some_and(|entry| entry.image == snapshot))
}
