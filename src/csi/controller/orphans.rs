//! The controller's own service, on the same socket as CSI: what is in the clusters though no
//! volume and no snapshot refers to it.

use std::time::Duration;

use tonic::{Request, Response, Status};

use super::{
    super::validate::{invalid, required},
    service::{answered, taken},
};
use crate::{
    Done,
    proto::admin::{
        self as wire, ListOrphansRequest, ListOrphansResponse, RemoveOrphanRequest,
        RemoveOrphanResponse, orphan_admin_server::OrphanAdmin,
    },
    provision::{Orphan, Stores},
};

/// How much earlier than its caller's timeout a report ends without the clusters that do not
/// answer.
const BEFORE_TIMEOUT: Duration = Duration::from_millis(500);

/// The service of one controller.
#[derive(Debug)]
pub struct OrphanService {
    stores: Stores,
}

impl OrphanService {
    pub fn new(stores: Stores) -> Self {
        Self { stores }
    }
}

#[tonic::async_trait]
impl OrphanAdmin for OrphanService {
    async fn list_orphans(
        &self,
        request: Request<ListOrphansRequest>,
    ) -> Result<Response<ListOrphansResponse>, Status> {
        let (_, caller) = taken(request);
        answered("ListOrphans", "", caller, async {
            let in_time = caller
                .timeout
                .saturating_sub(BEFORE_TIMEOUT.min(caller.timeout / 4));
            let report = self.stores.orphans(in_time).await?;
            Ok(ListOrphansResponse {
                orphans: report.orphans.into_iter().map(orphan).collect(),
                omitted: report.omitted,
            })
        })
        .await
    }

    async fn remove_orphan(
        &self,
        request: Request<RemoveOrphanRequest>,
    ) -> Result<Response<RemoveOrphanResponse>, Status> {
        let (request, caller) = taken(request);
        let path = request.path.clone();
        answered("RemoveOrphan", &path, caller, async {
            required("path", &request.path)?;
            if request.confirm != request.path {
                return Err(invalid("confirm", "must repeat path: it is removed"));
            }
            let removed = self
                .stores
                .remove_orphan(request.cluster_id, request.path)
                .await?;
            Ok(RemoveOrphanResponse {
                removed: removed == Done::Now,
            })
        })
        .await
    }
}

fn orphan(it: Orphan) -> wire::Orphan {
    wire::Orphan {
        path: it.path(),
        cluster_id: it.cluster_id,
        pool: it.pool,
        namespace: it.namespace,
        name: it.name,
        kind: it.kind.to_string(),
        age_seconds: it.age.map(|age| age.as_secs()),
        why: it.why,
        kept_because: it.kept,
    }
}
