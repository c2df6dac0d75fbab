//! `bench run`: its arguments, its checks, its end.

use std::{cell::Cell, io, path::PathBuf, pin::pin, rc::Rc, time::Duration};

use clap::{ArgGroup, Args, value_parser};
use tokio::signal::unix::{Signal, SignalKind, signal};
use uuid::Uuid;

use super::{
    caller::Load,
    in_use::Used,
    place::{Creation, KUBELET_DIR, PREFIX, Place},
    process::Process,
    report::{Driver, FORMAT, LoadShape, OriginShape, Report},
    samples::Call,
    session::{Measured, Session},
    volumes::{self, BenchVolume, ListedVolume, MAX_VOLUMES},
};
use crate::{
    cli::{
        answer::printable,
        args::{AccessArgs, NewVolumeArgs, duration},
        attach::absolute,
        context::Context,
        error::CliError,
    },
    error_chain,
    proto::csi::{
        GetPluginInfoRequest, NodeGetCapabilitiesRequest, VolumeCapability,
        node_service_capability::{Type, rpc::Type as Rpc},
        volume_capability::AccessType,
    },
    secret::Secrets,
    size::Size,
};

/// The cycles of all callers together: bounds the memory for their times to some 10 MiB.
const MAX_CYCLES: u32 = 100_000;

/// Measures a driver: stages, publishes, unpublishes and unstages volumes, as kubelet does
#[derive(Args, Debug)]
#[command(
    group = ArgGroup::new("which").required(true).args(["volumes", "volumes_file", "create"]),
    after_help = "\
Each caller has volumes of its own, and puts one after another through a cycle:
NodeStageVolume, NodePublishVolume, NodeGetVolumeStats, NodeUnpublishVolume,
NodeUnstageVolume, each on a new connection. --node-endpoint may be the socket of any CSI
driver. All paths are below a new directory in DIR/plugins/kubernetes.io/csi.

A volume that is in use on this node is refused. The first cycle formats a blank volume.
The run undoes what it did, also at ^C, and reports what it could not undo (exit code 1);
`uringctl bench clean` repeats the attempt.

A line of FILE: {\"handle\": \"data-1\", \"volumeContext\": {}, \"publishContext\": {},
\"secrets\": \"DIR\", \"fsType\": \"ext4\", \"mountOptions\": [], \"block\": false}; only
handle is required.

Examples:
  uringctl bench run --create 4 --callers 4 --cycles 100
  uringctl bench run --create 4 --size 1Gi --pool fast --duration 30s --json > before.json
  uringctl bench run --volume data-1 --kept-connection
  uringctl bench run --volumes-file volumes.json --node-endpoint unix:///csi/csi.sock"
)]
pub struct Run {
    /// Volume of the controller, by name or id, that nothing uses (repeatable)
    #[arg(long = "volume", value_name = "VOLUME")]
    volumes: Vec<String>,
    /// File with a JSON object for each volume
    #[arg(long, value_name = "FILE")]
    volumes_file: Option<PathBuf>,
    /// Create so many volumes, and delete them afterwards
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..=MAX_VOLUMES as i64))]
    create: Option<u16>,
    /// Size of each created volume
    #[arg(long, default_value = "64Mi")]
    size: Size,
    /// Callers at the same time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u16).range(1..=256))]
    callers: u16,
    /// Cycles of each caller
    #[arg(
        long,
        value_name = "N",
        default_value_t = 10,
        value_parser = value_parser!(u32).range(1..=i64::from(MAX_CYCLES))
    )]
    cycles: u32,
    /// Begin cycles for this long, instead of a number of them
    #[arg(long, value_name = "TIME", value_parser = duration, conflicts_with = "cycles")]
    duration: Option<Duration>,
    /// Each caller keeps one connection, which kubelet does not
    #[arg(long)]
    kept_connection: bool,
    /// Kubelet's directory, below which the driver mounts
    #[arg(long, value_name = "DIR", default_value = KUBELET_DIR)]
    kubelet_dir: PathBuf,
    #[command(flatten)]
    usage: AccessArgs,
    #[command(flatten)]
    origin: NewVolumeArgs,
}

