//! Which node has a volume, through which client of the cluster, and which clients
//! were taken off a cluster because they did not let go.
//!
//! ```text
//! csi.volume.<uuid>   uring-csi.node.<node>  →  the node's entry, as JSON
//! uring-csi.fenced    <address>              →  the fence, as JSON
//! ```
//!
//! The upper key is the controller's: it enters a node when the volume is published
//! to it, and takes it out when it is unpublished. In between, the node enters its
//! client before it writes a byte, if it is still published to: by comparing what
//! is there in the same step, so that a node that is late finds that it may not.
//!
//! The kernel's client is there before it has anything to write. A process of
//! rbd-nbd is not: who it is to the cluster is known only once it serves. So it is
//! entered twice, as one that is starting and then by its address, and what is not
//! entered within [`STARTS_WITHIN`] is ended by its node. It may also be replaced at
//! any time, so the controller first says that a node is to let go: from then on it
//! enters nothing more.
//!
//! ```text
//!  published ──▶ starting, on this host ──▶ client ──▶ starting ──▶ client …
//!      └────────────┴─── withdrawing: nothing more is entered ──┴──▶ taken out
//! ```
//!
//! Whatever is entered has a number of its own, so that nobody who compares takes
//! what was entered anew for what he has seen.
//!
//! The lower one is the controller's too, until the node has said that nothing of
//! the client is left ([`Fences::is_gone`]); then the controller lifts it. Nobody
//! else knows: a client that cannot reach its cluster may hold data for as long as
//! its kernel runs.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{
    client::{
        CephError,
        rados::{IoCtx, WriteOp},
    },
    csi_format::journal::entry_of,
};

/// The key of a publish context by which a node is asked to register its client.
pub const ASKED: &str = "fencing";

/// How long after a client was entered as one that is starting it may be there
/// without being entered by its address. Its node has ended it by then, unless who
/// was to do that was killed: then it has the image open, from that host. Tests of
/// this crate start none.
pub const STARTS_WITHIN: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 120 });

/// What stands before a node's id in a volume's entry.
const NODE: &str = "uring-csi.node.";

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
    /// The process that it ends with; the kernel's has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<Process>,
}

/// A process, of one boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its id.
    pub pid: i32,
    /// When it began, which tells it from a later one with this id (`starttime` of
    /// `/proc/PID/stat`).
    pub began: u64,
}

/// A client that is about to be there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Starting {
    /// From where it will reach the cluster: what stands before the port in its
    /// address.
    pub host: String,
    /// The boot of the node that it belongs to.
    pub boot_id: String,
}

/// What is entered for a node that a volume was published to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeEntry {
    /// Its client, once it has the volume.
    #[serde(flatten)]
    pub client: Option<Client>,
    /// A client of which nobody knows yet which it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub starting: Option<Starting>,
    /// Since when the node has the volume without a break, as a number that stays
    /// while one client follows the other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Uuid>,
    /// It is to let go: nothing more is entered.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub withdrawing: bool,
    /// Another one each time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nonce: Option<Uuid>,
}

impl NodeEntry {
    /// Anything that cannot be read is a node without a client.
    fn parse(raw: &str) -> Self {
        let read: Option<Self> = serde_json::from_str(raw).unwrap_or_default();
        read.unwrap_or_default()
    }

    fn write(&self) -> String {
        serde_json::to_string(self).expect("strings are JSON")
    }

    /// As it is written for the first time.
    fn anew(mut self) -> String {
        self.nonce = Some(Uuid::new_v4());
        self.write()
    }

    /// Whether its node may enter something else.
    fn is_open(&self, published: Published) -> bool {
        !self.withdrawing
            && match published {
                Published::Now => true,
                Published::Since(since, or) => self
                    .since
                    .is_some_and(|found| found == since || Some(found) == or),
            }
    }
}

impl From<Client> for NodeEntry {
    fn from(client: Client) -> Self {
        Self {
            client: Some(client),
            ..Self::default()
        }
    }
}

impl From<Starting> for NodeEntry {
    fn from(starting: Starting) -> Self {
        Self {
            starting: Some(starting),
            ..Self::default()
        }
    }
}

/// An entry of a volume's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegisteredNode {
    /// The node's id.
    pub node: String,
    /// What is entered for it.
    pub entry: NodeEntry,
    /// As it is written.
    raw: String,
}

/// What a node must find to be allowed to enter something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    /// The volume is published to it.
    Now,
    /// And was without a break, by that number, or by another one of which nobody
    /// heard whether it was entered.
    Since(Uuid, Option<Uuid>),
}

