//! Connections to NBD servers, made ready for the kernel.
//!
//! Blocking code for a lane, and never for longer than its patience: a server
//! that hangs in the handshake, or drips it byte by byte, is given up, and with
//! the socket everything of it is gone.

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

/// How long a server may take for a whole handshake. A name is looked up by the
/// C library, with a time limit of its own (resolv.conf(5)).
pub const PATIENCE: Duration = Duration::from_secs(10);

/// A socket in its transmission phase.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Nobody answers.
    #[error("cannot connect to the server")]
    Connect(#[source] io::Error),
    /// Somebody answers, and not as hoped.
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

    /// Whether both ends still talk: false once either has shut the socket
    /// down, as the kernel's driver does with one that it gives up.
    pub fn is_alive(&self) -> bool {
        let gone = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR | PollFlags::NVAL;
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        // A poll that fails tells nothing against the socket.
        let polled = poll(&mut fds, Some(&Timespec::default()));
        polled.is_err() || !fds[0].revents().intersects(gone)
    }

    /// Whether the kernel's driver uses this socket, after it was offered one.
    /// It drops what it has no need for and says nothing, neither then nor to
    /// `NBD_CMD_STATUS`; but on what it takes it sets the device's request timeout
    /// as the time limit of sends (drivers/block/nbd.c, `nbd_reconnect_socket`,
    /// since Linux 4.15). A kernel that did not would make connections look like
    /// an earlier agent's: they would live, and refuse to grow.
    pub fn is_taken(&self) -> bool {
        sockopt::socket_timeout(&self.socket, Timeout::Send).is_ok_and(|limit| limit.is_some())
    }

    /// Ends the connection for everybody who has this socket, the kernel too.
    pub fn shut(&self) {
        // One that is not connected any more needs no shutting.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Asks the server what the export is, without using it.
pub fn look(export: &Export) -> Result<ExportInfo, ConnectError> {
    let mut timed = Timed::connect(export.server())?;
    Ok(handshake::look(&mut timed, export.name())?)
}

/// A socket whose reads and writes end, all together, before a deadline; the
/// last of them may begin just before it and take [`PATIENCE`] of its own.
struct Timed {
    socket: OwnedFd,
    deadline: Instant,
}

impl Timed {
    fn connect(server: &Server) -> Result<Self, ConnectError> {
        let deadline = Instant::now() + PATIENCE;
        let socket = match server {
            Server::Tcp { host, port } => tcp(host, *port, deadline),
            Server::Unix { socket } => unix(socket),
        };
        let socket = socket.map_err(|error| ConnectError::Connect(timed_out(error)))?;
        for which in [Timeout::Recv, Timeout::Send] {
            sockopt::set_socket_timeout(&socket, which, Some(PATIENCE))
                .map_err(|errno| ConnectError::Connect(errno.into()))?;
        }
        Ok(Self { socket, deadline })
    }

    /// Without the time limits, which would bind the kernel's driver as well.
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

/// A time limit that has passed shows as EAGAIN (socket(7), SO_RCVTIMEO).
fn timed_out(error: io::Error) -> io::Error {
    if matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    ) {
        let why = format!("no answer within {} s", PATIENCE.as_secs());
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
                // Requests are small and none waits for another.
                stream.set_nodelay(true)?;
                // A server whose machine has gone sends no FIN.
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
    // Bounds the wait for a server that does not accept (unix(7)).
    sockopt::set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE))?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

#[cfg(test)]
pub(super) mod tests;
