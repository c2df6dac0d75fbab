//! The list of clusters: ceph-csi's `config.json`.
//!
//! ```json
//! [{"clusterID": "…", "monitors": ["10.0.0.1:6789"],
//!   "rbd": {"netNamespaceFilePath": "", "radosNamespace": ""},
//!   "readAffinity": {"enabled": true, "crushLocationLabels": ["topology.kubernetes.io/zone"]}}]
//! ```
//!
//! An administrator may change the file while the agent runs, so the agent reads it again
//! after each change. As with ceph-csi, keys have any case, unknown ones are no error, and of
//! two entries with one `clusterID` the first counts.
//!
//! Source: `api/deploy/kubernetes/csi-config-map.go` of ceph-csi.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use serde::{Deserialize, de::DeserializeOwned};

mod any_case;
mod mapping;
#[cfg(test)]
mod tests;

use any_case::AnyCase;
pub use mapping::Mappings;

/// One cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterConfig {
    /// The cluster's name in handles; not its fsid, though often the same.
    pub cluster_id: String,
    /// The monitors' addresses, each as `mon_host` takes it; never empty.
    pub monitors: Vec<String>,
    /// The namespace, in every pool, of all images and journals.
    pub rados_namespace: Option<String>,
    /// The file of the network namespace in which images are mapped.
    pub net_namespace_file: Option<PathBuf>,
    /// Whether reads go to near OSDs.
    pub read_affinity: ReadAffinity,
}

impl ClusterConfig {
    /// The file of the network namespace in which images are mapped.
    pub fn net_namespace(&self) -> Option<&Path> {
        self.net_namespace_file.as_deref()
    }
}

/// Reads from the OSDs that are nearest in the CRUSH map.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ReadAffinity {
    /// Whether it is on.
    #[serde(deserialize_with = "null_is_default")]
    pub enabled: bool,
    /// The node labels that tell where a node is; empty: those that the node's agent has.
    #[serde(rename = "crushlocationlabels", deserialize_with = "null_is_default")]
    pub crush_location_labels: Vec<String>,
}

/// Why the file has no configuration of the cluster.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It cannot be read.
    ///
    /// Remedy: create the file, or correct --ceph-config; in Kubernetes the ConfigMap that is
    /// mounted there.
    #[error("{} cannot be read", path.display())]
    Unreadable {
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
    /// It has another form than ceph-csi's.
    ///
    /// Remedy: write it as ceph-csi's config.json: [Ceph](../ceph.md).
    #[error("{} is not in the form of ceph-csi's config.json", path.display())]
    Malformed {
        path: PathBuf,
        /// The position, and what was expected.
        source: serde_json::Error,
    },
    /// It has no such cluster.
    #[error("{} has no cluster {cluster_id:?}; add it, or correct the clusterID", path.display())]
    Unknown {
        path: PathBuf,
        /// The requested id.
        cluster_id: String,
    },
    /// The cluster has no monitors.
    ///
    /// Remedy: add the cluster's monitors: `ceph mon dump`.
    #[error("{} has no monitors for the cluster {cluster_id:?}", path.display())]
    NoMonitors { path: PathBuf, cluster_id: String },
    /// An entry of the file of mappings maps no cluster.
    #[error("entry {nr} of {} has no clusterIDMapping; add it, or remove the entry", path.display())]
    NoMapping {
        path: PathBuf,
        /// Its number; the first is 1.
        nr: usize,
    },
}

/// An entry of the file. Older files have the namespace at the top level.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ClusterEntry {
    #[serde(rename = "clusterid", deserialize_with = "null_is_default")]
    cluster_id: String,
    #[serde(deserialize_with = "null_is_default")]
    monitors: Vec<String>,
    #[serde(rename = "radosnamespace", deserialize_with = "null_is_default")]
    rados_namespace: String,
    rbd: AnyCase<Rbd>,
    #[serde(rename = "readaffinity")]
    read_affinity: AnyCase<ReadAffinity>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Rbd {
    #[serde(rename = "netnamespacefilepath", deserialize_with = "null_is_default")]
    net_namespace_file_path: String,
    #[serde(rename = "radosnamespace", deserialize_with = "null_is_default")]
    rados_namespace: String,
}

