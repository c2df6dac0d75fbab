//! Clones of images.
//!
//! A copy shares the data of its source: it is a clone of a snapshot (format 2,
//! so that the snapshot needs no protection). As ceph-csi does it:
//!
//! ```text
//! a snapshot S of a volume V     V@S → clone S; V@S goes; S@S is made, and stays
//! a volume W of a snapshot S     S@S → clone W
//! a volume W of a volume V       V@W-temp → clone W-temp; V@W-temp goes;
//!                                W-temp@W → clone W;      W-temp@W goes
//! a snapshot S of a volume V     V@S; the group is cut; V@S → clone S, and S gets what was
//! in a group                     written in between; V@S goes; S@S is made, and stays
//! ```
//!
//! So a volume keeps no snapshots that its users would see, and can be deleted before its
//! copies. A snapshot that is deleted while it has clones stays, nameless, until they are
//! removed. The data of S, once it is flattened, is in V's data pool, that of W-temp in
//! W's. Each step may be repeated, and each name shows its step.

use super::{
    super::ContentSource,
    error::RbdError,
    metadata::{foreign, set_metadata},
    trash::Discarded,
};
use crate::ceph::{
    client::{
        CephError, or_exists, or_missing,
        rados::IoCtx,
        rbd::{self, Features, Image, ImageOptions, LinkedImage, Mirroring, OpenMode, Remains},
    },
    csi_format::{handle::Handle, journal::TEMPORARY},
};

/// The image between a volume and its copy.
pub fn temporary(image: &str) -> String {
    format!("{image}{TEMPORARY}")
}

/// The options of images that are never mounted. They get data when they are flattened.
fn between(data_pool: Option<String>) -> ImageOptions {
    ImageOptions {
        features: Some(Features::LAYERING | Features::DEEP_FLATTEN),
        data_pool,
        ..ImageOptions::default()
    }
}

/// One step: makes `to` a clone of `from` as it is now, by a temporary snapshot.
fn clone_now(
    from: (&IoCtx, &str),
    to: (&IoCtx, &str),
    options: &ImageOptions,
) -> Result<(), CephError> {
    let snapshot = to.1;
    let source = Image::open(from.0, from.1, OpenMode::ReadWrite)?;
    or_exists(source.snapshot_create(snapshot))?;
    let cloned = or_exists(rbd::clone_snapshot(
        from.0, from.1, snapshot, to.0, to.1, options,
    ));
    // Also after a failure: only the clone needs it.
    let removed = or_missing(source.snapshot_remove(snapshot));
    cloned.and(removed)
}

/// Makes `to` an image of its own with the present data of the volume `from`.
pub fn of_volume(
    from: (&IoCtx, &str),
    to: (&IoCtx, &str),
    options: &ImageOptions,
) -> Result<(), CephError> {
    let temp = temporary(to.1);
    // One that exists shows the time of an earlier attempt, which is as good.
    if rbd::image_id(to.0, &temp)?.is_none() {
        clone_now(from, (to.0, &temp), &between(options.data_pool.clone()))?;
    }
    clone_now((to.0, &temp), to, options)
}

/// Whether an image of ceph-csi, whose journal does not record its source, may be a copy of
/// that source, or of none: the name of its parent has the source's uuid. An image without a
/// parent counts as a copy of nothing, though it may have been flattened: to take a blank
/// volume for a copy would be worse than to refuse one.
pub fn may_be_of(
    image: &Image,
    name: &str,
    source: Option<&ContentSource>,
) -> Result<bool, CephError> {
    let Some(mut parent) = image.parent()? else {
        return Ok(source.is_none());
    };
    let handle = match source {
        None => return Ok(false),
        Some(ContentSource::Snapshot(handle) | ContentSource::Volume(handle)) => handle,
    };
    if parent.image.name == temporary(name) {
        let LinkedImage {
            pool_id, namespace, ..
        } = &parent.image;
        let pool = image.io().cluster().ioctx(*pool_id, namespace)?;
        let between = match Image::open_by_id(&pool, &parent.image.id, OpenMode::ReadOnly) {
            Err(error) if error.is_not_found() => return Ok(true),
            between => between?.parent()?,
        };
        match between {
            Some(between) => parent = between,
            None => return Ok(true),
        }
    }
    let uuid = handle.parse().map(|handle: Handle| handle.uuid());
    Ok(uuid.is_ok_and(|uuid| parent.image.name.ends_with(&uuid.to_string())))
}

/// Whether librbd was interrupted while it made a clone of that name: the clone has no header,
/// or lacks its parent, which librbd adds after the header.
pub fn is_half_made(pool: &IoCtx, name: &str) -> Result<bool, CephError> {
    match Image::open(pool, name, OpenMode::ReadOnly) {
        Ok(clone) => Ok(clone.parent()?.is_none()),
        Err(error) if error.is_not_found() => Ok(rbd::remains(pool, name)? != Remains::Nothing),
        Err(error) => Err(error),
    }
}

/// Removes the temporary image of an interrupted [`of_volume`], whose image is complete.
pub fn tidy_of_volume(from: Option<(&IoCtx, &str)>, to: (&IoCtx, &str)) -> Result<(), CephError> {
    let temp = temporary(to.1);
    drop_snapshot(to.0, &temp, to.1)?;
    match from {
        Some((pool, image)) => drop_snapshot(pool, image, &temp),
        None => Ok(()),
    }
}

