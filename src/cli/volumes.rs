//! `create`, `clone`, `list`, `delete`, `expand`: calls of the controller.

use std::collections::{BTreeMap, HashMap};

use clap::Args;
use serde::Serialize;

use super::{
    answer::{Answer, fields, table},
    args::{AccessArgs, NewVolumeArgs, at_least, from_snapshot, from_volume, volume_size},
    context::Context,
    copies::CopyAnswer,
    error::CliError,
    resolve::name_of,
};
use crate::{
    nbd::Export,
    proto::csi::{
        CapacityRange, ControllerExpandVolumeRequest, ControllerExpandVolumeResponse,
        CreateVolumeRequest, DeleteVolumeRequest, NodeExpandVolumeRequest, Volume,
    },
    size::{Size, human},
};

/// A volume, as printed.
#[derive(Debug, Serialize)]
pub struct VolumeAnswer {
    name: String,
    volume_id: String,
    capacity_bytes: i64,
    volume_context: BTreeMap<String, String>,
    accessible_topology: Vec<BTreeMap<String, String>>,
}

impl From<Volume> for VolumeAnswer {
    fn from(volume: Volume) -> Self {
        Self {
            name: name_of(&volume.volume_context).to_owned(),
            volume_id: volume.volume_id,
            capacity_bytes: volume.capacity_bytes,
            volume_context: volume.volume_context.into_iter().collect(),
            accessible_topology: volume
                .accessible_topology
                .into_iter()
                .map(|topology| topology.segments.into_iter().collect())
                .collect(),
        }
    }
}

impl Answer for VolumeAnswer {
    fn text(&self) -> String {
        let context: Vec<String> = pairs(&self.volume_context);
        let topology: Vec<String> = self.accessible_topology.iter().flat_map(pairs).collect();
        fields(&[
            ("name", self.name.clone()),
            ("id", self.volume_id.clone()),
            ("size", human(self.capacity_bytes)),
            ("context", context.join(" ")),
            ("reachable from", topology.join(" ")),
        ])
    }
}

fn pairs(map: &BTreeMap<String, String>) -> Vec<String> {
    map.iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect()
}

/// Creates a volume, or returns the existing one of that name
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  uringctl create data-1 10Gi
  uringctl create data-1 10Gi --pool fast --fs xfs
  uringctl create disk-1 500G --block
  uringctl create data-2 10Gi --nbd-server storage-1
  uringctl create copy-1 10Gi --from-snapshot before-upgrade")]
pub struct Create {
    /// Name; may have any but control characters
    name: String,
    /// Minimum size, such as 10Gi or 500M
    #[arg(value_parser = volume_size)]
    size: Size,
    #[command(flatten)]
    usage: AccessArgs,
    #[command(flatten)]
    origin: NewVolumeArgs,
}

impl Create {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<VolumeAnswer, CliError> {
        let volume = context
            .create_volume(self.name, self.size, &self.usage, &self.origin)
            .await?;
        Ok(volume.into())
    }
}

/// Creates a volume with the content of another
#[derive(Args, Debug)]
#[command(after_help = "\
The copy is in its source's pool, and attached as its source is. The source must
not be in use, unless the pool's file system can copy by reference (XFS, Btrfs).

Example:
  uringctl clone data-1 data-2")]
pub struct CloneVolume {
    /// Volume to copy, by name or id
    source: String,
    /// Name of the new volume
    name: String,
    /// Minimum size; default: that of the source
    #[arg(long, value_parser = volume_size)]
    size: Option<Size>,
    #[command(flatten)]
    usage: AccessArgs,
}

