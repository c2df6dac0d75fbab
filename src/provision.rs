//! The controller's stores, which create, delete, grow, snapshot and clone volumes.
//!
//! The gRPC services call [`Stores`], which picks the store of a call and runs the call on
//! a lane. A store is a synchronous [`Provisioner`]: [`images`] keeps volumes as raw image
//! files in pools, [`rbd`] as images in Ceph clusters, [`nfs`] as directories of NFS
//! servers. This module does not know gRPC:
//! requests are plain data, and `csi::status` makes a code of the
//! [`Kind`](crate::Kind) of an [`ProvisionError`].

use std::{
    collections::{BTreeMap, HashMap},
    fmt, mem,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use serde::{Deserialize, Serialize};

use crate::{Done, capability::AccessMode, error_chain, lane::Inspection, secret::Secrets};

mod blocks;
mod copy;
mod error;
pub mod images;
pub mod nfs;
mod orphan;
mod params;
mod range;
pub mod rbd;
mod reclaims;
mod replication;
mod serialized;
mod stores;

pub use crate::ceph::fencing::{BadCidr, Cidr};
pub use blocks::{BlockPage, BlockRequest};
pub use error::ProvisionError;
pub use orphan::{Orphan, OrphanKind, OrphanReport};
pub use params::Parameters;
pub use range::Range;
pub use replication::{
    Replicated, ReplicationChange, ReplicationHealth, ReplicationInfo, ReplicationParameters,
    VolumeToEnter,
};
pub use serialized::within;
pub use stores::{StoreKind, Stores};

/// A request for a volume.
#[derive(Clone, Debug)]
pub struct NewVolume {
    /// The name, by which a repeated request is recognised.
    pub name: String,
    /// Its size.
    pub range: Range,
    /// The storage class' parameters, as the request has them.
    pub parameters: HashMap<String, String>,
    /// The parameters that may be changed later, as the request has them.
    pub mutable: HashMap<String, String>,
    /// The uses that it must support, all of them.
    pub uses: Vec<VolumeUse>,
    /// Its initial content.
    pub source: Option<ContentSource>,
    /// The requested topology, if this node is not within it.
    pub elsewhere: Option<String>,
    /// The topology that it must be reachable from.
    pub accessibility: AccessibilityRequirements,
    /// The secrets of the storage.
    pub secrets: Secrets,
}

/// The segments that all nodes of a part of the cluster have in common (CSI `Topology`).
pub type TopologySegments = BTreeMap<String, String>;

/// From where a volume must be reachable (CSI `TopologyRequirement`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessibilityRequirements {
    /// At least one of these; none: anywhere.
    pub requisite: Vec<TopologySegments>,
    /// Preferably these, the best first.
    pub preferred: Vec<TopologySegments>,
}

impl AccessibilityRequirements {
    /// All topologies, the best first.
    pub fn topologies(&self) -> impl Iterator<Item = &TopologySegments> {
        self.preferred.iter().chain(&self.requisite)
    }
}

/// The source of a new volume, by handle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ContentSource {
    Snapshot(String),
    /// Another volume.
    Volume(String),
}

impl ContentSource {
    /// The handle of the snapshot or volume.
    pub fn handle(&self) -> &str {
        let (Self::Snapshot(handle) | Self::Volume(handle)) = self;
        handle
    }
}

/// One way of using a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeUse {
    /// The file system to mount it with, empty for the default; none: raw block.
    pub fs_type: Option<String>,
    /// Whether several nodes may use it at a time while one of them writes.
    pub many_nodes_write: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeInfo {
    pub handle: String,
    /// Its size; 0 if unknown.
    pub bytes: u64,
    /// The volume context, by which the node finds it.
    pub context: BTreeMap<String, String>,
    /// The source that it was copied from.
    pub source: Option<ContentSource>,
    /// Only the node of this controller can reach it.
    pub local: bool,
    /// The topology from which alone it is reachable; empty: from every node.
    pub topology: TopologySegments,
}

/// A request for a snapshot.
#[derive(Clone, Debug)]
pub struct NewSnapshot {
    /// The name, by which a repeated request is recognised.
    pub name: String,
    /// The handle of the volume to take it of.
    pub volume: String,
    /// The snapshot class' parameters.
    pub parameters: HashMap<String, String>,
    /// The secrets of the storage.
    pub secrets: Secrets,
}

/// A snapshot; one that exists is ready for use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotInfo {
    pub handle: String,
    /// The name that the request gave it.
    pub name: String,
    /// The handle of the volume that it was taken of.
    pub source: String,
    /// Its size, and the least size of a volume made from it.
    pub bytes: u64,
    /// The point in time that it shows.
    pub created: SystemTime,
    /// Only the node of this controller can reach it.
    pub local: bool,
    /// The handle of the group that it was taken with, if any.
    pub group: Option<String>,
}

