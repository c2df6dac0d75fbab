//! The controller's own service: what CSI does not tell of copies and snapshots.

use prost_types::Timestamp;
use tonic::{Request, Response, Status};

use super::{
    super::{
        call::{Caller, observed},
        storage, validate,
    },
    listing,
    service::{answered, taken},
    signed,
};
use crate::{
    Done,
    proto::admin::{
        CheckStorageRequest, CheckStorageResponse, CopyUnderWay, EnterVolumeRequest,
        EnterVolumeResponse, ListCopiesRequest, ListCopiesResponse, ListNamedSnapshotsRequest,
        ListNamedSnapshotsResponse, NamedSnapshot, controller_admin_server::ControllerAdmin,
    },
    provision::{
        Omitted, SnapshotInfo, Stores, VolumeToEnter,
        images::{Copies, CopyKind, CopyProgress},
    },
};

/// Serves the calls of uringctl.
#[derive(Debug)]
pub struct ControllerAdminService {
    stores: Stores,
    copies: Copies,
}

impl ControllerAdminService {
    /// Of these stores, and the copies that they make.
    pub fn new(stores: Stores, copies: Copies) -> Self {
        Self { stores, copies }
    }
}

#[tonic::async_trait]
impl ControllerAdmin for ControllerAdminService {
    async fn list_copies(
        &self,
        request: Request<ListCopiesRequest>,
    ) -> Result<Response<ListCopiesResponse>, Status> {
        let caller = Caller::of(request.metadata());
        observed("ListCopies", "", caller, async {
            let copies = self.copies.list().into_iter().map(under_way).collect();
            Ok(ListCopiesResponse { copies })
        })
        .await
    }

    async fn check_storage(
        &self,
        request: Request<CheckStorageRequest>,
    ) -> Result<Response<CheckStorageResponse>, Status> {
        let caller = Caller::of(request.metadata());
        observed("CheckStorage", "", caller, async {
            Ok(storage::answer(self.stores.inspect().await))
        })
        .await
    }

    async fn enter_volume(
        &self,
        request: Request<EnterVolumeRequest>,
    ) -> Result<Response<EnterVolumeResponse>, Status> {
        let (request, caller) = taken(request);
        let id = request.volume_id.clone();
        answered("EnterVolume", &id, caller, async {
            validate::id("volume_id", &request.volume_id)?;
            validate::required("name", &request.name)?;
            // A volume without a claim has none.
            if !request.owner.is_empty() {
                validate::required("owner", &request.owner)?;
            }
            validate::map("volume_context", &request.volume_context)?;
            validate::secrets(&request.secrets)?;
            let volume = VolumeToEnter {
                handle: request.volume_id,
                name: request.name,
                owner: request.owner,
                context: request.volume_context,
            };
            let entered = self.stores.enter_volume(volume, request.secrets.into());
            Ok(EnterVolumeResponse {
                entered: entered.await? == Done::Now,
            })
        })
        .await
    }

    async fn list_named_snapshots(
        &self,
        request: Request<ListNamedSnapshotsRequest>,
    ) -> Result<Response<ListNamedSnapshotsResponse>, Status> {
        let (request, caller) = taken(request);
        answered("ListNamedSnapshots", "", caller, async {
            let omitted = Omitted::within(caller.timeout);
            let mut what = listing(0, request.starting_token)?;
            what.omitted = Some(omitted.clone());
            let of_volume = Some(request.source_volume_id).filter(|id| !id.is_empty());
            let secrets = request.secrets.into();
            let page = self.stores.list_snapshots(what, of_volume, secrets).await?;
            Ok(ListNamedSnapshotsResponse {
                snapshots: page.entries.into_iter().map(named).collect(),
                next_token: page.next.unwrap_or_default(),
                omitted: omitted.take(),
            })
        })
        .await
    }
}

fn named(snapshot: SnapshotInfo) -> NamedSnapshot {
    NamedSnapshot {
        name: snapshot.name,
        snapshot_id: snapshot.handle,
        source_volume_id: snapshot.source,
        size_bytes: signed(snapshot.bytes),
        creation_time: Timestamp::from(snapshot.created).seconds,
        group_snapshot_id: snapshot.group.unwrap_or_default(),
    }
}

fn under_way(copy: CopyProgress) -> CopyUnderWay {
    let age = copy.age.map(|age| age.as_millis());
    CopyUnderWay {
        kind: match copy.target.kind {
            CopyKind::Volume => "volume",
            CopyKind::Snapshot => "snapshot",
        }
        .to_owned(),
        name: copy.target.name,
        id: copy.target.handle,
        source_id: copy.target.source,
        pool: copy.target.pool,
        copied_bytes: copy.copied,
        size_bytes: copy.bytes,
        waits: age.is_none(),
        age_ms: age.map_or(0, |age| u64::try_from(age).unwrap_or(u64::MAX)),
    }
}
