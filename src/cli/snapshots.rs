//! `snapshot create|list|delete`, and `snapshot group`.

use std::collections::BTreeSet;

use clap::{Args, Subcommand};
use serde::Serialize;

use super::{
    answer::{Answer, table},
    context::Context,
    copies::progress,
    error::CliError,
    resolve::{name_of, pick},
    volumes::Deleted,
};
use crate::{
    ceph::csi_format::handle::Handle,
    proto::{
        admin::{CopyUnderWay, ListNamedSnapshotsRequest, NamedSnapshot},
        csi::{CreateSnapshotRequest, DeleteSnapshotRequest},
    },
    size::human,
};

mod groups;

use groups::{GroupAnswer, Groups};

/// Takes, lists and deletes snapshots of volumes
#[derive(Args, Debug)]
pub struct Snapshots {
    #[command(subcommand)]
    command: SnapshotCommand,
}

#[derive(Debug, Subcommand)]
enum SnapshotCommand {
    Create(Create),
    List(List),
    Delete(Delete),
    Group(Groups),
}

impl Snapshots {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<SnapshotsAnswer, CliError> {
        match self.command {
            SnapshotCommand::Create(create) => create.run(context).await,
            SnapshotCommand::List(list) => list.run(context).await,
            SnapshotCommand::Delete(delete) => {
                Ok(SnapshotsAnswer::Deleted(delete.run(context).await))
            }
            SnapshotCommand::Group(groups) => groups.run(context).await,
        }
    }
}

/// Takes a snapshot, or returns the existing one of that name
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  uringctl snapshot create data-1 before-upgrade
  uringctl snapshot create data-1 nightly --json | jq -r '.snapshots[0].snapshot_id'")]
struct Create {
    /// Volume, by name or id
    volume: String,
    /// Name of the snapshot
    name: String,
}

/// Lists snapshots, and those that are still being copied
#[derive(Args, Debug)]
#[command(after_help = "\
A pool or cluster that cannot be reached is left out with a warning (exit code 1).

Examples:
  uringctl snapshot list
  uringctl snapshot list --volume data-1")]
struct List {
    /// Only those of this volume (name or id)
    #[arg(long)]
    volume: Option<String>,
}

/// Deletes snapshots; volumes made from them stay
#[derive(Args, Debug)]
#[command(after_help = "\
Example:
  uringctl snapshot delete before-upgrade")]
struct Delete {
    /// Snapshots, by name or id
    #[arg(required = true, value_name = "SNAPSHOT")]
    snapshots: Vec<String>,
}

/// The snapshots, or the deleted ones.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum SnapshotsAnswer {
    /// Made or listed.
    Are {
        /// Each of them.
        snapshots: Vec<SnapshotAnswer>,
        /// What the list omits, in sentences.
        #[serde(skip_serializing_if = "BTreeSet::is_empty")]
        omitted: BTreeSet<String>,
    },
    /// Groups of them, listed.
    Groups {
        /// Each of them.
        groups: Vec<GroupAnswer>,
        /// What the list omits, in sentences.
        #[serde(skip_serializing_if = "BTreeSet::is_empty")]
        omitted: BTreeSet<String>,
    },
    /// Deleted.
    Deleted(Deleted),
}

/// A snapshot as printed.
#[derive(Debug, Serialize)]
pub struct SnapshotAnswer {
    name: String,
    snapshot_id: String,
    source_volume_id: String,
    /// Name of the source volume, if it still exists.
    source_name: String,
    size_bytes: i64,
    /// Seconds since 1970.
    creation_time: Option<i64>,
    ready_to_use: bool,
    /// Of one that is still being copied.
    #[serde(skip_serializing_if = "Option::is_none")]
    copied_bytes: Option<u64>,
    #[serde(skip)]
    progress: Option<String>,
}

