//! The errors of the supervisor, and their gRPC codes: each kind has one of its own, and
//! the sentence is the message.

use std::{io, path::PathBuf};

use tonic::{Code, Status};

use super::SpecError;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum SupervisorError {
    /// The request cannot be passed on.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The device is mapped otherwise than requested.
    #[error("volume {volume_id} is mapped as {node} {how}; unmap it first (rbd-nbd unmap {node})")]
    Otherwise {
        volume_id: String,
        node: String,
        /// What is different about it.
        how: String,
    },
    /// The cluster refused the user.
    #[error(
        "the cluster does not let client.{user} map image {image}: check userID, userKey and the user's caps (ceph auth get client.{user})"
    )]
    Denied {
        image: String,
        /// The user's id.
        user: String,
    },
    /// No monitor answers.
    #[error("no monitor answers, so image {image} is not mapped: {message}")]
    Silent {
        image: String,
        /// The daemon's message.
        message: String,
    },
    /// The daemon ended without a message, as it does if the image is missing.
    #[error(
        "rbd-nbd ended without a reason, as it does where the cluster has no image {image}, or no such pool, namespace or snapshot"
    )]
    Missing { image: String },
    /// The daemon ended with a message.
    #[error("rbd-nbd cannot serve image {image}: {message}")]
    Failed {
        image: String,
        /// The daemon's message.
        message: String,
    },
    /// Another process took the device first.
    #[error("the NBD device that was to be of image {image} is in use")]
    Taken { image: String },
    /// The controller does not want this node to have the volume.
    #[error(
        "image {image} is not published to node {node} (any more), so no rbd-nbd is to write it: another node may have it"
    )]
    Unpublished {
        image: String,
        /// This node's id.
        node: String,
    },
    /// The daemon was not started, or was ended: the controller could not fence it.
    #[error("the client of rbd-nbd for image {image} cannot be registered for fencing: {message}")]
    NotRegistered {
        image: String,
        /// Why.
        message: String,
    },
    /// The daemon neither serves nor ends in time.
    #[error("rbd-nbd (process {pid}) for image {image} {how}")]
    Stuck {
        image: String,
        /// The daemon.
        pid: i32,
        /// What it fails to do, and for how long.
        how: &'static str,
    },
    /// An earlier call goes on.
    #[error(
        "what was begun with volume {0} is still under way; the next call finds it done, or waits for it"
    )]
    UnderWay(String),
    /// rbd-nbd is not installed.
    #[error("cannot start {program}; it is in the package rbd-nbd")]
    NoProgram {
        /// Its name.
        program: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The supervisor has no such volume.
    #[error(
        "volume {0} is not mapped by rbd-nbd on this node, or the supervisor has no record of it: then a stage brings it back, which kubelet calls for when it is restarted"
    )]
    Unknown(String),
    /// The supervisor does not have the key.
    #[error(
        "the key of volume {0} is not known any more; the next stage of the volume brings it, or uringctl reattach"
    )]
    NoKey(String),
    /// A file system, device mapper, md or a process holds the device.
    #[error("{} is in use; it stays mapped until its user lets go", node.display())]
    Busy { node: PathBuf },
    /// The image has not grown to the size.
    #[error(
        "{} has {bytes} bytes, fewer than the {wanted} that are wanted: image {image} was not grown", node.display()
    )]
    Small {
        image: String,
        node: PathBuf,
        /// Its size.
        bytes: u64,
        /// The size required.
        wanted: u64,
    },
    /// The kernel refused something else.
    #[error("cannot {what} {subject}")]
    Io {
        /// What was tried.
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

/// Turns the kernel's answer into an error that says what was tried.
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
