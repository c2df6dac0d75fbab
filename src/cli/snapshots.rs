//! `snapshot create|list|delete`, and `snapshot group`.

use std::collections::BTreeSet;

use clap::{Args, Subcommand};
use serde::Serialize;

use super::{
    answer::{Answer, table},
    context::Context,
    copies::progress,
    error::CliError,
    resolve::{name_of, omitted_from, take_less},
};
use crate::{
    proto::{
        admin::CopyUnderWay,
        csi::{CreateSnapshotRequest, DeleteSnapshotRequest, ListSnapshotsRequest, Snapshot},
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
            SnapshotCommand::Delete(delete) => delete.run(context).await,
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
  uringctl snapshot delete \"$SNAPSHOT\"")]
struct Delete {
    /// Snapshots, by id
    #[arg(required = true, value_name = "ID")]
    snapshots: Vec<String>,
}

/// The snapshots, or the ids of the deleted ones.
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
    Deleted {
        /// Their ids.
        deleted: Vec<String>,
    },
}

impl SnapshotsAnswer {
    /// An error if a list is incomplete.
    pub fn require_complete(self) -> Result<(), CliError> {
        match self {
            Self::Are { omitted, .. } | Self::Groups { omitted, .. } if !omitted.is_empty() => {
                Err(CliError::IncompleteList(omitted.into_iter().collect()))
            }
            _ => Ok(()),
        }
    }
}

/// A snapshot as printed.
#[derive(Debug, Serialize)]
pub struct SnapshotAnswer {
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
    fn new(snapshot: Snapshot, source_name: &str) -> Self {
        Self {
            snapshot_id: snapshot.snapshot_id,
            source_volume_id: snapshot.source_volume_id,
            source_name: source_name.to_owned(),
            size_bytes: snapshot.size_bytes,
            creation_time: snapshot.creation_time.map(|time| time.seconds),
            ready_to_use: snapshot.ready_to_use,
            copied_bytes: None,
            progress: None,
        }
    }

    fn being_copied(copy: CopyUnderWay, source_name: &str) -> Self {
        Self {
            progress: Some(progress(&copy)),
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
        let (volumes, _) = context.list_what_can_be_reached().await?;
        let name = |id: &str| {
            volumes
                .iter()
                .find(|volume| volume.volume_id == id)
                .map_or("", |volume| name_of(&volume.volume_context))
        };
        let source_volume_id = match &self.volume {
            Some(volume) => context.volume(volume).await?.volume_id,
            None => String::new(),
        };
        let copies = context.copies("snapshot").await;
        let (listed, omitted) = context.list_snapshots(&source_volume_id).await?;
        let answers = listed.into_iter().map(|snapshot| {
            let source = name(&snapshot.source_volume_id);
            SnapshotAnswer::new(snapshot, source)
        });
        let mut snapshots: Vec<SnapshotAnswer> = answers.collect();
        // Some may be complete meanwhile.
        let copies = copies.into_iter().filter(|copy| {
            (source_volume_id.is_empty() || copy.source_id == source_volume_id)
                && snapshots.iter().all(|one| one.snapshot_id != copy.id)
        });
        let copies: Vec<_> = copies.collect();
        snapshots.extend(copies.into_iter().map(|copy| {
            let source = name(&copy.source_id);
            SnapshotAnswer::being_copied(copy, source)
        }));
        Ok(SnapshotsAnswer::Are { snapshots, omitted })
    }
}

impl Context {
    /// The snapshots of a volume, or all, and what the list omits, in sentences.
    pub async fn list_snapshots(
        &self,
        source_volume_id: &str,
    ) -> Result<(Vec<Snapshot>, BTreeSet<String>), CliError> {
        let (mut snapshots, mut omitted) = (Vec::new(), BTreeSet::new());
        let mut starting_token = String::new();
        loop {
            let request = ListSnapshotsRequest {
                starting_token,
                source_volume_id: source_volume_id.to_owned(),
                secrets: self.secrets.to_wire(),
                ..Default::default()
            };
            let page = self
                .controller(
                    "list snapshots",
                    request,
                    async |mut client, mut request| {
                        take_less(&mut request);
                        let page = client.list_snapshots(request).await?;
                        omitted.extend(omitted_from(&page));
                        Ok(page)
                    },
                )
                .await?;
            snapshots.extend(page.entries.into_iter().filter_map(|entry| entry.snapshot));
            starting_token = page.next_token;
            if starting_token.is_empty() {
                return Ok((snapshots, omitted));
            }
        }
    }
}

impl Delete {
    async fn run(self, context: &Context) -> Result<SnapshotsAnswer, CliError> {
        for snapshot_id in &self.snapshots {
            let request = DeleteSnapshotRequest {
                snapshot_id: snapshot_id.clone(),
                secrets: context.secrets.to_wire(),
            };
            context
                .controller(
                    format!("delete the snapshot {snapshot_id}"),
                    request,
                    async |mut client, request| client.delete_snapshot(request).await,
                )
                .await?;
        }
        Ok(SnapshotsAnswer::Deleted {
            deleted: self.snapshots,
        })
    }
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
                let header = ["VOLUME", "SIZE", "TAKEN", "READY", "ID"];
                table(header, rows, "there are no snapshots")
            }
            Self::Groups { groups, .. } => groups::rows(groups),
            Self::Deleted { deleted } => {
                let lines: Vec<String> = deleted.iter().map(|id| format!("deleted {id}")).collect();
                lines.join("\n")
            }
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
