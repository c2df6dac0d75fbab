//! The trash of a pool: images that are gone by name, and still there by id.
//!
//! To move an image there takes milliseconds; to remove it takes as long as it
//! has objects, and waits until its last watcher, snapshot and clone is gone.

use std::{
    mem,
    time::{Duration, SystemTime},
};

use super::{abi, image::system_time};
use crate::ceph::{CephError, call::owned, rados::IoCtx};

/// An image in the trash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trashed {
    /// Its id.
    pub id: String,
    /// The name that it had.
    pub name: String,
    /// When it was moved there.
    pub deleted: SystemTime,
    /// Until when it may not be removed unless forced.
    pub deferred_until: SystemTime,
}

/// Moves an image to the trash; `delay`, in whole seconds, keeps it from being
/// removed so long. One that is open for writing is busy ([`CephError::is_busy`]).
pub fn move_image(io: &IoCtx, name: &str, delay: Duration) -> Result<(), CephError> {
    let call = io.call("move to the trash", "image", name);
    let text = call.text(name)?;
    let functions = &io.cluster().libraries().rbd;
    // SAFETY: the name ends in NUL.
    call.changed(unsafe { (functions.rbd_trash_move)(io.raw(), text.as_ptr(), delay.as_secs()) })
}

/// The image with that id in the trash ([`CephError::is_not_found`]).
pub fn get(io: &IoCtx, id: &str) -> Result<Trashed, CephError> {
    let call = io.call("look in the trash for", "image", id);
    let text = call.text(id)?;
    let functions = &io.cluster().libraries().rbd;
    // SAFETY: integers and null pointers are all zero.
    let mut info: abi::TrashInfo = unsafe { mem::zeroed() };
    // SAFETY: the id ends in NUL, `info` has the library's layout.
    call.check(unsafe { (functions.rbd_trash_get)(io.raw(), text.as_ptr(), &raw mut info) })?;
    // SAFETY: the library has filled it; after the clean-up it is not used.
    unsafe {
        let found = trashed(&info);
        (functions.rbd_trash_get_cleanup)(&raw mut info);
        Ok(found)
    }
}

/// All that is in the trash.
pub fn list(io: &IoCtx) -> Result<Vec<Trashed>, CephError> {
    let call = io.cluster().call("list", || format!("the trash of {io}"));
    let functions = &io.cluster().libraries().rbd;
    let mut rows: Vec<abi::TrashInfo> = call.rows(|entries, count| {
        // SAFETY: there is room for `count` rows at `entries`.
        unsafe { (functions.rbd_trash_list)(io.raw(), entries, count) }
    })?;
    // SAFETY: the library filled the rows.
    let found = rows.iter().map(|row| unsafe { trashed(row) }).collect();
    // SAFETY: the rows are the library's own, and not used any more.
    unsafe { (functions.rbd_trash_list_cleanup)(rows.as_mut_ptr(), rows.len()) };
    Ok(found)
}

/// Removes an image from the trash, and with it its data: takes as long as it has
/// objects. `force` removes it before its delay is over.
pub fn remove(io: &IoCtx, id: &str, force: bool) -> Result<(), CephError> {
    let call = io.call("remove from the trash", "image", id);
    let text = call.text(id)?;
    let functions = &io.cluster().libraries().rbd;
    // SAFETY: the id ends in NUL.
    call.changed(unsafe { (functions.rbd_trash_remove)(io.raw(), text.as_ptr(), force) })
}

/// Gives an image in the trash a name again ([`CephError::is_exists`]).
pub fn restore(io: &IoCtx, id: &str, name: &str) -> Result<(), CephError> {
    let call = io.call("restore from the trash", "image", id);
    let (id, name) = (call.text(id)?, call.text(name)?);
    let functions = &io.cluster().libraries().rbd;
    // SAFETY: both texts end in NUL.
    call.changed(unsafe { (functions.rbd_trash_restore)(io.raw(), id.as_ptr(), name.as_ptr()) })
}

/// # Safety
///
/// The library has filled `raw`.
unsafe fn trashed(raw: &abi::TrashInfo) -> Trashed {
    let time = |seconds| {
        system_time(libc::timespec {
            tv_sec: seconds,
            tv_nsec: 0,
        })
    };
    // SAFETY: both texts end in NUL.
    let (id, name) = unsafe { (owned(raw.id), owned(raw.name)) };
    Trashed {
        id,
        name,
        deleted: time(raw.deleted),
        deferred_until: time(raw.deferred_until),
    }
}
