//! `orphans`: lists what is in Ceph though no volume refers to it, and removes what is named.

use std::io::{self, IsTerminal as _, Write as _};

use clap::Args;
use serde::Serialize;

use super::{
    answer::{Answer, table},
    context::Context,
    error::CliError,
};
use crate::proto::admin::{ListOrphansRequest, Orphan, RemoveOrphanRequest};

/// Lists what no volume and no snapshot in Ceph refers to, and removes it by name
#[derive(Args, Debug)]
#[command(after_help = "\
Lists, as the users of the controller's --ceph-secret: creates that were given up, names
without an entry in the journal and the reverse, images without an entry, and deleted images
that something keeps in the trash. What is younger than a minute is not listed. A cluster
that does not answer is left out with a warning (exit code 1).

Only --remove changes anything. The controller checks each orphan again, and refuses what is
in doubt; WHY says so in advance.

Examples:
  uringctl orphans
  uringctl orphans --json
  uringctl orphans --remove rbd/csi-vol-6e2b2d1c-3f0e-4b3e-9c66-0d3c6f0f8f6a --yes")]
pub struct Orphans {
    /// Remove this orphan (repeatable)
    #[arg(long, value_name = "POOL/NAME")]
    remove: Vec<String>,
    /// Only orphans of this cluster, by its id in the controller's configuration
    #[arg(long, value_name = "ID")]
    cluster: Option<String>,
    /// Do not ask before the removal
    #[arg(long, short, requires = "remove")]
    yes: bool,
}

/// The orphans, or what became of them.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum OrphansAnswer {
    /// Listed.
    Are {
        orphans: Vec<OrphanAnswer>,
        /// What the list omits, in sentences.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        omitted: Vec<String>,
    },
    /// Removed by their paths.
    Removed {
        removed: Vec<String>,
        /// Nothing has these names.
        gone: Vec<String>,
        /// The error that kept the next one, and those after it.
        #[serde(skip)]
        failed: Option<CliError>,
    },
}

/// An orphan as printed.
#[derive(Clone, Debug, Serialize)]
pub struct OrphanAnswer {
    cluster_id: String,
    path: String,
    pool: String,
    namespace: String,
    name: String,
    kind: String,
    age_seconds: Option<u64>,
    why: String,
    /// Why it is not removed; empty: it can be.
    kept_because: String,
}

impl From<Orphan> for OrphanAnswer {
    fn from(it: Orphan) -> Self {
        Self {
            cluster_id: it.cluster_id,
            path: it.path,
            pool: it.pool,
            namespace: it.namespace,
            name: it.name,
            kind: it.kind,
            age_seconds: it.age_seconds,
            why: it.why,
            kept_because: it.kept_because,
        }
    }
}

impl Orphans {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<OrphansAnswer, CliError> {
        let (orphans, omitted) = self.list(context).await?;
        if self.remove.is_empty() {
            return Ok(OrphansAnswer::Are { orphans, omitted });
        }
        let mut requests = Vec::new();
        for path in &self.remove {
            let cluster_id = self.cluster_of(path, &orphans)?;
            requests.push(RemoveOrphanRequest {
                cluster_id,
                path: path.clone(),
                confirm: path.clone(),
            });
        }
        if !self.yes {
            let listed = orphans.iter().filter(|it| self.remove.contains(&it.path));
            confirm(&rows(listed), &self.remove)?;
        }
        let (mut removed, mut gone, mut failed) = (Vec::new(), Vec::new(), None);
        for request in requests {
            let path = request.path.clone();
            let doing = format!("remove the orphan {path}");
            let answer = context
                .orphan_admin(doing, request, async |mut client, request| {
                    client.remove_orphan(request).await
                })
                .await;
            match answer {
                Ok(answer) if answer.removed => removed.push(path),
                Ok(_) => gone.push(path),
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        Ok(OrphansAnswer::Removed {
            removed,
            gone,
            failed,
        })
    }

    async fn list(&self, context: &Context) -> Result<(Vec<OrphanAnswer>, Vec<String>), CliError> {
        let answer = context
            .orphan_admin(
                "list orphans",
                ListOrphansRequest {},
                async |mut client, request| client.list_orphans(request).await,
            )
            .await?;
        let mut orphans: Vec<_> = answer.orphans.into_iter().map(OrphanAnswer::from).collect();
        orphans.retain(|it| self.cluster.as_ref().is_none_or(|id| *id == it.cluster_id));
        Ok((orphans, answer.omitted))
    }

    /// The cluster of an orphan to be removed.
    fn cluster_of(&self, path: &str, orphans: &[OrphanAnswer]) -> Result<String, CliError> {
        if let Some(id) = &self.cluster {
            return Ok(id.clone());
        }
        let listed = orphans.iter().filter(|it| it.path == path);
        let mut ids: Vec<_> = listed.map(|it| &it.cluster_id).collect();
        ids.dedup();
        match ids.as_slice() {
            [id] => Ok((*id).clone()),
            // The controller says whether it is gone, or why it is no orphan.
            [] => Ok(String::new()),
            _ => Err(CliError::BadArguments(format!(
                "several clusters have an orphan {path:?}: name one with --cluster"
            ))),
        }
    }
}

/// Asks on the terminal.
fn confirm(shown: &str, paths: &[String]) -> Result<(), CliError> {
    let doing = format!("this removes {}", paths.join(", "));
    if !(io::stdin().is_terminal() && io::stderr().is_terminal()) {
        return Err(CliError::Unanswered(doing));
    }
    let of_terminal = |source| CliError::Io {
        doing: "ask on",
        path: "the terminal".into(),
        source,
    };
    let mut stderr = io::stderr();
    write!(stderr, "{shown}\n{doing}; type \"yes\" to do it: ").map_err(of_terminal)?;
    let mut answer = String::new();
    io::stdin().read_line(&mut answer).map_err(of_terminal)?;
    if answer.trim() == "yes" {
        return Ok(());
    }
    Err(CliError::Declined)
}

fn rows<'a>(orphans: impl Iterator<Item = &'a OrphanAnswer>) -> String {
    let rows = orphans.map(|it| {
        let why = match it.kept_because.as_str() {
            "" => it.why.clone(),
            kept => format!("{}; not removed: {kept}", it.why),
        };
        [
            it.kind.clone(),
            it.cluster_id.clone(),
            it.path.clone(),
            it.age_seconds.map(age).unwrap_or_default(),
            why,
        ]
    });
    let header = ["KIND", "CLUSTER", "POOL/NAME", "AGE", "WHY"];
    table(header, rows, "there are no orphans")
}

/// `3d`, `5h`, `7m` or `9s`, rounded down.
fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..86_400 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

impl Answer for OrphansAnswer {
    fn text(&self) -> String {
        match self {
            Self::Are { orphans, .. } => rows(orphans.iter()),
            Self::Removed { removed, gone, .. } => {
                let removed = removed.iter().map(|path| format!("removed {path}"));
                let gone = gone
                    .iter()
                    .map(|path| format!("nothing has the name {path}"));
                removed.chain(gone).collect::<Vec<_>>().join("\n")
            }
        }
    }

    fn require_success(self) -> Result<(), CliError> {
        match self {
            Self::Are { omitted, .. } if !omitted.is_empty() => {
                Err(CliError::IncompleteList(omitted))
            }
            Self::Removed {
                failed: Some(error),
                ..
            } => Err(error),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_has_one_unit() {
        for (seconds, text) in [
            (0, "0s"),
            (59, "59s"),
            (60, "1m"),
            (7200, "2h"),
            (86_400, "1d"),
        ] {
            assert_eq!(age(seconds), text);
        }
    }
}
