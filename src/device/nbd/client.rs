//! Connections to NBD servers: the handshake, before the kernel takes the socket.
//!
//! Blocking code for a lane, with a timeout: a server that hangs in the handshake, or
//! sends it byte by byte, fails it, and closing the socket leaves nothing behind.

use std::{
    io::{self, Read, Write},
    net::{TcpStream, ToSocketAddrs as _},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{
        AddressFamily, RecvFlags, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType,
        connect, recv, send, shutdown, socket_with,
        sockopt::{self, Timeout},
    },
};

use super::handshake::{self, ExportInfo, HandshakeError};
use crate::nbd::{Export, Server};

/// How long a whole handshake may take. The C library looks names up before it, with a
/// time limit of its own (resolv.conf(5)).
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// A socket in its transmission phase.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No server answers.
    ///
    /// Remedy: start the server, or open its port (10809) to the nodes; `nbdinfo nbd://SERVER`
    /// tries it.
    #[error("cannot connect to the server")]
    Connect(#[source] io::Error),
    /// The handshake failed.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
}

impl Connection {
    /// Connects to the export and enters the transmission phase.
    pub fn open(export: &Export) -> Result<(Self, ExportInfo), ConnectError> {
        let mut timed = Timed::connect(export.server())?;
        let info = handshake::go(&mut timed, export.name())?;
        let socket = timed.for_the_kernel().map_err(ConnectError::Connect)?;
        Ok((Self { socket }, info))
    }

    /// Whether the connection is open: false once either end has shut the socket
    /// down, as the kernel's driver does with a dead one.
    pub fn is_alive(&self) -> bool {
        let closed = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR | PollFlags::NVAL;
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        // A failed poll says nothing about the socket.
        let polled = poll(&mut fds, Some(&Timespec::default()));
        polled.is_err() || !fds[0].revents().intersects(closed)
    }

    /// Whether the kernel's driver took this socket when the agent offered it. The driver
    /// drops a socket that it does not need without an error, and `NBD_CMD_STATUS` does not
    /// report that. But on a socket that it takes, it sets the device's request timeout as
    /// the send timeout (drivers/block/nbd.c, `nbd_reconnect_socket`, since Linux 4.15). On
    /// an older kernel connections would look like an earlier agent's: they would work, but
    /// could not grow.
    pub fn is_taken(&self) -> bool {
        sockopt::socket_timeout(&self.socket, Timeout::Send).is_ok_and(|limit| limit.is_some())
    }

    /// Shuts the connection down for every process with this socket, and for the kernel.
    pub fn shut(&self) {
        // Fails only on a socket that is not connected any more.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Asks the server for the export's size and flags, without entering transmission.
pub fn query(export: &Export) -> Result<ExportInfo, ConnectError> {
    let mut timed = Timed::connect(export.server())?;
    Ok(handshake::query(&mut timed, export.name())?)
}

/// A socket whose reads and writes share a deadline; the last of them may begin just
/// before it and take another [`HANDSHAKE_TIMEOUT`].
struct Timed {
    socket: OwnedFd,
    deadline: Instant,
}

impl Timed {
    fn connect(server: &Server) -> Result<Self, ConnectError> {
        let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
        let socket = match server {
            Server::Tcp { host, port } => tcp(host, *port, deadline),
            Server::Unix { socket } => unix(socket),
        };
        let socket = socket.map_err(|error| ConnectError::Connect(timed_out(error)))?;
        for which in [Timeout::Recv, Timeout::Send] {
            sockopt::set_socket_timeout(&socket, which, Some(HANDSHAKE_TIMEOUT))
                .map_err(|errno| ConnectError::Connect(errno.into()))?;
        }
        Ok(Self { socket, deadline })
    }

    /// Removes the time limits, which would apply to the kernel's driver as well.
    fn for_the_kernel(self) -> io::Result<OwnedFd> {
        for which in [Timeout::Recv, Timeout::Send] {
            sockopt::set_socket_timeout(&self.socket, which, None)?;
        }
        Ok(self.socket)
    }

    fn in_time(&self) -> io::Result<()> {
        if Instant::now() < self.deadline {
            Ok(())
        } else {
            Err(io::ErrorKind::TimedOut.into())
        }
    }
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.in_time()?;
        recv(&self.socket, buffer, RecvFlags::empty())
            .map(|(read, _)| read)
            .map_err(|errno| timed_out(errno.into()))
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.in_time()?;
        send(&self.socket, bytes, SendFlags::NOSIGNAL).map_err(|errno| timed_out(errno.into()))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An expired time limit is EAGAIN (socket(7), SO_RCVTIMEO).
fn timed_out(error: io::Error) -> io::Error {
    if matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    ) {
        let why = format!("no answer within {} s", HANDSHAKE_TIMEOUT.as_secs());
        return io::Error::new(io::ErrorKind::TimedOut, why);
    }
    error
}

/// Tries the addresses of a name in turn.
fn tcp(host: &str, port: u16, deadline: Instant) -> io::Result<OwnedFd> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host's name has no address");
    for address in (host, port).to_socket_addrs()? {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => {
                // Requests are small, and must not wait for one another (Nagle's algorithm).
                stream.set_nodelay(true)?;
                // A server whose machine has failed sends no FIN.
                sockopt::set_socket_keepalive(&stream, true)?;
                return Ok(stream.into());
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn unix(path: &str) -> io::Result<OwnedFd> {
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // Limits the wait for a server that does not accept (unix(7)).
    sockopt::set_socket_timeout(&socket, Timeout::Send, Some(HANDSHAKE_TIMEOUT))?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

#[cfg(test)]
pub(super) mod tests;
