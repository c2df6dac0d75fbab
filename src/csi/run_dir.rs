//! One agent for each run directory.
//!
//! Two agents with one `--run-dir` would both write the same records. So an agent locks
//! a file in it (flock(2)), writes its pid there, and touches the file for as long as its
//! runtime thread runs.
//!
//! A held lock alone proves nothing: a killed agent with a thread in an
//! uninterruptible sleep keeps it for as long as the thread sleeps. A successor takes
//! over from an owner that is dying, and from one that has not touched the file for
//! [`SILENT_FOR`]. It waits for a touch rather than asking the owner's socket, because
//! the owner may run in another container, where paths mean other files.
//!
//! A successor takes over by replacing the lock file with its own; an owner that was
//! stopped and continues detects that. The successor locks the directory itself
//! meanwhile, so that of several successors one takes over and the others wait for it.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

use crate::volume::Heartbeat;

/// How often the owner touches the file.
const TOUCH_EVERY: Duration = Duration::from_secs(5);
/// An owner that has not touched the file for this long has stalled. It is longer than
/// the time that an agent has for its running calls after SIGTERM.
const SILENT_FOR: Duration = Duration::from_secs(30);
/// How often a successor retries a held lock.
const RETRY_EVERY: Duration = Duration::from_millis(50);
/// The lock file's name.
const FILE: &str = "agent.lock";

/// Why an agent cannot use a run directory.
#[derive(Debug, thiserror::Error)]
pub enum RunDirError {
    /// Another agent uses it.
    #[error("{dir} is in use by another agent{}; stop it, or choose another --run-dir", of_pid(*pid))]
    InUse {
        /// The run directory.
        dir: PathBuf,
        /// The other agent's pid in its own pid namespace, if known.
        pid: Option<u32>,
    },
    /// The lock could not be taken.
    ///
    /// Remedy: create the directory of --run-dir for this user, on a tmpfs such as /run.
    #[error("cannot {what} {path}")]
    Io {
        /// The step that failed.
        what: &'static str,
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
}

fn of_pid(pid: Option<u32>) -> String {
    pid.map(|pid| format!(" with pid {pid}"))
        .unwrap_or_default()
}

/// The content of the lock file.
#[derive(Debug, Serialize, Deserialize)]
struct LockOwner {
    pid: u32,
    /// The owner's pid namespace: in another one the pid means another process.
    pid_namespace: PathBuf,
}

impl LockOwner {
    /// Whether the owner is certain to end: its main thread has ended, or SIGKILL is
    /// pending (proc_pid_status(5)).
    fn is_dying(&self) -> bool {
        pid_namespace().is_ok_and(|ours| ours == self.pid_namespace)
            && fs::read_to_string(format!("/proc/{}/status", self.pid))
                .is_ok_and(|status| is_dying(&status))
    }
}

fn pid_namespace() -> io::Result<PathBuf> {
    fs::read_link("/proc/self/ns/pid")
}

fn is_dying(status: &str) -> bool {
    const SIGKILL: u64 = 1 << (9 - 1);
    status.lines().any(|line| match line.split_once(':') {
        Some(("State", state)) => state.trim_start().starts_with(['Z', 'X']),
        Some(("SigPnd" | "ShdPnd", set)) => {
            u64::from_str_radix(set.trim(), 16).is_ok_and(|set| set & SIGKILL != 0)
        }
        _ => false,
    })
}

/// No step of a verb begins this long after the owner last touched the file: well before a
/// successor takes over.
const STALE_AFTER: Duration = Duration::from_secs(15);

/// A run directory that this agent owns until this is dropped.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    lock: File,
    heartbeat: Arc<Heartbeat>,
}

impl RunDir {
    /// Makes the directory if it is missing, and locks it.
    pub async fn lock(dir: &Path) -> Result<Self, RunDirError> {
        Self::lock_after(dir, SILENT_FOR).await
    }

