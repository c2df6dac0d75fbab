//! Group snapshots: snapshots of several volumes of a pool at one moment.
//!
//! No controller can hold the writes of a node, so no node may have any of the volumes
//! attached for writing. The controller claims all images before it copies the first, and
//! releases them after the last; meanwhile no node attaches one. The record of the group
//! names its snapshots before they are made, so what a crash leaves is deleted with it.

use std::{
    collections::BTreeSet,
    fs::File,
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{
    super::{GroupSnapshotInfo, NewGroupSnapshot, ProvisionError},
    ImageStore,
    catalogue::{Catalogue, CatalogueEntry, EntryKind, EntryState, ReservationLock, failed},
    copies::{CopyKind, CopyTarget},
    origin::SourceFile,
    snapshots::{SnapshotDetail, nanos, place_snapshot},
    store::loop_device,
    writers::Writers,
};
use crate::{
    crash_point,
    pool::{
        Pool,
        claim::{ControllerClaim, Sharing},
        draft::Draft,
        handle::{GroupHandle, SnapshotHandle},
    },
};

/// The fields of a group snapshot's record.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GroupDetail {
    /// The ids of its snapshots.
    members: Vec<Uuid>,
    /// The moment that they show: nanoseconds since 1970; 0 until they are made.
    created: u64,
}

impl EntryKind for GroupDetail {
    const NAMES: &str = "groupnames";
    const RECORDS: &str = "groups";
    const IS_CLAIMED: bool = false;

    fn is_exported(&self) -> bool {
        false
    }

    /// A group has no image: no file has this name.
    fn image(pool: &Pool, id: Uuid) -> PathBuf {
        pool.meta_path(Self::RECORDS).join(format!("{id}.img"))
    }

    fn delete_members(&self, images: &ImageStore, pool: &Pool) -> Result<(), ProvisionError> {
        let mut members = self.members.iter();
        members.try_for_each(|id| images.delete::<SnapshotDetail>(pool, *id))
    }
}

type Groups<'p> = Catalogue<'p, GroupDetail>;
type Snapshots<'p> = Catalogue<'p, SnapshotDetail>;

/// A snapshot of the group that is being made.
struct GroupMember<'s> {
    held: ReservationLock,
    name: String,
    volume: &'s str,
    origin: SourceFile<'s>,
}

impl ImageStore {
    pub(super) fn create_group_snapshot(
        &self,
        new: &NewGroupSnapshot,
    ) -> Result<GroupSnapshotInfo, ProvisionError> {
        let volumes: BTreeSet<&str> = new.volumes.iter().map(String::as_str).collect();
        // Before the volumes are looked for: the snapshots may outlive them.
        let first = volumes.first();
        let own = first.and_then(|handle| self.pool_named_by(handle));
        if let Some((pool, entry)) = self.find_name(own, &new.name) {
            return self.group_taken_before(pool, &entry, &volumes);
        }
        let pool = self.pool_of_all(&volumes)?;
        let catalogue = Groups::of(pool);
        loop {
            let held = catalogue.reserve(&new.name)?;
            crash_point();
            match catalogue.get(held.id)? {
                Some(entry) if entry.state == EntryState::Ready => {
                    return self.group_taken_before(pool, &entry, &volumes);
                }
                Some(entry) => self.delete_entry(pool, entry, Some(&held))?,
                None if held.is_new => {
                    return self.take_group(pool, &held, &new.name, &volumes);
                }
                None => held.abandon()?,
            }
        }
    }

    /// The pool of these volumes.
    fn pool_of_all(&self, volumes: &BTreeSet<&str>) -> Result<&Pool, ProvisionError> {
        let mut pool: Option<&Pool> = None;
        for handle in volumes {
            let (its, _) = self.find_volume(handle)?;
            if pool.is_some_and(|pool| pool.name != its.name) {
                return Err(ProvisionError::SeveralPools((*handle).to_owned()));
            }
            pool = Some(its);
        }
        pool.ok_or_else(|| ProvisionError::NoVolume(String::new()))
    }

