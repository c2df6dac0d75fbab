//! The supervisor's gRPC service, over the [`Keeper`].

use tonic::{Request, Response, Status};
use uuid::Uuid;

use super::{NbdOptions, Spec, SpecError, SupervisorError, keeper::Keeper, spec::RegistrationKey};
use crate::{
    Done,
    ceph::krbd::ImageSpec,
    proto::holder::{
        self as proto, GrowRequest, GrowResponse, Held, ListRequest, ListResponse, MapRequest,
        MapResponse, ReattachRequest, ReattachResponse, UnmapRequest, UnmapResponse,
        holder_server::Holder,
    },
    secret::Secret,
};

/// The service over a keeper.
#[derive(Debug)]
pub struct SupervisorService {
    keeper: Keeper,
}

impl SupervisorService {
    /// A service for this keeper's volumes.
    pub fn new(keeper: Keeper) -> Self {
        Self { keeper }
    }
}

#[tonic::async_trait]
impl Holder for SupervisorService {
    async fn map(&self, request: Request<MapRequest>) -> Result<Response<MapResponse>, Status> {
        let mut request = request.into_inner();
        let key = Secret::new(std::mem::take(&mut request.key));
        let spec = spec_of(request).map_err(SupervisorError::from)?;
        tracing::info!(volume = spec.volume_id, image = %spec.image, "map");
        let (device, done) = self.keeper.map(spec, key).await?;
        Ok(Response::new(MapResponse {
            node: device.block.node.display().to_string(),
            already: done == Done::Already,
        }))
    }

    async fn unmap(
        &self,
        request: Request<UnmapRequest>,
    ) -> Result<Response<UnmapResponse>, Status> {
        let UnmapRequest { volume_id } = request.into_inner();
        tracing::info!(volume = volume_id, "unmap");
        let done = self.keeper.unmap(&volume_id).await?;
        Ok(Response::new(UnmapResponse {
            already: done == Done::Already,
        }))
    }

    async fn grow(&self, request: Request<GrowRequest>) -> Result<Response<GrowResponse>, Status> {
        let GrowRequest { volume_id, bytes } = request.into_inner();
        tracing::info!(volume = volume_id, bytes, "grow");
        let bytes = self.keeper.grow(&volume_id, bytes).await?;
        Ok(Response::new(GrowResponse { bytes }))
    }

    async fn reattach(
        &self,
        request: Request<ReattachRequest>,
    ) -> Result<Response<ReattachResponse>, Status> {
        let ReattachRequest {
            volume_id,
            user,
            key,
        } = request.into_inner();
        tracing::info!(volume = volume_id, "reattach");
        let user = Some(user).filter(|user| !user.is_empty());
        let key = Secret::new(key);
        let device = self.keeper.reattach(&volume_id, user, key).await?;
        Ok(Response::new(ReattachResponse {
            node: device.block.node.display().to_string(),
        }))
    }

    async fn list(&self, _: Request<ListRequest>) -> Result<Response<ListResponse>, Status> {
        let volumes = self
            .keeper
            .list()
            .into_iter()
            .map(|(volume_id, status)| Held {
                volume_id,
                image: status.image.unwrap_or_default(),
                node: status.node.unwrap_or_default(),
                pid: status.pid.unwrap_or_default(),
                has_key: status.has_key,
                trouble: status.trouble.unwrap_or_default(),
            });
        Ok(Response::new(ListResponse {
            volumes: volumes.collect(),
        }))
    }
}

fn spec_of(request: MapRequest) -> Result<Spec, SpecError> {
    Ok(Spec {
        volume_id: request.volume_id,
        image: ImageSpec {
            cluster_id: String::new(),
            pool: request.pool,
            namespace: request.namespace,
            name: request.image,
            snapshot: Some(request.snapshot).filter(|name| !name.is_empty()),
        },
        monitors: request.monitors,
        user: request.user,
        options: NbdOptions::of(request.options.iter().map(String::as_str))?,
        read_only: request.read_only,
        fencing: request.fencing.map(fencing_of).transpose()?,
    })
}

fn fencing_of(given: proto::Fencing) -> Result<RegistrationKey, SpecError> {
    let volume = Uuid::parse_str(&given.volume_uuid).map_err(|_| SpecError::Unsuited {
        what: "volume's UUID",
        text: given.volume_uuid,
    })?;
    Ok(RegistrationKey {
        node_id: given.node_id,
        volume,
    })
}
