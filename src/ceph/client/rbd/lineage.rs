//! Parents, children and groups of images.

use std::{mem, ptr};

use super::{Image, SnapshotKind, abi};
use crate::ceph::client::{CephError, call::owned};

/// A parent, or a child.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkedImage {
    pub pool_id: i64,
    /// The pool's name.
    pub pool: String,
    /// Its namespace there; empty is the pool's own.
    pub namespace: String,
    pub id: String,
    pub name: String,
    /// Whether it is in the trash.
    pub in_trash: bool,
}

/// The snapshot that an image was cloned from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parent {
    pub image: LinkedImage,
    /// The snapshot's name.
    pub snapshot: String,
    /// [`SnapshotKind::Trash`] if the snapshot was removed: it stays for its clones.
    pub kind: SnapshotKind,
}

/// # Safety
///
/// The library has filled `raw`.
unsafe fn linked(raw: &abi::LinkedImage) -> LinkedImage {
    // SAFETY: each text is null or ends in NUL.
    unsafe {
        LinkedImage {
            pool_id: raw.pool_id,
            pool: owned(raw.pool_name),
            namespace: owned(raw.pool_namespace),
            id: owned(raw.image_id),
            name: owned(raw.image_name),
            in_trash: raw.trash,
        }
    }
}

impl Image {
    /// Its parent; none if it is no clone, or was flattened.
    pub fn parent(&self) -> Result<Option<Parent>, CephError> {
        let functions = self.functions();
        // SAFETY: integers, null pointers and false are all zero.
        let (mut image, mut snapshot): (abi::LinkedImage, abi::SnapSpec) =
            unsafe { (mem::zeroed(), mem::zeroed()) };
        // SAFETY: the image is open, both structures have the library's layout.
        let answer =
            unsafe { (functions.rbd_get_parent)(self.raw(), &raw mut image, &raw mut snapshot) };
        match self.call("read the parent of").check(answer) {
            Ok(()) => (),
            Err(error) if error.is_not_found() => return Ok(None),
            Err(error) => return Err(error),
        }
        // SAFETY: the library has filled both, which are not used after the clean-up.
        unsafe {
            let parent = Parent {
                image: linked(&image),
                snapshot: owned(snapshot.name),
                kind: SnapshotKind::from(snapshot.namespace_type),
            };
            (functions.rbd_linked_image_spec_cleanup)(&raw mut image);
            (functions.rbd_snap_spec_cleanup)(&raw mut snapshot);
            Ok(Some(parent))
        }
    }

    /// The name of the group that it is a member of; empty if it is in none.
    pub fn group(&self) -> Result<String, CephError> {
        let functions = self.functions();
        let read = functions.rbd_get_group()?;
        let clean = functions.rbd_group_info_cleanup()?;
        let mut group = abi::GroupInfo {
            name: ptr::null_mut(),
            pool: 0,
        };
        let size = mem::size_of_val(&group);
        // SAFETY: the image is open, the library fills `group`, of the given size.
        let answer = unsafe { read(self.raw(), &raw mut group, size) };
        self.call("read the group of").check(answer)?;
        // SAFETY: the library has filled `group`, which is not used after the clean-up.
        unsafe {
            let name = owned(group.name);
            clean(&raw mut group, size);
            Ok(name)
        }
    }

    /// The images that were cloned from any of its snapshots.
    pub fn children(&self) -> Result<Vec<LinkedImage>, CephError> {
        let functions = self.functions();
        let list = |images, count: *mut usize| {
            // SAFETY: there is room for `count` rows at `images`.
            unsafe { (functions.rbd_list_children3)(self.raw(), images, count) }
        };
        let mut rows: Vec<abi::LinkedImage> = self.call("list the children of").rows(list)?;
        // SAFETY: the library filled the rows.
        let images = rows.iter().map(|row| unsafe { linked(row) }).collect();
        let clean = functions.rbd_linked_image_spec_list_cleanup;
        // SAFETY: the library filled the rows, and they are not used any more.
        unsafe { clean(rows.as_mut_ptr(), rows.len()) };
        Ok(images)
    }
}