impl CloneVolume {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<VolumeAnswer, CliError> {
        let source = context.volume(&self.source).await?;
        let bytes = self.size.map_or(source.capacity_bytes, Size::bytes);
        let request = CreateVolumeRequest {
            name: self.name.clone(),
            capacity_range: Some(CapacityRange {
                required_bytes: bytes,
                limit_bytes: 0,
            }),
            volume_capabilities: vec![self.usage.capability()],
            parameters: as_attached(&source.volume_context),
            volume_content_source: Some(from_volume(source.volume_id)),
            secrets: context.secrets.to_wire(),
            ..Default::default()
        };
        Ok(context.create(request).await?.into())
    }
}

/// The parameters of a copy in its source's pool with its source's backend.
fn as_attached(context: &HashMap<String, String>) -> HashMap<String, String> {
    let mut parameters: HashMap<_, _> = [
        "pool",
        "backend",
        "directIO",
        "sectorSize",
        "connections",
        "requestTimeout",
        "deadConnectionTimeout",
        "clusterID",
        "imageFeatures",
        "mounter",
        "mapOptions",
        "encrypted",
        "encryptionKMSID",
        "server",
        "share",
    ]
    .into_iter()
    .filter_map(|key| Some((key.to_owned(), context.get(key)?.clone())))
    .collect();
    if let Some(Ok(export)) = context.get("uri").map(|uri| uri.parse::<Export>()) {
        parameters.insert("nbdServer".to_owned(), export.server().to_string());
    }
    parameters
}

impl Context {
    /// CreateVolume with the arguments of a command line.
    pub async fn create_volume(
        &self,
        name: String,
        size: Size,
        usage: &AccessArgs,
        origin: &NewVolumeArgs,
    ) -> Result<Volume, CliError> {
        let volume_content_source = match (&origin.from_snapshot, &origin.from_volume) {
            (Some(snapshot), _) => Some(from_snapshot(self.snapshot_id(snapshot).await?)),
            (None, Some(volume)) => Some(from_volume(self.volume(volume).await?.volume_id)),
            (None, None) => None,
        };
        let request = CreateVolumeRequest {
            name,
            capacity_range: Some(at_least(size)),
            volume_capabilities: vec![usage.capability()],
            parameters: origin.parameters(),
            volume_content_source,
            secrets: self.secrets.to_wire(),
            ..Default::default()
        };
        self.create(request).await
    }

    /// ControllerExpandVolume.
    pub async fn expand_volume(
        &self,
        wanted: &str,
        volume_id: String,
        size: Size,
    ) -> Result<ControllerExpandVolumeResponse, CliError> {
        let request = ControllerExpandVolumeRequest {
            volume_id,
            capacity_range: Some(at_least(size)),
            secrets: self.secrets.to_wire(),
            ..Default::default()
        };
        self.controller(
            format!("expand {wanted}"),
            request,
            async |mut client, request| client.controller_expand_volume(request).await,
        )
        .await
    }

    /// CreateVolume.
    pub async fn create(&self, request: CreateVolumeRequest) -> Result<Volume, CliError> {
        let doing = format!("create {}", request.name);
        let name = request.name.clone();
        let label = format!("creating {name}");
        let work = self.controller(doing.clone(), request, async |mut client, request| {
            client.create_volume(request).await
        });
        let created = self.showing_copy(&label, "volume", &name, work).await?;
        created.volume.ok_or(CliError::MissingField {
            doing,
            missing: "volume",
        })
    }

    /// DeleteVolume.
    pub async fn delete_volume(&self, wanted: &str, volume_id: String) -> Result<(), CliError> {
        let request = DeleteVolumeRequest {
            volume_id,
            secrets: self.secrets.to_wire(),
        };
        let work = self.controller(
            format!("delete {wanted}"),
            request,
            async |mut client, request| client.delete_volume(request).await,
        );
        self.showing(&format!("deleting {wanted}"), "", work)
            .await?;
        Ok(())
    }
}

/// Lists all volumes, and those that are still being copied
#[derive(Args, Debug)]
#[command(after_help = "\
A pool or cluster that cannot be reached is left out with a warning (exit code 1).

Example:
  uringctl list --json | jq -r '.volumes[].volume_id'")]
