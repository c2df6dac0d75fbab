//! Claims that could not be given back, because their pool was away.
//!
//! The volume is unstaged all the same: its device is gone, and kubelet would wait for
//! the pool for ever. The claim is given back once the pool is there again.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::Notify;

use crate::pool::Pools;

/// In which pools claims may be left. Clones are one.
#[derive(Clone, Debug)]
pub struct Owed(Arc<BTreeMap<String, Notify>>);

impl Owed {
    /// None yet.
    pub fn of(pools: &Pools) -> Self {
        let names = pools.iter().map(|pool| (pool.name.clone(), Notify::new()));
        Self(Arc::new(names.collect()))
    }

    /// The names of all pools.
    pub fn pools(&self) -> impl Iterator<Item = &String> {
        self.0.keys()
    }

    /// Says that a claim may be left in the pool.
    pub fn add(&self, pool: &str) {
        if let Some(more) = self.0.get(pool) {
            more.notify_one();
        }
    }

    /// Waits until one may be left in it, if none was told of since the last time.
    pub async fn more(&self, pool: &str) {
        match self.0.get(pool) {
            Some(more) => more.notified().await,
            None => std::future::pending().await,
        }
    }
}
