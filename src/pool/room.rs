//! The room of a pool for new volumes and for growth: its free space less the unwritten
//! bytes of its sparse images and of the copies under way.

use std::{
    collections::BTreeMap,
    io,
    os::unix::fs::MetadataExt as _,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
};

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, utimensat};
use serde::Deserialize;

use super::{Pool, PoolError, draft::Draft};

/// The room of a pool, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Bytes of the file system.
    pub size: u64,
    /// Free bytes of the file system.
    pub free: u64,
    /// Bytes of images, and of copies that this process makes, that are not written yet.
    pub promised: u64,
}

impl Room {
    /// Bytes for new volumes and growth.
    pub fn available(self) -> u64 {
        self.free.saturating_sub(self.promised)
    }
}

/// The bytes of copies under way, by their drafts.
static PROMISES: Mutex<BTreeMap<PathBuf, u64>> = Mutex::new(BTreeMap::new());

fn promises() -> MutexGuard<'static, BTreeMap<PathBuf, u64>> {
    PROMISES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Room that a copy is to take, until this is dropped: what its draft has not taken yet counts
/// as promised. Only this process counts it.
#[derive(Debug)]
pub struct RoomPromise {
    draft: PathBuf,
}

impl Drop for RoomPromise {
    fn drop(&mut self) {
        promises().remove(&self.draft);
    }
}

impl Pool {
    /// Promises a copy so many bytes of room. The caller holds [`Pool::lock_room`], as for an
    /// image.
    pub fn promise_room(&self, draft: &Draft, bytes: u64) -> RoomPromise {
        let draft = self.meta_path("tmp").join(draft.id());
        promises().insert(draft.clone(), bytes);
        RoomPromise { draft }
    }

    /// The bytes of copies that are not written yet.
    fn promised_to_copies(&self) -> Result<u64, PoolError> {
        let tmp = self.meta_path("tmp");
        // A look at a draft may hang with its pool, and must not delay other pools.
        let of_pool: Vec<_> = promises()
            .range(tmp.clone()..)
            .take_while(|(draft, _)| draft.starts_with(&tmp))
            .map(|(draft, bytes)| (draft.clone(), *bytes))
            .collect();
        let mut promised = 0_u64;
        for (draft, bytes) in of_pool {
            let unwritten = match std::fs::metadata(&draft) {
                Ok(found) => bytes.saturating_sub(found.blocks() * 512),
                // It has ended.
                Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
                Err(error) => return Err(self.io("look at", &draft, error)),
            };
            promised = promised.saturating_add(unwritten);
        }
        Ok(promised)
    }

    /// The room of this pool. Counts every image, also of static volumes; blocks that
    /// reflinked images share count in each.
    pub fn room(&self) -> Result<Room, PoolError> {
        let failed = |step| move |error| self.io(step, &self.dir, error);
        let mut promised = self.promised_to_copies()?;
        for entry in std::fs::read_dir(&self.dir).map_err(failed("list"))? {
            let entry = entry.map_err(failed("list"))?;
            match entry.metadata() {
                // st_blocks counts 512 bytes each, whatever the file system (stat(2)).
                Ok(found) if found.is_file() => {
                    let unwritten = found.len().saturating_sub(found.blocks() * 512);
                    promised = promised.saturating_add(unwritten);
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(self.io("look at", &entry.path(), error)),
            }
        }
        // Last: what is written meanwhile lowers both, and counts as promised still. Read
        // first, it would count as free as well, and be given away.
        let fs = self.statvfs()?;
        Ok(Room {
            size: fs.f_blocks.saturating_mul(fs.f_frsize),
            free: fs.f_bavail.saturating_mul(fs.f_frsize),
            promised,
        })
    }

    /// Serializes allocations of room in this process. A caller holds it from reading the room
    /// until the image has its size; without it two at once would take the same room. Each
    /// pool has a lock of its own, so a pool that hangs blocks no other.
    pub fn lock_room(&self) -> MutexGuard<'static, ()> {
        static LOCKS: Mutex<BTreeMap<PathBuf, &Mutex<()>>> = Mutex::new(BTreeMap::new());
        let mut locks = LOCKS.lock().unwrap_or_else(PoisonError::into_inner);
        let lock = *locks
            .entry(self.dir.clone())
            // One lock for each configured pool, for the life of the process.
            .or_insert_with(|| Box::leak(Box::default()));
        drop(locks);
        lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the times of the pool's directory. A growth changes only the image's own times, so
    /// it calls this afterwards, for a controller that keeps a count of the room
    /// (`provision::images::room_counts`). Where it fails, that count becomes true in a few
    /// minutes by itself.
    pub fn mark_grown(&self) {
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_NOW,
        };
        let times = Timestamps {
            last_access: now,
            last_modification: now,
        };
        if let Err(error) = utimensat(CWD, &self.dir, &times, AtFlags::empty()) {
            tracing::debug!(pool = self.name, %error, "the pool's directory keeps its times");
        }
    }

    /// Fails ([`PoolError::NoRoomToGrow`]) where the pool has no room for an image to grow by
    /// `more` bytes, by the controller's rule: a volume of a class with `overcommit` may
    /// exceed the room. The caller holds [`Pool::lock_room`].
    pub fn refuse_growth_without_room(&self, image: &str, more: u64) -> Result<(), PoolError> {
        let available = self.room()?.available();
        if more <= available || self.is_overcommitted(image)? {
            return Ok(());
        }
        Err(PoolError::NoRoomToGrow {
            pool: self.name.clone(),
            image: image.to_owned(),
            more,
            available,
        })
    }

    /// Whether the class of the image's volume has `overcommit`, by the controller's record
    /// of the volume; `false` without one.
    fn is_overcommitted(&self, image: &str) -> Result<bool, PoolError> {
        let id = image.strip_suffix(".img").unwrap_or(image);
        let path = self.meta_path("volumes").join(format!("{id}.json"));
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(self.io("read", &path, error)),
        };
        let record: CatalogueRecord =
            serde_json::from_slice(&text).map_err(|error| self.io("read", &path, error))?;
        Ok(record.detail.parameters.overcommit)
    }
}

/// The fields that a node reads of the controller's record of a volume
/// (`provision::images::catalogue`).
#[derive(Deserialize)]
struct CatalogueRecord {
    detail: Detail,
}

#[derive(Deserialize)]
struct Detail {
    parameters: CatalogueParameters,
}

#[derive(Deserialize)]
struct CatalogueParameters {
    #[serde(default)]
    overcommit: bool,
}