/// What the driver has of the calls in a cycle.
pub struct Offers {
    pub stages: bool,
    pub has_stats: bool,
}

impl Offers {
    pub async fn of_driver(context: &Context) -> Result<Self, CliError> {
        let answer = context
            .node(
                "ask the driver for its capabilities",
                NodeGetCapabilitiesRequest {},
                async |mut client, request| client.node_get_capabilities(request).await,
            )
            .await?;
        let has = |wanted: Rpc| {
            answer.capabilities.iter().any(|capability| {
                matches!(&capability.r#type, Some(Type::Rpc(rpc)) if rpc.r#type() == wanted)
            })
        };
        Ok(Self {
            stages: has(Rpc::StageUnstageVolume),
            has_stats: has(Rpc::GetVolumeStats),
        })
    }
}

impl Run {
    /// Runs the command. An error of a call is part of the report.
    pub async fn run(mut self, context: &Context) -> Result<Report, CliError> {
        let cycles = self.checked_cycles()?;
        self.kubelet_dir = absolute(&self.kubelet_dir)?;
        let driver = driver(context).await?;
        let offers = Offers::of_driver(context).await?;
        let endpoint = &context.node_socket.endpoint;
        let process = Process::of_socket(endpoint).await;
        let given = self.given_volumes(context).await?;
        let count = given.len() + usize::from(self.create.unwrap_or(0));
        let callers = usize::from(self.callers);
        if callers > count {
            return Err(CliError::BadArguments(format!(
                "{callers} callers need as many volumes, not {count}: no two use one volume"
            )));
        }
        if !given.is_empty() {
            let pid = process.as_ref().ok().map(|process| process.pid);
            let used = Used::look(context, &self.kubelet_dir, pid, None).await?;
            let places = given.iter().filter_map(|volume| {
                let place = used.place_of(&volume.handle)?;
                Some(format!("{} is {place}", volume.handle))
            });
            let places: Vec<String> = places.collect();
            if !places.is_empty() {
                return Err(CliError::InUse(places));
            }
        }

        let is_interrupted = Rc::new(Cell::new(false));
        let mut signals = Signals::new()?;
        let id = format!("{PREFIX}{}", Uuid::new_v4().simple());
        let place = Place::make(&self.kubelet_dir, &id)?;
        let volumes = self.volumes_in(&place, &id, given, context)?;
        let (access, mount_options) = access(&volumes[0].capability);
        let load = Load {
            endpoint: endpoint.clone(),
            timeout: context.node_socket.timeout,
            keeps_connection: self.kept_connection,
            stages: offers.stages,
            has_stats: offers.has_stats,
            cycles,
            duration: self.duration,
            is_interrupted: is_interrupted.clone(),
        };
        let shape = LoadShape {
            callers,
            volumes: count,
            created: self.create.is_some(),
            kept_connection: self.kept_connection,
            access,
            mount_options,
            timeout_seconds: load.timeout.as_secs_f64(),
            origin: self.create.map(|_| origin(self.size, &self.origin)),
        };
        let creation = Creation {
            size: self.size,
            usage: self.usage,
            origin: self.origin,
        };
        let mut session = Session::new(context, load, callers, place, volumes, creation);
        let work = async {
            let measured = match session.begin().await {
                Ok(()) => Ok(session.measure(process).await),
                Err(error) => Err(error),
            };
            session.clean().await;
            measured
        };
        let ended = until_second_signal(work, &mut signals, &is_interrupted).await;
        let left = session.what_is_left();
        let measured = match ended {
            Some(Ok(measured)) => measured,
            Some(Err(error)) if left.is_empty() => return Err(error),
            Some(Err(error)) => {
                let error = error_chain(&error);
                eprintln!("uringctl: {}", printable(&error));
                return Err(CliError::Left(left));
            }
            None => return Err(CliError::Left(left)),
        };
        Ok(report(
            driver,
            shape,
            measured,
            session.samples,
            is_interrupted.get(),
            left,
        ))
    }

