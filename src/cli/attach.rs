//! `stage`, `publish`, `unpublish`, `unstage`: volumes on this node.

use std::{
    collections::HashMap,
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
};

use clap::Args;
use serde::Serialize;

use super::{
    answer::Answer,
    args::{AccessArgs, key_value},
    context::Context,
    error::CliError,
};
use crate::{
    digest,
    proto::csi::{
        NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnpublishVolumeRequest,
        NodeUnstageVolumeRequest, VolumeCapability,
    },
};

/// What a command did to one volume.
#[derive(Debug, Serialize)]
pub struct Attached {
    /// As given on the command line.
    volume: String,
    volume_id: String,
    /// staged, published, unpublished or unstaged.
    state: &'static str,
    path: PathBuf,
    /// Whether there was nothing to undo.
    #[serde(skip_serializing_if = "Option::is_none")]
    was_done: Option<bool>,
}

impl Answer for Attached {
    fn text(&self) -> String {
        let path = self.path.display();
        if self.was_done == Some(true) {
            return format!("{} was {} already at {path}", self.volume, self.state);
        }
        format!("{} {} at {path}", self.volume, self.state)
    }
}

/// Attaches a volume to this node, formats it if it is blank, and mounts it at
/// the node's default staging path
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  uringctl stage data-1
  uringctl stage data-1 --fs xfs -o noatime
  uringctl stage disk-1 --block
  uringctl stage my-image --context backend=loop --context pool=fast --context image=disk.img
  uringctl stage my-export --context backend=nbd --context uri=nbd://storage-1/disk")]
pub struct Stage {
    /// Volume, by name or id
    volume: String,
    #[command(flatten)]
    usage: AccessArgs,
    /// Volume context of a volume without a controller; VOLUME is its id then
    /// (repeatable)
    #[arg(long = "context", value_name = "KEY=VALUE", value_parser = key_value)]
    volume_context: Vec<(String, String)>,
}

impl Stage {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<Attached, CliError> {
        let (volume_id, volume_context) = if self.volume_context.is_empty() {
            let volume = context.volume(&self.volume).await?;
            (volume.volume_id, volume.volume_context)
        } else {
            (
                self.volume.clone(),
                self.volume_context.into_iter().collect(),
            )
        };
        let path = context.staging_path(&volume_id).await?;
        let staging = StagingDir {
            wanted: &self.volume,
            volume_id: &volume_id,
            path: &path,
        };
        staging
            .stage(context, self.usage.capability(), volume_context)
            .await?;
        Ok(Attached {
            volume: self.volume,
            volume_id,
            state: "staged",
            path,
            was_done: None,
        })
    }
}

/// Mounts a staged volume at a path: a directory for a file system, a file for a
/// raw block device
#[derive(Args, Debug)]
#[command(after_help = "\
The node agent creates PATH. Its parent must exist, and it must be below kubelet's
directory or a directory that --allow-path of the agent names.

Examples:
  uringctl publish data-1 /mnt/data
  uringctl publish data-1 /mnt/data-ro --read-only")]
pub struct Publish {
    /// Volume, by name or id
    volume: String,
    /// Target path
    path: PathBuf,
    /// Mount it read-only
    #[arg(long)]
    read_only: bool,
    #[command(flatten)]
    usage: AccessArgs,
}

impl Publish {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<Attached, CliError> {
        let path = absolute(&self.path)?;
        let held = context.held_volume(&self.volume).await?;
        let staging_path = PathBuf::from(&held.staging_path);
        let staging = StagingDir {
            wanted: &self.volume,
            volume_id: &held.volume_id,
            path: &staging_path,
        };
        let capability = self.usage.or_as_staged(&held.access).capability();
        staging
            .publish(context, capability, &path, self.read_only, HashMap::new())
            .await?;
        Ok(Attached {
            volume: self.volume,
            volume_id: held.volume_id,
            state: "published",
            path,
            was_done: None,
        })
    }
}

/// Unmounts a volume from a path; it stays staged
#[derive(Args, Debug)]
#[command(after_help = "\
Example:
  uringctl unpublish data-1 /mnt/data")]
pub struct Unpublish {
    /// Volume, by name or id
    volume: String,
    /// Target path
    path: PathBuf,
}

impl Unpublish {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<Attached, CliError> {
        let path = absolute(&self.path)?;
        let volume_id = context.volume_id(&self.volume).await?;
        let target = path.to_string_lossy();
        context
            .refuse_managed(&self.volume, &volume_id, Some(&path))
            .await?;
        let held = context.held().await?;
        let is_published = held.iter().any(|held| {
            held.volume_id == volume_id && held.targets.iter().any(|it| it.path == target)
        });
        context.unpublish(&self.volume, &volume_id, &target).await?;
        Ok(Attached {
            volume: self.volume,
            volume_id,
            state: "unpublished",
            path,
            was_done: Some(!is_published),
        })
    }
}

/// Unmounts a volume from its staging path and detaches it from this node
#[derive(Args, Debug)]
#[command(after_help = "\
Fails with exit code 5 or 6 while the volume is published or its device is open;
the message names the opener.

