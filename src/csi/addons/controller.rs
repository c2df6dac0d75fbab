//! csi-addons' calls on volumes that no node has, and on clusters: requests parsed and
//! passed to the [`Stores`].

use std::collections::HashMap;

use tonic::{Request, Response, Status};

use super::{
    super::{
        controller::{answered, taken},
        validate::{self, invalid},
    },
    cluster_of,
};
use crate::{
    proto::addons::{
        fence::{
            Cidr as WireCidr, FenceClusterNetworkRequest, FenceClusterNetworkResponse,
            GetFenceClientsRequest, GetFenceClientsResponse, ListClusterFenceRequest,
            ListClusterFenceResponse, UnfenceClusterNetworkRequest, UnfenceClusterNetworkResponse,
            fence_controller_server::FenceController,
        },
        reclaimspace::{
            ControllerReclaimSpaceRequest, ControllerReclaimSpaceResponse,
            reclaim_space_controller_server::ReclaimSpaceController,
        },
    },
    provision::{BadCidr, Cidr, Stores},
};

/// The services of one controller.
#[derive(Clone, Debug)]
pub struct AddonsController {
    pub(super) stores: Stores,
}

impl AddonsController {
    pub fn new(stores: Stores) -> Self {
        Self { stores }
    }

    async fn fence(
        &self,
        parameters: HashMap<String, String>,
        cidrs: Vec<WireCidr>,
        secrets: HashMap<String, String>,
        fenced: bool,
    ) -> Result<(), Status> {
        let cluster_id = cluster_of(&parameters, &secrets)?;
        let networks = networks(&cidrs)?;
        let stores = &self.stores;
        Ok(stores
            .fence_networks(cluster_id, networks, fenced, secrets.into())
            .await?)
    }
}

/// The networks of a request, at least one.
fn networks(cidrs: &[WireCidr]) -> Result<Vec<Cidr>, Status> {
    if cidrs.is_empty() {
        return Err(invalid("cidrs", "is required"));
    }
    let parse = |(index, one): (usize, &WireCidr)| {
        let bad = |error: BadCidr| invalid(&format!("cidrs[{index}].cidr"), error);
        one.cidr.parse().map_err(bad)
    };
    cidrs.iter().enumerate().map(parse).collect()
}

#[tonic::async_trait]
impl ReclaimSpaceController for AddonsController {
    async fn controller_reclaim_space(
        &self,
        request: Request<ControllerReclaimSpaceRequest>,
    ) -> Result<Response<ControllerReclaimSpaceResponse>, Status> {
        let (request, caller) = taken(request);
        let id = request.volume_id;
        answered("ControllerReclaimSpace", &id, caller, async {
            validate::id("volume_id", &id)?;
            validate::map("parameters", &request.parameters)?;
            validate::secrets(&request.secrets)?;
            let secrets = request.secrets.into();
            self.stores.reclaim_space(id.clone(), secrets).await?;
            Ok(ControllerReclaimSpaceResponse::default())
        })
        .await
    }
}

#[tonic::async_trait]
impl FenceController for AddonsController {
    async fn fence_cluster_network(
        &self,
        request: Request<FenceClusterNetworkRequest>,
    ) -> Result<Response<FenceClusterNetworkResponse>, Status> {
        let (request, caller) = taken(request);
        answered("FenceClusterNetwork", "", caller, async {
            self.fence(request.parameters, request.cidrs, request.secrets, true)
                .await?;
            Ok(FenceClusterNetworkResponse {})
        })
        .await
    }

    async fn unfence_cluster_network(
        &self,
        request: Request<UnfenceClusterNetworkRequest>,
    ) -> Result<Response<UnfenceClusterNetworkResponse>, Status> {
        let (request, caller) = taken(request);
        answered("UnfenceClusterNetwork", "", caller, async {
            self.fence(request.parameters, request.cidrs, request.secrets, false)
                .await?;
            Ok(UnfenceClusterNetworkResponse {})
        })
        .await
    }

    async fn list_cluster_fence(
        &self,
        request: Request<ListClusterFenceRequest>,
    ) -> Result<Response<ListClusterFenceResponse>, Status> {
        let (request, caller) = taken(request);
        answered("ListClusterFence", "", caller, async {
            let cluster_id = cluster_of(&request.parameters, &request.secrets)?;
            let secrets = request.secrets.into();
            let networks = self.stores.fenced_networks(cluster_id, secrets).await?;
            let wire = |network: Cidr| WireCidr {
                cidr: network.to_string(),
            };
            let cidrs = networks.into_iter().map(wire).collect();
            Ok(ListClusterFenceResponse { cidrs })
        })
        .await
    }

    async fn get_fence_clients(
        &self,
        _: Request<GetFenceClientsRequest>,
    ) -> Result<Response<GetFenceClientsResponse>, Status> {
        Err(Status::unimplemented(
            "GET_CLIENTS_TO_FENCE is not announced: ask the node agents",
        ))
    }
}
