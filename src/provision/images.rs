//! Volumes as raw image files in pools.
//!
//! A create goes through these steps, each durable before the next:
//!
//! ```text
//! 1. reserve    the name gets a random id           names/<hash>.json, locked
//! 2. build      size, data, allocation              tmp/<draft>, locked
//! 3. announce   the record says `making`            volumes/<id>.json
//! 4. place      the image gets its name             POOL/<id>.img
//! 5. record     the record says `ready`: complete
//! ```
//!
//! and a delete through these:
//!
//! ```text
//! 1. claim      no node has or may attach it        claims/<id>.img/…
//! 2. mark       the record says `deleting`
//! 3. erase      image, reservation, record; then the claims
//! ```
//!
//! A failure undoes its create. After a crash [`catalogue`] shows how far a call came, and
//! the next equal call, or the next start ([`ImageStore::sweep`]), finishes or undoes it. A
//! volume's size is its file's size.
//!
//! Nodes attach images as loop devices, or, with `backend: nbd`, as exports of an NBD server
//! over the pool's directory. A volume's record has its backend. The backends differ in how
//! the controller finds the users of an image: by claims beside it, or by [`writers`]. An
//! export has the name of a file directly in that directory, so a server exports complete
//! images only.
//!
//! Images are thin: a sparse file takes space as it is written. A volume's full size counts
//! as taken, in [`ImageStore::capacity`] and where a volume is made or grown, unless its
//! class has `overcommit`; only `preallocate` guarantees the space, and not that of blocks
//! which a reflink shares.

use std::collections::{BTreeMap, HashMap};

use super::{
    Abilities, BlockPage, BlockRequest, Capacity, CapacityRequest, GroupSnapshotInfo, ListEntry,
    ListRequest, NewGroupSnapshot, NewSnapshot, NewVolume, ProvisionError, Provisioner,
    PublishRequest, PublishedVolume, Range, Release, SnapshotInfo, VolumeCondition, VolumeInfo,
    VolumeUse,
};
use crate::{
    Kind,
    lane::{Inspection, Lanes},
    pool::{Pool, Pools},
    secret::Secrets,
};

mod blocks;
mod capacity;
mod catalogue;
mod copies;
mod file_system;
mod groups;
mod id_lists;
mod listing;
mod name_search;
mod origin;
mod room_counts;
mod snapshots;
mod stamp;
mod store;
mod sweep;
mod volumes;
mod writers;

pub use copies::{Copies, CopyKind, CopyProgress, CopyTarget, RunningCopy};

use id_lists::IdLists;
use name_search::NameSearch;
use room_counts::RoomCounts;

/// The store of image files.
#[derive(Debug)]
pub struct ImageStore {
    pools: Pools,
    node_id: Option<String>,
    boot_id: String,
    id_lists: IdLists,
    room_counts: RoomCounts,
    copies: Copies,
    names: NameSearch,
}

impl ImageStore {
    /// Over these pools; `node_id` is that of the node of local pools, and
    /// `boot_id` that of the running kernel. Calls look at other pools than their own on
    /// `lanes`.
    pub fn new(
        pools: Pools,
        node_id: Option<String>,
        boot_id: String,
        copies: Copies,
        lanes: &Lanes,
    ) -> Self {
        Self {
            pools,
            node_id,
            boot_id,
            id_lists: IdLists::default(),
            room_counts: RoomCounts::default(),
            copies,
            names: NameSearch::new(lanes),
        }
    }
}

/// What each call does is in the inherent method of its name.
impl Provisioner for ImageStore {
    fn abilities(&self) -> Abilities {
        Abilities {
            lists: true,
            modifies: false,
            publishes: false,
            groups: true,
            blocks: true,
        }
    }

    /// Checks that every pool's directory is there, and has the configured scope.
    fn check(&self) -> Result<(), ProvisionError> {
        let mut pools = self.pools.iter();
        pools.try_for_each(|pool| Ok(pool.check_scope()?))
    }

    fn inspections(&self) -> Vec<Inspection> {
        let each = self.pools.iter().cloned();
        let inspection = |pool: Pool| {
            Inspection::new(format!("pool {}", pool.name), move || vec![pool.inspect()])
        };
        each.map(inspection).collect()
    }

    fn sweep(&self, pool: Option<&str>) -> Vec<ProvisionError> {
        match self.pools.get_or_only(pool) {
            Ok(pool) => self.sweep(pool),
            Err(error) => vec![error.into()],
        }
    }

    fn swept_pools(&self) -> Vec<String> {
        self.listed_pools()
    }

    fn create_volume(&self, new: &NewVolume) -> Result<VolumeInfo, ProvisionError> {
        refuse_any(&new.mutable, "none that can be changed later")?;
        self.create_volume(new)
    }

