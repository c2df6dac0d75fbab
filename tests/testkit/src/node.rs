//! A node: the agent with its directories, and kubelet as its caller.

use std::{
    cell::Cell,
    fs,
    future::poll_fn,
    io,
    ops::Deref,
    path::{Path, PathBuf},
    pin::pin,
    time::Duration,
};

use sha2::{Digest as _, Sha256};
use tonic::{Status, transport::Channel};
use uring_csi::proto::csi::{
    NodeExpandVolumeRequest, NodeGetVolumeHealthRequest, NodeGetVolumeStatsRequest,
    NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnpublishVolumeRequest,
    NodeUnstageVolumeRequest, VolumeUsage, node_client::NodeClient,
    volume_health::VolumeHealthEntry,
};

use super::{
    Agent, Machine, Sandbox, Volume,
    agent::{CALL_TIMEOUT, request},
    controller::range,
    disk::hex,
    eventually,
    leaks::{LeakSnapshot, files_below},
};

/// The default driver name, a part of kubelet's paths.
const DRIVER: &str = "block.uring-csi.dev";

/// How a node's agent is started.
pub struct NodeSetup {
    pub node_id: &'static str,
    /// `NAME=DIR[,local|,shared]`.
    pub pools: Vec<String>,
    /// Kubelet's directory and the run directory are reached through symlinks.
    pub symlinked: bool,
    pub machine: Machine,
    /// More arguments.
    pub args: Vec<String>,
}

impl NodeSetup {
    /// With pool `main` alone.
    pub fn new(sandbox: &Sandbox) -> Self {
        Self {
            node_id: "node-a",
            pools: vec![format!("main={},shared", sandbox.pool("main").display())],
            symlinked: false,
            machine: Machine::Host,
            args: Vec::new(),
        }
    }

    /// With one more argument.
    pub fn arg(mut self, arg: &str) -> Self {
        self.args.push(arg.to_owned());
        self
    }
}

/// An agent that serves the Node service, and what kubelet does with it.
pub struct Node {
    agent: Agent,
    root: PathBuf,
    pub kubelet: PathBuf,
    pub run_dir: PathBuf,
    pub state_dir: PathBuf,
    /// Taken before the first volume.
    baseline: LeakSnapshot,
    pub timeout: Cell<Duration>,
}

impl Deref for Node {
    type Target = Agent;

    fn deref(&self) -> &Agent {
        &self.agent
    }
}

impl Node {
    /// A ready node with pool `main`.
    pub async fn start(sandbox: &Sandbox) -> Self {
        Self::start_with(sandbox, NodeSetup::new(sandbox)).await
    }

    /// A ready node.
    pub async fn start_with(sandbox: &Sandbox, setup: NodeSetup) -> Self {
        let mut node = Self::prepare(sandbox, setup);
        node.start_first().await;
        node
    }

    /// Starts the agent and takes the baseline for [`Node::assert_clean`].
    pub async fn start_first(&mut self) {
        self.agent.start().await;
        self.baseline = self.leak_snapshot();
    }

    /// A node whose agent is not started yet.
    pub fn prepare(sandbox: &Sandbox, setup: NodeSetup) -> Self {
        let name = setup.node_id;
        let mut kubelet = sandbox.kubelet(name);
        let mut run_dir = sandbox.dir().join(format!("run-{name}"));
        if setup.symlinked {
            fs::create_dir(&run_dir).unwrap();
            for dir in [&mut kubelet, &mut run_dir] {
                let link = dir.with_extension("link");
                std::os::unix::fs::symlink(&dir, &link).unwrap();
                *dir = link;
            }
        }
        let state_dir = sandbox.dir().join(format!("state-{name}"));
        let mut args: Vec<String> = [
            ("--node-id", name.to_owned()),
            ("--kubelet-dir", kubelet.display().to_string()),
            ("--run-dir", run_dir.display().to_string()),
            ("--state-dir", state_dir.display().to_string()),
        ]
        .into_iter()
        .flat_map(|(flag, value)| [flag.to_owned(), value])
        .collect();
        for pool in setup.pools {
            args.extend(["--pool".to_owned(), pool]);
        }
        args.extend(setup.args);
        let mut agent = Agent::new(
            "uring-csi-node",
            &sandbox.dir().join(format!("{name}.sock")),
            sandbox.dir().join(format!("{name}.log")),
            args,
        );
        agent.run_on(setup.machine);
        Self {
            agent,
            root: sandbox.dir().to_owned(),
            kubelet,
            run_dir,
            state_dir,
            baseline: LeakSnapshot::default(),
            timeout: Cell::new(CALL_TIMEOUT),
        }
    }

