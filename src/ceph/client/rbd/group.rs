//! Groups of images, for snapshots of all members at one moment: librbd takes the exclusive
//! locks of all of them before the first snapshot, so no client writes until the last. Images
//! without the feature exclusive-lock have no such lock.

use std::{mem, ptr};

use super::{Image, SnapshotKind, abi};
use crate::ceph::client::{CephError, call::owned, rados::IoCtx};

/// Creates a group ([`CephError::is_exists`]).
pub fn create(io: &IoCtx, group: &str) -> Result<(), CephError> {
    let call = io.call("create", "group", group);
    let name = call.text(group)?;
    let create = io.cluster().libraries().rbd.rbd_group_create()?;
    // SAFETY: the name ends in NUL.
    call.changed(unsafe { create(io.raw(), name.as_ptr()) })
}

/// Removes a group with its snapshots; its images stay.
pub fn remove(io: &IoCtx, group: &str) -> Result<(), CephError> {
    let call = io.call("remove", "group", group);
    let name = call.text(group)?;
    let remove = io.cluster().libraries().rbd.rbd_group_remove()?;
    // SAFETY: the name ends in NUL.
    call.changed(unsafe { remove(io.raw(), name.as_ptr()) })
}

/// The names of the pool's groups. librbd keeps them as keys of an object (`cls_rbd`).
pub fn list(io: &IoCtx) -> Result<Vec<String>, CephError> {
    const PREFIX: &str = "name_";
    match io.omap_list("rbd_group_directory", PREFIX) {
        Ok(keys) => Ok(keys
            .keys()
            .filter_map(|key| key.strip_prefix(PREFIX))
            .map(str::to_owned)
            .collect()),
        Err(error) if error.is_not_found() => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Adds an image, which must be in no other group ([`CephError::is_exists`]).
pub fn add_image(io: &IoCtx, group: &str, image_io: &IoCtx, image: &str) -> Result<(), CephError> {
    let objects = || format!("image {image_io}/{image} to group {io}/{group}");
    let call = io.cluster().call("add", objects);
    let (group, image) = (call.text(group)?, call.text(image)?);
    let add = io.cluster().libraries().rbd.rbd_group_image_add()?;
    // SAFETY: both names end in NUL.
    let answer = unsafe { add(io.raw(), group.as_ptr(), image_io.raw(), image.as_ptr()) };
    call.changed(answer)
}

/// Creates a snapshot of all images of a group at one moment.
pub fn create_snapshot(io: &IoCtx, group: &str, snapshot: &str) -> Result<(), CephError> {
    let objects = || format!("snapshot {snapshot} of group {io}/{group}");
    let call = io.cluster().call("create", objects);
    let (group, name) = (call.text(group)?, call.text(snapshot)?);
    let create = io.cluster().libraries().rbd.rbd_group_snap_create()?;
    // SAFETY: both names end in NUL.
    call.changed(unsafe { create(io.raw(), group.as_ptr(), name.as_ptr()) })
}

impl Image {
    /// The id of the image's own snapshot in a snapshot of a group.
    pub fn snapshot_in_group(&self, group: &str, snapshot: &str) -> Result<Option<u64>, CephError> {
        let functions = self.functions();
        let read = functions.rbd_snap_get_group_namespace()?;
        let clean = functions.rbd_snap_group_namespace_cleanup()?;
        for one in self.snapshots()? {
            if one.kind != SnapshotKind::Group {
                continue;
            }
            let mut of = abi::GroupSnap {
                group_pool: 0,
                group: ptr::null_mut(),
                snapshot: ptr::null_mut(),
            };
            let size = mem::size_of_val(&of);
            // SAFETY: the image is open, the library fills `of`, of the given size.
            let answer = unsafe { read(self.raw(), one.id, &raw mut of, size) };
            self.call_on("read", "snapshot", &one.name).check(answer)?;
            // SAFETY: the library has filled `of`, which is not used after the clean-up.
            let is_it = unsafe {
                let is_it = owned(of.group) == group && owned(of.snapshot) == snapshot;
                clean(&raw mut of, size);
                is_it
            };
            if is_it {
                return Ok(Some(one.id));
            }
        }
        Ok(None)
    }
}
