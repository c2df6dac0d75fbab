//! The driver's process, which is the one that listens on the socket: its CPU time and
//! memory, by procfs.

use std::{fs, io, path::PathBuf};

use rustix::{
    param::clock_ticks_per_second,
    process::{Pid, getpid},
};
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;

use crate::endpoint::Endpoint;

/// A process at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Process {
    pub pid: i32,
    /// When it began, in ticks: tells it from a later one with the same id.
    began: u64,
    cpu_ticks: u64,
    children_ticks: u64,
    pub usage: Usage,
}

/// What a process has.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Usage {
    /// Memory of its own (`RssAnon`).
    pub anonymous_kib: u64,
    pub resident_kib: u64,
    /// The largest so far.
    pub peak_resident_kib: u64,
    pub threads: u64,
    /// None where `/proc/PID/fd` may not be read.
    pub descriptors: Option<usize>,
}

/// What a process used from one moment to another.
#[derive(Debug, Deserialize, Serialize)]
pub struct ProcessUse {
    pub pid: i32,
    pub cpu_seconds: f64,
    /// Of child processes that ended meanwhile, such as mkfs.
    pub children_cpu_seconds: f64,
    pub before: Usage,
    pub after: Usage,
}

impl Process {
    /// The one that listens on `endpoint`'s socket; the error is a sentence.
    pub async fn of_socket(endpoint: &Endpoint) -> Result<Self, String> {
        let socket = UnixStream::connect(endpoint.path()).await;
        let peer = socket.and_then(|socket| socket.peer_cred());
        let peer = peer.map_err(|error| format!("cannot ask whose socket it is: {error}"))?;
        match peer.pid().and_then(Pid::from_raw) {
            Some(pid) => Self::read(pid).map_err(|error| {
                let pid = pid.as_raw_nonzero();
                format!("cannot read /proc/{pid}: {error}")
            }),
            None => Err("the driver's process is not visible from this PID namespace".to_owned()),
        }
    }

    /// uringctl's own.
    pub fn own() -> io::Result<Self> {
        Self::read(getpid())
    }

    fn read(pid: Pid) -> io::Result<Self> {
        let dir = PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
        let stat = fs::read_to_string(dir.join("stat"))?;
        let status = fs::read_to_string(dir.join("status"))?;
        let descriptors = fs::read_dir(dir.join("fd")).map(Iterator::count).ok();
        Self::parse(pid.as_raw_nonzero().get(), &stat, &status, descriptors)
            .ok_or_else(|| io::Error::other("stat or status has another form"))
    }

    /// From `/proc/PID/stat` and `/proc/PID/status` (proc(5)).
    fn parse(pid: i32, stat: &str, status: &str, descriptors: Option<usize>) -> Option<Self> {
        // Behind the program's name, which may have any characters: field 3.
        let (_, rest) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        let value = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key))?;
            line.split_ascii_whitespace().next()?.parse().ok()
        };
        Some(Self {
            pid,
            began: field(22)?,
            cpu_ticks: field(14)? + field(15)?,
            children_ticks: field(16)? + field(17)?,
            usage: Usage {
                anonymous_kib: value("RssAnon:")?,
                resident_kib: value("VmRSS:")?,
                peak_resident_kib: value("VmHWM:")?,
                threads: value("Threads:")?,
                descriptors,
            },
        })
    }

    /// What it used since `before`; None if this is another process.
    pub fn since(self, before: Self) -> Option<ProcessUse> {
        if (self.pid, self.began) != (before.pid, before.began) {
            return None;
        }
        Some(ProcessUse {
            pid: self.pid,
            cpu_seconds: seconds(self.cpu_ticks.saturating_sub(before.cpu_ticks)),
            children_cpu_seconds: seconds(
                self.children_ticks.saturating_sub(before.children_ticks),
            ),
            before: before.usage,
            after: self.usage,
        })
    }
}

#[allow(clippy::cast_precision_loss)]
fn seconds(ticks: u64) -> f64 {
    ticks as f64 / clock_ticks_per_second().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tx\nVmHWM:\t  900 kB\nVmRSS:\t  800 kB\nRssAnon:\t 700 kB\n\
                          Threads:\t3\n";

    #[test]
    fn procfs_is_parsed() {
        let stat = "7 (a) R (b) S 1 7 7 0 -1 4194564 1 2 3 4 100 20 30 4 20 0 3 0 12345 6 7";
        let process = Process::parse(7, stat, STATUS, Some(9)).unwrap();
        assert_eq!((process.cpu_ticks, process.children_ticks), (120, 34));
        assert_eq!(process.began, 12345);
        let usage = &process.usage;
        assert_eq!((usage.anonymous_kib, usage.resident_kib), (700, 800));
        assert_eq!((usage.peak_resident_kib, usage.threads), (900, 3));
        assert_eq!(Process::parse(7, "7 (a) S 1", STATUS, None), None);
        assert_eq!(Process::parse(7, stat, "Name: x", None), None);

        let mut later = process.clone();
        later.cpu_ticks += 50;
        let used = later.clone().since(process.clone()).unwrap();
        assert!(used.cpu_seconds > 0.0 && used.children_cpu_seconds == 0.0);
        later.began += 1;
        assert!(later.since(process).is_none(), "another process");
    }

    #[tokio::test]
    async fn the_listener_of_a_socket_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("csi.sock");
        let endpoint: Endpoint = path.display().to_string().parse().unwrap();
        assert!(Process::of_socket(&endpoint).await.is_err());
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let found = Process::of_socket(&endpoint).await.unwrap();
        assert_eq!(found.pid, getpid().as_raw_nonzero().get());
        assert!(found.usage.descriptors.is_some_and(|count| count > 0));
    }
}
