//! ceph-csi's journal: the images by the names of their requests, kept in the pool itself.
//!
//! ```text
//! csi.volumes.<instance>    csi.volume.<name>  →  <uuid>, or <pool id>/<uuid>
//! csi.volume.<uuid>         csi.volname        →  <name>
//!                           csi.imagename      →  <image>
//!                           csi.imageid, …     →  see JournalEntry
//! ```
//!
//! and `csi.snaps.<instance>` and `csi.snap.<uuid>` in the same way, and groups of snapshots
//! ([`GroupEntry`]). Each line is a key of an omap. The directory, the upper one, recognises repeated creates;
//! the entry, the lower one, leads from a handle to its image. The directory is
//! in the journal's pool, the entry in the image's, mostly the same.
//!
//! A repeat finishes what a crash interrupted, because each call begins and ends with the
//! key that its repeats look for: a create reserves the name in the directory first and removes it
//! last, a delete removes the entry last. Two controllers may do the same at once: a name
//! is reserved, and removed, by a change that compares the old value in the same step.

use std::{collections::BTreeMap, time::SystemTime};

use uuid::Uuid;

use super::handle::Handle;
use crate::ceph::client::{
    CephError, or_missing,
    rados::{IoCtx, OmapPage, WriteOp},
};

mod entry;
mod group;

pub use entry::{CreateState, JournalEntry, JournalKind, NameEntry, TEMPORARY};
pub use group::GroupEntry;

/// A journal that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The cluster refused an operation.
    #[error(transparent)]
    Ceph(#[from] CephError),
    /// A value has no form that ceph-csi or this driver writes.
    ///
    /// Remedy: compare object and image (`rados listomapvals`, `rbd info`), and correct the object
    /// by hand.
    #[error("key {key:?} of object {object} has the invalid value {value:?}; correct it by hand")]
    Corrupt {
        /// The object, with its pool.
        object: String,
        key: String,
        value: String,
    },
    /// Directory and entry contradict each other.
    ///
    /// Remedy: compare both objects (`rados listomapvals`), and remove the wrong entry (`rados
    /// rmomapkey`).
    #[error(
        "name {name:?} leads to object {object}, which belongs to {there:?}; correct the journal by hand"
    )]
    Contradiction {
        /// The entry's object, with its pool.
        object: String,
        /// The name in the directory.
        name: String,
        /// The name in the entry.
        there: String,
    },
}

/// Some of a directory's names.
#[derive(Debug)]
pub struct NamePage {
    /// In order.
    pub names: Vec<(String, NameEntry)>,
    /// After what the next page begins; none: this is the last. It need not be one of these
    /// names: all keys of a page may be left out.
    pub next: Option<String>,
}

/// One kind's journal. All of its calls block.
#[derive(Clone, Debug)]
pub struct Journal {
    kind: JournalKind,
    directory: String,
}

impl Journal {
    /// The journal of an instance: ceph-csi's `--instanceid`, mostly `default`.
    pub fn new(kind: JournalKind, instance: &str) -> Self {
        let directory = match kind {
            JournalKind::Volume => format!("csi.volumes.{instance}"),
            JournalKind::Snapshot => format!("csi.snaps.{instance}"),
            JournalKind::Group => format!("csi.groups.{instance}"),
        };
        Self { kind, directory }
    }

    /// Its kind: volumes, snapshots or groups.
    pub fn kind(&self) -> JournalKind {
        self.kind
    }

    /// The key of a name in the directory; of a uuid's text: the object of its entry.
    pub fn key(&self, name: &str) -> String {
        format!("{}{name}", self.kind.prefix())
    }

    fn object(&self, uuid: Uuid) -> String {
        object_of(self.kind, uuid)
    }