    fn take_group(
        &self,
        pool: &Pool,
        held: &ReservationLock,
        name: &str,
        volumes: &BTreeSet<&str>,
    ) -> Result<GroupSnapshotInfo, ProvisionError> {
        let mut members = Vec::new();
        let mut make = || {
            let tmp = pool.meta_dir("tmp")?;
            let mut drafts = Vec::new();
            for (nr, volume) in volumes.iter().enumerate() {
                let origin = self.volume_origin(volume)?;
                let name = format!("snapshot {nr} of group {}", held.id);
                members.push(GroupMember {
                    held: Snapshots::of(pool).reserve(&name)?,
                    name,
                    volume,
                    origin,
                });
                drafts.push(Draft::new(&tmp).map_err(|e| failed("write in", &tmp, e))?);
            }
            let entry = CatalogueEntry {
                id: held.id,
                name: name.to_owned(),
                state: EntryState::Making,
                detail: GroupDetail {
                    members: members.iter().map(|one| one.held.id).collect(),
                    created: 0,
                },
            };
            Groups::of(pool).record_as(&entry)?;
            crash_point();
            self.make_group(pool, held, &entry, &members, drafts)
        };
        make().map_err(|error| {
            let names: Vec<_> = members.into_iter().map(|one| one.name).collect();
            let undone = self.undo_group(pool, held, &names);
            error.after_undo(&format!("group snapshot {name:?}"), undone)
        })
    }

    /// Removes a group and its snapshots, and the names under which none was made.
    fn undo_group(
        &self,
        pool: &Pool,
        held: &ReservationLock,
        names: &[String],
    ) -> Result<(), ProvisionError> {
        self.undo::<GroupDetail>(pool, held)?;
        let snapshots = Snapshots::of(pool);
        for name in names {
            if let Some(held) = snapshots.hold(name)?
                && snapshots.get(held.id)?.is_none()
            {
                held.abandon()?;
            }
        }
        Ok(())
    }

