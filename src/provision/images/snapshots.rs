//! Snapshots: read-only copies of images, beside the catalogue.

use std::{
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{
    super::{ProvisionError, SnapshotInfo},
    ImageStore,
    catalogue::{Catalogue, CatalogueEntry, EntryKind, EntryState, ReservationLock, failed},
    copies::{CopyKind, CopyTarget},
    store::size_of,
};
use crate::{
    Done, crash_point,
    pool::{
        Pool, Scope,
        draft::{Draft, Durability::Durable},
        handle::SnapshotHandle,
    },
};

/// The fields of a snapshot's record.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SnapshotDetail {
    /// The handle of the volume, which may be gone by now.
    pub source: String,
    /// The point in time: nanoseconds since 1970.
    created: u64,
    /// The handle of its group snapshot, if it is of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    group: Option<String>,
}

impl SnapshotDetail {
    pub fn new(source: &str, created: SystemTime, group: Option<String>) -> Self {
        Self {
            source: source.to_owned(),
            created: nanos(created),
            group,
        }
    }
}

/// Nanoseconds since 1970.
pub fn nanos(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

impl EntryKind for SnapshotDetail {
    const NAMES: &str = "snapnames";
    const RECORDS: &str = "snapshots";
    const IS_CLAIMED: bool = false;

    fn is_exported(&self) -> bool {
        false
    }

    fn image(pool: &Pool, id: Uuid) -> PathBuf {
        pool.meta_path(Self::RECORDS).join(format!("{id}.img"))
    }
}

type Snapshots<'p> = Catalogue<'p, SnapshotDetail>;

impl ImageStore {
    pub(super) fn create_snapshot(
        &self,
        name: &str,
        volume: &str,
    ) -> Result<SnapshotInfo, ProvisionError> {
        // Before the volume is looked for: a snapshot may outlive it.
        if let Some((pool, entry)) = self.find_name(self.pool_named_by(volume), name) {
            return self.as_taken_before(pool, &entry, volume);
        }
        let (pool, _) = self.find_volume(volume)?;
        let catalogue = Snapshots::of(pool);
        loop {
            let held = catalogue.reserve(name)?;
            crash_point();
            match catalogue.get(held.id)? {
                Some(entry) if entry.state == EntryState::Ready => {
                    return self.as_taken_before(pool, &entry, volume);
                }
                Some(entry) => self.delete_entry(pool, entry, Some(&held))?,
                None if held.is_new => {
                    let taken = self.take(pool, &held, name, volume);
                    return taken.map_err(|error| {
                        let what = format!("snapshot {name:?}");
                        error.after_undo(&what, self.undo::<SnapshotDetail>(pool, &held))
                    });
                }
                None => {
                    catalogue.refuse_unrecorded(&held)?;
                    held.abandon()?;
                }
            }
        }
    }

    fn take(
        &self,
        pool: &Pool,
        held: &ReservationLock,
        name: &str,
        volume: &str,
    ) -> Result<SnapshotInfo, ProvisionError> {
        let origin = self.volume_origin(volume)?;
        let tmp = pool.meta_dir("tmp")?;
        pool.meta_dir(SnapshotDetail::RECORDS)?;
        let draft = Draft::new(&tmp).map_err(|e| failed("write in", &tmp, e))?;
        let target = CopyTarget {
            kind: CopyKind::Snapshot,
            name: name.to_owned(),
            handle: SnapshotHandle::new(pool, self.node_id.as_deref(), held.id).to_string(),
            source: volume.to_owned(),
            pool: pool.name.clone(),
        };
        let promise_room = || origin.promise_room(&draft);
        self.fill(&draft, &origin, target, promise_room)?;
        let detail = SnapshotDetail::new(volume, SystemTime::now(), None);
        crash_point();
        let entry = place_snapshot(pool, held, name, detail, draft)?;
        self.snapshot(pool, &entry)
    }

    fn as_taken_before(
        &self,
        pool: &Pool,
        entry: &CatalogueEntry<SnapshotDetail>,
        volume: &str,
    ) -> Result<SnapshotInfo, ProvisionError> {
        if entry.detail.source == volume {
            return self.snapshot(pool, entry);
        }
        Err(ProvisionError::Differs {
            name: entry.name.clone(),
            how: format!("it is a snapshot of {:?}", entry.detail.source),
        })
    }

    pub(super) fn delete_snapshot(&self, handle: &str) -> Result<(), ProvisionError> {
        let Ok(parsed) = handle.parse::<SnapshotHandle>() else {
            return Ok(());
        };
        let pool = self.reach(parsed.parts(), handle)?;
        if let Some(entry) = Snapshots::of(pool).get(parsed.id())?
            && let Some(group) = entry.detail.group
        {
            let handle = handle.to_owned();
            return Err(ProvisionError::InGroup { handle, group });
        }
        self.delete::<SnapshotDetail>(pool, parsed.id())
    }

    pub(super) fn get_snapshot(&self, handle: &str) -> Result<SnapshotInfo, ProvisionError> {
        let (pool, entry) = self.find_snapshot(handle)?;
        self.snapshot(pool, &entry)
    }

    pub(super) fn snapshot(
        &self,
        pool: &Pool,
        entry: &CatalogueEntry<SnapshotDetail>,
    ) -> Result<SnapshotInfo, ProvisionError> {
        let detail = &entry.detail;
        Ok(SnapshotInfo {
            handle: SnapshotHandle::new(pool, self.node_id.as_deref(), entry.id).to_string(),
            name: entry.name.clone(),
            source: detail.source.clone(),
            bytes: size_of(&SnapshotDetail::image(pool, entry.id))?.unwrap_or(0),
            created: UNIX_EPOCH + Duration::from_nanos(detail.created),
            local: pool.scope == Scope::Local,
            group: detail.group.clone(),
        })
    }

    /// A snapshot that exists and that this controller can reach.
    pub(super) fn find_snapshot(
        &self,
        handle: &str,
    ) -> Result<(&Pool, CatalogueEntry<SnapshotDetail>), ProvisionError> {
        let missing = || ProvisionError::NoSnapshot(handle.to_owned());
        let parsed: SnapshotHandle = handle.parse().map_err(|_| missing())?;
        let pool = self.reach(parsed.parts(), handle)?;
        let entry = Snapshots::of(pool).ready(parsed.id())?;
        Ok((pool, entry.ok_or_else(missing)?))
    }
}

/// Gives a filled draft the place of a snapshot, and records it.
pub fn place_snapshot(
    pool: &Pool,
    held: &ReservationLock,
    name: &str,
    detail: SnapshotDetail,
    draft: Draft,
) -> Result<CatalogueEntry<SnapshotDetail>, ProvisionError> {
    let image = SnapshotDetail::image(pool, held.id);
    let mut entry = CatalogueEntry {
        id: held.id,
        name: name.to_owned(),
        state: EntryState::Making,
        detail,
    };
    held.refuse_lost(name)?;
    Snapshots::of(pool).record_as(&entry)?;
    match draft.place_new(&image, Durable) {
        Ok(Done::Now) => {}
        Ok(Done::Already) => return Err(ProvisionError::Busy(name.to_owned())),
        Err(e) => return Err(failed("put in place", &image, e)),
    }
    held.refuse_lost(name)?;
    entry.state = EntryState::Ready;
    Snapshots::of(pool).record_as(&entry)?;
    crash_point();
    tracing::info!(name, source = entry.detail.source, image = %image.display(), "took a snapshot");
    Ok(entry)
}
