//! Which node has a volume, through which client of the cluster, and which clients
//! were taken off a cluster because they did not let go.
//!
//! ```text
//! csi.volume.<uuid>   uring-csi.node.<node>  →  null, or the client, as JSON
//! uring-csi.fenced    <address>              →  the fence, as JSON
//! ```
//!
//! The upper key is the controller's: it enters a node when the volume is published
//! to it, and takes it out when it is unpublished. In between, the node enters its
//! client before it writes a byte, if it is still published to: by comparing what
//! is there in the same step, so that a node that is late finds that it may not.
//!
//! The lower one is the controller's too, until the node has said that nothing of
//! the client is left ([`Fences::is_gone`]); then the controller lifts it. Nobody
//! else knows: a client that cannot reach its cluster may hold data for as long as
//! its kernel runs.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::json;
use uuid::Uuid;

use super::{
    CephError,
    journal::entry_of,
    rados::{Cluster, IoCtx, WriteOp},
};

/// The key of a publish context by which a node is asked to enter its client.
pub const ASKED: &str = "fencing";

/// What stands before a node's id in a volume's entry.
const NODE: &str = "uring-csi.node.";
/// The object of a pool's fences.
const FENCES: &str = "uring-csi.fenced";
/// How long a client stays off a cluster unless its fence is lifted: longer than a
/// node runs that nobody looks after.
const FENCED_FOR: Duration = Duration::from_secs(365 * 24 * 3600);
/// Keys read at once.
const PAGE: u64 = 1000;

/// How a node has a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Through {
    /// The kernel's client that all volumes of the node share.
    SharedKrbd,
    /// A client of the kernel's that no other volume has (`noshare`).
    OwnKrbd,
    /// A process of rbd-nbd.
    RbdNbd,
}

/// A client of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Client {
    /// Its address as the cluster sees it, `10.0.0.5:0/1234567`: what is blocklisted.
    pub address: String,
    /// The boot of the node that it belongs to.
    pub boot_id: String,
    /// What it is.
    pub through: Through,
}

/// What is entered for a node that a volume was published to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// The node's id.
    pub node: String,
    /// Its client, once it has the volume.
    pub client: Option<Client>,
    /// As it is written.
    raw: String,
}

/// The nodes of one volume.
#[derive(Clone, Debug)]
pub struct Attachments {
    pool: IoCtx,
    object: String,
}

impl Attachments {
    /// Those of the volume with this entry.
    pub fn of(pool: &IoCtx, uuid: Uuid) -> Self {
        Self {
            pool: pool.clone(),
            object: entry_of(uuid),
        }
    }

    /// All nodes that are entered. What cannot be read has no client.
    pub fn list(&self) -> Result<Vec<Attachment>, CephError> {
        let keys = match self.pool.omap_list(&self.object, NODE) {
            Err(error) if error.is_not_found() => return Ok(Vec::new()),
            keys => keys?,
        };
        let attachment = |(key, raw): (String, String)| Attachment {
            node: key[NODE.len()..].to_owned(),
            client: serde_json::from_str(&raw).unwrap_or_default(),
            raw,
        };
        Ok(keys.into_iter().map(attachment).collect())
    }

    /// Enters a node without a client, unless it is entered.
    pub fn publish(&self, node: &str) -> Result<(), CephError> {
        let key = format!("{NODE}{node}");
        // An absent key compares as an empty one.
        let op = WriteOp::new().assert_exists().compare(&key, "");
        match self.pool.operate(&self.object, &op.set([(&*key, "null")])) {
            Err(error) if !error.is_mismatch() => Err(error),
            _ => Ok(()),
        }
    }

    /// Enters a node's client; false where the volume is not published to it.
    pub fn attach(&self, node: &str, client: &Client) -> Result<bool, CephError> {
        let key = format!("{NODE}{node}");
        let new = serde_json::to_string(client).expect("strings are JSON");
        loop {
            let all = self.list()?;
            let Some(there) = all.iter().find(|one| one.node == node) else {
                return Ok(false);
            };
            let op = WriteOp::new().compare(&key, &there.raw);
            match self.pool.operate(&self.object, &op.set([(&*key, &*new)])) {
                Ok(()) => return Ok(true),
                Err(error) if error.is_mismatch() => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes a node out; false where it has entered something else meanwhile.
    pub fn withdraw(&self, attachment: &Attachment) -> Result<bool, CephError> {
        let key = format!("{NODE}{}", attachment.node);
        let op = WriteOp::new().compare(&key, &attachment.raw);
        match self.pool.operate(&self.object, &op.unset([&*key])) {
            Ok(()) => Ok(true),
            Err(error) if error.is_not_found() => Ok(true),
            Err(error) if error.is_mismatch() => Ok(false),
            Err(error) => Err(error),
        }
    }
}

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

#[cfg(test)]
mod tests;
