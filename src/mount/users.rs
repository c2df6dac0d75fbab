//! The processes that keep a mount busy.
//!
//! Looked for only after umount2(2) refused with `EBUSY`, for the text of the answer, since
//! it reads files of every process. The list may be incomplete: processes end meanwhile,
//! and one that has a file of the mount only mapped into its memory is not found.

use std::{fmt, fs};

use rustix::fs::{AtFlags, CWD, statx};

use super::path_kind::{ANY_MNT_ID, MountId};

/// A process, as an operator finds it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OpenerProcess {
    /// Its id in our PID namespace.
    pub pid: u32,
    /// `/proc/PID/comm`.
    pub name: String,
}

impl fmt::Display for OpenerProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} ({})", self.pid, self.name)
    }
}

impl OpenerProcess {
    /// All processes.
    pub fn all() -> Vec<Self> {
        names("/proc")
            .filter_map(|name| name.parse().ok())
            .map(|pid| Self {
                pid,
                name: fs::read_to_string(format!("/proc/{pid}/comm"))
                    .unwrap_or_default()
                    .trim_end()
                    .to_owned(),
            })
            .collect()
    }

    /// The links of its open files.
    pub fn open_files(&self) -> impl Iterator<Item = String> + use<> {
        let directory = format!("/proc/{}/fd", self.pid);
        names(&directory).map(move |fd| format!("{directory}/{fd}"))
    }

    /// Whether it has a working or root directory or an open file in the mount.
    fn uses(&self, mount: MountId) -> bool {
        let own = ["cwd", "root"].map(|link| format!("/proc/{}/{link}", self.pid));
        own.into_iter().chain(self.open_files()).any(|link| {
            // Without a question to the server of a file that is on a network.
            let flags = AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
            statx(CWD, link, flags, ANY_MNT_ID).is_ok_and(|stat| MountId::of(&stat) == mount)
        })
    }
}

/// The processes that have a directory or file of the mount open.
pub fn users(mount: MountId) -> Vec<OpenerProcess> {
    let all = OpenerProcess::all().into_iter();
    all.filter(|process| process.uses(mount)).collect()
}

/// The names in a directory of procfs or sysfs; none if it cannot be read.
pub fn names(directory: &str) -> impl Iterator<Item = String> + use<> {
    fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
}
