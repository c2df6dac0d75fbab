//! Completion in a shell: of commands and flags by clap, of names as far as the agents tell
//! them within a moment. A script in the shell calls uringctl for both.

use std::{collections::BTreeSet, ffi::OsStr, io, time::Duration};

use clap::{Arg, Command, CommandFactory as _, Parser as _, ValueEnum};
use clap_complete::{
    CompleteEnv,
    engine::{ArgValueCompleter, CompletionCandidate},
    env::{Bash, EnvCompleter, Fish, Shells, Zsh},
};
use tokio::time::timeout;

use super::{Cli, context::Context, resolve::name_of};

/// By this variable the script of a shell asks for completions.
const VARIABLE: &str = "URING_CSI_COMPLETE";
const SHELLS: Shells<'static> = Shells(&[&Bash, &Fish, &Zsh]);

/// A shell that uringctl has a script for.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Shell {
    Bash,
    Fish,
    Zsh,
}

/// Answers a shell that asks for completions, and ends the process; returns where none
/// does. Must be called while the process has one thread, outside of a runtime.
pub fn answer_shell() {
    CompleteEnv::with_factory(|| with_names(Cli::command()))
        .var(VARIABLE)
        .shells(SHELLS)
        .complete();
}

/// The script by which the shell asks.
pub fn script(shell: Shell) -> io::Result<Vec<u8>> {
    let mut script = Vec::new();
    let of_shell: &dyn EnvCompleter = match shell {
        Shell::Bash => &Bash,
        Shell::Fish => &Fish,
        Shell::Zsh => &Zsh,
    };
    of_shell.write_registration(VARIABLE, "uringctl", "uringctl", "uringctl", &mut script)?;
    if matches!(shell, Shell::Zsh) {
        // compinit runs the file as the function of its name, to complete at once.
        script.extend_from_slice(
            b"[ \"$funcstack[1]\" = _uringctl ] && _clap_dynamic_completer_uringctl \"$@\"\n",
        );
    }
    Ok(script)
}

/// The command and those below it, with the arguments whose values the agents know.
fn with_names(command: Command) -> Command {
    command.mut_args(completed).mut_subcommands(with_names)
}

fn completed(arg: Arg) -> Arg {
    match arg.get_id().as_str() {
        "volume" | "volumes" | "source" | "from_volume" => arg.add(volumes()),
        "snapshots" | "from_snapshot" => arg.add(snapshots()),
        "groups" => arg.add(group_snapshots()),
        // Another one takes the pool's directory, too.
        "pool"
            if arg
                .get_value_names()
                .is_some_and(|names| names[0] == "POOL") =>
        {
            arg.add(pools())
        }
        _ => arg,
    }
}

/// How long a shell waits for the agents.
const WITHIN: Duration = Duration::from_secs(1);

/// Volumes of the controller, by their names or else ids; without a controller those of
/// the node, by ids.
fn volumes() -> ArgValueCompleter {
    completer(
        async |context| match context.list_what_can_be_reached().await {
            Ok((volumes, _)) => {
                let names =
                    volumes
                        .into_iter()
                        .map(|volume| match name_of(&volume.volume_context) {
                            "" => volume.volume_id,
                            name => name.to_owned(),
                        });
                names.collect()
            }
            Err(_) => held(context).await,
        },
    )
}

async fn held(context: &Context) -> Vec<String> {
    let held = context.held().await.unwrap_or_default();
    held.into_iter().map(|volume| volume.volume_id).collect()
}

/// Snapshots, by their names or else ids.
fn snapshots() -> ArgValueCompleter {
    completer(async |context| {
        let listed = context.list_snapshots(String::new()).await;
        let (snapshots, _) = listed.unwrap_or_default();
        let names = snapshots.into_iter().map(|one| match one.name {
            name if name.is_empty() => one.snapshot_id,
            name => name,
        });
        names.collect()
    })
}

/// Group snapshots, by their ids.
fn group_snapshots() -> ArgValueCompleter {
    completer(async |context| {
        let listed = context.list_snapshots(String::new()).await;
        let (snapshots, _) = listed.unwrap_or_default();
        let groups = snapshots.into_iter().map(|one| one.group_snapshot_id);
        let groups: BTreeSet<_> = groups.filter(|id| !id.is_empty()).collect();
        groups.into_iter().collect()
    })
}

/// The image pools of the node.
fn pools() -> ArgValueCompleter {
    completer(async |context| {
        let info = context.agent_info().await;
        info.map(|info| info.pools).unwrap_or_default()
    })
}

fn completer(
    names: impl AsyncFn(&Context) -> Vec<String> + Send + Sync + 'static,
) -> ArgValueCompleter {
    ArgValueCompleter::new(move |current: &OsStr| {
        let found = ask(&names).unwrap_or_default();
        let begun = current.to_str().unwrap_or_default();
        let fits = found.into_iter().filter(|name| name.starts_with(begun));
        fits.map(CompletionCandidate::new).collect::<Vec<_>>()
    })
}

/// Asks the agents at the sockets of the environment; none if they do not answer.
fn ask(names: &impl AsyncFn(&Context) -> Vec<String>) -> Option<BTreeSet<String>> {
    let cli = Cli::try_parse_from(["uringctl", "info"]).ok()?;
    super::runtime().ok()?.block_on(async {
        let context = cli.context().ok()?;
        let names = timeout(WITHIN, names(&context)).await.ok()?;
        Some(names.into_iter().collect())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_that_name_something_are_completed() {
        let completed = |path: &[&str], id: &str| {
            let mut command = with_names(Cli::command());
            for name in path {
                command = command.find_subcommand(name).unwrap().clone();
            }
            let arg = command.get_arguments().find(|arg| arg.get_id() == id);
            arg.unwrap().get::<ArgValueCompleter>().is_some()
        };
        assert!(completed(&["stage"], "volume"));
        assert!(completed(&["delete"], "volumes"));
        assert!(completed(&["clone"], "source"));
        assert!(completed(&["create"], "pool"));
        assert!(completed(&["create"], "from_volume"));
        assert!(completed(&["snapshot", "delete"], "snapshots"));
        assert!(!completed(&["create"], "name"));
        assert!(!completed(&["release"], "pool"));
    }

    #[test]
    fn names_begin_as_what_was_typed() {
        let names = completer(async |_| vec!["one".to_owned(), "other".to_owned()]);
        let fits = names.complete(OsStr::new("ot"));
        assert_eq!(fits, [CompletionCandidate::new("other")]);
    }
}