Example:
  uringctl unstage data-1")]
pub struct Unstage {
    /// Volume, by name or id
    volume: String,
}

impl Unstage {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<Attached, CliError> {
        let volume_id = context.volume_id(&self.volume).await?;
        context
            .refuse_managed(&self.volume, &volume_id, None)
            .await?;
        let held = context.held().await?;
        // The agent does not know a volume that has left the node, and answers success
        // for any path.
        let here = held.iter().find(|held| held.volume_id == volume_id);
        let path = match here {
            Some(held) if !held.staging_path.is_empty() => PathBuf::from(&held.staging_path),
            _ => context.staging_path(&volume_id).await?,
        };
        let staging = StagingDir {
            wanted: &self.volume,
            volume_id: &volume_id,
            path: &path,
        };
        staging.unstage(context).await?;
        Ok(Attached {
            volume: self.volume,
            volume_id,
            state: "unstaged",
            path,
            was_done: Some(here.is_none()),
        })
    }
}

/// A volume and the directory where it is or will be staged.
pub struct StagingDir<'a> {
    /// The volume as given on the command line.
    pub wanted: &'a str,
    /// Its id.
    pub volume_id: &'a str,
    /// The staging path.
    pub path: &'a Path,
}

impl StagingDir<'_> {
    /// NodeStageVolume. Makes the staging directory first, as the specification
    /// requires of the caller.
    pub async fn stage(
        &self,
        context: &Context,
        capability: VolumeCapability,
        volume_context: HashMap<String, String>,
    ) -> Result<(), CliError> {
        fs::create_dir_all(self.path).map_err(failed("make the staging directory", self.path))?;
        let request = NodeStageVolumeRequest {
            volume_id: self.volume_id.to_owned(),
            staging_target_path: self.path.to_string_lossy().into_owned(),
            volume_capability: Some(capability),
            volume_context,
            secrets: context.secrets.to_wire(),
            ..Default::default()
        };
        let work = context.node(
            format!("stage {}", self.wanted),
            request,
            async |mut client, request| client.node_stage_volume(request).await,
        );
        let label = format!("staging {}", self.wanted);
        context.showing(&label, self.volume_id, work).await?;
        Ok(())
    }

    /// NodePublishVolume.
    pub async fn publish(
        &self,
        context: &Context,
        capability: VolumeCapability,
        path: &Path,
        readonly: bool,
        volume_context: HashMap<String, String>,
    ) -> Result<(), CliError> {
        let request = NodePublishVolumeRequest {
            volume_id: self.volume_id.to_owned(),
            staging_target_path: self.path.to_string_lossy().into_owned(),
            target_path: path.to_string_lossy().into_owned(),
            volume_capability: Some(capability),
            readonly,
            volume_context,
            secrets: context.secrets.to_wire(),
            ..Default::default()
        };
        let work = context.node(
            format!("publish {} at {}", self.wanted, path.display()),
            request,
            async |mut client, request| client.node_publish_volume(request).await,
        );
        let label = format!("publishing {}", self.wanted);
        context.showing(&label, self.volume_id, work).await?;
        Ok(())
    }

    /// NodeUnstageVolume; removes the staging directory.
    pub async fn unstage(&self, context: &Context) -> Result<(), CliError> {
        let request = NodeUnstageVolumeRequest {
            volume_id: self.volume_id.to_owned(),
            staging_target_path: self.path.to_string_lossy().into_owned(),
        };
        let work = context.node(
            format!("unstage {}", self.wanted),
            request,
            async |mut client, request| client.node_unstage_volume(request).await,
        );
        let label = format!("unstaging {}", self.wanted);
        context.showing(&label, self.volume_id, work).await?;
        match fs::remove_dir(self.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(failed("remove the staging directory", self.path)(error))
            }
            _ => Ok(()),
        }
    }
}

impl Context {
    /// The default staging path of `volume_id`. As with kubelet, the SHA-256 of the
    /// handle names the directory, since a handle may have any character.
    pub async fn staging_path(&self, volume_id: &str) -> Result<PathBuf, CliError> {
        let staging_dir = self.agent_info().await?.staging_dir;
        Ok(PathBuf::from(staging_dir).join(digest::sha256_hex(volume_id)))
    }

    /// NodeUnpublishVolume.
    pub async fn unpublish(
        &self,
        wanted: &str,
        volume_id: &str,
        path: &str,
    ) -> Result<(), CliError> {
        let request = NodeUnpublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            target_path: path.to_owned(),
        };
        let work = self.node(
            format!("unpublish {wanted} at {path}"),
            request,
            async |mut client, request| client.node_unpublish_volume(request).await,
        );
        let label = format!("unpublishing {wanted}");
        self.showing(&label, volume_id, work).await?;
        Ok(())
    }
}

/// The agent has another working directory, so a relative path is resolved here.
pub fn absolute(path: &Path) -> Result<PathBuf, CliError> {
    std::path::absolute(path).map_err(failed("resolve", path))
}

/// The error of a system call on a path.
pub fn failed(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CliError {
    let path = path.to_owned();
    move |source| CliError::Io {
        doing,
        path,
        source,
    }
}
