//! Serving gRPC on a unix socket that has exactly one owner.
//!
//! A socket file outlives its process, and a process stuck in the kernel can
//! outlive its agent with the listening socket still open. So neither the file
//! nor a successful connect proves that a server is alive: only an answer to
//! `Probe` within a second does. A socket whose server answers is kept; any other
//! is replaced by renaming the new one over it, so that the path always has a socket, and
//! with the right mode.

use std::{
    fmt,
    io::{self, ErrorKind},
    os::unix::{
        fs::{FileTypeExt, MetadataExt, PermissionsExt},
        net::UnixListener,
    },
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::{
    service::Routes,
    transport::{Channel, Server, Uri},
};
use tower::service_fn;

use crate::proto::{
    DESCRIPTORS,
    csi::{ProbeRequest, identity_client::IdentityClient},
};

mod connection;

/// How long a socket's owner may take to answer `Probe` before it counts as dead.
const ALIVE_WITHIN: Duration = Duration::from_secs(1);

/// The address of a socket, `unix:///absolute/path` (`unix:/path` and a bare absolute
/// path mean the same).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    path: PathBuf,
}

/// Why an agent cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The endpoint does not name a unix socket.
    ///
    /// Remedy: write unix:///path/to/socket.
    #[error("endpoint {0:?} is not of the form unix:///path/to/socket")]
    BadEndpoint(String),
    /// Another process serves there.
    #[error("a live process serves on {path}; stop it, or choose another endpoint")]
    Live { path: PathBuf },
    /// The path is a file that is no socket.
    #[error("{path} is a file, not a socket, and stays; choose another endpoint")]
    NotASocket { path: PathBuf },
    /// The socket could not be made.
    ///
    /// Remedy: create the socket's directory, and let this user write to it.
    #[error("cannot {what} {path}")]
    Socket {
        /// The step that failed, a verb phrase before the path.
        what: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// The server itself failed.
    ///
    /// Remedy: read the program's log, and restart it.
    #[error("the gRPC server stopped")]
    Server(#[from] tonic::transport::Error),
    /// The interface's descriptors could not be offered for reflection.
    ///
    /// Remedy: report a defect.
    #[error("cannot offer gRPC reflection")]
    Reflection(#[from] tonic_reflection::server::Error),
}

impl FromStr for Endpoint {
    type Err = ServeError;

    fn from_str(text: &str) -> Result<Self, ServeError> {
        let path = text
            .strip_prefix("unix://")
            .or_else(|| text.strip_prefix("unix:"))
            .unwrap_or(text);
        if !path.starts_with('/') || path.ends_with('/') {
            return Err(ServeError::BadEndpoint(text.to_owned()));
        }
        Ok(Self { path: path.into() })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unix://{}", self.path.display())
    }
}

impl Endpoint {
    /// The socket's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A channel to the server of this socket, connected at its first use. Each channel is
    /// a connection of its own.
    pub fn channel(&self) -> Channel {
        let path = self.path.clone();
        // The connector below ignores it; servers see the authority that gRPC's clients in
        // Go send for a unix socket.
        tonic::transport::Endpoint::from_static("http://localhost").connect_with_connector_lazy(
            service_fn(move |_: Uri| {
                let path = path.clone();
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            }),
        )
    }

    /// Whether a live process serves the Identity service here.
    async fn is_alive(&self) -> bool {
        let mut identity = IdentityClient::new(self.channel());
        let answer = tokio::time::timeout(ALIVE_WITHIN, identity.probe(ProbeRequest {})).await;
        // An error code is an answer too, unless the client made it of an error of its
        // own: no process listens, or the one that did is ending and has closed the
        // connection.
        match answer {
            Ok(Ok(_)) => true,
            Ok(Err(status)) => std::error::Error::source(&status).is_none(),
            Err(_elapsed) => false,
        }
    }

    fn failed(&self, what: &'static str) -> impl FnOnce(io::Error) -> ServeError + use<> {
        let path = self.path.clone();
        move |source| ServeError::Socket { what, path, source }
    }

    /// Replaces the socket by one of this process, mode 0600; fails while a live process
    /// serves.
    pub async fn bind(&self) -> Result<Listener, ServeError> {
        self.refuse_live().await?;
        self.take()
    }

    /// Fails while a live process serves, or if the file there is no socket.
    pub async fn refuse_live(&self) -> Result<(), ServeError> {
        let path = || self.path.clone();
        match std::fs::symlink_metadata(&self.path) {
            Ok(found) if !found.file_type().is_socket() => {
                Err(ServeError::NotASocket { path: path() })
            }
            Ok(_) if self.is_alive().await => Err(ServeError::Live { path: path() }),
            Ok(_) => Ok(()),
            Err(absent) if absent.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) => Err(self.failed("look at")(error)),
        }
    }

    /// Replaces the socket by one of this process, mode 0600. The caller has found that no
    /// live process serves.
    pub fn take(&self) -> Result<Listener, ServeError> {
        let failed = |what| self.failed(what);
        if let Some(parent) = self.path.parent() {
            std::fs::create_dir_all(parent).map_err(failed("make the directory of"))?;
        }
        let mut fresh = self.path.clone().into_os_string();
        fresh.push(format!(".{}", std::process::id()));
        let fresh = PathBuf::from(fresh);
        // A file that an earlier process with this id left.
        let _ = std::fs::remove_file(&fresh);
        let listener = UnixListener::bind(&fresh).map_err(failed("bind"))?;
        std::fs::set_permissions(&fresh, std::fs::Permissions::from_mode(0o600))
            .and_then(|()| std::fs::rename(&fresh, &self.path))
            .map_err(failed("put in place"))?;
        let inode = std::fs::symlink_metadata(&self.path)
            .map_err(failed("look at"))?
            .ino();
        Ok(Listener {
            socket: listener,
            path: self.path.clone(),
            inode,
        })
    }
}

/// A bound socket.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
    /// Distinguishes this process's socket file from that of a later agent.
    inode: u64,
}

