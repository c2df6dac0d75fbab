//! The controller: creates, deletes, expands, snapshots and clones volumes, as image files
//! in pools and as images in Ceph clusters, for Kubernetes' provisioner, resizer and
//! snapshotter.

use std::{
    error::Error,
    path::PathBuf,
    pin::pin,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    Kind, admission,
    ceph::client::library::Libraries,
    config,
    csi::{
        addons::{
            controller::AddonsController,
            identity::{AddonsIdentity, Operation},
        },
        controller::{Controller, ControllerAdminService, METHODS, OrphanService, WhichNode},
        identity::Identity,
        validate,
    },
    endpoint::{Endpoint, shutdown_signal},
    error_chain,
    kernel::{boot_id, core_dumps},
    lane::Lanes,
    observe::{
        Readiness, http, logs,
        metrics::{self, Metrics, PoolSpace},
    },
    pool::{Pool, PoolSpec, Pools, Room, Scope},
    program::{report_threads, sockets::Sockets},
    proto::{
        addons::{
            fence::fence_controller_server::FenceControllerServer,
            identity::identity_server::IdentityServer as AddonsIdentityServer,
            reclaimspace::reclaim_space_controller_server::ReclaimSpaceControllerServer,
            replication::controller_server::ControllerServer as ReplicationServer,
        },
        admin::{
            controller_admin_server::ControllerAdminServer, orphan_admin_server::OrphanAdminServer,
        },
        csi::{
            controller_server::ControllerServer, group_controller_server::GroupControllerServer,
            identity_server::IdentityServer, node_server::NodeServer,
            snapshot_metadata_server::SnapshotMetadataServer,
        },
    },
    provision::{
        ProvisionError, StoreKind, Stores,
        images::{Copies, ImageStore},
        nfs::{NfsExport, NfsStore, OnDelete, QuotaPolicy},
        rbd::{ObjectNames, Operators, PurgeTimes, QUIET_FOR, RbdStore, SecretDir, Settings},
    },
};
use clap::{Args, Parser};
use tonic::service::Routes;

/// The uring-csi controller: creates, deletes, expands, snapshots and clones volumes in
/// pools of image files, in Ceph clusters and on NFS servers. Needs at least one of --pool,
/// --ceph-config and --nfs-export.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Every option can also be given as a key of the --config file, by its name without the dashes."
)]
struct ControllerOptions {
    /// The socket to serve CSI on.
    #[arg(
        long,
        env = "URING_CSI_ENDPOINT",
        default_value = "unix:///run/uring-csi/controller.sock"
    )]
    endpoint: Endpoint,
    /// The node that this controller runs on; local pools need it.
    #[arg(long, env = "URING_CSI_NODE_ID", value_name = "NAME")]
    node_id: Option<String>,
    /// A directory of image files, NAME=DIR[,local|,shared][,mounted]; repeatable.
    /// Without a scope it is local where --node-id is given, else shared.
    #[arg(
        long,
        env = "URING_CSI_POOL",
        value_delimiter = ';',
        value_name = "NAME=DIR"
    )]
    pool: Vec<PoolSpec>,
    /// Images that are copied at once, where the pool's file system cannot copy by
    /// reference; further copies wait.
    #[arg(long, env = "URING_CSI_MAX_COPIES", default_value_t = 4, value_parser = admission::positive, value_name = "N")]
    max_copies: usize,
    #[command(flatten)]
    clusters: CephStoreOptions,
    /// A share of an NFS server and the directory where this controller has it,
    /// SERVER:/SHARE=DIR[,mounted]; repeatable. With `mounted`, something must be mounted
    /// there.
    #[arg(
        long,
        env = "URING_CSI_NFS_EXPORT",
        value_delimiter = ';',
        value_name = "SERVER:/SHARE=DIR"
    )]
    nfs_export: Vec<NfsExport>,
    /// What a delete does with a directory whose handle does not say it: delete, retain or
    /// archive; csi-driver-nfs' --default-ondelete-policy.
    #[arg(
        long,
        env = "URING_CSI_NFS_ON_DELETE",
        default_value = "delete",
        value_name = "POLICY"
    )]
    nfs_on_delete: OnDelete,
    /// Quotas of new directories: auto, those that the share's file system enforces;
    /// required, none is made without; off.
    #[arg(
        long,
        env = "URING_CSI_NFS_QUOTA",
        default_value = "auto",
        value_name = "POLICY"
    )]
    nfs_quota: QuotaPolicy,
    /// Report capabilities that are alpha in CSI 1.13 (GET_SNAPSHOT, GET_VOLUME_HEALTH,
    /// LIST_VOLUME_HEALTH, SNAPSHOT_METADATA_SERVICE); older sidecars do not know them.
    #[arg(long, env = "URING_CSI_ALPHA_CAPABILITIES")]
    alpha_capabilities: bool,
    #[command(flatten)]
    plugin: config::PluginOptions,
}

