//! Checks that the pools and the cluster list that the operator configured are there.

use std::{fmt, sync::Arc};

use super::Backends;
use crate::{ceph, error_chain, lane::Inspection};

type CheckFn = dyn Fn() -> Result<(), String> + Send + Sync;

/// A check of one dependency. It may block: for a lane.
#[derive(Clone)]
pub struct Check {
    /// The dependency's name, for messages.
    pub what: String,
    look: Arc<CheckFn>,
}

impl fmt::Debug for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Check").field(&self.what).finish()
    }
}

impl Check {
    /// A check by `look`.
    pub fn new(
        what: String,
        look: impl Fn() -> Result<(), String> + Send + Sync + 'static,
    ) -> Self {
        let look = Arc::new(look);
        Self { what, look }
    }

    /// Runs it; the error is a sentence for the operator.
    pub fn run(&self) -> Result<(), String> {
        (self.look)()
    }
}

impl Backends {
    /// Every pool, and the list of Ceph clusters.
    pub fn checks(&self) -> Vec<Check> {
        let pools = self.images.pools.iter().map(|pool| {
            let what = format!("pool {:?} in {}", pool.name, pool.dir.display());
            let pool = pool.clone();
            Check::new(what, move || {
                pool.check_scope().map_err(|error| error_chain(&error))
            })
        });
        let clusters = self.ceph.clusters.clone().map(|clusters| {
            Check::new("the list of Ceph clusters".to_owned(), move || {
                clusters.check().map_err(|error| error_chain(&error))
            })
        });
        pools.chain(clusters).collect()
    }

    /// A trial of every pool, and a question to the monitors of every cluster: for an
    /// operator, as it writes to pools, and connects.
    pub fn inspections(&self) -> Vec<Inspection> {
        let pools = self.images.pools.iter().map(|pool| {
            let pool = pool.clone();
            Inspection::new(format!("pool {}", pool.name), move || vec![pool.inspect()])
        });
        let clusters = self
            .ceph
            .clusters
            .clone()
            .map(|clusters| Inspection::new("Ceph clusters", move || ceph::inspect(&clusters)));
        pools.chain(clusters).collect()
    }
}
