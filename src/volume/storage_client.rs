//! This node's client of a cluster, for those who fence the node.

use std::{sync::Arc, time::Duration};

use super::{Node, error::Cause};
use crate::{device::StorageClient, secret::Secrets};

impl Node {
    /// The client by which this node uses a cluster. Connects on a lane, which ends by the
    /// connection's own timeouts; none where the caller's ends first.
    pub async fn storage_client(
        self: Arc<Self>,
        cluster_id: String,
        secrets: Secrets,
        within: Duration,
    ) -> Option<Result<StorageClient, Cause>> {
        let backends = Arc::clone(&self.backends);
        let key = format!("cluster {cluster_id}");
        let asks = move || backends.own_client(&cluster_id, &secrets);
        let asked = self.lanes.run(&key, "connect", asks);
        let answer = tokio::time::timeout(within, asked).await.ok()?;
        Some(answer.map_err(Cause::from))
    }
}
