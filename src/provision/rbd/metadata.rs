//! The metadata of images: keys with values (`rbd image-meta list`).
//!
//! librbd copies a parent's metadata to its clones. Some of it is foreign to a clone: the
//! limits of the source's class, and the names of the source's objects in Kubernetes
//! (`csi.storage.k8s.io/…`, which ceph-csi writes with `--setmetadata`). The metadata of
//! encryption are written anew for each copy.

use std::collections::BTreeMap;

use super::qos;
use crate::ceph::client::{CephError, rbd::Image};

/// The prefix of the names of Kubernetes' objects.
const KUBERNETES: &str = "csi.storage.k8s.io/";

/// Writes an image's metadata; removes keys without a value.
pub fn set_metadata(
    image: &Image,
    metadata: impl IntoIterator<Item = (String, Option<String>)>,
) -> Result<(), CephError> {
    for (key, value) in metadata {
        match value {
            Some(value) => image.metadata_set(&key, &value)?,
            None => image.metadata_remove(&key)?,
        }
    }
    Ok(())
}

/// The keys of a source's metadata that are foreign to its copies, each without a value.
pub fn foreign(metadata: &BTreeMap<String, String>) -> Vec<(String, Option<String>)> {
    let is_foreign = |key: &&String| key.starts_with(KUBERNETES) || qos::is_of_limits(key);
    let keys = metadata.keys().filter(is_foreign);
    keys.map(|key| (key.clone(), None)).collect()
}
