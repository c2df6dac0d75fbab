//! Runs a store's calls. They block, so each runs on a lane; calls on one name or handle
//! run one after the other, so that equal ones get the answer of the first. All others run
//! at once.

use std::{
    cell::RefCell,
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use futures_util::future::BoxFuture;
use tokio::sync::OwnedMutexGuard;

use super::Provisioner;
use crate::lane::{self, Lanes};

/// A store whose calls are serialized by key.
#[derive(Clone, Debug)]
pub struct Serialized {
    /// The store, for calls that do not block.
    pub store: Arc<dyn Provisioner>,
    keys: KeyedMutex,
    lanes: Lanes,
}

impl Serialized {
    pub fn new(store: Arc<dyn Provisioner>, lanes: Lanes) -> Self {
        let keys = KeyedMutex::default();
        Self { store, keys, lanes }
    }

    /// Runs `work` after the calls that hold `key`. When the caller goes away
    /// meanwhile, the work still finishes, and only then releases the key: so storage
    /// that hangs blocks one thread a key, however often callers repeat.
    pub fn run<'a, T: Send + 'static>(
        &'a self,
        key: &'a str,
        step: &'static str,
        work: impl FnOnce(&dyn Provisioner) -> T + Send + 'static,
    ) -> BoxFuture<'a, T> {
        Box::pin(async move {
            // Not set for the controller's background work.
            let _ = CURRENT.try_with(|current| {
                current.replace(Some((self.lanes.clone(), key.to_owned())));
            });
            let guard = self.keys.lock(key).await;
            let store = Arc::clone(&self.store);
            let work = move || {
                let result = work(&*store);
                drop(guard);
                result
            };
            self.lanes.run(key, step, work).await
        })
    }
}

tokio::task_local! {
    /// The key that the call being answered holds, or waits for, and its lanes.
    static CURRENT: RefCell<Option<(Lanes, String)>>;
}

/// The state of a call past its deadline.
#[derive(Debug)]
pub struct CallProgress {
    /// The step with its age, and what it waits for; none: it has not begun.
    step: Option<(&'static str, Duration, String)>,
}

impl fmt::Display for CallProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((step, age, waits_for)) = &self.step else {
            return f.write_str("waiting for its turn");
        };
        write!(f, "in step {step} for {:.1} s", age.as_secs_f64())?;
        if !waits_for.is_empty() {
            write!(f, ", waiting for {waits_for}")?;
        }
        Ok(())
    }
}

/// Waits for a call's work at most so long. The work finishes all the same
/// ([`Serialized::run`]).
pub async fn within<T>(time: Duration, work: impl Future<Output = T>) -> Result<T, CallProgress> {
    let in_time = async {
        let done = tokio::time::timeout(time, work).await;
        done.map_err(|_| CURRENT.with(|current| under_way(current.borrow().as_ref())))
    };
    CURRENT.scope(RefCell::default(), in_time).await
}

fn under_way(current: Option<&(Lanes, String)>) -> CallProgress {
    let busy = current.and_then(|(lanes, key)| {
        let mut busy = lanes.busy().into_iter();
        busy.find(|busy| busy.volume == *key)
    });
    let step = busy.map(|busy| (busy.step, busy.since.elapsed(), busy.waits_for));
    CallProgress { step }
}

/// The key of calls that create or delete the volume of a name.
pub fn volume_named(name: &str) -> String {
    format!("volume name {name}")
}

/// The same for a snapshot.
pub fn snapshot_named(name: &str) -> String {
    format!("snapshot name {name}")
}

/// The same for a group snapshot.
pub fn group_snapshot_named(name: &str) -> String {
    format!("group snapshot name {name}")
}

/// A mutex for each key in use, which waiters get in turn.
#[derive(Clone, Debug, Default)]
pub struct KeyedMutex(Arc<Mutex<HashMap<String, Weak<tokio::sync::Mutex<()>>>>>);

impl KeyedMutex {
    async fn lock(&self, key: &str) -> OwnedMutexGuard<()> {
        self.mutex(key).lock_owned().await
    }

    /// The same on a lane.
    pub fn lock_on_lane(&self, key: &str) -> OwnedMutexGuard<()> {
        let _waiting = lane::waiting_for(format!("another call on {key}"));
        self.mutex(key).blocking_lock_owned()
    }

    /// Whether a call has the key now.
    pub fn is_held(&self, key: &str) -> bool {
        let mutexes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let live = mutexes.get(key).and_then(Weak::upgrade);
        live.is_some_and(|mutex| mutex.try_lock().is_err())
    }

    fn mutex(&self, key: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut mutexes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        mutexes.retain(|_, mutex| mutex.strong_count() > 0);
        let live = mutexes.get(key).and_then(Weak::upgrade);
        live.unwrap_or_else(|| {
            let fresh = Arc::default();
            mutexes.insert(key.to_owned(), Arc::downgrade(&fresh));
            fresh
        })
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn only_equal_keys_wait_and_free_locks_are_dropped() {
        let keyed = KeyedMutex::default();
        let one = keyed.lock("one").await;
        assert!(keyed.lock("one").now_or_never().is_none());
        let two = keyed.lock("two").await;
        assert!(keyed.is_held("one"));
        drop(one);
        assert!(!keyed.is_held("one"));
        assert!(keyed.lock("one").now_or_never().is_some());
        drop(two);
        let three = keyed.lock("three").await;
        assert_eq!(keyed.0.lock().unwrap().len(), 1);
        drop(three);
    }
}
