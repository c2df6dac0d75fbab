//! The GroupController service: snapshots of several volumes at one moment.

use tonic::{Request, Response, Status};

use super::{
    super::validate::{self, invalid, required},
    Controller, answered, taken,
};
use crate::{
    observe::logs,
    proto::csi::{
        self as wire, GroupControllerServiceCapability, group_controller_server::GroupController,
        group_controller_service_capability as capability,
        group_controller_service_capability::rpc::Type as Rpc,
    },
    provision::{GroupSnapshotInfo, NewGroupSnapshot},
};

impl Controller {
    fn group_snapshot(&self, taken: GroupSnapshotInfo) -> wire::VolumeGroupSnapshot {
        let snapshots = taken.snapshots.into_iter().map(|one| self.snapshot(one));
        wire::VolumeGroupSnapshot {
            group_snapshot_id: taken.handle,
            snapshots: snapshots.collect(),
            creation_time: Some(taken.created.into()),
            ready_to_use: true,
        }
    }
}

#[tonic::async_trait]
impl GroupController for Controller {
    async fn group_controller_get_capabilities(
        &self,
        _: Request<wire::GroupControllerGetCapabilitiesRequest>,
    ) -> Result<Response<wire::GroupControllerGetCapabilitiesResponse>, Status> {
        let kind = Rpc::CreateDeleteGetVolumeGroupSnapshot.into();
        let capability = GroupControllerServiceCapability {
            r#type: Some(capability::Type::Rpc(capability::Rpc { r#type: kind })),
        };
        let able = self.stores.abilities().groups;
        Ok(Response::new(
            wire::GroupControllerGetCapabilitiesResponse {
                capabilities: able.then_some(capability).into_iter().collect(),
            },
        ))
    }

    async fn create_volume_group_snapshot(
        &self,
        request: Request<wire::CreateVolumeGroupSnapshotRequest>,
    ) -> Result<Response<wire::CreateVolumeGroupSnapshotResponse>, Status> {
        let (request, caller) = taken(request);
        answered("CreateVolumeGroupSnapshot", "", caller, async {
            logs::record_name(&request.name);
            required("name", &request.name)?;
            if request.source_volume_ids.is_empty() {
                return Err(invalid("source_volume_ids", "is required"));
            }
            for id in &request.source_volume_ids {
                validate::id("source_volume_ids", id)?;
            }
            validate::secrets(&request.secrets)?;
            validate::map("parameters", &request.parameters)?;
            let new = NewGroupSnapshot {
                name: request.name,
                volumes: request.source_volume_ids,
                parameters: request.parameters,
                secrets: request.secrets.into(),
            };
            let taken = self.stores.create_group_snapshot(new).await?;
            let group_snapshot = Some(self.group_snapshot(taken));
            Ok(wire::CreateVolumeGroupSnapshotResponse { group_snapshot })
        })
        .await
    }

    async fn delete_volume_group_snapshot(
        &self,
        request: Request<wire::DeleteVolumeGroupSnapshotRequest>,
    ) -> Result<Response<wire::DeleteVolumeGroupSnapshotResponse>, Status> {
        let (request, caller) = taken(request);
        let id = request.group_snapshot_id;
        answered("DeleteVolumeGroupSnapshot", &id, caller, async {
            validate::id("group_snapshot_id", &id)?;
            validate::secrets(&request.secrets)?;
            let secrets = request.secrets.into();
            self.stores
                .delete_group_snapshot(id.clone(), request.snapshot_ids, secrets)
                .await?;
            Ok(wire::DeleteVolumeGroupSnapshotResponse {})
        })
        .await
    }

    async fn get_volume_group_snapshot(
        &self,
        request: Request<wire::GetVolumeGroupSnapshotRequest>,
    ) -> Result<Response<wire::GetVolumeGroupSnapshotResponse>, Status> {
        let (request, caller) = taken(request);
        let id = request.group_snapshot_id;
        answered("GetVolumeGroupSnapshot", &id, caller, async {
            validate::id("group_snapshot_id", &id)?;
            validate::secrets(&request.secrets)?;
            let secrets = request.secrets.into();
            let found = self
                .stores
                .get_group_snapshot(id.clone(), request.snapshot_ids, secrets)
                .await?;
            let group_snapshot = Some(self.group_snapshot(found));
            Ok(wire::GetVolumeGroupSnapshotResponse { group_snapshot })
        })
        .await
    }
}
