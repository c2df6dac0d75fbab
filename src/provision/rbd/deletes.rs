//! The deletes under way, for which the purge of the trash waits: it would slow down the
//! cluster and its manager.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// The longest wait for deletes: one may hang.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The number of deletes under way. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Deletes(Arc<DeleteCount>);

#[derive(Debug, Default)]
struct DeleteCount {
    under_way: Mutex<usize>,
    /// Notified when a delete ends.
    ended: Condvar,
}

/// A delete under way, until this is dropped.
#[derive(Debug)]
pub struct RunningDelete(Arc<DeleteCount>);

impl Deletes {
    /// Registers a delete.
    pub fn begin(&self) -> RunningDelete {
        *self.0.lock() += 1;
        RunningDelete(Arc::clone(&self.0))
    }

    /// Waits until no delete is under way, with a deadline.
    pub fn pass(&self) {
        let some = |under_way: &mut usize| *under_way > 0;
        let waited = self
            .0
            .ended
            .wait_timeout_while(self.0.lock(), TIMEOUT, some);
        drop(waited);
    }
}

impl DeleteCount {
    fn lock(&self) -> MutexGuard<'_, usize> {
        self.under_way
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for RunningDelete {
    fn drop(&mut self) {
        *self.0.lock() -= 1;
        self.0.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_pass_waits_for_the_deletes_under_way() {
        let deletes = Deletes::default();
        deletes.pass();
        let mut under_way = vec![deletes.begin(), deletes.begin()];
        let left = deletes.clone();
        let passing = thread::spawn(move || {
            left.pass();
            *left.0.lock()
        });
        under_way.pop();
        assert!(*deletes.0.lock() > 0);
        under_way.pop();
        assert_eq!(passing.join().unwrap(), 0);
    }
}
