//! `volumes`, `stats`, `health`: the volumes of this node and their state.

use std::collections::HashMap;

use clap::Args;
use serde::Serialize;

use super::{
    answer::{Answer, table},
    context::Context,
    error::CliError,
    progress::{self, under_way},
    resolve::name_of,
};
use crate::{
    csi::call::STATISTICS_AGE,
    proto::{
        admin::HeldVolume,
        csi::{
            NodeGetVolumeHealthRequest, NodeGetVolumeStatsRequest, VolumeHealthErrorType,
            volume_usage::Unit,
        },
    },
    size::human,
};

/// Lists the volumes of this node: devices, mounts, and the current step
#[derive(Args, Debug)]
#[command(after_help = "\
Accesses no device, so it answers while one hangs.

Examples:
  uringctl volumes
  uringctl volumes --json | jq '.volumes[] | select(.step != \"\")'")]
pub struct Volumes {}

/// The volumes of the node.
#[derive(Debug, Serialize)]
pub struct VolumesAnswer {
    volumes: Vec<HeldAnswer>,
}

#[derive(Debug, Serialize)]
struct HeldAnswer {
    /// Empty where neither the node nor a controller knows it.
    name: String,
    volume_id: String,
    backend: String,
    device: String,
    device_number: String,
    access: String,
    state: String,
    staging_path: String,
    targets: Vec<TargetAnswer>,
    call: String,
    step: String,
    step_age_ms: u64,
    waits_for: String,
    #[serde(skip)]
    under_way: String,
}

#[derive(Debug, Serialize)]
struct TargetAnswer {
    path: String,
    read_only: bool,
}

impl Volumes {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<VolumesAnswer, CliError> {
        let mut held = context.held().await?;
        context.add_names(&mut held).await;
        Ok(VolumesAnswer {
            volumes: held.into_iter().map(HeldAnswer::new).collect(),
        })
    }
}

impl Context {
    /// Adds the names that the node does not know, as far as the controller can be reached.
    async fn add_names(&self, held: &mut [HeldVolume]) {
        if held.iter().all(|volume| !volume.name.is_empty()) {
            return;
        }
        let volumes = self.list_volumes().await.unwrap_or_default().into_iter();
        let names: HashMap<_, _> = volumes
            .map(|volume| {
                let name = name_of(&volume.volume_context).to_owned();
                (volume.volume_id, name)
            })
            .collect();
        for volume in held.iter_mut().filter(|volume| volume.name.is_empty()) {
            volume.name = names.get(&volume.volume_id).cloned().unwrap_or_default();
        }
    }
}

impl HeldAnswer {
    fn new(held: HeldVolume) -> Self {
        let under_way = under_way(&held).unwrap_or_default();
        let targets = held.targets.into_iter().map(|target| TargetAnswer {
            path: target.path,
            read_only: target.read_only,
        });
        Self {
            name: held.name,
            volume_id: held.volume_id,
            backend: held.backend,
            device: held.device,
            device_number: held.device_number,
            access: held.access,
            state: held.state,
            staging_path: held.staging_path,
            targets: targets.collect(),
            call: held.call,
            step: held.step,
            step_age_ms: held.step_age_ms,
            waits_for: held.waits_for,
            under_way,
        }
    }

    fn paths(&self) -> String {
        let paths: Vec<String> = self
            .targets
            .iter()
            .map(|target| {
                let mark = if target.read_only { " (ro)" } else { "" };
                format!("{}{mark}", target.path)
            })
            .collect();
        paths.join(" ")
    }
}

fn name_or_id<'v>(name: &'v str, id: &'v str) -> &'v str {
    if name.is_empty() { id } else { name }
}

impl Answer for VolumesAnswer {
    fn text(&self) -> String {
        let rows = self.volumes.iter().map(|volume| {
            [
                name_or_id(&volume.name, &volume.volume_id).to_owned(),
                volume.state.clone(),
                volume.device.clone(),
                volume.access.clone(),
                volume.paths(),
                volume.under_way.clone(),
            ]
        });
        let header = [
            "VOLUME",
            "STATE",
            "DEVICE",
            "ACCESS",
            "PUBLISHED AT",
            "UNDER WAY",
        ];
        table(header, rows, "this node holds no volumes")
    }
}

/// Shows the used and available space of a volume
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  uringctl stats data-1
  uringctl stats /mnt/data --json | jq '.usage[] | select(.unit == \"bytes\").available'")]
pub struct Stats {
    /// Volume: its name, its id, or a path where it is published
    volume: String,
}

/// Used and available space of a volume.
#[derive(Debug, Serialize)]
pub struct StatsAnswer {
    volume_id: String,
    path: String,
    usage: Vec<UsageAnswer>,
    /// How old they are, unless they are of this call.
    age_ms: Option<u64>,
}

#[derive(Debug, Serialize)]
struct UsageAnswer {
    /// bytes or inodes.
    unit: &'static str,
    total: i64,
    used: i64,
    available: i64,
}

