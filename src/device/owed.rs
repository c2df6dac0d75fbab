//! Claims that could not be released, because their pool was away.
//!
//! The volume is unstaged all the same: its device is gone, and kubelet would wait for
//! the pool for ever. The claim is released once the pool is back.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::Notify;

use crate::pool::Pools;

/// The pools in which claims may be left. Clones share it.
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

    /// Notes that a claim may be left in the pool.
    pub fn add(&self, pool: &str) {
        if let Some(more) = self.0.get(pool) {
            more.notify_one();
        }
    }

    /// Waits until a claim may be left in it, noted since the last call.
    pub async fn more(&self, pool: &str) {
        match self.0.get(pool) {
            Some(more) => more.notified().await,
            None => std::future::pending().await,
        }
    }
}
