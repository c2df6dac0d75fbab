//! The pools of a cluster as its monitors list them, and whether the manager can work in them.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use serde::Deserialize;
use serde_json::json;

use crate::ceph::client::{CephError, rados::Cluster};

/// A pool, by `ceph osd pool ls detail`.
#[derive(Debug, Deserialize)]
pub struct ListedPool {
    #[serde(rename = "pool_id")]
    pub id: i64,
    #[serde(default, rename = "pool_name")]
    name: String,
    #[serde(default)]
    flags_names: String,
    #[serde(default)]
    application_metadata: BTreeMap<String, serde_json::Value>,
}

impl ListedPool {
    /// Whether it has images.
    pub fn is_of_rbd(&self) -> bool {
        self.application_metadata.contains_key("rbd")
    }

    /// Whether it may have images: Ceph only warns of a pool of images without an application.
    /// The manager's own pools have none.
    pub fn may_be_of_rbd(&self) -> bool {
        let is_of_manager = [".mgr", "device_health_metrics"].contains(&&*self.name);
        self.is_of_rbd() || self.application_metadata.is_empty() && !is_of_manager
    }

    /// Whether the pool, or the cluster, has no room.
    pub fn is_full(&self) -> bool {
        self.flags_names.split(',').any(|flag| flag == "full")
    }
}

/// The answer of the monitors, for [`parse`].
pub fn list(cluster: &Cluster) -> Result<Vec<u8>, CephError> {
    cluster.mon_command(&json!({"prefix": "osd pool ls", "detail": "detail", "format": "json"}))
}

/// The pools; none if the answer is not understood.
pub fn parse(answer: &[u8]) -> Option<Vec<ListedPool>> {
    serde_json::from_slice(answer).ok()
}

/// What the monitors say of the cluster's manager.
#[derive(Debug)]
pub struct ManagerStatus {
    is_active: bool,
    /// Whether any pool that may have images has no room.
    is_full: bool,
    asked: Instant,
}

impl ManagerStatus {
    /// How long an answer is used, for many images.
    const VALID: Duration = Duration::from_secs(5);

    /// Asks the monitors.
    pub fn of(cluster: &Cluster) -> Self {
        let pools = list(cluster).ok().and_then(|answer| parse(&answer));
        Self {
            is_active: is_active(cluster),
            is_full: pools
                .unwrap_or_default()
                .iter()
                .any(|pool| pool.may_be_of_rbd() && pool.is_full()),
            asked: Instant::now(),
        }
    }

    /// Whether to ask again.
    pub fn is_old(&self) -> bool {
        self.asked.elapsed() > Self::VALID
    }

    /// Whether it works. In a pool without room its writes wait, also those of a removal, and
    /// with them all its later tasks, whichever their pools. So no pool of images may be full, and
    /// not only that of the image: its data may be in another, and so may what the manager works
    /// on.
    pub fn works(&self) -> bool {
        self.is_active && !self.is_full
    }
}

/// Whether the cluster has an active manager; without one, a command to it would wait. A user
/// with ceph-csi's capabilities (`profile rbd`) may not ask: the controller then does the work
/// itself, at once, where the manager tries an image with a watcher again after half a minute.
fn is_active(cluster: &Cluster) -> bool {
    let answer = cluster.mon_command(&json!({"prefix": "mgr stat", "format": "json"}));
    let status = answer
        .ok()
        .and_then(|text| serde_json::from_slice(&text).ok());
    status.is_some_and(|status: serde_json::Value| status["available"] == true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_monitors_list_tells_full_pools_and_those_of_images() {
        let pools = json!([
            {"pool_id": 1, "flags_names": "hashpspool,full,full_quota", "application_metadata": {}},
            {"pool_id": 2, "flags_names": "hashpspool,nearfull", "application_metadata": {"rbd": {}}},
            {"pool_id": 3},
        ]);
        let pools = parse(pools.to_string().as_bytes()).unwrap();
        let shown = pools
            .iter()
            .map(|one| (one.id, one.is_full(), one.is_of_rbd()));
        assert_eq!(
            shown.collect::<Vec<_>>(),
            [(1, true, false), (2, false, true), (3, false, false)]
        );
        assert!(parse(b"{}").is_none());
    }
}
