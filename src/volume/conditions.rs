//! The conditions of all volumes of this node, for the metrics.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures_util::{StreamExt as _, stream};

use super::Node;

/// Volumes that are looked at at once. One whose file system hangs delays others by the
/// two seconds that a look waits for it.
const AT_ONCE: usize = 16;

impl Node {
    /// Looks at all volumes. Returns the handles of those that have conditions, with the
    /// reasons.
    pub async fn conditions(self: Arc<Self>) -> BTreeMap<String, Vec<&'static str>> {
        let ids: Vec<_> = self.volumes().keys().cloned().collect();
        let looks = ids.into_iter().map(|id| {
            let node = Arc::clone(&self);
            async move {
                // A volume that was forgotten meanwhile has none.
                let conditions = node.health(id.clone(), Duration::MAX).await;
                let conditions = conditions.into_iter().flatten();
                let mut reasons: Vec<_> = conditions.map(|it| it.reason.as_str()).collect();
                reasons.sort_unstable();
                reasons.dedup();
                (id, reasons)
            }
        });
        let looked = stream::iter(looks).buffer_unordered(AT_ONCE);
        let unhealthy = looked.filter(|(_, reasons)| std::future::ready(!reasons.is_empty()));
        unhealthy.collect().await
    }
}
