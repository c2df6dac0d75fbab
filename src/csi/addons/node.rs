//! csi-addons' calls on a volume that this node has: requests parsed into
//! [`crate::volume`]'s calls.

use std::{sync::Arc, time::Duration};

use tonic::{Request, Response, Status};

use super::{
    super::{
        call::{Caller, observed},
        validate,
    },
    cluster_of,
};
use crate::{
    proto::addons::{
        encryptionkeyrotation::{
            EncryptionKeyRotateRequest, EncryptionKeyRotateResponse,
            encryption_key_rotation_controller_server::EncryptionKeyRotationController,
        },
        fence::{
            Cidr, ClientDetails, FenceClusterNetworkRequest, FenceClusterNetworkResponse,
            GetFenceClientsRequest, GetFenceClientsResponse, ListClusterFenceRequest,
            ListClusterFenceResponse, UnfenceClusterNetworkRequest, UnfenceClusterNetworkResponse,
            fence_controller_server::FenceController,
        },
        reclaimspace::{
            NodeReclaimSpaceRequest, NodeReclaimSpaceResponse, StorageConsumption,
            reclaim_space_node_server::ReclaimSpaceNode,
        },
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
        validate::id("volume_id", &request.volume_id)?;
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

impl AddonsNode {
    async fn rotate_key(
        &self,
        request: EncryptionKeyRotateRequest,
        timeout: Duration,
    ) -> Result<EncryptionKeyRotateResponse, Status> {
        validate::id("volume_id", &request.volume_id)?;
        validate::optional_path("volume_path", &request.volume_path)?;
        if !request.encryption_key.is_empty() {
            let why = "must be empty: the agent makes the new passphrase";
            return Err(validate::invalid("encryption_key", why));
        }
        validate::secrets(&request.secrets)?;
        let rotate = spec::Request {
            call: Call::RotateKey(validate::clean(&request.volume_path)),
            secrets: request.secrets.into(),
        };
        match self.submit(request.volume_id, rotate, timeout).await? {
            Outcome::Done => Ok(EncryptionKeyRotateResponse {}),
            other => Err(Status::internal(format!("a rotation ended in {other:?}"))),
        }
    }

    async fn fence_clients(
        &self,
        request: GetFenceClientsRequest,
        timeout: Duration,
    ) -> Result<GetFenceClientsResponse, Status> {
        let cluster_id = cluster_of(&request.parameters, &request.secrets)?;
        let (cluster, secrets) = (cluster_id.clone(), request.secrets.into());
        let ask = move |node: Arc<Node>| node.storage_client(cluster, secrets, timeout);
        let asked = self.node.run(ask).await;
        let asked = asked.ok_or_else(|| Status::unavailable("the node agent is shutting down"))?;
        let late = || {
            let what = format!("cluster {cluster_id:?} has not answered yet; try again");
            Status::deadline_exceeded(what)
        };
        let client = asked.ok_or_else(late)?;
        let client = client.map_err(|error| Status::from(&error))?;
        let bits = if client.host.is_ipv4() { 32 } else { 128 };
        let cidr = format!("{}/{bits}", client.host);
        let details = ClientDetails {
            id: client.cluster,
            addresses: vec![Cidr { cidr }],
        };
        Ok(GetFenceClientsResponse {
            clients: vec![details],
        })
    }
}

fn not_here() -> Status {
    Status::unimplemented("NETWORK_FENCE is not announced: ask the controller")
}

#[tonic::async_trait]
impl FenceController for AddonsNode {
    async fn fence_cluster_network(
        &self,
        _: Request<FenceClusterNetworkRequest>,
    ) -> Result<Response<FenceClusterNetworkResponse>, Status> {
        Err(not_here())
    }

    async fn unfence_cluster_network(
        &self,
        _: Request<UnfenceClusterNetworkRequest>,
    ) -> Result<Response<UnfenceClusterNetworkResponse>, Status> {
        Err(not_here())
    }

    async fn list_cluster_fence(
        &self,
        _: Request<ListClusterFenceRequest>,
    ) -> Result<Response<ListClusterFenceResponse>, Status> {
        Err(not_here())
    }

    async fn get_fence_clients(
        &self,
        request: Request<GetFenceClientsRequest>,
    ) -> Result<Response<GetFenceClientsResponse>, Status> {
        let caller = Caller::of(request.metadata());
        let work = self.fence_clients(request.into_inner(), caller.timeout);
        observed("GetFenceClients", "", caller, work).await
    }
}

#[tonic::async_trait]
impl ReclaimSpaceNode for AddonsNode {
    async fn node_reclaim_space(
        &self,
        request: Request<NodeReclaimSpaceRequest>,
    ) -> Result<Response<NodeReclaimSpaceResponse>, Status> {
        let caller = Caller::of(request.metadata());
        let request = request.into_inner();
        let id = request.volume_id.clone();
        let work = self.reclaim(request, caller.timeout);
        observed("NodeReclaimSpace", &id, caller, work).await
    }
}

#[tonic::async_trait]
impl EncryptionKeyRotationController for AddonsNode {
    async fn encryption_key_rotate(
        &self,
        request: Request<EncryptionKeyRotateRequest>,
    ) -> Result<Response<EncryptionKeyRotateResponse>, Status> {
        let caller = Caller::of(request.metadata());
        let request = request.into_inner();
        let id = request.volume_id.clone();
        let work = self.rotate_key(request, caller.timeout);
        observed("EncryptionKeyRotate", &id, caller, work).await
    }
}
