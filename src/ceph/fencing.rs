//! The nodes of a volume with their clients of the cluster, and the clients that are
//! blocklisted because they did not release it.
//!
//! ```text
//! csi.volume.<uuid>   uring-csi.node.<node>  →  the node's entry, as JSON
//!                     uring-csi.nodes-added  →  a new number for each added node
//! uring-csi.fenced    <address>              →  the fence, as JSON
//! ```
//!
//! The controller writes the first key: it adds a node when the volume is published to it,
//! unless another node has it, and removes the node after the unpublish. In between, the
//! node registers its client before it writes a byte, if the volume is still published to
//! it: each change compares the old value in the same step, so that a late node is refused.
//!
//! The kernel's client exists before it writes. A process of rbd-nbd learns its client id
//! only when it serves. So it is registered twice, as starting and then by its address,
//! and its node ends it if the address is not registered within [`STARTS_WITHIN`]. It may
//! also be replaced at any time, so the controller first withdraws the node: from then on
//! the node registers nothing more.
//!
//! ```text
//!  published ──▶ starting, on this host ──▶ client ──▶ starting ──▶ client …
//!      └────────────┴── withdrawing: nothing more is registered ──┴──▶ removed
//! ```
//!
//! Each registration has a number of its own, so that a comparison never takes a newer one
//! for the one that was read.
//!
//! The controller writes the last key, the fence, and lifts it once the node reports
//! that the client has ended ([`Fences::record_ended`]). Only the node knows that: a client
//! that cannot reach its cluster may hold data as long as its kernel runs.

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

/// The key of a publish context by which the controller requests that the node register its
/// client.
pub const PUBLISH_CONTEXT_KEY: &str = "fencing";

/// The longest time from the registration of a client as starting to that of its address.
/// By then its node has ended it, unless the supervisor was killed: then the client has
/// the image open, from that host. Tests of this crate start none.
pub const STARTS_WITHIN: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 120 });

/// The prefix of a node's id in a volume's entry.
const NODE: &str = "uring-csi.node.";
/// A key that each added node changes: of two controllers that add different nodes at once,
/// one sees that its list of nodes is old.
const ADDED: &str = "uring-csi.nodes-added";

/// The kind of client by which a node has a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Through {
    /// The kernel's client that all volumes of the node share.
    SharedKrbd,
    /// A kernel client of this volume alone (`noshare`).
    OwnKrbd,
    /// A process of rbd-nbd.
    RbdNbd,
}

/// A client of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CephClient {
    /// Its address as the cluster sees it, `10.0.0.5:0/1234567`, by which it is blocklisted.
    pub address: String,
    /// The boot of the node that it belongs to.
    pub boot_id: String,
    /// Its kind.
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
    /// Its start time, which differs from that of a later process with this id
    /// (`starttime` of `/proc/PID/stat`).
    pub began: u64,
}

/// A client that is starting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Starting {
    /// The host part of the address that it will have.
    pub host: String,
    /// The boot of the node that it belongs to.
    pub boot_id: String,
}

/// The entry of a node that a volume was published to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeEntry {
    /// Its client, once it has the volume.
    #[serde(flatten)]
    pub client: Option<CephClient>,
    /// A client that is starting, whose address is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub starting: Option<Starting>,
    /// The number of the node's lineage, which stays while one client follows another
    /// without a break.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Uuid>,
    /// The node is withdrawn: it may register nothing more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub withdrawing: bool,
    /// The node reads the volume, and registers no client.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// A new number for each registration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nonce: Option<Uuid>,
}

impl NodeEntry {
    /// A value that cannot be parsed is a node without a client.
    fn parse(raw: &str) -> Self {
        let read: Option<Self> = serde_json::from_str(raw).unwrap_or_default();
        read.unwrap_or_default()
    }

    fn write(&self) -> String {
        serde_json::to_string(self).expect("strings are JSON")
    }

    /// A first entry.
    fn anew(mut self) -> String {
        self.nonce = Some(Uuid::new_v4());
        self.write()
    }

    fn publication(&self) -> Publication {
        if self.read_only {
            Publication::Reader
        } else {
            Publication::Writer
        }
    }

    /// Whether its node may register a client.
    fn is_open(&self, published: Published) -> bool {
        !self.withdrawing
            && !self.read_only
            && match published {
                Published::Now => true,
                Published::Since(since, or) => self
                    .since
                    .is_some_and(|found| found == since || Some(found) == or),
            }
    }
}

impl From<CephClient> for NodeEntry {
    fn from(client: CephClient) -> Self {
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
    pub entry: NodeEntry,
    /// Its value, as stored.
    raw: String,
}

/// The condition under which a node may register a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    /// The volume is published to it.
    Now,
    /// And has been without a break, by this number, or by a later one whose registration was
    /// not confirmed.
    Since(Uuid, Option<Uuid>),
}

