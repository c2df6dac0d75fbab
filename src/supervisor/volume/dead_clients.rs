//! The Ceph clients of a volume's dead daemons, and when to blocklist them.
//!
//! Each entry stays in the cluster's map for an hour, and each round is a process that loads
//! librados. A daemon may die again and again, and with it those of all volumes of the node.
//! So a volume has one round at a time and none soon after another, and all volumes together
//! have a few. A round that is left out is not made up for: then the lock breaks as without
//! it, once the cluster notices that its client is dead.
//!
//! **Which clients.** Those of daemons that had served and ended without being asked to, or
//! were killed. One that ends after SIGTERM, or because it cannot serve, closes its image, and
//! so gives up lock and watch. One that crashes before it serves has carried out no request,
//! and so has no lock, but with `exclusive`, which is rare enough to wait for.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The longest list: a daemon has a few ids, of which the last one matters most.
const MOST: usize = 16;
/// The shortest time between two rounds of a volume.
const AGAIN_AFTER: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 30_000 });

/// The clients of a volume's dead daemons since one last began to serve.
#[derive(Debug)]
pub struct DeadClients {
    ids: Vec<i64>,
    /// When the last round began.
    last: Option<Instant>,
    /// One permit: that of the round under way.
    own: Arc<Semaphore>,
}

/// A round that may begin. Whoever carries it out drops it at the end.
#[derive(Debug)]
pub struct BlocklistRound {
    pub ids: Vec<i64>,
    _permits: [OwnedSemaphorePermit; 2],
}

impl DeadClients {
    pub fn new() -> Self {
        Self {
            ids: Vec::new(),
            last: None,
            own: Arc::new(Semaphore::new(1)),
        }
    }

    /// Adds the clients of a daemon that has died; the oldest are forgotten.
    pub fn add(&mut self, clients: Vec<i64>) {
        self.ids.retain(|id| !clients.contains(id));
        for client in clients {
            if !self.ids.contains(&client) {
                self.ids.push(client);
            }
        }
        self.ids.drain(..self.ids.len().saturating_sub(MOST));
    }

    pub fn forget(&mut self) {
        self.ids.clear();
    }

    /// The round to begin `now`, if there are clients, and it is neither too soon nor one too
    /// many; `all` has the permits of all volumes.
    pub fn round(&mut self, all: &Arc<Semaphore>, now: Instant) -> Option<BlocklistRound> {
        let is_soon = |last| now.saturating_duration_since(last) < AGAIN_AFTER;
        if self.ids.is_empty() || self.last.is_some_and(is_soon) {
            return None;
        }
        let own = Arc::clone(&self.own).try_acquire_owned().ok()?;
        let all = Arc::clone(all).try_acquire_owned().ok()?;
        self.last = Some(now);
        Some(BlocklistRound {
            ids: self.ids.clone(),
            _permits: [own, all],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_short_and_without_duplicates() {
        let mut dead = DeadClients::new();
        dead.add(vec![1, 2, 2]);
        dead.add(vec![3, 1]);
        assert_eq!(dead.ids, [2, 3, 1]);
        dead.add((10..10 + 15).collect());
        assert_eq!(dead.ids.len(), MOST);
        assert_eq!((dead.ids[0], dead.ids[15]), (1, 24));
        dead.add((100..200).collect());
        assert_eq!(dead.ids, (184..200).collect::<Vec<_>>());
    }

    #[test]
    fn rounds_have_a_pause_and_are_few_at_a_time() {
        let (all, now) = (Arc::new(Semaphore::new(1)), Instant::now());
        let [mut dead, mut other] = [DeadClients::new(), DeadClients::new()];
        assert!(dead.round(&all, now).is_none(), "no client");
        dead.add(vec![1]);
        other.add(vec![2]);
        let first = dead.round(&all, now).unwrap();
        assert_eq!(first.ids, [1]);
        assert!(other.round(&all, now).is_none(), "one too many");
        let soon = now + AGAIN_AFTER / 2;
        let later = now + AGAIN_AFTER;
        let more = Arc::new(Semaphore::new(2));
        assert!(dead.round(&more, later).is_none(), "still under way");
        drop(first);
        assert!(dead.round(&all, soon).is_none(), "too soon");
        drop(dead.round(&all, later).unwrap());
        // What was left out counts as no round.
        assert!(other.round(&all, now).is_some());
        dead.forget();
        assert!(dead.round(&all, later + AGAIN_AFTER).is_none());
    }
}
