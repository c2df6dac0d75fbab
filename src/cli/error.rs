//! Errors, each in one sentence, and their exit codes.

use std::{
    io::{self, ErrorKind},
    path::{Path, PathBuf},
};

use serde::Serialize;
use tonic::{Code, Status};

use super::messages::remedy;
use crate::{
    ceph::client::CredentialsError, endpoint::Endpoint, error_chain, pool::claim::ClaimError,
    proto::code_name,
};

/// The last part of `uringctl --help`.
pub const EXIT_CODES: &str = "\
Exit codes:
  0  success, also if there was nothing left to do
  1  any other failure, an incomplete list, or a machine that `doctor` finds unfit
  2  the command line or the request is wrong
  3  no such volume, snapshot, node or path
  4  a volume or snapshot of that name exists and differs
  5  in use, or not in the state that the command requires
  6  not finished: repeat the command, which resumes or joins the work
  7  no room: the pool is full or not on this node, or too many volumes wait already
  8  no agent: it does not run, or this user may not use its socket
  9  `health` found an unhealthy volume";

/// The agent that serves a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agent {
    /// uring-csi-node.
    Node,
    /// uring-csi-controller.
    Controller,
    /// uring-csi-holder.
    Holder,
}

impl Agent {
    fn program(self) -> &'static str {
        match self {
            Self::Node => "uring-csi-node",
            Self::Controller => "uring-csi-controller",
            Self::Holder => "uring-csi-holder",
        }
    }

    fn flag(self) -> &'static str {
        match self {
            Self::Node => "--node-endpoint",
            Self::Controller => "--controller-endpoint",
            Self::Holder => "--holder-endpoint",
        }
    }

    /// The command that starts it, if it is a service of the systemd that runs below `root`.
    pub fn start_command(self, root: &Path) -> Option<String> {
        const UNITS: [&str; 2] = ["etc/systemd/system", "usr/lib/systemd/system"];
        let program = self.program();
        let has_unit = |dir| root.join(dir).join(format!("{program}.service")).exists();
        let runs = root.join("run/systemd/system").exists();
        (runs && UNITS.into_iter().any(has_unit)).then(|| format!("systemctl start {program}"))
    }
}

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// `doctor` found what keeps the node agent from starting.
    ///
    /// Remedy: correct what the lines above it name, and repeat `uringctl doctor`.
    #[error("the node agent cannot run on this machine as it is: {0}")]
    Unfit(String),
    /// `health` was printed, and not all is well.
    ///
    /// Remedy: [Health conditions](#health-conditions) has each.
    #[error("unhealthy: {}", .0.join(", "))]
    Unhealthy(Vec<String>),
    /// The agent answered with an error.
    ///
    /// Remedy: that of the cause that follows.
    #[error("cannot {doing}: {}", message_of(.status))]
    Refused {
        /// The call, such as `stage data-1`.
        doing: String,
        /// The gRPC status.
        status: Box<Status>,
    },
    /// No process listens, or this user may not connect.
    ///
    /// Remedy: what the end of the message says, or `uringctl doctor`.
    #[error(
        "cannot {doing}: nothing answers at {endpoint} ({why}); is {} running, and may you \
         use its socket ({} names another)? {next}",
        .agent.program(), .agent.flag()
    )]
    Unreachable {
        /// The call.
        doing: String,
        /// The agent.
        agent: Agent,
        /// Its socket.
        endpoint: Endpoint,
        /// The error of connect(2).
        why: io::Error,
        /// The commands to continue with.
        next: String,
    },
    /// The agent's answer lacks a field that the interface requires.
    ///
    /// Remedy: use the uringctl of the agent's version: `uringctl --version`, `uringctl info`.
    #[error("cannot {doing}: the answer has no {missing}")]
    MissingField {
        /// The call.
        doing: String,
        /// The missing field.
        missing: &'static str,
    },
    /// Neither the node nor the controller knows the volume.
    #[error("no volume has the name or id {0:?}; `uringctl list` shows all volumes")]
    NoSuchVolume(String),
    /// The controller knows no such snapshot.
    #[error("no snapshot has the name or id {0:?}; `uringctl snapshot list` shows all snapshots")]
    NoSuchSnapshot(String),
    /// The controller knows no such group snapshot.
    #[error("no group snapshot has the id {0:?}; `uringctl snapshot group list` shows all")]
    NoSuchGroup(String),
    /// The volume is not on the node.
    #[error("this node does not hold {0:?}; `uringctl volumes` shows what it holds")]
    NotHeld(String),
    /// A name that more than one volume or snapshot has.
    #[error("{} {what} have the name {name:?}; pass an id instead: {}", .ids.len(), .ids.join(", "))]
    Ambiguous {
        /// volumes or snapshots.
        what: &'static str,
        /// The name.
        name: String,
        /// Their ids.
        ids: Vec<String>,
    },
    /// A destructive command without its `--confirm`.
    #[error("{what}; to do it, repeat the command with --confirm {with}")]
    Unconfirmed {
        /// The effect of the command.
        what: String,
        /// The value of `--confirm`.
        with: String,
    },
    /// Orphans to be removed without `--yes`, where no one can be asked.
    #[error("{0}; to do it, repeat the command with --yes")]
    Unanswered(String),
    /// The answer was no.
    ///
    /// Remedy: none is needed.
    #[error("nothing was removed")]
    Declined,
    /// A list was printed, and is incomplete.
    ///
    /// Remedy: repair what the message names, and repeat the command.
    #[error("the list is incomplete: {}", .0.join("; "))]
    IncompleteList(Vec<String>),
    /// The results of `enter` were printed, and not all volumes are entered.
    ///
    /// Remedy: do what the result of each says, and repeat the command.
    #[error("not entered: {}", .0.join(", "))]
    NotEntered(Vec<String>),
    /// `wait` gave up.
    ///
    /// Remedy: `uringctl plan` says what it waits for.
    #[error("{name} is not {state} yet: {missing}")]
    NotYet {
        /// The name of its file.
        name: String,
        /// What was waited for.
        state: &'static str,
        /// What it waits for.
        missing: String,
    },
    /// A text to explain that is no error's.
    #[error(
        "no error of this version has such a message; pass the text of an event or a log line, a \
         gRPC code, or a condition of `uringctl health`"
    )]
    Unexplained,
    /// A volume to be deleted that this node has.
    #[error(
        "{volume} is in use on this node{}; `uringctl down {volume}` unpublishes and unstages it",
        .path.as_ref().map(|path| format!(", at {path}")).unwrap_or_default()
    )]
    HeldHere {
        /// As given on the command line.
        volume: String,
        /// Where it is published or staged.
        path: Option<String>,
    },
    /// A volume that a file of the volume manager asks for.
    #[error(
        "{volume} is wanted by {name}.toml, which the node agent follows; \
         `uringctl remove {name}` unmounts and detaches it"
    )]
    Managed {
        /// As given on the command line.
        volume: String,
        /// The name of its file.
        name: String,
    },
    /// A file that the volume manager could not follow.
    ///
    /// Remedy: choose another name, or write the file by hand.
    #[error("no file can ask for {name}: {why}")]
    CannotPersist {
        /// The name of its file.
        name: String,
        /// What stands against it.
        why: String,
    },
    /// A volume that a file may ask for, while no file counts.
    #[error(
        "volumes that files ask for are parked, and {0} may be one of them; `uringctl unpark` ends that"
    )]
    Parked(String),
    /// The directory of the volume manager, which is missing while volumes of its files are there.
    #[error(
        "{} is gone, and volumes of its files are still on this node: a new one would take them \
         away; bring it back with its files, or mount its file system", .0.display()
    )]
    DirectoryGone(PathBuf),
    /// Arguments that do not go together.
    #[error("{0}")]
    BadArguments(String),
    /// A file of the command line has another form.
    ///
    /// Remedy: correct the file as the message says.
    #[error("cannot use {}: {why}", .path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Volumes given to `bench run` that something uses.
    ///
    /// Remedy: name other volumes, or unpublish and unstage these.
    #[error("a bench takes no volume that is in use: {}", .0.join("; "))]
    InUse(Vec<String>),
    /// The report was printed, and has errors.
    ///
    /// Remedy: read the errors in the report, and the agent's log.
    #[error("{0} calls failed")]
    CallsFailed(u64),
    /// The report was printed, and is incomplete.
    ///
    /// Remedy: none is needed.
    #[error("interrupted; nothing is left")]
    Interrupted,
    /// A run could not undo all that it did.
    #[error("this is left: {}; `uringctl bench clean` repeats the attempt to undo it", .0.join("; "))]
    Left(Vec<String>),
    /// A pool's claims could not be read or removed.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// The directory of --secrets has no user and key.
    ///
    /// Remedy: `--secrets DIR` with the files userID and userKey.
    #[error("--secrets is needed here: {0}")]
    Credentials(#[from] CredentialsError),
    /// A file operation of uringctl failed.
    ///
    /// Remedy: correct the path, its owner or its mode (`ls -l`).
    #[error("cannot {doing} {}", .path.display())]
    Io {
        /// The operation.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
}

impl CliError {
    /// From a failed call; distinguishes an unreachable agent from one that answered.
    pub fn of_call(doing: String, agent: Agent, endpoint: &Endpoint, status: Status) -> Self {
        match connect_error(&status) {
            Some(why) => Self::Unreachable {
                doing,
                agent,
                endpoint: endpoint.clone(),
                why,
                next: next_commands(agent, Path::new("/")),
            },
            // By tonic, which has no such service.
            None if status.code() == Code::Unimplemented && status.message().is_empty() => {
                let (program, flag) = (agent.program(), agent.flag());
                let why = format!(
                    "what answers at {endpoint} does not serve that; is it the socket of {program}? ({flag} names another)"
                );
                Self::Refused {
                    doing,
                    status: Box::new(Status::unimplemented(why)),
                }
            }
            None => Self::Refused {
                doing,
                status: Box::new(status),
            },
        }
    }

    /// The process's exit code, as [`EXIT_CODES`] explains.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Refused { status, .. } => exit_code_of(status.code()),
            Self::Unreachable { why, .. } if is_lost(why) => 6,
            Self::Unreachable { .. } => 8,
            Self::NotYet { .. } => 6,
            Self::Unhealthy(_) => 9,
            Self::IncompleteList(_)
            | Self::NotEntered(_)
            | Self::MissingField { .. }
            | Self::CallsFailed(_)
            | Self::Interrupted
            | Self::Declined
            | Self::Left(_)
            | Self::Claim(_)
            | Self::Unfit(_)
            | Self::Io { .. } => 1,
            Self::NoSuchVolume(_)
            | Self::NoSuchSnapshot(_)
            | Self::NoSuchGroup(_)
            | Self::Unexplained
            | Self::NotHeld(_) => 3,
            Self::Ambiguous { .. }
            | Self::Unconfirmed { .. }
            | Self::Unanswered(_)
            | Self::BadArguments(_)
            | Self::BadFile { .. }
            | Self::Credentials(_) => 2,
            Self::InUse(_)
            | Self::HeldHere { .. }
            | Self::DirectoryGone(_)
            | Self::Parked(_)
            | Self::Managed { .. }
            | Self::CannotPersist { .. } => 5,
        }
    }

    /// Whether the call may have done its work nevertheless, or may succeed later, so that
    /// it is to be repeated.
    pub fn is_uncertain(&self) -> bool {
        matches!(self, Self::Refused { .. } | Self::Unreachable { .. })
            && matches!(self.exit_code(), 6..=8)
    }

    /// What to do about an agent's error, besides what it says itself.
    pub fn remedy(&self) -> Option<String> {
        match self {
            Self::Refused { status, .. } => remedy(status.message()),
            _ => None,
        }
    }

    /// As one line of JSON.
    pub fn to_json(&self) -> String {
        let code = match self {
            Self::Refused { status, .. } => Some(code_name(status.code())),
            _ => None,
        };
        let error = ErrorAnswer {
            error: error_chain(self),
            exit_code: self.exit_code(),
            code,
            remedy: self.remedy(),
        };
        serde_json::to_string(&error).unwrap_or_default()
    }
}

