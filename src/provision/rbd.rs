//! Volumes as images in Ceph clusters (RBD), in ceph-csi's formats, so that each of the two
//! drivers can manage the volumes of the other.
//!
//! ```text
//! store      clusters and journals; lookup: the image of a handle
//! class      the parameters of a storage class; topology, qos, encryption
//! create     one CreateVolume; attempt: of several, only one completes
//! volumes    delete, grow, change
//! copies     clones; flatten: the length of their chains
//! snapshots  images of one point in time
//! groups     snapshots of several volumes at one moment
//! fencing    nodes that do not release a volume; networks: those of csi-addons
//! trash      deleted images, removed in the background
//! listing    for calls without secrets
//! orphans    what no volume and no snapshot refers to
//! ```
//!
//! A request carries the user and key of its cluster in its secrets; connections
//! are shared and kept ([`crate::ceph::client::connections`]). Calls that CSI gives no
//! secrets use those of `--ceph-secret` ([`SecretDir`]); without these, the
//! controller does not announce them.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, atomic::Ordering::Relaxed},
    time::{Duration, Instant, SystemTime},
};

use super::{
    Abilities, BlockPage, BlockRequest, Capacity, CapacityRequest, Cidr, GroupSnapshotInfo,
    ListEntry, ListRequest, NewGroupSnapshot, NewSnapshot, NewVolume, OrphanReport, ProvisionError,
    Provisioner, PublishRequest, PublishedVolume, Range, Release, Replicated, ReplicationChange,
    ReplicationInfo, SnapshotInfo, VolumeCondition, VolumeInfo, VolumeToEnter, VolumeUse,
    serialized::KeyedMutex,
};
use crate::{
    Done,
    ceph::{
        self,
        client::{Credentials, connections::Connections, rados::Timeouts},
        csi_format::{
            config::{Clusters, Mappings},
            journal::{Journal, JournalKind},
        },
        kms::KmsConfig,
    },
    lane::{Inspection, Lanes},
    secret::Secrets,
};

mod attempt;
mod blocks;
mod class;
mod copies;
mod create;
mod deletes;
mod encryption;
mod enter;
mod error;
mod fencing;
mod flatten;
mod found;
mod groups;
mod image_size;
mod left_snapshots;
mod listing;
mod lookup;
mod luks_header;
mod metadata;
mod networks;
mod operators;
mod orphans;
#[cfg(test)]
mod panic_once;
mod pools;
mod qos;
mod removal;
mod replication;
mod snapshots;
mod store;
mod temporary_group;
mod topology;
mod trash;
mod volumes;

pub use error::RbdError;
pub use flatten::FlattenLimits;
pub use metadata::ObjectNames;
pub use operators::{Operators, SecretDir};

use fencing::Fencer;
use flatten::Flattener;
pub use trash::PurgeTimes;
use trash::TrashPurger;

/// The controller's settings.
#[derive(Debug)]
pub struct Settings<'a> {
    /// ceph-csi's `config.json`.
    pub config: &'a Path,
    /// ceph-csi's `cluster-mapping.json`, which need not exist.
    pub mapping: &'a Path,
    /// The key management systems of encrypted volumes.
    pub kms: KmsConfig,
    /// The names of Kubernetes that new images have.
    pub names_of_objects: ObjectNames,
    /// The journal's instance: ceph-csi's `--instanceid`.
    pub instance: &'a str,
    /// The users for calls without secrets.
    pub operators: Operators,
    /// How long after an unpublish a node that has not released the volume is fenced;
    /// none: no node is fenced.
    pub fence_after: Option<Duration>,
    /// A file with the id of each node; none: the caller knows which nodes exist.
    pub known_nodes: Option<PathBuf>,
    /// The intervals that keep replicas of a controller apart in the trash.
    pub purge: PurgeTimes,
    /// A create of ceph-csi that is younger is left to ceph-csi, and nothing younger is an
    /// orphan: [`QUIET_FOR`].
    pub quiet_for: Duration,
}

/// How long ceph-csi must not have changed the journal's entry of an incomplete image before
/// this driver continues with it. ceph-csi's controller must not run beside this one; if it
/// does all the same, it may be at work on the image. Nothing younger counts as an orphan.
pub const QUIET_FOR: Duration = Duration::from_secs(60);

/// The age of what was made or changed at that time. A time to come is of another clock, and
/// counts as now.
fn age_of(since: SystemTime) -> Duration {
    SystemTime::now().duration_since(since).unwrap_or_default()
}

