//! Looking for a name in the pools that a request is not about.
//!
//! A name belongs to one pool, so a create in one pool looks for it in the others. These
//! must not delay it: each is searched on a lane of its own, for a short time. A pool whose
//! search is late is passed over until that search ends, so a pool that hangs keeps no more
//! lanes than there were calls in that time.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc,
    },
    time::{Duration, Instant},
};

use super::catalogue::{Catalogue, CatalogueEntry, EntryKind};
use crate::{
    error_chain,
    lane::{self, Lanes},
    pool::Pool,
};

/// The searches in pools.
#[derive(Debug)]
pub struct NameSearch {
    lanes: Lanes,
    last: AtomicU64,
    under_way: UnderWay,
}

/// The searches that have not ended, by pool and number, with their beginnings.
type UnderWay = Arc<Mutex<BTreeMap<(String, u64), Instant>>>;

impl NameSearch {
    pub fn new(lanes: &Lanes) -> Self {
        Self {
            lanes: lanes.clone(),
            last: AtomicU64::default(),
            under_way: UnderWay::default(),
        }
    }

    /// The complete entry of that name in one of these pools, and the pool. Blocks, for
    /// [`SEARCH_TIMEOUT`] at most.
    ///
    /// A pool that fails or is silent counts as one without the name: calls on it report
    /// that, and it must not stop calls on others.
    pub fn find<'p, K: EntryKind + Send + 'static>(
        &self,
        pools: impl Iterator<Item = &'p Pool>,
        name: &str,
    ) -> Option<(&'p Pool, CatalogueEntry<K>)> {
        let until = Instant::now() + SEARCH_TIMEOUT;
        let (tell, told) = mpsc::channel();
        let (late, asked): (Vec<_>, Vec<_>) = pools.partition(|pool| self.is_late(pool));
        for pool in &asked {
            self.ask::<K>(pool, name, tell.clone());
        }
        drop(tell);
        let mut silent: BTreeSet<_> = asked.iter().map(|pool| &*pool.name).collect();
        let _waits = (!silent.is_empty())
            .then(|| lane::waiting_for(format!("pools {silent:?}, searched for the name")));
        while !silent.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            let Ok((pool, found)) = told.recv_timeout(left) else {
                break;
            };
            silent.remove(&*pool);
            match found {
                Ok(None) => {}
                Ok(Some(entry)) => {
                    let pool = asked.iter().find(|asked| asked.name == pool)?;
                    return Some((pool, entry));
                }
                Err(error) => {
                    let error = error_chain(&error);
                    tracing::warn!(pool, error, "not searched for a name");
                }
            }
        }
        for pool in late.iter().map(|pool| &*pool.name).chain(silent) {
            tracing::warn!(pool, "not searched for a name: it does not answer");
        }
        None
    }

    /// Starts the search of a pool.
    fn ask<K: EntryKind + Send + 'static>(&self, pool: &Pool, name: &str, tell: Answers<K>) {
        let search = Search::begin(self, &pool.name);
        let (pool, name) = (pool.clone(), name.to_owned());
        let key = format!("names of pool {}", pool.name);
        let work = move || {
            let found = Catalogue::of(&pool).by_name(&name);
            drop(search);
            // Nobody waits for a late one.
            let _ = tell.send((pool.name, found));
        };
        // It runs without being awaited.
        drop(self.lanes.run(&key, "search", work));
    }

    fn is_late(&self, pool: &Pool) -> bool {
        let under_way = lock(&self.under_way);
        let from = (pool.name.clone(), 0);
        let mut its = under_way
            .range(from..)
            .take_while(|((name, _), _)| *name == pool.name);
        its.any(|(_, began)| began.elapsed() >= SEARCH_TIMEOUT)
    }
}

type Answers<K> = mpsc::Sender<(
    String,
    Result<Option<CatalogueEntry<K>>, super::ProvisionError>,
)>;

/// A search under way, until it is dropped.
struct Search {
    under_way: UnderWay,
    key: (String, u64),
}

impl Search {
    fn begin(all: &NameSearch, pool: &str) -> Self {
        let key = (pool.to_owned(), all.last.fetch_add(1, Relaxed));
        lock(&all.under_way).insert(key.clone(), Instant::now());
        Self {
            under_way: Arc::clone(&all.under_way),
            key,
        }
    }
}

impl Drop for Search {
    fn drop(&mut self) {
        lock(&self.under_way).remove(&self.key);
    }
}

fn lock(
    under_way: &Mutex<BTreeMap<(String, u64), Instant>>,
) -> MutexGuard<'_, BTreeMap<(String, u64), Instant>> {
    under_way.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How long a call waits for other pools: a fraction of the 10 s that sidecars give a call.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::{super::volumes::VolumeDetail, *};
    use crate::pool::Scope;

    #[test]
    fn a_pool_that_is_late_is_passed_over_until_it_answers() {
        let dir = tempfile::tempdir().unwrap();
        let pools = ["hung", "there"].map(|name| Pool {
            name: name.to_owned(),
            dir: dir.path().to_owned(),
            scope: Scope::Shared,
            mounted: false,
        });
        let names = NameSearch::new(&Lanes::new(2));
        let hung = Search::begin(&names, "hung");
        let long_ago = Instant::now().checked_sub(SEARCH_TIMEOUT).unwrap();
        lock(&names.under_way).insert(hung.key.clone(), long_ago);
        assert_eq!(
            pools.each_ref().map(|pool| names.is_late(pool)),
            [true, false]
        );
        let begun = Instant::now();
        assert!(names.find::<VolumeDetail>(pools.iter(), "pvc").is_none());
        assert!(begun.elapsed() < SEARCH_TIMEOUT);
        drop(hung);
        assert!(!names.is_late(&pools[0]));
        assert!(names.find::<VolumeDetail>(pools.iter(), "pvc").is_none());
        assert!(lock(&names.under_way).is_empty());
    }
}
