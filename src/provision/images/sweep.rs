//! Finishing the work of controllers that have ended.

use super::{
    super::ProvisionError,
    ImageStore,
    catalogue::{Catalogue, CatalogueEntry, EntryKind, EntryState, failed, hold_by_path},
    groups::GroupDetail,
    snapshots::SnapshotDetail,
    volumes::VolumeDetail,
};
use crate::pool::{Pool, claim, draft};

impl ImageStore {
    /// Sweeps a pool; returns the failures, and what is locked: a call is under way on it, or
    /// was, and NFS has not noticed yet that its controller died.
    pub(super) fn sweep(&self, pool: &Pool) -> Vec<ProvisionError> {
        if let Err(error) = pool.check_scope() {
            return vec![error.into()];
        }
        let mut errors = Vec::new();
        let tmp = pool.meta_path("tmp");
        if tmp.is_dir()
            && let Err(e) = draft::sweep(&tmp)
        {
            errors.push(failed("sweep", &tmp, e));
        }
        self.sweep_kind::<VolumeDetail>(pool, &mut errors);
        self.sweep_kind::<SnapshotDetail>(pool, &mut errors);
        self.sweep_kind::<GroupDetail>(pool, &mut errors);
        errors.extend(claim::sweep(pool).err().map(ProvisionError::from));
        if pool.is_initialized().is_ok_and(|is| is) {
            pool.refill_spares();
        }
        errors
    }

    fn sweep_kind<K: EntryKind>(&self, pool: &Pool, errors: &mut Vec<ProvisionError>) {
        let catalogue = Catalogue::<K>::of(pool);
        let mut keep_error = |result: Result<(), ProvisionError>| errors.extend(result.err());
        match catalogue.reservations() {
            Ok(paths) => paths.iter().for_each(|path| {
                keep_error(hold_by_path(path).and_then(|held| {
                    let Some(held) = held else { return Ok(()) };
                    match catalogue.get(held.id)? {
                        None => {
                            catalogue.refuse_unrecorded(&held)?;
                            held.abandon()
                        }
                        Some(entry) if entry.state == EntryState::Ready => Ok(()),
                        Some(entry) => self.delete_entry(pool, entry, Some(&held)),
                    }
                }));
            }),
            Err(error) => return keep_error(Err(error)),
        }
        // A delete that ended between its reservation and its record.
        match catalogue.ids() {
            Ok(ids) => ids.into_iter().for_each(|id| {
                keep_error(catalogue.get(id).and_then(|entry| match entry {
                    Some(entry) if entry.state != EntryState::Ready => self.finish(pool, &entry),
                    _ => Ok(()),
                }));
            }),
            Err(error) => keep_error(Err(error)),
        }
    }

    /// Deletes an entry that was not complete when it was read. A call that was under way then
    /// may have completed it since, and may have been answered.
    pub(super) fn finish<K: EntryKind>(
        &self,
        pool: &Pool,
        seen: &CatalogueEntry<K>,
    ) -> Result<(), ProvisionError> {
        let catalogue = Catalogue::of(pool);
        let held = catalogue.hold(&seen.name)?;
        match catalogue.get(seen.id)? {
            Some(entry) if entry.state != EntryState::Ready => {
                self.delete_entry::<K>(pool, entry, held.as_ref())
            }
            _ => Ok(()),
        }
    }
}