/// The store of RBD images, which all calls share. Most of its functions block.
#[derive(Debug)]
pub struct RbdStore {
    clusters: Arc<Clusters>,
    mappings: Mappings,
    connections: Connections,
    operators: Operators,
    volumes: Journal,
    snapshots: Journal,
    groups: Journal,
    kms: KmsConfig,
    names_of_objects: ObjectNames,
    purger: TrashPurger,
    flattener: Flattener,
    fencing: Fencer,
    quiet_for: Duration,
    /// Held by creates and deletes, one at a time for each name.
    names: KeyedMutex,
    /// The pools in use, by cluster, with their users.
    used: Mutex<BTreeMap<(String, i64), UsedPool>>,
}

impl RbdStore {
    /// Connects to nothing yet.
    pub fn new(settings: Settings<'_>, lanes: &Lanes) -> io::Result<Self> {
        Ok(Self {
            clusters: Arc::new(Clusters::new(settings.config)),
            mappings: Mappings::new(settings.mapping),
            connections: Connections::new(Timeouts::default())?,
            operators: settings.operators,
            volumes: Journal::new(JournalKind::Volume, settings.instance),
            snapshots: Journal::new(JournalKind::Snapshot, settings.instance),
            groups: Journal::new(JournalKind::Group, settings.instance),
            kms: settings.kms,
            names_of_objects: settings.names_of_objects,
            purger: TrashPurger::new(lanes.clone(), settings.purge),
            flattener: Flattener::new(lanes.clone(), FlattenLimits::default()),
            fencing: Fencer::new(settings.fence_after, settings.known_nodes),
            quiet_for: settings.quiet_for,
            names: KeyedMutex::default(),
            used: Mutex::default(),
        })
    }

    /// What it does in the background, and whether its clusters answer.
    pub fn activity(&self) -> RbdActivity {
        RbdActivity {
            to_remove: self.purger.pending(),
            to_flatten: self.flattener.pending(),
            fences: self.fencing.raised.load(Relaxed),
            reachable: self.connections.reachable(),
            errors: self.connections.errors(),
        }
    }
}

/// The last user of a pool.
#[derive(Clone, Debug)]
struct UsedPool {
    credentials: Credentials,
    last_use: Instant,
}

/// What the store does in the background, for the metrics.
#[derive(Debug)]
pub struct RbdActivity {
    /// Deleted images that wait or are being removed.
    pub to_remove: usize,
    /// Images that wait or are being flattened.
    pub to_flatten: usize,
    /// Clients of nodes that were fenced.
    pub fences: u64,
    /// [`Connections::reachable`].
    pub reachable: Vec<(String, Option<bool>)>,
    /// [`Connections::errors`].
    pub errors: Vec<(String, &'static str, u64)>,
}

/// What each call does is in the inherent method of its name.
impl Provisioner for RbdStore {
    fn abilities(&self) -> Abilities {
        Abilities {
            lists: self.operators.any(),
            modifies: true,
            publishes: self.fencing.after.is_some(),
            groups: true,
            blocks: true,
        }
    }

    fn has_clusters(&self) -> bool {
        true
    }

    /// Checks the configuration and the secrets; connects to no cluster, so that one that is
    /// down does not disable the others.
    fn check(&self) -> Result<(), ProvisionError> {
        self.clusters.check().map_err(RbdError::from)?;
        Ok(self.operators.check()?)
    }

    fn inspections(&self) -> Vec<Inspection> {
        let clusters = self.clusters.clone();
        let look = move || ceph::inspect(&clusters);
        vec![Inspection::new("Ceph clusters", look)]
    }

    fn sweep(&self, _: Option<&str>) -> Vec<ProvisionError> {
        self.sweep().into_iter().map(ProvisionError::from).collect()
    }

    fn create_volume(&self, new: &NewVolume) -> Result<VolumeInfo, ProvisionError> {
        self.create_volume(new)
    }

    fn delete_volume(&self, handle: &str, secrets: &Secrets) -> Result<(), ProvisionError> {
        self.delete_volume(handle, secrets)
    }

    fn expand_volume(
        &self,
        handle: &str,
        range: Range,
        secrets: &Secrets,
    ) -> Result<u64, ProvisionError> {
        self.expand_volume(handle, range, secrets)
    }

    fn reclaim_space(&self, handle: &str, secrets: &Secrets) -> Result<(), ProvisionError> {
        self.reclaim_space(handle, secrets)
    }

    fn replicate(
        &self,
        handle: &str,
        change: &ReplicationChange,
        secrets: &Secrets,
    ) -> Result<Replicated, ProvisionError> {
        self.replicate(handle, change, secrets)
    }

    fn replication_info(
        &self,
        handle: &str,
        secrets: &Secrets,
    ) -> Result<ReplicationInfo, ProvisionError> {
        self.replication_info(handle, secrets)
    }

    fn enter_volume(
        &self,
        volume: &VolumeToEnter,
        secrets: &Secrets,
    ) -> Result<Done, ProvisionError> {
        self.enter_volume(volume, secrets)
    }

