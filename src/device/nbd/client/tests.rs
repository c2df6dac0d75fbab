//! Against nbdkit and qemu-nbd.

use std::{
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use tempfile::TempDir;

use super::*;

/// A server, until it goes out of scope.
pub(in crate::device::nbd) struct Running {
    server: Child,
    dir: TempDir,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

impl Running {
    /// Starts a server of an image of `bytes` with the export name `disk`; SOCKET, IMAGE and
    /// DIR in its arguments are replaced by paths.
    pub(in crate::device::nbd) fn start(command: &str, bytes: u64) -> Self {
        let dir = TempDir::new().unwrap();
        let images = dir.path().join("images");
        std::fs::create_dir(&images).unwrap();
        let image = std::fs::File::create(images.join("disk")).unwrap();
        image.set_len(bytes).unwrap();
        let words = |path: PathBuf| path.to_str().unwrap().to_owned();
        let command = command
            .replace("SOCKET", &words(dir.path().join("s")))
            .replace("IMAGE", &words(images.join("disk")))
            .replace("DIR", &words(images));
        let mut words = command.split(' ');
        let server = Command::new(words.next().unwrap())
            .args(words)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let running = Self { server, dir };
        let deadline = Instant::now() + Duration::from_secs(30);
        while UnixStream::connect(running.socket()).is_err() {
            assert!(Instant::now() < deadline, "{command} does not listen");
            std::thread::yield_now();
        }
        running
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    pub(in crate::device::nbd) fn export(&self, name: &str) -> Export {
        let server = Server::unix(self.socket().to_str().unwrap()).unwrap();
        Export::new(server, name).unwrap()
    }
}

/// A connection, as the kernel's driver has it or not, and its other end.
pub(in crate::device::nbd) fn pair(taken: bool) -> (Connection, OwnedFd) {
    let (socket, other) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    let limit = taken.then_some(HANDSHAKE_TIMEOUT);
    sockopt::set_socket_timeout(&socket, Timeout::Send, limit).unwrap();
    (Connection { socket }, other)
}

pub(in crate::device::nbd) const NBDKIT: &str = "nbdkit -f -U SOCKET file dir=DIR";
const QEMU: &str = "qemu-nbd -t -e 4 -f raw -x disk -k SOCKET IMAGE";

#[test]
fn nbdkit_and_qemu_nbd_report_their_exports() {
    for command in [NBDKIT, QEMU] {
        let running = Running::start(command, 3 << 20);
        let export = running.export("disk");
        let seen = query(&export).unwrap();
        let (connection, info) = Connection::open(&export).unwrap();
        assert_eq!(seen, info);
        assert_eq!(info.bytes, 3 << 20);
        assert_eq!(info.flags & handshake::flags::READ_ONLY, 0);
        assert!(connection.is_alive() && !connection.is_taken());
        let error = query(&running.export("other")).unwrap_err();
        assert!(
            matches!(
                error,
                ConnectError::Handshake(HandshakeError::NoExport { .. })
            ),
            "{error:?}"
        );
        drop(running);
        assert!(!connection.is_alive());
        assert!(matches!(query(&export), Err(ConnectError::Connect(_))));
    }
}

#[test]
fn a_read_only_export_is_reported_and_a_shut_connection_is_dead() {
    let running = Running::start("nbdkit -f -r -U SOCKET file dir=DIR", 1 << 20);
    let (connection, info) = Connection::open(&running.export("disk")).unwrap();
    assert_ne!(info.flags & handshake::flags::READ_ONLY, 0);
    connection.shut();
    assert!(!connection.is_alive());
}

#[test]
fn a_silent_server_times_out() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("s");
    let _listener = UnixListener::bind(&path).unwrap();
    let server = Server::unix(path.to_str().unwrap()).unwrap();
    let mut timed = Timed::connect(&server).unwrap();
    timed.deadline = Instant::now();
    let error = handshake::go(&mut timed, "x").unwrap_err();
    assert!(
        matches!(&error, HandshakeError::Io(io) if io.kind() == io::ErrorKind::TimedOut),
        "{error:?}"
    );
}
