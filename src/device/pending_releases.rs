//! Claims whose release is pending, because their pool was away.
//!
//! The volume is unstaged all the same: its device is gone, and kubelet would wait for
//! the pool for ever. The claim is released once the pool is back.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::Notify;

use crate::pool::Pools;

/// The pools in which releases may be pending. Clones share it.
#[derive(Clone, Debug)]
pub struct PendingReleases(Arc<BTreeMap<String, Notify>>);

impl PendingReleases {
    /// None yet.
    pub fn of(pools: &Pools) -> Self {
        let names = pools.iter().map(|pool| (pool.name.clone(), Notify::new()));
        Self(Arc::new(names.collect()))
    }

    /// The names of all pools.
    pub fn pools(&self) -> impl Iterator<Item = &String> {
        self.0.keys()
    }

    /// Reports that a release may be pending in the pool.
    pub fn add(&self, pool: &str) {
        if let Some(added) = self.0.get(pool) {
            added.notify_one();
        }
    }

    /// Waits until [`Self::add`] has reported the pool since the last wait.
    pub async fn added(&self, pool: &str) {
        match self.0.get(pool) {
            Some(added) => added.notified().await,
            None => std::future::pending().await,
        }
    }
}