    fn make_group(
        &self,
        pool: &Pool,
        held: &ReservationLock,
        entry: &CatalogueEntry<GroupDetail>,
        members: &[GroupMember<'_>],
        drafts: Vec<Draft>,
    ) -> Result<GroupSnapshotInfo, ProvisionError> {
        let group = GroupHandle::new(pool, self.node_id.as_deref(), entry.id).to_string();
        let created = self.copy_at_one_moment(pool, members, &drafts)?;
        for (member, draft) in members.iter().zip(drafts) {
            let detail = SnapshotDetail::new(member.volume, created, Some(group.clone()));
            place_snapshot(pool, &member.held, &member.name, detail, draft)?;
        }
        let ready = CatalogueEntry {
            state: EntryState::Ready,
            name: entry.name.clone(),
            detail: GroupDetail {
                created: nanos(created),
                ..entry.detail.clone()
            },
            ..*entry
        };
        held.refuse_lost(&entry.name)?;
        Groups::of(pool).record_as(&ready)?;
        crash_point();
        self.group_snapshot(pool, &ready)
    }

    /// Fills the drafts while no node can write to any of the images. Returns the moment that
    /// they show.
    fn copy_at_one_moment(
        &self,
        pool: &Pool,
        members: &[GroupMember<'_>],
        drafts: &[Draft],
    ) -> Result<SystemTime, ProvisionError> {
        let tmp = pool.meta_dir("tmp")?;
        let mut claims = Claims {
            pool,
            claim: ControllerClaim::new(pool, &self.boot_id, Sharing::Readers)?,
            images: Vec::new(),
        };
        let mut leases = Vec::new();
        for GroupMember { origin, .. } in members {
            let image = origin.volume_image.clone().unwrap_or_default();
            claims.claim.take(pool, &image)?;
            claims.images.push(image.clone());
            let looked = loop_device(&image, true);
            let looked = looked.map_err(|e| failed("look for a loop device over", &origin.path, e));
            if let Some(holder) = looked? {
                return Err(holder);
            }
            if origin.is_exported {
                leases.push((lease_of(pool, &origin.file, &origin.path, &image)?, image));
            }
        }
        for (member, draft) in members.iter().zip(drafts) {
            let target = CopyTarget {
                kind: CopyKind::Snapshot,
                name: member.name.clone(),
                handle: SnapshotHandle::new(pool, self.node_id.as_deref(), member.held.id)
                    .to_string(),
                source: member.volume.to_owned(),
                pool: pool.name.clone(),
            };
            let promise_room = || member.origin.promise_room(draft);
            self.fill(draft, &member.origin, target, promise_room)?;
        }
        for (lease, image) in &leases {
            let holds = lease.holds();
            if !holds.map_err(|e| failed("look at the lease of", &tmp, e))? {
                return Err(ProvisionError::Exported(image.clone()));
            }
        }
        Ok(SystemTime::now())
    }

    fn group_taken_before(
        &self,
        pool: &Pool,
        entry: &CatalogueEntry<GroupDetail>,
        volumes: &BTreeSet<&str>,
    ) -> Result<GroupSnapshotInfo, ProvisionError> {
        let taken = self.group_snapshot(pool, entry)?;
        let of = |one: &super::SnapshotInfo| volumes.contains(one.source.as_str());
        if taken.snapshots.len() == volumes.len() && taken.snapshots.iter().all(of) {
            return Ok(taken);
        }
        Err(ProvisionError::Differs {
            name: entry.name.clone(),
            how: "it is of other volumes".to_owned(),
        })
    }

    pub(super) fn delete_group_snapshot(
        &self,
        handle: &str,
        snapshots: &[String],
    ) -> Result<(), ProvisionError> {
        let Ok(parsed) = handle.parse::<GroupHandle>() else {
            return Ok(());
        };
        let pool = self.reach(parsed.parts(), handle)?;
        if let Some(entry) = Groups::of(pool).get(parsed.id())? {
            self.check_members(pool, handle, &entry, snapshots)?;
        }
        self.delete::<GroupDetail>(pool, parsed.id())
    }

    pub(super) fn get_group_snapshot(
        &self,
        handle: &str,
        snapshots: &[String],
    ) -> Result<GroupSnapshotInfo, ProvisionError> {
        let missing = || ProvisionError::NoGroupSnapshot(handle.to_owned());
        let parsed: GroupHandle = handle.parse().map_err(|_| missing())?;
        let pool = self.reach(parsed.parts(), handle)?;
        let look = || match Groups::of(pool).get(parsed.id())? {
            Some(entry) if entry.state == EntryState::Ready => Ok(entry),
            Some(entry) if entry.state == EntryState::Deleting && entry.detail.created > 0 => {
                Err(ProvisionError::GroupDeleting(handle.to_owned()))
            }
            _ => Err(missing()),
        };
        let entry = look()?;
        self.check_members(pool, handle, &entry, snapshots)?;
        // Its delete may have begun meanwhile.
        (self.group_snapshot(pool, &entry)).or_else(|error| look().and(Err(error)))
    }

    /// Refuses a request that names other snapshots than the group has.
    fn check_members(
        &self,
        pool: &Pool,
        handle: &str,
        entry: &CatalogueEntry<GroupDetail>,
        snapshots: &[String],
    ) -> Result<(), ProvisionError> {
        let node_id = self.node_id.as_deref();
        let members = entry.detail.members.iter();
        let members: BTreeSet<String> = members
            .map(|id| SnapshotHandle::new(pool, node_id, *id).to_string())
            .collect();
        let named: BTreeSet<_> = snapshots.iter().cloned().collect();
        if named.is_empty() || named == members {
            return Ok(());
        }
        Err(ProvisionError::OtherMembers(handle.to_owned()))
    }

    fn group_snapshot(
        &self,
        pool: &Pool,
        entry: &CatalogueEntry<GroupDetail>,
    ) -> Result<GroupSnapshotInfo, ProvisionError> {
        let handle = GroupHandle::new(pool, self.node_id.as_deref(), entry.id).to_string();
        let mut snapshots = Vec::new();
        for id in &entry.detail.members {
            let member = Snapshots::of(pool).ready(*id)?;
            let member = member.ok_or_else(|| ProvisionError::NoGroupSnapshot(handle.clone()))?;
            snapshots.push(self.snapshot(pool, &member)?);
        }
        snapshots.sort_unstable_by(|one, other| one.handle.cmp(&other.handle));
        Ok(GroupSnapshotInfo {
            handle,
            snapshots,
            created: UNIX_EPOCH + Duration::from_nanos(entry.detail.created),
        })
    }
}

/// The claims of a controller, until they are dropped.
struct Claims<'p> {
    pool: &'p Pool,
    claim: ControllerClaim,
    images: Vec<String>,
}

impl Drop for Claims<'_> {
    fn drop(&mut self) {
        for image in &self.images {
            if let Err(error) = self.claim.release(self.pool, image) {
                // It is stale once the token is gone.
                tracing::warn!(image, %error, "a controller's claim stays until the next start");
            }
        }
    }
}

/// A lease on an image that an NBD server exports, which no node writes to while it holds.
fn lease_of<'f>(
    pool: &Pool,
    file: &'f File,
    path: &std::path::Path,
    image: &str,
) -> Result<crate::kernel::lease::Lease<'f>, ProvisionError> {
    match Writers::of(pool, file, path)? {
        Writers::None(lease) => Ok(lease),
        Writers::Some => Err(ProvisionError::Exported(image.to_owned())),
        Writers::Unknown => Err(ProvisionError::WritersUnknown {
            pool: pool.name.clone(),
            image: image.to_owned(),
        }),
    }
}
