//! Processes by descriptors (pidfd_open(2)), which never mean another process
//! that has the same number later.

use std::{io, os::fd::OwnedFd};

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::{Interest, unix::AsyncFd};

/// The process of that id, readable for the runtime of tokio when it has ended.
pub fn watched(pid: Pid) -> io::Result<AsyncFd<OwnedFd>> {
    let pidfd = pidfd_open(pid, PidfdFlags::NONBLOCK)?;
    // SAFETY: the owned descriptor is open, and the same one, until it is dropped.
    Ok(unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }?)
}
