//! An image's header, read without opening the image: librbd's open takes eleven round
//! trips, each of the reads here one.
//!
//! ```text
//! rbd_id.<name>      the id                rbd_header.<id>   of format 2
//! rbd_mirroring      mirrored images       <name>.rbd        of format 1
//! ```
//!
//! A client that has an image mapped or open for writing watches its header for changes and
//! requests of others; a reader does not. So all of these clients acknowledge a
//! notification, also of an unknown kind, which has no other effect. So do the mirror
//! daemons, which watch the list of mirrored images.
//!
//! Sources: Ceph's `cls_rbd.cc` for the keys (in a header's omap `features`, 64 bits, little
//! endian, and `metadata_<key>`; `mirror::image_key`); librbd's `WatchNotifyTypes.cc` and
//! `MirroringWatcher.cc`, rbd-mirror's `MirrorStatusWatcher.cc` and the kernel's
//! drivers/block/rbd.c, `rbd_watch_cb`, for notifications.

use std::collections::BTreeMap;

use rustix::io::Errno;

use super::{Features, image_id};
use crate::ceph::client::{
    CephError,
    rados::{IoCtx, WriteOp},
};

/// A notification of an unknown kind: version and compatible version of its
/// encoding, the length of what follows, and the number of its kind.
const UNKNOWN: [u8; 10] = [1, 1, 4, 0, 0, 0, 0xff, 0xff, 0xff, 0xff];

/// The prefix of the keys of an image's metadata.
const METADATA: &str = "metadata_";

/// The key of an image's features.
const FEATURES: &str = "features";

/// The key of the group that an image is a member of (`RBD_GROUP_REF`).
const GROUP: &str = "rbd_group_ref";

/// The object that lists the images of a pool that are mirrored, as `image_<id>`.
pub(super) const MIRRORED: &str = "rbd_mirroring";

/// The ids of the connections that watch an object of librbd's, each as often as it does.
pub(super) fn clients_watching(io: &IoCtx, object: &str) -> Result<Vec<i64>, CephError> {
    io.notify(object, &UNKNOWN)
}

/// An image's header.
#[derive(Clone, Debug)]
pub struct Header {
    io: IoCtx,
    object: String,
    /// The image's id; none of format 1, which has no features either.
    id: Option<String>,
}

impl Header {
    /// The header of the image of this name ([`CephError::is_not_found`]).
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

    /// The image's id, which no copy of it has; none of format 1.
    pub fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    /// The image's features, and, in the same round trip, the value of a key of its
    /// metadata.
    pub fn features_and(&self, key: &str) -> Result<(Features, Option<String>), CephError> {
        let key = format!("{METADATA}{key}");
        let mut found = self.io.omap_get_bytes(&self.object, &[FEATURES, &key])?;
        let value = found.remove(&key);
        let value = value.map(|value| String::from_utf8_lossy(&value).into_owned());
        if self.id.is_none() {
            return Ok((Features::default(), value));
        }
        let features = found
            .remove(FEATURES)
            .and_then(|value| value.try_into().ok());
        let call = self.io.call("read", "header", &self.object);
        let features = features.ok_or_else(|| call.error(Errno::BADMSG))?;
        Ok((Features(u64::from_le_bytes(features)), value))
    }

    /// The ids of the connections that have the image mapped or open for writing, each as
    /// often as it has done so. Takes a second if one of them does not answer, and blocks
    /// while the OSD does not answer.
    pub fn watching(&self) -> Result<Vec<i64>, CephError> {
        clients_watching(&self.io, &self.object)
    }

    /// Whether it is mirrored, to another cluster or from there, or is about to be.
    pub fn is_mirrored(&self) -> Result<bool, CephError> {
        let Some(id) = &self.id else {
            return Ok(false);
        };
        let key = format!("image_{id}");
        match self.io.omap_get(MIRRORED, &[&key]) {
            // The pool has no mirrored image.
            Err(error) if error.is_not_found() => Ok(false),
            found => Ok(found?.contains_key(&key)),
        }
    }

    /// Whether it is a member of a group: then Ceph does not remove it. Older releases move it
    /// to the trash all the same, where it stays.
    pub fn is_grouped(&self) -> Result<bool, CephError> {
        let found = self.io.omap_get_bytes(&self.object, &[GROUP])?;
        Ok(found.contains_key(GROUP))
    }

    /// The image's metadata: all keys with their values.
    pub fn metadata(&self) -> Result<BTreeMap<String, String>, CephError> {
        let keys = self.io.omap_list(&self.object, METADATA)?;
        let bare = |(key, value): (String, String)| (key[METADATA.len()..].to_owned(), value);
        Ok(keys.into_iter().map(bare).collect())
    }

    /// The value of one key of the metadata, if it is set.
    pub fn metadata_get(&self, key: &str) -> Result<Option<String>, CephError> {
        let key = format!("{METADATA}{key}");
        Ok(self.io.omap_get(&self.object, &[&key])?.remove(&key))
    }

    /// Sets a key of the metadata, without a notification: librbd reads it when it opens the
    /// image.
    pub fn metadata_set(&self, key: &str, value: &str) -> Result<(), CephError> {
        let key = format!("{METADATA}{key}");
        // Without the assertion the OSD would create the header of a removed image.
        let op = WriteOp::new().assert_exists().set([(&*key, value)]);
        self.io.operate(&self.object, &op)
    }

    /// Removes a key of the metadata, if it is set.
    pub fn metadata_remove(&self, key: &str) -> Result<(), CephError> {
        let key = format!("{METADATA}{key}");
        self.io.omap_remove(&self.object, &[&key])
    }
}
