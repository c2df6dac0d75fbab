//! A controller, and the provisioner, resizer and snapshotter as its callers.

use std::{collections::HashMap, ops::Deref, path::Path};

use tonic::{Status, transport::Channel};
use uring_csi::proto::csi::{
    CapacityRange, ControllerExpandVolumeRequest, ControllerPublishVolumeRequest,
    ControllerUnpublishVolumeRequest, CreateSnapshotRequest, CreateVolumeRequest,
    DeleteSnapshotRequest, DeleteVolumeRequest, Snapshot, Topology, TopologyRequirement,
    Volume as Made, VolumeCapability, VolumeContentSource,
    controller_client::ControllerClient,
    volume_content_source::{self, SnapshotSource, VolumeSource},
};

use super::{
    Agent, Machine, Sandbox, Volume,
    agent::{CALL_TIMEOUT, request},
};

/// How a controller is started.
pub struct ControllerSetup {
    pub name: &'static str,
    /// `NAME=DIR[,local|,shared][,mounted]`.
    pub pools: Vec<String>,
    /// More arguments.
    pub args: Vec<String>,
    /// The secrets that the sidecars send with each call that may have them.
    pub secrets: HashMap<String, String>,
    pub machine: Machine,
}

impl ControllerSetup {
    /// With pool `main`, shared by every node.
    pub fn new(sandbox: &Sandbox) -> Self {
        Self {
            name: "controller",
            pools: vec![format!("main={},shared", sandbox.pool("main").display())],
            args: Vec::new(),
            secrets: HashMap::new(),
            machine: Machine::Host,
        }
    }

    /// With one more pool, shared by every node.
    pub fn pool(mut self, name: &str, dir: &Path) -> Self {
        self.pools.push(format!("{name}={},shared", dir.display()));
        self
    }
}

/// An agent that serves the Controller service.
pub struct Controller {
    agent: Agent,
    pub secrets: HashMap<String, String>,
}

impl Deref for Controller {
    type Target = Agent;

    fn deref(&self) -> &Agent {
        &self.agent
    }
}

impl Controller {
    /// A ready controller with pool `main`.
    pub async fn start(sandbox: &Sandbox) -> Self {
        Self::start_with(sandbox, ControllerSetup::new(sandbox)).await
    }

    /// A ready controller.
    pub async fn start_with(sandbox: &Sandbox, setup: ControllerSetup) -> Self {
        let controller = Self::prepare(sandbox, setup);
        controller.start().await;
        controller
    }

    /// A controller that is not started yet.
    pub fn prepare(sandbox: &Sandbox, setup: ControllerSetup) -> Self {
        let name = setup.name;
        let mut args = Vec::new();
        for pool in setup.pools {
            args.extend(["--pool".to_owned(), pool]);
        }
        args.extend(setup.args);
        let mut agent = Agent::new(
            "uring-csi-controller",
            &sandbox.dir().join(format!("{name}.sock")),
            sandbox.dir().join(format!("{name}.log")),
            args,
        );
        agent.run_on(setup.machine);
        Self {
            agent,
            secrets: setup.secrets,
        }
    }

    pub fn client(&self) -> ControllerClient<Channel> {
        ControllerClient::new(self.agent.channel())
    }

    pub async fn create(&self, mut message: CreateVolumeRequest) -> Result<Made, Status> {
        message.secrets.extend(self.secrets.clone());
        let answer = self
            .client()
            .create_volume(request(message, CALL_TIMEOUT))
            .await?;
        Ok(answer.into_inner().volume.expect("a volume"))
    }

    pub async fn delete(&self, volume_id: &str) -> Result<(), Status> {
        let message = DeleteVolumeRequest {
            volume_id: volume_id.to_owned(),
            secrets: self.secrets.clone(),
        };
        self.client()
            .delete_volume(request(message, CALL_TIMEOUT))
            .await
            .map(drop)
    }

    pub async fn snapshot(&self, source: &str, name: &str) -> Result<Snapshot, Status> {
        let message = CreateSnapshotRequest {
            source_volume_id: source.to_owned(),
            name: name.to_owned(),
            secrets: self.secrets.clone(),
            ..Default::default()
        };
        let answer = self
            .client()
            .create_snapshot(request(message, CALL_TIMEOUT))
            .await?;
        Ok(answer.into_inner().snapshot.expect("a snapshot"))
    }

