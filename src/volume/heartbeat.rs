//! The heartbeat of the runtime thread, without which no step of a verb begins.
//!
//! An agent owns its run directory while its runtime thread touches the lock file there; a
//! successor takes over from an agent that has not for a while. A verb on a lane does not
//! need the runtime thread, so it would continue beside the successor. So each step waits
//! for a recent heartbeat. An agent that has lost its run directory exits instead of the
//! next one.

use std::{
    sync::{Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// When the runtime thread last found that this agent owns its run directory.
#[derive(Debug)]
pub struct Heartbeat {
    last: Mutex<Instant>,
    beaten: Condvar,
    stale_after: Duration,
}

impl Heartbeat {
    /// The first heartbeat is now. No step begins later than `stale_after` after one.
    pub fn new(stale_after: Duration) -> Self {
        Self {
            last: Mutex::new(Instant::now()),
            beaten: Condvar::new(),
            stale_after,
        }
    }

    /// This agent owns its run directory.
    pub fn beat(&self) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        self.beaten.notify_all();
    }

    /// Blocks until the last heartbeat is recent.
    pub(super) fn wait(&self) {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let is_stale = |last: &mut Instant| last.elapsed() > self.stale_after;
        drop(self.beaten.wait_while(last, is_stale));
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, thread};

    use super::*;

    #[test]
    fn a_step_waits_for_a_recent_heartbeat() {
        Heartbeat::new(Duration::from_secs(60)).wait();

        let stale = Arc::new(Heartbeat::new(Duration::from_secs(60)));
        let long_ago = Instant::now().checked_sub(Duration::from_secs(61)).unwrap();
        *stale.last.lock().unwrap() = long_ago;
        let waiting = {
            let stale = Arc::clone(&stale);
            thread::spawn(move || stale.wait())
        };
        // A wait that did not block would end while this thread yields.
        for _ in 0..100 {
            thread::yield_now();
        }
        assert!(!waiting.is_finished());
        stale.beat();
        waiting.join().unwrap();
    }
}
