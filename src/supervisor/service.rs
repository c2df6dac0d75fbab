//! The supervisor's gRPC service, over the [`Keeper`].

use tonic::{Code, Request, Response, Status};
use uuid::Uuid;

use super::{NbdOptions, Spec, SpecError, SupervisorError, keeper::Keeper, spec::RegistrationKey};
use crate::{
    Done,
    ceph::krbd::ImageSpec,
    observe::metrics,
    proto::{
        code_name,
        holder::{
            self as proto, GrowRequest, GrowResponse, Held, ListRequest, ListResponse, MapRequest,
            MapResponse, ReattachRequest, ReattachResponse, UnmapRequest, UnmapResponse,
            holder_server::Holder,
        },
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
        counted("Map", async {
            let mut request = request.into_inner();
            let key = Secret::new(std::mem::take(&mut request.key));
            let spec = spec_of(request)?;
            tracing::info!(volume = spec.volume_id, image = %spec.image, "map");
            let (device, done) = self.keeper.map(spec, key).await?;
            Ok(MapResponse {
                node: device.block.node.display().to_string(),
                already: done == Done::Already,
            })
        })
        .await
    }

    async fn unmap(
        &self,
        request: Request<UnmapRequest>,
    ) -> Result<Response<UnmapResponse>, Status> {
        let UnmapRequest { volume_id } = request.into_inner();
        tracing::info!(volume = volume_id, "unmap");
        counted("Unmap", async {
            let already = self.keeper.unmap(&volume_id).await? == Done::Already;
            Ok(UnmapResponse { already })
        })
        .await
    }

    async fn grow(&self, request: Request<GrowRequest>) -> Result<Response<GrowResponse>, Status> {
        let GrowRequest { volume_id, bytes } = request.into_inner();
        tracing::info!(volume = volume_id, bytes, "grow");
        counted("Grow", async {
            let bytes = self.keeper.grow(&volume_id, bytes).await?;
            Ok(GrowResponse { bytes })
        })
        .await
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
        counted("Reattach", async {
            let device = self.keeper.reattach(&volume_id, user, key).await?;
            Ok(ReattachResponse {
                node: device.block.node.display().to_string(),
            })
        })
        .await
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

/// The calls that the metrics count. The agents poll the list, which would drown the others.
pub const METHODS: [&str; 4] = ["Map", "Unmap", "Grow", "Reattach"];

/// Runs one call, and counts it by its code.
async fn counted<T>(
    method: &'static str,
    work: impl Future<Output = Result<T, SupervisorError>>,
) -> Result<Response<T>, Status> {
    let timer = metrics::call(method);
    let answer = work.await;
    let code = answer
        .as_ref()
        .map_or_else(SupervisorError::code, |_| Code::Ok);
    let _ = timer.answered(code_name(code));
    Ok(Response::new(answer?))
}

fn spec_of(request: MapRequest) -> Result<Spec, SpecError> {
    Ok(Spec {
        volume_id: request.volume_id,
        image: ImageSpec {
            cluster_id: request.cluster_id,
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
