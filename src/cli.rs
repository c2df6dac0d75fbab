//! uringctl, the operator's command line.
//!
//! It speaks CSI, as Kubernetes does, over the same unix sockets, and the node
//! agent's own service. It keeps no state: the controller knows the volumes' names,
//! the node agent which volumes are on the node. Each file has a group of commands;
//! each command is a struct of its arguments with a `run` that returns an
//! [`answer::Answer`], printed as text or JSON.

mod about;
mod answer;
mod args;
mod attach;
mod bench;
mod complete;
mod context;
mod copies;
mod doctor;
mod enter;
mod error;
mod explain;
mod flow;
mod held;
mod messages;
mod named;
mod orphans;
mod park;
mod persist;
mod progress;
mod reattach;
mod repair;
mod resolve;
mod snapshots;
#[cfg(feature = "node")]
mod takeover;
mod volumes;
mod wanted;

use std::{
    io::{self, IsTerminal as _},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use clap::{Parser, Subcommand};

use self::{
    answer::Answer,
    context::{Context, Socket},
    error::{Agent, CliError},
};
use crate::{endpoint::Endpoint, error_chain, secret::Secrets};

/// Creates, attaches, expands, copies and inspects block volumes
#[derive(Debug, Parser)]
#[command(
    name = "uringctl",
    version,
    after_help = error::EXIT_CODES,
    max_term_width = 100,
    arg_required_else_help = true
)]
pub struct Cli {
    /// Socket of the node agent
    #[arg(
        long,
        global = true,
        help_heading = ANYWHERE,
        hide_env_values = true,
        value_name = "ENDPOINT",
        env = "URING_CSI_NODE_ENDPOINT",
        default_value = "unix:///run/uring-csi/node.sock"
    )]
    node_endpoint: Endpoint,
    /// Socket of the controller
    #[arg(
        long,
        global = true,
        help_heading = ANYWHERE,
        hide_env_values = true,
        value_name = "ENDPOINT",
        env = "URING_CSI_CONTROLLER_ENDPOINT",
        default_value = "unix:///run/uring-csi/controller.sock"
    )]
    controller_endpoint: Endpoint,
    /// Socket of the supervisor of the rbd-nbd daemons (uring-csi-holder)
    #[arg(
        long,
        global = true,
        help_heading = ANYWHERE,
        hide_env_values = true,
        value_name = "ENDPOINT",
        env = "URING_CSI_HOLDER_ENDPOINT",
        default_value = "unix:///run/uring-csi-holder/holder.sock"
    )]
    holder_endpoint: Endpoint,
    /// Timeout of each call; work that takes longer continues, so repeat the command
    #[arg(
        long,
        global = true,
        help_heading = ANYWHERE,
        hide_env_values = true,
        value_name = "TIME",
        env = "URING_CSI_TIMEOUT",
        default_value = "2m",
        value_parser = args::duration
    )]
    timeout: Duration,
    /// Directory of the secrets that the volume's backend needs, like a mounted
    /// Secret: one file each, such as userID and userKey for Ceph
    #[arg(
        long,
        global = true,
        help_heading = ANYWHERE,
        hide_env_values = true,
        value_name = "DIR",
        env = "URING_CSI_SECRETS"
    )]
    secrets: Option<PathBuf>,
    /// Print JSON: the answer on stdout, an error on stderr
    #[arg(long, global = true, help_heading = ANYWHERE)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

/// The heading of options that every command has.
const ANYWHERE: &str = "Options of every command";