    /// Reserves a name, unless it is reserved; returns the reservation that exists then.
    pub fn reserve(
        &self,
        journal: &IoCtx,
        name: &str,
        wanted: NameEntry,
    ) -> Result<Option<NameEntry>, JournalError> {
        let (key, value) = (self.key(name), wanted.to_string());
        let set = [(key.as_str(), value.as_str())];
        loop {
            // An absent key compares as an empty one.
            let op = WriteOp::new().compare(&key, "").set(set);
            match journal.operate(&self.directory, &op) {
                Ok(()) => return Ok(None),
                Err(error) if error.is_mismatch() => {
                    let found = self.find(journal, name)?;
                    // None: removed meanwhile.
                    if found.is_some() {
                        return Ok(found);
                    }
                }
                Err(error) if error.is_not_found() => {
                    // The first of its pool.
                    match journal.operate(&self.directory, &WriteOp::new().create().set(set)) {
                        Ok(()) => return Ok(None),
                        Err(error) if error.is_exists() => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The reservation of a name.
    pub fn find(&self, journal: &IoCtx, name: &str) -> Result<Option<NameEntry>, JournalError> {
        let key = self.key(name);
        let found = or_empty(journal.omap_get(&self.directory, &[&key]))?;
        let value = found.get(&key);
        value
            .map(|value| self.parse(journal, &key, value))
            .transpose()
    }

    fn parse(&self, journal: &IoCtx, key: &str, value: &str) -> Result<NameEntry, JournalError> {
        let corrupt = |()| JournalError::Corrupt {
            object: format!("{journal}/{}", self.directory),
            key: key.to_owned(),
            value: value.to_owned(),
        };
        value.parse().map_err(corrupt)
    }

    /// The names after `after`, at most `max`. Invalid values are left out with a warning;
    /// those that map a handle to another are left out without one.
    pub fn page(&self, journal: &IoCtx, after: &str, max: u64) -> Result<NamePage, JournalError> {
        let prefix = self.kind.prefix();
        let after = match after {
            "" => String::new(),
            name => self.key(name),
        };
        let page = match journal.omap_page(&self.directory, &after, prefix, max) {
            Ok(page) => page,
            Err(error) if error.is_not_found() => OmapPage::default(),
            page => page?,
        };
        let name_in = |key: &str| key[prefix.len()..].to_owned();
        let entry = |(key, value): (&String, &String)| match self.parse(journal, key, value) {
            Ok(reserved) => Some((name_in(key), reserved)),
            // After a fail-over ceph-csi records, beside the volume's name, the handle that
            // replaces another. Both have the volume's uuid.
            Err(_) if value.parse::<Handle>().is_ok() => None,
            Err(error) => {
                tracing::warn!(%error, "not listed");
                None
            }
        };
        let last = page.entries.last_key_value().filter(|_| page.more);
        Ok(NamePage {
            next: last.map(|(key, _)| name_in(key)),
            names: page.entries.iter().filter_map(entry).collect(),
        })
    }

    /// Writes the entry of a new reservation; false if another controller has abandoned it
    /// already.
    pub fn enter(
        &self,
        journal: &IoCtx,
        pool: &IoCtx,
        reserved: NameEntry,
        entry: &JournalEntry,
    ) -> Result<bool, JournalError> {
        let object = self.object(reserved.uuid);
        let keys = entry.to_keys(self.kind);
        let set = keys.iter().map(|(key, value)| (*key, value.as_str()));
        match pool.operate(&object, &WriteOp::new().create().set(set)) {
            // A controller that abandons a create removes its name before its entry.
            Ok(()) => Ok(self.find(journal, &entry.name)? == Some(reserved)),
            Err(error) if error.is_exists() => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Resumes a create of ceph-csi; the keys that the entry has already are kept.
    pub fn resume(
        &self,
        pool: &IoCtx,
        uuid: Uuid,
        entry: &JournalEntry,
    ) -> Result<JournalEntry, JournalError> {
        let object = self.object(uuid);
        let there = self.read(pool, uuid)?.unwrap_or_default();
        if there.name.is_empty() {
            let keys = entry.to_keys(self.kind);
            let set = keys.iter().map(|(key, value)| (*key, value.as_str()));
            pool.operate(&object, &WriteOp::new().set(set))?;
            return Ok(entry.clone());
        }
        if there.name != entry.name {
            return Err(JournalError::Contradiction {
                object: format!("{pool}/{object}"),
                name: entry.name.clone(),
                there: there.name,
            });
        }
        Ok(there)
    }

    /// The entry of an image, if there is one.
    pub fn read(&self, pool: &IoCtx, uuid: Uuid) -> Result<Option<JournalEntry>, JournalError> {
        read(self.kind, pool, uuid)
    }

    /// When the entry of an image was changed.
    pub fn modified(&self, pool: &IoCtx, uuid: Uuid) -> Result<Option<SystemTime>, JournalError> {
        Ok(pool.modified(&self.object(uuid))?)
    }

    /// Adds the image's id to its entry: then it is complete. False if another
    /// controller has abandoned it meanwhile.
    pub fn complete(
        &self,
        pool: &IoCtx,
        uuid: Uuid,
        state: CreateState,
        id: &str,
    ) -> Result<bool, JournalError> {
        let op = WriteOp::new()
            .assert_exists()
            .compare(entry::CREATE_STATE, state.value())
            .set([(entry::IMAGE_ID, id)])
            .unset([entry::CREATE_STATE]);
        match pool.operate(&self.object(uuid), &op) {
            Ok(()) => Ok(true),
            Err(error) if error.is_mismatch() || error.is_not_found() => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Abandons this driver's attempt under a name, so that no controller can complete it;
    /// false if it is complete, or not this driver's.
    pub fn abandon(
        &self,
        journal: &IoCtx,
        pool: &IoCtx,
        name: &str,
        reserved: NameEntry,
    ) -> Result<bool, JournalError> {
        let uuid = reserved.uuid;
        let object = self.object(uuid);
        let mut has_name = true;
        let abandoned = (entry::CREATE_STATE, CreateState::Abandoned.value());
        // The name may be reserved before the journal has its entry.
        let first = WriteOp::new()
            .create()
            .set([(self.kind.name_key(), name), abandoned]);
        let begun = WriteOp::new()
            .compare(entry::IMAGE_ID, "")
            .compare(entry::CREATE_STATE, CreateState::UnderWay.value())
            .set([abandoned]);
        loop {
            match pool.operate(&object, &first) {
                Err(error) if error.is_exists() => {}
                // There is no entry, and a full pool has no room for one. Without its name
                // none can be made that counts ([`Self::enter`]).
                Err(error) if error.is_full() && has_name => {
                    self.remove_name(journal, name, reserved)?;
                    has_name = false;
                    continue;
                }
                Err(error) if error.is_full() => return Ok(true),
                result => return Ok(result.map(|()| true)?),
            }
            match pool.operate(&object, &begun) {
                Err(error) if error.is_mismatch() => {
                    let there = self.read(pool, uuid)?;
                    return Ok(there.is_none_or(|there| there.state == CreateState::Abandoned));
                }
                // Removed in between.
                Err(error) if error.is_not_found() => {}
                result => return Ok(result.map(|()| true)?),
            }
        }
    }

    /// Enters that the image of a complete entry is about to be deleted, or is not.
    pub fn mark_deleting(
        &self,
        pool: &IoCtx,
        uuid: Uuid,
        is_deleting: bool,
    ) -> Result<(), JournalError> {
        let op = WriteOp::new().assert_exists();
        let op = if is_deleting {
            op.set([(entry::DELETING, "1")])
        } else {
            op.unset([entry::DELETING])
        };
        Ok(pool.operate(&self.object(uuid), &op)?)
    }

    /// Removes a deleted volume or snapshot: the name, if it leads there, then the entry, of
    /// which ceph-csi may have written the keys to the journal's pool
    /// ([`read_from_other_pools`]).
    pub fn forget(
        &self,
        journal: &IoCtx,
        pool: &IoCtx,
        name: &str,
        reserved: NameEntry,
    ) -> Result<(), JournalError> {
        self.remove_name(journal, name, reserved)?;
        if journal.pool_id() != pool.pool_id() {
            self.remove_entry(journal, reserved.uuid)?;
        }
        self.remove_entry(pool, reserved.uuid)
    }

    /// Removes a name, if it leads there.
    pub fn remove_name(
        &self,
        journal: &IoCtx,
        name: &str,
        reserved: NameEntry,
    ) -> Result<(), JournalError> {
        let (key, value) = (self.key(name), reserved.to_string());
        let op = WriteOp::new().compare(&key, &value).unset([key.as_str()]);
        match journal.operate(&self.directory, &op) {
            // It was removed, or belongs to a newer reservation.
            Err(error) if !(error.is_mismatch() || error.is_not_found()) => Err(error.into()),
            _ => Ok(()),
        }
    }

    fn remove_entry(&self, pool: &IoCtx, uuid: Uuid) -> Result<(), JournalError> {
        Ok(or_missing(pool.remove(&self.object(uuid)))?)
    }
}

/// The entry of an image, if there is one.
pub fn read(
    kind: JournalKind,
    pool: &IoCtx,
    uuid: Uuid,
) -> Result<Option<JournalEntry>, JournalError> {
    let object = object_of(kind, uuid);
    let keys = match pool.omap_list(&object, "") {
        Ok(keys) => keys,
        Err(error) if error.is_not_found() => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mut entry = JournalEntry::from_keys(kind, keys).map_err(|(key, value)| {
        let object = format!("{pool}/{object}");
        let key = key.to_owned();
        JournalError::Corrupt { object, key, value }
    })?;
    if entry.image.is_empty() {
        entry.image = kind.image(None, uuid);
    }
    Ok(Some(entry))
}

/// The keys of an entry that has none in its image's pool. Where a class has its journal in
/// another pool than its images (`topologyConstrainedPools`), ceph-csi makes the entry in the
/// image's pool, and writes its keys to an object of the same name in the journal's pool, which
/// no handle names.
pub fn read_from_other_pools(
    kind: JournalKind,
    pool: &IoCtx,
    uuid: Uuid,
) -> Result<Option<JournalEntry>, JournalError> {
    let cluster = pool.cluster();
    let mut failed = None;
    for name in cluster.pools()? {
        let other = match cluster.ioctx(&*name, pool.namespace()) {
            // It was deleted.
            Err(error) if error.is_not_found() => continue,
            other => other?,
        };
        match read(kind, &other, uuid) {
            Ok(Some(entry)) if !entry.name.is_empty() => {
                return Ok(Some(JournalEntry {
                    journal_pool: Some(other.pool_id()),
                    ..entry
                }));
            }
            // No pool that this user may read is the journal's.
            Err(JournalError::Ceph(error)) if error.is_access_denied() => {}
            // Another pool may be the journal's.
            Err(error) => failed = Some(error),
            Ok(_) => {}
        }
    }
    failed.map_or(Ok(None), Err)
}

/// The object of a volume's entry.
pub(in crate::ceph) fn entry_of(uuid: Uuid) -> String {
    object_of(JournalKind::Volume, uuid)
}

fn object_of(kind: JournalKind, uuid: Uuid) -> String {
    format!("{}{uuid}", kind.prefix())
}

/// An object that is not there has no keys.
fn or_empty(
    keys: Result<BTreeMap<String, String>, CephError>,
) -> Result<BTreeMap<String, String>, CephError> {
    match keys {
        Err(error) if error.is_not_found() => Ok(BTreeMap::new()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "36eaa70e-eb63-11ea-8e79-246e96907f74";

    #[test]
    fn names_are_those_of_ceph_csi() {
        let uuid = Uuid::parse_str(UUID).unwrap();
        let volumes = Journal::new(JournalKind::Volume, "default");
        assert_eq!(volumes.directory, "csi.volumes.default");
        assert_eq!(volumes.key("pvc-1"), "csi.volume.pvc-1");
        assert_eq!(volumes.object(uuid), format!("csi.volume.{UUID}"));
        let snapshots = Journal::new(JournalKind::Snapshot, "b");
        assert_eq!(snapshots.directory, "csi.snaps.b");
        assert_eq!(snapshots.key("s"), "csi.snap.s");
        assert_eq!(snapshots.object(uuid), format!("csi.snap.{UUID}"));
        assert_eq!(
            JournalKind::Volume.image(None, uuid),
            format!("csi-vol-{UUID}")
        );
        assert_eq!(
            JournalKind::Snapshot.image(None, uuid),
            format!("csi-snap-{UUID}")
        );
        assert_eq!(
            JournalKind::Volume.image(Some("a-"), uuid),
            format!("a-{UUID}")
        );
    }
}
