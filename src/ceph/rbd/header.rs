//! An image's header, asked without opening the image: what librbd's open reads in
//! eleven round trips, as far as it is wanted, in one each.
//!
//! ```text
//! rbd_id.<name>      the id                rbd_header.<id>   of format 2
//! rbd_mirroring      who is mirrored       <name>.rbd        of format 1
//! ```
//!
//! Whoever has an image mapped or open for writing watches its header to hear of
//! changes and requests by others; readers do not. So a notification is acknowledged by all of
//! them, one of a kind that they do not know, too, and nothing else comes of that.
//!
//! Sources: Ceph's `cls_rbd.cc` for what is kept where (`get_features`;
//! `metadata_<key>` in a header's omap; `mirror::image_key`); librbd's
//! `WatchNotifyTypes.cc` and the kernel's drivers/block/rbd.c, `rbd_watch_cb`, for
//! what a notification is.

use std::collections::BTreeMap;

use rustix::io::Errno;

use super::{Features, image_id};
use crate::ceph::{CephError, rados::IoCtx};

/// `CEPH_NOSNAP`: the image itself, and not a snapshot of it.
const NO_SNAPSHOT: u64 = 0xffff_ffff_ffff_fffe;

/// A notification of a kind that there is not: version and compatible version of its
/// encoding, the length of what follows, and the number of its kind.
const UNKNOWN: [u8; 10] = [1, 1, 4, 0, 0, 0, 0xff, 0xff, 0xff, 0xff];

/// What stands before the keys of an image's metadata.
const METADATA: &str = "metadata_";

/// The object that lists the images of a pool that are mirrored, as `image_<id>`.
const MIRRORED: &str = "rbd_mirroring";

/// An image's header.
#[derive(Clone, Debug)]
pub struct Header {
    io: IoCtx,
    object: String,
    /// The image's id; none of format 1, which has no features either.
    id: Option<String>,
}

impl Header {
    /// That of the image of this name ([`CephError::is_not_found`]).
    pub fn of(io: &IoCtx, name: &str) -> Result<Self, CephError> {
        let id = image_id(io, name)?;
        let object = match &id {
            Some(id) => format!("rbd_header.{id}"),
            None => format!("{name}.rbd"),
        };
        if id.is_some() || io.exists(&object)? {
            let io = io.clone();
            return Ok(Self { io, object, id });
        }
        Err(io.call("find", "image", name).error(Errno::NOENT))
    }

    /// The image's features.
    pub fn features(&self) -> Result<Features, CephError> {
        if self.id.is_none() {
            return Ok(Features::default());
        }
        // Read-only: what a reader must understand is not asked for.
        let input = [&NO_SNAPSHOT.to_le_bytes()[..], &[1]].concat();
        let method = ("rbd", "get_features");
        let answer = self.io.execute(&self.object, method, &input, 64)?;
        let call = self.io.call("read", "header", &self.object);
        let (features, _) = answer
            .split_first_chunk()
            .ok_or_else(|| call.error(Errno::BADMSG))?;
        Ok(Features(u64::from_le_bytes(*features)))
    }

    /// The connections that have the image mapped or open for writing; one more
    /// than once that has done so several times. Takes a second where one of them
    /// does not answer, and blocks while the OSD does not.
    pub fn watching(&self) -> Result<Vec<i64>, CephError> {
        self.io.notify(&self.object, &UNKNOWN)
    }

    /// Whether it is mirrored, to another cluster or from there, or is about to be.
    pub fn is_mirrored(&self) -> Result<bool, CephError> {
        let Some(id) = &self.id else {
            return Ok(false);
        };
        let key = format!("image_{id}");
        match self.io.omap_get(MIRRORED, &[&key]) {
            // None of the pool is.
            Err(error) if error.is_not_found() => Ok(false),
            found => Ok(found?.contains_key(&key)),
        }
    }

    /// What is noted on the image: all keys with their values.
    pub fn metadata(&self) -> Result<BTreeMap<String, String>, CephError> {
        let keys = self.io.omap_list(&self.object, METADATA)?;
        let bare = |(key, value): (String, String)| (key[METADATA.len()..].to_owned(), value);
        Ok(keys.into_iter().map(bare).collect())
    }
}