/// The nodes of one volume.
#[derive(Clone, Debug)]
pub struct RegisteredNodes {
    pool: IoCtx,
    object: String,
}

impl RegisteredNodes {
    /// Those of the volume with this entry.
    pub fn of(pool: &IoCtx, uuid: Uuid) -> Self {
        Self {
            pool: pool.clone(),
            object: entry_of(uuid),
        }
    }

    /// All nodes that are entered.
    pub fn list(&self) -> Result<Vec<RegisteredNode>, CephError> {
        let keys = match self.pool.omap_list(&self.object, NODE) {
            Err(error) if error.is_not_found() => return Ok(Vec::new()),
            keys => keys?,
        };
        let attachment = |(key, raw): (String, String)| RegisteredNode {
            node: key[NODE.len()..].to_owned(),
            entry: NodeEntry::parse(&raw),
            raw,
        };
        Ok(keys.into_iter().map(attachment).collect())
    }

    /// Replaces what was found; false where it is something else by now.
    fn replace(&self, found: &RegisteredNode, raw: &str) -> Result<bool, CephError> {
        let key = format!("{NODE}{}", found.node);
        let op = WriteOp::new().compare(&key, &found.raw);
        self.changed(&op.set([(&*key, raw)]))
    }

    /// Makes a change that compares first; false where that found something else.
    fn changed(&self, op: &WriteOp<'_>) -> Result<bool, CephError> {
        match self.pool.operate(&self.object, op) {
            Ok(()) => Ok(true),
            Err(error) if error.is_mismatch() => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn of_node(&self, node: &str) -> Result<Option<RegisteredNode>, CephError> {
        let all = self.list()?;
        Ok(all.into_iter().find(|one| one.node == node))
    }

    /// Enters a node, unless it is entered; one that was to let go need not.
    pub fn publish(&self, node: &str) -> Result<(), CephError> {
        let key = format!("{NODE}{node}");
        loop {
            // An absent key compares as an empty one.
            let op = WriteOp::new().assert_exists().compare(&key, "");
            let new = NodeEntry::default().anew();
            if self.changed(&op.set([(&*key, &*new)]))? {
                return Ok(());
            }
            let Some(there) = self.of_node(node)? else {
                continue;
            };
            let kept = NodeEntry {
                withdrawing: false,
                ..there.entry.clone()
            };
            if !there.entry.withdrawing || self.replace(&there, &kept.anew())? {
                return Ok(());
            }
        }
    }

    /// Whether a node may enter something.
    pub fn is_published(&self, node: &str, published: Published) -> Result<bool, CephError> {
        let there = self.of_node(node)?;
        Ok(there.is_some_and(|there| there.entry.is_open(published)))
    }

    /// Enters what a node has; false where the volume is not published to it so, or
    /// is being unpublished.
    pub fn attach(
        &self,
        node: &str,
        entry: &NodeEntry,
        published: Published,
    ) -> Result<bool, CephError> {
        let new = entry.clone().anew();
        loop {
            let there = self.of_node(node)?;
            let Some(there) = there.filter(|there| there.entry.is_open(published)) else {
                return Ok(false);
            };
            if self.replace(&there, &new)? {
                return Ok(true);
            }
        }
    }

    /// Has a node enter nothing more; none where it has entered something else
    /// meanwhile.
    pub fn withdraw_soon(
        &self,
        found: &RegisteredNode,
    ) -> Result<Option<RegisteredNode>, CephError> {
        if found.entry.withdrawing {
            return Ok(Some(found.clone()));
        }
        let mut last = found.clone();
        last.entry.withdrawing = true;
        last.raw = last.entry.write();
        Ok(self.replace(found, &last.raw)?.then_some(last))
    }

    /// Takes a node out; false where it has entered something else meanwhile.
    pub fn withdraw(&self, attachment: &RegisteredNode) -> Result<bool, CephError> {
        let key = format!("{NODE}{}", attachment.node);
        let op = WriteOp::new().compare(&key, &attachment.raw);
        match self.changed(&op.unset([&*key])) {
            Err(error) if error.is_not_found() => Ok(true),
            done => done,
        }
    }
}

/// What stands before the port in a client's address, `10.0.0.5:0/1234567`, which
/// librados may give with the version of the protocol before it.
pub fn host_of(address: &str) -> &str {
    let versions = ["v1:", "v2:", "any:"];
    let mut bare = versions
        .iter()
        .filter_map(|version| address.strip_prefix(version));
    let bare = bare.next().unwrap_or(address);
    bare.rsplit_once(':').map_or(bare, |(host, _)| host)
}

mod fences;
#[cfg(test)]
mod tests;

pub use fences::{Fence, Fences};
