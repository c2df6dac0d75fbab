//! The copies of images that are under way: how many at once, and how far each is.
//!
//! Only copies of data count; one by reference takes no time. A gate lets so many copies of
//! the controller run at once, whichever their pools, and the others wait for a permit. With
//! several pools no pool gets all permits, and a copy that makes no progress loses its own,
//! so a pool that hangs delays no copy in another one.
//!
//! All of it is kept in memory: a copy ends with its process, and the next equal call makes
//! it anew.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use super::super::ProvisionError;
use crate::{
    admission::{Bounds, Gate, Permit},
    lane::{self, WaitGuard},
    size::human_bytes,
};

/// The copies of a controller. Clones share them.
#[derive(Clone, Debug)]
pub struct Copies(Arc<CopiesInner>);

#[derive(Debug)]
struct CopiesInner {
    gate: Gate,
    last: AtomicU64,
    under_way: Mutex<BTreeMap<u64, Arc<CopyState>>>,
    /// Bytes of images copied since the start, holes included.
    copied: AtomicU64,
}

/// The kind of what a copy makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyKind {
    Volume,
    Snapshot,
}

/// What a copy makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyTarget {
    pub kind: CopyKind,
    /// The name in the request.
    pub name: String,
    /// The handle that it will have. CSI does not list it before it is complete.
    pub handle: String,
    /// The handle of the volume or snapshot that is copied.
    pub source: String,
    pub pool: String,
}

#[derive(Debug)]
struct CopyState {
    target: CopyTarget,
    bytes: u64,
    copied: AtomicU64,
    begun: OnceLock<Instant>,
}

/// How far a copy is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyProgress {
    pub target: CopyTarget,
    /// The bytes of the image that are done, holes included.
    pub copied: u64,
    /// The size of the image.
    pub bytes: u64,
    /// The time since it has its permit; none: it waits for one.
    pub age: Option<Duration>,
}

impl Copies {
    /// At most `max` at once, in so many pools.
    pub fn new(max: usize, pools: usize) -> Self {
        let bounds = Bounds::new("copy", "--max-copies", max, WITHOUT_PROGRESS);
        let share = if pools > 1 { bounds.share } else { max };
        Self(Arc::new(CopiesInner {
            gate: Gate::new(Bounds { share, ..bounds }),
            last: AtomicU64::default(),
            under_way: Mutex::default(),
            copied: AtomicU64::default(),
        }))
    }

    /// Waits, on a lane, until the copy may run. Dropping the result ends the copy.
    pub fn begin(&self, target: CopyTarget, bytes: u64) -> Result<RunningCopy, ProvisionError> {
        let entry = CopyEntry {
            copies: self.clone(),
            id: self.0.last.fetch_add(1, Relaxed),
            state: Arc::new(CopyState {
                target,
                bytes,
                copied: AtomicU64::default(),
                begun: OnceLock::new(),
            }),
        };
        self.under_way().insert(entry.id, Arc::clone(&entry.state));
        let waits = lane::waiting_for(self.0.gate.describe());
        let permit = self.0.gate.enter_on_lane(&entry.state.target.pool)?;
        let _ = entry.state.begun.set(Instant::now());
        Ok(RunningCopy {
            entry,
            permit,
            _waits: waits,
        })
    }

    /// The copies that run or wait, in the order of their calls. Does not block.
    pub fn list(&self) -> Vec<CopyProgress> {
        let progress = |state: &Arc<CopyState>| CopyProgress {
            target: state.target.clone(),
            copied: state.copied.load(Relaxed),
            bytes: state.bytes,
            age: state.begun.get().map(Instant::elapsed),
        };
        self.under_way().values().map(progress).collect()
    }

    /// Bytes of images copied since the start, holes included.
    pub fn copied(&self) -> u64 {
        self.0.copied.load(Relaxed)
    }

    /// The gate of copies.
    pub fn gate(&self) -> &Gate {
        &self.0.gate
    }

    fn under_way(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<CopyState>>> {
        (self.0.under_way.lock()).unwrap_or_else(PoisonError::into_inner)
    }
}

/// A copy in the list, until it is dropped.
#[derive(Debug)]
struct CopyEntry {
    copies: Copies,
    id: u64,
    state: Arc<CopyState>,
}

impl Drop for CopyEntry {
    fn drop(&mut self) {
        self.copies.under_way().remove(&self.id);
    }
}

/// A copy that runs, until it is dropped.
#[derive(Debug)]
pub struct RunningCopy {
    entry: CopyEntry,
    permit: Permit,
    _waits: WaitGuard,
}

impl RunningCopy {
    /// So many more bytes are done; from any thread.
    pub fn advance(&self, bytes: u64) {
        let CopyEntry { copies, state, .. } = &self.entry;
        state.copied.fetch_add(bytes, Relaxed);
        copies.0.copied.fetch_add(bytes, Relaxed);
        self.permit.renew();
    }

    /// Reports the progress to a call that waits; on the lane of the copy.
    pub fn report(&self) {
        let state = &self.entry.state;
        let copied = human_bytes(state.copied.load(Relaxed));
        let bytes = human_bytes(state.bytes);
        lane::now_waiting_for(format!("the copy of its data, {copied} of {bytes} so far"));
    }
}

/// How long a copy keeps its permit without progress.
const WITHOUT_PROGRESS: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    fn target(pool: &str, name: &str) -> CopyTarget {
        CopyTarget {
            kind: CopyKind::Volume,
            name: name.to_owned(),
            handle: name.to_owned(),
            source: "source".to_owned(),
            pool: pool.to_owned(),
        }
    }

    #[test]
    fn copies_above_the_limit_wait_and_one_without_progress_loses_its_permit() {
        let copies = Copies::new(1, 1);
        let first = copies.begin(target("a", "first"), 10).unwrap();
        first.advance(4);
        let waiting = copies.clone();
        let second = std::thread::spawn(move || drop(waiting.begin(target("b", "second"), 10)));
        while copies.gate().load().waiting == 0 {
            std::thread::yield_now();
        }
        let listed = copies.list();
        assert_eq!((listed[0].copied, listed[0].bytes), (4, 10));
        assert!(listed[0].age.is_some());
        assert_eq!((&*listed[1].target.name, listed[1].age), ("second", None));

        copies.gate().expire(Instant::now() + WITHOUT_PROGRESS);
        second.join().unwrap();
        assert_eq!(copies.list().len(), 1);
        drop(first);
        assert_eq!((copies.list(), copies.copied()), (Vec::new(), 4));
    }

    #[test]
    fn no_pool_of_several_gets_all_permits() {
        let copies = Copies::new(4, 2);
        let begin = |pool, name| copies.begin(target(pool, name), 1);
        let three = ["1", "2", "3"].map(|name| begin("hung", name).unwrap());
        let waiting = copies.clone();
        let fourth = std::thread::spawn(move || drop(waiting.begin(target("hung", "4"), 1)));
        while copies.gate().load().waiting == 0 {
            std::thread::yield_now();
        }
        drop(begin("other", "5").unwrap());
        drop(three);
        fourth.join().unwrap();
    }
}
