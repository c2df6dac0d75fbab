//! Purging deleted images.
//!
//! The time to remove an image grows with its objects, and an image with clones cannot be
//! removed. So a delete moves it to the pool's trash, which takes milliseconds,
//! and answers; the trash is purged in the background. An image to purge is listed in the
//! pool, in the omap of [`LIST`] (image id → name), before it is moved, and removed from the
//! list if the move is refused: other images in the trash are left alone. So are those
//! that were moved there with an expiry time, listed or not, and those with a snapshot of a
//! user, until that is removed.
//!
//! Ceph's manager does the work, if it runs (`rbd task add trash remove`): it repeats what
//! fails, and survives this process. Else, and while a pool is full, this process does, and
//! removes an image with its last clone, if it is listed. [`TrashPurger::sweep`] retries the rest, at
//! the start and periodically.
//!
//! Each replica of a controller sweeps, and librbd does not expect two clients that remove
//! one image: one breaks the image's lock, and the cluster fences the other; librbd 16.2 may
//! even abort. So a replica leaves images alone that were moved a moment ago, which the
//! replica that moved them is about to remove, and removes others while it holds a lock on
//! the pool's list.

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, SystemTime},
};

use serde_json::json;

use super::{
    deletes::Deletes, error::RbdError, left_snapshots::sort_snapshots, pools::ManagerStatus,
};
use crate::{
    Kind,
    ceph::client::{
        CephError,
        connections::IDLE,
        or_exists, or_missing,
        rados::{IoCtx, WriteOp},
        rbd::{
            self, Image, LinkedImage, OpenMode,
            trash::{self, Trashed},
        },
    },
    error_chain,
    lane::Lanes,
};

/// The object that lists the images to purge.
const LIST: &str = "uring-csi.trash";
/// Entries listed at once.
const PAGE: u64 = 1000;
/// The lock on the list.
const LOCK: &str = "purge";

/// The intervals that keep replicas apart.
#[derive(Clone, Copy, Debug)]
pub struct PurgeTimes {
    /// An image that was moved to the trash is left to the replica that moved it for that
    /// long.
    pub settle: Duration,
    /// The lock on the list expires after that, if its replica has died. A removal that
    /// takes longer is protected by the image's own lock.
    pub lock: Duration,
    /// A pool that has been unused for that long, and has nothing to remove, is swept no more;
    /// its user's key is dropped.
    pub forget: Duration,
}

impl Default for PurgeTimes {
    fn default() -> Self {
        Self {
            settle: Duration::from_secs(10),
            lock: Duration::from_secs(15),
            forget: IDLE,
        }
    }
}

/// An image to be removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Discarded {
    pub id: String,
    pub name: String,
}

/// Purges the trash.
#[derive(Clone, Debug)]
pub struct TrashPurger {
    lanes: Lanes,
    pub times: PurgeTimes,
    /// The queue of each cluster, so that a slow cluster delays no other.
    queues: Arc<Mutex<HashMap<String, Queue>>>,
    /// The deletes under way, which have priority.
    pub deletes: Deletes,
    #[cfg(test)]
    pub panics: super::panic_once::PanicOnce,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<(IoCtx, Discarded)>,
    /// Whether a lane works on it.
    worked_on: bool,
    /// The images that wait or are being removed, by pool and id.
    known: HashSet<(i64, String, String)>,
}

impl TrashPurger {
    pub fn new(lanes: Lanes, times: PurgeTimes) -> Self {
        Self {
            lanes,
            times,
            queues: Arc::default(),
            deletes: Deletes::default(),
            #[cfg(test)]
            panics: super::panic_once::PanicOnce::default(),
        }
    }

    /// Moves images to the trash, to be purged soon. Images that are there already, or
    /// removed, are no error.
    pub fn discard(&self, pool: &IoCtx, images: &[Discarded]) -> Result<(), CephError> {
        if images.is_empty() {
            return Ok(());
        }
        match self.move_all(pool, images) {
            Err(error) if error.is_full() => {
                force_objects(pool)?;
                self.move_all(pool, images)
            }
            moved => moved,
        }
    }

