//! Parses the log of rbd-nbd.

use rustix::process::WaitIdStatus;

use crate::supervisor::{Spec, SupervisorError};

/// How many bytes of the output's end, which has the error, are kept.
pub const KEPT: usize = 2048;

/// The state of a daemon, by its log so far.
#[derive(Debug, Default)]
pub struct DaemonLog {
    /// It serves a device.
    pub serves: bool,
    /// The end of its log.
    pub tail: String,
    /// The client ids under which it has joined the cluster; one has the image open.
    pub clients: Vec<i64>,
    /// The release of Ceph that it is of, such as 16.
    pub release: Option<u32>,
    /// How often its image was found to have another size than the device.
    pub resized: usize,
    /// Its log has ended.
    pub ended: bool,
}

impl DaemonLog {
    /// Parses a line.
    pub fn take(&mut self, line: &str) {
        if !self.serves && line.starts_with("/dev/nbd") {
            self.serves = true;
            return;
        }
        self.resized += usize::from(line.contains(": netlink resize failed:"));
        self.clients.extend(joined_as(line));
        self.release = self.release.or_else(|| release_of(line));
        if !self.tail.is_empty() {
            self.tail.push('\n');
        }
        self.tail.push_str(line);
        let mut surplus = self.tail.len().saturating_sub(KEPT);
        while !self.tail.is_char_boundary(surplus) {
            surplus += 1;
        }
        self.tail.drain(..surplus);
    }
}

/// The line that librados logs, at level 5 of `monc`, when it has joined a cluster (Ceph's
/// `MonClient::authenticate`); it ends with the client's id, as an image's watchers show it.
const JOINED: &str = "authenticate success, global_id ";

fn joined_as(line: &str) -> Option<i64> {
    let (_, number) = line.rsplit_once(JOINED)?;
    number.parse().ok()
}

/// The line that every program of Ceph logs first has its version after this.
const VERSION: &str = "ceph version ";

fn release_of(line: &str) -> Option<u32> {
    let (_, version) = line.split_once(VERSION)?;
    version.split('.').next()?.parse().ok()
}

/// Parts of the lines that rbd-nbd logs at every start, and its only ones if the image is
/// missing.
const AT_EVERY_START: [&str; 3] = [VERSION, "pidfile_write", "deferred set uid:gid"];

/// The exit code of rbd-nbd after every error; librbd logs no error for an image that is
/// missing.
const FAILED: i32 = 1;

/// The error by which a daemon ended, by its last lines and the way in which it ended, if
/// that is known. One that was killed has not said that its image is missing.
pub fn explain(tail: &str, exit: Option<&WaitIdStatus>, spec: &Spec) -> SupervisorError {
    let image = spec.image.to_string();
    let lines = || {
        tail.lines()
            .map(without_prefix)
            .filter(|line| !line.is_empty())
    };
    let errors = lines().filter(|line| !AT_EVERY_START.iter().any(|usual| line.contains(usual)));
    let errors: Vec<_> = errors.collect();
    let has = |what: &str| errors.iter().any(|line| line.contains(what));
    if has("authenticate timed out") {
        let message = errors.join("; ");
        SupervisorError::Silent { image, message }
    } else if has("failed to fetch mon config") {
        let user = spec.user.clone();
        SupervisorError::Denied { image, user }
    } else if has("netlink connect failed: Object busy") {
        SupervisorError::Taken { image }
    } else if errors.is_empty() {
        if exit.and_then(WaitIdStatus::exit_status) == Some(FAILED) {
            return SupervisorError::Missing { image };
        }
        let message = match exit.and_then(WaitIdStatus::terminating_signal) {
            Some(signal) => format!("it was killed by signal {signal} as it started"),
            None => "it ended without a message".to_owned(),
        };
        SupervisorError::Failed { image, message }
    } else {
        let message = errors.join("; ");
        SupervisorError::Failed { image, message }
    }
}

/// The line without time, thread and level, if it has those; none if its level is not an
/// error's.
fn without_prefix(line: &str) -> &str {
    let (time, rest) = first_word(line);
    if !time.starts_with("20") || !time.contains('T') {
        return line.trim();
    }
    let (_thread, rest) = first_word(rest);
    let (level, rest) = first_word(rest);
    if level.parse::<u8>().is_ok_and(|level| level > 0) {
        return "";
    }
    rest.trim()
}

fn first_word(text: &str) -> (&str, &str) {
    let text = text.trim_start();
    text.split_once(' ').unwrap_or((text, ""))
}
