//! The node agent: runs in a DaemonSet on every node that mounts volumes.

use std::{
    collections::BTreeMap,
    future::pending,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    admission::{Gates, Limits},
    ceph::{
        client::{connections::Connections, rados::Timeouts},
        csi_format::config::{Clusters, Mappings},
        krbd,
    },
    config,
    csi::{
        addons::{
            identity::{AddonsIdentity, Operation},
            node::AddonsNode,
        },
        admin::AdminService,
        identity::{Identity, Segment, once_each},
        node::{METHODS, NodeService},
        run_dir::RunDir,
        validate,
    },
    device::{
        Backends, CephImages, CrushLocation, Exports, ImageFiles, NodeFormatMarkers,
        PendingReleases, ThisNode, luks, nbd,
    },
    endpoint::{Endpoint, shutdown_signal},
    error_chain,
    kernel::{boot_id, core_dumps, descriptors, heap, privileges},
    lane::Lanes,
    manager::{Manager, directory::VolumesDir, records::AppliedRecords},
    mount::{path::Roots, table},
    nfs::InlineShare,
    observe::{
        Readiness, http,
        logs::{self, Logs},
        metrics::{self, Metrics},
    },
    pool::{PoolSpec, Pools, Scope},
    program::{
        notify, report_threads,
        sockets::{Listeners, Sockets},
    },
    proto::{
        addons::{
            encryptionkeyrotation::encryption_key_rotation_controller_server::EncryptionKeyRotationControllerServer,
            fence::fence_controller_server::FenceControllerServer,
            identity::identity_server::IdentityServer as AddonsIdentityServer,
            reclaimspace::reclaim_space_node_server::ReclaimSpaceNodeServer,
        },
        admin::node_admin_server::NodeAdminServer,
        csi::{identity_server::IdentityServer, node_server::NodeServer},
    },
    ring,
    size::Size,
    supervisor::{Watch, client::Client},
    volume::{ConditionReason, Config, Heartbeat, Node, NodeHandle, record::Records},
};
use clap::Parser;
use tonic::service::Routes;

mod labels;

/// How long running calls may take after SIGTERM.
const GRACE: Duration = Duration::from_secs(25);
/// Idle lane threads that are kept.
const IDLE_LANES: usize = 16;
/// Between two checks of readiness.
const CHECK_EVERY: Duration = Duration::from_secs(5);
/// Between two looks at the volumes' conditions, however often the metrics are read.
const REST: Duration = Duration::from_secs(5);
/// Between two checks while not ready.
const CHECK_UNREADY_EVERY: Duration = Duration::from_secs(1);