/// A request for snapshots of several volumes at one moment.
#[derive(Clone, Debug)]
pub struct NewGroupSnapshot {
    /// The name, by which a repeated request is recognised.
    pub name: String,
    /// The handles of the volumes, each once.
    pub volumes: Vec<String>,
    /// The group snapshot class' parameters.
    pub parameters: HashMap<String, String>,
    /// The secrets of the storage.
    pub secrets: Secrets,
}

/// Snapshots of one moment, ready for use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupSnapshotInfo {
    pub handle: String,
    /// In the order of their handles.
    pub snapshots: Vec<SnapshotInfo>,
    /// The moment that they show.
    pub created: SystemTime,
}

/// Part of a listing, in a stable order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page<T> {
    pub entries: Vec<T>,
    /// Where the next page begins, if there is one.
    pub next: Option<String>,
}

/// One entry of a store's listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListEntry<T> {
    /// A page that continues from here begins behind this entry.
    pub token: String,
    /// The volume or snapshot.
    pub entry: T,
}

/// What to list.
#[derive(Clone, Debug, Default)]
pub struct ListRequest {
    /// [`Page::next`] of the page before; none: from the beginning.
    pub from: Option<String>,
    /// At most so many entries; 0: as many as fit a page.
    pub max: usize,
    /// Collects the omissions, for a caller that accepts an incomplete list.
    /// None: the call fails instead, since a missing volume looks deleted.
    pub omitted: Option<Omitted>,
}

/// The omissions of a list, in sentences.
#[derive(Clone, Debug)]
pub struct Omitted {
    sentences: Arc<Mutex<Vec<String>>>,
    timeout: Duration,
}

impl Omitted {
    /// Nothing yet, of a list whose caller waits so long.
    pub fn within(caller: Duration) -> Self {
        Self {
            sentences: Arc::default(),
            // Stores are listed one after the other.
            timeout: (caller / 3).min(LIST_TIMEOUT),
        }
    }

    /// The omissions.
    pub fn take(&self) -> Vec<String> {
        let mut all = self
            .sentences
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        mem::take(&mut all)
    }
}

/// How long a pool may take to list its entries, before a list omits it.
const LIST_TIMEOUT: Duration = Duration::from_secs(10);

impl ListRequest {
    /// The list, or an empty one with an omission if the caller accepts that.
    fn or_omit<T: Default, E: std::error::Error + 'static>(
        &self,
        listed: Result<T, E>,
    ) -> Result<T, E> {
        let (Err(error), Some(omitted)) = (&listed, &self.omitted) else {
            return listed;
        };
        let mut all = omitted
            .sentences
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        all.push(error_chain(error));
        Ok(T::default())
    }
}

/// A request for capacity.
#[derive(Clone, Debug, Default)]
pub struct CapacityRequest {
    /// The storage class' parameters, as the request has them.
    pub parameters: HashMap<String, String>,
    /// The uses that volumes must support.
    pub uses: Vec<VolumeUse>,
    /// Whether the room of local pools counts: only this node can reach it.
    pub includes_local: bool,
    /// The requested topology; empty: any.
    pub topology: TopologySegments,
}

/// Room for new volumes, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// The space that is free and not promised to thin volumes.
    pub available: u64,
    /// The largest volume; none: not known.
    pub maximum: Option<u64>,
    /// The smallest volume.
    pub minimum: u64,
}

/// A volume that a node is about to get.
#[derive(Clone, Debug)]
pub struct PublishRequest {
    /// The volume's handle.
    pub handle: String,
    /// The node's id.
    pub node: String,
    /// Which nodes may have it at once.
    pub mode: AccessMode,
    /// Whether the node only reads, whatever the mode.
    pub read_only: bool,
    /// The volume context.
    pub context: HashMap<String, String>,
    /// The secrets of the storage.
    pub secrets: Secrets,
}

/// A volume with the nodes that use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedVolume {
    pub volume: VolumeInfo,
    /// The ids of the nodes that have it attached.
    pub nodes: Vec<String>,
}

/// A condition in which a volume cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeCondition {
    /// A fixed word, for programs.
    pub reason: &'static str,
    /// A sentence for the operator.
    pub message: String,
}

/// The optional abilities of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "each is of its own")]
pub struct Abilities {
    /// It finds volumes, snapshots and room by itself, without the secrets of a
    /// request.
    pub lists: bool,
    /// Volumes have parameters that can be changed.
    pub modifies: bool,
    /// It needs the publish and unpublish calls of its volumes.
    pub publishes: bool,
    /// It takes snapshots of several volumes at one moment.
    pub groups: bool,
    /// It tells the blocks of its snapshots.
    pub blocks: bool,
}

