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

use super::{AnyCase, CachedFile, ConfigError, null_is_default};

type Pairs = BTreeMap<String, String>;

/// One entry of the file.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct MappingEntry {
    #[serde(rename = "clusteridmapping")]
    clusters: Option<Pairs>,
    #[serde(rename = "rbdpoolidmapping", deserialize_with = "null_is_default")]
    pools: Vec<Pairs>,
}

/// The pairs of clusters, and of the ids of their pools.
#[derive(Debug)]
struct ClusterMapping {
    clusters: Pairs,
    pools: Vec<Pairs>,
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
        let mappings = match self.file.read(|entries| self.settle(entries)) {
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

    /// Refuses an entry without clusters: it would have no effect, and a delete would leave the
    /// image of a volume that failed over.
    fn settle(
        &self,
        entries: Vec<AnyCase<MappingEntry>>,
    ) -> Result<Vec<ClusterMapping>, ConfigError> {
        let numbered = entries.into_iter().enumerate();
        let settled = numbered.map(|(index, AnyCase(entry))| match entry.clusters {
            Some(clusters) => Ok(ClusterMapping {
                clusters,
                pools: entry.pools,
            }),
            None => Err(ConfigError::NoMapping {
                path: self.file.path.clone(),
                nr: index + 1,
            }),
        });
        settled.collect()
    }
}

/// The partners of `one` in these pairs.
fn others<'a>(pairs: &'a Pairs, one: &str) -> Vec<&'a str> {
    let other = |(key, value): (&'a String, &'a String)| match one {
        _ if key == one => Some(value.as_str()),
        _ if value == one => Some(key.as_str()),
        _ => None,
    };
    pairs.iter().filter_map(other).collect()
}