    pub async fn delete_snapshot(&self, snapshot_id: &str) -> Result<(), Status> {
        let message = DeleteSnapshotRequest {
            snapshot_id: snapshot_id.to_owned(),
            secrets: self.secrets.clone(),
        };
        self.client()
            .delete_snapshot(request(message, CALL_TIMEOUT))
            .await
            .map(drop)
    }

    /// ControllerPublishVolume: the publish context.
    pub async fn publish(
        &self,
        volume: &Volume,
        node_id: &str,
    ) -> Result<HashMap<String, String>, Status> {
        let message = ControllerPublishVolumeRequest {
            volume_id: volume.handle.clone(),
            node_id: node_id.to_owned(),
            volume_capability: Some(volume.capability.clone()),
            secrets: self.secrets.clone(),
            volume_context: volume.context.clone(),
            ..Default::default()
        };
        let answer = self
            .client()
            .controller_publish_volume(request(message, CALL_TIMEOUT))
            .await?;
        Ok(answer.into_inner().publish_context)
    }

    pub async fn unpublish(&self, volume: &Volume, node_id: &str) -> Result<(), Status> {
        let message = ControllerUnpublishVolumeRequest {
            volume_id: volume.handle.clone(),
            node_id: node_id.to_owned(),
            secrets: self.secrets.clone(),
        };
        self.client()
            .controller_unpublish_volume(request(message, CALL_TIMEOUT))
            .await
            .map(drop)
    }

    /// ControllerExpandVolume: the new size, and whether the node has a part in it.
    pub async fn expand(&self, volume_id: &str, bytes: u64) -> Result<(i64, bool), Status> {
        let message = ControllerExpandVolumeRequest {
            volume_id: volume_id.to_owned(),
            capacity_range: Some(range(bytes)),
            secrets: self.secrets.clone(),
            ..Default::default()
        };
        let answer = self
            .client()
            .controller_expand_volume(request(message, CALL_TIMEOUT))
            .await?
            .into_inner();
        Ok((answer.capacity_bytes, answer.node_expansion_required))
    }
}

/// "At least `bytes`."
pub fn range(bytes: u64) -> CapacityRange {
    CapacityRange {
        required_bytes: i64::try_from(bytes).expect("bytes"),
        limit_bytes: 0,
    }
}

/// A CreateVolume as the provisioner sends it for a claim of `bytes` in `pool`.
pub fn claim(
    name: &str,
    pool: &str,
    capability: &VolumeCapability,
    bytes: u64,
) -> CreateVolumeRequest {
    CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: Some(range(bytes)),
        volume_capabilities: vec![capability.clone()],
        parameters: HashMap::from([("pool".to_owned(), pool.to_owned())]),
        ..Default::default()
    }
}

/// "A copy of this snapshot."
pub fn from_snapshot(snapshot_id: &str) -> VolumeContentSource {
    VolumeContentSource {
        r#type: Some(volume_content_source::Type::Snapshot(SnapshotSource {
            snapshot_id: snapshot_id.to_owned(),
        })),
    }
}

/// "A copy of this volume."
pub fn from_volume(volume_id: &str) -> VolumeContentSource {
    VolumeContentSource {
        r#type: Some(volume_content_source::Type::Volume(VolumeSource {
            volume_id: volume_id.to_owned(),
        })),
    }
}

/// "On this node."
pub fn on_node(node_id: &str) -> TopologyRequirement {
    let here = Topology {
        segments: HashMap::from([(
            "topology.block.uring-csi.dev/node".to_owned(),
            node_id.to_owned(),
        )]),
    };
    TopologyRequirement {
        requisite: vec![here.clone()],
        preferred: vec![here],
    }
}

/// The PersistentVolume that the provisioner makes of an answer.
pub fn provisioned(made: &Made, capability: &VolumeCapability) -> Volume {
    let mut volume = Volume::block(&made.volume_id);
    volume.capability = capability.clone();
    volume.context.clone_from(&made.volume_context);
    volume
}
