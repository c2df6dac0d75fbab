//! How many volumes of this node have each condition, for the metrics.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures_util::{StreamExt as _, stream};

use super::{Node, health::ConditionReason};
use crate::observe::metrics;

/// Volumes that are looked at at once. One whose file system hangs delays others by the
/// two seconds that a look waits for it.
const AT_ONCE: usize = 16;

impl Node {
    /// Looks at all volumes, and sets the metrics of their conditions.
    pub async fn report_conditions(self: Arc<Self>) {
        let ids: Vec<_> = self.volumes().keys().cloned().collect();
        let looks = ids
            .into_iter()
            .map(|id| Arc::clone(&self).health(id, Duration::MAX));
        let mut looked = stream::iter(looks).buffer_unordered(AT_ONCE);
        let mut counts: BTreeMap<_, _> = (ConditionReason::ALL.into_iter())
            .map(|reason| (reason, 0))
            .collect();
        while let Some(conditions) = looked.next().await {
            // A volume that was forgotten meanwhile is none.
            for condition in conditions.into_iter().flatten() {
                *counts.entry(condition.reason).or_default() += 1;
            }
        }
        for (reason, volumes) in counts {
            metrics::conditions(reason.as_str(), volumes);
        }
    }
}
