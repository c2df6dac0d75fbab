//! The trash of a pool: images without a name, kept by their id.
//!
//! Moving an image there takes milliseconds. Removing it takes time in proportion to its
//! objects, and is possible only after its last watcher, snapshot and clone.

use std::{
    mem,
    time::{Duration, SystemTime},
};

use super::{DIRECTORY, abi, image::system_time};
use crate::ceph::client::{
    CephError,
    call::owned,
    or_exists, or_missing,
    rados::{IoCtx, WriteOp},
};

/// The object that lists a pool's trash.
const TRASH: &str = "rbd_trash";

/// The state of an image in the trash (`cls::rbd::TrashImageState`).
const NORMAL: u8 = 0;
const MOVING: u8 = 1;

/// Makes the object that lists the trash, as the first move to it would, also in a full pool.
pub fn prepare(io: &IoCtx) -> Result<(), CephError> {
    or_exists(io.operate(TRASH, &WriteOp::new().create().forced()))
}

/// An image in the trash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trashed {
    pub id: String,
    /// The name that it had.
    pub name: String,
    /// When it was moved there.
    pub deleted: SystemTime,
    /// Before this time only `force` removes it.
    pub deferred_until: SystemTime,
}

impl Trashed {
    /// Whether it was moved there with an expiry time. A delete moves images without one.
    pub fn has_expiry(&self) -> bool {
        self.deferred_until > self.deleted
    }
}

/// Moves an image to the trash, from which only `force` removes it before `delay` is over
/// (whole seconds). An image that is open for writing is busy ([`CephError::is_busy`]).
pub fn move_image(io: &IoCtx, name: &str, delay: Duration) -> Result<(), CephError> {
    let call = io.call("move to the trash", "image", name);
    let text = call.text(name)?;
    let functions = &io.cluster().libraries().rbd;
    // SAFETY: the name ends in NUL.
    call.changed(unsafe { (functions.rbd_trash_move)(io.raw(), text.as_ptr(), delay.as_secs()) })
}

/// Completes a move to the trash that was interrupted after the object with the image's id
/// (`rbd_id.<name>`) was removed: the pool still lists the name, and in the trash the image
/// has the state *moving*, in which every call fails (EUCLEAN). Since Ceph 17.2.6 librbd
/// completes the move when a caller moves the image again. An image whose move is
/// complete stays unchanged.
///
/// Source: Ceph's `cls_rbd.cc`, `dir_remove_image` and `trash_state_set`.
pub fn complete_move(io: &IoCtx, image: &Trashed) -> Result<(), CephError> {
    let (id, name) = (encoded(&image.id), encoded(&image.name));
    let unlisted = io.execute(
        DIRECTORY,
        ("rbd", "dir_remove_image"),
        &[&name[..], &id].concat(),
    );
    or_missing(unlisted)?;
    set_state(io, &image.id, MOVING, NORMAL)
}

/// Changes the state `from` to `to`; any other state stays.
fn set_state(io: &IoCtx, id: &str, from: u8, to: u8) -> Result<(), CephError> {
    let input = [&encoded(id)[..], &[to, from]].concat();
    match io.execute(TRASH, ("rbd", "trash_state_set"), &input) {
        Err(error) if error.is_stale() => Ok(()),
        done => done,
    }
}

/// A text as Ceph encodes it.
fn encoded(text: &str) -> Vec<u8> {
    let len = u32::try_from(text.len()).expect("names are short");
    [&len.to_le_bytes(), text.as_bytes()].concat()
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
    // SAFETY: the library has filled `info`, which is not used after the clean-up.
    unsafe {
        let found = trashed(&info);
        (functions.rbd_trash_get_cleanup)(&raw mut info);
        Ok(found)
    }
}

/// All images in the trash.
pub fn list(io: &IoCtx) -> Result<Vec<Trashed>, CephError> {
    let call = io.cluster().call("list", || format!("the trash of {io}"));
    let functions = &io.cluster().libraries().rbd;
    let list = functions.rbd_trash_list()?;
    let clean = functions.rbd_trash_list_cleanup()?;
    let mut rows: Vec<abi::TrashInfo> = call.rows(|entries, count| {
        // SAFETY: there is room for `count` rows at `entries`.
        unsafe { list(io.raw(), entries, count) }
    })?;
    // SAFETY: the library filled the rows.
    let found = rows.iter().map(|row| unsafe { trashed(row) }).collect();
    // SAFETY: the library filled the rows, and they are not used any more.
    unsafe { clean(rows.as_mut_ptr(), rows.len()) };
    Ok(found)
}

/// Removes an image from the trash, and its data; the time grows with the number of its
/// objects. `force` removes it before its delay is over.
pub fn remove(io: &IoCtx, id: &str, force: bool) -> Result<(), CephError> {
    let call = io.call("remove from the trash", "image", id);
    let text = call.text(id)?;
    let functions = &io.cluster().libraries().rbd;
    // SAFETY: the id ends in NUL.
    call.changed(unsafe { (functions.rbd_trash_remove)(io.raw(), text.as_ptr(), force) })
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

/// Moves an image to the trash, except for the last two steps; returns its id.
#[cfg(test)]
pub fn interrupt_move(io: &IoCtx, name: &str) -> String {
    let id = super::image_id(io, name).unwrap().unwrap();
    move_image(io, name, Duration::ZERO).unwrap();
    set_state(io, &id, NORMAL, MOVING).unwrap();
    let names = [encoded(name), encoded(&id)].concat();
    io.execute(DIRECTORY, ("rbd", "dir_add_image"), &names)
        .unwrap();
    id
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ceph::{
        client::rbd::{ImageOptions, create, image_id, list as images, listed_id},
        testing::TestPool,
    };

    #[test]
    fn a_move_that_was_interrupted_is_completed() {
        let Some(place) = TestPool::new() else { return };
        let io = &place.io;
        create(io, "image", 1 << 20, &ImageOptions::default()).unwrap();
        let id = interrupt_move(io, "image");
        assert_eq!(image_id(io, "image").unwrap(), None);
        assert_eq!(listed_id(io, "image").unwrap(), Some(id.clone()));
        assert_eq!(images(io).unwrap().len(), 1);
        remove(io, &id, true).unwrap_err();

        for _ in 0..2 {
            complete_move(io, &get(io, &id).unwrap()).unwrap();
            assert!(images(io).unwrap().is_empty());
            assert_eq!(listed_id(io, "image").unwrap(), None);
        }
        remove(io, &id, true).unwrap();
        assert!(list(io).unwrap().is_empty());
    }
}
