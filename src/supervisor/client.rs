//! The node agent's client of the supervisor: blocking code for a lane.
//!
//! Each call opens a connection of its own, so a restart of the supervisor needs no
//! handling. That takes a fraction of a millisecond, little beside a start of rbd-nbd.

use std::{path::PathBuf, time::Duration};

use tonic::{Code, Status, transport::Channel};

use super::{ANSWERS_WITHIN, Spec};
use crate::{
    Done, Kind,
    endpoint::Endpoint,
    proto::holder::{
        Fencing, GrowRequest, Held, ListRequest, MapRequest, UnmapRequest,
        holder_client::HolderClient,
    },
    secret::Secret,
};

/// The deadline of a call: longer than a running supervisor takes for any answer
/// ([`ANSWERS_WITHIN`]).
const WITHIN: Duration = ANSWERS_WITHIN.saturating_add(Duration::from_secs(10));
/// The deadline of a call that waits for nothing.
const LIST_WITHIN: Duration = Duration::from_secs(2);

/// Why a call of the supervisor failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The supervisor does not answer.
    ///
    /// Remedy: start it: `systemctl start uring-csi-holder`, or its DaemonSet; the agent's --holder
    /// names its socket.
    #[error("uring-csi-holder does not answer on {endpoint}; is it running on this node?")]
    Unreachable {
        /// Its socket.
        endpoint: Endpoint,
        /// The error of the connection.
        source: Box<Status>,
    },
    /// The supervisor refused or failed; its message.
    #[error("{1}")]
    Refused(Refusal, String),
    /// The client could not be set up.
    ///
    /// Remedy: correct --holder of the node agent; `uringctl doctor` checks the socket.
    #[error("cannot call uring-csi-holder")]
    Io(#[from] std::io::Error),
}

/// The agent's reading of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The request is invalid, or the volume is mapped otherwise.
    Precondition,
    /// The cluster denies the user access, or the key is needed again.
    Unauthenticated,
    /// The image or the volume is missing.
    NotFound,
    /// The volume's device is of another cluster.
    Elsewhere,
    /// Work on the volume is under way.
    UnderWay,
    /// The device is in use.
    Busy,
    /// The volume is not published to this node.
    Unpublished,
    /// Something else failed.
    Other,
}

impl Refusal {
    /// By the code of [`SupervisorError::code`].
    ///
    /// [`SupervisorError::code`]: super::SupervisorError::code
    fn of(code: Code) -> Self {
        match code {
            Code::InvalidArgument | Code::AlreadyExists => Self::Precondition,
            Code::PermissionDenied | Code::Unauthenticated => Self::Unauthenticated,
            Code::NotFound => Self::NotFound,
            Code::ResourceExhausted => Self::Elsewhere,
            Code::Aborted => Self::UnderWay,
            Code::FailedPrecondition => Self::Busy,
            Code::Cancelled => Self::Unpublished,
            _ => Self::Other,
        }
    }
}

impl ClientError {
    /// The kind of the error.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Refused(Refusal::Precondition | Refusal::Elsewhere, _) => Kind::Precondition,
            Self::Refused(Refusal::Unauthenticated, _) => Kind::Unauthenticated,
            Self::Refused(Refusal::NotFound, _) => Kind::NotFound,
            Self::Refused(Refusal::UnderWay, _) => Kind::InUse,
            _ => Kind::Transient,
        }
    }
}

/// A client of this node's supervisor.
#[derive(Clone, Debug)]
pub struct Client {
    endpoint: Endpoint,
}

impl Client {
    /// The supervisor that serves on this endpoint.
    pub fn new(endpoint: Endpoint) -> Self {
        Self { endpoint }
    }

    /// Maps an image, or finds it mapped; restarts its daemon if that has ended.
    /// Returns the device's node.
    pub fn map(&self, spec: &Spec, key: &Secret) -> Result<(PathBuf, Done), ClientError> {
        let request = MapRequest {
            volume_id: spec.volume_id.clone(),
            pool: spec.image.pool.clone(),
            namespace: spec.image.namespace.clone(),
            image: spec.image.name.clone(),
            snapshot: spec.image.snapshot.clone().unwrap_or_default(),
            monitors: spec.monitors.clone(),
            user: spec.user.clone(),
            key: key.reveal().to_owned(),
            options: spec.options.words().collect(),
            read_only: spec.read_only,
            fencing: spec.fencing.as_ref().map(|fencing| Fencing {
                node_id: fencing.node_id.clone(),
                volume_uuid: fencing.volume.to_string(),
            }),
            cluster_id: spec.image.cluster_id.clone(),
        };
        let answer = self.call(WITHIN, async |mut supervisor| supervisor.map(request).await)?;
        Ok((answer.node.into(), done(answer.already)))
    }

    /// Unmaps it, unless the device is open.
    pub fn unmap(&self, volume_id: &str) -> Result<Done, ClientError> {
        let request = UnmapRequest {
            volume_id: volume_id.to_owned(),
        };
        let answer = self.call(WITHIN, async |mut supervisor| {
            supervisor.unmap(request).await
        })?;
        Ok(done(answer.already))
    }

    /// Grows the device to its image's size, unless it has `bytes` already. Returns
    /// the device's size in bytes.
    pub fn grow(&self, volume_id: &str, bytes: u64) -> Result<u64, ClientError> {
        let request = GrowRequest {
            volume_id: volume_id.to_owned(),
            bytes,
        };
        let answer = self.call(WITHIN, async |mut supervisor| {
            supervisor.grow(request).await
        })?;
        Ok(answer.bytes)
    }

    /// Lists the volumes that it keeps.
    pub fn list(&self) -> Result<Vec<Held>, ClientError> {
        let list =
            async |mut supervisor: HolderClient<Channel>| supervisor.list(ListRequest {}).await;
        Ok(self.call(LIST_WITHIN, list)?.volumes)
    }

    fn call<T>(
        &self,
        within: Duration,
        ask: impl AsyncFnOnce(HolderClient<Channel>) -> Result<tonic::Response<T>, Status>,
    ) -> Result<T, ClientError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let answer = runtime.block_on(async {
            let answer = ask(HolderClient::new(self.endpoint.channel()));
            let late = |_| Status::deadline_exceeded("no answer in time");
            tokio::time::timeout(within, answer).await.map_err(late)?
        });
        answer.map(tonic::Response::into_inner).map_err(|status| {
            // Only an error of the client's own has a source.
            let made_up = std::error::Error::source(&status).is_some();
            if made_up || status.code() == Code::DeadlineExceeded {
                return ClientError::Unreachable {
                    endpoint: self.endpoint.clone(),
                    source: Box::new(status),
                };
            }
            ClientError::Refused(Refusal::of(status.code()), status.message().to_owned())
        })
    }
}

fn done(already: bool) -> Done {
    if already { Done::Already } else { Done::Now }
}
