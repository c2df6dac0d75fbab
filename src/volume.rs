//! The volumes that this node holds, and the verbs that change them.
//!
//! ```text
//!  gRPC handlers ──NodeHandle──▶ Node, on the runtime thread
//!                                   │ submit: one task a volume, equal calls join
//!                                   ▼
//!    stage  unstage  publish  expand  reclaim  rotate_key  inline  format  stats  health
//!             │ all that may hang: one function on            │ no lock,
//!             ▼ the volume's lane                             ▼ no device
//!        device · fs · mount                              statx, statfs, sysfs
//! ```
//!
//! Order of truth: the kernel first, then our records. Each verb looks at the
//! present state and does what is missing, and so finishes the work of a killed agent.

use std::{
    collections::HashMap,
    fmt,
    future::Future,
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::{
    Done,
    admission::Gates,
    device::{Backends, Source, ready::Uevents},
    finding::Finding,
    lane::{Inspections, Lanes},
    mount::path::Roots,
    ring::{self, RuntimeHandle, probe::Prober},
};

mod appearance;
mod attach;
mod claims;
mod conditions;
mod context;
mod error;
mod expand;
mod format;
mod health;
mod heartbeat;
mod held;
mod inline;
mod layout;
mod mounted;
mod nested;
mod occupied;
mod paths;
mod places;
mod prepare;
mod progress;
mod publish;
mod reclaim;
mod reconcile;
pub mod record;
mod remote;
mod remount;
mod rotate_key;
pub mod spec;
mod stage;
mod stats;
mod storage_client;
#[cfg(feature = "cli")]
pub mod takeover;
mod task;
mod unmake;
mod unpublish;
mod unstage;
mod watch;
mod write_backs;

pub use appearance::Appearance;
pub use error::{Cause, VolumeError};
pub use health::{ConditionReason, Severity};
pub use heartbeat::Heartbeat;
pub use held::{Answer, Listed, Outcome};
pub use stats::{Space, Statistics, Usage};

use held::Volume;
use occupied::Occupied;
use paths::Paths;
use places::Places;
use reconcile::Unrecovered;
use record::Records;
use spec::{Call, Request};
use write_backs::WriteBacks;

/// An operator's settings of a node.
#[derive(Clone, Debug)]
pub struct Config {
    /// This node's name.
    pub node_id: String,
    /// The plugin's name.
    pub driver_name: String,
    /// The most volumes that this node may hold; 0 for no limit.
    pub max_volumes: i64,
    /// Take kubelet's descriptor lock over published raw block volumes.
    pub block_lock: bool,
    /// Announce `VOLUME_MOUNT_GROUP`, and apply groups in the agent.
    pub volume_mount_group: bool,
    /// Announce the alpha capabilities of CSI 1.13, which older sidecars do not know.
    pub alpha_capabilities: bool,
    /// The largest inline volume in bytes; `None` refuses inline volumes.
    pub inline_max_bytes: Option<u64>,
    /// Where `uringctl` stages.
    pub staging_dir: PathBuf,
    /// How long the unmount of a server's directory waits for the server.
    pub remote_unmount: Duration,
    /// How many volumes may be in a step at once.
    pub gates: Gates,
}

/// The state that the verbs share, on the runtime thread and on lanes.
pub struct Node {
    /// The operator's settings.
    pub config: Config,
    backends: Arc<Backends>,
    places: Places,
    records: Records,
    lanes: Lanes,
    prober: Prober,
    uevents: Uevents,
    runtime: RuntimeHandle,
    volumes: Mutex<HashMap<String, Arc<Volume>>>,
    /// Where they are.
    paths: Arc<Paths>,
    occupied: Occupied,
    unrecovered: Unrecovered,
    heartbeat: Arc<Heartbeat>,
    inspections: Inspections,
    write_backs: WriteBacks,
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node")
            .field("config", &self.config)
            .field("volumes", &self.volumes().len())
            .finish_non_exhaustive()
    }
}

impl Node {
    /// Opens the node's stores. Calls on volumes wait until [`Node::recover`] has
    /// recovered what an earlier agent left, and their steps for `heartbeat`.
    pub fn open(
        config: Config,
        backends: Backends,
        roots: Roots,
        records: Records,
        lanes: Lanes,
        heartbeat: Arc<Heartbeat>,
    ) -> io::Result<Arc<Self>> {
        let node = Arc::new(Self {
            config,
            backends: Arc::new(backends),
            places: Places::new(roots),
            records,
            inspections: Inspections::new(lanes.clone()),
            lanes,
            prober: Prober::default(),
            uevents: Uevents::start()?,
            runtime: RuntimeHandle::current(),
            volumes: Mutex::default(),
            paths: Arc::default(),
            occupied: Occupied::default(),
            unrecovered: Unrecovered::default(),
            heartbeat,
            write_backs: WriteBacks::default(),
        });
        let (lanes, gates) = (node.lanes.clone(), &node.config.gates);
        ring::spawn(node.backends.keep_connected(lanes, gates.reconnect.clone()));
        ring::spawn(expire(node.config.gates.clone()));
        Ok(node)
    }

    /// Tries out the pools, and asks the Ceph clusters.
    pub async fn inspect(self: Arc<Self>) -> Vec<Finding> {
        self.inspections.run(self.backends.inspections()).await
    }