/// Options of volumes in Ceph clusters.
#[derive(Debug, Args)]
struct CephStoreOptions {
    #[command(flatten)]
    files: config::CephOptions,
    /// A directory with files userID and userKey, for calls without secrets in CSI:
    /// listings, capacity, single volumes, and purging the trash; repeatable. Without
    /// CLUSTERID it is for every cluster.
    #[arg(
        long,
        env = "URING_CSI_CEPH_SECRET",
        value_delimiter = ';',
        value_name = "[CLUSTERID=]DIR"
    )]
    ceph_secret: Vec<SecretDir>,
    /// Distinguishes this driver's volumes from those of other drivers in the same Ceph
    /// pools: ceph-csi's --instanceid.
    #[arg(
        long,
        env = "URING_CSI_INSTANCE_ID",
        default_value = "default",
        value_name = "ID"
    )]
    instance_id: String,
    /// Give new images the names of their claim, volume or snapshot in Kubernetes, as
    /// metadata: ceph-csi's --setmetadata.
    #[arg(long, env = "URING_CSI_SET_METADATA")]
    set_metadata: bool,
    /// The name of this Kubernetes cluster, which --set-metadata adds: ceph-csi's
    /// --clustername.
    #[arg(
        long,
        env = "URING_CSI_CLUSTER_NAME",
        requires = "set_metadata",
        value_name = "NAME"
    )]
    cluster_name: Option<String>,
    /// Fence a node that still has a single-writer Ceph volume this many seconds after the
    /// volume was unpublished from it (reports PUBLISH_UNPUBLISH_VOLUME); the Ceph user
    /// needs permission to edit the blocklist.
    #[arg(
        long,
        env = "URING_CSI_FENCE_AFTER",
        value_name = "SECONDS",
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    fence_after: Option<u64>,
    /// A file with the id of each node, one a line; a Ceph volume is published to no other.
    /// For orchestrators that may ask for a node that does not exist.
    #[arg(
        long,
        env = "URING_CSI_KNOWN_NODES",
        requires = "fence_after",
        value_name = "FILE"
    )]
    known_nodes: Option<PathBuf>,
}

impl CephStoreOptions {
    /// The backend, if configured.
    fn backend(self, lanes: &Lanes) -> Result<Option<RbdStore>, Box<dyn Error>> {
        let Some(config) = &self.files.ceph_config else {
            return Ok(None);
        };
        Libraries::load()?;
        let settings = Settings {
            config,
            mapping: &self.files.cluster_mapping,
            kms: super::kms_config(&self.files),
            names_of_objects: ObjectNames {
                are_set: self.set_metadata,
                cluster: self.cluster_name,
            },
            instance: &self.instance_id,
            operators: Operators::new(self.ceph_secret),
            fence_after: self.fence_after.map(Duration::from_secs),
            known_nodes: self.known_nodes,
            purge: PurgeTimes::default(),
            quiet_for: QUIET_FOR,
        };
        Ok(Some(RbdStore::new(settings, lanes)?))
    }
}

