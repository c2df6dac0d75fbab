//! Group snapshots: snapshots of several volumes at one moment.
//!
//! The journal's entry of the group names its snapshots before they are made. So an attempt
//! that was interrupted can be undone as a whole, and is: like an image's ([`Attempt`]), it is
//! abandoned, removed, and begun anew under another uuid. The snapshots are like others, with
//! names of their own in the journal, but that they are deleted with their group alone.
//!
//! [`Attempt`]: super::attempt::Attempt

use std::collections::{BTreeSet, HashMap};

use uuid::Uuid;

use super::{
    super::{
        GroupSnapshotInfo, NewGroupSnapshot, ProvisionError, SnapshotInfo,
        params::bad,
        serialized::{group_snapshot_named, snapshot_named},
    },
    RbdStore,
    attempt::Attempt,
    class::{check_name_prefix, pass_over},
    error::RbdError,
    found::{ClusterConnection, FoundImage, found, handle_of},
    snapshots::show_snapshot,
    temporary_group::temporary,
};
use crate::{
    ceph::{
        client::{
            or_missing,
            rados::IoCtx,
            rbd::{Features, OpenMode, group},
        },
        csi_format::{
            handle::Handle,
            journal::{CreateState, GroupEntry, NameEntry},
        },
    },
    secret::Secrets,
};

mod cut;

/// The parameters of a group snapshot class, as ceph-csi has them.
struct GroupClass<'a> {
    cluster_id: Option<&'a str>,
    /// The pool of the journal; by default that of the first volume.
    pool: Option<&'a str>,
    /// `groupNamePrefix`: the prefix of the group's name.
    prefix: Option<&'a str>,
}

impl<'a> GroupClass<'a> {
    fn parse(given: &'a HashMap<String, String>) -> Result<Self, ProvisionError> {
        const KNOWN: [&str; 3] = ["clusterID", "pool", "groupNamePrefix"];
        for (name, value) in given {
            match KNOWN.into_iter().find(|known| known == name) {
                Some(known @ "groupNamePrefix") => check_name_prefix(known, value)?,
                Some(known) if value.is_empty() => {
                    return Err(bad(known, value, "it must not be empty"));
                }
                None if !name.starts_with("csi.storage.k8s.io/") => {
                    pass_over("VolumeGroupSnapshotClass", name);
                }
                _ => {}
            }
        }
        let get = |name: &str| given.get(name).map(String::as_str);
        Ok(Self {
            cluster_id: get("clusterID"),
            pool: get("pool"),
            prefix: get("groupNamePrefix"),
        })
    }
}

/// The place of a group snapshot's entry.
pub struct GroupPlace<'a> {
    store: &'a RbdStore,
    link: ClusterConnection,
    /// The pool of the name and the entry.
    pool: IoCtx,
    secrets: &'a Secrets,
}

impl RbdStore {
    pub(super) fn create_group_snapshot(
        &self,
        new: &NewGroupSnapshot,
    ) -> Result<GroupSnapshotInfo, ProvisionError> {
        let _name = self.names.lock_on_lane(&group_snapshot_named(&new.name));
        let class = GroupClass::parse(&new.parameters)?;
        let find = |pool: &IoCtx| self.groups.find(pool, &new.name).map_err(RbdError::from);
        // Before the volumes are looked for: the snapshots may outlive them.
        let named = match (class.cluster_id, class.pool) {
            (Some(cluster_id), Some(pool)) => {
                let link = self.link(cluster_id, &new.secrets)?;
                let pool = link.named_pool(pool)?;
                let place = self.group_place(link, pool, &new.secrets);
                if let Some(reserved) = find(&place.pool)?
                    && let Some(taken) = place.taken_before(new, reserved)?
                {
                    return Ok(taken);
                }
                Some(place)
            }
            _ => None,
        };
        let sources = self.sources(new, &class)?;
        let place = match (named, class.pool) {
            (Some(place), _) => place,
            (None, pool) => {
                let link = sources[0].link.clone();
                let pool = match pool {
                    Some(name) => link.named_pool(name)?,
                    None => sources[0].pool.clone(),
                };
                self.group_place(link, pool, &new.secrets)
            }
        };
        let mut known = find(&place.pool)?;
        loop {
            if let Some(reserved) = known
                && let Some(taken) = place.resume(new, reserved)?
            {
                return Ok(taken);
            }
            for source in &sources {
                self.check_source(source, &new.secrets)?;
            }
            let wanted = NameEntry {
                uuid: Uuid::new_v4(),
                pool_id: None,
            };
            known =
                (self.groups.reserve(&place.pool, &new.name, wanted)).map_err(RbdError::from)?;
            if known.is_none() {
                return place.take(new, &sources, wanted, class.prefix);
            }
        }
    }