    /// Runs a call that changes a volume.
    pub async fn submit(
        self: Arc<Self>,
        volume_id: String,
        mut request: Request,
        deadline: Duration,
    ) -> Answer {
        request.call = request.call.with_paths(|path| self.places.canonical(path));
        let begun = Instant::now();
        self.recovered(&volume_id, deadline).await?;
        let left = || deadline.saturating_sub(begun.elapsed());
        let may_be_recorded = match &request.call {
            Call::Inline(spec) => spec.stage.source.has_device(),
            call => matches!(call, Call::Unpublish(_)),
        };
        if may_be_recorded {
            self.inline_recovered(&volume_id, left()).await?;
        }
        task::submit(&self, &volume_id, request, left()).await
    }

    /// Runs on the runtime thread what a lane cannot: what uses its events or children.
    async fn on_runtime<F, T>(&self, job: impl FnOnce() -> F + Send + 'static) -> T
    where
        F: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        match self.runtime.run(job).await {
            Some(out) => out,
            // The agent is shutting down: no caller waits any more.
            None => std::future::pending().await,
        }
    }

    /// Volumes that this node holds or works on, by handle.
    fn volumes(&self) -> MutexGuard<'_, HashMap<String, Arc<Volume>>> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn volume(&self, id: &str) -> Arc<Volume> {
        let mut volumes = self.volumes();
        let volume = volumes
            .entry(id.to_owned())
            .or_insert_with(|| Arc::new(Volume::new(id, Arc::clone(&self.paths))));
        Arc::clone(volume)
    }

    fn known(&self, id: &str) -> Option<Arc<Volume>> {
        self.volumes().get(id).cloned()
    }

    fn forget_if_empty(&self, id: &str) {
        let mut volumes = self.volumes();
        if volumes.get(id).is_some_and(|v| v.is_idle_and_empty()) {
            volumes.remove(id);
        }
    }

    /// The path in the spelling by which paths are compared. Never blocks.
    pub fn canonical(&self, path: &Path) -> PathBuf {
        self.places.canonical(path)
    }

    /// Whether the path is below a directory in which volumes may be published. Never blocks.
    pub fn may_publish(&self, path: &Path) -> bool {
        self.places.has(&self.places.canonical(path))
    }

    /// Where an inline volume's image is made, and where it is staged.
    pub fn inline_place(
        &self,
        pool: Option<&str>,
        volume_id: &str,
    ) -> Result<(Source, PathBuf), Cause> {
        let source = self
            .backends
            .inline_source(pool, volume_id)
            .map_err(|error| Cause::Invalid {
                field: "volume_context.pool",
                why: error.to_string(),
            })?;
        Ok((source, self.inline_staging(volume_id)))
    }

    /// An inline volume's source without a block device as this node allows it, and where it
    /// is staged.
    pub fn inline_remote_place(
        &self,
        named: Source,
        volume_id: &str,
    ) -> Result<(Source, PathBuf), Cause> {
        let refused = Cause::precondition(format!(
            "{named} is none that this node allows as an inline volume (--nfs-inline); \
             use a claim instead"
        ));
        let source = self.backends.inline_remote_source(named).ok_or(refused)?;
        Ok((source, self.inline_staging(volume_id)))
    }

    fn inline_staging(&self, volume_id: &str) -> PathBuf {
        let name = format!("inline-{}", crate::digest::sha256_hex(volume_id));
        self.config.staging_dir.join(name)
    }
}

/// How often the gates free the places of steps that are stuck.
const EXPIRE_EVERY: Duration = Duration::from_secs(1);

async fn expire(gates: Gates) {
    loop {
        tokio::time::sleep(EXPIRE_EVERY).await;
        gates.expire();
    }
}

/// The gRPC handlers' way to the node: their futures must be `Send`, and those of calls
/// are not. Both run on one thread, so this wakes up no other.
#[derive(Clone, Debug)]
pub struct NodeHandle(Arc<Node>);

impl NodeHandle {
    /// A handle to the node.
    pub fn new(node: Arc<Node>) -> Self {
        Self(node)
    }

    /// Whether volumes of this node may be in clusters.
    pub fn has_clusters(&self) -> bool {
        self.0.backends.has_clusters()
    }

    /// [`Node::stats`], without a job where the answer waits for nothing. `None` when the agent
    /// is shutting down.
    pub async fn stats(
        &self,
        volume_id: String,
        path: PathBuf,
        deadline: Duration,
    ) -> Option<Result<Statistics, Arc<VolumeError>>> {
        if let Some(usage) = self.0.stats_at_once(&volume_id, &path) {
            return Some(Ok(usage.into()));
        }
        self.run(move |node| node.stats(volume_id, path, deadline))
            .await
    }

    /// Runs `job` with the node. It runs to its end even if the caller is
    /// dropped. `None` when the agent is shutting down.
    pub async fn run<F, T>(&self, job: impl FnOnce(Arc<Node>) -> F + Send + 'static) -> Option<T>
    where
        F: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        let node = Arc::clone(&self.0);
        self.0.runtime.run(move || job(node)).await
    }
}

/// Logs at debug level that a repeated call had nothing left to do: repeats are normal.
fn already(what: &str, done: Done) {
    if done == Done::Already {
        tracing::debug!(what, "was done already");
    }
}
