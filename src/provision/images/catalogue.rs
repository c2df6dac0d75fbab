//! The catalogue of a pool: its volumes and snapshots, by name and id.
//!
//! ```text
//! names/<sha256 of the name>.json   the reservation: name and id
//! volumes/<id>.json                 the record: the volume is complete
//! ```
//!
//! and `snapnames/`, `snapshots/`, `groupnames/`, `groups/` in the same way. The reservation is written
//! first, then the record as `making`, and only then the image gets its name; a
//! delete marks the record, and removes it last. So the state after a crash
//! shows how far it came:
//!
//! | reservation | record   | image | it was            | and is               |
//! | ---         | ---      | ---   | ---               | ---                  |
//! | yes         | no       | no    | being made        | undone               |
//! | any         | making   | any   | being made        | deleted              |
//! | any         | ready    | any   | complete          | left alone           |
//! | any         | deleting | any   | being deleted     | deleted              |
//! | yes         | no       | yes   | without its       | left alone, reported |
//! |             |          |       | record            |                      |
//!
//! No step of this driver leads to the last line: the record was removed by hand, or the
//! file system lost it, and the image may be in use on any node.
//!
//! A create or delete holds its reservation under flock(2), so that a second controller
//! waits and a start distinguishes calls under way from interrupted ones. A file with invalid
//! content is an error that names it; it is never removed.
//!
//! NFS may lose that lock while its holder stalls or is cut off, and the holder may resume at
//! any time. So no create continues under the reservation of another: it removes it and makes
//! one with a new id. All that has an id is of one create alone, which looks whether the
//! reservation is still its own before it records the entry as complete. Only that record
//! makes an id known, so what has it is not undone any more.

