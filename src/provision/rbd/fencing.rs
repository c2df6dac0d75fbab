//! Fencing a node that does not release a volume.
//!
//! Kubernetes unpublishes a volume from a node when the node has released it, or when the
//! node no longer answers. So if an image, after a grace time, still has a watcher that
//! the node registered for itself ([`crate::ceph::fencing`]), that client is blocklisted:
//! OSDs reject its writes. An error names a watcher that is not registered for the node.
//!
//! ```text
//! published ─▶ node registers its client ─▶ unpublished: no watcher            ─▶ done
//!                                           its client watches, grace is over ─▶ fenced
//!                                           another client watches            ─▶ refused
//! ```
//!
//! An image that is still in use when its volume is unpublished is withdrawn first: its
//! node registers no more clients. A client of rbd-nbd that is starting at that time may
//! still start, so the call waits for as long as a start may take ([`STARTS_WITHIN`]),
//! even without a watcher; by then its node has ended it. If the node is lost and cannot,
//! the client is the single watcher from the host that the node registered for it, and is
//! fenced; of several watchers none is.
//!
//! After a crash the repeat looks at the watchers again.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::PathBuf,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use super::{
    super::{ProvisionError, PublishRequest, Release},
    RbdStore,
    error::RbdError,
    found::{FoundImage, Recorded},
};
use crate::{
    ceph::{
        client::{
            rados::IoCtx,
            rbd::{Image, OpenMode, Watcher},
        },
        fencing::{
            CephClient, Conflict, Fence, Fences, PUBLISH_CONTEXT_KEY, Publication, RegisteredNode,
            RegisteredNodes, STARTS_WITHIN, Through, host_of,
        },
    },
    error_chain,
    secret::Secrets,
};

/// The fencing of nodes.
#[derive(Debug)]
pub struct Fencer {
    /// How long a node may take to release a volume; none: no node is fenced.
    pub after: Option<Duration>,
    /// A file with the id of each node, one a line.
    known_nodes: Option<PathBuf>,
    /// Volumes that were in use after their unpublish, by handle and node. A controller
    /// that restarts waits the whole time again.
    seen: Mutex<HashMap<(String, String), Seen>>,
    /// How many clients were fenced.
    pub raised: AtomicU64,
}

#[derive(Clone, Debug)]
struct Seen {
    first: Instant,
    last: Instant,
    /// The address of the client that is fenced, whose watches are about to end.
    fenced: Option<String>,
}

impl Seen {
    fn now() -> Self {
        let now = Instant::now();
        Self {
            first: now,
            last: now,
            fenced: None,
        }
    }
}

/// An older entry belongs to an earlier unpublish, which another controller has
/// ended. external-attacher retries within five minutes.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);
/// The time between two looks at the watchers.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The same once a client is fenced: OSDs drop its watches when they get the new OSD map.
const HEARS_WITHIN: Duration = Duration::from_millis(100);

impl Fencer {
    pub fn new(after: Option<Duration>, known_nodes: Option<PathBuf>) -> Self {
        Self {
            after,
            known_nodes,
            seen: Mutex::default(),
            raised: AtomicU64::default(),
        }
    }

    /// Refuses a node that is not known, where nodes are. The file is read at each use,
    /// because it changes.
    fn check_node(&self, node: &str) -> Result<(), RbdError> {
        let Some(path) = &self.known_nodes else {
            return Ok(());
        };
        let known = fs::read_to_string(path).map_err(|source| RbdError::KnownNodesUnreadable {
            path: path.clone(),
            source,
        })?;
        if known.lines().any(|line| line.trim() == node) {
            return Ok(());
        }
        Err(RbdError::NoNode {
            node: node.to_owned(),
            path: path.clone(),
        })
    }

    fn seen(&self) -> MutexGuard<'_, HashMap<(String, String), Seen>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The watcher's entry, updated by this look.
    fn sees(&self, key: (String, String), grace: Duration) -> Seen {
        let mut all = self.seen();
        let seen = all.entry(key).or_insert_with(Seen::now);
        if seen.last.elapsed() > grace.max(FORGOTTEN_AFTER) {
            *seen = Seen::now();
        }
        seen.last = Instant::now();
        seen.clone()
    }
}

