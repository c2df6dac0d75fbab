//! `wanted`, `plan`, `wait`, `apply`, `remove`: the volumes that files ask for.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use clap::{Args, ValueEnum};
use serde::Serialize;
use tonic::Code;

use super::{
    answer::{Answer, table},
    attach::failed,
    context::Context,
    error::CliError,
    named::is_listed_without_name,
};
use crate::{
    manager::{
        desired::{
            BadDesired, Desired,
            named::{self, NamedFile, VolumeFile},
        },
        directory::{VolumesDir, name_of},
    },
    proto::admin::{
        ListWantedVolumesRequest, ListWantedVolumesResponse, PlanVolumesRequest, PlannedVolume,
        WantedVolume,
    },
};

/// Lists the volumes that files ask for, and how far each is
#[derive(Args, Debug)]
#[command(after_help = "\
ready: as its file asks. changing: an action is under way. failed: an action
failed, and is repeated. blocked: others have the volume. bad: the file cannot be
used, and its volume stays as it is.

Examples:
  uringctl wanted
  uringctl wanted --json | jq '.volumes[] | select(.state != \"ready\")'")]
pub struct Wanted {}

/// The wanted volumes.
#[derive(Debug, Serialize)]
pub struct WantedAnswer {
    parked: bool,
    volumes: Vec<WantedRow>,
}

#[derive(Debug, Serialize)]
struct WantedRow {
    name: String,
    volume_id: String,
    path: String,
    state: String,
    detail: String,
    age_ms: u64,
    is_wanted: bool,
}

impl Wanted {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<WantedAnswer, CliError> {
        let listed = context.list_wanted().await?;
        let row = |volume: WantedVolume| WantedRow {
            name: volume.name,
            volume_id: volume.volume_id,
            path: volume.path,
            state: volume.state,
            detail: volume.detail,
            age_ms: volume.age_ms,
            is_wanted: volume.is_wanted,
        };
        Ok(WantedAnswer {
            parked: listed.parked,
            volumes: listed.volumes.into_iter().map(row).collect(),
        })
    }
}

impl Answer for WantedAnswer {
    fn text(&self) -> String {
        let rows = self.volumes.iter().map(|volume| {
            let state = if volume.is_wanted { "" } else { ", to go" };
            // Programs such as mkfs add their usage.
            let detail = volume.detail.lines().next().unwrap_or_default();
            [
                volume.name.clone(),
                format!("{}{state}", volume.state),
                volume.path.clone(),
                detail.to_owned(),
            ]
        });
        table(
            ["NAME", "STATE", "PATH", "WHAT"],
            rows,
            if self.parked {
                "the volumes are parked; uringctl unpark sets them up again"
            } else {
                "no file asks for a volume"
            },
        )
    }
}

/// Shows what the agent would do for each volume, and why; changes nothing
#[derive(Args, Debug)]
#[command(after_help = "\
Without files: what is left to do with the agent's directory as it is now. With files:
what `uringctl apply` of these would lead to. The plan foresees no failure: volumes that
a process uses, for one, stay until it ends. Of a [volume] that the controller would
create there is no more to say.

Examples:
  uringctl plan
  uringctl plan data.toml
  uringctl plan --json | jq '.volumes[] | select(.state != \"ready\")'")]
pub struct Plan {
    /// Files, NAME.toml, that are not in the directory yet, or differ from those there
    files: Vec<PathBuf>,
}

/// What would be done.
#[derive(Debug, Serialize)]
pub struct PlanAnswer {
    volumes: Vec<PlanRow>,
}

#[derive(Debug, Serialize)]
struct PlanRow {
    name: String,
    volume_id: String,
    path: String,
    state: String,
    actions: Vec<String>,
    reason: String,
}

impl PlanRow {
    /// Of a volume that there is not yet, as far as the controller's list tells.
    fn to_create(name: &str, file: &NamedFile) -> Self {
        let volume = &file.volume.name;
        let (action, reason) = if is_listed_without_name(file) {
            let why = "the controller lists directories of NFS servers without their names";
            ("find or create", why)
        } else {
            ("create", "the controller has no volume of this name")
        };
        Self {
            name: name.to_owned(),
            volume_id: String::new(),
            path: file.desired.path.display().to_string(),
            state: "changing".to_owned(),
            actions: vec![format!("{action} volume {volume}")],
            reason: reason.to_owned(),
        }
    }
}