impl SnapshotAnswer {
    fn new(snapshot: NamedSnapshot, source_name: &str) -> Self {
        Self {
            name: snapshot.name,
            snapshot_id: snapshot.snapshot_id,
            source_volume_id: snapshot.source_volume_id,
            source_name: source_name.to_owned(),
            size_bytes: snapshot.size_bytes,
            creation_time: Some(snapshot.creation_time),
            ready_to_use: true,
            copied_bytes: None,
            progress: None,
        }
    }

    fn being_copied(copy: CopyUnderWay, source_name: &str) -> Self {
        Self {
            progress: Some(progress(&copy)),
            name: copy.name,
            snapshot_id: copy.id,
            source_volume_id: copy.source_id,
            source_name: source_name.to_owned(),
            size_bytes: i64::try_from(copy.size_bytes).unwrap_or(i64::MAX),
            creation_time: None,
            ready_to_use: false,
            copied_bytes: Some(copy.copied_bytes),
        }
    }
}

impl Create {
    async fn run(self, context: &Context) -> Result<SnapshotsAnswer, CliError> {
        let source = context.volume(&self.volume).await?;
        let doing = format!("take the snapshot {} of {}", self.name, self.volume);
        let label = format!("taking the snapshot {}", self.name);
        let name = self.name.clone();
        let request = CreateSnapshotRequest {
            source_volume_id: source.volume_id.clone(),
            name: self.name,
            secrets: context.secrets.to_wire(),
            ..Default::default()
        };
        let work = context.controller(doing.clone(), request, async |mut client, request| {
            client.create_snapshot(request).await
        });
        let snapshot = context
            .showing_copy(&label, "snapshot", &name, work)
            .await?
            .snapshot
            .ok_or(CliError::MissingField {
                doing,
                missing: "snapshot",
            })?;
        let created = snapshot.creation_time.map(|time| time.seconds);
        let snapshot = NamedSnapshot {
            name,
            snapshot_id: snapshot.snapshot_id,
            source_volume_id: snapshot.source_volume_id,
            size_bytes: snapshot.size_bytes,
            creation_time: created.unwrap_or_default(),
            group_snapshot_id: snapshot.group_snapshot_id,
        };
        let snapshot = SnapshotAnswer::new(snapshot, name_of(&source.volume_context));
        Ok(SnapshotsAnswer::Are {
            snapshots: vec![snapshot],
            omitted: BTreeSet::new(),
        })
    }
}

impl List {
    async fn run(self, context: &Context) -> Result<SnapshotsAnswer, CliError> {
        // Only for their names: the list of snapshots has omissions of its own.
        let volumes = context.list_what_can_be_reached().await;
        let (volumes, _) = volumes.unwrap_or_default();
        let source_name = |id: &str| {
            volumes
                .iter()
                .find(|volume| volume.volume_id == id)
                .map_or("", |volume| name_of(&volume.volume_context))
        };
        let source_id = match &self.volume {
            Some(volume) => context.volume(volume).await?.volume_id,
            None => String::new(),
        };
        let mut copies = context.copies("snapshot").await;
        let (listed, omitted) = context.list_snapshots(source_id.clone()).await?;
        // Some may be complete meanwhile.
        copies.retain(|copy| {
            (source_id.is_empty() || copy.source_id == source_id)
                && listed.iter().all(|one| one.snapshot_id != copy.id)
        });
        let listed = listed.into_iter().map(|snapshot| {
            let source = source_name(&snapshot.source_volume_id);
            SnapshotAnswer::new(snapshot, source)
        });
        let copies = copies.into_iter().map(|copy| {
            let source = source_name(&copy.source_id);
            SnapshotAnswer::being_copied(copy, source)
        });
        Ok(SnapshotsAnswer::Are {
            snapshots: listed.chain(copies).collect(),
            omitted,
        })
    }
}

impl Delete {
    async fn run(self, context: &Context) -> Deleted {
        Deleted::each(self.snapshots, async |wanted| {
            let snapshot_id = context.snapshot_id(wanted).await?;
            let request = DeleteSnapshotRequest {
                snapshot_id: snapshot_id.clone(),
                secrets: context.secrets.to_wire(),
            };
            let doing = format!("delete the snapshot {wanted}");
            context
                .controller(doing, request, async |mut client, request| {
                    client.delete_snapshot(request).await
                })
                .await?;
            Ok(snapshot_id)
        })
        .await
    }
}

