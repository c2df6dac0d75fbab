//! The node agent's own service, on the same socket as CSI: the operator's calls that CSI
//! does not define.

use std::{io, sync::Arc};

use tonic::{Request, Response, Status};

use super::{
    call::{Caller, observed},
    storage, validate,
};
use crate::{
    device::Source,
    fs::FsType,
    manager::{Manager, PlannedState, WantedState},
    observe::Readiness,
    proto::admin::{
        CheckStorageRequest, CheckStorageResponse, FormatVolumeRequest, FormatVolumeResponse,
        GetAgentInfoRequest, GetAgentInfoResponse, HeldVolume, ListHeldVolumesRequest,
        ListHeldVolumesResponse, ListWantedVolumesRequest, ListWantedVolumesResponse,
        ParkVolumesRequest, ParkVolumesResponse, PlanVolumesRequest, PlanVolumesResponse,
        PlannedVolume, Target, WantedVolume, node_admin_server::NodeAdmin,
    },
    volume::{
        Cause, Config, Listed, Node, NodeHandle, Outcome,
        spec::{self, Call, Format},
    },
};

/// The service of one node agent.
#[derive(Clone, Debug)]
pub struct AdminService {
    node: NodeHandle,
    config: Config,
    pools: Vec<String>,
    readiness: Readiness,
    manager: Option<Arc<Manager>>,
}

impl AdminService {
    /// `pools`: the names of the node's pools.
    pub fn new(
        node: NodeHandle,
        config: Config,
        pools: Vec<String>,
        readiness: Readiness,
        manager: Option<Arc<Manager>>,
    ) -> Self {
        Self {
            node,
            config,
            pools,
            readiness,
            manager,
        }
    }

    async fn wanted(&self) -> Result<ListWantedVolumesResponse, Status> {
        let list = async |manager: Arc<Manager>| Ok((manager.list().await?, manager.is_parked()));
        let (listed, parked) = self.managed(list).await?;
        Ok(ListWantedVolumesResponse {
            volumes: listed.into_iter().map(wanted).collect(),
            parked,
        })
    }

    async fn plan(&self, request: PlanVolumesRequest) -> Result<PlanVolumesResponse, Status> {
        let files = request.files.into_iter().collect();
        let planned = self.managed(async move |manager| manager.dry_run(files).await);
        Ok(PlanVolumesResponse {
            volumes: planned.await?.into_iter().map(planned_volume).collect(),
        })
    }

    /// Asks the volume manager.
    async fn managed<T: Send + 'static>(
        &self,
        ask: impl AsyncFnOnce(Arc<Manager>) -> io::Result<T> + Send + 'static,
    ) -> Result<T, Status> {
        let manager = self.manager.clone().ok_or_else(|| {
            Status::failed_precondition("the node agent runs without --volumes: it manages none")
        })?;
        let answer = self.node.run(move |_| ask(manager)).await;
        let answer =
            answer.ok_or_else(|| Status::unavailable("the node agent is shutting down"))?;
        answer.map_err(|error| Status::unavailable(error.to_string()))
    }

    async fn format(
        &self,
        request: FormatVolumeRequest,
        timeout: std::time::Duration,
    ) -> Result<FormatVolumeResponse, Status> {
        validate::id("volume_id", &request.volume_id)?;
        validate::map("volume_context", &request.volume_context)?;
        validate::secrets(&request.secrets)?;
        if request.confirm != request.volume_id {
            return Err(validate::invalid(
                "confirm",
                "must repeat volume_id: all that is on the volume is destroyed",
            ));
        }
        let fs: FsType = request
            .fs_type
            .parse()
            .map_err(|error| validate::invalid("fs_type", error))?;
        let source = Source::parse(&request.volume_context, &request.volume_id)
            .map_err(|e| Status::from(&Cause::from(e)))?;
        let format = spec::Request {
            call: Call::Format(Format { source, fs }),
            secrets: request.secrets.into(),
        };
        let id = request.volume_id;
        match self
            .node
            .run(move |node| node.submit(id, format, timeout))
            .await
        {
            Some(Ok(Outcome::Was(was))) => Ok(FormatVolumeResponse { was }),
            Some(Ok(other)) => Err(Status::internal(format!("formatting ended in {other:?}"))),
            Some(Err(error)) => Err(Status::from(&*error)),
            None => Err(Status::unavailable("the node agent is shutting down")),
        }
    }
}