impl RbdStore {
    /// Enters the node, if it alone is to have the volume, and refuses what the nodes that have
    /// it exclude; returns the publish context, which has a single writer register its client.
    pub(super) fn publish_volume(
        &self,
        new: &PublishRequest,
    ) -> Result<BTreeMap<String, String>, ProvisionError> {
        self.fencing.check_node(&new.node)?;
        let found = self.volume(&new.handle, &new.secrets)?;
        let Some(nodes) = nodes_of(&found) else {
            return Ok(BTreeMap::new());
        };
        let wanted = match new.mode {
            mode if mode.multi_node() => Publication::Shared,
            mode if new.read_only || mode.reader_only() => Publication::Reader,
            _ => Publication::Writer,
        };
        let conflict = nodes.publish(&new.node, wanted).map_err(RbdError::from)?;
        if let Some(conflict) = conflict {
            return Err(refusal(new, conflict).into());
        }
        if wanted != Publication::Writer {
            return Ok(BTreeMap::new());
        }
        let key = (new.handle.clone(), new.node.clone());
        self.fencing.seen().remove(&key);
        lift(&found.pool);
        Ok([(PUBLISH_CONTEXT_KEY.to_owned(), "true".to_owned())].into())
    }

    /// Withdraws the node, once it does not have the volume; an empty one means all.
    pub(super) fn unpublish_volume(
        &self,
        handle: &str,
        node: &str,
        secrets: &Secrets,
    ) -> Result<Release, ProvisionError> {
        let Some(found) = self.all_of_volume(handle, secrets)?.pop() else {
            return Ok(Release::Done);
        };
        let Some(nodes) = nodes_of(&found) else {
            return Ok(Release::Done);
        };
        let all = nodes.list().map_err(RbdError::from)?;
        let is_it = |one: &&RegisteredNode| node.is_empty() || one.node == node;
        for attachment in all.iter().filter(is_it) {
            let release = self.release(&found, &nodes, attachment, &all)?;
            if matches!(release, Release::Pending(..)) {
                return Ok(release);
            }
        }
        lift(&found.pool);
        Ok(Release::Done)
    }

    fn release(
        &self,
        found: &FoundImage,
        nodes: &RegisteredNodes,
        attachment: &RegisteredNode,
        all: &[RegisteredNode],
    ) -> Result<Release, RbdError> {
        let key = (found.handle.clone(), attachment.node.clone());
        let soon = || Release::Pending(still_attached(found, attachment), LOOK_EVERY);
        // A reader has no client to fence.
        let users = if attachment.entry.read_only {
            Vec::new()
        } else {
            users(found, attachment, all)?
        };
        let is_starting = attachment.entry.starting.is_some();
        let withdraw = |last: &RegisteredNode| -> Result<Release, RbdError> {
            if !nodes.withdraw(last)? {
                // The node registered its client a moment ago.
                return Ok(soon());
            }
            self.fencing.seen().remove(&key);
            Ok(Release::Done)
        };
        if users.is_empty() && !is_starting {
            return withdraw(attachment);
        }
        let Some(last) = nodes.withdraw_soon(attachment)? else {
            return Ok(soon());
        };
        let mut grace = self.fencing.after.unwrap_or(Duration::MAX);
        if is_starting {
            grace = grace.max(STARTS_WITHIN);
        }
        let seen = self.fencing.sees(key.clone(), grace);
        let left = grace.saturating_sub(seen.first.elapsed());
        if !left.is_zero() {
            let soon = left.min(LOOK_EVERY);
            return Ok(Release::Pending(still_attached(found, attachment), soon));
        }
        if users.is_empty() {
            return withdraw(&last);
        }
        let Some(own) = own_client(attachment, &users) else {
            let addresses: Vec<_> = users.into_iter().map(|user| user.address).collect();
            return Err(RbdError::ClientNotRegistered {
                image: format!("{}/{}", found.pool, found.image),
                node: attachment.node.clone(),
                watchers: addresses.join(", "),
            });
        };
        let hears = Release::Pending(still_attached(found, attachment), HEARS_WITHIN);
        if seen.fenced.as_ref() == Some(&own.address) {
            return Ok(hears);
        }
        let fence = Fence {
            node: attachment.node.clone(),
            client: own,
            volume: found.handle.clone(),
            ended: false,
        };
        let (node, address) = (&fence.node, &fence.client.address);
        let image = format!("{}/{}", found.pool, found.image);
        let reach = match fence.client.through {
            Through::SharedKrbd => "all volumes that the node has by this client",
            Through::OwnKrbd | Through::RbdNbd => "this volume alone",
        };
        tracing::warn!(node, address, image, reach, "fencing a node's client");
        Fences::of(&found.pool).raise(&fence)?;
        self.fencing.raised.fetch_add(1, Relaxed);
        if let Some(seen) = self.fencing.seen().get_mut(&key) {
            seen.fenced = Some(fence.client.address.clone());
        }
        Ok(hears)
    }
}

