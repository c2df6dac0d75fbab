//! The controller's stores: what makes, deletes, grows, snapshots and clones
//! volumes.
//!
//! The gRPC face calls [`Stores`], which picks the store that a call is about and
//! runs the call on a lane. A store is a synchronous [`Provisioner`]: [`images`] keeps
//! volumes as raw image files in pools, [`rbd`] as images in Ceph clusters. Nothing
//! here knows gRPC: requests are plain data, and an [`Error`] has a
//! [`Kind`](crate::Kind) that `csi::status` turns into a code.

use std::{
    collections::{BTreeMap, HashMap},
    fmt, mem,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use serde::{Deserialize, Serialize};

use crate::{error_chain, secret::Secrets};

mod copy;
mod error;
pub mod images;
mod params;
mod range;
pub mod rbd;
mod serialized;
mod stores;

pub use error::Error;
pub use params::Parameters;
pub use range::Range;
pub use serialized::within;
pub use stores::{StoreKind, Stores};

/// A new volume as it is asked for.
#[derive(Clone, Debug)]
pub struct NewVolume {
    /// What makes repeated requests one.
    pub name: String,
    /// How large.
    pub range: Range,
    /// The storage class' parameters, as they came.
    pub parameters: HashMap<String, String>,
    /// The parameters that may be changed later, as they came.
    pub mutable: HashMap<String, String>,
    /// How it will be used: all of these.
    pub uses: Vec<VolumeUse>,
    /// What is on it at first.
    pub source: Option<ContentSource>,
    /// Where it is wanted, if a volume that only this node can reach would not
    /// do.
    pub elsewhere: Option<String>,
    /// Where it is wanted.
    pub places: AccessibilityRequirements,
    /// What the storage asks of its users.
    pub secrets: Secrets,
}

/// A part of the cluster: what all of its nodes have in common (CSI `Topology`).
pub type TopologySegments = BTreeMap<String, String>;

/// Where a volume has to be within reach (CSI `TopologyRequirement`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessibilityRequirements {
    /// In one of these at least; none: anywhere.
    pub requisite: Vec<TopologySegments>,
    /// Rather in these, the best first.
    pub preferred: Vec<TopologySegments>,
}

/// What a new volume is a copy of, by handle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ContentSource {
    /// A snapshot.
    Snapshot(String),
    /// Another volume.
    Volume(String),
}

/// One way of using a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeUse {
    /// The file system to mount it with, empty for the default; none: raw block.
    pub fs_type: Option<String>,
    /// Whether several nodes may use it at a time while one of them writes.
    pub many_nodes_write: bool,
}

/// A volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeInfo {
    /// Its handle.
    pub handle: String,
    /// Its size; 0 where it cannot be told.
    pub bytes: u64,
    /// What the node needs to find it.
    pub context: BTreeMap<String, String>,
    /// What it was copied from.
    pub source: Option<ContentSource>,
    /// Only the node of this controller can reach it.
    pub local: bool,
    /// Only from there it can be reached; empty: the nodes do not matter.
    pub place: TopologySegments,
}

/// A new snapshot as it is asked for.
#[derive(Clone, Debug)]
pub struct NewSnapshot {
    /// What makes repeated requests one.
    pub name: String,
    /// The handle of the volume to take it of.
    pub volume: String,
    /// The snapshot class' parameters, without Kubernetes' own.
    pub parameters: HashMap<String, String>,
    /// What the storage asks of its users.
    pub secrets: Secrets,
}

/// A snapshot; one that exists is ready for use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotInfo {
    /// Its handle.
    pub handle: String,
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

/// Part of a listing, in an order that stays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page<T> {
    /// What is listed.
    pub entries: Vec<T>,
    /// Where the next page begins, if there is one.
    pub next: Option<String>,
}

/// One entry of a store's listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed<T> {
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
    /// Where to say what cannot be listed now, for a caller who takes a list without
    /// it. None: then there is no list, since what is missing from one looks deleted.
    pub omitted: Option<Omitted>,
}

/// What a list leaves out, in sentences.
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

    /// All that was left out.
    pub fn take(&self) -> Vec<String> {
        let mut all = self
            .sentences
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        mem::take(&mut all)
    }
}

/// How long a pool may take to list what it has, before a list omits it.
const LIST_TIMEOUT: Duration = Duration::from_secs(10);