    fn delete_volume(&self, handle: &str, _: &Secrets) -> Result<(), ProvisionError> {
        self.delete_volume(handle)
    }

    fn expand_volume(
        &self,
        handle: &str,
        range: Range,
        _: &Secrets,
    ) -> Result<u64, ProvisionError> {
        self.expand_volume(handle, range)
    }

    fn modify_volume(
        &self,
        _: &str,
        mutable: &HashMap<String, String>,
        _: &Secrets,
    ) -> Result<(), ProvisionError> {
        refuse_any(mutable, "none that can be changed later")
    }

    /// Nodes claim images by themselves.
    fn publish_volume(
        &self,
        new: &PublishRequest,
    ) -> Result<BTreeMap<String, String>, ProvisionError> {
        match self.get_volume(&new.handle) {
            // It may be in the local pool of another node.
            Err(error) if error.kind() != Kind::NotFound => Ok(BTreeMap::new()),
            found => found.map(|_| BTreeMap::new()),
        }
    }

    fn unpublish_volume(&self, _: &str, _: &str, _: &Secrets) -> Result<Release, ProvisionError> {
        Ok(Release::Done)
    }

    fn get_volume(&self, handle: &str) -> Result<PublishedVolume, ProvisionError> {
        self.get_volume(handle)
    }

    fn listed_pools(&self) -> Vec<String> {
        self.pools.iter().map(|pool| pool.name.clone()).collect()
    }

    fn largest_page(&self) -> usize {
        listing::LARGEST_PAGE
    }

    fn list_volumes(
        &self,
        what: &ListRequest,
        pool: Option<&str>,
    ) -> Result<Vec<ListEntry<VolumeInfo>>, ProvisionError> {
        self.list_volumes(what, pool)
    }

    fn check_uses(
        &self,
        handle: &str,
        uses: &[VolumeUse],
        parameters: &HashMap<String, String>,
        _: &Secrets,
    ) -> Result<Option<String>, ProvisionError> {
        self.check_uses(handle, uses, parameters)
    }

    fn volume_condition(
        &self,
        handle: &str,
        _: &Secrets,
    ) -> Result<Option<VolumeCondition>, ProvisionError> {
        self.volume_condition(handle)
    }

    fn capacity(&self, room: &CapacityRequest) -> Result<Capacity, ProvisionError> {
        self.capacity(&room.parameters, &room.uses, room.includes_local)
    }

    fn create_snapshot(&self, new: &NewSnapshot) -> Result<SnapshotInfo, ProvisionError> {
        refuse_any(&new.parameters, "none for snapshots")?;
        self.create_snapshot(&new.name, &new.volume)
    }

    fn delete_snapshot(&self, handle: &str, _: &Secrets) -> Result<(), ProvisionError> {
        self.delete_snapshot(handle)
    }

    fn create_group_snapshot(
        &self,
        new: &NewGroupSnapshot,
    ) -> Result<GroupSnapshotInfo, ProvisionError> {
        refuse_any(&new.parameters, "none for group snapshots")?;
        self.create_group_snapshot(new)
    }

    fn delete_group_snapshot(
        &self,
        handle: &str,
        snapshots: &[String],
        _: &Secrets,
    ) -> Result<(), ProvisionError> {
        self.delete_group_snapshot(handle, snapshots)
    }

    fn get_group_snapshot(
        &self,
        handle: &str,
        snapshots: &[String],
        _: &Secrets,
    ) -> Result<GroupSnapshotInfo, ProvisionError> {
        self.get_group_snapshot(handle, snapshots)
    }

    fn snapshot_blocks(&self, what: &BlockRequest) -> Result<BlockPage, ProvisionError> {
        self.snapshot_blocks(what)
    }

    fn get_snapshot(&self, handle: &str, _: &Secrets) -> Result<SnapshotInfo, ProvisionError> {
        self.get_snapshot(handle)
    }

    fn list_snapshots(
        &self,
        what: &ListRequest,
        pool: Option<&str>,
        volume: Option<&str>,
        _: &Secrets,
    ) -> Result<Vec<ListEntry<SnapshotInfo>>, ProvisionError> {
        self.list_snapshots(what, pool, volume)
    }
}

/// Refuses all parameters, since there are only those that are `known`, and the sidecars' own.
pub fn refuse_any(parameters: &HashMap<String, String>, known: &str) -> Result<(), ProvisionError> {
    let own = |name: &&String| !name.starts_with("csi.storage.k8s.io/");
    match parameters.keys().filter(own).min() {
        None => Ok(()),
        Some(name) => Err(ProvisionError::UnknownParameter {
            name: name.clone(),
            known: known.to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests;