pub struct List {}

/// The volumes that the controller knows.
#[derive(Debug, Serialize)]
pub struct VolumeList {
    volumes: Vec<VolumeAnswer>,
    /// The volumes that are still being copied.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    copies: Vec<CopyAnswer>,
    /// What the list omits, in sentences.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    omitted: Vec<String>,
}

impl List {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<VolumeList, CliError> {
        let mut copies = context.copies("volume").await;
        let (volumes, omitted) = context.list_what_can_be_reached().await?;
        // Complete meanwhile.
        copies.retain(|copy| volumes.iter().all(|volume| volume.volume_id != copy.id));
        Ok(VolumeList {
            volumes: volumes.into_iter().map(VolumeAnswer::from).collect(),
            copies: copies.into_iter().map(CopyAnswer::from).collect(),
            omitted,
        })
    }
}

impl Answer for VolumeList {
    fn text(&self) -> String {
        let rows = self.volumes.iter().map(|volume| {
            let context = |key: &str| volume.volume_context.get(key).cloned();
            [
                volume.name.clone(),
                human(volume.capacity_bytes),
                context("backend").unwrap_or_default(),
                context("pool").unwrap_or_default(),
                volume.volume_id.clone(),
            ]
        });
        let header = ["NAME", "SIZE", "BACKEND", "POOL", "ID"];
        let mut text = table(header, rows, "there are no volumes");
        for copy in &self.copies {
            text.push('\n');
            text.push_str(&copy.text());
        }
        text
    }

    fn require_success(self) -> Result<(), CliError> {
        if self.omitted.is_empty() {
            return Ok(());
        }
        Err(CliError::IncompleteList(self.omitted))
    }
}

/// Deletes volumes and all their data
#[derive(Args, Debug)]
#[command(after_help = "\
A volume that is in use is not deleted, nor one that a file of this node asks for
(exit code 5). Who uses a directory of an NFS server is known of this node only.

Examples:
  uringctl delete data-1
  uringctl delete data-1 data-2")]
pub struct Delete {
    /// Volumes, by name or id
    #[arg(required = true, value_name = "VOLUME")]
    volumes: Vec<String>,
}

/// The ids of the deleted volumes or snapshots.
#[derive(Debug, Serialize)]
pub struct Deleted {
    deleted: Vec<String>,
    /// The error that kept the next one, and those after it.
    #[serde(skip)]
    failed: Option<CliError>,
}

impl Delete {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Deleted {
        Deleted::each(self.volumes, async |wanted| {
            let volume_id = context.volume(wanted).await?.volume_id;
            context.refuse_delete(wanted, &volume_id).await?;
            context.delete_volume(wanted, volume_id.clone()).await?;
            Ok(volume_id)
        })
        .await
    }
}

impl Deleted {
    /// Deletes one after the other until one fails; `delete` returns the id.
    pub async fn each(
        all: Vec<String>,
        delete: impl AsyncFn(&str) -> Result<String, CliError>,
    ) -> Self {
        let mut done = Self {
            deleted: Vec::new(),
            failed: None,
        };
        for wanted in all {
            match delete(&wanted).await {
                Ok(id) => done.deleted.push(id),
                Err(error) => {
                    done.failed = Some(error);
                    break;
                }
            }
        }
        done
    }
}

impl Answer for Deleted {
    fn text(&self) -> String {
        let lines: Vec<String> = self
            .deleted
            .iter()
            .map(|id| format!("deleted {id}"))
            .collect();
        lines.join("\n")
    }

    fn require_success(self) -> Result<(), CliError> {
        self.failed.map_or(Ok(()), Err)
    }
}

/// Expands a volume, and its file system if it is on this node
#[derive(Args, Debug)]
#[command(after_help = "\
Nothing has to be stopped or unmounted. A volume never shrinks.

Example:
  uringctl expand data-1 20Gi")]