/// The uring-csi node agent: attaches, formats and mounts volumes on this node.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Every option can also be given as a key of the --config file, by its name without the dashes."
)]
struct NodeOptions {
    /// The socket to serve CSI on.
    #[arg(
        long,
        env = "URING_CSI_ENDPOINT",
        default_value = "unix:///run/uring-csi/node.sock"
    )]
    endpoint: Endpoint,
    /// This node's name, as Kubernetes knows it.
    #[arg(long, env = "URING_CSI_NODE_ID", value_name = "NAME")]
    node_id: String,
    /// A directory for state that outlives a reboot: the records of inline volumes.
    #[arg(
        long,
        env = "URING_CSI_STATE_DIR",
        default_value = "/var/lib/uring-csi",
        value_name = "DIR"
    )]
    state_dir: PathBuf,
    /// A directory for state until the next reboot, on a tmpfs.
    #[arg(
        long,
        env = "URING_CSI_RUN_DIR",
        default_value = "/run/uring-csi",
        value_name = "DIR"
    )]
    run_dir: PathBuf,
    /// Kubelet's directory: staging and target paths lie below it.
    #[arg(
        long,
        env = "URING_CSI_KUBELET_DIR",
        default_value = "/var/lib/kubelet",
        value_name = "DIR"
    )]
    kubelet_dir: PathBuf,
    /// A further directory below which volumes may be staged and published; repeatable.
    #[arg(
        long,
        env = "URING_CSI_ALLOW_PATH",
        value_delimiter = ':',
        value_name = "DIR"
    )]
    allow_path: Vec<PathBuf>,
    /// A directory of files, each of which asks for a volume on this machine.
    #[arg(long, env = "URING_CSI_VOLUMES", value_name = "DIR")]
    volumes: Option<PathBuf>,
    /// A directory of image files, NAME=DIR[,local|,shared][,mounted]; repeatable.
    #[arg(
        long,
        env = "URING_CSI_POOL",
        value_delimiter = ';',
        value_name = "NAME=DIR"
    )]
    pool: Vec<PoolSpec>,
    #[command(flatten)]
    ceph: config::CephOptions,
    /// The socket of uring-csi-holder, for volumes that rbd-nbd serves.
    #[arg(long, env = "URING_CSI_HOLDER", value_name = "ENDPOINT")]
    holder: Option<Endpoint>,
    /// This node's location in the CRUSH map, e.g. zone:a|rack:b, for clusters with
    /// readAffinity: reads go to the nearest replica.
    #[arg(long, env = "URING_CSI_CRUSH_LOCATION", value_name = "TYPE:NAME|…")]
    crush_location: Option<String>,
    /// A file with the labels of this Kubernetes node, a KEY="VALUE" in each line, as the
    /// downward API writes them, or the Node object in JSON. It is read at the start.
    #[arg(long, env = "URING_CSI_NODE_LABELS", value_name = "FILE")]
    node_labels: Option<PathBuf>,
    /// A label of the node that is a level of its location in the CRUSH map, unless the
    /// cluster's crushLocationLabels are set; repeatable.
    #[arg(
        long,
        env = "URING_CSI_CRUSH_LOCATION_LABELS",
        value_delimiter = ',',
        requires = "node_labels",
        conflicts_with = "crush_location",
        value_name = "LABEL"
    )]
    crush_location_labels: Vec<String>,
    /// A label of the node that is a topology segment, e.g. topology.kubernetes.io/zone,
    /// reported as topology.DRIVER/zone; repeatable.
    #[arg(
        long,
        env = "URING_CSI_DOMAIN_LABELS",
        value_delimiter = ',',
        requires = "node_labels",
        value_name = "LABEL"
    )]
    domain_labels: Vec<String>,
    /// A topology segment of this node, e.g. zone=a, reported as topology.DRIVER/zone;
    /// repeatable.
    #[arg(
        long,
        env = "URING_CSI_TOPOLOGY",
        value_delimiter = ',',
        value_name = "KEY=VALUE"
    )]
    topology: Vec<Segment>,
    /// The maximum number of volumes on this node; 0 leaves it to the orchestrator.
    #[arg(long, env = "URING_CSI_MAX_VOLUMES", default_value_t = 0, value_parser = clap::value_parser!(i64).range(0..), value_name = "N")]
    max_volumes: i64,
    /// Allow inline volumes, each at most this large. Any author of a pod can create them;
    /// without this option there are none.
    #[arg(long, env = "URING_CSI_INLINE_MAX_SIZE", value_name = "SIZE")]
    inline_max_size: Option<Size>,
    /// A share of an NFS server that inline volumes may be, with the port of the server if it
    /// is not the usual one; can be given several times. Any author of a pod can then read and
    /// write it; without this option there are none.
    #[arg(
        long,
        env = "URING_CSI_NFS_INLINE",
        value_delimiter = ',',
        value_name = "SERVER[:PORT]:/SHARE"
    )]
    nfs_inline: Vec<InlineShare>,
    /// How many seconds the unmount of an NFS directory waits for its server; then it ends,
    /// and what is not written yet is written once the server is back.
    #[arg(
        long,
        env = "URING_CSI_NFS_UNMOUNT_TIMEOUT",
        default_value_t = 30,
        value_name = "SECONDS"
    )]
    nfs_unmount_timeout: u32,
    /// Apply a pod's fsGroup in the driver (reports VOLUME_MOUNT_GROUP).
    #[arg(long, env = "URING_CSI_VOLUME_MOUNT_GROUP")]
    volume_mount_group: bool,
    /// Take kubelet's descriptor lock over published raw block volumes; for use without kubelet.
    #[arg(long, env = "URING_CSI_BLOCK_LOCK")]
    block_lock: bool,
    /// Report capabilities that are alpha in CSI 1.13 (GET_VOLUME_HEALTH);
    /// older sidecars do not know them.
    #[arg(long, env = "URING_CSI_ALPHA_CAPABILITIES")]
    alpha_capabilities: bool,
    #[command(flatten)]
    limits: Limits,
    #[command(flatten)]
    plugin: config::PluginOptions,
}

