//! Shared by all calls: connections to clusters, and the pools whose trash this controller
//! purges.

use std::{collections::btree_map::Entry, sync::PoisonError, time::Instant};

use super::{
    RbdStore, UsedPool, copies::present, encryption::PassphraseStore, error::RbdError,
    fencing::lift, found::ClusterConnection,
};
use crate::{
    ceph::{
        client::{Credentials, or_missing, rados::IoCtx, rbd},
        csi_format::{
            handle::{Handle, MAX_CLUSTER_ID},
            journal::JournalEntry,
        },
    },
    lane,
    secret::Secrets,
};

impl RbdStore {
    /// Connects to a cluster of the configuration, as the user of the secrets;
    /// without any, as the user of `--ceph-secret`.
    pub(super) fn link(
        &self,
        cluster_id: &str,
        secrets: &Secrets,
    ) -> Result<ClusterConnection, RbdError> {
        let credentials = if secrets.is_empty() {
            self.operators.credentials(cluster_id)?
        } else {
            Credentials::from_secrets(secrets)?
        };
        self.link_as(cluster_id, credentials)
    }

    /// The connection to the cluster of a handle, and its pool; none if the pool was deleted, with
    /// its images and entries.
    pub(super) fn linked_pool(
        &self,
        handle: &Handle,
        secrets: &Secrets,
    ) -> Result<Option<(ClusterConnection, IoCtx)>, RbdError> {
        let link = self.link(handle.cluster_id(), secrets)?;
        match link.pool(handle.pool_id()) {
            Err(error) if error.is_not_found() => Ok(None),
            pool => pool.map(|pool| Some((link, pool))),
        }
    }

    fn link_as(
        &self,
        cluster_id: &str,
        credentials: Credentials,
    ) -> Result<ClusterConnection, RbdError> {
        let config = self.clusters.get(cluster_id)?;
        if cluster_id.len() > MAX_CLUSTER_ID {
            return Err(RbdError::LongId(config.cluster_id));
        }
        let monitors = config.monitors.join(", ");
        let waiting = lane::waiting_for(format!("cluster {cluster_id:?} (monitors {monitors})"));
        let cluster = self
            .connections
            .get(cluster_id, &config.monitors, &credentials, None);
        drop(waiting);
        let cluster = cluster.map_err(|source| RbdError::Cluster {
            cluster_id: cluster_id.to_owned(),
            source,
        })?;
        Ok(ClusterConnection {
            cluster,
            config,
            credentials,
        })
    }

    /// Adds a pool, with its user, to those in use. For a new one, purges its trash.
    pub(super) fn use_pool(&self, link: &ClusterConnection, pool: &IoCtx) {
        let key = (link.config.cluster_id.clone(), pool.pool_id());
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let now = UsedPool {
            credentials: link.credentials.clone(),
            last_use: Instant::now(),
        };
        if used.insert(key, now).is_none() {
            self.purger.sweep_soon(pool);
        }
    }

    /// Purges the trash of every known pool: those in use, and all that the users of
    /// `--ceph-secret` see. Returns the errors of clusters that do not answer; they delay no
    /// other.
    pub(super) fn sweep(&self) -> Vec<RbdError> {
        let mut errors = Vec::new();
        let used = self
            .used
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let mut failed = String::new();
        for ((cluster_id, pool_id), user) in used {
            if cluster_id == failed {
                continue;
            }
            let swept = self
                .link_as(&cluster_id, user.credentials)
                .and_then(|link| self.sweep_pool(&link.pool(pool_id)?));
            match swept {
                Ok(true) => {}
                Ok(false) => self.forget_if_unused((cluster_id, pool_id)),
                // The pool was deleted, with its images.
                Err(error) if error.is_not_found() => self.forget_if_unused((cluster_id, pool_id)),
                Err(error) => {
                    errors.push(error);
                    failed = cluster_id;
                }
            }
        }
        match self.own_cluster_ids() {
            Ok(ids) => {
                let swept = ids.iter().map(|id| self.sweep_cluster(id));
                errors.extend(swept.filter_map(Result::err));
            }
            Err(error) => errors.push(error),
        }
        errors
    }

    /// Drops the user of a pool that needs no sweep; the pool's next use brings one.
    fn forget_if_unused(&self, pool: (String, i64)) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if let Entry::Occupied(user) = used.entry(pool)
            && user.get().last_use.elapsed() >= self.purger.times.forget
        {
            user.remove();
        }
    }

    /// The same for one cluster, as this controller's own user.
    fn sweep_cluster(&self, cluster_id: &str) -> Result<(), RbdError> {
        let link = self.link(cluster_id, &Secrets::default())?;
        for name in link.cluster.pools()? {
            match link.pool(&name).and_then(|pool| self.sweep_pool(&pool)) {
                // This user has no access to it, or it was deleted.
                Err(error) if error.is_access_denied() || error.is_not_found() => {}
                result => drop(result?),
            }
        }
        Ok(())
    }

    /// False: nothing is left for another sweep.
    fn sweep_pool(&self, pool: &IoCtx) -> Result<bool, RbdError> {
        let any_listed = self.purger.sweep(pool)?;
        Ok(lift(pool) || any_listed)
    }

    /// The ids of the clusters that have a user of `--ceph-secret`.
    pub(super) fn own_cluster_ids(&self) -> Result<Vec<String>, RbdError> {
        let all = self.clusters.all()?;
        let ids = all.iter().map(|cluster| &cluster.cluster_id);
        let own = ids.filter(|id| self.operators.has(id));
        Ok(own.cloned().collect())
    }

    /// Removes images whose names no caller has. librbd cannot move an image that a crash left
    /// incomplete to the trash; it has no data. Of some only the name in the pool's directory
    /// exists.
    pub(super) fn take_back(&self, pool: &IoCtx, names: &[String]) -> Result<(), RbdError> {
        self.purger.discard(pool, &present(pool, names)?)?;
        for name in names {
            or_missing(rbd::remove(pool, name))?;
        }
        Ok(())
    }

    /// Removes the passphrase of a deleted image from its KMS ([`PassphraseStore::remove`]), for a
    /// request with these secrets; without any, with those of `--ceph-secret`.
    pub(super) fn remove_key(
        &self,
        link: &ClusterConnection,
        (entry, handle): (&JournalEntry, &str),
        secrets: &Secrets,
    ) -> Result<(), RbdError> {
        if secrets.is_empty() && !entry.kms.is_empty() {
            let own = self.operators.secrets(&link.config.cluster_id)?;
            return self.keeper(&own).remove(entry, handle);
        }
        self.keeper(secrets).remove(entry, handle)
    }

    /// The KMSes for a request with these secrets.
    pub(super) fn keeper<'a>(&'a self, secrets: &'a Secrets) -> PassphraseStore<'a> {
        let config = &self.kms;
        PassphraseStore { config, secrets }
    }
}