/// An error as printed.
#[derive(Serialize)]
struct ErrorAnswer {
    error: String,
    exit_code: u8,
    /// The gRPC code of an agent's answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<&'static str>,
    /// What to do, where the error does not say it.
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

/// Whether a connection was lost, and not refused: the call may have begun.
fn is_lost(error: &io::Error) -> bool {
    !matches!(
        error.kind(),
        ErrorKind::NotFound | ErrorKind::PermissionDenied | ErrorKind::ConnectionRefused
    )
}

fn next_commands(agent: Agent, root: &Path) -> String {
    let doctor = "`uringctl doctor` checks this machine";
    match agent.start_command(root) {
        Some(start) => format!("`{start}` starts it, {doctor}"),
        None => doctor.to_owned(),
    }
}

fn exit_code_of(code: Code) -> u8 {
    match code {
        Code::Ok => 0,
        Code::InvalidArgument | Code::OutOfRange => 2,
        Code::NotFound => 3,
        Code::AlreadyExists => 4,
        Code::FailedPrecondition => 5,
        Code::Cancelled | Code::DeadlineExceeded | Code::Unavailable | Code::Aborted => 6,
        Code::ResourceExhausted => 7,
        Code::Unknown
        | Code::PermissionDenied
        | Code::Unimplemented
        | Code::Internal
        | Code::DataLoss
        | Code::Unauthenticated => 1,
    }
}

/// The server's message, or the meaning of its code where the message is empty.
fn message_of(status: &Status) -> String {
    match status.message() {
        "" => status.code().description().to_owned(),
        message => message.to_owned(),
    }
}

/// The error of connect(2) if it made a call fail: tonic invents the status then, and
/// keeps the cause as its source.
fn connect_error(status: &Status) -> Option<io::Error> {
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref::<io::Error>()
            && let Some(number) = io.raw_os_error()
        {
            return Some(io::Error::from_raw_os_error(number));
        }
        cause = error.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    fn refused(code: Code, message: &str) -> CliError {
        let endpoint = "/run/x.sock".parse().unwrap();
        let status = Status::new(code, message);
        CliError::of_call("stage data".to_owned(), Agent::Node, &endpoint, status)
    }

    #[test]
    fn the_servers_message_is_shown() {
        let error = refused(Code::Aborted, "volume data is being formatted for 3 s");
        assert_eq!(
            error.to_string(),
            "cannot stage data: volume data is being formatted for 3 s"
        );
        let mute = refused(Code::Internal, "").to_string();
        assert!(mute.len() > "cannot stage data: ".len(), "{mute}");
    }

    #[test]
    fn the_socket_of_another_agent_is_named() {
        let error = refused(Code::Unimplemented, "");
        let text = error.to_string();
        assert!(
            text.contains("/run/x.sock") && text.contains("--node-endpoint"),
            "{text}"
        );
        assert_eq!(error.exit_code(), 1);
    }

    #[test]
    fn uncertain_codes_say_try_again() {
        for (code, exit) in [
            (Code::InvalidArgument, 2),
            (Code::NotFound, 3),
            (Code::AlreadyExists, 4),
            (Code::FailedPrecondition, 5),
            (Code::Aborted, 6),
            (Code::DeadlineExceeded, 6),
            (Code::Unavailable, 6),
            (Code::ResourceExhausted, 7),
            (Code::Internal, 1),
            (Code::Unimplemented, 1),
        ] {
            assert_eq!(refused(code, "x").exit_code(), exit, "{code:?}");
        }
    }

    #[test]
    fn a_repeat_may_cure_a_lost_connection_and_not_a_refused_one() {
        for (why, exit) in [
            (Errno::CONNREFUSED, 8),
            (Errno::ACCESS, 8),
            (Errno::CONNRESET, 6),
            (Errno::PIPE, 6),
        ] {
            let error = CliError::Unreachable {
                doing: "stage data".to_owned(),
                agent: Agent::Node,
                endpoint: "/run/x.sock".parse().unwrap(),
                why: why.into(),
                next: String::new(),
            };
            assert_eq!(error.exit_code(), exit, "{why}");
        }
    }

    #[test]
    fn systemctl_is_named_where_systemd_has_the_unit() {
        let root = tempfile::tempdir().unwrap();
        let units = root.path().join("usr/lib/systemd/system");
        let next = |agent| next_commands(agent, root.path());
        std::fs::create_dir_all(&units).unwrap();
        std::fs::write(units.join("uring-csi-node.service"), "").unwrap();
        assert_eq!(next(Agent::Node), "`uringctl doctor` checks this machine");
        std::fs::create_dir_all(root.path().join("run/systemd/system")).unwrap();
        assert_eq!(
            next(Agent::Node),
            "`systemctl start uring-csi-node` starts it, `uringctl doctor` checks this machine"
        );
        assert_eq!(
            next(Agent::Controller),
            "`uringctl doctor` checks this machine"
        );
    }

    #[test]
    fn an_error_is_json_with_its_codes() {
        let text = refused(Code::NotFound, "no volume \"x\"").to_json();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json["error"], "cannot stage data: no volume \"x\"");
        assert_eq!(json["exit_code"], 3);
        assert_eq!(json["code"], "NOT_FOUND");
        assert!(!text.contains("\"remedy\""), "{text}");
        let text = refused(Code::Aborted, "volume x: /dev/loop3 is busy").to_json();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert!(json["remedy"].is_string(), "{text}");
        let text = CliError::Declined.to_json();
        assert!(!text.contains("\"code\""), "{text}");
    }

    #[tokio::test]
    async fn a_missing_socket_is_named_with_its_flag() {
        use crate::proto::csi::{ProbeRequest, identity_client::IdentityClient};
        let endpoint: Endpoint = "/nonexistent/node.sock".parse().unwrap();
        let status = IdentityClient::new(endpoint.channel())
            .probe(ProbeRequest {})
            .await
            .unwrap_err();
        let error = CliError::of_call("ask".to_owned(), Agent::Node, &endpoint, status);
        assert_eq!(error.exit_code(), 8);
        let text = error.to_string();
        assert!(
            text.contains("unix:///nonexistent/node.sock (No such file")
                && text.contains("--node-endpoint")
                && text.contains("`uringctl doctor`"),
            "{text}"
        );
    }
}
