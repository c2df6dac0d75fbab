//! The controller: makes, deletes, grows, snapshots and clones the volumes of
//! pools, for Kubernetes' provisioner, resizer and snapshotter.

use std::{error::Error, net::SocketAddr, path::PathBuf, process::ExitCode, time::Duration};

use clap::Parser;
use serde::Deserialize;
use tonic::service::Routes;
use uring_csi::{
    chain,
    csi::{
        controller::Controller,
        identity::{DEFAULT_DRIVER_NAME, Identity},
        serve::{Endpoint, told_to_stop},
        validate,
    },
    lane::Lanes,
    observe::{Readiness, http, logs, metrics},
    pool::{Pool, PoolSpec, Pools, Scope, claim::boot_id},
    proto::csi::{controller_server::ControllerServer, identity_server::IdentityServer},
    provision::{Kind, images::Images},
};

/// Serves the CSI Controller service over pools of image files.
///
/// Every option may be given by its environment variable, too, and by its name
/// in the file that --config names; the command line comes first, then the
/// environment, then the file.
#[derive(Debug, Default, Parser, Deserialize)]
#[command(version)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct Options {
    /// Where to serve: unix:///path/to/socket [default: unix:///csi/csi.sock]
    #[arg(long, env = "URING_CSI_ENDPOINT")]
    endpoint: Option<String>,
    /// The driver's name [default: block.uring-csi.dev]
    #[arg(long, env = "URING_CSI_DRIVER_NAME")]
    driver_name: Option<String>,
    /// The node that this controller runs on; local pools need it
    #[arg(long, env = "URING_CSI_NODE_ID")]
    node_id: Option<String>,
    /// A directory of images; may be given again, and several are separated by
    /// `;`. Without a scope it is local where --node-id is given, else shared
    #[arg(
        long,
        value_name = "NAME=DIR[,local|,shared]",
        env = "URING_CSI_POOL",
        value_delimiter = ';'
    )]
    pool: Vec<String>,
    /// Announce capabilities that are alpha in CSI 1.13 (GET_SNAPSHOT,
    /// GET_VOLUME_HEALTH, LIST_VOLUME_HEALTH); older sidecars do not know them
    #[arg(long, env = "URING_CSI_ALPHA_CAPABILITIES")]
    alpha_capabilities: bool,
    /// Serve /metrics, /healthz and /readyz on this address, as 0.0.0.0:9809
    #[arg(long, value_name = "ADDRESS", env = "URING_CSI_METRICS_LISTEN")]
    metrics_listen: Option<SocketAddr>,
    /// How log lines look [default: text]
    #[arg(long, value_enum, env = "URING_CSI_LOG_FORMAT")]
    log_format: Option<logs::Format>,
    /// What is logged: a level, or target=level,… [default: info]
    #[arg(long, env = "URING_CSI_LOG_LEVEL")]
    log_level: Option<String>,
    /// A file of these options, in TOML
    #[arg(long, value_name = "FILE", env = "URING_CSI_CONFIG")]
    #[serde(skip)]
    config: Option<PathBuf>,
}

impl Options {
    /// What is not given here is taken from the file.
    fn with_file(mut self) -> Result<Self, String> {
        let Some(path) = self.config.take() else {
            return Ok(self);
        };
        let named = |what: &dyn std::fmt::Display| format!("{}: {what}", path.display());
        let text = std::fs::read_to_string(&path).map_err(|e| named(&e))?;
        let file: Self = toml::from_str(&text).map_err(|e| named(&e))?;
        Ok(Self {
            endpoint: self.endpoint.or(file.endpoint),
            driver_name: self.driver_name.or(file.driver_name),
            node_id: self.node_id.or(file.node_id),
            pool: if self.pool.is_empty() {
                file.pool
            } else {
                self.pool
            },
            alpha_capabilities: self.alpha_capabilities || file.alpha_capabilities,
            metrics_listen: self.metrics_listen.or(file.metrics_listen),
            log_format: self.log_format.or(file.log_format),
            log_level: self.log_level.or(file.log_level),
            config: None,
        })
    }