    pub(super) fn group_place<'a>(
        &'a self,
        link: ClusterConnection,
        pool: IoCtx,
        secrets: &'a Secrets,
    ) -> GroupPlace<'a> {
        self.use_pool(&link, &pool);
        GroupPlace {
            store: self,
            link,
            pool,
            secrets,
        }
    }

    /// The volumes of a request, which are in one cluster.
    fn sources(
        &self,
        new: &NewGroupSnapshot,
        class: &GroupClass<'_>,
    ) -> Result<Vec<FoundImage>, ProvisionError> {
        let handles: BTreeSet<_> = new.volumes.iter().collect();
        // Before any connection: the class's user may be none of another cluster.
        let mut first = class.cluster_id.map(|id| vec![id.to_owned()]);
        for handle in &handles {
            let may_have = self.clusters_of(handle)?;
            let allowed = first.get_or_insert_with(|| may_have.clone());
            if let Some(cluster_id) = allowed.first()
                && !may_have.is_empty()
                && !may_have.iter().any(|id| allowed.contains(id))
            {
                let (handle, cluster_id) = ((*handle).clone(), cluster_id.clone());
                return Err(RbdError::SeveralClusters { handle, cluster_id }.into());
            }
        }
        let mut sources: Vec<FoundImage> = Vec::new();
        for handle in handles {
            let source = self.volume(handle, &new.secrets)?;
            source.recorded()?;
            let first = sources.first().unwrap_or(&source);
            let cluster_id = class.cluster_id.unwrap_or(&first.link.config.cluster_id);
            if source.link.config.cluster_id != cluster_id {
                let (handle, cluster_id) = (handle.clone(), cluster_id.to_owned());
                return Err(RbdError::SeveralClusters { handle, cluster_id }.into());
            }
            sources.push(source);
        }
        Ok(sources)
    }

    /// Refuses a volume of which no snapshot can be taken in a group.
    fn check_source(&self, source: &FoundImage, secrets: &Secrets) -> Result<(), ProvisionError> {
        let image = match source.open(OpenMode::ReadOnly) {
            Err(RbdError::Lost { handle, .. }) => return Err(ProvisionError::NoVolume(handle)),
            image => image?,
        };
        let features = image.features().map_err(RbdError::from)?;
        if !features.contains(Features::LAYERING) {
            return Err(RbdError::NoLayering(image.to_string()).into());
        }
        if !features.contains(Features::EXCLUSIVE_LOCK) {
            return Err(RbdError::NoExclusiveLock(image.to_string()).into());
        }
        source.refuse_secondary(&image, "copy")?;
        let group = image.group().map_err(RbdError::from)?;
        if !group.is_empty() {
            let image = image.to_string();
            return Err(RbdError::OtherGroup { image, group }.into());
        }
        self.check_key(source, secrets)?;
        Ok(self.flattener.keep_few(&image)?)
    }

    pub(super) fn delete_group_snapshot(
        &self,
        handle: &str,
        snapshots: &[String],
        secrets: &Secrets,
    ) -> Result<(), ProvisionError> {
        let _delete = self.purger.deletes.begin();
        let Some((place, uuid, entry)) = self.group(handle, secrets)? else {
            return self.delete_members_left(handle, snapshots, secrets);
        };
        check_members(handle, &entry, snapshots)?;
        let _name = self.names.lock_on_lane(&group_snapshot_named(&entry.name));
        let reserved = NameEntry {
            uuid,
            pool_id: None,
        };
        // Before its first member is removed: a delete that stops there can be repeated, and
        // until then the group is not complete.
        let marked = self.groups.mark_group_deleted(&place.pool, uuid);
        marked.map_err(RbdError::from)?;
        place.abandon(&entry.name, reserved, Some(&entry)).map(drop)
    }

    /// Removes the snapshots of a group whose entry was lost.
    fn delete_members_left(
        &self,
        group: &str,
        snapshots: &[String],
        secrets: &Secrets,
    ) -> Result<(), ProvisionError> {
        for handle in snapshots {
            let mut all = self.all_of_snapshot(handle, secrets)?;
            let _names = self.lock_names(&all, snapshot_named);
            all.retain(|found| {
                let entry = found.recorded.as_ref().map(|recorded| &recorded.entry);
                entry.is_some_and(|entry| entry.group == group)
            });
            self.delete_all(&self.snapshots, &all, secrets)?;
        }
        Ok(())
    }

    pub(super) fn get_group_snapshot(
        &self,
        handle: &str,
        snapshots: &[String],
        secrets: &Secrets,
    ) -> Result<GroupSnapshotInfo, ProvisionError> {
        let none = || ProvisionError::NoGroupSnapshot(handle.to_owned());
        let (place, uuid, entry) = self.group(handle, secrets)?.ok_or_else(none)?;
        if entry.is_being_deleted() {
            return Err(ProvisionError::GroupDeleting(handle.to_owned()));
        }
        if entry.state != CreateState::None {
            return Err(none());
        }
        check_members(handle, &entry, snapshots)?;
        place.show(uuid, &entry).or_else(|error| {
            // Its delete may have begun meanwhile.
            let now = self.groups.read_group(&place.pool, uuid);
            match now.map_err(RbdError::from)? {
                None => Err(none()),
                Some(now) if now.is_being_deleted() => {
                    Err(ProvisionError::GroupDeleting(handle.to_owned()))
                }
                Some(_) => Err(error),
            }
        })
    }

    /// The group snapshot of a handle.
    pub(super) fn group<'a>(
        &'a self,
        handle: &str,
        secrets: &'a Secrets,
    ) -> Result<Option<(GroupPlace<'a>, Uuid, GroupEntry)>, ProvisionError> {
        let Ok(handle) = handle.parse::<Handle>() else {
            return Ok(None);
        };
        let Some((link, pool)) = self.linked_pool(&handle, secrets)? else {
            return Ok(None);
        };
        let place = self.group_place(link, pool, secrets);
        let entry = self.groups.read_group(&place.pool, handle.uuid());
        let entry = entry.map_err(RbdError::from)?;
        let entry = entry.filter(|entry| !entry.is_of_volumes());
        Ok(entry.map(|entry| (place, handle.uuid(), entry)))
    }
}

