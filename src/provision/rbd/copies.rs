//! Images made of other images.
//!
//! A copy shares the data of its source: it is a clone of a snapshot (format 2,
//! so that the snapshot needs no protection). As ceph-csi does it:
//!
//! ```text
//! a snapshot S of a volume V     V@S → clone S; V@S goes; S@S is made, and stays
//! a volume W of a snapshot S     S@S → clone W
//! a volume W of a volume V       V@W-temp → clone W-temp; V@W-temp goes;
//!                                W-temp@W → clone W;      W-temp@W goes
//! ```
//!
//! So a volume keeps no snapshots that a user of it would see, and can be deleted
//! before its copies. A snapshot that goes while it has clones lives on, nameless,
//! until they are gone. Each step may be repeated, and each name says whose step
//! it was.
//!
//! Each copy makes the chain longer that a read may have to go. Where it gets
//! long, the link before is flattened: it gets its own data, in the background;
//! where it is too long, the caller has to wait for that.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
};

use serde_json::json;

use super::{
    super::Source,
    error::RbdError,
    notes::{foreign, note},
    trash::{Discarded, has_manager},
};
use crate::{
    ceph::{
        CephError,
        handle::Handle,
        or_exists, or_missing,
        rados::IoCtx,
        rbd::{self, Access, Features, Image, ImageOptions, LinkedImage},
    },
    chain,
    lane::Lanes,
};

/// How long chains may become, and how many snapshots an image may have: ceph-csi's
/// defaults. krbd maps chains of 16, and images with 510 snapshots.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// From here on the chain is cut in the background.
    pub soft_depth: usize,
    /// From here on nothing is added before it is cut.
    pub hard_depth: usize,
    /// From here on clones are flattened in the background.
    pub soft_snapshots: usize,
    /// Above this none is added before they are.
    pub hard_snapshots: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            soft_depth: 4,
            hard_depth: 8,
            soft_snapshots: 250,
            hard_snapshots: 450,
        }
    }
}

/// The image between a volume and its copy.
pub fn temporary(image: &str) -> String {
    format!("{image}-temp")
}

/// What images that nobody mounts can do.
fn between() -> ImageOptions {
    ImageOptions {
        features: Some(Features::LAYERING | Features::DEEP_FLATTEN),
        ..ImageOptions::default()
    }
}

/// One step: `to` becomes a clone of `from` as it is now, by way of a snapshot
/// that goes again.
fn clone_now(
    from: (&IoCtx, &str),
    to: (&IoCtx, &str),
    options: &ImageOptions,
) -> Result<(), CephError> {
    let snapshot = to.1;
    let source = Image::open(from.0, from.1, Access::ReadWrite)?;
    or_exists(source.snapshot_create(snapshot))?;
    let cloned = or_exists(rbd::clone_snapshot(
        from.0, from.1, snapshot, to.0, to.1, options,
    ));
    // On failure too: nothing but the clone needs it.
    let removed = or_missing(source.snapshot_remove(snapshot));
    cloned.and(removed)
}

/// Makes `to` an image of its own that holds what the volume `from` holds now.
pub fn of_volume(
    from: (&IoCtx, &str),
    to: (&IoCtx, &str),
    options: &ImageOptions,
) -> Result<(), CephError> {
    let temp = temporary(to.1);
    // One that is there holds an earlier attempt's moment: as good.
    if rbd::image_id(to.0, &temp)?.is_none() {
        clone_now(from, (to.0, &temp), &between())?;
    }
    clone_now((to.0, &temp), to, options)
}