impl Stats {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<StatsAnswer, CliError> {
        let held = context.held_volume(&self.volume).await?;
        let published = held.targets.iter().find(|t| t.path == self.volume);
        let path = published
            .or(held.targets.first())
            .map_or(&held.staging_path, |target| &target.path)
            .clone();
        let request = NodeGetVolumeStatsRequest {
            volume_id: held.volume_id.clone(),
            volume_path: path.clone(),
            staging_target_path: held.staging_path,
        };
        let (answer, age_ms) = context
            .node(
                format!("get the statistics of {}", self.volume),
                request,
                async |mut client, request| {
                    let answer = client.node_get_volume_stats(request).await?;
                    let age = answer.metadata().get(STATISTICS_AGE);
                    let age = age.and_then(|age| age.to_str().ok()?.parse().ok());
                    Ok(answer.map(|answer| (answer, age)))
                },
            )
            .await?;
        let usage = answer.usage.into_iter().filter_map(|usage| {
            let unit = match usage.unit() {
                Unit::Bytes => "bytes",
                Unit::Inodes => "inodes",
                Unit::Unknown => return None,
            };
            Some(UsageAnswer {
                unit,
                total: usage.total,
                used: usage.used,
                available: usage.available,
            })
        });
        Ok(StatsAnswer {
            volume_id: held.volume_id,
            path,
            usage: usage.collect(),
            age_ms,
        })
    }
}

impl Answer for StatsAnswer {
    fn text(&self) -> String {
        let rows = self.usage.iter().map(|usage| {
            let show = |number: i64| match usage.unit {
                "bytes" => human(number),
                _ => number.to_string(),
            };
            // A raw block device has only a size.
            let known = usage.used > 0 || usage.available > 0;
            let show_known = |number| if known { show(number) } else { String::new() };
            [
                usage.unit.to_owned(),
                show(usage.total),
                show_known(usage.used),
                show_known(usage.available),
            ]
        });
        let header = ["UNIT", "TOTAL", "USED", "AVAILABLE"];
        let text = table(header, rows, "the node reports no statistics");
        let Some(age) = self.age_ms else {
            return text;
        };
        let age = progress::age(age);
        format!("{text}\nas of {age} ago: the file system does not answer")
    }
}

/// Shows the health of volumes on this node
#[derive(Args, Debug)]
#[command(after_help = "\
The exit code is 9 if a volume is unhealthy. A status is healthy, degraded, inaccessible
or data_loss.

Examples:
  uringctl health
  uringctl health data-1")]
pub struct Health {
    /// Volumes, by name, id or path; default: all volumes of the node
    #[arg(value_name = "VOLUME")]
    volumes: Vec<String>,
}

/// The conditions of volumes.
#[derive(Debug, Serialize)]
pub struct HealthAnswer {
    volumes: Vec<VolumeHealth>,
}

#[derive(Debug, Serialize)]
struct VolumeHealth {
    /// Empty where neither the node nor a controller knows it.
    name: String,
    volume_id: String,
    /// Empty for a healthy volume.
    conditions: Vec<ConditionAnswer>,
}

#[derive(Debug, Serialize)]
struct ConditionAnswer {
    status: &'static str,
    reason: String,
    message: String,
}

impl Health {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<HealthAnswer, CliError> {
        let mut held = if self.volumes.is_empty() {
            context.held().await?
        } else {
            let mut held = Vec::new();
            for wanted in &self.volumes {
                held.push(context.held_volume(wanted).await?);
            }
            held
        };
        context.add_names(&mut held).await;
        let mut volumes = Vec::new();
        for volume in held {
            volumes.push(health_of(context, volume).await?);
        }
        Ok(HealthAnswer { volumes })
    }
}

async fn health_of(context: &Context, held: HeldVolume) -> Result<VolumeHealth, CliError> {
    let published = held.targets.into_iter().next();
    let request = NodeGetVolumeHealthRequest {
        volume_id: held.volume_id.clone(),
        volume_publish_path: published.map(|target| target.path).unwrap_or_default(),
        staging_target_path: held.staging_path,
    };
    let answer = context
        .node(
            format!("ask for the health of {}", held.volume_id),
            request,
            async |mut client, request| client.node_get_volume_health(request).await,
        )
        .await?;
    let entries = answer.volume_health.map(|health| health.health_statuses);
    let conditions = entries
        .unwrap_or_default()
        .into_iter()
        .map(|entry| ConditionAnswer {
            status: match entry.status() {
                VolumeHealthErrorType::Degraded => "degraded",
                VolumeHealthErrorType::Inaccessible => "inaccessible",
                VolumeHealthErrorType::DataLoss => "data_loss",
                VolumeHealthErrorType::UnknownVolumeHealthType => "unknown",
            },
            reason: entry.reason,
            message: entry.message,
        });
    Ok(VolumeHealth {
        name: held.name,
        volume_id: held.volume_id,
        conditions: conditions.collect(),
    })
}

impl Answer for HealthAnswer {
    fn text(&self) -> String {
        let rows = self.volumes.iter().flat_map(|volume| {
            let row = |status: &str, reason: &str, message: &str| {
                let volume = name_or_id(&volume.name, &volume.volume_id);
                [volume, status, reason, message].map(str::to_owned)
            };
            if volume.conditions.is_empty() {
                return vec![row("healthy", "", "")];
            }
            let conditions = volume.conditions.iter();
            conditions
                .map(|c| row(c.status, &c.reason, &c.message))
                .collect()
        });
        let header = ["VOLUME", "STATUS", "REASON", "MESSAGE"];
        table(header, rows, "this node holds no volumes")
    }

    fn require_success(self) -> Result<(), CliError> {
        let unhealthy = self.volumes.into_iter();
        let unhealthy = unhealthy.filter(|volume| !volume.conditions.is_empty());
        let names: Vec<_> = unhealthy
            .map(|volume| name_or_id(&volume.name, &volume.volume_id).to_owned())
            .collect();
        if names.is_empty() {
            return Ok(());
        }
        Err(CliError::Unhealthy(names))
    }
}