#[derive(Debug, Subcommand)]
enum Command {
    Up(flow::Up),
    Down(flow::Down),
    Create(volumes::Create),
    Clone(volumes::CloneVolume),
    Delete(volumes::Delete),
    List(volumes::List),
    Expand(volumes::Expand),
    Snapshot(snapshots::Snapshots),
    Orphans(orphans::Orphans),
    Enter(enter::Enter),
    Stage(attach::Stage),
    Publish(attach::Publish),
    Unpublish(attach::Unpublish),
    Unstage(attach::Unstage),
    Wanted(wanted::Wanted),
    Plan(wanted::Plan),
    Wait(wanted::Wait),
    Apply(wanted::Apply),
    Remove(wanted::Remove),
    Park(park::Park),
    Unpark(park::Unpark),
    Volumes(held::Volumes),
    Stats(held::Stats),
    Health(held::Health),
    Info(about::Info),
    Doctor(doctor::Doctor),
    Explain(explain::Explain),
    #[cfg(feature = "node")]
    Takeover(takeover::Takeover),
    Capabilities(about::Capabilities),
    Format(repair::Format),
    Release(repair::Release),
    Reattach(reattach::Reattach),
    Bench(bench::Bench),
    Completions(Completions),
}

/// Prints a script by which a shell completes commands, and names of volumes
#[derive(Debug, clap::Args)]
#[command(after_help = "\
The script calls uringctl at each completion, and belongs to this version of it. uringctl
asks the agents at the default sockets, or those of the environment, for a second at most.

Examples:
  uringctl completions bash > /etc/bash_completion.d/uringctl
  uringctl completions zsh > /usr/local/share/zsh/site-functions/_uringctl
  uringctl completions fish > ~/.config/fish/completions/uringctl.fish")]
struct Completions {
    shell: complete::Shell,
}

/// Runs the program.
pub fn main() -> ExitCode {
    complete::answer_shell();
    let cli = Cli::parse();
    let json = cli.json;
    let done = match runtime() {
        Ok(runtime) => runtime.block_on(cli.answer()),
        Err(source) => Err(CliError::Io {
            doing: "start the runtime of",
            path: "uringctl".into(),
            source,
        }),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if json {
                eprintln!("{}", error.to_json());
            } else {
                let text = error_chain(&error);
                eprintln!("uringctl: {}", answer::printable(&text));
                if let Some(remedy) = error.remedy() {
                    eprintln!("what to do: {remedy}");
                }
            }
            ExitCode::from(error.exit_code())
        }
    }
}

fn runtime() -> io::Result<tokio::runtime::Runtime> {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_all().build()
}

impl Cli {
    /// The agents at their sockets; on a runtime.
    fn context(&self) -> Result<Context, CliError> {
        let secrets = match &self.secrets {
            None => Ok(Secrets::default()),
            Some(dir) => Secrets::read_dir(dir).map_err(|source| CliError::Io {
                doing: "read the secrets in",
                path: dir.clone(),
                source,
            }),
        };
        let socket =
            |agent, endpoint: &Endpoint| Socket::new(agent, endpoint.clone(), self.timeout);
        Ok(Context {
            node_socket: socket(Agent::Node, &self.node_endpoint),
            controller_socket: socket(Agent::Controller, &self.controller_endpoint),
            holder_socket: socket(Agent::Holder, &self.holder_endpoint),
            // A bench makes calls at the same time.
            shows_progress: io::stderr().is_terminal()
                && !matches!(self.command, Command::Bench(_)),
            secrets: secrets?,
            secrets_dir: self.secrets.clone(),
        })
    }

