//! What is noted on images: keys with values (`rbd image-meta list`).
//!
//! librbd gives a clone all that is noted on its parent. Of that, the limits are those
//! of the source's class, and `csi.storage.k8s.io/…` are the names of its objects in
//! Kubernetes, where ceph-csi has noted them (`--setmetadata`): the copy's are others.
//! What is noted of encryption is written anew with the copy's own.

use std::collections::BTreeMap;

use super::qos;
use crate::ceph::client::{CephError, rbd::Image};

/// What begins the names of Kubernetes' objects.
const KUBERNETES: &str = "csi.storage.k8s.io/";

/// Writes notes on an image, and takes away those without a value.
pub fn set_metadata(
    image: &Image,
    notes: impl IntoIterator<Item = (String, Option<String>)>,
) -> Result<(), CephError> {
    for (key, value) in notes {
        match value {
            Some(value) => image.metadata_set(&key, &value)?,
            None => image.metadata_remove(&key)?,
        }
    }
    Ok(())
}

/// Of a source's notes those that its copies have to lose, each without a value.
pub fn foreign(notes: &BTreeMap<String, String>) -> Vec<(String, Option<String>)> {
    let is_foreign = |key: &&String| key.starts_with(KUBERNETES) || qos::is_of_limits(key);
    let keys = notes.keys().filter(is_foreign);
    keys.map(|key| (key.clone(), None)).collect()
}
