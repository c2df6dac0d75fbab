//! The orphans of all clusters, each looked at on a lane of its own.

use std::time::Duration;

use futures_util::future::join_all;

use super::{
    super::{OrphanReport, ProvisionError, Provisioner},
    Stores,
};
use crate::{Done, error_chain};

impl Stores {
    /// The orphans of all clusters, at most so long. One that does not answer is named, and
    /// delays no other.
    pub async fn orphans(&self, within: Duration) -> Result<OrphanReport, ProvisionError> {
        let mut report = OrphanReport::default();
        let Some(rbd) = &self.rbd else {
            return Ok(report);
        };
        let ids = rbd.run("clusters", "list", Provisioner::orphan_clusters);
        let looks = ids.await?.into_iter().map(|id| async move {
            let (key, cluster_id) = (format!("orphans of cluster {id}"), id.clone());
            let look = rbd.run(&key, "look", move |store| store.orphans(&id));
            tokio::time::timeout(within, look)
                .await
                .unwrap_or_else(|_| {
                    let after = within;
                    Err(ProvisionError::SilentCluster { cluster_id, after })
                })
        });
        for looked in join_all(looks).await {
            match looked {
                Ok(of_cluster) => {
                    for orphan in of_cluster.orphans {
                        if !report.orphans.iter().any(|known| known.is_same(&orphan)) {
                            report.orphans.push(orphan);
                        }
                    }
                    report.omitted.extend(of_cluster.omitted);
                }
                Err(error) => report.omitted.push(error_chain(&error)),
            }
        }
        Ok(report)
    }

    /// Removes one orphan, `pool[/namespace]/name`, unless it must stay.
    pub async fn remove_orphan(
        &self,
        cluster_id: String,
        path: String,
    ) -> Result<Done, ProvisionError> {
        let Some(rbd) = &self.rbd else {
            return Err(ProvisionError::NoOrphans(path));
        };
        let key = format!("orphan {path}");
        rbd.run(&key, "remove", move |store| {
            store.remove_orphan(&cluster_id, &path)
        })
        .await
    }
}
