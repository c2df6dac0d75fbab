//! The supervisor of rbd-nbd's daemons, in a DaemonSet that only an operator updates;
//! `crate::supervisor` gives the reasons.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use crate::{
    config,
    endpoint::{Endpoint, shutdown_signal},
    error_chain,
    kernel::{boot_id, privileges},
    observe::{
        Readiness, http,
        logs::{self, Logs},
        metrics,
        traces::TraceOptions,
    },
    program::report_threads,
    proto::holder::holder_server::HolderServer,
    supervisor::{
        child,
        keeper::Keeper,
        memory_lock,
        service::{METHODS, SupervisorService},
    },
};
use clap::Parser;
use tonic::service::Routes;

/// How long running calls may take after SIGTERM.
const GRACE: Duration = Duration::from_secs(5);

/// Runs the rbd-nbd daemons for the node agent, and keeps their keys in locked memory.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Every option can also be given as a key of the --config file, by its name without the dashes."
)]
struct Options {
    /// The socket to serve the node agent on.
    #[arg(
        long,
        env = "URING_CSI_HOLDER_ENDPOINT",
        default_value = "unix:///run/uring-csi-holder/holder.sock"
    )]
    endpoint: Endpoint,
    /// A directory for records without keys, on a tmpfs.
    #[arg(
        long,
        env = "URING_CSI_HOLDER_RUN_DIR",
        default_value = "/run/uring-csi-holder",
        value_name = "DIR"
    )]
    run_dir: PathBuf,
    /// The program rbd-nbd, by its path or its name.
    #[arg(
        long,
        env = "URING_CSI_RBD_NBD",
        default_value = "rbd-nbd",
        value_name = "PROGRAM"
    )]
    rbd_nbd: String,
    #[command(flatten)]
    service: config::ServiceOptions,
}

/// Runs the program.
pub fn main() -> ExitCode {
    if std::env::args_os()
        .nth(1)
        .is_some_and(|verb| verb == child::VERB)
    {
        return child::main();
    }
    let options: Options = config::parse();
    let _logs = match begin(&options.service) {
        Ok(logs) => logs,
        Err(error) => {
            eprintln!("uring-csi-holder: {}", error_chain(&*error));
            return ExitCode::FAILURE;
        }
    };
    match run(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = error_chain(&*error), "the supervisor cannot run");
            ExitCode::FAILURE
        }
    }
}

type Failure = Box<dyn std::error::Error>;

/// Drops privileges, and then starts the second thread, which writes the log.
fn begin(service: &config::ServiceOptions) -> Result<Logs, Failure> {
    memory_lock::lock().map_err(|error| {
        format!("cannot lock the memory that holds keys (this needs CAP_IPC_LOCK): {error}")
    })?;
    privileges::drop_for_supervisor()?;
    Ok(logs::init(
        "uring-csi-holder",
        service.log_format,
        &service.log_level,
        &TraceOptions::default(),
    )?)
}

fn run(options: Options) -> Result<(), Failure> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(serve(options))
}

async fn serve(options: Options) -> Result<(), Failure> {
    crate::kernel::descriptors::raise()?;
    // Takes the lock before any check: two supervisors would each restart the daemons.
    let listener = options.endpoint.bind().await?;
    let records = options.run_dir.join("volumes");
    let keeper = Keeper::open(&options.rbd_nbd, records, boot_id()?)?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        endpoint = %options.endpoint,
        volumes = keeper.list().len(),
        "serving"
    );
    if let Some(address) = options.service.metrics_listen {
        let metrics = metrics::install(&METHODS)?;
        metrics::announce_supervisor();
        let of_scrape = keeper.clone();
        metrics.before_scrape(move || {
            of_scrape.report();
            report_threads(of_scrape.lanes());
        });
        let readiness = Readiness::default();
        readiness.set(None);
        tokio::spawn(http::serve(address, readiness, metrics));
    }
    let routes = Routes::default().add_service(HolderServer::new(SupervisorService::new(keeper)));
    let stop = async {
        if let Err(error) = shutdown_signal().await {
            tracing::error!(%error, "cannot listen for signals; stopping");
        }
    };
    Ok(listener.serve(routes, stop, GRACE).await?)
}