/// The use for which a volume is published to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Publication {
    /// This node alone has it, and writes.
    Writer,
    /// This node alone has it, and reads.
    Reader,
    /// Several nodes may have it. Such nodes have no entries.
    Shared,
}

/// Why a volume is not published to a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Conflict {
    /// This other node has it.
    OtherNode(String),
    /// It is being unpublished from this node.
    Unpublishing(String),
    /// The node has it for another use.
    OtherUse(Publication),
}

/// The conflict of a publication to the node with the entries of a volume.
fn conflict(all: &[RegisteredNode], node: &str, wanted: Publication) -> Option<Conflict> {
    let (own, others): (Vec<_>, Vec<_>) = all.iter().partition(|one| one.node == node);
    if let Some(own) = own.first() {
        let there = own.entry.publication();
        match (own.entry.withdrawing, there == wanted) {
            (false, true) => return None,
            (false, false) => return Some(Conflict::OtherUse(there)),
            (true, false) => return Some(Conflict::Unpublishing(node.to_owned())),
            (true, true) => {}
        }
    }
    let other = others.into_iter().min_by_key(|one| one.entry.withdrawing)?;
    let name = other.node.clone();
    Some(if other.entry.withdrawing {
        Conflict::Unpublishing(name)
    } else {
        Conflict::OtherNode(name)
    })
}

/// The nodes of one volume.
#[derive(Clone, Debug)]
pub struct RegisteredNodes {
    pool: IoCtx,
    object: String,
}

impl RegisteredNodes {
    /// The nodes of the volume with this entry.
    pub fn of(pool: &IoCtx, uuid: Uuid) -> Self {
        Self {
            pool: pool.clone(),
            object: entry_of(uuid),
        }
    }

    /// All nodes of the volume.
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

    /// Replaces the value that was read; false if it has changed.
    fn replace(&self, found: &RegisteredNode, raw: &str) -> Result<bool, CephError> {
        let key = format!("{NODE}{}", found.node);
        let op = WriteOp::new().compare(&key, &found.raw);
        self.changed(&op.set([(&*key, raw)]))
    }

    /// Makes a change that compares first; false if the comparison failed.
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

    /// Adds a node, unless it is there, or the volume is published otherwise; clears its
    /// withdrawal.
    pub fn publish(&self, node: &str, wanted: Publication) -> Result<Option<Conflict>, CephError> {
        let key = format!("{NODE}{node}");
        loop {
            let added = self.added()?;
            let all = self.list()?;
            let conflict = conflict(&all, node, wanted);
            if conflict.is_some() || wanted == Publication::Shared {
                return Ok(conflict);
            }
            let there = all.into_iter().find(|one| one.node == node);
            let (old, new) = match there {
                Some(there) if !there.entry.withdrawing => return Ok(None),
                Some(there) => (there.raw, there.entry),
                // An absent key compares as an empty one.
                None => (String::new(), NodeEntry::default()),
            };
            let new = NodeEntry {
                withdrawing: false,
                read_only: wanted == Publication::Reader,
                ..new
            };
            let (new, next) = (new.anew(), Uuid::new_v4().to_string());
            let op = WriteOp::new().assert_exists().compare(ADDED, &added);
            let op = op.compare(&key, &old);
            if self.changed(&op.set([(&*key, &*new), (ADDED, &*next)]))? {
                return Ok(None);
            }
        }
    }

    /// The value that the last added node left; empty: none did.
    fn added(&self) -> Result<String, CephError> {
        match self.pool.omap_get(&self.object, &[ADDED]) {
            Err(error) if error.is_not_found() => Ok(String::new()),
            found => Ok(found?.remove(ADDED).unwrap_or_default()),
        }
    }

    /// Whether a node may register a client.
    pub fn is_published(&self, node: &str, published: Published) -> Result<bool, CephError> {
        let there = self.of_node(node)?;
        Ok(there.is_some_and(|there| there.entry.is_open(published)))
    }

    /// Registers a node's client; false if the volume is not published to the node under
    /// this condition, or is being unpublished.
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

    /// Withdraws a node; none if it has registered another client meanwhile.
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

    /// Removes a node; false if it has registered another client meanwhile.
    pub fn withdraw(&self, attachment: &RegisteredNode) -> Result<bool, CephError> {
        let key = format!("{NODE}{}", attachment.node);
        let op = WriteOp::new().compare(&key, &attachment.raw);
        match self.changed(&op.unset([&*key])) {
            Err(error) if error.is_not_found() => Ok(true),
            done => done,
        }
    }
}

/// The host part of a client's address, `10.0.0.5:0/1234567`, which
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
mod networks;
#[cfg(test)]
mod tests;

pub use fences::{Fence, Fences, blocklist_dead};
pub use networks::{BadCidr, Cidr, FencedNetworks, NetworkError};