    fn move_all(&self, pool: &IoCtx, images: &[Discarded]) -> Result<(), CephError> {
        let list: Vec<_> = images
            .iter()
            .map(|image| (image.id.as_str(), image.name.as_str()))
            .collect();
        pool.omap_set(LIST, &list)?;
        for image in images {
            let moved = or_missing(trash::move_image(pool, &image.name, Duration::ZERO));
            if let Err(error) = moved {
                keep(pool, images)?;
                return Err(error);
            }
        }
        for image in images {
            self.add(pool, image.clone());
        }
        Ok(())
    }

    /// Runs [`TrashPurger::sweep`] in the background.
    pub fn sweep_soon(&self, pool: &IoCtx) {
        let (purger, pool) = (self.clone(), pool.clone());
        let name = format!("trash of {pool}");
        drop(self.lanes.run(&name, "sweep", move || {
            if let Err(error) = purger.sweep(&pool) {
                tracing::warn!(error = error_chain(&error), "cannot purge the trash now");
            }
        }));
    }

    /// Queues the images that are listed in a pool; false: none is.
    pub fn sweep(&self, pool: &IoCtx) -> Result<bool, CephError> {
        let (mut after, mut any) = (String::new(), false);
        loop {
            let page = match pool.omap_page(LIST, &after, "", PAGE) {
                Err(error) if error.is_not_found() => return Ok(any),
                page => page?,
            };
            any |= !page.entries.is_empty();
            for (id, name) in page.entries.clone() {
                let image = Discarded { id, name };
                if self.is_left(pool, &image)? {
                    self.add(pool, image);
                }
            }
            match page.entries.last_key_value() {
                Some((id, _)) if page.more => after.clone_from(id),
                _ => return Ok(any),
            }
        }
    }

    /// Whether no replica is about to purge an image. Completes the move of one that has
    /// lost its name: the process that moved it may have been killed at that moment.
    fn is_left(&self, pool: &IoCtx, image: &Discarded) -> Result<bool, CephError> {
        let trashed = match trash::get(pool, &image.id) {
            Err(error) if error.is_not_found() => return Ok(true),
            trashed => trashed?,
        };
        // The clocks of replicas differ by less.
        let since = SystemTime::now().duration_since(trashed.deleted);
        if since.unwrap_or_default() < self.times.settle {
            return Ok(false);
        }
        if !has_name(pool, image)? {
            trash::complete_move(pool, &trashed)?;
        }
        Ok(true)
    }

    /// How many images wait or are being removed.
    pub fn pending(&self) -> usize {
        self.lock().values().map(|queue| queue.known.len()).sum()
    }

    fn add(&self, pool: &IoCtx, image: Discarded) {
        let cluster = pool.cluster().fsid().to_owned();
        let begin = {
            let mut queues = self.lock();
            let queue = queues.entry(cluster.clone()).or_default();
            if !queue.known.insert(key(pool, &image)) {
                return;
            }
            queue.waiting.push_back((pool.clone(), image));
            !std::mem::replace(&mut queue.worked_on, true)
        };
        if begin {
            let purger = self.clone();
            let name = format!("trash of {cluster}");
            // It runs even if the caller has ended.
            drop(
                self.lanes
                    .run(&name, "empty", move || purger.work(&cluster)),
            );
        }
    }

