//! The ends of superblocks whose servers have to answer, by server.
//!
//! The last unmount of a server's directory writes back and ends a session, on a thread that
//! no one can stop. The caller does not wait for it for ever, and the volume is forgotten
//! then; so volumes that come and go, on a server that accepts mounts and answers nothing
//! else, would take a thread each.

use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// How many may be under way for one server: as many as pods that a node ends at once.
const MOST: usize = 128;

/// Those that are under way. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct WriteBacks(Arc<ByServer>);

#[derive(Debug, Default)]
struct ByServer {
    under_way: Mutex<HashMap<String, usize>>,
    ended: Condvar,
}

/// One that is under way, until this is dropped.
#[derive(Debug)]
pub(super) struct WriteBack {
    server: String,
    all: Arc<ByServer>,
}

impl WriteBacks {
    /// Begins one for this server, once it is one of few; waits so long at most. `Err`: how
    /// many are under way.
    pub fn begin(&self, server: &str, wait: Duration) -> Result<WriteBack, usize> {
        let until = Instant::now() + wait;
        let mut under_way = self.0.lock();
        loop {
            let count = under_way.get(server).copied().unwrap_or_default();
            if count < MOST {
                under_way.insert(server.to_owned(), count + 1);
                return Ok(WriteBack {
                    server: server.to_owned(),
                    all: Arc::clone(&self.0),
                });
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(count);
            }
            let woken = self.0.ended.wait_timeout(under_way, left);
            (under_way, _) = woken.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl ByServer {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        let locked = self.under_way.lock();
        locked.unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for WriteBack {
    fn drop(&mut self) {
        let mut under_way = self.all.lock();
        if let Some(count) = under_way.get_mut(&self.server) {
            *count -= 1;
            if *count == 0 {
                under_way.remove(&self.server);
            }
        }
        self.all.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_server_has_few_and_others_do_not_wait_for_it() {
        const SOON: Duration = Duration::from_millis(1);
        let all = WriteBacks::default();
        let begin = |server| all.begin(server, SOON);
        let mut stuck: Vec<_> = (0..MOST).map(|_| begin("dead").expect("few")).collect();
        assert_eq!(begin("dead").err(), Some(MOST));
        drop(begin("other").expect("of another server"));

        drop(stuck.pop());
        stuck.push(begin("dead").expect("one has ended"));
        thread::scope(|scope| {
            let waits = scope.spawn(|| all.begin("dead", Duration::from_secs(60)));
            thread::sleep(10 * SOON);
            drop(stuck.pop());
            stuck.push(waits.join().expect("no panic").expect("one has ended"));
        });
        assert_eq!(begin("dead").err(), Some(MOST));
        drop(stuck);
        assert!(all.0.lock().is_empty());
    }
}
