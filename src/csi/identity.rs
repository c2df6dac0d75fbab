//! The Identity service: who this plugin is and that it is there.

use std::sync::Arc;

use tonic::{Request, Response, Status};

use crate::{
    observe::Readiness,
    proto::csi::{
        GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest,
        GetPluginInfoResponse, PluginCapability, ProbeRequest, ProbeResponse, Topology,
        identity_server,
        plugin_capability::{self, service, volume_expansion},
    },
};

/// The default of `--driver-name`.
pub const DEFAULT_DRIVER_NAME: &str = "block.uring-csi.dev";

/// The key of the topology segment that names a node: where volumes of a local
/// pool can be reached.
pub fn topology_key(driver_name: &str) -> String {
    format!("topology.{driver_name}/node")
}

/// The place of a node, as both agents say it.
pub fn topology(driver_name: &str, node_id: &str) -> Topology {
    Topology {
        segments: [(topology_key(driver_name), node_id.to_owned())].into(),
    }
}

/// Answers for one agent.
#[derive(Clone, Debug)]
pub struct Identity {
    driver_name: Arc<str>,
    readiness: Readiness,
}

impl Identity {
    /// `driver_name` must have passed [`super::validate::driver_name`].
    /// `readiness`: whether the plugin can do anything at all; what passes by
    /// itself, such as a pool that is not mounted yet, is no part of it.
    pub fn new(driver_name: &str, readiness: Readiness) -> Self {
        Self {
            driver_name: driver_name.into(),
            readiness,
        }
    }
}

fn service(kind: service::Type) -> PluginCapability {
    PluginCapability {
        r#type: Some(plugin_capability::Type::Service(
            plugin_capability::Service {
                r#type: kind.into(),
            },
        )),
    }
}

fn expansion(kind: volume_expansion::Type) -> PluginCapability {
    PluginCapability {
        r#type: Some(plugin_capability::Type::VolumeExpansion(
            plugin_capability::VolumeExpansion {
                r#type: kind.into(),
            },
        )),
    }
}

#[tonic::async_trait]
impl identity_server::Identity for Identity {
    async fn get_plugin_info(
        &self,
        _: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        Ok(Response::new(GetPluginInfoResponse {
            name: self.driver_name.to_string(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            manifest: [].into(),
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        Ok(Response::new(GetPluginCapabilitiesResponse {
            capabilities: vec![
                service(service::Type::ControllerService),
                service(service::Type::VolumeAccessibilityConstraints),
                expansion(volume_expansion::Type::Online),
            ],
        }))
    }

    /// Not ready is an answer with `ready=false`, not an error.
    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        Ok(Response::new(ProbeResponse {
            ready: Some(self.readiness.reason().is_none()),
        }))
    }
}