    /// Starts the agent again after [`Agent::kill9`] or [`Agent::wait_for_exit`].
    pub async fn restart(&self) {
        self.agent.start().await;
    }

    /// Kills the agent, and starts it without its records.
    pub async fn restart_without_records(&self) {
        self.agent.kill9().await;
        // Files in what is mounted there are no records.
        let staged = self.run_dir.join("staging");
        let files = files_below(&self.run_dir).into_iter();
        for file in files.filter(|file| !file.starts_with(&staged)) {
            fs::remove_file(file).expect("a record");
        }
        self.restart().await;
    }

    /// Asserts that all volumes are removed. The agent must be running.
    pub async fn assert_clean(&self) {
        let mut left = Vec::new();
        for _ in 0..500 {
            left = self.leak_snapshot().leaked_since(&self.baseline);
            if left.is_empty() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("left behind: {left:#?}");
    }

    fn leak_snapshot(&self) -> LeakSnapshot {
        let own = [&self.run_dir, &self.state_dir];
        LeakSnapshot::take(&self.root, own, self.agent.pid())
    }
}

/// Kubelet's paths (pkg/volume/csi).
impl Node {
    /// Where a volume is staged. For a raw block device this is a directory too.
    pub fn staging(&self, volume: &Volume) -> PathBuf {
        let csi = self.kubelet.join("plugins/kubernetes.io/csi");
        if volume.is_block() {
            return csi.join("volumeDevices/staging").join(&volume.spec);
        }
        let hash = hex(&Sha256::digest(&volume.handle));
        csi.join(DRIVER).join(hash).join("globalmount")
    }

    /// Where a pod finds a volume.
    pub fn target(&self, volume: &Volume, pod: &str) -> PathBuf {
        if volume.is_block() {
            return self
                .kubelet
                .join("plugins/kubernetes.io/csi/volumeDevices/publish")
                .join(&volume.spec)
                .join(pod);
        }
        self.kubelet
            .join("pods")
            .join(pod)
            .join("volumes/kubernetes.io~csi")
            .join(&volume.spec)
            .join("mount")
    }
}

/// Kubelet's calls, each on a connection of its own.
impl Node {
    pub fn client(&self) -> NodeClient<Channel> {
        NodeClient::new(self.agent.channel())
    }

    pub fn stage_request(&self, volume: &Volume) -> NodeStageVolumeRequest {
        NodeStageVolumeRequest {
            volume_id: volume.handle.clone(),
            staging_target_path: text(&self.staging(volume)),
            volume_capability: Some(volume.capability.clone()),
            secrets: volume.secrets.clone(),
            volume_context: volume.context.clone(),
            ..Default::default()
        }
    }

    pub fn publish_request(&self, volume: &Volume, pod: &str) -> NodePublishVolumeRequest {
        NodePublishVolumeRequest {
            volume_id: volume.handle.clone(),
            staging_target_path: text(&self.staging(volume)),
            target_path: text(&self.target(volume, pod)),
            volume_capability: Some(volume.capability.clone()),
            volume_context: volume.context.clone(),
            ..Default::default()
        }
    }

