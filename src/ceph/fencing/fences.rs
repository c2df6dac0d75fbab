//! The clients that were taken off a cluster.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::Client;
use crate::ceph::client::{
    CephError,
    rados::{Cluster, IoCtx},
};

/// The object of a pool's fences.
const FENCES: &str = "uring-csi.fenced";
/// How long a client stays off a cluster unless its fence is lifted: longer than a
/// node runs that nobody looks after.
const FENCED_FOR: Duration = Duration::from_secs(365 * 24 * 3600);
/// Keys read at once.
const PAGE: u64 = 1000;

/// A client that was taken off the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fence {
    /// The node that it belongs to.
    pub node: String,
    /// The client.
    pub client: Client,
    /// The volume that it did not let go of.
    pub volume: String,
    /// The node says that nothing of it is left.
    #[serde(default)]
    pub gone: bool,
}

/// The fences of a pool.
#[derive(Clone, Debug)]
pub struct Fences(IoCtx);

impl Fences {
    /// Those of this pool.
    pub fn of(pool: &IoCtx) -> Self {
        Self(pool.clone())
    }

    /// All of them.
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

    /// Takes a client off the cluster: once every OSD knows it, nothing that it
    /// still sends is written.
    pub fn raise(&self, fence: &Fence) -> Result<(), CephError> {
        // Before, so that none is forgotten.
        self.enter(fence)?;
        blocklist(
            self.0.cluster(),
            "add",
            &fence.client.address,
            Some(FENCED_FOR),
        )
    }

    /// Says that nothing is left of a client.
    pub fn is_gone(&self, fence: &Fence) -> Result<(), CephError> {
        self.enter(&Fence {
            gone: true,
            ..fence.clone()
        })
    }

    /// Lets a client that is gone go.
    pub fn lift(&self, fence: &Fence) -> Result<(), CephError> {
        let address = &fence.client.address;
        blocklist(self.0.cluster(), "rm", address, None)?;
        self.0.omap_remove(FENCES, &[address])
    }
}

/// `ceph osd blocklist`. To remove takes more than `profile rbd`.
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
