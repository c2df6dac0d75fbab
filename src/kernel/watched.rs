//! Sockets that tokio's epoll watches.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
};

use tokio::io::{Interest, unix::AsyncFd};

/// Watches a socket for `interest` alone; tokio's own types always watch both directions.
pub fn watch<T: AsRawFd + From<OwnedFd>>(socket: T, interest: Interest) -> io::Result<AsyncFd<T>> {
    // SAFETY: a type that is made of an owned descriptor keeps it open, and `AsyncFd` keeps
    // the socket until it has deregistered the descriptor.
    let watched = unsafe { AsyncFd::register_with_interest(socket, interest) };
    watched.map_err(|failed| failed.into_parts().1)
}
