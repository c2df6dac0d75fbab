//! Descriptors of processes (pidfd_open(2)), which never refer to a later process
//! with the same id.

use std::{fs, io, os::fd::OwnedFd};

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::{Interest, unix::AsyncFd};

/// The process of that id as a descriptor that tokio reports as readable when the process
/// has ended.
pub fn watched(pid: Pid) -> io::Result<AsyncFd<OwnedFd>> {
    let pidfd = pidfd_open(pid, PidfdFlags::NONBLOCK)?;
    // SAFETY: the owned descriptor stays open, and the same, until it is dropped.
    Ok(unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }?)
}

/// Whether the process is exiting, and no longer runs its program; it may still have files
/// open. It must not have been reaped.
pub fn is_exiting(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    stat.is_ok_and(|stat| flags(&stat).is_some_and(|flags| flags & PF_EXITING != 0))
}

/// Whether the main thread of the process runs, or waits for a disk or a page: it is about
/// to do something else.
pub fn is_running(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    stat.is_ok_and(|stat| matches!(words(&stat).next(), Some("R" | "D")))
}

/// include/linux/sched.h
const PF_EXITING: u32 = 4;

/// The ninth word of `/proc/PID/stat` (proc(5)).
fn flags(stat: &str) -> Option<u32> {
    words(stat).nth(6)?.parse().ok()
}

/// The words of `/proc/PID/stat` from the third, the state, on. The second word, in
/// parentheses, may have any characters.
fn words(stat: &str) -> impl Iterator<Item = &str> {
    let rest = stat.rsplit_once(')').map(|(_, rest)| rest);
    rest.unwrap_or_default().split_ascii_whitespace()
}

#[cfg(test)]
mod tests {
    use rustix::process::{WaitId, WaitIdOptions, waitid};

    use super::*;

    #[test]
    fn only_a_process_not_yet_reaped_is_exiting() {
        assert!(!is_exiting(rustix::process::getpid()));
        let mut child = crate::kernel::exec::command("true", &[""; 0])
            .spawn()
            .unwrap();
        let pid = Pid::from_child(&child);
        waitid(
            WaitId::Pid(pid),
            WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
        )
        .unwrap();
        assert!(is_exiting(pid));
        child.wait().unwrap();
        assert!(!is_exiting(pid) && !is_running(pid));
        assert!(is_running(rustix::thread::gettid()));
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194564 1 2";
        assert_eq!(flags(stat), Some(4_194_564));
        assert_eq!(flags("7 (a"), None);
    }
}