    /// Purges until nothing waits.
    fn work(&self, cluster: &str) {
        let mut manager: Option<ManagerStatus> = None;
        loop {
            let next = {
                let mut queues = self.lock();
                let queue = queues.get_mut(cluster).expect("it was added to");
                let next = queue.waiting.pop_front();
                if next.is_none() {
                    queues.remove(cluster);
                }
                next
            };
            let Some((pool, image)) = next else { return };
            let _removal = RunningRemoval {
                purger: self,
                cluster,
                key: key(&pool, &image),
            };
            self.deletes.pass();
            #[cfg(test)]
            self.panics.maybe();
            let known = manager.take().filter(|known| !known.is_old());
            let manager =
                manager.insert(known.unwrap_or_else(|| ManagerStatus::of(pool.cluster())));
            let emptied = self.empty(&pool, &image, manager.works());
            match emptied {
                Ok(Some((pool, parent))) => self.add(&pool, parent),
                Ok(None) => {}
                Err(error @ RbdError::Snapshotted { .. }) => {
                    tracing::warn!(%error, "cannot remove an image from the trash");
                }
                Err(error) => {
                    let is_busy = error.kind() == Kind::InUse;
                    let users = is_busy.then(|| users(&pool, &image.id));
                    let (name, error) = (&image.name, error_chain(&error));
                    tracing::info!(
                        image = name,
                        error,
                        users,
                        "cannot remove an image from the trash yet"
                    );
                }
            }
        }
    }

    /// [`empty`], under the lock; where another replica has it, a later sweep does.
    pub(super) fn empty(
        &self,
        pool: &IoCtx,
        image: &Discarded,
        manager: bool,
    ) -> Result<Option<(IoCtx, Discarded)>, RbdError> {
        let Some(_lock) = pool.try_lock(LIST, LOCK, "", self.times.lock)? else {
            tracing::debug!(image = image.name, "another replica purges the trash");
            return Ok(None);
        };
        empty(pool, image, manager)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Queue>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The removal of an image, until this is dropped. If it panics, nothing works on the queue
/// any more: then the queue is dropped, and the next sweep fills another.
struct RunningRemoval<'a> {
    purger: &'a TrashPurger,
    cluster: &'a str,
    key: (i64, String, String),
}

impl Drop for RunningRemoval<'_> {
    fn drop(&mut self) {
        let mut queues = self.purger.lock();
        if thread::panicking() {
            queues.remove(self.cluster);
        } else if let Some(queue) = queues.get_mut(self.cluster) {
            queue.known.remove(&self.key);
        }
    }
}

/// The images that are listed to be removed from a pool's trash: id → name.
pub fn listed(pool: &IoCtx) -> Result<BTreeMap<String, String>, CephError> {
    match pool.omap_list(LIST, "") {
        Err(error) if error.is_not_found() => Ok(BTreeMap::new()),
        listed => listed,
    }
}

fn key(pool: &IoCtx, image: &Discarded) -> (i64, String, String) {
    (
        pool.pool_id(),
        pool.namespace().to_owned(),
        image.id.clone(),
    )
}

/// Makes the objects that a move writes to. A full pool has no room for objects, and changes
/// those that exist; these two have only the keys of deleted images, and without them no delete
/// could make room.
fn force_objects(pool: &IoCtx) -> Result<(), CephError> {
    or_exists(pool.operate(LIST, &WriteOp::new().create().forced()))?;
    trash::prepare(pool)
}

/// After a refusal: removes images that still have their names from the list, since they
/// are in use, and would be purged if they were moved to the trash later. A repeat finds
/// what a move without an answer has done.
fn keep(pool: &IoCtx, images: &[Discarded]) -> Result<(), CephError> {
    for image in images {
        if rbd::image_id(pool, &image.name)?.as_ref() == Some(&image.id) {
            pool.omap_remove(LIST, &[&image.id])?;
        }
    }
    Ok(())
}

fn has_name(pool: &IoCtx, image: &Discarded) -> Result<bool, CephError> {
    pool.exists(&format!("rbd_id.{}", image.name))
}

