//! The errors of the supervisor, and their gRPC codes: each kind has one of its own, and
//! the sentence is the message.

use std::{io, path::PathBuf};

use tonic::{Code, Status};

use super::SpecError;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum SupervisorError {
    /// The request has a value that rbd-nbd would misread.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The device is mapped otherwise than requested.
    #[error("volume {volume_id} is mapped as {node} {how}; unmap it first (rbd-nbd unmap {node})")]
    Otherwise {
        volume_id: String,
        node: String,
        /// The difference.
        how: String,
    },
    /// The device has the image of that name of another cluster.
    #[error(
        "volume {volume_id} is mapped as {node} of cluster {known}, not {given}; end the volume's pods on this node, so that it is unstaged and staged again"
    )]
    Elsewhere {
        volume_id: String,
        node: String,
        /// The `clusterID` that it was mapped by.
        known: String,
        /// The requested one.
        given: String,
    },
    /// The cluster refused the user.
    #[error(
        "the cluster does not let client.{user} map image {image}; check userID, userKey and the user's caps (ceph auth get client.{user})"
    )]
    Denied {
        image: String,
        /// The user's id.
        user: String,
    },
    /// No monitor answers.
    ///
    /// Remedy: repair the monitors or the network to them: `ceph -s`; `ceph mon dump` shows their
    /// addresses.
    #[error("no monitor answers, so image {image} is not mapped: {message}")]
    Silent {
        image: String,
        /// The daemon's message.
        message: String,
    },
    /// The daemon ended without a message, as it does if the image is missing.
    ///
    /// Remedy: `rbd ls --pool POOL` shows the images; restore the image, or correct the volume.
    #[error(
        "rbd-nbd ended without a message, as it does if the cluster has no image {image}, or no such pool, namespace or snapshot"
    )]
    Missing { image: String },
    /// The daemon ended with a message.
    ///
    /// Remedy: read rbd-nbd's own words in the message, and the kernel log (`journalctl -k`).
    #[error("rbd-nbd cannot serve image {image}: {message}")]
    Failed {
        image: String,
        /// The daemon's message.
        message: String,
    },
    /// Another process took the device first.
    ///
    /// Remedy: nothing: the call is repeated.
    #[error("another process took the NBD device that was chosen for image {image}")]
    Taken { image: String },
    /// The controller has not published the volume to this node, or has unpublished it.
    ///
    /// Remedy: delete the pod, so that Kubernetes attaches the volume anew; `kubectl get
    /// volumeattachments` shows where it is.
    #[error(
        "image {image} is not published to node {node} (any more), so the supervisor starts no rbd-nbd for it: another node may have it"
    )]
    Unpublished {
        image: String,
        /// This node's id.
        node: String,
    },
    /// The daemon was not started, or was ended: the controller could not fence it.
    ///
    /// Remedy: look at the cluster (`ceph -s`) and the user's rights (`ceph auth get client.USER`);
    /// the call is repeated.
    #[error("cannot register the client of rbd-nbd for image {image} for fencing: {message}")]
    NotRegistered {
        image: String,
        /// The reason.
        message: String,
    },
    /// The daemon neither serves nor ends in time.
    ///
    /// Remedy: look at the cluster (`ceph -s`); a daemon that hangs ends once the cluster answers.
    #[error("rbd-nbd (process {pid}) for image {image} {how}")]
    Stuck {
        image: String,
        /// The daemon.
        pid: i32,
        /// Its failure, a verb phrase after the process.
        how: &'static str,
    },
    /// An earlier call is still under way.
    #[error("work on volume {0} is still under way; repeat the call, which waits for it")]
    UnderWay(String),
    /// rbd-nbd is not installed.
    ///
    /// Remedy: install the package rbd-nbd, in the supervisor's image or on the machine.
    #[error("cannot start {program}; it is in the package rbd-nbd")]
    NoProgram {
        /// Its name.
        program: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The supervisor has no such volume.
    #[error(
        "rbd-nbd does not map volume {0} on this node, or the supervisor has no record of it; stage the volume again (kubelet does when it restarts)"
    )]
    Unknown(String),
    /// The supervisor does not have the key.
    ///
    /// Remedy: `uringctl reattach VOLUME --secrets DIR`, or stage the volume again.
    #[error(
        "the supervisor has no key of volume {0}; the next stage of the volume brings it, or uringctl reattach"
    )]
    NoKey(String),
    /// A file system, device mapper, md or a process holds the device.
    ///
    /// Remedy: `uringctl volumes`, or `lsof DEVICE`, shows who has it open; end that.
    #[error("{} is in use; it stays mapped until its opener closes it", node.display())]
    Busy { node: PathBuf },
    /// The image has not grown to the size.
    ///
    /// Remedy: `rbd info POOL/IMAGE` shows the image's size; expand the volume again.
    #[error(
        "{} has {bytes} bytes, fewer than the required {wanted}: image {image} was not grown", node.display()
    )]
    Small {
        image: String,
        node: PathBuf,
        /// Its size.
        bytes: u64,
        /// The size required.
        wanted: u64,
    },
    /// Another operation failed.
    ///
    /// Remedy: read the kernel log (`journalctl -k`); the call is repeated.
    #[error("cannot {what} {subject}")]
    Io {
        /// The operation.
        what: &'static str,
        subject: String,
        /// The kernel's answer.
        source: io::Error,
    },
}

impl SupervisorError {
    /// The gRPC code.
    pub fn code(&self) -> Code {
        match self {
            Self::Spec(_) => Code::InvalidArgument,
            Self::Otherwise { .. } => Code::AlreadyExists,
            Self::Elsewhere { .. } => Code::ResourceExhausted,
            Self::Denied { .. } => Code::PermissionDenied,
            Self::Silent { .. } => Code::Unavailable,
            Self::Missing { .. } | Self::Unknown(_) => Code::NotFound,
            Self::NoKey(_) => Code::Unauthenticated,
            Self::Busy { .. } => Code::FailedPrecondition,
            Self::Unpublished { .. } => Code::Cancelled,
            Self::NotRegistered { .. } => Code::DataLoss,
            Self::Stuck { .. } | Self::Taken { .. } | Self::UnderWay(_) => Code::Aborted,
            Self::NoProgram { .. } => Code::Unimplemented,
            Self::Small { .. } => Code::OutOfRange,
            Self::Failed { .. } | Self::Io { .. } => Code::Internal,
        }
    }
}

impl From<SupervisorError> for Status {
    fn from(error: SupervisorError) -> Self {
        Self::new(error.code(), crate::error_chain(&error))
    }
}

/// Turns the kernel's answer into an error that names the operation.
#[cfg(feature = "holder")]
pub(super) fn failed(
    what: &'static str,
    subject: impl ToString,
) -> impl FnOnce(io::Error) -> SupervisorError {
    move |source| SupervisorError::Io {
        what,
        subject: subject.to_string(),
        source,
    }
}