/// Runs the program.
pub fn main() -> ExitCode {
    let options: NodeOptions = config::parse();
    let _logs = match begin(&options.plugin) {
        Ok(logs) => logs,
        Err(error) => {
            eprintln!("uring-csi-node: {}", error_chain(&*error));
            return ExitCode::FAILURE;
        }
    };
    match run(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = error_chain(&*error), "the node agent cannot run");
            ExitCode::FAILURE
        }
    }
}

type Failure = Box<dyn std::error::Error>;

/// Drops privileges, and then starts the second thread, which writes the log.
fn begin(plugin: &config::PluginOptions) -> Result<Logs, Failure> {
    let service = &plugin.service;
    heap::limit_arenas();
    core_dumps::forbid().map_err(|error| format!("cannot forbid core dumps: {error}"))?;
    let can_grow =
        privileges::drop_for_node().map_err(|error| format!("cannot drop privileges: {error}"))?;
    let logs = logs::init(
        "uring-csi-node",
        service.log_format,
        &service.log_level,
        &plugin.traces,
    )?;
    if !can_grow {
        tracing::warn!(
            "this process lacks CAP_SYS_RESOURCE: it refuses to grow a mounted ext4; xfs, btrfs and raw block volumes grow"
        );
    }
    Ok(logs)
}

fn run(mut options: NodeOptions) -> Result<(), Failure> {
    validate::node_id("--node-id", &options.node_id)
        .map_err(|status| status.message().to_owned())?;
    let labels = match &options.node_labels {
        Some(path) => labels::read(path)?,
        None => BTreeMap::new(),
    };
    let by_labels = labels::segments(&labels, &options.domain_labels)?;
    options.topology.extend(by_labels);
    once_each(&options.topology)?;
    let location = CrushLocation {
        fixed: options.crush_location.take(),
        labels: labels.into(),
        names: std::mem::take(&mut options.crush_location_labels),
    };
    ring::start(serve(options, location))?
}

async fn serve(options: NodeOptions, location: CrushLocation) -> Result<(), Failure> {
    let begun = Instant::now();
    let readiness = Readiness::default();
    // First of all: two agents must never share a node.
    let (listeners, heartbeat) = take_node(&options).await?;
    let lanes = Lanes::new(IDLE_LANES);
    let gates = gates(&options)?;
    let listen = options.plugin.service.metrics_listen;
    let metrics = serve_metrics(listen, lanes.clone(), gates.clone(), readiness.clone())?;
    let config = node_config(&options, gates);
    let records = Records::open(&options.run_dir, &options.state_dir)?;
    std::fs::create_dir_all(&config.staging_dir)?;
    let roots = Roots::new(&[options.kubelet_dir.clone(), config.staging_dir.clone()])?;
    let roots = roots.with_allowed(&options.allow_path)?;
    let pools = Pools::new(options.pool.into_iter().map(|pool| pool.or(Scope::Local)))?;
    let pool_names = pools.iter().map(|pool| pool.name.clone()).collect();
    let format_markers = NodeFormatMarkers::open(options.run_dir.join("mkfs"))?;
    let connections = Connections::new(Timeouts::default())?;
    let links = nbd::Links::new(&options.plugin.driver_name);
    let backends = Backends {
        images: ImageFiles {
            pending_releases: PendingReleases::of(&pools),
            pools,
            node_id: options.node_id,
            boot_id: boot_id()?,
        },
        exports: Exports {
            links: links.clone(),
            format_markers: format_markers.clone(),
        },
        ceph: CephImages {
            kms: super::kms_config(&options.ceph),
            mappings: Arc::new(Mappings::new(&options.ceph.cluster_mapping)),
            clusters: options
                .ceph
                .ceph_config
                .map(|path| Arc::new(Clusters::new(path))),
            connections: connections.clone(),
            mapper: krbd::Mapper::open(options.run_dir.join("map"))?,
            supervisor: options
                .holder
                .map(|endpoint| Watch::start(Client::new(endpoint)))
                .transpose()?,
            location,
            format_markers,
            this_node: ThisNode {
                id: config.node_id.clone(),
                boot_id: boot_id()?,
            },
        },
        inline_shares: options.nfs_inline,
    };
    let node = Node::open(
        config.clone(),
        backends,
        roots,
        records,
        lanes.clone(),
        heartbeat,
    )?;
    let manager = if let Some(directory) = options.volumes {
        let records = AppliedRecords::open(&options.run_dir, boot_id()?)?;
        let manager = Manager::new(node.clone(), lanes, VolumesDir::new(directory), records);
        ring::spawn(manager.clone().run());
        Some(manager)
    } else {
        None
    };
    if let Some(metrics) = metrics {
        metrics.before_scrape(move || report_servers(&connections, &links));
        ring::spawn(report_conditions(node.clone(), metrics));
    }
    // CSI's Probe: permanent conditions, for which Kubernetes restarts the agent.
    let able = Readiness::default();
    able.set(why_not_ready(&options.kubelet_dir)?);
    ring::spawn(watch(node.clone(), able.clone(), readiness.clone()));
    let volumes = manager.as_ref().map(|manager| manager.summary());
    let handle = NodeHandle::new(node.clone());
    let addons = addons_routes(&config.driver_name, able.clone(), handle.clone());
    let routes = Routes::default()
        .add_service(IdentityServer::new(Identity::new(
            &config.driver_name,
            able.clone(),
        )))
        .add_service(NodeServer::new(NodeService::new(
            handle.clone(),
            config.clone(),
            options.topology,
        )))
        .add_service(NodeAdminServer::new(AdminService::new(
            handle, config, pool_names, readiness, manager,
        )));
    ring::spawn(notify::announce(volumes));
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        endpoint = %options.endpoint,
        micros = logs::micros(begun.elapsed()),
        "serving"
    );
    serve_until_shutdown(listeners, routes, addons, node).await
}