    /// The cycles of each caller, after what clap cannot check.
    fn checked_cycles(&self) -> Result<u32, CliError> {
        let origin = &self.origin;
        let copies = origin.from_snapshot.is_some() || origin.from_volume.is_some();
        if self.create.is_none() && (copies || !origin.parameters().is_empty()) {
            let why = "options of created volumes, such as --pool, need --create";
            return Err(CliError::BadArguments(why.to_owned()));
        }
        let callers = u32::from(self.callers);
        let most = MAX_CYCLES / callers;
        if self.duration.is_some() {
            return Ok(most);
        }
        if self.cycles > most {
            return Err(CliError::BadArguments(format!(
                "{callers} callers may make {most} cycles each, {MAX_CYCLES} together"
            )));
        }
        Ok(self.cycles)
    }

    /// The volumes that the user names, each once.
    async fn given_volumes(&self, context: &Context) -> Result<Vec<ListedVolume>, CliError> {
        if let Some(file) = &self.volumes_file {
            return volumes::read(file);
        }
        let mut given: Vec<ListedVolume> = Vec::new();
        for wanted in &self.volumes {
            let found = context.volume(wanted).await?;
            if given.iter().any(|volume| volume.handle == found.volume_id) {
                return Err(CliError::BadArguments(format!("{wanted} is given twice")));
            }
            given.push(ListedVolume {
                handle: found.volume_id,
                volume_context: found.volume_context,
                ..Default::default()
            });
        }
        Ok(given)
    }

    /// Those that are given and those to create, with their paths.
    fn volumes_in(
        &self,
        place: &Place,
        id: &str,
        given: Vec<ListedVolume>,
        context: &Context,
    ) -> Result<Vec<BenchVolume>, CliError> {
        let mut volumes = Vec::new();
        for listed in given {
            let capability = listed.capability(self.usage.capability());
            let secrets = match &listed.secrets {
                None => context.secrets.clone(),
                Some(dir) => Secrets::read_dir(dir).map_err(|source| CliError::Io {
                    doing: "read the secrets in",
                    path: dir.clone(),
                    source,
                })?,
            };
            volumes.push(BenchVolume {
                volume_context: listed.volume_context,
                publish_context: listed.publish_context,
                secrets,
                ..BenchVolume::new(listed.handle, None, capability, place.paths(volumes.len()))
            });
        }
        for number in 0..self.create.unwrap_or(0) {
            let name = Some(format!("{id}-{number}"));
            let paths = place.paths(volumes.len());
            volumes.push(BenchVolume {
                secrets: context.secrets.clone(),
                ..BenchVolume::new(String::new(), name, self.usage.capability(), paths)
            });
        }
        Ok(volumes)
    }
}

async fn driver(context: &Context) -> Result<Driver, CliError> {
    let info = context
        .node_identity(
            "ask the driver for its name",
            GetPluginInfoRequest {},
            async |mut client, request| client.get_plugin_info(request).await,
        )
        .await?;
    Ok(Driver {
        name: info.name,
        version: info.vendor_version,
        endpoint: context.node_socket.endpoint.to_string(),
    })
}

fn access(capability: &VolumeCapability) -> (String, Vec<String>) {
    match &capability.access_type {
        Some(AccessType::Block(_)) => ("block".to_owned(), Vec::new()),
        Some(AccessType::Mount(mount)) => {
            let mut options = mount.mount_flags.clone();
            options.sort_unstable();
            (mount.fs_type.clone(), options)
        }
        None => (String::new(), Vec::new()),
    }
}

fn origin(size: Size, from: &NewVolumeArgs) -> OriginShape {
    OriginShape {
        size_bytes: size.bytes(),
        parameters: from.parameters().into_iter().collect(),
        copy_of: from.from_snapshot.clone().or(from.from_volume.clone()),
    }
}

fn report(
    driver: Driver,
    load: LoadShape,
    mut measured: Measured,
    created: super::samples::Samples,
    interrupted: bool,
    left: Vec<String>,
) -> Report {
    let cycles = measured.samples.count(Call::Cycle);
    let seconds = measured.took.as_secs_f64();
    measured.samples.merge(created);
    let (process, process_unknown) = match measured.process {
        Some(Ok(process)) => (Some(process), None),
        Some(Err(why)) => (None, Some(why)),
        None => (None, None),
    };
    #[allow(clippy::cast_precision_loss)]
    let cycles_per_second = cycles as f64 / seconds;
    Report {
        format: FORMAT,
        driver,
        load,
        seconds,
        cycles,
        failed_cycles: measured.failed_cycles,
        cycles_per_second,
        interrupted,
        calls: measured.samples.summarize(measured.took),
        process,
        process_unknown,
        own_cpu_seconds: measured.own_cpu_seconds,
        left,
    }
}

/// SIGINT and SIGTERM.
pub struct Signals([Signal; 2]);

impl Signals {
    pub fn new() -> Result<Self, CliError> {
        let of = |kind| {
            signal(kind).map_err(|source: io::Error| CliError::Io {
                doing: "wait for",
                path: "signals".into(),
                source,
            })
        };
        Ok(Self([
            of(SignalKind::interrupt())?,
            of(SignalKind::terminate())?,
        ]))
    }