    fn pools(&self) -> Result<Pools, Box<dyn Error>> {
        let default = match self.node_id {
            Some(_) => Scope::Local,
            None => Scope::Shared,
        };
        let specs = self.pool.iter().map(|text| text.parse::<PoolSpec>());
        let pools = specs
            .map(|spec| Ok(spec?.or(default)))
            .collect::<Result<Vec<Pool>, uring_csi::pool::PoolError>>()?;
        if pools.is_empty() {
            return Err("no pool is given; add --pool NAME=DIR".into());
        }
        let mut local = pools.iter().filter(|pool| pool.scope == Scope::Local);
        if let (Some(pool), None) = (local.next(), &self.node_id) {
            return Err(format!(
                "pool {:?} is local; say of which node: --node-id",
                pool.name
            )
            .into());
        }
        Ok(Pools::new(pools)?)
    }
}

fn main() -> ExitCode {
    match run(Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("uring-csi-controller: {}", chain(&*error));
            ExitCode::FAILURE
        }
    }
}

fn run(options: Options) -> Result<(), Box<dyn Error>> {
    let options = options.with_file()?;
    let format = options.log_format.unwrap_or_default();
    logs::init(format, options.log_level.as_deref().unwrap_or("info"))?;
    let endpoint: Endpoint = options.endpoint.as_deref().unwrap_or(ENDPOINT).parse()?;
    let name = options
        .driver_name
        .as_deref()
        .unwrap_or(DEFAULT_DRIVER_NAME);
    let name = validate::driver_name(name)?;
    if let Some(id) = &options.node_id {
        validate::node_id("node-id", id).map_err(|status| status.message().to_owned())?;
    }
    let pools = options.pools()?;
    let metrics = metrics::install()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let _entered = runtime.enter();

    let lanes = Lanes::new(IDLE_THREADS);
    let counted = lanes.clone();
    metrics.before_scrape(move || metrics::lane_threads(counted.threads()));
    let images = Images::new(pools, options.node_id.clone(), boot_id()?, lanes);
    let readiness = Readiness::default();
    let identity = Identity::new(&name, readiness.clone());
    let node_id = options.node_id.as_deref();
    let controller = Controller::new(images.clone(), &name, node_id, options.alpha_capabilities);
    let routes =
        Routes::new(IdentityServer::new(identity)).add_service(ControllerServer::new(controller));

    if let Some(address) = options.metrics_listen {
        runtime.spawn(http::serve(address, readiness.clone(), metrics));
    }
    runtime.block_on(async {
        let listener = endpoint.bind().await?;
        tracing::info!(%endpoint, driver = name, "serving");
        tokio::spawn(sweep(images.clone()));
        tokio::spawn(watch(images, readiness));
        let stop = async {
            if let Err(error) = told_to_stop().await {
                tracing::error!(%error, "cannot wait for signals; stopping");
            }
        };
        listener.serve(routes, stop, GRACE).await?;
        Ok(())
    })
}

/// Finishes what dead controllers left, again while a pool is not there.
async fn sweep(images: Images) {
    loop {
        let errors = images.sweep().await;
        for error in &errors {
            tracing::warn!(
                error = chain(error),
                "what earlier controllers left could not all be put right"
            );
        }
        if !errors.iter().any(|error| error.kind() == Kind::Unavailable) {
            return;
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// Ready while every pool can be reached, within a time.
async fn watch(images: Images, readiness: Readiness) {
    loop {
        let reason = match tokio::time::timeout(REACHED_WITHIN, images.check()).await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(chain(&error)),
            Err(_) => Some(format!("a pool did not answer within {REACHED_WITHIN:?}")),
        };
        if let Some(reason) = &reason {
            tracing::warn!(reason, "not ready");
        }
        readiness.set(reason);
        tokio::time::sleep(AGAIN).await;
    }
}

const ENDPOINT: &str = "unix:///csi/csi.sock";
/// Lane threads kept for the next calls.
const IDLE_THREADS: usize = 8;
/// How long calls under way may take after SIGTERM: less than the 30 s that
/// Kubernetes gives a pod.
const GRACE: Duration = Duration::from_secs(20);
/// Between two looks at the pools.
const AGAIN: Duration = Duration::from_secs(15);
const REACHED_WITHIN: Duration = Duration::from_secs(5);
