//! csi-addons' Identity service: the operations that this process has, and whether it is
//! ready.

use std::sync::Arc;

use tonic::{Request, Response, Status};

use crate::{
    observe::Readiness,
    proto::addons::identity::{
        Capability, GetCapabilitiesRequest, GetCapabilitiesResponse, GetIdentityRequest,
        GetIdentityResponse, ProbeRequest, ProbeResponse,
        capability::{self, Type},
        identity_server,
    },
};

/// An operation that a process has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// It is a controller.
    ControllerService,
    /// It is a node's agent.
    NodeService,
    /// `NodeReclaimSpace`.
    ReclaimOnline,
    /// `ControllerReclaimSpace`.
    ReclaimOffline,
    /// `FenceClusterNetwork` and its like.
    FenceNetworks,
    /// `GetFenceClients`.
    FenceClients,
    /// `EncryptionKeyRotate`.
    RotateKeys,
    /// `EnableVolumeReplication` and its like.
    ReplicateVolumes,
    /// `GetReplicationDestinationInfo`.
    ReplicationDestination,
}

impl From<Operation> for Capability {
    fn from(operation: Operation) -> Self {
        let service = |kind: capability::service::Type| {
            let r#type = kind.into();
            Type::Service(capability::Service { r#type })
        };
        let reclaim = |kind: capability::reclaim_space::Type| {
            let r#type = kind.into();
            Type::ReclaimSpace(capability::ReclaimSpace { r#type })
        };
        let fence = |kind: capability::network_fence::Type| {
            let r#type = kind.into();
            Type::NetworkFence(capability::NetworkFence { r#type })
        };
        let replicate = |kind: capability::volume_replication::Type| {
            let r#type = kind.into();
            Type::VolumeReplication(capability::VolumeReplication { r#type })
        };
        let kind = match operation {
            Operation::ControllerService => service(capability::service::Type::ControllerService),
            Operation::NodeService => service(capability::service::Type::NodeService),
            Operation::ReclaimOffline => reclaim(capability::reclaim_space::Type::Offline),
            Operation::FenceNetworks => fence(capability::network_fence::Type::NetworkFence),
            Operation::FenceClients => fence(capability::network_fence::Type::GetClientsToFence),
            Operation::ReclaimOnline => reclaim(capability::reclaim_space::Type::Online),
            Operation::ReplicateVolumes => {
                replicate(capability::volume_replication::Type::VolumeReplication)
            }
            Operation::ReplicationDestination => {
                replicate(capability::volume_replication::Type::GetReplicationDestinationInfo)
            }
            Operation::RotateKeys => {
                let r#type =
                    capability::encryption_key_rotation::Type::Encryptionkeyrotation.into();
                Type::EncryptionKeyRotation(capability::EncryptionKeyRotation { r#type })
            }
        };
        Self { r#type: Some(kind) }
    }
}

/// The service of one agent.
#[derive(Clone, Debug)]
pub struct AddonsIdentity {
    driver_name: Arc<str>,
    readiness: Readiness,
    operations: Vec<Operation>,
}

impl AddonsIdentity {
    /// `driver_name` and `readiness` are those of CSI's Identity service.
    pub fn new(driver_name: &str, readiness: Readiness, operations: Vec<Operation>) -> Self {
        Self {
            driver_name: driver_name.into(),
            readiness,
            operations,
        }
    }
}

#[tonic::async_trait]
impl identity_server::Identity for AddonsIdentity {
    async fn get_identity(
        &self,
        _: Request<GetIdentityRequest>,
    ) -> Result<Response<GetIdentityResponse>, Status> {
        Ok(Response::new(GetIdentityResponse {
            name: self.driver_name.to_string(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            manifest: [].into(),
        }))
    }

    async fn get_capabilities(
        &self,
        _: Request<GetCapabilitiesRequest>,
    ) -> Result<Response<GetCapabilitiesResponse>, Status> {
        let operations = self.operations.iter();
        Ok(Response::new(GetCapabilitiesResponse {
            capabilities: operations.map(|one| (*one).into()).collect(),
        }))
    }

    /// A plugin that is not ready answers `ready=false`: at an error the sidecar ends.
    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        Ok(Response::new(ProbeResponse {
            ready: Some(self.readiness.reason().is_none()),
        }))
    }
}
