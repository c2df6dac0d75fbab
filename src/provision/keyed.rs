//! How a provisioner's calls run: all of its work blocks, so it runs on lanes, and
//! calls for one name or handle take turns there, so that equal ones get the
//! answer of the first. All others run at once.

use std::{
    cell::RefCell,
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use tokio::sync::OwnedMutexGuard;

use crate::lane::Lanes;

/// The turns of the calls that work on one store.
#[derive(Debug)]
pub struct Turns<S> {
    store: Arc<S>,
    locks: Keyed,
    lanes: Lanes,
}

impl<S> Clone for Turns<S> {
    fn clone(&self) -> Self {
        Self {
            store: Arc::clone(&self.store),
            locks: self.locks.clone(),
            lanes: self.lanes.clone(),
        }
    }
}

impl<S: Send + Sync + 'static> Turns<S> {
    pub fn new(store: S, lanes: Lanes) -> Self {
        Self {
            store: Arc::new(store),
            locks: Keyed::default(),
            lanes,
        }
    }

    /// What they work on, for what does not block.
    pub fn store(&self) -> &S {
        &self.store
    }

    /// Runs `work` after what runs for `whose` already. When the caller goes away
    /// meanwhile, the work is finished, and its turn ends only then: so storage
    /// that hangs holds up one thread for each, however often they call.
    pub async fn run<T: Send + 'static>(
        &self,
        whose: &str,
        step: &'static str,
        work: impl FnOnce(&S) -> T + Send + 'static,
    ) -> T {
        // Nobody waits for work of the controller's own.
        let _ = TURN.try_with(|turn| {
            turn.replace(Some((self.lanes.clone(), whose.to_owned())));
        });
        let turn = self.locks.lock(whose).await;
        let store = Arc::clone(&self.store);
        let work = move || {
            let result = work(&store);
            drop(turn);
            result
        };
        self.lanes.run(whose, step, work).await
    }
}

tokio::task_local! {
    /// Whose turn the call that is being answered has, or waits for, and where.
    static TURN: RefCell<Option<(Lanes, String)>>;
}

/// What a call that was not waited for any longer does.
#[derive(Debug)]
pub struct UnderWay {
    /// The step with its age, and what it waits for; none: it has not begun.
    step: Option<(&'static str, Duration, String)>,
}

impl fmt::Display for UnderWay {
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

/// Waits for a call's work at most so long. What is under way then is finished all the
/// same ([`Turns::run`]).
pub async fn within<T>(time: Duration, work: impl Future<Output = T>) -> Result<T, UnderWay> {
    let in_time = async {
        let done = tokio::time::timeout(time, work).await;
        done.map_err(|_| TURN.with(|turn| under_way(turn.borrow().as_ref())))
    };
    TURN.scope(RefCell::default(), in_time).await
}

fn under_way(turn: Option<&(Lanes, String)>) -> UnderWay {
    let busy = turn.and_then(|(lanes, whose)| {
        let mut busy = lanes.busy().into_iter();
        busy.find(|busy| busy.volume == *whose)
    });
    let step = busy.map(|busy| (busy.step, busy.since.elapsed(), busy.waits_for));
    UnderWay { step }
}

/// The turn of all that makes or deletes the volume of a name.
pub fn volume_named(name: &str) -> String {
    format!("volume name {name}")
}

/// The same for a snapshot.
pub fn snapshot_named(name: &str) -> String {
    format!("snapshot name {name}")
}

/// A lock for each key that is in use.
#[derive(Clone, Debug, Default)]
struct Keyed(Arc<Mutex<HashMap<String, Weak<tokio::sync::Mutex<()>>>>>);

impl Keyed {
    /// Waits for the lock of `key`. First come, first served.
    async fn lock(&self, key: &str) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            locks.retain(|_, lock| lock.strong_count() > 0);
            let live = locks.get(key).and_then(Weak::upgrade);
            live.unwrap_or_else(|| {
                let fresh = Arc::default();
                locks.insert(key.to_owned(), Arc::downgrade(&fresh));
                fresh
            })
        };
        lock.lock_owned().await
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn only_equal_keys_wait_and_nothing_stays() {
        let keyed = Keyed::default();
        let one = keyed.lock("one").await;
        assert!(keyed.lock("one").now_or_never().is_none());
        let two = keyed.lock("two").await;
        drop(one);
        assert!(keyed.lock("one").now_or_never().is_some());
        drop(two);
        let three = keyed.lock("three").await;
        assert_eq!(keyed.0.lock().unwrap().len(), 1);
        drop(three);
    }
}
