//! The part of the Node service that a controller beside a node serves.
//!
//! Started with `--node-deployment`, external-provisioner calls `NodeGetInfo` on the
//! socket of its controller, to learn for which node it provisions. The node agent
//! serves all other calls, on its own socket.

use tonic::{Request, Response, Status};

use super::super::identity::topology;
use crate::proto::csi::{self as wire, node_server};

/// Answers the node's id and topology.
#[derive(Clone, Debug)]
pub struct WhichNode {
    driver_name: String,
    node_id: String,
}

impl WhichNode {
    /// The service beside the node agent of `node_id`.
    pub fn new(driver_name: &str, node_id: &str) -> Self {
        Self {
            driver_name: driver_name.to_owned(),
            node_id: node_id.to_owned(),
        }
    }
}

/// Refuses a call that only the node agent serves.
macro_rules! of_the_agent {
    ($($call:ident: $request:ident -> $response:ident;)*) => {
        #[tonic::async_trait]
        impl node_server::Node for WhichNode {
            async fn node_get_info(
                &self,
                _: Request<wire::NodeGetInfoRequest>,
            ) -> Result<Response<wire::NodeGetInfoResponse>, Status> {
                Ok(Response::new(wire::NodeGetInfoResponse {
                    node_id: self.node_id.clone(),
                    // Only the node agent knows how many volumes the node takes.
                    max_volumes_per_node: 0,
                    accessible_topology: Some(topology(&self.driver_name, &self.node_id, &[])),
                }))
            }

            async fn node_get_capabilities(
                &self,
                _: Request<wire::NodeGetCapabilitiesRequest>,
            ) -> Result<Response<wire::NodeGetCapabilitiesResponse>, Status> {
                Ok(Response::new(wire::NodeGetCapabilitiesResponse::default()))
            }

            $(
                async fn $call(
                    &self,
                    _: Request<wire::$request>,
                ) -> Result<Response<wire::$response>, Status> {
                    Err(Status::unimplemented(
                        "this is a controller; the node agent has a socket of its own",
                    ))
                }
            )*
        }
    };
}

of_the_agent! {
    node_stage_volume: NodeStageVolumeRequest -> NodeStageVolumeResponse;
    node_unstage_volume: NodeUnstageVolumeRequest -> NodeUnstageVolumeResponse;
    node_publish_volume: NodePublishVolumeRequest -> NodePublishVolumeResponse;
    node_unpublish_volume: NodeUnpublishVolumeRequest -> NodeUnpublishVolumeResponse;
    node_get_volume_stats: NodeGetVolumeStatsRequest -> NodeGetVolumeStatsResponse;
    node_get_volume_health: NodeGetVolumeHealthRequest -> NodeGetVolumeHealthResponse;
    node_get_storage_health: NodeGetStorageHealthRequest -> NodeGetStorageHealthResponse;
    node_expand_volume: NodeExpandVolumeRequest -> NodeExpandVolumeResponse;
}
