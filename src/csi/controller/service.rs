//! The calls of the Controller service, as tonic's trait has them.

use std::time::Duration;

use tonic::{Request, Response, Status, metadata::MetadataValue};

use super::{
    super::{
        call::{Caller, OMITTED, TAKES_LESS, observed},
        validate::{self, required},
    },
    Controller, listing,
};
use crate::{
    observe::logs,
    proto::csi::{
        self as wire, ControllerServiceCapability, controller_server,
        controller_service_capability as capability,
        controller_service_capability::rpc::Type as Rpc,
    },
    provision::{self, NewSnapshot, Omitted},
};

/// The measured calls, which the metrics show before the first of each.
pub const METHODS: [&str; 21] = [
    "CreateVolume",
    "DeleteVolume",
    "ControllerPublishVolume",
    "ControllerUnpublishVolume",
    "ValidateVolumeCapabilities",
    "ListVolumes",
    "ControllerListVolumeHealth",
    "ControllerGetVolumeHealth",
    "GetCapacity",
    "CreateSnapshot",
    "DeleteSnapshot",
    "ListSnapshots",
    "GetSnapshot",
    "ControllerExpandVolume",
    "ControllerGetVolume",
    "ControllerModifyVolume",
    "CreateVolumeGroupSnapshot",
    "DeleteVolumeGroupSnapshot",
    "GetVolumeGroupSnapshot",
    "GetMetadataAllocated",
    "GetMetadataDelta",
];

/// A request, and its caller.
pub fn taken<Q>(request: Request<Q>) -> (Q, Caller) {
    let caller = Caller::of(request.metadata());
    (request.into_inner(), caller)
}

/// Runs one call, and answers it before its caller's timeout, so that the claim's events
/// name what the work waits for. The work continues, and the next equal call waits for
/// it.
pub async fn answered<T>(
    method: &'static str,
    subject: &str,
    caller: Caller,
    work: impl Future<Output = Result<T, Status>>,
) -> Result<Response<T>, Status> {
    let in_time = async {
        match provision::within(caller.timeout, work).await {
            Ok(answer) => answer,
            Err(under_way) => Err(Status::deadline_exceeded(format!(
                "{method} continues after this call's deadline, {under_way}; the next equal call joins it"
            ))),
        }
    };
    observed(method, subject, caller, in_time).await
}

/// The answer, with the omitted storage in its metadata.
fn with_omitted<T>(mut answer: Response<T>, omitted: Option<&Omitted>) -> Response<T> {
    for sentence in omitted.map(Omitted::take).into_iter().flatten() {
        let value = MetadataValue::from_bytes(sentence.as_bytes());
        answer.metadata_mut().append_bin(OMITTED, value);
    }
    answer
}

#[tonic::async_trait]
impl controller_server::Controller for Controller {
    async fn create_volume(
        &self,
        request: Request<wire::CreateVolumeRequest>,
    ) -> Result<Response<wire::CreateVolumeResponse>, Status> {
        let (request, caller) = taken(request);
        answered("CreateVolume", "", caller, async {
            logs::record_name(&request.name);
            let volume = Box::pin(self.create(request)).await?;
            logs::record_volume_id(&volume.volume_id);
            let volume = Some(volume);
            Ok(wire::CreateVolumeResponse { volume })
        })
        .await
    }

    async fn delete_volume(
        &self,
        request: Request<wire::DeleteVolumeRequest>,
    ) -> Result<Response<wire::DeleteVolumeResponse>, Status> {
        let (request, caller) = taken(request);
        let wire::DeleteVolumeRequest { volume_id, secrets } = request;
        answered("DeleteVolume", &volume_id, caller, async {
            validate::id("volume_id", &volume_id)?;
            validate::secrets(&secrets)?;
            let stores = &self.stores;
            stores
                .delete_volume(volume_id.clone(), secrets.into())
                .await?;
            Ok(wire::DeleteVolumeResponse {})
        })
        .await
    }