/// The node's settings.
fn node_config(options: &NodeOptions, gates: Gates) -> Config {
    Config {
        node_id: options.node_id.clone(),
        driver_name: options.plugin.driver_name.clone(),
        max_volumes: options.max_volumes,
        block_lock: options.block_lock,
        volume_mount_group: options.volume_mount_group,
        alpha_capabilities: options.alpha_capabilities,
        inline_max_bytes: options
            .inline_max_size
            .map(|size| size.bytes().unsigned_abs()),
        staging_dir: options.run_dir.join("staging"),
        remote_unmount: Duration::from_secs(options.nfs_unmount_timeout.into()),
        gates,
    }
}

/// csi-addons' services.
fn addons_routes(driver_name: &str, able: Readiness, node: NodeHandle) -> Routes {
    let mut operations = vec![Operation::NodeService, Operation::ReclaimOnline];
    if node.has_clusters() {
        operations.extend([Operation::FenceClients, Operation::RotateKeys]);
    }
    let service = AddonsNode::new(node);
    let identity = AddonsIdentity::new(driver_name, able, operations);
    Routes::new(AddonsIdentityServer::new(identity))
        .add_service(ReclaimSpaceNodeServer::new(service.clone()))
        .add_service(EncryptionKeyRotationControllerServer::new(service.clone()))
        .add_service(FenceControllerServer::new(service))
}

/// Takes the sockets and the run directory over from a dead or stalled agent.
async fn take_node(options: &NodeOptions) -> Result<(Listeners, Arc<Heartbeat>), Failure> {
    let (csi, addons) = (&options.endpoint, &options.plugin.csi_addons_endpoint);
    let sockets = Sockets::new(csi.clone(), addons.clone())?;
    sockets.refuse_live().await?;
    // Locked until the process ends: calls may still run on lanes after the runtime.
    let run_dir: &RunDir = Box::leak(Box::new(RunDir::lock(&options.run_dir).await?));
    ring::spawn(async {
        run_dir.keep().await;
        tracing::error!("another agent took over the run directory; exiting");
        std::process::exit(1);
    });
    Ok((sockets.take()?, run_dir.heartbeat()))
}