/// Whether an image, of which only ceph-csi knows what it was made of, may be a copy
/// of that source, or of none: its parent has the source's uuid in its name. One that
/// was flattened may be a copy of any.
pub fn may_be_of(image: &Image, name: &str, source: Option<&Source>) -> Result<bool, CephError> {
    let Some(mut parent) = image.parent()? else {
        return Ok(true);
    };
    let handle = match source {
        None => return Ok(false),
        Some(Source::Snapshot(handle) | Source::Volume(handle)) => handle,
    };
    if parent.image.name == temporary(name) {
        let LinkedImage {
            pool_id, namespace, ..
        } = &parent.image;
        let pool = image.io().cluster().ioctx(*pool_id, namespace)?;
        let between = match Image::open_by_id(&pool, &parent.image.id, Access::ReadOnly) {
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

/// Takes away what an interrupted [`of_volume`] left beside its finished image.
pub fn tidy_of_volume(from: Option<(&IoCtx, &str)>, to: (&IoCtx, &str)) -> Result<(), CephError> {
    let temp = temporary(to.1);
    drop_snapshot(to.0, &temp, to.1)?;
    match from {
        Some((pool, image)) => drop_snapshot(pool, image, &temp),
        None => Ok(()),
    }
}

/// Makes `to` what the snapshot image `from` shows.
pub fn of_snapshot(
    from: (&IoCtx, &str),
    to: (&IoCtx, &str),
    options: &ImageOptions,
) -> Result<(), CephError> {
    or_exists(rbd::clone_snapshot(
        from.0, from.1, from.1, to.0, to.1, options,
    ))
}

/// Makes `snapshot`, in the volume's pool, show what the volume holds now; one
/// that is there already shows an earlier moment, and stays.
pub fn snapshot_of(pool: &IoCtx, volume: &str, snapshot: &str) -> Result<(), CephError> {
    if rbd::image_id(pool, snapshot)?.is_none() {
        clone_now((pool, volume), (pool, snapshot), &between())?;
    } else {
        drop_snapshot(pool, volume, snapshot)?;
    }
    let image = Image::open(pool, snapshot, Access::ReadWrite)?;
    note(&image, foreign(&image.metadata_list()?))?;
    or_exists(image.snapshot_create(snapshot))
}

/// Takes away a snapshot that an interrupted copy left on its source.
pub fn drop_snapshot(pool: &IoCtx, image: &str, snapshot: &str) -> Result<(), CephError> {
    match Image::open(pool, image, Access::ReadWrite) {
        Ok(image) => or_missing(image.snapshot_remove(snapshot)),
        Err(error) => or_missing(Err(error)),
    }
}

/// Those of these images that are there, with their ids.
pub fn present(pool: &IoCtx, names: &[String]) -> Result<Vec<Discarded>, CephError> {
    let mut found = Vec::new();
    for name in names {
        if let Some(id) = rbd::image_id(pool, name)? {
            let name = name.clone();
            found.push(Discarded { id, name });
        }
    }
    Ok(found)
}

/// What cuts chains. Each image is flattened once at a time.
#[derive(Clone, Debug)]
pub struct Flattener {
    lanes: Lanes,
    bounds: Bounds,
    under_way: Arc<Mutex<HashSet<String>>>,
}

impl Flattener {
    pub fn new(lanes: Lanes, bounds: Bounds) -> Self {
        let under_way = Arc::default();
        Self {
            lanes,
            bounds,
            under_way,
        }
    }

    /// Keeps the chain that ends in an image within its bounds, once `more` links
    /// are added behind it.
    pub fn keep_short(
        &self,
        pool: &IoCtx,
        image: &Image,
        name: &str,
        more: usize,
    ) -> Result<(), RbdError> {
        let depth = depth(image)? + more;
        if depth < self.bounds.soft_depth {
            return Ok(());
        }
        self.flatten(pool, name);
        if depth < self.bounds.hard_depth {
            return Ok(());
        }
        Err(RbdError::Flattening(format!("{pool}/{name}")))
    }

    /// The same for a volume that is to be copied. It may be in use; so not it but
    /// its parent is flattened.
    pub fn keep_parent_short(&self, image: &Image) -> Result<(), RbdError> {
        let Some(parent) = image.parent()?.map(|parent| parent.image) else {
            return Ok(());
        };
        if parent.in_trash {
            return Ok(());
        }
        let pool = image
            .io()
            .cluster()
            .ioctx(parent.pool_id, &parent.namespace)?;
        let opened = Image::open_by_id(&pool, &parent.id, Access::ReadOnly)?;
        // The copy adds two: the temporary image, and itself.
        self.keep_short(&pool, &opened, &parent.name, 2)
    }

    /// Keeps the number of an image's snapshots within its bounds.
    pub fn keep_few(&self, image: &Image) -> Result<(), RbdError> {
        let count = image.snapshots()?.len();
        if count <= self.bounds.soft_snapshots {
            return Ok(());
        }
        let children = image.children()?;
        let spare = if count > self.bounds.hard_snapshots {
            0
        } else {
            self.bounds.soft_snapshots
        };
        for child in children.iter().skip(spare).filter(|child| !child.in_trash) {
            let pool = image
                .io()
                .cluster()
                .ioctx(child.pool_id, &child.namespace)?;
            self.flatten(&pool, &child.name);
        }
        if count <= self.bounds.hard_snapshots {
            return Ok(());
        }
        Err(RbdError::Snapshots {
            image: image.to_string(),
            count,
            limit: self.bounds.hard_snapshots,
        })
    }

    /// Has an image flattened in the background: by Ceph's manager where it runs,
    /// else here. A repeat of what is under way does nothing.
    fn flatten(&self, pool: &IoCtx, name: &str) {
        let what = format!("{}/{pool}/{name}", pool.cluster().fsid());
        if !self.under_way().insert(what.clone()) {
            return;
        }
        let (own, pool, name) = (self.clone(), pool.clone(), name.to_owned());
        let turn = what.clone();
        // It runs whether or not anybody waits for it.
        drop(self.lanes.run(&turn, "flatten", move || {
            if let Err(error) = flatten(&pool, &name) {
                let error = chain(&error);
                tracing::warn!(image = %format!("{pool}/{name}"), error, "not flattened");
            }
            own.under_way().remove(&what);
        }));
    }

    fn under_way(&self) -> std::sync::MutexGuard<'_, HashSet<String>> {
        self.under_way
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

fn flatten(pool: &IoCtx, name: &str) -> Result<(), CephError> {
    let task = json!({
        "prefix": "rbd task add flatten",
        "image_spec": format!("{pool}/{name}"),
    });
    if has_manager(pool) && pool.cluster().mgr_command(&task).is_ok() {
        return Ok(());
    }
    match Image::open(pool, name, Access::ReadWrite)?.flatten() {
        // It has no parent any more.
        Err(error) if error.is_invalid() => Ok(()),
        result => result,
    }
}

/// How many parents an image has, one behind the other.
fn depth(image: &Image) -> Result<usize, CephError> {
    let mut depth = 0;
    let mut next = image.parent()?;
    while let Some(parent) = next {
        depth += 1;
        let pool = image
            .io()
            .cluster()
            .ioctx(parent.image.pool_id, &parent.image.namespace)?;
        let opened = match Image::open_by_id(&pool, &parent.image.id, Access::ReadOnly) {
            // Removed since.
            Err(error) if error.is_not_found() => return Ok(depth),
            opened => opened?,
        };
        next = opened.parent()?;
    }
    Ok(depth)
}