    async fn controller_publish_volume(
        &self,
        request: Request<wire::ControllerPublishVolumeRequest>,
    ) -> Result<Response<wire::ControllerPublishVolumeResponse>, Status> {
        let (request, caller) = taken(request);
        let id = request.volume_id.clone();
        answered(
            "ControllerPublishVolume",
            &id,
            caller,
            self.publish(request),
        )
        .await
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<wire::ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<wire::ControllerUnpublishVolumeResponse>, Status> {
        let (request, caller) = taken(request);
        let id = request.volume_id.clone();
        // It answers at once where a node keeps the volume.
        let work = self.unpublish(
            request,
            caller.timeout.saturating_sub(Duration::from_millis(500)),
        );
        answered("ControllerUnpublishVolume", &id, caller, work).await
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<wire::ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<wire::ValidateVolumeCapabilitiesResponse>, Status> {
        let (request, caller) = taken(request);
        let id = request.volume_id.clone();
        answered(
            "ValidateVolumeCapabilities",
            &id,
            caller,
            self.confirm(request),
        )
        .await
    }

    async fn list_volumes(
        &self,
        request: Request<wire::ListVolumesRequest>,
    ) -> Result<Response<wire::ListVolumesResponse>, Status> {
        use wire::list_volumes_response::Entry;
        let takes_less = request.metadata().contains_key(TAKES_LESS);
        let (request, caller) = taken(request);
        let omitted = takes_less.then(|| Omitted::within(caller.timeout));
        let listed = answered("ListVolumes", "", caller, async {
            let mut what = listing(request.max_entries, request.starting_token)?;
            what.omitted.clone_from(&omitted);
            let page = self.stores.list_volumes(what).await?;
            let entries = page.entries.into_iter().map(|volume| Entry {
                volume: Some(self.volume(volume)),
                status: None,
            });
            Ok(wire::ListVolumesResponse {
                entries: entries.collect(),
                next_token: page.next.unwrap_or_default(),
            })
        });
        Ok(with_omitted(listed.await?, omitted.as_ref()))
    }

    async fn controller_list_volume_health(
        &self,
        request: Request<wire::ControllerListVolumeHealthRequest>,
    ) -> Result<Response<wire::ControllerListVolumeHealthResponse>, Status> {
        let (request, caller) = taken(request);
        answered(
            "ControllerListVolumeHealth",
            "",
            caller,
            self.all_health(request),
        )
        .await
    }

    async fn controller_get_volume_health(
        &self,
        request: Request<wire::ControllerGetVolumeHealthRequest>,
    ) -> Result<Response<wire::ControllerGetVolumeHealthResponse>, Status> {
        let (request, caller) = taken(request);
        let id = request.volume_id;
        answered("ControllerGetVolumeHealth", &id, caller, async {
            validate::id("volume_id", &id)?;
            let health = self.health(id.clone(), request.secrets.into()).await?;
            let volume_health = Some(health);
            Ok(wire::ControllerGetVolumeHealthResponse { volume_health })
        })
        .await
    }

    async fn get_capacity(
        &self,
        request: Request<wire::GetCapacityRequest>,
    ) -> Result<Response<wire::GetCapacityResponse>, Status> {
        let (request, caller) = taken(request);
        answered("GetCapacity", "", caller, self.capacity(request)).await
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<wire::ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<wire::ControllerGetCapabilitiesResponse>, Status> {
        let able = self.stores.abilities();
        let announced = [
            (true, ANNOUNCED),
            (able.lists, LISTING),
            (able.modifies, MODIFYING),
            (able.publishes, PUBLISHING),
            (self.alpha, ALPHA),
            (self.alpha && able.lists, ALPHA_LISTING),
        ];
        let announced = announced.iter().filter(|(able, _)| *able);
        let capability = |kind: &Rpc| ControllerServiceCapability {
            r#type: Some(capability::Type::Rpc(capability::Rpc {
                r#type: (*kind).into(),
            })),
        };
        Ok(Response::new(wire::ControllerGetCapabilitiesResponse {
            capabilities: announced
                .flat_map(|(_, kinds)| *kinds)
                .map(capability)
                .collect(),
        }))
    }

    async fn create_snapshot(
        &self,
        request: Request<wire::CreateSnapshotRequest>,
    ) -> Result<Response<wire::CreateSnapshotResponse>, Status> {
        let (request, caller) = taken(request);
        let source = request.source_volume_id;
        answered("CreateSnapshot", &source, caller, async {
            logs::record_name(&request.name);
            validate::id("source_volume_id", &source)?;
            required("name", &request.name)?;
            validate::secrets(&request.secrets)?;
            validate::map("parameters", &request.parameters)?;
            let new = NewSnapshot {
                name: request.name,
                volume: source.clone(),
                parameters: request.parameters,
                secrets: request.secrets.into(),
            };
            let taken = self.stores.create_snapshot(new).await?;
            let snapshot = Some(self.snapshot(taken));
            Ok(wire::CreateSnapshotResponse { snapshot })
        })
        .await
    }

