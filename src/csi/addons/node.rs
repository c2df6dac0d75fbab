//! csi-addons' calls on a volume that this node has: requests parsed into
//! [`crate::volume`]'s calls.

use std::{sync::Arc, time::Duration};

use tonic::{Request, Response, Status};

use super::super::{
    call::{observed, timeout},
    validate,
};
use crate::{
    proto::addons::reclaimspace::{
        NodeReclaimSpaceRequest, NodeReclaimSpaceResponse, StorageConsumption,
        reclaim_space_node_server::ReclaimSpaceNode,
    },
    volume::{
        Node, NodeHandle, Outcome,
        spec::{self, Call, Reclaim},
    },
};

/// The services of one node.
#[derive(Clone, Debug)]
pub struct AddonsNode {
    node: NodeHandle,
}

impl AddonsNode {
    pub fn new(node: NodeHandle) -> Self {
        Self { node }
    }

    async fn submit(
        &self,
        volume_id: String,
        request: spec::Request,
        timeout: Duration,
    ) -> Result<Outcome, Status> {
        let submit = move |node: Arc<Node>| node.submit(volume_id, request, timeout);
        let outcome = self.node.run(submit).await;
        let outcome = outcome.ok_or_else(|| Status::unavailable("the node agent is shutting down"));
        outcome?.map_err(|error| Status::from(&*error))
    }

    async fn reclaim(
        &self,
        request: NodeReclaimSpaceRequest,
        timeout: Duration,
    ) -> Result<NodeReclaimSpaceResponse, Status> {
        validate::required("volume_id", &request.volume_id)?;
        validate::optional_path("staging_target_path", &request.staging_target_path)?;
        validate::optional_path("volume_path", &request.volume_path)?;
        if request.staging_target_path.is_empty() && request.volume_path.is_empty() {
            let why = "is required, or volume_path";
            return Err(validate::invalid("staging_target_path", why));
        }
        validate::secrets(&request.secrets)?;
        let call = Call::Reclaim(Reclaim {
            staging_path: validate::clean(&request.staging_target_path),
            volume_path: validate::clean(&request.volume_path),
        });
        let usage = |bytes: Option<u64>| {
            let usage_bytes = i64::try_from(bytes?).ok()?;
            Some(StorageConsumption { usage_bytes })
        };
        match self.submit(request.volume_id, call.into(), timeout).await? {
            Outcome::Reclaimed { before, after } => Ok(NodeReclaimSpaceResponse {
                pre_usage: usage(before),
                post_usage: usage(after),
            }),
            other => Err(Status::internal(format!("reclaiming ended in {other:?}"))),
        }
    }
}

#[tonic::async_trait]
impl ReclaimSpaceNode for AddonsNode {
    async fn node_reclaim_space(
        &self,
        request: Request<NodeReclaimSpaceRequest>,
    ) -> Result<Response<NodeReclaimSpaceResponse>, Status> {
        let timeout = timeout(request.metadata());
        let request = request.into_inner();
        let id = request.volume_id.clone();
        observed("NodeReclaimSpace", &id, self.reclaim(request, timeout)).await
    }
}