/// The pools with their scopes; a local one needs a node id.
fn pools(specs: Vec<PoolSpec>, node_id: Option<&str>) -> Result<Pools, Box<dyn Error>> {
    let default = match node_id {
        Some(_) => Scope::Local,
        None => Scope::Shared,
    };
    let pools: Vec<Pool> = specs.into_iter().map(|spec| spec.or(default)).collect();
    let local = pools.iter().find(|pool| pool.scope == Scope::Local);
    if let (Some(pool), None) = (local, node_id) {
        let name = &pool.name;
        return Err(format!("pool {name:?} is local and needs --node-id").into());
    }
    Ok(Pools::new(pools)?)
}

/// Runs the program.
pub fn main() -> ExitCode {
    let options: ControllerOptions = config::parse();
    let service = &options.plugin.service;
    if let Err(error) = core_dumps::forbid() {
        eprintln!("uring-csi-controller: cannot forbid core dumps: {error}");
        return ExitCode::FAILURE;
    }
    let _logs = match logs::init(
        "uring-csi-controller",
        service.log_format,
        &service.log_level,
        &options.plugin.traces,
    ) {
        Ok(logs) => logs,
        Err(error) => {
            eprintln!("uring-csi-controller: {}", error_chain(&error));
            return ExitCode::FAILURE;
        }
    };
    match run(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = error_chain(&*error), "the controller cannot run");
            ExitCode::FAILURE
        }
    }
}

fn run(options: ControllerOptions) -> Result<(), Box<dyn Error>> {
    let name = options.plugin.driver_name;
    let node_id = options.node_id.as_deref();
    if let Some(id) = node_id {
        validate::node_id("--node-id", id).map_err(|status| status.message().to_owned())?;
    }
    let has_directories = !options.nfs_export.is_empty();
    if options.pool.is_empty() && options.clusters.files.ceph_config.is_none() && !has_directories {
        return Err(ProvisionError::NoBackend.into());
    }
    let pools = pools(options.pool, node_id)?;
    let sockets = Sockets::new(options.endpoint.clone(), options.plugin.csi_addons_endpoint)?;
    let metrics = metrics::install(&METHODS)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let _entered = runtime.enter();

    crate::kernel::descriptors::raise()?;
    let lanes = Lanes::new(IDLE_THREADS);
    let counted = lanes.clone();
    metrics.before_scrape(move || report_threads(&counted));
    let copied_within = pools.iter().count() + options.nfs_export.len();
    let copies = Copies::new(options.max_copies, copied_within);
    let counted = copies.clone();
    metrics.before_scrape(move || report_copies(&counted));
    let pool_names: Vec<_> = pools.iter().map(|pool| pool.name.clone()).collect();
    let images = ImageStore::new(
        pools,
        options.node_id.clone(),
        boot_id()?,
        copies.clone(),
        &lanes,
    );
    let images = (!pool_names.is_empty()).then(|| Arc::new(images));
    if let Some(images) = &images
        && options.plugin.service.metrics_listen.is_some()
    {
        for pool in pool_names {
            let (images, lanes) = (images.clone(), lanes.clone());
            runtime.spawn(report_pool(pool, images, lanes, metrics.clone()));
        }
    }
    let rbd = options.clusters.backend(&lanes)?.map(Arc::new);
    if let Some(rbd) = rbd.clone() {
        metrics.before_scrape(move || report_clusters(&rbd));
    }
    let directories = NfsStore::new(
        options.nfs_export,
        options.nfs_on_delete,
        options.nfs_quota,
        copies.clone(),
    )?;
    let directories = has_directories.then(|| Arc::new(directories));
    let stores = Stores::new(images, rbd, directories, &lanes);
    let readiness = Readiness::default();
    // CSI's Probe: a missing pool may be mounted later, and needs no restart.
    let started = Readiness::default();
    started.set(None);
    let mut identity = Identity::new(&name, started.clone());
    let able = stores.abilities();
    if able.groups {
        identity.announce_groups();
    }
    if able.blocks && options.alpha_capabilities {
        identity.announce_metadata();
    }
    let controller = Controller::new(stores.clone(), &name, node_id, options.alpha_capabilities);
    let controller = Arc::new(controller);
    let admin = ControllerAdminService::new(stores.clone(), copies.clone());
    let mut routes = Routes::new(IdentityServer::new(identity))
        .add_service(ControllerServer::from_arc(controller.clone()))
        .add_service(GroupControllerServer::from_arc(controller.clone()))
        .add_service(SnapshotMetadataServer::from_arc(controller))
        .add_service(ControllerAdminServer::new(admin))
        .add_service(OrphanAdminServer::new(OrphanService::new(stores.clone())));
    if let Some(id) = node_id {
        routes = routes.add_service(NodeServer::new(WhichNode::new(&name, id)));
    }

    let addons = addons_routes(&name, started, &stores);

    if let Some(address) = options.plugin.service.metrics_listen {
        runtime.spawn(http::serve(address, readiness.clone(), metrics));
    }
    runtime.block_on(async {
        sockets.refuse_live().await?;
        let listeners = sockets.take()?;
        tracing::info!(endpoint = %options.endpoint, driver = name, "serving");
        for kind in [StoreKind::Images, StoreKind::Nfs] {
            for part in stores.swept_parts(kind) {
                tokio::spawn(sweep(stores.clone(), kind, part));
            }
        }
        tokio::spawn(purge_trash(stores.clone()));
        tokio::spawn(watch(stores, readiness));
        tokio::spawn(expire(copies));
        let stop = async {
            if let Err(error) = shutdown_signal().await {
                tracing::error!(%error, "cannot wait for signals; stopping");
            }
        };
        listeners.serve(routes, addons, stop, GRACE).await?;
        Ok(())
    })
}