impl Plan {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<PlanAnswer, CliError> {
        let mut files = HashMap::new();
        let mut volumes = Vec::new();
        for path in &self.files {
            let mut file = read(path)?;
            if let Some(named) = file.named {
                let to_create = PlanRow::to_create(&file.name, &named);
                let Some(desired) = context.complete_if_found(named).await? else {
                    volumes.push(to_create);
                    continue;
                };
                file.text = written(path, &desired)?;
            }
            let _: Option<String> = files.insert(file.name, file.text);
        }
        let planned = context.plan(files).await?;
        let row = |volume: PlannedVolume| PlanRow {
            name: volume.name,
            volume_id: volume.volume_id,
            path: volume.path,
            state: volume.state,
            actions: volume.actions,
            reason: volume.reason,
        };
        volumes.extend(planned.into_iter().map(row));
        Ok(PlanAnswer { volumes })
    }
}

impl Answer for PlanAnswer {
    fn text(&self) -> String {
        let rows = self.volumes.iter().map(|volume| {
            let actions = match &*volume.state {
                "ready" => "nothing".to_owned(),
                state if volume.actions.is_empty() => format!("nothing: {state}"),
                _ => volume.actions.join(", "),
            };
            [
                volume.name.clone(),
                volume.path.clone(),
                actions,
                volume.reason.clone(),
            ]
        });
        table(
            ["NAME", "PATH", "WOULD", "BECAUSE"],
            rows,
            "no file asks for a volume",
        )
    }
}

/// Waits until a volume is as its file asks, or gone
#[derive(Args, Debug)]
#[command(after_help = "\
Also waits for the node agent, if it does not run yet. Exit code 6: not within
--timeout; the message says why.

Examples:
  uringctl wait data --timeout 90s
  uringctl wait data --for gone")]
pub struct Wait {
    /// Name of the volume's file, without .toml
    name: String,
    /// What to wait for
    #[arg(long = "for", value_enum, default_value_t)]
    until: Until,
}

/// What to wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Until {
    /// Attached and mounted as its file asks
    #[default]
    Mounted,
    /// Unmounted and detached, and no file asks for it
    Gone,
}

/// What was waited for.
#[derive(Debug, Serialize)]
pub struct WaitAnswer {
    name: String,
    state: &'static str,
}

impl Answer for WaitAnswer {
    fn text(&self) -> String {
        format!("{} {}", self.name, self.state)
    }
}

/// Between two looks.
pub const LOOK_EVERY: Duration = Duration::from_millis(250);

