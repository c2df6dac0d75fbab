//! csi-addons' replication of volumes to another cluster: requests parsed and passed to the
//! stores.

use std::collections::HashMap;

use prost_types::{Duration, Timestamp};
use tonic::{Request, Response, Status};

use super::{
    super::{
        controller::{answered, taken},
        validate::{self, invalid},
    },
    controller::AddonsController,
};
use crate::{
    proto::addons::replication::{
        DemoteVolumeRequest, DemoteVolumeResponse, DisableVolumeReplicationRequest,
        DisableVolumeReplicationResponse, EnableVolumeReplicationRequest,
        EnableVolumeReplicationResponse, GetReplicationDestinationInfoRequest,
        GetReplicationDestinationInfoResponse, GetVolumeReplicationInfoRequest,
        GetVolumeReplicationInfoResponse, PromoteVolumeRequest, PromoteVolumeResponse,
        ReplicationDestination, ReplicationSource, ResyncVolumeRequest, ResyncVolumeResponse,
        controller_server::Controller,
        get_volume_replication_info_response::Status as Health,
        replication_destination::{Type as Destination, VolumeDestination},
        replication_source::Type,
    },
    provision::{
        Replicated, ReplicationChange, ReplicationHealth, ReplicationInfo, ReplicationParameters,
    },
};

/// The volume of a request: its source, or the id that earlier callers send.
fn volume_of(source: Option<ReplicationSource>, id: String) -> Result<String, Status> {
    let id = match source.map(|source| source.r#type) {
        None => id,
        Some(Some(Type::Volume(volume))) => volume.volume_id,
        Some(Some(Type::Volumegroup(_))) => {
            let why = "groups of volumes are not replicated; replicate each volume";
            return Err(Status::unimplemented(why));
        }
        Some(None) => return Err(invalid("replication_source.type", "is required")),
    };
    validate::id("replication_source.volume.volume_id", &id)?;
    Ok(id)
}

/// The parts that requests share.
struct RequestParts {
    source: Option<ReplicationSource>,
    volume_id: String,
    parameters: HashMap<String, String>,
    secrets: HashMap<String, String>,
}

macro_rules! parts {
    ($request:ident) => {
        RequestParts {
            source: $request.replication_source,
            volume_id: $request.volume_id,
            parameters: $request.parameters,
            secrets: $request.secrets,
        }
    };
}

impl RequestParts {
    /// The volume's id, for the log.
    fn volume(&self) -> String {
        named(self.source.as_ref(), &self.volume_id)
    }
}

impl AddonsController {
    async fn replicate(
        &self,
        parts: RequestParts,
        change: impl FnOnce(&HashMap<String, String>) -> Result<ReplicationChange, Status>,
    ) -> Result<Replicated, Status> {
        let id = volume_of(parts.source, parts.volume_id)?;
        validate::map("parameters", &parts.parameters)?;
        validate::secrets(&parts.secrets)?;
        let change = change(&parts.parameters)?;
        let secrets = parts.secrets.into();
        Ok(self.stores.replicate(id, change, secrets).await?)
    }
}

/// The volume's id, for the log.
fn named(source: Option<&ReplicationSource>, id: &str) -> String {
    match source.and_then(|source| source.r#type.as_ref()) {
        Some(Type::Volume(volume)) => volume.volume_id.clone(),
        _ => id.to_owned(),
    }
}

fn wire(info: ReplicationInfo) -> GetVolumeReplicationInfoResponse {
    let health = match info.health {
        ReplicationHealth::Unknown => Health::Unknown,
        ReplicationHealth::Healthy => Health::Healthy,
        ReplicationHealth::Degraded => Health::Degraded,
        ReplicationHealth::Failed => Health::Error,
    };
    GetVolumeReplicationInfoResponse {
        last_sync_time: info.synced.map(Timestamp::from),
        last_sync_duration: info.took.and_then(|took| Duration::try_from(took).ok()),
        last_sync_bytes: info
            .bytes
            .and_then(|bytes| i64::try_from(bytes).ok())
            .unwrap_or(0),
        status: health.into(),
        status_message: info.message,
    }
}