use std::{
    ffi::OsStr,
    fs::{self, DirEntry, File},
    io,
    marker::PhantomData,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use uuid::Uuid;

use super::{super::ProvisionError, ImageStore};
use crate::{
    Done, digest,
    pool::{
        Pool,
        draft::{self, Draft, Durability::Durable},
    },
};

/// A kind of entry: volume or snapshot.
pub trait EntryKind: Serialize + DeserializeOwned {
    /// The directory of the reservations.
    const NAMES: &str;
    /// The directory of the records.
    const RECORDS: &str;
    /// Whether nodes attach it, so that claims are checked.
    const IS_CLAIMED: bool;
    /// Whether an NBD server exports it, so that claims do not show its users.
    fn is_exported(&self) -> bool;
    /// The path of the image of `id`.
    fn image(pool: &Pool, id: Uuid) -> PathBuf;
    /// Deletes the entries that belong to this one, before it is erased.
    fn delete_members(&self, _: &ImageStore, _: &Pool) -> Result<(), ProvisionError> {
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EntryState {
    /// Being made: no caller and no node knows it yet.
    Making,
    /// Complete.
    Ready,
    /// Being deleted: for callers it is gone.
    Deleting,
}

/// A record.
#[derive(Debug, Serialize, Deserialize)]
pub struct CatalogueEntry<K> {
    /// Part of its handle; increases with time, so that listings keep an order.
    pub id: Uuid,
    /// The name of the request that made it.
    pub name: String,
    pub state: EntryState,
    /// The fields of this kind.
    pub detail: K,
}

/// A reservation, which maps a name to an id.
#[derive(Debug, Serialize, Deserialize)]
struct Reservation {
    name: String,
    id: Uuid,
}

/// A reservation that this process has locked.
#[derive(Debug)]
pub struct ReservationLock {
    /// The id that belongs to the name.
    pub id: Uuid,
    /// Whether this call made it.
    pub is_new: bool,
    path: PathBuf,
    /// The reservation, locked.
    lock: File,
}

impl ReservationLock {
    /// Removes a reservation under which nothing was made.
    pub fn abandon(&self) -> Result<(), ProvisionError> {
        if self.is_there()? {
            let _ = remove(&self.path)?;
        }
        Ok(())
    }

    /// Fails if another controller has taken the name, as after NFS lost the lock.
    pub fn refuse_lost(&self, name: &str) -> Result<(), ProvisionError> {
        if self.is_there()? {
            return Ok(());
        }
        Err(ProvisionError::Busy(name.to_owned()))
    }

    /// Whether the name has still this reservation. Read anew: NFS keeps attributes for a
    /// while.
    fn is_there(&self) -> Result<bool, ProvisionError> {
        let there = read::<Reservation>(&self.path)?;
        Ok(there.is_some_and(|there| there.id == self.id))
    }

    /// Unlocks it, as NFS may behind its owner's back.
    #[cfg(test)]
    pub fn lose(&self) {
        self.lock.unlock().unwrap();
    }
}

impl Drop for ReservationLock {
    /// Unlocks it at once. A child that another thread has forked shares the lock until it
    /// executes its program.
    fn drop(&mut self) {
        if let Err(error) = self.lock.unlock() {
            tracing::warn!(reservation = %self.path.display(), %error, "cannot unlock");
        }
    }
}

/// One kind's part of a pool's catalogue.
#[derive(Debug)]
pub struct Catalogue<'p, K> {
    pool: &'p Pool,
    kind: PhantomData<K>,
}

impl<'p, K: EntryKind> Catalogue<'p, K> {
    /// That of a pool.
    pub fn of(pool: &'p Pool) -> Self {
        let kind = PhantomData;
        Self { pool, kind }
    }

    /// The record of an id.
    pub fn get(&self, id: Uuid) -> Result<Option<CatalogueEntry<K>>, ProvisionError> {
        self.pool.open_dir()?;
        read(&self.record(id))
    }

    /// The record of an id, unless it is being deleted.
    pub fn ready(&self, id: Uuid) -> Result<Option<CatalogueEntry<K>>, ProvisionError> {
        let entry = self.get(id)?;
        Ok(entry.filter(|entry| entry.state == EntryState::Ready))
    }

    /// The complete entry of a name, without locking it.
    pub fn by_name(&self, name: &str) -> Result<Option<CatalogueEntry<K>>, ProvisionError> {
        self.pool.check_scope()?;
        match read::<Reservation>(&self.reservation(name))? {
            Some(reservation) => self.ready(reservation.id),
            None => Ok(None),
        }
    }

    /// The ids of all records, in the order of their making.
    pub fn ids(&self) -> Result<Vec<Uuid>, ProvisionError> {
        self.pool.check_scope()?;
        let mut ids = list(&self.pool.meta_path(K::RECORDS), |entry| {
            id_of(&entry.file_name())
        })?;
        ids.sort_unstable();
        Ok(ids)
    }

    /// Every name's reservation.
    pub fn reservations(&self) -> Result<Vec<PathBuf>, ProvisionError> {
        self.pool.check_scope()?;
        list(&self.pool.meta_path(K::NAMES), |entry| Some(entry.path()))
    }

    /// Locks a name's reservation, making it if there is none.
    pub fn reserve(&self, name: &str) -> Result<ReservationLock, ProvisionError> {
        self.pool.meta_dir(K::NAMES)?;
        let tmp = self.pool.meta_dir("tmp")?;
        let path = self.reservation(name);
        loop {
            if let Some(held) = self.hold(name)? {
                return Ok(held);
            }
            let id = Uuid::now_v7();
            let reservation = Reservation {
                name: name.to_owned(),
                id,
            };
            let placed = Draft::new(&tmp).and_then(|draft| {
                serde_json::to_writer(draft.file(), &reservation)?;
                draft.place_new_locked(&path)
            });
            if let Some(lock) = placed.map_err(|e| failed("write", &path, e))? {
                return Ok(ReservationLock {
                    id,
                    is_new: true,
                    path,
                    lock,
                });
            }
        }
    }

    /// Locks a name's reservation if there is one.
    pub fn hold(&self, name: &str) -> Result<Option<ReservationLock>, ProvisionError> {
        let path = self.reservation(name);
        let held = hold_at(&path)?;
        if let Some((_, reservation)) = &held
            && reservation.name != name
        {
            let source = serde::de::Error::custom(format!("it is for {:?}", reservation.name));
            return Err(ProvisionError::Corrupt { path, source });
        }
        Ok(held.map(|(held, _)| held))
    }

    /// Records that `entry` is being made, complete, or being deleted. The last needs no room.
    pub fn record_as(&self, entry: &CatalogueEntry<K>) -> Result<(), ProvisionError> {
        let tmp = self.pool.meta_dir("tmp")?;
        self.pool.meta_dir(K::RECORDS)?;
        let path = self.record(entry.id);
        let bytes = serde_json::to_vec_pretty(entry).expect("a record is plain data");
        let recorded = match entry.state {
            EntryState::Deleting => {
                let written = Draft::written(&tmp, &self.pool.spares(), |_| bytes.clone());
                written.and_then(|draft| draft.replace(&path))
            }
            EntryState::Making | EntryState::Ready => {
                draft::replace(&tmp, &path, &bytes, Durable).map(drop)
            }
        };
        recorded.map_err(|e| failed("write", &path, e))
    }

    /// Undoes a create that has no record: before it was written, or another controller has
    /// removed it.
    pub fn undo_unrecorded(&self, held: &ReservationLock) -> Result<(), ProvisionError> {
        self.remove_image(held.id, "its creation failed")?;
        held.abandon()
    }

    /// Refuses an image without a record: it may be in use, and its owner is unknown.
    pub fn refuse_unrecorded(&self, held: &ReservationLock) -> Result<(), ProvisionError> {
        let image = K::image(self.pool, held.id);
        match fs::symlink_metadata(&image) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(failed("look at", &image, e)),
            Ok(_) => Err(ProvisionError::Unrecorded {
                image,
                record: self.record(held.id),
                reservation: held.path.clone(),
            }),
        }
    }

    /// Removes all that belongs to an entry marked as being deleted. `held` is
    /// its reservation, unless that is gone or belongs to another entry; `why` is for the
    /// log.
    pub fn erase(
        &self,
        entry: &CatalogueEntry<K>,
        held: Option<&ReservationLock>,
        why: &str,
    ) -> Result<(), ProvisionError> {
        self.remove_image(entry.id, why)?;
        if let Some(held) = held.filter(|held| held.id == entry.id) {
            held.abandon()?;
        }
        let record = self.record(entry.id);
        let removed = draft::remove_or_give_back(&record, &self.pool.spares());
        removed.map(drop).map_err(|e| failed("remove", &record, e))
    }

    fn remove_image(&self, id: Uuid, why: &str) -> Result<(), ProvisionError> {
        let image = K::image(self.pool, id);
        if remove(&image)? == Done::Now {
            tracing::info!(image = %image.display(), why, "deleted an image");
        }
        Ok(())
    }

    /// The path of the record of an id.
    pub fn record(&self, id: Uuid) -> PathBuf {
        self.pool.meta_path(K::RECORDS).join(format!("{id}.json"))
    }

    fn reservation(&self, name: &str) -> PathBuf {
        let digest = digest::sha256_hex(name);
        self.pool.meta_path(K::NAMES).join(format!("{digest}.json"))
    }
}

/// Locks a reservation: it and the name in it. None where there is none.
pub fn hold_by_path(path: &Path) -> Result<Option<ReservationLock>, ProvisionError> {
    Ok(hold_at(path)?.map(|(held, _)| held))
}

fn hold_at(path: &Path) -> Result<Option<(ReservationLock, Reservation)>, ProvisionError> {
    loop {
        let lock = match draft::open_to_lock(path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(failed("open", path, e)),
        };
        if !draft::try_lock(&lock).map_err(|e| failed("lock", path, e))? {
            let name = read::<Reservation>(path)?.map(|reservation| reservation.name);
            return Err(ProvisionError::Busy(name.unwrap_or_default()));
        }
        // The process that held the lock may have removed it.
        if !draft::is_at(&lock, path) {
            continue;
        }
        return Ok(read::<Reservation>(path)?.map(|reservation| {
            let held = ReservationLock {
                id: reservation.id,
                is_new: false,
                path: path.to_owned(),
                lock,
            };
            (held, reservation)
        }));
    }
}

/// The id in a record's file name, unless the file is something else.
fn id_of(file_name: &OsStr) -> Option<Uuid> {
    let stem = file_name.to_str()?.strip_suffix(".json")?;
    Uuid::try_parse(stem).ok()
}

/// What `keep` makes of the entries of a directory, which may be missing.
fn list<T>(dir: &Path, keep: impl Fn(&DirEntry) -> Option<T>) -> Result<Vec<T>, ProvisionError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(failed("list", dir, e)),
    };
    entries
        .filter_map(|entry| match entry {
            Ok(entry) => keep(&entry).map(Ok),
            Err(e) => Some(Err(failed("list", dir, e))),
        })
        .collect()
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, ProvisionError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(failed("read", path, e)),
    };
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|source| ProvisionError::Corrupt {
            path: path.to_owned(),
            source,
        })
}

fn remove(path: &Path) -> Result<Done, ProvisionError> {
    draft::remove(path, Durable).map_err(|e| failed("remove", path, e))
}

/// A [`ProvisionError::Io`].
pub fn failed(step: &'static str, path: &Path, source: io::Error) -> ProvisionError {
    ProvisionError::Io {
        step,
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_ends_with_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("name.json");
        let id = Uuid::now_v7();
        let reservation = serde_json::json!({ "name": "a", "id": id });
        fs::write(&path, reservation.to_string()).unwrap();
        let held = hold_by_path(&path).unwrap().unwrap();
        assert_eq!(held.id, id);
        let busy = hold_by_path(&path);
        assert!(matches!(busy, Err(ProvisionError::Busy(name)) if name == "a"));
        let _of_a_child = held.lock.try_clone().unwrap();
        drop(held);
        assert!(hold_by_path(&path).unwrap().is_some());
    }
}