    fn replication_destination(
        &self,
        handle: &str,
        secrets: &Secrets,
    ) -> Result<String, ProvisionError> {
        self.replication_destination(handle, secrets)
    }

    fn fence_networks(
        &self,
        cluster_id: &str,
        networks: &[Cidr],
        fenced: bool,
        secrets: &Secrets,
    ) -> Result<(), ProvisionError> {
        self.fence_networks(cluster_id, networks, fenced, secrets)
    }

    fn fenced_networks(
        &self,
        cluster_id: &str,
        secrets: &Secrets,
    ) -> Result<Vec<Cidr>, ProvisionError> {
        self.fenced_networks(cluster_id, secrets)
    }

    fn modify_volume(
        &self,
        handle: &str,
        mutable: &HashMap<String, String>,
        secrets: &Secrets,
    ) -> Result<(), ProvisionError> {
        self.modify_volume(handle, mutable, secrets)
    }

    fn publish_volume(
        &self,
        new: &PublishRequest,
    ) -> Result<BTreeMap<String, String>, ProvisionError> {
        self.publish_volume(new)
    }

    fn unpublish_volume(
        &self,
        handle: &str,
        node: &str,
        secrets: &Secrets,
    ) -> Result<Release, ProvisionError> {
        self.unpublish_volume(handle, node, secrets)
    }

    fn get_volume(&self, handle: &str) -> Result<PublishedVolume, ProvisionError> {
        self.get_volume(handle)
    }

    /// A cluster that is down answers with an error in time.
    fn listed_pools(&self) -> Vec<String> {
        Vec::new()
    }

    fn largest_page(&self) -> usize {
        listing::LARGEST_PAGE
    }

    fn list_volumes(
        &self,
        what: &ListRequest,
        _: Option<&str>,
    ) -> Result<Vec<ListEntry<VolumeInfo>>, ProvisionError> {
        self.list_volumes(what)
    }

    fn check_uses(
        &self,
        handle: &str,
        uses: &[VolumeUse],
        parameters: &HashMap<String, String>,
        secrets: &Secrets,
    ) -> Result<Option<String>, ProvisionError> {
        self.check_uses(handle, uses, parameters, secrets)
    }

    fn volume_condition(
        &self,
        handle: &str,
        secrets: &Secrets,
    ) -> Result<Option<VolumeCondition>, ProvisionError> {
        self.volume_condition(handle, secrets)
    }

    fn capacity(&self, room: &CapacityRequest) -> Result<Capacity, ProvisionError> {
        self.capacity(room)
    }

    fn create_snapshot(&self, new: &NewSnapshot) -> Result<SnapshotInfo, ProvisionError> {
        self.create_snapshot(new)
    }

    fn delete_snapshot(&self, handle: &str, secrets: &Secrets) -> Result<(), ProvisionError> {
        self.delete_snapshot(handle, secrets)
    }

    fn get_snapshot(
        &self,
        handle: &str,
        secrets: &Secrets,
    ) -> Result<SnapshotInfo, ProvisionError> {
        self.get_snapshot(handle, secrets)
    }

    fn list_snapshots(
        &self,
        what: &ListRequest,
        _: Option<&str>,
        volume: Option<&str>,
        secrets: &Secrets,
    ) -> Result<Vec<ListEntry<SnapshotInfo>>, ProvisionError> {
        self.list_snapshots(what, volume, secrets)
    }

    fn create_group_snapshot(
        &self,
        new: &NewGroupSnapshot,
    ) -> Result<GroupSnapshotInfo, ProvisionError> {
        self.create_group_snapshot(new)
    }

    fn delete_group_snapshot(
        &self,
        handle: &str,
        snapshots: &[String],
        secrets: &Secrets,
    ) -> Result<(), ProvisionError> {
        self.delete_group_snapshot(handle, snapshots, secrets)
    }

    fn get_group_snapshot(
        &self,
        handle: &str,
        snapshots: &[String],
        secrets: &Secrets,
    ) -> Result<GroupSnapshotInfo, ProvisionError> {
        self.get_group_snapshot(handle, snapshots, secrets)
    }

    fn snapshot_blocks(&self, what: &BlockRequest) -> Result<BlockPage, ProvisionError> {
        self.snapshot_blocks(what)
    }

    fn orphan_clusters(&self) -> Result<Vec<String>, ProvisionError> {
        Ok(self.orphan_clusters()?)
    }

    fn orphans(&self, cluster_id: &str) -> Result<OrphanReport, ProvisionError> {
        Ok(self.orphans(cluster_id)?)
    }

    fn remove_orphan(&self, cluster_id: &str, path: &str) -> Result<Done, ProvisionError> {
        self.remove_orphan(cluster_id, path)
    }
}

#[cfg(test)]
mod tests;