impl Wait {
    /// For the volume to be as its file asks.
    pub fn for_mount(name: String) -> Self {
        let until = Until::Mounted;
        Self { name, until }
    }

    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<WaitAnswer, CliError> {
        let until = Instant::now() + context.node_socket.timeout;
        let state = match self.until {
            Until::Mounted => "mounted",
            Until::Gone => "gone",
        };
        loop {
            let missing = match context.wanted().await {
                Ok(volumes) => match self.missing(volumes) {
                    Some(missing) => missing,
                    None => break,
                },
                Err(error) if error.is_uncertain() => error.to_string(),
                Err(error) => return Err(error),
            };
            if Instant::now() + LOOK_EVERY > until {
                let name = self.name;
                return Err(CliError::NotYet {
                    name,
                    state,
                    missing,
                });
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Ok(WaitAnswer {
            name: self.name,
            state,
        })
    }

    /// What the volume still lacks. A file whose handle changed, or that cannot be used, has
    /// two: the one that it asked for is still to go.
    fn missing(&self, volumes: Vec<WantedVolume>) -> Option<String> {
        let mut of_file = volumes.into_iter().filter(|it| it.name == self.name);
        let volume = match self.until {
            Until::Gone => of_file.next()?,
            Until::Mounted => match of_file.find(|it| it.is_wanted) {
                None => return Some("no file asks for it".to_owned()),
                Some(volume) if volume.state == "ready" => return None,
                Some(volume) => volume,
            },
        };
        Some(if volume.detail.is_empty() {
            format!("it is {}", volume.state)
        } else {
            volume.detail
        })
    }
}

/// Writes files of volumes into the agent's directory, each as a whole
#[derive(Args, Debug)]
#[command(after_help = "\
The volume has the name of its file. The agent makes what the file asks for, and
`uringctl wait` waits for it. If a file's form is wrong, or the agent would not use a
file, such as one with a path that --allow-path does not have, nothing is written. With
--directory the agent is not asked.

A file with a table [volume] gets its handle and source from the controller, which
finds the volume of that name, or creates it by the table's parameters. Nothing is
written before every volume is there; the same command again continues.

Examples:
  uringctl apply data.toml
  uringctl apply data.toml --directory /etc/uring-csi/volumes")]
pub struct Apply {
    /// Files, NAME.toml
    #[arg(required = true)]
    files: Vec<PathBuf>,
    #[command(flatten)]
    at: DirectoryArgs,
}

/// Removes the files of volumes; the agent unmounts and detaches these, once nothing uses them
#[derive(Args, Debug)]
#[command(after_help = "\
The volume's data stays. A volume that is in use stays mounted until it is not.

Example:
  uringctl remove data")]
pub struct Remove {
    /// Names of the volumes' files, without .toml
    #[arg(required = true)]
    names: Vec<String>,
    #[command(flatten)]
    at: DirectoryArgs,
}

#[derive(Args, Debug)]
struct DirectoryArgs {
    /// The directory of the files; default: the one of the running agent
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
}

impl DirectoryArgs {
    /// The directory, and whether the agent is to check what is written into it.
    async fn open(self, context: &Context) -> Result<(VolumesDir, bool), CliError> {
        match self.directory {
            Some(path) => Ok((VolumesDir::new(path), false)),
            None => Ok((context.volumes_dir().await?, true)),
        }
    }
}

/// The files that were written or removed.
#[derive(Debug, Serialize)]
pub struct FilesAnswer {
    directory: PathBuf,
    names: Vec<String>,
    #[serde(skip)]
    done: &'static str,
}

impl Answer for FilesAnswer {
    fn text(&self) -> String {
        let directory = self.directory.display();
        let line = |name: &String| format!("{}{directory}/{name}.toml", self.done);
        self.names.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}

impl Apply {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<FilesAnswer, CliError> {
        let new = self.files.iter().map(|path| Ok((path, read(path)?)));
        let mut new: Vec<_> = new.collect::<Result<_, CliError>>()?;
        let (directory, is_checked) = self.at.open(context).await?;
        context.make_directory(&directory).await?;
        if is_checked {
            context.refuse_bad(&new).await?;
        }
        for (path, file) in &mut new {
            if let Some(named) = file.named.take() {
                let desired = context.complete(named).await?;
                file.text = written(path, &desired)?;
            }
        }
        if is_checked {
            // By now with the handles of new volumes.
            context.refuse_bad(&new).await?;
        }
        let files: Vec<_> = (new.into_iter())
            .map(|(_, file)| (file.name, file.text))
            .collect();
        for (name, text) in &files {
            let written = directory.write(name, text);
            written.map_err(failed("write to", directory.path()))?;
        }
        Ok(FilesAnswer {
            directory: directory.path().to_owned(),
            names: files.into_iter().map(|(name, _)| name).collect(),
            done: "wrote ",
        })
    }
}

/// A file to be written.
struct NewFile {
    name: String,
    text: String,
    /// What it asks for, if the controller knows its handle and source.
    named: Option<NamedFile>,
}

/// Reads and checks a file.
fn read(path: &Path) -> Result<NewFile, CliError> {
    let bad = bad_file(path);
    let name = name_of(path).ok_or_else(|| bad("its name is not NAME.toml".to_owned()))?;
    let text = fs::read_to_string(path).map_err(failed("read", path))?;
    let parsed = named::parse(&name, &text).map_err(|error: BadDesired| bad(error.to_string()))?;
    let named = match parsed {
        VolumeFile::Complete(_) => None,
        VolumeFile::Named(file) => Some(file),
    };
    Ok(NewFile { name, text, named })
}

/// The text of a file.
fn written(path: &Path, desired: &Desired) -> Result<String, CliError> {
    toml::to_string(desired).map_err(|error| bad_file(path)(error.to_string()))
}

fn bad_file(path: &Path) -> impl Fn(String) -> CliError {
    move |why| CliError::BadFile {
        path: path.to_owned(),
        why,
    }
}

impl Remove {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<FilesAnswer, CliError> {
        let (directory, _) = self.at.open(context).await?;
        let names: BTreeSet<_> = self.names.into_iter().collect();
        let cannot = |name: &String| {
            let path = directory.path().join(format!("{name}.toml"));
            move |source| CliError::Io {
                doing: "remove the volume's file",
                path,
                source,
            }
        };
        // A wrong name among them removes nothing.
        for name in &names {
            if name_of(Path::new(&format!("{name}.toml"))).as_ref() != Some(name) {
                return Err(CliError::BadArguments(format!(
                    "{name:?} is not a file's name"
                )));
            }
            directory.require(name).map_err(cannot(name))?;
        }
        for name in &names {
            directory.remove(name).map_err(cannot(name))?;
        }
        Ok(FilesAnswer {
            directory: directory.path().to_owned(),
            names: names.into_iter().collect(),
            done: "removed ",
        })
    }
}

/// Whether two paths, of which the last parts may be missing, are of one place.
fn is_same_place(one: &Path, other: &Path) -> bool {
    let place = |path: &Path| {
        let absolute = std::path::absolute(path).ok()?;
        let there = absolute.ancestors().find(|above| above.exists())?;
        let below = absolute.strip_prefix(there).ok()?;
        Some(there.canonicalize().ok()?.join(below))
    };
    place(one).is_some_and(|it| Some(it) == place(other))
}

impl Context {
    /// The directory that the node agent follows.
    pub async fn volumes_dir(&self) -> Result<VolumesDir, CliError> {
        let path = self.agent_info().await?.volumes_dir;
        if path.is_empty() {
            let why = "the node agent runs without --volumes: it manages no volume";
            return Err(CliError::BadArguments(why.to_owned()));
        }
        Ok(VolumesDir::new(path.into()))
    }

    /// Makes the directory of the files, if it is missing. One that the agent follows is not
    /// made anew while volumes of its files are there: with the marker, and without their
    /// files, it would take them away.
    async fn make_directory(&self, directory: &VolumesDir) -> Result<(), CliError> {
        let path = directory.path();
        if path.exists() {
            return Ok(());
        }
        let is_followed = match self.agent_info().await {
            Ok(agent) => is_same_place(Path::new(&agent.volumes_dir), path),
            Err(CliError::Unreachable { .. }) => false,
            Err(error) => return Err(error),
        };
        if is_followed && !self.wanted().await?.is_empty() {
            return Err(CliError::DirectoryGone(path.to_owned()));
        }
        directory.make().map_err(failed("make", path))
    }

    /// Refuses files that the agent would not use.
    async fn refuse_bad(&self, new: &[(&PathBuf, NewFile)]) -> Result<(), CliError> {
        let mut files = HashMap::new();
        for (path, file) in new {
            let text = match file.named.clone() {
                None => file.text.clone(),
                Some(named) => {
                    let before = named.before_its_volume();
                    let found = self.complete_if_found(named).await?;
                    written(path, &found.unwrap_or(before))?
                }
            };
            files.insert(file.name.clone(), text);
        }
        let is_bad = |planned: &&PlannedVolume| planned.state == "bad";
        let planned = self.plan(files).await?;
        for planned in planned.iter().filter(is_bad) {
            if let Some((path, _)) = new.iter().find(|(_, file)| file.name == planned.name) {
                return Err(bad_file(path)(planned.reason.clone()));
            }
        }
        Ok(())
    }

    /// Refuses a volume that the volume manager would set up again; at a path: one that it
    /// would mount there again.
    pub async fn refuse_managed(
        &self,
        volume: &str,
        volume_id: &str,
        path: Option<&Path>,
    ) -> Result<(), CliError> {
        let is_set_up = |it: &WantedVolume| {
            it.is_managed && path.is_none_or(|path| path == Path::new(&it.path))
        };
        match self.refuse_wanted(volume, volume_id, is_set_up).await {
            // A directory that hangs is to keep no volume.
            Err(error) if error.is_uncertain() => Ok(()),
            refused => refused,
        }
    }

    /// Refuses to delete a volume that this node has, or that a file asks for: the controller
    /// does not know who uses a directory of an NFS server. Passes where no agent runs. The file
    /// comes first: with it the volume would be taken down in vain.
    pub async fn refuse_delete(&self, volume: &str, volume_id: &str) -> Result<(), CliError> {
        let held = match self.held().await {
            Err(CliError::Unreachable { .. }) => return Ok(()),
            // Another driver, which has no such service.
            Err(CliError::Refused { status, .. }) if status.code() == Code::Unimplemented => {
                return Ok(());
            }
            held => held?,
        };
        self.refuse_wanted(volume, volume_id, |_| true).await?;
        if let Some(held) = held.into_iter().find(|held| held.volume_id == volume_id) {
            let target = held.targets.into_iter().next().map(|target| target.path);
            let mut paths = target.into_iter().chain([held.staging_path]);
            return Err(CliError::HeldHere {
                volume: volume.to_owned(),
                path: paths.find(|path| !path.is_empty()),
            });
        }
        Ok(())
    }

    /// Refuses a volume that a file asks for, if `is_it` as well.
    async fn refuse_wanted(
        &self,
        volume: &str,
        volume_id: &str,
        is_it: impl Fn(&WantedVolume) -> bool,
    ) -> Result<(), CliError> {
        if self.agent_info().await?.volumes_dir.is_empty() {
            return Ok(());
        }
        let listed = self.list_wanted().await?;
        if listed.parked {
            return Err(CliError::Parked(volume.to_owned()));
        }
        let mut wanted = listed.volumes.into_iter();
        match wanted.find(|it| it.volume_id == volume_id && it.is_wanted && is_it(it)) {
            None => Ok(()),
            Some(WantedVolume { name, .. }) => Err(CliError::Managed {
                volume: volume.to_owned(),
                name,
            }),
        }
    }

    /// What the agent would do, if these files were in its directory.
    pub async fn plan(
        &self,
        files: HashMap<String, String>,
    ) -> Result<Vec<PlannedVolume>, CliError> {
        let answer = self
            .admin(
                "plan the volumes",
                PlanVolumesRequest { files },
                async |mut client, request| client.plan_volumes(request).await,
            )
            .await?;
        Ok(answer.volumes)
    }

    async fn wanted(&self) -> Result<Vec<WantedVolume>, CliError> {
        Ok(self.list_wanted().await?.volumes)
    }

    /// The volumes that files ask for, or that are still to go.
    pub async fn list_wanted(&self) -> Result<ListWantedVolumesResponse, CliError> {
        self.admin(
            "list the wanted volumes",
            ListWantedVolumesRequest {},
            async |mut client, request| client.list_wanted_volumes(request).await,
        )
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_volumes_of_one_file_the_wanted_one_is_waited_for() {
        let row = |is_wanted, state: &str| WantedVolume {
            name: "data".to_owned(),
            state: state.to_owned(),
            is_wanted,
            ..WantedVolume::default()
        };
        let missing = |until, volumes: &[WantedVolume]| {
            let name = "data".to_owned();
            Wait { name, until }.missing(volumes.to_vec())
        };
        let is = |state: &str| Some(format!("it is {state}"));
        let both = [row(false, "blocked"), row(true, "ready")];
        assert_eq!(missing(Until::Mounted, &both), None);
        assert_eq!(missing(Until::Gone, &both), is("blocked"));
        let swapped = [row(true, "changing"), row(false, "ready")];
        assert_eq!(missing(Until::Mounted, &swapped), is("changing"));
        let none = Some("no file asks for it".to_owned());
        assert_eq!(missing(Until::Mounted, &both[..1]), none);
        assert_eq!(missing(Until::Gone, &[]), None);
    }
}
