//! Images: block devices, striped over the objects of a pool, by librbd.
//!
//! ```text
//! in a pool and namespace   create, clone_snapshot, list, trash
//! on an open image          Image: size, features, watchers, snapshots,
//!                           parent and children, flatten, metadata
//! on a group of images     group: snapshots of all at one moment
//! without opening it        Header: features, watchers, metadata
//! ```
//!
//! The snapshot that a clone is made of need not be protected (clone v2): a snapshot that was
//! removed, and a parent in the trash, stay until their last clone is flattened or removed.
//!
//! Source: `<rbd/librbd.h>`.

use super::{CephError, call::owned, library::rbd as abi, rados::IoCtx};

mod data;
mod features;
pub mod group;
mod header;
mod image;
mod lineage;
mod metadata;
mod mirror;
mod options;
mod snapshots;
#[cfg(test)]
mod tests;
pub mod trash;

pub use features::Features;
pub use header::Header;
pub use image::{Image, OpenMode, Watcher};
pub use lineage::LinkedImage;
pub use mirror::{MirrorMode, MirrorSite, MirrorSites, MirrorState, Mirroring, is_mirroring_on};
pub use options::ImageOptions;
pub use snapshots::SnapshotKind;

/// An image's name, and the id that stays with it when it is renamed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ImageName {
    /// Unique in the pool.
    pub id: String,
    /// Unique in the namespace.
    pub name: String,
}

/// Creates an image of `size` bytes.
pub fn create(io: &IoCtx, name: &str, size: u64, options: &ImageOptions) -> Result<(), CephError> {
    let call = io.call("create", "image", name);
    let text = call.text(name)?;
    let options = options.for_create(io)?;
    let create = io.cluster().libraries().rbd.rbd_create4;
    // SAFETY: the name ends in NUL, the options live through the call.
    call.changed(unsafe { create(io.raw(), text.as_ptr(), size, options.raw()) })
}

/// Creates an image, `name` in `io`, as a copy-on-write clone of a snapshot of another.
pub fn clone_snapshot(
    parent_io: &IoCtx,
    parent: &str,
    snapshot: &str,
    io: &IoCtx,
    name: &str,
    options: &ImageOptions,
) -> Result<(), CephError> {
    let objects = || format!("image {parent_io}/{parent}@{snapshot} as {io}/{name}");
    let call = io.cluster().call("clone", objects);
    let (parent, snapshot) = (call.text(parent)?, call.text(snapshot)?);
    let text = call.text(name)?;
    let options = options.for_clone(io)?;
    let clone = io.cluster().libraries().rbd.rbd_clone3;
    // SAFETY: all names end in NUL, the options live through the call.
    call.changed(unsafe {
        clone(
            parent_io.raw(),
            parent.as_ptr(),
            snapshot.as_ptr(),
            io.raw(),
            text.as_ptr(),
            options.raw(),
        )
    })
}

/// The id of the image of that name; `None` if there is no such image. Read from the object
/// that maps names to ids (`rbd_id.<name>`: the id's length in 32 bits, little endian, and
/// the id), without opening the image.
pub fn image_id(io: &IoCtx, name: &str) -> Result<Option<String>, CephError> {
    let bytes = match io.read(&format!("rbd_id.{name}"), MAX_ID) {
        Err(error) if error.is_not_found() => return Ok(None),
        bytes => bytes?,
    };
    let id = bytes.get(4..).unwrap_or_default();
    Ok(Some(String::from_utf8_lossy(id).into_owned()))
}

/// The id that the pool's list of images has for a name (`rbd_directory`, key `name_<name>`);
/// `None` if it is not listed. Unlike [`image_id`] it finds an image whose move to the trash
/// was interrupted ([`trash::complete_move`]).
pub fn listed_id(io: &IoCtx, name: &str) -> Result<Option<String>, CephError> {
    let key = format!("name_{name}");
    let found = match io.omap_get_bytes(DIRECTORY, &[&key]) {
        Err(error) if error.is_not_found() => return Ok(None),
        found => found?,
    };
    let id = found.get(&key).and_then(|bytes| bytes.get(4..));
    Ok(id.map(|id| String::from_utf8_lossy(id).into_owned()))
}

/// What has the name of an image that cannot be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remains {
    /// Nothing: the name is free.
    Nothing,
    /// An image without a header: its create was interrupted, or its removal. librbd creates
    /// the header after id and name, and before any data, and removes it after the data.
    WithoutHeader,
    /// An image with a header, such as one whose move to the trash was interrupted.
    WithHeader,
}

/// What has that name, by the objects of the image.
pub fn remains(io: &IoCtx, name: &str) -> Result<Remains, CephError> {
    let id = match image_id(io, name)? {
        None => listed_id(io, name)?,
        id => id,
    };
    Ok(match id {
        None => Remains::Nothing,
        Some(id) if io.exists(&format!("rbd_header.{id}"))? => Remains::WithHeader,
        Some(_) => Remains::WithoutHeader,
    })
}

/// The object that lists a pool's images.
const DIRECTORY: &str = "rbd_directory";

/// The maximum length of the object with an image's id; ids have some twelve bytes.
const MAX_ID: usize = 256;

/// Removes an image, also one that a crash has left incomplete. The time grows with the
/// number of its objects.
pub fn remove(io: &IoCtx, name: &str) -> Result<(), CephError> {
    let call = io.call("remove", "image", name);
    let text = call.text(name)?;
    let remove = io.cluster().libraries().rbd.rbd_remove;
    // SAFETY: the name ends in NUL.
    call.changed(unsafe { remove(io.raw(), text.as_ptr()) })
}

/// The images of the pool and namespace, except those in the trash.
pub fn list(io: &IoCtx) -> Result<Vec<ImageName>, CephError> {
    let call = io.cluster().call("list", || format!("the images of {io}"));
    let functions = &io.cluster().libraries().rbd;
    let mut rows: Vec<abi::ImageSpec> = call.rows(|images, count| {
        // SAFETY: there is room for `count` rows at `images`.
        unsafe { (functions.rbd_list2)(io.raw(), images, count) }
    })?;
    // SAFETY: the library filled the rows; their texts end in NUL.
    let name = |row: &abi::ImageSpec| unsafe {
        ImageName {
            id: owned(row.id),
            name: owned(row.name),
        }
    };
    let names = rows.iter().map(name).collect();
    // SAFETY: the library filled the rows, and they are not used any more.
    unsafe { (functions.rbd_image_spec_list_cleanup)(rows.as_mut_ptr(), rows.len()) };
    Ok(names)
}

/// Whether images can be created in the namespace: one has a directory from the start, the
/// pool's own gets it with the first image.
pub fn has_namespace(io: &IoCtx) -> Result<bool, CephError> {
    Ok(io.namespace().is_empty() || io.exists("rbd_directory")?)
}

/// Creates a namespace for images in the pool.
#[cfg(test)]
pub fn create_namespace(io: &IoCtx, namespace: &str) -> Result<(), CephError> {
    let call = io.call("create", "namespace", namespace);
    let name = call.text(namespace)?;
    let create = io.cluster().libraries().rbd.rbd_namespace_create;
    // SAFETY: the name ends in NUL.
    call.changed(unsafe { create(io.raw(), name.as_ptr()) })
}
