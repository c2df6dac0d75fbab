//! Reclaims of space that have ended, so that a repeated call does not begin anew: each
//! reads the whole volume, and takes longer than its callers wait.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// How long a result is kept that no caller has received. A caller repeats its call within
/// minutes.
const KEPT_FOR: Duration = Duration::from_secs(3600);

/// The last successful reclaim of each volume, by handle.
#[derive(Clone, Debug, Default)]
pub struct Reclaims(Arc<Mutex<HashMap<String, EndedReclaim>>>);

#[derive(Clone, Copy, Debug)]
struct EndedReclaim {
    at: Instant,
    /// Whether a caller has been told.
    told: bool,
}

impl Reclaims {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, EndedReclaim>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A reclaim has ended well.
    pub fn end(&self, handle: &str) {
        let mut all = self.lock();
        all.retain(|_, ended| ended.at.elapsed() < KEPT_FOR);
        let (at, told) = (Instant::now(), false);
        all.insert(handle.to_owned(), EndedReclaim { at, told });
    }

    /// Its caller has been told.
    pub fn tell(&self, handle: &str) {
        if let Some(ended) = self.lock().get_mut(handle) {
            ended.told = true;
        }
    }

    /// Whether the last reclaim answers a call that came at this time: the call waited for
    /// it, or no caller has been told of it.
    pub fn answers(&self, handle: &str, came: Instant) -> bool {
        let all = self.lock();
        let kept = all
            .get(handle)
            .filter(|ended| ended.at.elapsed() < KEPT_FOR);
        kept.is_some_and(|ended| ended.at >= came || !ended.told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reclaim_answers_those_who_waited_and_one_who_had_gone() {
        let reclaims = Reclaims::default();
        let early = Instant::now();
        assert!(!reclaims.answers("v", early));
        reclaims.end("v");
        let late = Instant::now() + Duration::from_millis(1);
        assert!(reclaims.answers("v", early));
        assert!(reclaims.answers("v", late), "no caller was told");
        assert!(!reclaims.answers("other", early));
        reclaims.tell("v");
        assert!(reclaims.answers("v", early));
        assert!(!reclaims.answers("v", late));
    }
}