/// Sets up the gates, and checks the limit of descriptors.
fn gates(options: &NodeOptions) -> Result<Gates, Failure> {
    let max_volumes = options.max_volumes.unsigned_abs();
    if let Some(why) = descriptors::too_few(descriptors::raise()?, max_volumes) {
        tracing::warn!("{why}");
    }
    let gates = Gates::new(&options.limits);
    luks::bound(gates.cryptsetup.clone());
    Ok(gates)
}

fn serve_metrics(
    addr: Option<SocketAddr>,
    lanes: Lanes,
    gates: Gates,
    readiness: Readiness,
) -> Result<Option<Metrics>, Failure> {
    let Some(addr) = addr else { return Ok(None) };
    let metrics = metrics::install(&METHODS)?;
    metrics::announce_node(ConditionReason::ALL.map(ConditionReason::as_str));
    metrics.before_scrape(move || {
        report_threads(&lanes);
        gates.report();
        for count in ring::operations() {
            metrics::ring_operations(count.operation, count.submitted, count.in_flight);
        }
    });
    ring::spawn(http::serve(addr, readiness, metrics.clone()));
    Ok(Some(metrics))
}

/// Updates the metrics of Ceph clusters and NBD servers.
fn report_servers(connections: &Connections, links: &nbd::Links) {
    metrics::nbd_connections_lost(links.lost());
    for (cluster_id, is_reachable) in connections.reachable() {
        metrics::ceph_cluster(&cluster_id, is_reachable);
    }
    for (cluster_id, reason, count) in connections.errors() {
        metrics::ceph_errors(&cluster_id, reason, count);
    }
}

/// Updates the metrics of the volumes' conditions while they are read.
async fn report_conditions(node: Arc<Node>, metrics: Metrics) {
    loop {
        let reasons = ConditionReason::ALL.map(ConditionReason::as_str);
        metrics.volume_conditions(reasons, &node.clone().conditions().await);
        tokio::time::sleep(REST).await;
        metrics.next_scrape().await;
    }
}

/// Serves until SIGTERM. Calls on volumes wait until the node has restored its volumes.
async fn serve_until_shutdown(
    listeners: Listeners,
    routes: Routes,
    addons: Routes,
    node: Arc<Node>,
) -> Result<(), Failure> {
    let restore_failed = async {
        match node.recover().await {
            Ok(()) => pending().await,
            Err(error) => format!("cannot restore the volumes of an earlier agent: {error}"),
        }
    };
    let stop = async {
        if let Err(error) = shutdown_signal().await {
            tracing::error!(%error, "cannot listen for signals; stopping");
        }
    };
    tokio::select! {
        served = listeners.serve(routes, addons, stop, GRACE) => Ok(served?),
        error = restore_failed => Err(error.into()),
    }
}

/// Keeps the readiness of the agent, and logs its changes. A failure of a thread that
/// every volume needs clears `able`, so that Kubernetes restarts the agent. A missing
/// pool or the like affects only `readiness`: it may come back.
async fn watch(node: Arc<Node>, able: Readiness, readiness: Readiness) {
    let mut given = node.watch();
    loop {
        if let Some(reason) = node.has_ended() {
            able.set(Some(reason.to_owned()));
        }
        let mut wrong: Vec<_> = able.reason().into_iter().collect();
        if wrong.is_empty() {
            wrong.extend(given.what_is_wrong().await);
            wrong.extend(node.unread_records());
        }
        let reason = (!wrong.is_empty()).then(|| wrong.join("; "));
        if reason != readiness.reason() {
            if let Some(reason) = &reason {
                tracing::error!(reason, "not ready");
            } else {
                tracing::info!("ready");
            }
        }
        let pause = if reason.is_some() {
            CHECK_UNREADY_EVERY
        } else {
            CHECK_EVERY
        };
        readiness.set(reason);
        tokio::time::sleep(pause).await;
    }
}

/// Checks that mounts propagate to the host: pods do not see a mount in this container's
/// own namespace.
fn why_not_ready(kubelet_dir: &Path) -> std::io::Result<Option<String>> {
    Ok((!table::propagation_reaches_host(kubelet_dir)?).then(|| {
        format!(
            "mounts below {} do not reach the host: mount it into the container with mountPropagation: Bidirectional",
            kubelet_dir.display()
        )
    }))
}
