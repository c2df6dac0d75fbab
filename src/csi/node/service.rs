//! What kubelet calls, each call with what every call has around it.

use std::time::Duration;

use tonic::{Request, Response, Status};

use super::{
    super::{
        call::{observed, patience},
        identity::topology,
    },
    NodeService,
};
use crate::proto::csi::{
    NodeExpandVolumeRequest, NodeExpandVolumeResponse, NodeGetCapabilitiesRequest,
    NodeGetCapabilitiesResponse, NodeGetInfoRequest, NodeGetInfoResponse,
    NodeGetStorageHealthRequest, NodeGetStorageHealthResponse, NodeGetVolumeHealthRequest,
    NodeGetVolumeHealthResponse, NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse,
    NodePublishVolumeRequest, NodePublishVolumeResponse, NodeServiceCapability,
    NodeStageVolumeRequest, NodeStageVolumeResponse, NodeUnpublishVolumeRequest,
    NodeUnpublishVolumeResponse, NodeUnstageVolumeRequest, NodeUnstageVolumeResponse, node_server,
    node_service_capability::{self, rpc},
};

/// The name of a call, a request of it, and where that names its volume.
struct Of<Q>(&'static str, Request<Q>, fn(&Q) -> &String);

impl<Q> Of<Q> {
    async fn answer<T, F>(self, work: impl FnOnce(Q, Duration) -> F) -> Result<Response<T>, Status>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let Self(method, request, volume_id) = self;
        let patience = patience(request.metadata());
        let request = request.into_inner();
        let id = volume_id(&request).clone();
        observed(method, &id, work(request, patience)).await
    }
}

#[tonic::async_trait]
impl node_server::Node for NodeService {
    async fn node_stage_volume(
        &self,
        request: Request<NodeStageVolumeRequest>,
    ) -> Result<Response<NodeStageVolumeResponse>, Status> {
        tracing::debug!(request = ?request.get_ref(), "NodeStageVolume");
        Of("NodeStageVolume", request, |it| &it.volume_id)
            .answer(|request, patience| self.stage(request, patience))
            .await
    }

    async fn node_unstage_volume(
        &self,
        request: Request<NodeUnstageVolumeRequest>,
    ) -> Result<Response<NodeUnstageVolumeResponse>, Status> {
        Of("NodeUnstageVolume", request, |it| &it.volume_id)
            .answer(|request, patience| self.unstage(request, patience))
            .await
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        tracing::debug!(request = ?request.get_ref(), "NodePublishVolume");
        Of("NodePublishVolume", request, |it| &it.volume_id)
            .answer(|request, patience| self.publish(request, patience))
            .await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        Of("NodeUnpublishVolume", request, |it| &it.volume_id)
            .answer(|request, patience| self.unpublish(request, patience))
            .await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        Of("NodeGetVolumeStats", request, |it| &it.volume_id)
            .answer(|request, patience| self.stats(request, patience))
            .await
    }

    async fn node_get_volume_health(
        &self,
        request: Request<NodeGetVolumeHealthRequest>,
    ) -> Result<Response<NodeGetVolumeHealthResponse>, Status> {
        Of("NodeGetVolumeHealth", request, |it| &it.volume_id)
            .answer(|request, patience| self.health(request, patience))
            .await
    }

    async fn node_get_storage_health(
        &self,
        _: Request<NodeGetStorageHealthRequest>,
    ) -> Result<Response<NodeGetStorageHealthResponse>, Status> {
        Err(Status::unimplemented("GET_STORAGE_HEALTH is not announced"))
    }

    async fn node_expand_volume(
        &self,
        request: Request<NodeExpandVolumeRequest>,
    ) -> Result<Response<NodeExpandVolumeResponse>, Status> {
        Of("NodeExpandVolume", request, |it| &it.volume_id)
            .answer(|request, patience| self.expand(request, patience))
            .await
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        use rpc::Type;
        let mut types = vec![
            Type::StageUnstageVolume,
            Type::GetVolumeStats,
            Type::SingleNodeMultiWriter,
        ];
        if self.config.alpha_capabilities {
            types.push(Type::GetVolumeHealth);
        }
        if self.can_grow {
            types.push(Type::ExpandVolume);
        }
        if self.config.volume_mount_group {
            types.push(Type::VolumeMountGroup);
        }
        let capabilities = types
            .into_iter()
            .map(|kind| NodeServiceCapability {
                r#type: Some(node_service_capability::Type::Rpc(
                    node_service_capability::Rpc {
                        r#type: kind.into(),
                    },
                )),
            })
            .collect();
        Ok(Response::new(NodeGetCapabilitiesResponse { capabilities }))
    }

    async fn node_get_info(
        &self,
        _: Request<NodeGetInfoRequest>,
    ) -> Result<Response<NodeGetInfoResponse>, Status> {
        Ok(Response::new(NodeGetInfoResponse {
            node_id: self.config.node_id.clone(),
            max_volumes_per_node: self.config.max_volumes,
            accessible_topology: Some(topology(
                &self.config.driver_name,
                &self.config.node_id,
                &self.segments,
            )),
        }))
    }
}