#[tonic::async_trait]
impl Controller for AddonsController {
    async fn enable_volume_replication(
        &self,
        request: Request<EnableVolumeReplicationRequest>,
    ) -> Result<Response<EnableVolumeReplicationResponse>, Status> {
        let (request, caller) = taken(request);
        let parts = parts!(request);
        let id = parts.volume();
        answered("EnableVolumeReplication", &id, caller, async {
            let enable = |given: &HashMap<String, String>| {
                Ok(ReplicationChange::Enable(ReplicationParameters::parse(
                    given,
                )?))
            };
            self.replicate(parts, enable).await?;
            Ok(EnableVolumeReplicationResponse {})
        })
        .await
    }

    async fn disable_volume_replication(
        &self,
        request: Request<DisableVolumeReplicationRequest>,
    ) -> Result<Response<DisableVolumeReplicationResponse>, Status> {
        let (request, caller) = taken(request);
        let parts = parts!(request);
        let id = parts.volume();
        answered("DisableVolumeReplication", &id, caller, async {
            let disable = |given: &HashMap<String, String>| {
                let force = ReplicationParameters::force(given)?;
                Ok(ReplicationChange::Disable { force })
            };
            self.replicate(parts, disable).await?;
            Ok(DisableVolumeReplicationResponse {})
        })
        .await
    }

    async fn promote_volume(
        &self,
        request: Request<PromoteVolumeRequest>,
    ) -> Result<Response<PromoteVolumeResponse>, Status> {
        let (request, caller) = taken(request);
        let force = request.force;
        let parts = parts!(request);
        let id = parts.volume();
        answered("PromoteVolume", &id, caller, async {
            let promote = |given: &HashMap<String, String>| {
                let parameters = ReplicationParameters::parse(given)?;
                Ok(ReplicationChange::Promote { force, parameters })
            };
            self.replicate(parts, promote).await?;
            Ok(PromoteVolumeResponse {})
        })
        .await
    }

    async fn demote_volume(
        &self,
        request: Request<DemoteVolumeRequest>,
    ) -> Result<Response<DemoteVolumeResponse>, Status> {
        let (request, caller) = taken(request);
        let parts = parts!(request);
        let id = parts.volume();
        answered("DemoteVolume", &id, caller, async {
            // A volume that is in use is not demoted by force either.
            self.replicate(parts, |_| Ok(ReplicationChange::Demote))
                .await?;
            Ok(DemoteVolumeResponse {})
        })
        .await
    }

    async fn resync_volume(
        &self,
        request: Request<ResyncVolumeRequest>,
    ) -> Result<Response<ResyncVolumeResponse>, Status> {
        let (request, caller) = taken(request);
        let force = request.force;
        let parts = parts!(request);
        let id = parts.volume();
        answered("ResyncVolume", &id, caller, async {
            let resync = |_: &HashMap<String, String>| Ok(ReplicationChange::Resync { force });
            let ready = self.replicate(parts, resync).await? == Replicated::Done;
            Ok(ResyncVolumeResponse { ready })
        })
        .await
    }

    async fn get_volume_replication_info(
        &self,
        request: Request<GetVolumeReplicationInfoRequest>,
    ) -> Result<Response<GetVolumeReplicationInfoResponse>, Status> {
        let (request, caller) = taken(request);
        let id = named(request.replication_source.as_ref(), &request.volume_id);
        answered("GetVolumeReplicationInfo", &id, caller, async {
            let id = volume_of(request.replication_source, request.volume_id)?;
            validate::secrets(&request.secrets)?;
            let secrets = request.secrets.into();
            Ok(wire(self.stores.replication_info(id, secrets).await?))
        })
        .await
    }

    async fn get_replication_destination_info(
        &self,
        request: Request<GetReplicationDestinationInfoRequest>,
    ) -> Result<Response<GetReplicationDestinationInfoResponse>, Status> {
        let (request, caller) = taken(request);
        let id = named(request.replication_source.as_ref(), "");
        answered("GetReplicationDestinationInfo", &id, caller, async {
            let id = volume_of(request.replication_source, String::new())?;
            validate::secrets(&request.secrets)?;
            let secrets = request.secrets.into();
            let volume_id = self.stores.replication_destination(id, secrets).await?;
            let volume = Destination::Volume(VolumeDestination { volume_id });
            Ok(GetReplicationDestinationInfoResponse {
                replication_destination: Some(ReplicationDestination {
                    r#type: Some(volume),
                }),
            })
        })
        .await
    }
}
