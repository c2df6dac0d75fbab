//! Why a Ceph image is no device, or a device does not go.

use std::{error::Error, path::PathBuf};

use super::{super::luks::LuksError, source::TUNING};
use crate::{
    Kind,
    ceph::{
        client::{CephError, CredentialsError, rbd::Watcher},
        csi_format::{config::ConfigError, encryption::EncryptionError},
        krbd,
    },
    error_chain,
    supervisor::client::{ClientError, Refusal},
};

/// Why a Ceph image is no device, or a device does not go.
#[derive(Debug, thiserror::Error)]
pub enum CephImageError {
    /// This node was not told of any cluster.
    #[error("this node knows no Ceph clusters; start its agent with --ceph-config")]
    NotConfigured,
    /// It was not told of this one.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The cluster is to be reached from another network namespace.
    #[error(
        "cluster {cluster_id} has netNamespaceFilePath {path}, and this agent enters no network namespace; run it in the host's, and remove the key"
    )]
    NetNamespace {
        cluster_id: String,
        /// The namespace's file.
        path: PathBuf,
    },
    /// The request's secrets are none.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// The cluster refused something.
    #[error(transparent)]
    Cluster(#[from] CephError),
    /// Others have the image open.
    #[error(
        "image {image} is in use by {}; it is not mapped for a single writer before they let go",
        addresses(watchers)
    )]
    InUse {
        image: String,
        /// The others.
        watchers: Vec<Watcher>,
    },
    /// The controller does not want this node to have the volume.
    #[error(
        "image {image} is not published to node {node} (any more), so it is not used there: it may be fenced for another"
    )]
    Unpublished {
        image: String,
        /// This node's id.
        node: String,
    },
    /// The client to fence is unknown.
    #[error(
        "cannot determine which Ceph client maps image {image} on {}, so it could not be fenced: try again",
        node.display()
    )]
    UnknownClient { image: String, node: PathBuf },
    /// The passphrase is not to be had.
    #[error(transparent)]
    Encryption(#[from] EncryptionError),
    /// The passphrase is in the image's metadata, which cannot be read.
    #[error(
        "the passphrase of image {image} is in its metadata, which only librbd reads; install librbd1 in the agent's image"
    )]
    Unreadable { image: String },
    /// It should hold an encrypted volume, and holds nothing.
    #[error(
        "image {image} was encrypted according to its metadata, but is blank now; it is left as it is"
    )]
    Emptied { image: String },
    /// It must be encrypted first, which needs a single writer.
    #[error(
        "image {image} is blank, and encrypted only for a single writer; stage it once for one"
    )]
    Blank { image: String },
    /// It is to be encrypted in a way that only ceph-csi knows.
    #[error(
        "image {image} is still to be encrypted, and its volume context says how ({}), which this driver does not do: have ceph-csi stage it once, or make it by a class without that",
        TUNING.join(", ")
    )]
    Tuned { image: String },
    /// Several mapped images have the names in a stage file.
    #[error(
        "{} have the names of image {image}; cannot determine which of them the volume has: unmap the others (rbd unmap)",
        list(nodes)
    )]
    Ambiguous {
        image: String,
        /// Their nodes.
        nodes: Vec<PathBuf>,
    },
    /// It failed, and what it had done could not be undone.
    #[error("{cause}; and it stays mapped ({undo}): the next call takes it up")]
    NotUndone {
        /// Why it failed.
        cause: String,
        /// Why the undo failed.
        undo: String,
    },
    /// The class requests rbd-nbd, and this node has no supervisor.
    #[error(
        "image {image} is to be served by rbd-nbd; start uring-csi-holder on this node, and its agent with --holder"
    )]
    NoSupervisor { image: String },
    /// Two drivers on one image destroy it.
    #[error(
        "image {image} is mapped on this node already, by {by}, and not to be mapped twice; unmap that first"
    )]
    Taken {
        image: String,
        /// What has it.
        by: String,
    },
    /// rbd-nbd is being started for it, by the order of an agent that was killed.
    #[error(
        "rbd-nbd is about to serve this volume; once it does, or has failed, the call can be repeated"
    )]
    Coming,
    /// The image has a device without a daemon, and the supervisor cannot be reached.
    #[error("{} is image {image}, and no rbd-nbd serves it: its I/O waits", node.display())]
    Unserved {
        image: String,
        node: PathBuf,
        /// The error of the call to the supervisor.
        source: ClientError,
    },
    /// rbd-nbd, or who keeps its daemons.
    #[error(transparent)]
    Supervisor(#[from] ClientError),
    /// krbd.
    #[error(transparent)]
    Rbd(#[from] krbd::KrbdError),
    /// The encryption layer.
    #[error(transparent)]
    Luks(#[from] LuksError),
}

fn addresses(watchers: &[Watcher]) -> String {
    let texts: Vec<_> = watchers.iter().map(|one| one.address.as_str()).collect();
    texts.join(", ")
}

fn list(nodes: &[PathBuf]) -> String {
    let texts: Vec<_> = nodes
        .iter()
        .map(|node| node.display().to_string())
        .collect();
    texts.join(", ")
}

impl CephImageError {
    /// `cause`, after which what was done could not be undone either.
    pub fn not_undone(cause: &dyn Error, undo: &dyn Error) -> Self {
        Self::NotUndone {
            cause: error_chain(cause),
            undo: error_chain(undo),
        }
    }

    /// What the caller may do about it.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Config(error) => match error {
                ConfigError::Unknown { .. } => Kind::Invalid,
                ConfigError::Unreadable { .. } => Kind::Transient,
                _ => Kind::Precondition,
            },
            Self::Encryption(error) => match error {
                EncryptionError::Missing | EncryptionError::Wrong => Kind::Unauthenticated,
                EncryptionError::Config { .. } => Kind::Transient,
                _ => Kind::Precondition,
            },
            Self::Cluster(error) if error.is_access_denied() => Kind::Unauthenticated,
            Self::Cluster(error) if error.is_not_found() => Kind::NotFound,
            Self::Rbd(error) => error.kind(),
            Self::Supervisor(error) => error.kind(),
            Self::Luks(error) => error.kind(),
            Self::Credentials(_) => Kind::Unauthenticated,
            Self::Coming => Kind::InUse,
            Self::Cluster(_)
            | Self::NotUndone { .. }
            | Self::UnknownClient { .. }
            | Self::Unserved { .. } => Kind::Transient,
            _ => Kind::Precondition,
        }
    }

    /// Whether the cluster has no such image or user: the image may be in a cluster to
    /// which this one failed over.
    pub fn is_elsewhere(&self) -> bool {
        let is_unknown = matches!(
            self,
            Self::Config(ConfigError::Unknown { .. } | ConfigError::NoMonitors { .. })
        );
        is_unknown || matches!(self.kind(), Kind::NotFound | Kind::Unauthenticated)
    }

    /// Whether the device is in use.
    pub fn is_busy(&self) -> bool {
        match self {
            Self::Rbd(error) => error.is_busy(),
            Self::Supervisor(error) => matches!(error, ClientError::Refused(Refusal::Busy, _)),
            Self::Luks(error) => matches!(error, LuksError::Busy { .. }),
            _ => false,
        }
    }
}