/// Whether a node has released a volume that is unpublished from it.
#[derive(Debug)]
pub enum Release {
    /// The node does not have the volume.
    Done,
    /// The node has it; asking again makes sense after so long.
    Pending(ProvisionError, Duration),
}

const REPLICATES_NONE: &str = "image files are not replicated to another cluster";

const GROUPS_NONE: &str = "directories of NFS servers have no group snapshots";

const FENCES_NONE: &str = "image files are not behind a network that could be fenced";

/// A store of volumes: image files, images in Ceph clusters, directories of NFS servers. Its calls block, so
/// [`Stores`] runs them on lanes, those on one name or handle one after the other.
/// Every call may be repeated and then has the same result.
pub trait Provisioner: fmt::Debug + Send + Sync + 'static {
    /// Its optional abilities. Does not block.
    fn abilities(&self) -> Abilities;
    /// Whether its volumes are in clusters: then it returns the unused space of those that
    /// no node has, and shuts off networks. Does not block.
    fn has_clusters(&self) -> bool {
        false
    }
    /// Whether a volume that has grown has to grow on its node as well. Does not block.
    fn grows_on_nodes(&self) -> bool {
        true
    }
    /// Checks that it can be used; an error says why not.
    fn check(&self) -> Result<(), ProvisionError>;
    /// Trials of its pools, clusters or shares, for an operator.
    fn inspections(&self) -> Vec<Inspection>;
    /// Finishes or undoes the work of controllers that have ended; returns the failures, and
    /// may return what is in use. Does not touch calls under way, of this and of other controllers.
    /// `pool` is one of [`Provisioner::swept_pools`], if there are any.
    fn sweep(&self, pool: Option<&str>) -> Vec<ProvisionError>;
    /// The pools that are swept apart, so that one that hangs holds up only itself; none:
    /// the store is swept as a whole. Does not block.
    fn swept_pools(&self) -> Vec<String> {
        Vec::new()
    }
    /// Makes a volume, or returns the one that an equal request made.
    fn create_volume(&self, new: &NewVolume) -> Result<VolumeInfo, ProvisionError>;
    /// Deletes a volume; a missing one counts as deleted.
    fn delete_volume(&self, handle: &str, secrets: &Secrets) -> Result<(), ProvisionError>;
    /// Grows a volume and returns its size; one that is large enough stays.
    fn expand_volume(
        &self,
        handle: &str,
        range: Range,
        secrets: &Secrets,
    ) -> Result<u64, ProvisionError>;
    /// Returns the space of a volume that holds nothing but zeros. Does nothing to a volume
    /// that a node has.
    fn reclaim_space(&self, _handle: &str, _secrets: &Secrets) -> Result<(), ProvisionError> {
        let why = "only a node that has the volume returns its unused space: image files";
        Err(ProvisionError::Unsupported(why))
    }
    /// Changes the replication of a volume to another cluster.
    fn replicate(
        &self,
        _handle: &str,
        _change: &ReplicationChange,
        _secrets: &Secrets,
    ) -> Result<Replicated, ProvisionError> {
        Err(ProvisionError::Unsupported(REPLICATES_NONE))
    }
    /// How the other cluster follows a volume.
    fn replication_info(
        &self,
        _handle: &str,
        _secrets: &Secrets,
    ) -> Result<ReplicationInfo, ProvisionError> {
        Err(ProvisionError::Unsupported(REPLICATES_NONE))
    }
    /// The handle of a replicated volume in the other cluster.
    fn replication_destination(
        &self,
        _handle: &str,
        _secrets: &Secrets,
    ) -> Result<String, ProvisionError> {
        Err(ProvisionError::Unsupported(REPLICATES_NONE))
    }
    /// Enters a volume that another site has created in the journal of this one.
    fn enter_volume(
        &self,
        _volume: &VolumeToEnter,
        _secrets: &Secrets,
    ) -> Result<Done, ProvisionError> {
        Err(ProvisionError::Unsupported(REPLICATES_NONE))
    }
    /// Shuts networks off from a cluster, or, if `fenced` is false, ends that.
    fn fence_networks(
        &self,
        _cluster_id: &str,
        _networks: &[Cidr],
        _fenced: bool,
        _secrets: &Secrets,
    ) -> Result<(), ProvisionError> {
        Err(ProvisionError::Unsupported(FENCES_NONE))
    }
    /// The networks that are shut off from a cluster.
    fn fenced_networks(
        &self,
        _cluster_id: &str,
        _secrets: &Secrets,
    ) -> Result<Vec<Cidr>, ProvisionError> {
        Err(ProvisionError::Unsupported(FENCES_NONE))
    }
    /// Changes parameters of a volume.
    fn modify_volume(
        &self,
        handle: &str,
        mutable: &HashMap<String, String>,
        secrets: &Secrets,
    ) -> Result<(), ProvisionError>;
    /// Prepares a volume for a node; returns the publish context.
    fn publish_volume(
        &self,
        new: &PublishRequest,
    ) -> Result<BTreeMap<String, String>, ProvisionError>;
    /// Ends what [`Self::publish_volume`] began, for a node or (empty) for all.
    fn unpublish_volume(
        &self,
        handle: &str,
        node: &str,
        secrets: &Secrets,
    ) -> Result<Release, ProvisionError>;
    /// Looks a volume up.
    fn get_volume(&self, handle: &str) -> Result<PublishedVolume, ProvisionError>;
    /// The pools that are listed apart, so that one that hangs holds up only itself;
    /// none: the store is listed as a whole. Does not block.
    fn listed_pools(&self) -> Vec<String>;
    /// The most entries of a page.
    fn largest_page(&self) -> usize;
    /// Lists the volumes of such a pool: [`ListRequest::max`] and, if there are more, one.
    fn list_volumes(
        &self,
        what: &ListRequest,
        pool: Option<&str>,
    ) -> Result<Vec<ListEntry<VolumeInfo>>, ProvisionError>;
    /// Says, in a sentence, why a volume does not support these uses, if it does not.
    fn check_uses(
        &self,
        handle: &str,
        uses: &[VolumeUse],
        parameters: &HashMap<String, String>,
        secrets: &Secrets,
    ) -> Result<Option<String>, ProvisionError>;
    /// The condition of a volume, if it cannot be used.
    fn volume_condition(
        &self,
        handle: &str,
        secrets: &Secrets,
    ) -> Result<Option<VolumeCondition>, ProvisionError>;
    /// Measures how much room there is.
    fn capacity(&self, room: &CapacityRequest) -> Result<Capacity, ProvisionError>;
    /// Takes a snapshot, or returns the one that an equal request took.
    fn create_snapshot(&self, new: &NewSnapshot) -> Result<SnapshotInfo, ProvisionError>;
    /// Deletes a snapshot; a missing one counts as deleted.
    fn delete_snapshot(&self, handle: &str, secrets: &Secrets) -> Result<(), ProvisionError>;
    /// Looks a snapshot up.
    fn get_snapshot(&self, handle: &str, secrets: &Secrets)
    -> Result<SnapshotInfo, ProvisionError>;
    /// The same for snapshots, all or those of one volume.
    fn list_snapshots(
        &self,
        what: &ListRequest,
        pool: Option<&str>,
        volume: Option<&str>,
        secrets: &Secrets,
    ) -> Result<Vec<ListEntry<SnapshotInfo>>, ProvisionError>;
    /// Takes snapshots of several volumes at one moment, or returns those that an equal
    /// request took.
    fn create_group_snapshot(
        &self,
        _new: &NewGroupSnapshot,
    ) -> Result<GroupSnapshotInfo, ProvisionError> {
        Err(ProvisionError::Unsupported(GROUPS_NONE))
    }
    /// Deletes a group snapshot with its snapshots; a missing one counts as deleted. A
    /// request that names its snapshots must name all of them.
    fn delete_group_snapshot(
        &self,
        _handle: &str,
        _snapshots: &[String],
        _secrets: &Secrets,
    ) -> Result<(), ProvisionError> {
        Ok(())
    }
    /// Looks a group snapshot up. A request that names its snapshots must name all of them.
    fn get_group_snapshot(
        &self,
        handle: &str,
        _snapshots: &[String],
        _secrets: &Secrets,
    ) -> Result<GroupSnapshotInfo, ProvisionError> {
        Err(ProvisionError::NoGroupSnapshot(handle.to_owned()))
    }
    /// Some of the blocks of a snapshot that have data, or differ from those of another
    /// snapshot of its volume.
    fn snapshot_blocks(&self, _what: &BlockRequest) -> Result<BlockPage, ProvisionError> {
        Err(ProvisionError::Unsupported(
            "a directory of an NFS server has no blocks",
        ))
    }
    /// The clusters that are searched for orphans, each apart.
    fn orphan_clusters(&self) -> Result<Vec<String>, ProvisionError> {
        Ok(Vec::new())
    }
    /// The orphans of such a cluster. Changes nothing.
    fn orphans(&self, _cluster_id: &str) -> Result<OrphanReport, ProvisionError> {
        Ok(OrphanReport::default())
    }
    /// Removes the orphan of that path, unless it must stay.
    fn remove_orphan(&self, _cluster_id: &str, path: &str) -> Result<Done, ProvisionError> {
        Err(ProvisionError::NoOrphans(path.to_owned()))
    }
}