    async fn delete_snapshot(
        &self,
        request: Request<wire::DeleteSnapshotRequest>,
    ) -> Result<Response<wire::DeleteSnapshotResponse>, Status> {
        let (request, caller) = taken(request);
        let id = request.snapshot_id;
        answered("DeleteSnapshot", &id, caller, async {
            validate::id("snapshot_id", &id)?;
            validate::secrets(&request.secrets)?;
            let stores = &self.stores;
            stores
                .delete_snapshot(id.clone(), request.secrets.into())
                .await?;
            Ok(wire::DeleteSnapshotResponse {})
        })
        .await
    }

    async fn list_snapshots(
        &self,
        request: Request<wire::ListSnapshotsRequest>,
    ) -> Result<Response<wire::ListSnapshotsResponse>, Status> {
        use wire::list_snapshots_response::Entry;
        let (request, caller) = taken(request);
        answered("ListSnapshots", "", caller, async {
            let page = self.snapshots(request).await?;
            let entries = page.entries.into_iter().map(|snapshot| Entry {
                snapshot: Some(self.snapshot(snapshot)),
            });
            Ok(wire::ListSnapshotsResponse {
                entries: entries.collect(),
                next_token: page.next.unwrap_or_default(),
            })
        })
        .await
    }

    async fn get_snapshot(
        &self,
        request: Request<wire::GetSnapshotRequest>,
    ) -> Result<Response<wire::GetSnapshotResponse>, Status> {
        let (request, caller) = taken(request);
        let wire::GetSnapshotRequest {
            snapshot_id: id,
            secrets,
        } = request;
        answered("GetSnapshot", &id, caller, async {
            validate::id("snapshot_id", &id)?;
            let stores = &self.stores;
            let found = stores.get_snapshot(id.clone(), secrets.into()).await?;
            let snapshot = Some(self.snapshot(found));
            Ok(wire::GetSnapshotResponse { snapshot })
        })
        .await
    }

    async fn controller_expand_volume(
        &self,
        request: Request<wire::ControllerExpandVolumeRequest>,
    ) -> Result<Response<wire::ControllerExpandVolumeResponse>, Status> {
        let (request, caller) = taken(request);
        let id = request.volume_id.clone();
        answered("ControllerExpandVolume", &id, caller, self.expand(request)).await
    }

    async fn controller_get_volume(
        &self,
        request: Request<wire::ControllerGetVolumeRequest>,
    ) -> Result<Response<wire::ControllerGetVolumeResponse>, Status> {
        use wire::controller_get_volume_response::VolumeStatus;
        let (request, caller) = taken(request);
        let id = request.volume_id;
        answered("ControllerGetVolume", &id, caller, async {
            validate::id("volume_id", &id)?;
            let found = self.stores.get_volume(id.clone()).await?;
            Ok(wire::ControllerGetVolumeResponse {
                volume: Some(self.volume(found.volume)),
                status: Some(VolumeStatus {
                    published_node_ids: found.nodes,
                }),
            })
        })
        .await
    }

    async fn controller_modify_volume(
        &self,
        request: Request<wire::ControllerModifyVolumeRequest>,
    ) -> Result<Response<wire::ControllerModifyVolumeResponse>, Status> {
        let (request, caller) = taken(request);
        let id = request.volume_id;
        answered("ControllerModifyVolume", &id, caller, async {
            validate::id("volume_id", &id)?;
            validate::secrets(&request.secrets)?;
            validate::map("mutable_parameters", &request.mutable_parameters)?;
            let stores = &self.stores;
            let parameters = request.mutable_parameters;
            stores
                .modify_volume(id.clone(), parameters, request.secrets.into())
                .await?;
            Ok(wire::ControllerModifyVolumeResponse {})
        })
        .await
    }
}

const ANNOUNCED: &[Rpc] = &[
    Rpc::CreateDeleteVolume,
    Rpc::CreateDeleteSnapshot,
    Rpc::CloneVolume,
    Rpc::ExpandVolume,
    Rpc::SingleNodeMultiWriter,
];
/// The calls without secrets, or with optional ones.
const LISTING: &[Rpc] = &[
    Rpc::ListVolumes,
    Rpc::GetCapacity,
    Rpc::ListSnapshots,
    Rpc::GetVolume,
];
const MODIFYING: &[Rpc] = &[Rpc::ModifyVolume];
const PUBLISHING: &[Rpc] = &[Rpc::PublishUnpublishVolume];
const ALPHA: &[Rpc] = &[Rpc::GetSnapshot, Rpc::GetVolumeHealth];
const ALPHA_LISTING: &[Rpc] = &[Rpc::ListVolumeHealth];
