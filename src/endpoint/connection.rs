//! The server's side of a connection.
//!
//! tokio's `UnixStream` always waits for room to write, too. A socket gets such room each
//! time the client reads an answer, and then wakes the runtime thread for nothing. So
//! [`ServedConnection`] waits for it only after a write that found none.

use std::{
    io::{self, IoSlice, Read as _, Write as _},
    net::Shutdown,
    os::unix::net::{UnixListener, UnixStream},
    pin::Pin,
    task::{Context, Poll, ready},
};

use futures_util::{Stream, stream};
use rustix::net::{SocketFlags, accept_with};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf, unix::AsyncFd};
use tonic::transport::server::Connected;

use crate::kernel::watched::watch;

/// A connection that a client has made.
#[derive(Debug)]
pub(super) struct ServedConnection {
    /// Watched for data to read.
    socket: AsyncFd<UnixStream>,
    /// A duplicate that is watched for room to write, while a write waits.
    full: Option<AsyncFd<UnixStream>>,
}

/// The connections that clients make, without end.
pub(super) fn incoming(
    listener: UnixListener,
) -> io::Result<impl Stream<Item = io::Result<ServedConnection>>> {
    listener.set_nonblocking(true)?;
    let listener = watch(listener, Interest::READABLE)?;
    Ok(stream::unfold(listener, async |listener| {
        let accepted = listener.async_io(Interest::READABLE, |listener| {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            Ok(accept_with(listener, flags)?)
        });
        let connection = accepted
            .await
            .and_then(|socket| ServedConnection::new(socket.into()));
        Some((connection, listener))
    }))
}

impl ServedConnection {
    fn new(socket: UnixStream) -> io::Result<Self> {
        let socket = watch(socket, Interest::READABLE)?;
        Ok(Self { socket, full: None })
    }

    /// Repeats a write until it finds room.
    fn poll_send(
        &mut self,
        context: &mut Context<'_>,
        mut send: impl FnMut(&UnixStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            match send(self.socket.get_ref()) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.full.is_none() {
                        let duplicate = self.socket.get_ref().try_clone()?;
                        self.full = Some(watch(duplicate, Interest::WRITABLE)?);
                    }
                    if let Some(full) = &self.full {
                        // Cleared before the next try, so that no later room is missed.
                        ready!(full.poll_write_ready(context))?.clear_ready();
                    }
                }
                written => {
                    self.full = None;
                    return Poll::Ready(written);
                }
            }
        }
    }
}

impl Connected for ServedConnection {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for ServedConnection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let mut readable = ready!(self.socket.poll_read_ready(context))?;
            let room = buffer.initialize_unfilled();
            match self.socket.get_ref().read(room) {
                Ok(length) => {
                    // More data makes it readable anew (epoll(7), EPOLLET).
                    if 0 < length && length < room.len() {
                        readable.clear_ready();
                    }
                    buffer.advance(length);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => readable.clear_ready(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for ServedConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_send(context, |mut socket| socket.write(bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_send(context, |mut socket| socket.write_vectored(slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.socket.get_ref().shutdown(Shutdown::Write))
    }
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// More than a socket holds, to and fro.
    const BYTES: usize = 8 << 20;

    #[tokio::test]
    async fn bytes_pass_in_both_directions_though_the_socket_fills_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let mut accepted = Box::pin(incoming(listener).unwrap());
        let mut client = tokio::net::UnixStream::connect(&path).await.unwrap();
        let mut server = accepted.next().await.unwrap().unwrap();

        let sent: Vec<u8> = (0..=250).cycle().take(BYTES).collect();
        let mut answer = vec![0; BYTES];
        let echo = async {
            let mut received = vec![0; BYTES];
            server.read_exact(&mut received).await.unwrap();
            server.write_all(&received).await.unwrap();
            server.shutdown().await.unwrap();
        };
        let ask = async {
            client.write_all(&sent).await.unwrap();
            client.read_exact(&mut answer).await.unwrap();
            assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
        };
        tokio::join!(echo, ask);
        assert_eq!(answer, sent);
        assert!(server.full.is_none());
        drop(client);
        assert_eq!(server.read(&mut [0]).await.unwrap(), 0);
    }
}