/// csi-addons' services.
fn addons_routes(driver_name: &str, started: Readiness, stores: &Stores) -> Routes {
    let mut operations = vec![Operation::ControllerService];
    if stores.has_clusters() {
        operations.extend([
            Operation::ReclaimOffline,
            Operation::FenceNetworks,
            Operation::ReplicateVolumes,
            Operation::ReplicationDestination,
        ]);
    }
    let identity = AddonsIdentity::new(driver_name, started, operations);
    let controller = AddonsController::new(stores.clone());
    Routes::new(AddonsIdentityServer::new(identity))
        .add_service(ReclaimSpaceControllerServer::new(controller.clone()))
        .add_service(ReplicationServer::new(controller.clone()))
        .add_service(FenceControllerServer::new(controller))
}

/// Updates the metrics of copies.
fn report_copies(copies: &Copies) {
    copies.gate().report();
    let left = copies
        .list()
        .into_iter()
        .map(|copy| copy.bytes.saturating_sub(copy.copied));
    metrics::copies(copies.copied(), left.sum());
}

/// Updates the metrics of Ceph clusters.
fn report_clusters(store: &RbdStore) {
    let activity = store.activity();
    metrics::ceph_work(activity.to_remove, activity.to_flatten, activity.fences);
    for (cluster_id, is_reachable) in activity.reachable {
        metrics::ceph_cluster(&cluster_id, is_reachable);
    }
    for (cluster_id, reason, count) in activity.errors {
        metrics::ceph_errors(&cluster_id, reason, count);
    }
}

