//! The metadata of images: keys with values (`rbd image-meta list`).
//!
//! librbd copies a parent's metadata to its clones. Some of it is foreign to a clone: the
//! limits of the source's class, and the names of the source's objects in Kubernetes
//! ([`ObjectNames`]). The metadata of encryption are written anew for each copy.

use std::collections::{BTreeMap, HashMap};

use super::qos;
use crate::ceph::client::{CephError, rbd::Image};

/// The prefix of the names of Kubernetes' objects.
const KUBERNETES: &str = "csi.storage.k8s.io/";
/// The names that csi-provisioner and csi-snapshotter send with `--extra-create-metadata`.
const NAMES: [&str; 6] = [
    "csi.storage.k8s.io/pvc/name",
    "csi.storage.k8s.io/pvc/namespace",
    "csi.storage.k8s.io/pv/name",
    "csi.storage.k8s.io/volumesnapshot/name",
    "csi.storage.k8s.io/volumesnapshot/namespace",
    "csi.storage.k8s.io/volumesnapshotcontent/name",
];
/// ceph-csi's key of a demoted image: when it was created. The dot keeps it from being
/// mirrored, so an image that a resync created anew lacks it.
pub const CREATED: &str = ".rbd.image.creation_time";
/// ceph-csi's key for the name of the Kubernetes cluster.
const CLUSTER_NAME: &str = "csi.ceph.com/cluster/name";

/// Which names of Kubernetes new images have in their metadata: ceph-csi's `--setmetadata`
/// and `--clustername`.
#[derive(Clone, Debug, Default)]
pub struct ObjectNames {
    /// Those of the claim and the volume, or of the snapshot.
    pub are_set: bool,
    /// The cluster's own, beside them.
    pub cluster: Option<String>,
}

impl ObjectNames {
    /// The metadata of an image, by the parameters of the request for it.
    pub fn of(&self, given: &HashMap<String, String>) -> Vec<(String, Option<String>)> {
        if !self.are_set {
            return Vec::new();
        }
        let named = |name: &&str| Some(((*name).to_owned(), Some(given.get(*name)?.clone())));
        let cluster = self.cluster.iter();
        let cluster = cluster.map(|name| (CLUSTER_NAME.to_owned(), Some(name.clone())));
        NAMES.iter().filter_map(named).chain(cluster).collect()
    }
}

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
    let is_foreign = |key: &&String| {
        key.starts_with(KUBERNETES)
            || [CLUSTER_NAME, CREATED].contains(&key.as_str())
            || qos::is_of_limits(key)
    };
    let keys = metadata.keys().filter(is_foreign);
    keys.map(|key| (key.clone(), None)).collect()
}