/// Removes an image, or has the manager do so, and removes it from the list. Returns the
/// image that may be removable now.
fn empty(
    pool: &IoCtx,
    image: &Discarded,
    manager: bool,
) -> Result<Option<(IoCtx, Discarded)>, RbdError> {
    let trashed = match trash::get(pool, &image.id) {
        Ok(trashed) => trashed,
        Err(error) if error.is_not_found() => {
            // It was removed; or a delete has listed it and not moved it yet, and it has its
            // name: then that delete, or its repeat, moves it.
            if !has_name(pool, image)? {
                pool.omap_remove(LIST, &[&image.id])?;
            }
            return Ok(None);
        }
        Err(error) => return Err(error.into()),
    };
    let mut freed = None;
    if !trashed.has_expiry() {
        let parent = bare(pool, &trashed)?;
        let task = json!({
            "prefix": "rbd task add trash remove",
            "image_id_spec": format!("{pool}/{}", image.id),
        });
        if !(manager && ask_manager(pool, &task)?) {
            // librbd forces the removal of an image that another client has locked, too.
            let early = trashed.deferred_until > SystemTime::now();
            freed = remove(pool, &image.id, early, parent)?;
        }
    }
    pool.omap_remove(LIST, &[&image.id])?;
    Ok(freed)
}

/// Removes what would prevent the removal of an image; returns its parent.
fn bare(pool: &IoCtx, trashed: &Trashed) -> Result<Option<LinkedImage>, RbdError> {
    match Image::open_by_id(pool, &trashed.id, OpenMode::ReadOnly) {
        Ok(image) => {
            let parent = image.parent()?.map(|parent| parent.image);
            drop_snapshots(pool, trashed, image)?;
            Ok(parent)
        }
        // Half removed: then it has neither.
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Removes an image; returns its parent, if that is to be purged, too.
fn remove(
    pool: &IoCtx,
    id: &str,
    force: bool,
    parent: Option<LinkedImage>,
) -> Result<Option<(IoCtx, Discarded)>, CephError> {
    or_missing(trash::remove(pool, id, force))?;
    let Some(parent) = parent.filter(|parent| parent.in_trash) else {
        return Ok(None);
    };
    let pool = pool.cluster().ioctx(parent.pool_id, &parent.namespace)?;
    let name = match pool.omap_get(LIST, &[&parent.id]) {
        Err(error) if error.is_not_found() => None,
        listed => listed?.remove(&parent.id),
    };
    let id = parent.id;
    Ok(name.map(|name| (pool, Discarded { id, name })))
}

/// The addresses of an image's watchers, for the log.
fn users(pool: &IoCtx, id: &str) -> String {
    let opened = Image::open_by_id(pool, id, OpenMode::ReadOnly);
    let watchers = opened.and_then(|image| image.watchers());
    let watchers = watchers.unwrap_or_default().into_iter();
    let addresses: Vec<_> = watchers.map(|one| one.address).collect();
    addresses.join(", ")
}

/// An interrupted copy leaves its snapshot on its source, by which the source
/// could never be removed. Nothing needs it once the volume is deleted. Any other snapshot is
/// a user's, and keeps the image.
fn drop_snapshots(pool: &IoCtx, trashed: &Trashed, image: Image) -> Result<(), RbdError> {
    let (left, others) = sort_snapshots(pool, &trashed.name, &image)?;
    drop(image);
    if !others.is_empty() {
        return Err(RbdError::Snapshotted {
            pool: pool.to_string(),
            image: trashed.name.clone(),
            id: trashed.id.clone(),
            snapshots: others.join(", "),
        });
    }
    if left.is_empty() {
        return Ok(());
    }
    let image = Image::open_by_id(pool, &trashed.id, OpenMode::ReadWrite)?;
    for snapshot in left {
        or_missing(image.snapshot_remove(&snapshot))?;
    }
    Ok(())
}

/// Adds a task to the manager; false if the manager refuses it. Without an answer it may still
/// carry the task out: then this fails, since no other client may work on the image meanwhile.
pub fn ask_manager(pool: &IoCtx, task: &serde_json::Value) -> Result<bool, CephError> {
    match pool.cluster().mgr_command(task) {
        Ok(_) => Ok(true),
        Err(error) if error.is_unanswered() => Err(error),
        Err(error) => {
            let (task, error) = (task.to_string(), error_chain(&error));
            tracing::debug!(task, error, "the manager refuses a task");
            Ok(false)
        }
    }
}
