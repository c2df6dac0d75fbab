//! The calls of the Node service.

use std::time::Duration;

use tonic::{Request, Response, Status};

use super::{
    super::{
        call::{Caller, STATISTICS_AGE, observed},
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

/// The measured calls, which the metrics show before the first of each.
pub const METHODS: [&str; 7] = [
    "NodeStageVolume",
    "NodeUnstageVolume",
    "NodePublishVolume",
    "NodeUnpublishVolume",
    "NodeGetVolumeStats",
    "NodeGetVolumeHealth",
    "NodeExpandVolume",
];

/// A call on one volume: its name, its request, and the field with the volume's id.
struct VolumeCall<Q>(&'static str, Request<Q>, fn(&Q) -> &String);

impl<Q> VolumeCall<Q> {
    /// Runs the call within its caller's timeout, and logs and measures it.
    async fn answer<T, F>(self, work: impl FnOnce(Q, Duration) -> F) -> Result<Response<T>, Status>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let Self(method, request, volume_id) = self;
        let caller = Caller::of(request.metadata());
        let request = request.into_inner();
        let id = volume_id(&request).clone();
        observed(method, &id, caller, work(request, caller.timeout)).await
    }
}

#[tonic::async_trait]
impl node_server::Node for NodeService {
    async fn node_stage_volume(
        &self,
        request: Request<NodeStageVolumeRequest>,
    ) -> Result<Response<NodeStageVolumeResponse>, Status> {
        tracing::debug!(request = ?request.get_ref(), "NodeStageVolume");
        VolumeCall("NodeStageVolume", request, |it| &it.volume_id)
            .answer(|request, timeout| self.stage(request, timeout))
            .await
    }

    async fn node_unstage_volume(
        &self,
        request: Request<NodeUnstageVolumeRequest>,
    ) -> Result<Response<NodeUnstageVolumeResponse>, Status> {
        VolumeCall("NodeUnstageVolume", request, |it| &it.volume_id)
            .answer(|request, timeout| self.unstage(request, timeout))
            .await
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        tracing::debug!(request = ?request.get_ref(), "NodePublishVolume");
        VolumeCall("NodePublishVolume", request, |it| &it.volume_id)
            .answer(|request, timeout| self.publish(request, timeout))
            .await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        VolumeCall("NodeUnpublishVolume", request, |it| &it.volume_id)
            .answer(|request, timeout| self.unpublish(request, timeout))
            .await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        let answer = VolumeCall("NodeGetVolumeStats", request, |it| &it.volume_id)
            .answer(|request, timeout| self.stats(request, timeout));
        let (answer, age) = answer.await?.into_inner();
        let mut answer = Response::new(answer);
        if let Some(age) = age {
            let age = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
            answer.metadata_mut().insert(STATISTICS_AGE, age.into());
        }
        Ok(answer)
    }

    async fn node_get_volume_health(
        &self,
        request: Request<NodeGetVolumeHealthRequest>,
    ) -> Result<Response<NodeGetVolumeHealthResponse>, Status> {
        VolumeCall("NodeGetVolumeHealth", request, |it| &it.volume_id)
            .answer(|request, timeout| self.health(request, timeout))
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
        VolumeCall("NodeExpandVolume", request, |it| &it.volume_id)
            .answer(|request, timeout| self.expand(request, timeout))
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
            Type::ExpandVolume,
            Type::SingleNodeMultiWriter,
        ];
        if self.config.alpha_capabilities {
            types.push(Type::GetVolumeHealth);
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
