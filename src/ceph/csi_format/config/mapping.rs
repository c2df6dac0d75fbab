//! The clusters of the other site, after a fail-over: ceph-csi's `cluster-mapping.json`.
//!
//! After a fail-over, the handles of volumes name a cluster and a pool's id of
//! the other site:
//!
//! ```json
//! [{"clusterIDMapping": {"site1": "site2"}, "RBDPoolIDMapping": [{"1": "2"}]}]
//! ```
//!
//! The same file lies on both sites, so each pair is read in both directions.

use std::{collections::BTreeMap, path::PathBuf};

use serde::Deserialize;

use super::{CachedFile, ConfigError, null_is_default};

/// One entry of the file.
#[derive(Debug, Deserialize)]
struct ClusterMapping {
    #[serde(
        default,
        rename = "clusterIDMapping",
        deserialize_with = "null_is_default"
    )]
    clusters: BTreeMap<String, String>,
    #[serde(
        default,
        rename = "RBDPoolIDMapping",
        deserialize_with = "null_is_default"
    )]
    pools: Vec<BTreeMap<String, String>>,
}

/// The mappings of a file, which is read again after a change.
#[derive(Debug)]
pub struct Mappings {
    file: CachedFile<Vec<ClusterMapping>>,
}

impl Mappings {
    /// The mappings of that file, which need not exist.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            file: CachedFile::new(path.into()),
        }
    }

    /// The clusters, with the ids of pools, to which a volume of this pool may have failed
    /// over, in the order of the file; empty without a mapping.
    pub fn of(&self, cluster_id: &str, pool_id: i64) -> Result<Vec<(String, i64)>, ConfigError> {
        let mappings = match self.file.read(|mappings| mappings) {
            Ok(mappings) => mappings,
            Err(ConfigError::Unreadable { source, .. })
                if source.kind() == std::io::ErrorKind::NotFound =>
            {
                return Ok(Vec::new());
            }
            Err(error) => return Err(error),
        };
        let pool = pool_id.to_string();
        let mut found = Vec::new();
        for mapping in &*mappings {
            for cluster in others(&mapping.clusters, cluster_id) {
                let pools = mapping.pools.iter().flat_map(|pairs| others(pairs, &pool));
                let ids = pools.filter_map(|id| id.parse().ok());
                found.extend(ids.map(|id| (cluster.to_owned(), id)));
            }
        }
        Ok(found)
    }
}

/// The partners of `one` in these pairs.
fn others<'a>(pairs: &'a BTreeMap<String, String>, one: &str) -> Vec<&'a str> {
    let other = |(key, value): (&'a String, &'a String)| match one {
        _ if key == one => Some(value.as_str()),
        _ if value == one => Some(key.as_str()),
        _ => None,
    };
    pairs.iter().filter_map(other).collect()
}