/// Refuses a request that names other snapshots than the group has.
fn check_members(
    handle: &str,
    entry: &GroupEntry,
    snapshots: &[String],
) -> Result<(), ProvisionError> {
    let named: BTreeSet<_> = snapshots.iter().collect();
    if named.is_empty() || named.into_iter().eq(entry.members.keys()) {
        return Ok(());
    }
    Err(ProvisionError::OtherMembers(handle.to_owned()))
}

/// A group snapshot, for errors.
fn what(name: &str) -> String {
    format!("group snapshot {name:?}")
}

impl GroupPlace<'_> {
    /// The reserved group snapshot, if it is complete. `None`: it was not, and has been
    /// removed.
    fn resume(
        &self,
        new: &NewGroupSnapshot,
        reserved: NameEntry,
    ) -> Result<Option<GroupSnapshotInfo>, ProvisionError> {
        if let Some(taken) = self.taken_before(new, reserved)? {
            return Ok(Some(taken));
        }
        let removed = self.abandon(&new.name, reserved, None);
        let removed = removed.map_err(|error| RbdError::NotRemoved {
            what: what(&new.name),
            source: error.into(),
        });
        if removed? {
            return Ok(None);
        }
        // It was completed meanwhile.
        Err(RbdError::Contended(new.name.clone()).into())
    }

    /// The reserved group snapshot, if it is complete.
    fn taken_before(
        &self,
        new: &NewGroupSnapshot,
        reserved: NameEntry,
    ) -> Result<Option<GroupSnapshotInfo>, ProvisionError> {
        let there = self.store.groups.read_group(&self.pool, reserved.uuid);
        let there = there.map_err(RbdError::from)?;
        let Some(entry) = there.filter(|entry| entry.state == CreateState::None) else {
            return Ok(None);
        };
        if entry.created.is_none() || entry.members.is_empty() {
            return Err(RbdError::ForeignGroup(new.name.clone()).into());
        }
        let shown = self.answer(reserved.uuid, &entry)?;
        let sources: BTreeSet<_> = shown.snapshots.iter().map(|one| &one.source).collect();
        if sources == new.volumes.iter().collect() {
            return Ok(Some(shown));
        }
        let (name, how) = (new.name.clone(), "it is of other volumes".to_owned());
        Err(ProvisionError::Differs { name, how })
    }

    /// The answer to a create. Flattens snapshots whose chains are too long for copies.
    fn answer(&self, uuid: Uuid, entry: &GroupEntry) -> Result<GroupSnapshotInfo, ProvisionError> {
        for handle in entry.members.keys() {
            let member = self.store.snapshot(handle, self.secrets)?;
            let image = member.open(OpenMode::ReadOnly)?;
            let flattener = &self.store.flattener;
            flattener.keep_short(&member.pool, &image, &member.image, 0)?;
        }
        self.show(uuid, entry)
    }

    /// A complete group snapshot.
    fn show(&self, uuid: Uuid, entry: &GroupEntry) -> Result<GroupSnapshotInfo, ProvisionError> {
        let mut snapshots: Vec<SnapshotInfo> = Vec::new();
        for handle in entry.members.keys() {
            let member = self.store.snapshot(handle, self.secrets)?;
            snapshots.push(show_snapshot(&member)?);
        }
        let cut = snapshots.iter().map(|one| one.created).max();
        let handle = handle_of(&self.link, &self.pool, uuid);
        let created = entry.created.or(cut);
        let created = created.ok_or_else(|| ProvisionError::NoGroupSnapshot(handle.clone()))?;
        Ok(GroupSnapshotInfo {
            handle,
            snapshots,
            created,
        })
    }

    /// Removes an attempt that failed with that error, and returns what to answer: no final
    /// error while something is left, which a repeat removes.
    fn undo(&self, reserved: NameEntry, own: &GroupEntry, error: RbdError) -> ProvisionError {
        if error.is_uncertain() {
            return error.into();
        }
        let undone = self.abandon(&own.name, reserved, Some(own)).map(drop);
        ProvisionError::from(error).after_undo(&what(&own.name), undone)
    }

    /// Abandons this driver's incomplete attempt, and removes its group in Ceph and its
    /// snapshots, the name and the entry last; false if it is complete. `known` is its entry,
    /// which another controller may have removed; none: it is read once it is abandoned, as
    /// it may be written until then.
    pub fn abandon(
        &self,
        name: &str,
        reserved: NameEntry,
        known: Option<&GroupEntry>,
    ) -> Result<bool, ProvisionError> {
        let groups = &self.store.groups;
        let abandoned = groups.abandon(&self.pool, &self.pool, name, reserved);
        if !abandoned.map_err(RbdError::from)? {
            return Ok(false);
        }
        let entry = match known {
            Some(known) => Some(known.clone()),
            None => groups
                .read_group(&self.pool, reserved.uuid)
                .map_err(RbdError::from)?,
        };
        if let Some(entry) = entry.filter(|entry| !entry.group.is_empty()) {
            let removed = or_missing(group::remove(&self.pool, &temporary(&entry.group)));
            removed.map_err(RbdError::from)?;
            self.remove_members(&entry)?;
        }
        groups
            .forget(&self.pool, &self.pool, name, reserved)
            .map_err(RbdError::from)?;
        Ok(true)
    }

    /// Removes the snapshots of a group, complete or not.
    fn remove_members(&self, entry: &GroupEntry) -> Result<(), ProvisionError> {
        for (handle, name) in &entry.members {
            let Ok(parsed) = handle.parse::<Handle>() else {
                tracing::warn!(handle, group = entry.group, "not the handle of a snapshot");
                continue;
            };
            self.remove_member(&parsed, name)?;
        }
        Ok(())
    }

    fn remove_member(&self, handle: &Handle, name: &str) -> Result<(), ProvisionError> {
        let store = self.store;
        let pool = match self.link.pool(handle.pool_id()) {
            // The pool was deleted, with its images.
            Err(error) if error.is_not_found() => return Ok(()),
            pool => pool?,
        };
        let entry = store.snapshots.read(&pool, handle.uuid());
        let entry = entry.map_err(RbdError::from)?;
        if let Some(entry) = entry.filter(|entry| entry.state == CreateState::None) {
            let member = found(self.link.clone(), pool, handle.uuid(), entry)?;
            return store.delete_all(&store.snapshots, &[member], self.secrets);
        }
        self.attempt(&pool, handle.uuid(), name).abandon(None)?;
        Ok(())
    }

    /// The attempt at a snapshot of the group, whose name is in the pool of its image.
    fn attempt<'a>(&'a self, pool: &'a IoCtx, uuid: Uuid, name: &'a str) -> Attempt<'a> {
        Attempt {
            store: self.store,
            link: &self.link,
            journal: &self.store.snapshots,
            directory: pool,
            pool,
            name,
            reserved: NameEntry {
                uuid,
                pool_id: None,
            },
            secrets: self.secrets,
        }
    }
}
