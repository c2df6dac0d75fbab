//! The clients that are blocklisted.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::CephClient;
use crate::ceph::client::{
    CephError,
    rados::{Cluster, IoCtx},
};

/// The object of a pool's fences.
const FENCES: &str = "uring-csi.fenced";
/// How long a client is blocklisted unless its fence is lifted: longer than a neglected
/// node runs.
const FENCED_FOR: Duration = Duration::from_secs(365 * 24 * 3600);
/// Keys read at once.
const PAGE: u64 = 1000;

/// A client that is blocklisted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fence {
    /// The node that it belongs to.
    pub node: String,
    pub client: CephClient,
    /// The volume that it did not release.
    pub volume: String,
    /// Whether the node reports that the client has ended.
    #[serde(default, rename = "gone")]
    pub ended: bool,
}

/// The fences of a pool.
#[derive(Clone, Debug)]
pub struct Fences(IoCtx);

impl Fences {
    /// The fences of this pool.
    pub fn of(pool: &IoCtx) -> Self {
        Self(pool.clone())
    }

    /// All fences.
    pub fn list(&self) -> Result<Vec<Fence>, CephError> {
        let page = match self.0.omap_page(FENCES, "", "", PAGE) {
            Err(error) if error.is_not_found() => return Ok(Vec::new()),
            page => page?,
        };
        let read = |(address, raw): (&String, &String)| {
            let fence = serde_json::from_str(raw);
            fence
                .inspect_err(|error| tracing::warn!(address, %error, "a fence cannot be read"))
                .ok()
        };
        Ok(page.entries.iter().filter_map(read).collect())
    }

    fn enter(&self, fence: &Fence) -> Result<(), CephError> {
        let text = serde_json::to_string(fence).expect("strings are JSON");
        self.0.omap_set(FENCES, &[(&fence.client.address, &text)])
    }

    /// Blocklists a client: once every OSD knows, none of its writes is carried out.
    pub fn raise(&self, fence: &Fence) -> Result<(), CephError> {
        // Recorded first, so that no fence is forgotten.
        self.enter(fence)?;
        blocklist(
            self.0.cluster(),
            "add",
            &fence.client.address,
            Some(FENCED_FOR),
        )
    }

    /// Records that a client has ended.
    pub fn record_ended(&self, fence: &Fence) -> Result<(), CephError> {
        self.enter(&Fence {
            ended: true,
            ..fence.clone()
        })
    }

    /// Lifts the fence of a client that has ended.
    pub fn lift(&self, fence: &Fence) -> Result<(), CephError> {
        let address = &fence.client.address;
        blocklist(self.0.cluster(), "rm", address, None)?;
        self.0.omap_remove(FENCES, &[address])
    }
}

/// Blocklists a client that has ended, for as long as librbd does before it breaks a dead
/// client's lock: an hour, unless the cluster has another default.
pub fn blocklist_dead(cluster: &Cluster, address: &str) -> Result<(), CephError> {
    blocklist(cluster, "add", address, None)
}

/// `ceph osd blocklist`. Removing an entry needs more capabilities than `profile rbd`.
fn blocklist(
    cluster: &Cluster,
    what: &str,
    address: &str,
    expire: Option<Duration>,
) -> Result<(), CephError> {
    let mut command = json!({
        "prefix": "osd blocklist",
        "blocklistop": what,
        "addr": address,
    });
    if let Some(expire) = expire {
        command["expire"] = json!(expire.as_secs_f64());
    }
    cluster.mon_command(&command).map(drop)
}