    /// As [`RunDir::lock`]; takes over from an owner that has not touched the file for
    /// `silent_for`.
    async fn lock_after(dir: &Path, silent_for: Duration) -> Result<Self, RunDirError> {
        let path = dir.join(FILE);
        let failed = |what| {
            let path = path.clone();
            move |source| RunDirError::Io { what, path, source }
        };
        fs::create_dir_all(dir).map_err(failed("make the directory of"))?;
        let turn = File::open(dir).map_err(failed("open the directory of"))?;
        // Another successor may hold the lock while it waits for the owner.
        let until = Instant::now() + silent_for + SILENT_FOR;
        while !try_lock(&turn).map_err(failed("lock the directory of"))? {
            if Instant::now() > until {
                let dir = dir.to_owned();
                return Err(RunDirError::InUse { dir, pid: None });
            }
            sleep(RETRY_EVERY).await;
        }
        match File::open(&path) {
            Ok(before) => {
                let ended = outlast(&before, silent_for).await;
                if let Some(pid) = ended.map_err(failed("lock"))? {
                    let dir = dir.to_owned();
                    return Err(RunDirError::InUse { dir, pid });
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed("open")(error)),
        }
        let lock = replace(&path).map_err(failed("write"))?;
        Ok(Self {
            path,
            lock,
            heartbeat: Arc::new(Heartbeat::new(STALE_AFTER)),
        })
    }

    /// Beats while [`RunDir::keep`] touches the lock file.
    pub fn heartbeat(&self) -> Arc<Heartbeat> {
        Arc::clone(&self.heartbeat)
    }

    /// Touches the lock file for ever. Returns if another agent has taken the directory
    /// over, because this one was stopped for a while.
    pub async fn keep(&self) {
        while self.is_ours() {
            if let Err(error) = self.lock.set_modified(SystemTime::now()) {
                tracing::warn!(%error, path = %self.path.display(), "cannot touch the lock of the run directory");
            }
            self.heartbeat.beat();
            sleep(TOUCH_EVERY).await;
        }
    }

    fn is_ours(&self) -> bool {
        match (fs::metadata(&self.path), self.lock.metadata()) {
            (Ok(there), Ok(ours)) => (there.dev(), there.ino()) == (ours.dev(), ours.ino()),
            // An operator cleared the directory; no agent removes the file.
            _ => true,
        }
    }
}

/// Waits until the owner of `lock` has released it, is dying or has stalled: `None`.
/// `Some` if it is alive, with its pid if known.
async fn outlast(lock: &File, silent_for: Duration) -> io::Result<Option<Option<u32>>> {
    let owner: Option<LockOwner> = serde_json::from_reader(lock).ok();
    let touched = lock.metadata()?.modified()?;
    let until = Instant::now() + silent_for;
    while !try_lock(lock)? {
        if owner.as_ref().is_some_and(LockOwner::is_dying) || Instant::now() > until {
            tracing::warn!(
                ?owner,
                "taking the run directory over from an agent that has not ended"
            );
            break;
        }
        if lock.metadata()?.modified()? != touched {
            return Ok(Some(owner.map(|owner| owner.pid)));
        }
        sleep(RETRY_EVERY).await;
    }
    Ok(None)
}

/// Replaces the lock file at `path` with a locked one of this process.
fn replace(path: &Path) -> io::Result<File> {
    let owner = LockOwner {
        pid: std::process::id(),
        pid_namespace: pid_namespace()?,
    };
    let fresh = path.with_extension("new");
    let mut file = File::create(&fresh)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    match file.write_all(&serde_json::to_vec(&owner)?) {
        // Calls that unpublish and unstage need no more space, and this only shortens the next
        // agent's wait.
        Err(error) if error.kind() == io::ErrorKind::StorageFull => {
            tracing::warn!(%error, path = %path.display(), "cannot write the pid into the lock of the run directory");
        }
        written => written?,
    }
    fs::rename(&fresh, path)?;
    Ok(file)
}

/// Whether the lock was free; this process has it now.
fn try_lock(file: &File) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(dir: &Path) -> LockOwner {
        serde_json::from_slice(&fs::read(dir.join(FILE)).unwrap()).unwrap()
    }

    #[tokio::test]
    async fn a_directory_whose_owner_lives_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let owner = RunDir::lock(&dir.path().join("run")).await.unwrap();
        let dir = dir.path().join("run");
        assert_eq!(written(&dir).pid, std::process::id());

        let touching = async {
            loop {
                owner.lock.set_modified(SystemTime::now()).unwrap();
                sleep(RETRY_EVERY).await;
            }
        };
        let refused = tokio::select! {
            refused = RunDir::lock(&dir) => refused.unwrap_err(),
            () = touching => unreachable!(),
        };
        let said = refused.to_string();
        let pid = format!("pid {}", std::process::id());
        assert!(
            said.contains(&pid) && said.contains(dir.to_str().unwrap()),
            "{said}"
        );
        assert!(owner.is_ours());

        drop(owner);
        RunDir::lock(&dir).await.unwrap();
    }

    #[tokio::test]
    async fn an_owner_that_is_silent_is_replaced_once_and_sees_it() {
        let dir = tempfile::tempdir().unwrap();
        let silent = RunDir::lock(dir.path()).await.unwrap();
        let soon = Duration::from_millis(200);
        let (one, other) = tokio::join!(
            RunDir::lock_after(dir.path(), soon),
            RunDir::lock_after(dir.path(), soon)
        );
        // The second waited for the first, which does not touch its file here.
        let (one, other) = (one.unwrap(), other.unwrap());
        assert_ne!(one.is_ours(), other.is_ours());
        assert!(!silent.is_ours());
        silent.keep().await;
    }

    #[test]
    fn a_dying_process_is_recognised_by_its_status() {
        let own = fs::read_to_string("/proc/self/status").unwrap();
        assert!(!is_dying(&own));
        assert!(is_dying(
            "Name:\tagent\nState:\tZ (zombie)\nSigPnd:\t0000000000000000"
        ));
        assert!(is_dying(
            "State:\tD (disk sleep)\nSigPnd:\t0000000000000000\nShdPnd:\t0000000000000100"
        ));
        assert!(!is_dying(
            "State:\tD (disk sleep)\nSigPnd:\t0000000000000200\nShdPnd:\t0000000000000000"
        ));
    }
}
