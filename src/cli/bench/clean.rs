//! `bench clean`: undoes what runs that were killed have left.

use std::{
    cell::Cell,
    path::{Path, PathBuf},
    rc::Rc,
};

use clap::Args;
use serde::Serialize;

use super::{
    caller::Load,
    in_use::Used,
    place::{FoundRun, KUBELET_DIR, Place, Record},
    process::Process,
    run::Offers,
    session::Session,
    volumes::{BenchVolume, MayBe},
};
use crate::{
    cli::{answer::Answer, attach::absolute, context::Context, error::CliError},
    error_chain,
    proto::csi::VolumeCapability,
};

/// Undoes what earlier runs have left: mounts, directories, created volumes
#[derive(Args, Debug)]
#[command(after_help = "\
Each run's directory says which volumes the run used. Runs under way are left alone, and
so are those on another socket. A given volume that something else uses by now is not
unstaged.

Example:
  uringctl bench clean")]
pub struct Clean {
    /// Kubelet's directory
    #[arg(long, value_name = "DIR", default_value = KUBELET_DIR)]
    kubelet_dir: PathBuf,
}

/// The directories of runs.
#[derive(Debug, Default, Serialize)]
pub struct Cleaned {
    removed: Vec<PathBuf>,
    running: Vec<PathBuf>,
    /// Those of another socket, in sentences.
    others: Vec<String>,
    pub left: Vec<String>,
}

impl Clean {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<Cleaned, CliError> {
        let kubelet_dir = absolute(&self.kubelet_dir)?;
        let mut cleaned = Cleaned::default();
        let found = Place::list(&kubelet_dir).map_err(|source| CliError::Io {
            doing: "list the runs below",
            path: kubelet_dir.clone(),
            source,
        })?;
        for path in found {
            let found = match Place::take_over(&path) {
                Ok(found) => found,
                Err(error) => {
                    cleaned.left.push(error_chain(&error));
                    continue;
                }
            };
            let (place, record) = match found {
                FoundRun::UnderWay => {
                    cleaned.running.push(path);
                    continue;
                }
                FoundRun::Unused(place) => {
                    match place.remove() {
                        Ok(()) => cleaned.removed.push(path),
                        Err(left) => cleaned.left.push(left),
                    }
                    continue;
                }
                FoundRun::Killed(place, record) => (place, record),
            };
            let sockets = [&context.node_socket, &context.controller_socket]
                .map(|socket| socket.endpoint.to_string());
            if sockets != [&*record.node_endpoint, &*record.controller_endpoint] {
                let (path, node) = (path.display(), record.node_endpoint);
                let controller = record.controller_endpoint;
                cleaned.others.push(format!(
                    "{path} (--node-endpoint {node} --controller-endpoint {controller})"
                ));
                continue;
            }
            let left = undo(context, &kubelet_dir, place, *record).await?;
            if left.is_empty() {
                cleaned.removed.push(path);
            }
            cleaned.left.extend(left);
        }
        Ok(cleaned)
    }
}

async fn undo(
    context: &Context,
    kubelet_dir: &Path,
    place: Place,
    record: Record,
) -> Result<Vec<String>, CliError> {
    let endpoint = &context.node_socket.endpoint;
    let pid = Process::of_socket(endpoint)
        .await
        .map(|process| process.pid);
    let used = Used::look(context, kubelet_dir, pid.ok(), Some(place.path())).await?;
    let stages = Offers::of_driver(context).await?.stages;
    let mut kept = Vec::new();
    let mut volumes = Vec::new();
    for (number, recorded) in record.volumes.into_iter().enumerate() {
        let paths = place.paths(number);
        if recorded.created_as.is_none()
            && let Some(in_use) = used.place_of(&recorded.handle)
        {
            kept.push(format!("volume {} is {in_use}", recorded.handle));
            continue;
        }
        let is_known = !recorded.handle.is_empty();
        volumes.push(BenchVolume {
            may_be: MayBe {
                created: recorded.created_as.is_some(),
                staged: is_known && stages,
                published: is_known,
            },
            ..BenchVolume::new(
                recorded.handle,
                recorded.created_as,
                VolumeCapability::default(),
                paths,
            )
        });
    }
    let load = Load {
        endpoint: endpoint.clone(),
        timeout: context.node_socket.timeout,
        keeps_connection: false,
        stages,
        has_stats: false,
        cycles: 0,
        duration: None,
        is_interrupted: Rc::new(Cell::new(false)),
    };
    let mut session = Session::new(context, load, 1, place, volumes, record.creation);
    session.clean().await;
    kept.extend(session.what_is_left());
    Ok(kept)
}

impl Answer for Cleaned {
    fn text(&self) -> String {
        let removed = self.removed.iter();
        let removed = removed.map(|path| format!("removed {}", path.display()));
        let running = self.running.iter();
        let running = running.map(|path| format!("{} is of a run under way", path.display()));
        let others = self.others.iter();
        let others = others.map(|other| format!("left alone: {other}"));
        let lines: Vec<String> = removed.chain(running).chain(others).collect();
        if lines.is_empty() && self.left.is_empty() {
            return "no run has left anything".to_owned();
        }
        lines.join("\n")
    }
}