pub struct Expand {
    /// Volume, by name or id
    volume: String,
    /// New minimum size
    #[arg(value_parser = volume_size)]
    size: Size,
}

/// The new size of a volume.
#[derive(Debug, Serialize)]
pub struct Expanded {
    /// As given on the command line.
    volume: String,
    volume_id: String,
    capacity_bytes: i64,
    /// Whether this node grew the device and the file system as well.
    grown_on_node: bool,
    /// Whether a node still has to grow the device and the file system.
    node_expansion_required: bool,
    /// The requested size, of a volume that has more already.
    #[serde(skip)]
    less_than_it_has: Option<Size>,
}

impl Expand {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<Expanded, CliError> {
        let wanted = &self.volume;
        let volume = context.volume(wanted).await?;
        let volume_id = volume.volume_id;
        let is_less = self.size.bytes() < volume.capacity_bytes;
        let grown = context
            .expand_volume(wanted, volume_id.clone(), self.size)
            .await?;
        let mut expanded = Expanded {
            volume: wanted.clone(),
            volume_id: volume_id.clone(),
            capacity_bytes: grown.capacity_bytes,
            grown_on_node: false,
            node_expansion_required: grown.node_expansion_required,
            less_than_it_has: is_less.then_some(self.size),
        };
        // Another node grows its device when it stages or expands the volume.
        let held = context.held().await.unwrap_or_default();
        let here = held.into_iter().find(|held| held.volume_id == volume_id);
        if let Some(held) =
            here.filter(|held| grown.node_expansion_required && !held.staging_path.is_empty())
        {
            let volume_path = held.targets.first().map_or(&held.staging_path, |t| &t.path);
            let request = NodeExpandVolumeRequest {
                volume_id: volume_id.clone(),
                volume_path: volume_path.clone(),
                staging_target_path: held.staging_path.clone(),
                capacity_range: Some(at_least(self.size)),
                volume_capability: Some(
                    AccessArgs::default()
                        .or_as_staged(&held.access)
                        .capability(),
                ),
                secrets: context.secrets.to_wire(),
            };
            let work = context.node(
                format!("expand {wanted} on this node"),
                request,
                async |mut client, request| client.node_expand_volume(request).await,
            );
            let answer = context
                .showing(&format!("expanding {wanted}"), &volume_id, work)
                .await?;
            if answer.capacity_bytes > 0 {
                expanded.capacity_bytes = answer.capacity_bytes;
            }
            expanded.grown_on_node = true;
            expanded.node_expansion_required = false;
        }
        Ok(expanded)
    }
}

impl Answer for Expanded {
    fn text(&self) -> String {
        let size = human(self.capacity_bytes);
        if let Some(wanted) = self.less_than_it_has {
            return format!(
                "{} has {size}, more than {wanted}, and does not shrink",
                self.volume
            );
        }
        let then = if self.grown_on_node {
            ", grown on this node"
        } else if self.node_expansion_required {
            "; its node grows the device and the file system at the next stage or expand"
        } else {
            ""
        };
        format!("{} has {size}{then}", self.volume)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_attached_as_its_source() {
        let map = |pairs: &[(&str, &str)]| -> HashMap<String, String> {
            let owned = pairs.iter();
            owned
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                .collect()
        };
        let local = [
            ("backend", "loop"),
            ("pool", "p"),
            ("sectorSize", "4096"),
            ("directIO", "true"),
            ("image", "i.img"),
        ];
        assert_eq!(as_attached(&map(&local)), map(&local[..4]));
        let served = [
            ("backend", "nbd"),
            ("pool", "p"),
            ("connections", "4"),
            ("uri", "nbd://storage:5/i.img"),
        ];
        let mut parameters = map(&served[..3]);
        parameters.extend(map(&[("nbdServer", "nbd://storage:5/")]));
        assert_eq!(as_attached(&map(&served)), parameters);
    }
}