#[tonic::async_trait]
impl NodeAdmin for AdminService {
    async fn list_held_volumes(
        &self,
        request: Request<ListHeldVolumesRequest>,
    ) -> Result<Response<ListHeldVolumesResponse>, Status> {
        let caller = Caller::of(request.metadata());
        observed("ListHeldVolumes", "", caller, async {
            let listed = self.node.run(move |node| node.list(caller.timeout)).await;
            let listed =
                listed.ok_or_else(|| Status::unavailable("the node agent is shutting down"))?;
            let listed = listed.map_err(|error| Status::from(&error))?;
            Ok(ListHeldVolumesResponse {
                volumes: listed.into_iter().map(held).collect(),
            })
        })
        .await
    }

    async fn format_volume(
        &self,
        request: Request<FormatVolumeRequest>,
    ) -> Result<Response<FormatVolumeResponse>, Status> {
        let caller = Caller::of(request.metadata());
        let request = request.into_inner();
        let id = request.volume_id.clone();
        observed(
            "FormatVolume",
            &id,
            caller,
            self.format(request, caller.timeout),
        )
        .await
    }

    async fn list_wanted_volumes(
        &self,
        request: Request<ListWantedVolumesRequest>,
    ) -> Result<Response<ListWantedVolumesResponse>, Status> {
        let caller = Caller::of(request.metadata());
        observed("ListWantedVolumes", "", caller, self.wanted()).await
    }

    async fn plan_volumes(
        &self,
        request: Request<PlanVolumesRequest>,
    ) -> Result<Response<PlanVolumesResponse>, Status> {
        let caller = Caller::of(request.metadata());
        observed("PlanVolumes", "", caller, self.plan(request.into_inner())).await
    }

    async fn park_volumes(
        &self,
        request: Request<ParkVolumesRequest>,
    ) -> Result<Response<ParkVolumesResponse>, Status> {
        let caller = Caller::of(request.metadata());
        let parked = request.into_inner().parked;
        let park = async {
            let park = async move |manager: Arc<Manager>| manager.park(parked).await;
            self.managed(park).await?;
            Ok(ParkVolumesResponse {})
        };
        observed("ParkVolumes", "", caller, park).await
    }

    async fn check_storage(
        &self,
        request: Request<CheckStorageRequest>,
    ) -> Result<Response<CheckStorageResponse>, Status> {
        let caller = Caller::of(request.metadata());
        observed("CheckStorage", "", caller, async {
            let found = self.node.run(Node::inspect).await;
            let found =
                found.ok_or_else(|| Status::unavailable("the node agent is shutting down"))?;
            Ok(storage::answer(found))
        })
        .await
    }

    async fn get_agent_info(
        &self,
        _: Request<GetAgentInfoRequest>,
    ) -> Result<Response<GetAgentInfoResponse>, Status> {
        Ok(Response::new(GetAgentInfoResponse {
            staging_dir: self.config.staging_dir.display().to_string(),
            driver_name: self.config.driver_name.clone(),
            node_id: self.config.node_id.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pools: self.pools.clone(),
            not_ready_because: self.readiness.reason().unwrap_or_default(),
            volumes_dir: (self.manager.as_ref())
                .map(|manager| manager.directory().display().to_string())
                .unwrap_or_default(),
        }))
    }
}

fn wanted(volume: WantedState) -> WantedVolume {
    WantedVolume {
        name: volume.name,
        volume_id: volume.handle,
        path: volume.path.display().to_string(),
        state: volume.state.to_owned(),
        detail: volume.detail,
        age_ms: volume.age.as_millis().try_into().unwrap_or(u64::MAX),
        is_wanted: volume.is_wanted,
        is_managed: volume.is_managed,
    }
}

fn planned_volume(volume: PlannedState) -> PlannedVolume {
    PlannedVolume {
        name: volume.name,
        volume_id: volume.handle,
        path: volume.path.display().to_string(),
        state: volume.state.to_owned(),
        actions: volume.actions,
        reason: volume.reason,
    }
}

fn held(volume: Listed) -> HeldVolume {
    let (device, device_number) = volume
        .device
        .map(|device| (device.node.display().to_string(), device.dev.to_string()))
        .unwrap_or_default();
    let mut held = HeldVolume {
        volume_id: volume.volume_id,
        name: volume.name,
        backend: volume.backend.to_owned(),
        device,
        device_number,
        access: volume.access.to_owned(),
        staging_path: volume.staging_path.display().to_string(),
        targets: volume
            .targets
            .into_iter()
            .map(|(path, target)| Target {
                path: path.display().to_string(),
                read_only: target.read_only,
            })
            .collect(),
        state: volume.state.to_owned(),
        ..Default::default()
    };
    if let Some(under_way) = volume.under_way {
        held.call.push_str(under_way.call);
        held.step.push_str(under_way.step);
        held.step_age_ms = under_way.age.as_millis().try_into().unwrap_or(u64::MAX);
        held.waits_for = under_way.waits_for;
    }
    held
}
