//! `up` and `down`: create, stage and publish a volume in one command, and undo it.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use clap::Args;
use serde::Serialize;

use super::{
    answer::{Answer, table},
    args::{AccessArgs, NewVolumeArgs, volume_size},
    attach::{StagingDir, absolute},
    context::Context,
    error::CliError,
    persist::NewFile,
    wanted::Wait,
};
use crate::size::Size;

/// The steps of a command that were done.
#[derive(Debug, Default, Serialize)]
pub struct Flow {
    volume_id: String,
    steps: Vec<StepTime>,
    /// The error of the next step.
    #[serde(skip)]
    failed: Option<CliError>,
}

#[derive(Debug, Serialize)]
struct StepTime {
    name: &'static str,
    milliseconds: f64,
    detail: String,
}

impl Flow {
    /// Awaits `work` and records how long it took.
    async fn step<T>(
        &mut self,
        name: &'static str,
        detail: impl Into<String>,
        work: impl Future<Output = Result<T, CliError>>,
    ) -> Result<T, CliError> {
        let start = Instant::now();
        let done = work.await?;
        self.steps.push(StepTime {
            name,
            // To the microsecond: further digits say nothing.
            milliseconds: (start.elapsed().as_secs_f64() * 1e6).round() / 1e3,
            detail: detail.into(),
        });
        Ok(done)
    }
}

impl Answer for Flow {
    fn text(&self) -> String {
        let rows = self.steps.iter().map(|step| {
            [
                step.name.to_owned(),
                format!("{:.2} ms", step.milliseconds),
                step.detail.clone(),
            ]
        });
        let when_empty = match self.failed {
            None => "nothing to do",
            Some(_) => "",
        };
        table(["STEP", "TIME", "WHAT"], rows, when_empty)
    }

    fn require_success(self) -> Result<(), CliError> {
        self.failed.map_or(Ok(()), Err)
    }
}

/// Creates a volume, stages it and publishes it at a path
#[derive(Args, Debug)]
#[command(after_help = "\
Skips the steps that are done, so after a failure the same command resumes where it
stopped. `uringctl down NAME --delete` undoes all of it.

Examples:
  uringctl up data-1 10Gi /mnt/data
  uringctl up data-1 10Gi /mnt/data --fs xfs --pool fast
  uringctl up disk-1 10Gi /mnt/disk --block
  uringctl up data-2 10Gi /mnt/data-2 --nbd-server storage-1
  uringctl up copy-1 10Gi /mnt/copy --from-volume data-1
  uringctl up data-1 10Gi /mnt/data --persist")]
pub struct Up {
    /// Name of the volume
    name: String,
    /// Minimum size, such as 10Gi or 500M
    #[arg(value_parser = volume_size)]
    size: Size,
    /// Target path
    path: PathBuf,
    /// Mount it read-only at that path
    #[arg(long)]
    read_only: bool,
    /// Write a file that asks for it, so that the node agent mounts it again after each
    /// reboot, until `uringctl remove NAME`; the agent needs --volumes
    #[arg(long, conflicts_with = "access")]
    persist: bool,
    #[command(flatten)]
    usage: AccessArgs,
    #[command(flatten)]
    origin: NewVolumeArgs,
}

impl Up {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Flow {
        let mut flow = Flow::default();
        flow.failed = self.steps(context, &mut flow).await.err();
        flow
    }

    async fn steps(self, context: &Context, flow: &mut Flow) -> Result<(), CliError> {
        let path = absolute(&self.path)?;
        let file = if self.persist {
            Some(NewFile::open(context, &self.name).await?)
        } else {
            None
        };
        let create = context.create_volume(self.name.clone(), self.size, &self.usage, &self.origin);
        let volume = flow.step("create", self.name.as_str(), create).await?;
        flow.volume_id.clone_from(&volume.volume_id);

        if let Some(file) = file {
            let write = file.write(context, &volume, &path, &self.usage, self.read_only);
            flow.step("write", format!("{}.toml", self.name), write)
                .await?;
            let mounted = Wait::for_mount(self.name).run(context);
            flow.step("wait", path.to_string_lossy(), mounted).await?;
            return Ok(());
        }

        let staging_path = context.staging_path(&volume.volume_id).await?;
        let staging = StagingDir {
            wanted: &self.name,
            volume_id: &volume.volume_id,
            path: &staging_path,
        };
        let capability = self.usage.capability();
        let stage = staging.stage(context, capability.clone(), volume.volume_context.clone());
        let detail = staging_path.to_string_lossy();
        flow.step("stage", detail, stage).await?;

        let publish = staging.publish(
            context,
            capability,
            &path,
            self.read_only,
            volume.volume_context.clone(),
        );
        let detail = path.to_string_lossy();
        flow.step("publish", detail, publish).await
    }
}

/// Unpublishes a volume from every path on this node and unstages it
#[derive(Args, Debug)]
#[command(after_help = "\
A volume that a file asks for is not taken down: `uringctl remove` removes the file.

Examples:
  uringctl down data-1
  uringctl down /mnt/data
  uringctl down data-1 --delete")]
pub struct Down {
    /// Volume: its name, its id, or a path where it is published
    volume: String,
    /// Delete the volume as well, with all its data
    #[arg(long)]
    delete: bool,
}

impl Down {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Flow {
        let mut flow = Flow::default();
        flow.failed = self.steps(context, &mut flow).await.err();
        flow
    }

    async fn steps(self, context: &Context, flow: &mut Flow) -> Result<(), CliError> {
        let wanted = &self.volume;
        let held = match context.held_volume(wanted).await {
            Ok(held) => Some(held),
            // Not on the node any more; --delete still deletes it.
            Err(CliError::NotHeld(_)) if !wanted.starts_with('/') => None,
            Err(error) => return Err(error),
        };
        let volume_id = match &held {
            Some(held) => held.volume_id.clone(),
            None => context.volume(wanted).await?.volume_id,
        };
        flow.volume_id.clone_from(&volume_id);
        if let Some(held) = held {
            context.refuse_managed(wanted, &volume_id, None).await?;
            for target in &held.targets {
                let unpublish = context.unpublish(wanted, &volume_id, &target.path);
                flow.step("unpublish", target.path.as_str(), unpublish)
                    .await?;
            }
            if !held.staging_path.is_empty() {
                let staging = StagingDir {
                    wanted,
                    volume_id: &volume_id,
                    path: Path::new(&held.staging_path),
                };
                let unstage = staging.unstage(context);
                flow.step("unstage", held.staging_path.as_str(), unstage)
                    .await?;
            }
        }
        if self.delete {
            context.refuse_delete(wanted, &volume_id).await?;
            let delete = context.delete_volume(wanted, volume_id.clone());
            flow.step("delete", volume_id.as_str(), delete).await?;
        }
        Ok(())
    }
}