    /// Kubelet makes the staging directory itself.
    pub async fn stage(&self, volume: &Volume) -> Result<(), Status> {
        let staging = self.staging(volume);
        fs::create_dir_all(staging.parent().unwrap()).expect("kubelet's directory");
        // That an NFS directory is mounted there is not asked: its server may be dead.
        match fs::create_dir(&staging) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                panic!("kubelet's directory: {error}")
            }
            _ => {}
        }
        self.send_stage(self.stage_request(volume)).await
    }

    pub async fn send_stage(&self, message: NodeStageVolumeRequest) -> Result<(), Status> {
        let message = request(message, self.timeout.get());
        self.client().node_stage_volume(message).await.map(drop)
    }

    /// Kubelet makes the target's parent, not the target.
    pub async fn publish(&self, volume: &Volume, pod: &str) -> Result<(), Status> {
        self.send_publish(self.publish_request(volume, pod)).await
    }

    /// The target's parent is there.
    pub async fn publish_again(&self, volume: &Volume, pod: &str) -> Result<(), Status> {
        let message = request(self.publish_request(volume, pod), self.timeout.get());
        self.client().node_publish_volume(message).await.map(drop)
    }

    pub async fn publish_read_only(&self, volume: &Volume, pod: &str) -> Result<(), Status> {
        self.send_publish(NodePublishVolumeRequest {
            readonly: true,
            ..self.publish_request(volume, pod)
        })
        .await
    }

    pub async fn send_publish(&self, message: NodePublishVolumeRequest) -> Result<(), Status> {
        if let Some(parent) = Path::new(&message.target_path).parent() {
            fs::create_dir_all(parent).expect("kubelet's directory");
        }
        let message = request(message, self.timeout.get());
        self.client().node_publish_volume(message).await.map(drop)
    }

    pub async fn unpublish(&self, volume: &Volume, pod: &str) -> Result<(), Status> {
        self.unpublish_at(volume, &self.target(volume, pod)).await
    }

    pub async fn unpublish_at(&self, volume: &Volume, target: &Path) -> Result<(), Status> {
        let message = NodeUnpublishVolumeRequest {
            volume_id: volume.handle.clone(),
            target_path: text(target),
        };
        let message = request(message, self.timeout.get());
        self.client().node_unpublish_volume(message).await.map(drop)
    }

    pub async fn unstage(&self, volume: &Volume) -> Result<(), Status> {
        self.unstage_at(volume, &self.staging(volume)).await
    }

    pub async fn unstage_at(&self, volume: &Volume, staging: &Path) -> Result<(), Status> {
        let message = NodeUnstageVolumeRequest {
            volume_id: volume.handle.clone(),
            staging_target_path: text(staging),
        };
        let message = request(message, self.timeout.get());
        self.client().node_unstage_volume(message).await.map(drop)
    }

    /// Stage and publish for one pod; where the pod finds it.
    pub async fn up(&self, volume: &Volume, pod: &str) -> PathBuf {
        self.stage(volume).await.expect("staged");
        self.publish(volume, pod).await.expect("published");
        self.target(volume, pod)
    }

    /// Unpublish and unstage.
    pub async fn down(&self, volume: &Volume, pod: &str) {
        self.unpublish(volume, pod).await.expect("unpublished");
        self.unstage(volume).await.expect("unstaged");
    }

    pub async fn stats(&self, volume: &Volume, path: &Path) -> Result<Vec<VolumeUsage>, Status> {
        let message = NodeGetVolumeStatsRequest {
            volume_id: volume.handle.clone(),
            volume_path: text(path),
            staging_target_path: text(&self.staging(volume)),
        };
        let message = request(message, self.timeout.get());
        let answer = self.client().node_get_volume_stats(message).await?;
        Ok(answer.into_inner().usage)
    }

    pub async fn health(
        &self,
        volume: &Volume,
        path: &Path,
    ) -> Result<Vec<VolumeHealthEntry>, Status> {
        let message = NodeGetVolumeHealthRequest {
            volume_id: volume.handle.clone(),
            volume_publish_path: text(path),
            staging_target_path: text(&self.staging(volume)),
        };
        let message = request(message, self.timeout.get());
        let answer = self.client().node_get_volume_health(message).await?;
        let health = answer.into_inner().volume_health;
        Ok(health
            .map(|health| health.health_statuses)
            .unwrap_or_default())
    }

    /// NodeExpandVolume at `path` to at least `bytes`; how large it is now.
    pub async fn expand(&self, volume: &Volume, path: &Path, bytes: u64) -> Result<i64, Status> {
        let message = NodeExpandVolumeRequest {
            volume_id: volume.handle.clone(),
            volume_path: text(path),
            capacity_range: Some(range(bytes)),
            staging_target_path: text(&self.staging(volume)),
            volume_capability: Some(volume.capability.clone()),
            secrets: volume.secrets.clone(),
        };
        let message = request(message, self.timeout.get());
        let answer = self.client().node_expand_volume(message).await?;
        Ok(answer.into_inner().capacity_bytes)
    }

    /// Makes calls with another deadline, beside others that keep theirs.
    pub async fn with_timeout<T>(&self, timeout: Duration, calls: impl Future<Output = T>) -> T {
        let mut calls = pin!(calls);
        poll_fn(|context| {
            let others = self.timeout.replace(timeout);
            let polled = calls.as_mut().poll(context);
            self.timeout.set(others);
            polled
        })
        .await
    }

    /// Unpublishes and unstages a volume, and repeats each call until it succeeds.
    pub async fn retry_until_down(&self, volume: &Volume, pods: &[&str]) {
        for pod in pods {
            self.retry_until_ok("unpublished", async || self.unpublish(volume, pod).await)
                .await;
        }
        self.retry_until_ok("unstaged", async || self.unstage(volume).await)
            .await;
    }

    /// Repeats a call as kubelet does, until it succeeds.
    pub async fn retry_until_ok(
        &self,
        what: &str,
        mut call: impl AsyncFnMut() -> Result<(), Status>,
    ) {
        let last = Cell::new(None);
        eventually(what, async || match call().await {
            Ok(()) => Some(()),
            Err(status) => {
                last.set(Some(status));
                None
            }
        })
        .await;
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}