/// Decodes `null` as the default, as Go does.
fn null_is_default<'de, T, D>(from: D) -> Result<T, D::Error>
where
    T: Default + Deserialize<'de>,
    D: serde::Deserializer<'de>,
{
    Option::deserialize(from).map(Option::unwrap_or_default)
}

impl ClusterEntry {
    fn into_config(self) -> ClusterConfig {
        let said = |text: String| Some(text).filter(|text| !text.is_empty());
        let AnyCase(rbd) = self.rbd;
        ClusterConfig {
            cluster_id: self.cluster_id,
            monitors: self.monitors,
            rados_namespace: said(rbd.rados_namespace).or(said(self.rados_namespace)),
            net_namespace_file: said(rbd.net_namespace_file_path).map(PathBuf::from),
            read_affinity: self.read_affinity.0,
        }
    }
}

/// The clusters of a file, which is read again after a change.
#[derive(Debug)]
pub struct Clusters {
    file: CachedFile<Vec<ClusterConfig>>,
}

impl Clusters {
    /// The clusters of that file, which is first read when it is needed.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            file: CachedFile::new(path.into()),
        }
    }

    /// The cluster of that id.
    pub fn get(&self, cluster_id: &str) -> Result<ClusterConfig, ConfigError> {
        let clusters = self.all()?;
        let found = clusters.iter().find(|known| known.cluster_id == cluster_id);
        let path = || self.file.path.clone();
        let cluster_id = || cluster_id.to_owned();
        match found {
            None => Err(ConfigError::Unknown {
                path: path(),
                cluster_id: cluster_id(),
            }),
            Some(found) if found.monitors.is_empty() => Err(ConfigError::NoMonitors {
                path: path(),
                cluster_id: cluster_id(),
            }),
            Some(found) => Ok(found.clone()),
        }
    }

    /// Checks the file and each of its clusters.
    pub fn check(&self) -> Result<(), ConfigError> {
        let all = self.all()?;
        let mut ids = all.iter().map(|known| &known.cluster_id);
        ids.try_for_each(|id| self.get(id).map(drop))
    }

    /// All clusters, in the order of the file.
    pub fn all(&self) -> Result<Arc<Vec<ClusterConfig>>, ConfigError> {
        self.file.read(|entries: Vec<AnyCase<ClusterEntry>>| {
            let clusters = entries
                .into_iter()
                .map(|AnyCase(entry)| entry.into_config());
            Ok(clusters.collect())
        })
    }
}

/// A JSON file that is read again after a change.
#[derive(Debug)]
struct CachedFile<T> {
    path: PathBuf,
    last: Mutex<Option<(Stamp, Arc<T>)>>,
}

/// Attributes that change when a file is written or replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    inode: (u64, u64),
    size: u64,
    changed: (i64, i64),
}

impl<T> CachedFile<T> {
    fn new(path: PathBuf) -> Self {
        Self {
            path,
            last: Mutex::default(),
        }
    }

    /// The value of the current file, made by `settle`.
    fn read<R: DeserializeOwned>(
        &self,
        settle: impl FnOnce(R) -> Result<T, ConfigError>,
    ) -> Result<Arc<T>, ConfigError> {
        let unreadable = |source| ConfigError::Unreadable {
            path: self.path.clone(),
            source,
        };
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let stamp = stamp(&self.path).map_err(unreadable)?;
        if let Some((known, value)) = &*last
            && *known == stamp
        {
            return Ok(value.clone());
        }
        // A change between the stamp and here is seen at the next read.
        let text = fs::read(&self.path).map_err(unreadable)?;
        let read = serde_json::from_slice(&text).map_err(|source| ConfigError::Malformed {
            path: self.path.clone(),
            source,
        })?;
        let value = Arc::new(settle(read)?);
        *last = Some((stamp, value.clone()));
        Ok(value)
    }
}

fn stamp(path: &Path) -> io::Result<Stamp> {
    let meta = fs::metadata(path)?;
    Ok(Stamp {
        inode: (meta.dev(), meta.ino()),
        size: meta.size(),
        changed: (meta.ctime(), meta.ctime_nsec()),
    })
}