impl Context {
    /// The snapshots that the controller can list now, of one volume or (empty) all; and the
    /// omissions.
    pub async fn list_snapshots(
        &self,
        source_volume_id: String,
    ) -> Result<(Vec<NamedSnapshot>, BTreeSet<String>), CliError> {
        let mut omitted = BTreeSet::new();
        let mut snapshots = Vec::new();
        let mut starting_token = String::new();
        loop {
            let request = ListNamedSnapshotsRequest {
                starting_token,
                source_volume_id: source_volume_id.clone(),
                secrets: self.secrets.to_wire(),
            };
            let page = self
                .controller_admin("list snapshots", request, async |mut client, request| {
                    client.list_named_snapshots(request).await
                })
                .await?;
            omitted.extend(page.omitted);
            snapshots.extend(page.snapshots);
            starting_token = page.next_token;
            if starting_token.is_empty() {
                return Ok((snapshots, omitted));
            }
        }
    }

    /// The id of the snapshot that `wanted` stands for. An id is unique; for a name, all
    /// snapshots must be known.
    pub async fn snapshot_id(&self, wanted: &str) -> Result<String, CliError> {
        let (listed, omitted) = self.list_snapshots(String::new()).await?;
        let is_id =
            listed.iter().any(|one| one.snapshot_id == wanted) || wanted.parse::<Handle>().is_ok();
        if !is_id {
            require_complete(omitted)?;
        }
        let named = listed.into_iter().map(|one| {
            let id = one.snapshot_id;
            ((id.clone(), one.name), id)
        });
        match pick("snapshots", wanted, named)? {
            Some(id) => Ok(id),
            // Of a snapshot in Ceph there may be less than a list shows; a delete removes it.
            None if wanted.parse::<Handle>().is_ok() => Ok(wanted.to_owned()),
            None => Err(CliError::NoSuchSnapshot(wanted.to_owned())),
        }
    }
}

fn require_complete(omitted: BTreeSet<String>) -> Result<(), CliError> {
    if omitted.is_empty() {
        return Ok(());
    }
    Err(CliError::IncompleteList(omitted.into_iter().collect()))
}

impl Answer for SnapshotsAnswer {
    fn text(&self) -> String {
        match self {
            Self::Are { snapshots, .. } => {
                let rows = snapshots.iter().map(|snapshot| {
                    let source = match snapshot.source_name.as_str() {
                        "" => &snapshot.source_volume_id,
                        name => name,
                    };
                    [
                        snapshot.name.clone(),
                        source.to_owned(),
                        human(snapshot.size_bytes),
                        snapshot.creation_time.map(utc).unwrap_or_default(),
                        match &snapshot.progress {
                            Some(progress) => format!("no, {progress}"),
                            None if snapshot.ready_to_use => "yes".to_owned(),
                            None => "no".to_owned(),
                        },
                        snapshot.snapshot_id.clone(),
                    ]
                });
                let header = ["NAME", "VOLUME", "SIZE", "TAKEN", "READY", "ID"];
                table(header, rows, "there are no snapshots")
            }
            Self::Groups { groups, .. } => groups::rows(groups),
            Self::Deleted(deleted) => deleted.text(),
        }
    }

    fn require_success(self) -> Result<(), CliError> {
        match self {
            Self::Are { omitted, .. } | Self::Groups { omitted, .. } => require_complete(omitted),
            Self::Deleted(deleted) => deleted.require_success(),
        }
    }
}

/// `2025-05-07 10:21:09Z` of seconds since 1970, by prost's own calendar.
fn utc(seconds: i64) -> String {
    let time = prost_types::Timestamp { seconds, nanos: 0 };
    time.to_string().replace('T', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_utc() {
        assert_eq!(utc(0), "1970-01-01 00:00:00Z");
        assert_eq!(utc(1_746_613_269), "2025-05-07 10:21:09Z");
    }
}