    /// Runs the command, and prints its answer.
    async fn answer(self) -> Result<(), CliError> {
        let json = self.json;
        let context = &self.context()?;
        match self.command {
            Command::Up(it) => print(it.run(context).await, json),
            Command::Down(it) => print(it.run(context).await, json),
            Command::Create(it) => print(it.run(context).await?, json),
            Command::Clone(it) => print(it.run(context).await?, json),
            Command::Delete(it) => print(it.run(context).await, json),
            Command::List(it) => print(it.run(context).await?, json),
            Command::Expand(it) => print(it.run(context).await?, json),
            Command::Snapshot(it) => print(it.run(context).await?, json),
            Command::Orphans(it) => print(it.run(context).await?, json),
            Command::Enter(it) => print(it.run(context).await?, json),
            Command::Stage(it) => print(it.run(context).await?, json),
            Command::Publish(it) => print(it.run(context).await?, json),
            Command::Unpublish(it) => print(it.run(context).await?, json),
            Command::Unstage(it) => print(it.run(context).await?, json),
            Command::Wanted(it) => print(it.run(context).await?, json),
            Command::Plan(it) => print(it.run(context).await?, json),
            Command::Wait(it) => print(it.run(context).await?, json),
            Command::Apply(it) => print(it.run(context).await?, json),
            Command::Remove(it) => print(it.run(context).await?, json),
            Command::Park(it) => print(it.run(context).await?, json),
            Command::Unpark(it) => print(it.run(context).await?, json),
            Command::Volumes(it) => print(it.run(context).await?, json),
            Command::Stats(it) => print(it.run(context).await?, json),
            Command::Health(it) => print(it.run(context).await?, json),
            Command::Info(it) => print(it.run(context).await?, json),
            Command::Doctor(it) => print(it.run(context).await?, json),
            Command::Explain(it) => print(it.run()?, json),
            #[cfg(feature = "node")]
            Command::Takeover(it) => print(it.run()?, json),
            Command::Capabilities(it) => print(it.run(context).await?, json),
            Command::Format(it) => print(it.run(context).await?, json),
            Command::Release(it) => print(it.run()?, json),
            Command::Reattach(it) => print(it.run(context).await?, json),
            Command::Bench(it) => print(it.run(context).await?, json),
            Command::Completions(it) => {
                let script = complete::script(it.shell).map_err(|source| CliError::Io {
                    doing: "write the script for",
                    path: "the shell".into(),
                    source,
                })?;
                written(answer::write(&script))
            }
        }
    }
}

/// Prints the answer, also that of a command that did a part of its work.
fn print(answer: impl Answer, json: bool) -> Result<(), CliError> {
    written(answer::print(&answer, json))?;
    answer.require_success()
}

fn written(done: io::Result<()>) -> Result<(), CliError> {
    done.map_err(|source| CliError::Io {
        doing: "write to",
        path: "stdout".into(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn all_files_are_removed_or_none() {
        let directory = tempfile::tempdir().unwrap();
        let [one, two] = ["one.toml", "two.toml"].map(|name| directory.path().join(name));
        std::fs::write(&one, "").unwrap();
        let at = directory.path().to_str().unwrap();
        let remove = |names: &[&str]| {
            let args = [&["uringctl", "remove", "--directory", at], names].concat();
            let command = Cli::try_parse_from(args).unwrap();
            let done = runtime().unwrap().block_on(command.answer());
            done.map_err(|error| error_chain(&error))
        };
        for (names, why) in [
            (["one", "two"], "two.toml"),
            (["one", "../two"], "is not a file's name"),
        ] {
            let error = remove(&names).unwrap_err();
            assert!(error.contains(why), "{error}");
            assert!(one.exists());
        }
        std::fs::write(&two, "").unwrap();
        remove(&["one", "two", "one"]).unwrap();
        assert!(!one.exists() && !two.exists());
    }

    #[test]
    fn every_command_has_an_example() {
        fn check(command: &clap::Command) {
            let subcommands: Vec<_> = command.get_subcommands().collect();
            if subcommands.is_empty() {
                let help = command.get_after_help().map(ToString::to_string);
                let example = help.is_some_and(|help| help.contains("  uringctl "));
                assert!(example, "{} has no example", command.get_name());
            }
            subcommands.into_iter().for_each(check);
        }
        check(&Cli::command());
    }

    /// Examples are in the help to be copied: each must be a valid command.
    #[test]
    fn every_example_parses() {
        fn examples(command: &clap::Command, found: &mut Vec<String>) {
            if let Some(help) = command.get_after_help() {
                let help = help.to_string();
                let lines = help.lines().map(str::trim);
                found.extend(
                    lines
                        .filter(|line| line.starts_with("uringctl "))
                        .map(str::to_owned),
                );
            }
            for subcommand in command.get_subcommands() {
                examples(subcommand, found);
            }
        }
        let mut found = Vec::new();
        examples(&Cli::command(), &mut found);
        assert!(found.len() > 20);
        for example in found {
            let command = example.split(['|', '>']).next().unwrap_or_default();
            if let Err(error) = Cli::try_parse_from(command.split_whitespace()) {
                panic!("{example}: {error}");
            }
        }
    }
}