impl ListRequest {
    /// What could be listed, or nothing where the caller takes less than all.
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

/// What room is asked for.
#[derive(Clone, Debug, Default)]
pub struct CapacityRequest {
    /// The storage class' parameters, as they came.
    pub parameters: HashMap<String, String>,
    /// How volumes will be used.
    pub uses: Vec<VolumeUse>,
    /// Whether room that only this node can reach would do.
    pub here_will_do: bool,
    /// Where the room is wanted; empty: anywhere.
    pub place: TopologySegments,
}

/// Room for new volumes, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// What is free and not promised to thin volumes.
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
    /// Nobody else may have it at the same time, and this node writes.
    pub one_writer: bool,
    /// What the node is told of the volume.
    pub context: HashMap<String, String>,
    /// What the storage asks of its users.
    pub secrets: Secrets,
}

/// A volume and who uses it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedVolume {
    /// The volume.
    pub volume: VolumeInfo,
    /// The ids of the nodes that have it attached.
    pub nodes: Vec<String>,
}

/// Why a volume cannot be used at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeCondition {
    /// A word that stays the same.
    pub reason: &'static str,
    /// A sentence.
    pub message: String,
}

/// What a provisioner can do beside making volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// It finds volumes, snapshots and room by itself, without the secrets of a
    /// request.
    pub lists: bool,
    /// Volumes have parameters that can be changed.
    pub modifies: bool,
    /// It wants to know which nodes get a volume, and which have let go of it.
    pub publishes: bool,
}

/// How far a node has let go of a volume that is unpublished from it.
#[derive(Debug)]
pub enum Release {
    /// The node does not have the volume.
    Done,
    /// The node has it; asking again makes sense after so long.
    Pending(Error, Duration),
}

/// A store of volumes: image files, or images in Ceph clusters. Its calls block, so
/// [`Stores`] runs them on lanes, those on one name or handle one after the other.
/// Every call may be repeated and then has the same result.
pub trait Provisioner: fmt::Debug + Send + Sync + 'static {
    /// Says what it can do. Does not block.
    fn abilities(&self) -> Abilities;
    /// Says why it cannot be used, if it cannot.
    fn check(&self) -> Result<(), Error>;
    /// Finishes or undoes what dead controllers left; says what failed. Leaves calls
    /// under way alone, here and in other controllers.
    fn sweep(&self) -> Vec<Error>;
    /// Makes a volume, or returns the one that an equal request made.
    fn create_volume(&self, new: &NewVolume) -> Result<VolumeInfo, Error>;
    /// Deletes a volume; a missing one counts as deleted.
    fn delete_volume(&self, handle: &str, secrets: &Secrets) -> Result<(), Error>;
    /// Grows a volume and returns its size; one that is large enough stays.
    fn expand_volume(&self, handle: &str, range: Range, secrets: &Secrets) -> Result<u64, Error>;
    /// Changes parameters of a volume.
    fn modify_volume(
        &self,
        handle: &str,
        mutable: &HashMap<String, String>,
        secrets: &Secrets,
    ) -> Result<(), Error>;
    /// Prepares a volume for a node; returns the publish context.
    fn publish_volume(&self, new: &PublishRequest) -> Result<BTreeMap<String, String>, Error>;
    /// Ends what [`Self::publish_volume`] began, for a node or (empty) for all.
    fn unpublish_volume(
        &self,
        handle: &str,
        node: &str,
        secrets: &Secrets,
    ) -> Result<Release, Error>;
    /// Looks a volume up.
    fn get_volume(&self, handle: &str) -> Result<PublishedVolume, Error>;
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
    ) -> Result<Vec<Listed<VolumeInfo>>, Error>;
    /// Says, in a sentence, why a volume does not support these uses, if it does not.
    fn check_uses(
        &self,
        handle: &str,
        uses: &[VolumeUse],
        parameters: &HashMap<String, String>,
        secrets: &Secrets,
    ) -> Result<Option<String>, Error>;
    /// Reports what is wrong with a volume, if anything is.
    fn volume_condition(
        &self,
        handle: &str,
        secrets: &Secrets,
    ) -> Result<Option<VolumeCondition>, Error>;
    /// Measures how much room there is.
    fn capacity(&self, room: &CapacityRequest) -> Result<Capacity, Error>;
    /// Takes a snapshot, or returns the one that an equal request took.
    fn create_snapshot(&self, new: &NewSnapshot) -> Result<SnapshotInfo, Error>;
    /// Deletes a snapshot; a missing one counts as deleted.
    fn delete_snapshot(&self, handle: &str, secrets: &Secrets) -> Result<(), Error>;
    /// Looks a snapshot up.
    fn get_snapshot(&self, handle: &str, secrets: &Secrets) -> Result<SnapshotInfo, Error>;
    /// The same for snapshots, all or those of one volume.
    fn list_snapshots(
        &self,
        what: &ListRequest,
        pool: Option<&str>,
        volume: Option<&str>,
        secrets: &Secrets,
    ) -> Result<Vec<Listed<SnapshotInfo>>, Error>;
}