    async fn next(&mut self) {
        let [interrupt, terminate] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    }
}

/// Waits for `work`. At the first signal it begins nothing more and undoes what it did; at
/// the second it is dropped as it is.
pub async fn until_second_signal<T>(
    work: impl Future<Output = T>,
    signals: &mut Signals,
    is_interrupted: &Cell<bool>,
) -> Option<T> {
    let mut work = pin!(work);
    tokio::select! {
        ended = &mut work => return Some(ended),
        () = signals.next() => is_interrupted.set(true),
    }
    eprintln!("uringctl: interrupted; undoing what was done, which another signal prevents");
    tokio::select! {
        ended = work => Some(ended),
        () = signals.next() => None,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        run: Run,
    }

    fn parsed(args: &[&str]) -> Result<Run, clap::Error> {
        Command::try_parse_from([&["run"], args].concat()).map(|command| command.run)
    }

    #[test]
    fn a_run_is_bounded() {
        for args in [
            &["--create", "1", "--callers", "0"][..],
            &["--create", "1", "--callers", "257"],
            &["--create", "0"],
            &["--create", "1025"],
            &["--create", "1", "--cycles", "0"],
            &["--create", "1", "--cycles", "100001"],
            &["--create", "1", "--cycles", "1", "--duration", "1s"],
            &["--create", "1", "--duration", "25h"],
            &["--create", "1", "--volume", "data-1"],
            &[],
        ] {
            assert!(parsed(args).is_err(), "{args:?}");
        }
        let cycles = |args: &[&str]| parsed(args).unwrap().checked_cycles();
        assert_eq!(cycles(&["--create", "1"]).unwrap(), 10);
        let many = &["--create", "200", "--callers", "200", "--cycles"];
        assert_eq!(cycles(&[&many[..], &["500"]].concat()).unwrap(), 500);
        let error = cycles(&[&many[..], &["501"]].concat()).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{error}");
        let error = cycles(&["--volume", "data-1", "--pool", "main"]).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{error}");
        let timed = cycles(&["--create", "4", "--callers", "4", "--duration", "1h"]);
        assert_eq!(timed.unwrap(), 25_000);
    }
}
