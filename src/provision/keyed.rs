//! Locks by name: equal calls wait for each other, all others run.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use tokio::sync::OwnedMutexGuard;

/// A lock for each key that is in use.
#[derive(Clone, Debug, Default)]
pub struct Keyed(Arc<Mutex<HashMap<String, Weak<tokio::sync::Mutex<()>>>>>);

impl Keyed {
    /// Waits for the lock of `key`. First come, first served.
    pub async fn lock(&self, key: &str) -> OwnedMutexGuard<()> {
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