/// Updates the metrics of a pool while they are read, on a lane: a pool that hangs delays
/// no other, and no scrape.
async fn report_pool(pool: String, images: Arc<ImageStore>, lanes: Lanes, metrics: Metrics) {
    loop {
        let (store, name) = (images.clone(), pool.clone());
        let key = format!("space of pool {pool}");
        let mut count = pin!(lanes.run(&key, "capacity", move || store.room(&name)));
        let in_time = tokio::time::timeout(CHECK_TIMEOUT, &mut count).await;
        let room = if let Ok(room) = in_time {
            room
        } else {
            metrics::pool(&pool, None);
            count.await
        };
        let space = |Room {
                         size,
                         free,
                         promised,
                     }| PoolSpace {
            size,
            free,
            promised,
        };
        metrics::pool(&pool, room.ok().map(space));
        tokio::time::sleep(REST).await;
        metrics.next_scrape().await;
    }
}

/// Lets the next copies run where earlier ones make no progress.
async fn expire(copies: Copies) {
    loop {
        tokio::time::sleep(EXPIRE_EVERY).await;
        copies.gate().expire(Instant::now());
    }
}

/// Cleans up after dead controllers: soon again while a pool or share is not mounted, or
/// something is locked, which a controller that died may have left.
async fn sweep(stores: Stores, kind: StoreKind, part: Option<String>) {
    while let Some(errors) = stores.sweep_part(kind, part.clone()).await {
        let is = |kind| move |error: &ProvisionError| error.kind() == kind;
        let (locked, failed): (Vec<_>, Vec<_>) = errors.into_iter().partition(is(Kind::InUse));
        log_errors(&failed, "cannot clean up after earlier controllers");
        let rest = if failed.iter().any(is(Kind::Transient)) {
            CHECK_EVERY
        } else if locked.is_empty() {
            SWEEP_EVERY
        } else {
            SWEEP_LOCKED_EVERY
        };
        tokio::time::sleep(rest).await;
    }
}

/// Purges the trash of Ceph pools after deletes, also of dead controllers, that could not.
async fn purge_trash(stores: Stores) {
    while let Some(errors) = stores.sweep(StoreKind::Rbd).await {
        log_errors(&errors, "cannot purge the trash of a Ceph cluster");
        tokio::time::sleep(PURGE_EVERY).await;
    }
}

/// Logs transient errors as warnings, all others as errors.
fn log_errors(errors: &[ProvisionError], what: &str) {
    for error in errors {
        let (error, kind) = (error_chain(error), error.kind());
        if kind == Kind::Transient {
            tracing::warn!(error, "{what}");
        } else {
            tracing::error!(error, "{what}");
        }
    }
}

/// Keeps the readiness: ready while every pool is reachable and the list of Ceph clusters
/// is readable.
async fn watch(stores: Stores, readiness: Readiness) {
    loop {
        let reason = match tokio::time::timeout(CHECK_TIMEOUT, stores.check()).await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error_chain(&error)),
            Err(_) => Some(format!("a pool did not answer within {CHECK_TIMEOUT:?}")),
        };
        if let Some(reason) = &reason {
            tracing::warn!(reason, "not ready");
        }
        readiness.set(reason);
        tokio::time::sleep(CHECK_EVERY).await;
    }
}

/// Idle lane threads that are kept.
const IDLE_THREADS: usize = 8;
/// How long running calls may take after SIGTERM: less than the 30 s of Kubernetes.
const GRACE: Duration = Duration::from_secs(20);
/// Between two checks of the pools.
const CHECK_EVERY: Duration = Duration::from_secs(15);
/// Between two counts of a pool's space, however often it is read.
const REST: Duration = Duration::from_secs(5);
/// Between two checks of the progress of copies.
const EXPIRE_EVERY: Duration = Duration::from_secs(1);
/// Between two sweeps of a pool or share.
const SWEEP_EVERY: Duration = Duration::from_secs(3600);
/// The same where something was locked. NFS keeps a dead client's locks for 90 s.
const SWEEP_LOCKED_EVERY: Duration = Duration::from_secs(120);
/// Between two purges of Ceph's trash.
const PURGE_EVERY: Duration = Duration::from_secs(300);
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);