fn refusal(new: &PublishRequest, conflict: Conflict) -> RbdError {
    let handle = new.handle.clone();
    match conflict {
        Conflict::OtherNode(node) => RbdError::OnOtherNode { handle, node },
        Conflict::Unpublishing(node) => RbdError::Unpublishing { handle, node },
        Conflict::OtherUse(publication) => RbdError::PublishedOtherwise {
            handle,
            node: new.node.clone(),
            how: match publication {
                Publication::Reader => "for reading by one node",
                Publication::Writer | Publication::Shared => "for writing by one node",
            },
        },
    }
}

/// Lifts the fences of clients that have ended. The next look repeats a failed one. False:
/// nothing is left to lift.
pub fn lift(pool: &IoCtx) -> bool {
    let fences = Fences::of(pool);
    let lifted = fences.list().and_then(|all| {
        for fence in all.iter().filter(|fence| fence.ended) {
            fences.lift(fence)?;
            let (node, address) = (&fence.node, &fence.client.address);
            tracing::info!(node, address, "a fenced node is back, lifted its fence");
        }
        Ok(all.iter().any(|fence| !fence.ended))
    });
    lifted.unwrap_or_else(|error| {
        let error = error_chain(&error);
        tracing::warn!(pool = %pool, error, "cannot lift the fences of nodes that are back yet");
        true
    })
}

/// The nodes of a volume; none where it has no journal.
fn nodes_of(found: &FoundImage) -> Option<RegisteredNodes> {
    let Recorded { reserved, .. } = found.recorded.as_ref()?;
    Some(RegisteredNodes::of(&found.pool, reserved.uuid))
}

/// The watchers of the image, without the clients of other nodes and of mirroring.
fn users(
    found: &FoundImage,
    attachment: &RegisteredNode,
    all: &[RegisteredNode],
) -> Result<Vec<Watcher>, RbdError> {
    let image: Image = match found.open(OpenMode::ReadOnly) {
        Err(RbdError::Lost { .. }) => return Ok(Vec::new()),
        image => image?,
    };
    let address = |one: &RegisteredNode| {
        let client = one.entry.client.as_ref();
        client.map(|client| client.address.clone())
    };
    let own = address(attachment);
    let others = all.iter().filter(|one| one.node != attachment.node);
    let others: Vec<_> = others.filter_map(address).collect();
    let mut users = image.watchers()?;
    users.retain(|user| !user.own && !others.contains(&user.address));
    if users.iter().any(|user| Some(&user.address) == own.as_ref()) {
        return Ok(users);
    }
    Ok(image.without_mirror_daemons(users)?)
}

/// The node's client among the image's watchers.
fn own_client(attachment: &RegisteredNode, users: &[Watcher]) -> Option<CephClient> {
    let entry = &attachment.entry;
    if let Some(starting) = &entry.starting {
        let is_from_there = |user: &&Watcher| host_of(&user.address) == starting.host;
        let mut its: Vec<_> = users.iter().filter(is_from_there).collect();
        return its.pop().filter(|_| its.is_empty()).map(|user| CephClient {
            address: user.address.clone(),
            boot_id: starting.boot_id.clone(),
            through: Through::RbdNbd,
            process: None,
        });
    }
    let own = entry.client.as_ref()?;
    let mut users = users.iter();
    users
        .any(|user| user.address == own.address)
        .then(|| own.clone())
}

fn still_attached(found: &FoundImage, attachment: &RegisteredNode) -> ProvisionError {
    let error = RbdError::StillAttached {
        image: format!("{}/{}", found.pool, found.image),
        node: attachment.node.clone(),
    };
    error.into()
}
