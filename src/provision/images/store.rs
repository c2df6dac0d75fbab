//! Finding and deleting entries, for volumes and snapshots alike. All of it blocks.

use std::{io, path::Path};

use uuid::Uuid;

use super::{
    super::ProvisionError,
    ImageStore,
    catalogue::{Catalogue, CatalogueEntry, EntryKind, EntryState, ReservationLock, failed},
    writers,
};
use crate::{
    crash_point, error_chain,
    pool::{
        Pool, PoolError, Scope,
        claim::{self, ControllerClaim, Sharing},
        format_marker,
        handle::{Parts, VolumeHandle},
    },
};

impl ImageStore {
    /// The pool that is part of `handle`, whose parts these are.
    pub(super) fn reach(&self, parts: &Parts, handle: &str) -> Result<&Pool, ProvisionError> {
        let handle = || handle.to_owned();
        if !parts.is_reachable_from(self.node_id.as_deref()) {
            return Err(ProvisionError::Elsewhere(handle()));
        }
        let found = self.pools.get(parts.pool());
        let pool = found.map_err(|source| ProvisionError::PoolNotGiven {
            handle: handle(),
            source,
        })?;
        if parts.is_local() != (pool.scope == Scope::Local) {
            return Err(ProvisionError::OtherScope {
                handle: handle(),
                pool: pool.name.clone(),
                scope: pool.scope,
            });
        }
        // An image that is missing while the pool is away is not gone.
        pool.check_initialized()?;
        Ok(pool)
    }

    /// The pool that a storage class names, or the only one. Beside a node, one
    /// that is unknown may be another node's.
    pub(super) fn pool_for(&self, name: Option<&str>) -> Result<&Pool, ProvisionError> {
        let found = self.pools.get_or_only(name);
        let pool = found.map_err(|error| match error {
            PoolError::Unknown { .. } if self.node_id.is_some() => {
                ProvisionError::PoolNotHere(error)
            }
            other => other.into(),
        })?;
        pool.check_scope()?;
        Ok(pool)
    }

    /// The entry of that name: in the pool that the request is about, or else in any other.
    pub(super) fn find_name<K: EntryKind + Send + 'static>(
        &self,
        own: Option<&Pool>,
        name: &str,
    ) -> Option<(&Pool, CatalogueEntry<K>)> {
        let own = own.and_then(|own| self.pools.get(&own.name).ok());
        if let Some(pool) = own {
            match Catalogue::of(pool).by_name(name) {
                Ok(Some(entry)) => return Some((pool, entry)),
                Ok(None) => {}
                // The rest of the call reports that.
                Err(error) => {
                    let error = error_chain(&error);
                    tracing::warn!(pool = pool.name, error, "not searched for a name");
                }
            }
        }
        let is_other = |pool: &&Pool| own.is_none_or(|own| own.name != pool.name);
        self.names.find(self.pools.iter().filter(is_other), name)
    }

    /// The pool of a volume's handle, if it is one of these.
    pub(super) fn pool_named_by(&self, handle: &str) -> Option<&Pool> {
        let parsed: VolumeHandle = handle.parse().ok()?;
        self.pools.get(parsed.parts().pool()).ok()
    }

    /// Deletes the entry of `id`, if there is one.
    pub(super) fn delete<K: EntryKind>(&self, pool: &Pool, id: Uuid) -> Result<(), ProvisionError> {
        let catalogue = Catalogue::<K>::of(pool);
        let Some(entry) = catalogue.get(id)? else {
            return Ok(());
        };
        let held = catalogue.hold(&entry.name)?;
        self.delete_entry(pool, entry, held.as_ref())
    }

    /// Undoes a failed create of this process, of which no caller knows. A complete entry
    /// stays.
    pub(super) fn undo<K: EntryKind>(
        &self,
        pool: &Pool,
        held: &ReservationLock,
    ) -> Result<(), ProvisionError> {
        let catalogue = Catalogue::<K>::of(pool);
        match catalogue.get(held.id)? {
            None => catalogue.undo_unrecorded(held),
            // Its record was written although that failed: an equal call may have answered.
            Some(entry) if entry.state == EntryState::Ready => {
                Err(ProvisionError::Complete(catalogue.record(held.id)))
            }
            Some(entry) => self.delete_entry(pool, entry, Some(held)),
        }
    }

    /// Deletes an entry. `held` is its name's reservation, if there is one;
    /// it may belong to another entry by now.
    pub(super) fn delete_entry<K: EntryKind>(
        &self,
        pool: &Pool,
        mut entry: CatalogueEntry<K>,
        held: Option<&ReservationLock>,
    ) -> Result<(), ProvisionError> {
        let catalogue = Catalogue::of(pool);
        let image = format!("{}.img", entry.id);
        let claim = K::IS_CLAIMED
            .then(|| ControllerClaim::new(pool, &self.boot_id, Sharing::Exclusive))
            .transpose()?;
        if let Some(claim) = &claim {
            claim.take(pool, &image)?;
        }
        let mut erase = || {
            let path = K::image(pool, entry.id);
            let holder = loop_device(&image, false);
            if let Some(holder) =
                holder.map_err(|e| failed("look for a loop device over", &path, e))?
            {
                return Err(holder);
            }
            if entry.detail.is_exported() {
                writers::refuse_written(pool, &image)?;
            }
            crash_point();
            let why = match entry.state {
                EntryState::Making => "its creation was interrupted",
                EntryState::Ready => "a call deletes it",
                EntryState::Deleting => "its deletion was interrupted",
            };
            // Once: each record in a full file system takes a spare file.
            if entry.state != EntryState::Deleting {
                entry.state = EntryState::Deleting;
                catalogue.record_as(&entry)?;
            }
            entry.detail.delete_members(self, pool)?;
            if K::IS_CLAIMED {
                format_marker::clear(pool, &image)?;
            }
            catalogue.erase(&entry, held, why)
        };
        let erased = erase();
        if let Some(claim) = claim {
            match &erased {
                Ok(()) => claim::forget(pool, &image)?,
                // The caller gets the error of the delete; the claim ends with its token.
                Err(_) => {
                    if let Err(error) = claim.release(pool, &image) {
                        tracing::warn!(%error, image, "the claim on an image that was not deleted stays");
                    }
                }
            }
        }
        pool.refill_spares();
        erased
    }
}

/// A loop device of this machine over an image, whichever process attached it: images have
/// unique names, and sysfs shows them in every mount namespace. A read-only one is ignored
/// if `may_read`.
pub fn loop_device(image: &str, may_read: bool) -> io::Result<Option<ProvisionError>> {
    let devices = match std::fs::read_dir("/sys/block") {
        Ok(devices) => devices,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e),
    };
    for device in devices {
        let device = device?;
        // Only an attached loop device has it.
        let Ok(backing) = std::fs::read_to_string(device.path().join("loop/backing_file")) else {
            continue;
        };
        let backing = Path::new(backing.trim_end());
        let read_only = || {
            let ro = std::fs::read_to_string(device.path().join("ro"));
            ro.is_ok_and(|ro| ro.trim() == "1")
        };
        if backing.file_name() == Some(image.as_ref()) && !(may_read && read_only()) {
            return Ok(Some(ProvisionError::LoopDevice {
                image: image.to_owned(),
                device: device.file_name().to_string_lossy().into_owned(),
            }));
        }
    }
    Ok(None)
}

/// The size of a file; none if it is missing.
pub fn size_of(path: &Path) -> Result<Option<u64>, ProvisionError> {
    match std::fs::symlink_metadata(path) {
        Ok(metadata) => Ok(Some(metadata.len())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(failed("look at", path, e)),
    }
}