/// Makes `to` a copy of the snapshot image `from`.
pub fn of_snapshot(
    from: (&IoCtx, &str),
    to: (&IoCtx, &str),
    options: &ImageOptions,
) -> Result<(), CephError> {
    or_exists(rbd::clone_snapshot(
        from.0, from.1, from.1, to.0, to.1, options,
    ))
}

/// Makes `snapshot`, in the volume's pool, a copy of the volume's present data. A snapshot
/// that exists already is of an earlier moment, and stays.
pub fn snapshot_of(pool: &IoCtx, volume: &str, snapshot: &str) -> Result<(), CephError> {
    if rbd::image_id(pool, snapshot)?.is_none() {
        let data_pool = Image::open(pool, volume, OpenMode::ReadOnly)?.data_pool()?;
        clone_now((pool, volume), (pool, snapshot), &between(data_pool))?;
    } else {
        drop_snapshot(pool, volume, snapshot)?;
    }
    keep(pool, snapshot)
}

/// Completes the image of a snapshot.
fn keep(pool: &IoCtx, snapshot: &str) -> Result<(), CephError> {
    let image = Image::open(pool, snapshot, OpenMode::ReadWrite)?;
    set_metadata(&image, foreign(&image.metadata_list()?))?;
    or_exists(image.snapshot_create(snapshot))
}

/// Makes `snapshot`, in the volume's pool, a copy of the volume as its snapshot with that id
/// shows it, which is of a group. The volume has a snapshot of the name `snapshot`, made
/// before the group's. librbd before 19.1 clones no snapshot of a group, so this clones the
/// volume's own, and copies what was written between the two.
pub fn snapshot_at(pool: &IoCtx, volume: &str, snapshot: &str, id: u64) -> Result<(), CephError> {
    let source = Image::open(pool, volume, OpenMode::ReadWrite)?;
    let options = between(source.data_pool()?);
    rbd::clone_snapshot(pool, volume, snapshot, pool, snapshot, &options)?;
    let image = Image::open(pool, snapshot, OpenMode::ReadWrite)?;
    let cut = Image::open_at(pool, volume, id)?;
    image.grow(cut.size()?)?;
    copy_changes(&cut, snapshot, &image)?;
    drop(image);
    source.snapshot_remove(snapshot)?;
    keep(pool, snapshot)
}

/// Copies what has changed since a snapshot of the image `from`.
fn copy_changes(from: &Image, since: &str, to: &Image) -> Result<(), CephError> {
    let end = from.size()?;
    let mut buffer = vec![0; PIECE];
    for start in (0..end).step_by(PART) {
        let part = start..end.min(start + PART as u64);
        for changed in from.changes(Some(since), &part)? {
            for at in changed.clone().step_by(PIECE) {
                let left = usize::try_from(changed.end - at).unwrap_or(PIECE);
                let piece = &mut buffer[..left.min(PIECE)];
                from.read(at, piece)?;
                if piece.iter().all(|byte| *byte == 0) {
                    to.write_zeros(at, piece.len())?;
                } else {
                    to.write(at, piece)?;
                }
            }
        }
    }
    Ok(())
}

/// Bytes copied at once.
const PIECE: usize = 1 << 20;
/// Bytes whose changes are looked up at once.
const PART: usize = 1 << 30;

/// Removes a snapshot of an interrupted copy from its source.
fn drop_snapshot(pool: &IoCtx, image: &str, snapshot: &str) -> Result<(), CephError> {
    match Image::open(pool, image, OpenMode::ReadWrite) {
        Ok(image) => or_missing(image.snapshot_remove(snapshot)),
        Err(error) => or_missing(Err(error)),
    }
}

/// Removes the snapshot that an interrupted copy may have left on its source.
pub fn drop_left(pool: &IoCtx, source: &str, snapshot: &str) -> Result<(), RbdError> {
    let image = match Image::open(pool, source, OpenMode::ReadOnly) {
        Err(error) if error.is_not_found() => return Ok(()),
        image => image?,
    };
    if !image.snapshots()?.iter().any(|one| one.name == snapshot) {
        return Ok(());
    }
    if image.mirroring()? == Mirroring::Secondary {
        return Err(RbdError::NotReplicated {
            image: format!("{pool}/{source}"),
            why: format!(
                "it is secondary, and has the snapshot {snapshot} of an interrupted copy: remove that at the site where the image is primary (rbd snap rm), or fail over to this site first"
            ),
        });
    }
    drop(image);
    Ok(drop_snapshot(pool, source, snapshot)?)
}

/// The images that exist, with their ids, those whose move to the trash was interrupted among
/// them.
pub fn present(pool: &IoCtx, names: &[String]) -> Result<Vec<Discarded>, CephError> {
    let mut found = Vec::new();
    for name in names {
        let id = match rbd::image_id(pool, name)? {
            None => rbd::listed_id(pool, name)?,
            id => id,
        };
        if let Some(id) = id {
            let name = name.clone();
            found.push(Discarded { id, name });
        }
    }
    Ok(found)
}
