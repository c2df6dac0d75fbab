//! `snapshot group list|delete`.

use std::collections::BTreeMap;

use clap::{Args, Subcommand};
use serde::Serialize;
use tonic::Code;

use super::{
    super::{answer::table, context::Context, error::CliError, volumes::Deleted},
    SnapshotsAnswer, utc,
};
use crate::proto::csi::{DeleteVolumeGroupSnapshotRequest, GetVolumeGroupSnapshotRequest};

/// Lists and deletes group snapshots: those of several volumes at one moment
#[derive(Args, Debug)]
pub struct Groups {
    #[command(subcommand)]
    command: GroupCommand,
}

#[derive(Debug, Subcommand)]
enum GroupCommand {
    List(List),
    Delete(Delete),
}

impl Groups {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<SnapshotsAnswer, CliError> {
        match self.command {
            GroupCommand::List(list) => list.run(context).await,
            GroupCommand::Delete(delete) => Ok(SnapshotsAnswer::Deleted(delete.run(context).await)),
        }
    }
}

/// Lists group snapshots with their snapshots
#[derive(Args, Debug)]
#[command(after_help = "\
A group whose delete was interrupted is listed while it has a snapshot; delete it again.
A pool or cluster that cannot be reached is left out with a warning (exit code 1).

Example:
  uringctl snapshot group list --json | jq -r '.groups[].group_snapshot_id'")]
struct List {}

/// Deletes group snapshots with all of their snapshots; volumes made from them stay
#[derive(Args, Debug)]
#[command(after_help = "\
Example:
  uringctl snapshot group delete \"$GROUP\"")]
struct Delete {
    /// Group snapshots, by id
    #[arg(required = true, value_name = "ID")]
    groups: Vec<String>,
}

/// A group snapshot as printed.
#[derive(Debug, Serialize)]
pub struct GroupAnswer {
    group_snapshot_id: String,
    snapshot_ids: Vec<String>,
    /// Seconds since 1970.
    creation_time: Option<i64>,
}

impl List {
    async fn run(self, context: &Context) -> Result<SnapshotsAnswer, CliError> {
        let (snapshots, omitted) = context.list_snapshots(String::new()).await?;
        let mut groups: BTreeMap<String, GroupAnswer> = BTreeMap::new();
        for snapshot in snapshots {
            let id = snapshot.group_snapshot_id;
            if id.is_empty() {
                continue;
            }
            let group = groups.entry(id.clone()).or_insert_with(|| GroupAnswer {
                group_snapshot_id: id,
                snapshot_ids: Vec::new(),
                creation_time: None,
            });
            group.snapshot_ids.push(snapshot.snapshot_id);
            group.creation_time = group.creation_time.max(Some(snapshot.creation_time));
        }
        let groups = groups.into_values().collect();
        Ok(SnapshotsAnswer::Groups { groups, omitted })
    }
}

impl Delete {
    /// One that the controller does not know is deleted, too: of an interrupted snapshot or
    /// delete something may be left.
    async fn run(self, context: &Context) -> Deleted {
        Deleted::each(self.groups, async |group_snapshot_id| {
            let is_known = context.is_group(group_snapshot_id).await?;
            let request = DeleteVolumeGroupSnapshotRequest {
                group_snapshot_id: group_snapshot_id.to_owned(),
                snapshot_ids: Vec::new(),
                secrets: context.secrets.to_wire(),
            };
            let doing = format!("delete the group snapshot {group_snapshot_id}");
            context
                .group_controller(doing, request, async |mut client, request| {
                    client.delete_volume_group_snapshot(request).await
                })
                .await?;
            if is_known {
                Ok(group_snapshot_id.to_owned())
            } else {
                Err(CliError::NoSuchGroup(group_snapshot_id.to_owned()))
            }
        })
        .await
    }
}

impl Context {
    /// Whether the controller has such a group snapshot, be it one whose delete was
    /// interrupted.
    async fn is_group(&self, group_snapshot_id: &str) -> Result<bool, CliError> {
        let request = GetVolumeGroupSnapshotRequest {
            group_snapshot_id: group_snapshot_id.to_owned(),
            snapshot_ids: Vec::new(),
            secrets: self.secrets.to_wire(),
        };
        let doing = format!("look for the group snapshot {group_snapshot_id}");
        let found = self
            .group_controller(doing, request, async |mut client, request| {
                client.get_volume_group_snapshot(request).await
            })
            .await;
        match found {
            Err(CliError::Refused { status, .. }) => Ok(status.code() != Code::NotFound),
            found => found.map(|_| true),
        }
    }
}

/// One line a group.
pub fn rows(groups: &[GroupAnswer]) -> String {
    let rows = groups.iter().map(|group| {
        [
            group.snapshot_ids.len().to_string(),
            group.creation_time.map(utc).unwrap_or_default(),
            group.group_snapshot_id.clone(),
        ]
    });
    table(
        ["SNAPSHOTS", "TAKEN", "ID"],
        rows,
        "there are no group snapshots",
    )
}