impl Listener {
    /// Serves `routes` and server reflection until `stop` resolves. Then it removes the
    /// socket, so that no new connection is made, and calls in progress get `grace` to finish.
    pub async fn serve(
        self,
        routes: Routes,
        stop: impl Future<Output = ()>,
        grace: Duration,
    ) -> Result<(), ServeError> {
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .build_v1()?;
        let routes = routes.add_service(reflection);
        let (stopping, stopped) = tokio::sync::oneshot::channel::<()>();
        let incoming = connection::incoming(self.socket).map_err(|source| ServeError::Socket {
            what: "listen on",
            path: self.path.clone(),
            source,
        })?;
        let server = Server::builder()
            .add_routes(routes)
            .serve_with_incoming_shutdown(incoming, async {
                // A dropped sender means the same as a message: stop.
                let _ = stopped.await;
            });
        let until_told = async {
            stop.await;
            if std::fs::symlink_metadata(&self.path).is_ok_and(|now| now.ino() == self.inode) {
                let _ = std::fs::remove_file(&self.path);
            }
            drop(stopping);
            tokio::time::sleep(grace).await;
        };
        tokio::select! {
            finished = server => finished?,
            () = until_told => tracing::warn!(
                grace_seconds = grace.as_secs(),
                "calls were still in progress at the end of the grace time; repeats of them finish \
                their work after the next start"
            ),
        }
        Ok(())
    }
}

/// Resolves at SIGTERM or SIGINT.
pub async fn shutdown_signal() -> io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = term.recv() => tracing::info!("SIGTERM: finishing calls in progress, refusing new ones"),
        _ = int.recv() => tracing::info!("SIGINT: finishing calls in progress, refusing new ones"),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_unix_sockets() {
        for good in ["unix:///run/x.sock", "unix:/run/x.sock", "/run/x.sock"] {
            let endpoint: Endpoint = good.parse().unwrap();
            assert_eq!(endpoint.path(), Path::new("/run/x.sock"));
        }
        for bad in [
            "",
            "x.sock",
            "tcp://1.2.3.4:1",
            "unix://x.sock",
            "unix:///run/",
        ] {
            let error = bad.parse::<Endpoint>().unwrap_err();
            assert!(error.to_string().contains("unix:///path/to/socket"));
        }
    }

    #[tokio::test]
    async fn a_file_that_is_no_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("csi.sock");
        std::fs::write(&path, "precious").unwrap();
        let endpoint = Endpoint { path: path.clone() };
        assert!(matches!(
            endpoint.bind().await,
            Err(ServeError::NotASocket { .. })
        ));
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }

    #[tokio::test]
    async fn a_socket_that_accepts_but_never_answers_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("csi.sock");
        // The kernel completes every connect to it; no process answers.
        let _mute = UnixListener::bind(&path).unwrap();
        let endpoint = Endpoint { path: path.clone() };
        let listener = endpoint.bind().await.unwrap();
        let found = std::fs::symlink_metadata(&path).unwrap();
        assert_eq!(found.ino(), listener.inode);
        assert_eq!(found.permissions().mode() & 0o777, 0o600);
    }

    #[tokio::test]
    async fn a_socket_whose_owner_ends_amid_the_answer_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("csi.sock");
        let dying = tokio::net::UnixListener::bind(&path).unwrap();
        let endpoint = Endpoint { path };
        let (bound, ()) = tokio::join!(endpoint.bind(), async {
            drop(dying.accept().await.unwrap());
            drop(dying);
        });
        bound.unwrap();
    }

    #[tokio::test]
    async fn a_socket_that_answers_with_an_error_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let endpoint = Endpoint {
            path: dir.path().join("csi.sock"),
        };
        let listener = endpoint.bind().await.unwrap();
        // A server without this service answers UNIMPLEMENTED.
        let other = tonic::service::Routes::default();
        let serving = tokio::spawn(
            tonic::transport::Server::builder()
                .add_routes(other)
                .serve_with_incoming(connection::incoming(listener.socket).unwrap()),
        );
        assert!(matches!(
            endpoint.bind().await,
            Err(ServeError::Live { .. })
        ));
        serving.abort();
    }
}
