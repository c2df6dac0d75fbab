//! Why a Ceph image could not be attached, opened or detached.

use std::{error::Error, path::PathBuf};

use super::{super::luks::LuksError, source::TUNING};
use crate::{
    Kind,
    ceph::{
        client::{CephError, CredentialsError, rbd::Watcher},
        csi_format::{config::ConfigError, encryption::EncryptionError, journal::JournalError},
        krbd,
    },
    error_chain,
    supervisor::client::{ClientError, Refusal},
};

/// Why a Ceph image could not be attached, opened or detached.
#[derive(Debug, thiserror::Error)]
pub enum CephImageError {
    /// The agent has no list of clusters.
    #[error("this node knows no Ceph clusters; start its agent with --ceph-config")]
    NotConfigured,
    /// The list lacks the cluster, or is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The configuration requires another network namespace, which only krbd gets.
    #[error(
        "cluster {cluster_id} has netNamespaceFilePath {path}, and rbd-nbd runs in no other network namespace than its supervisor's; map the image by krbd (mounter rbd)"
    )]
    NetNamespace {
        cluster_id: String,
        /// The namespace's file.
        path: PathBuf,
    },
    /// The request's secrets lack the user or the key.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// An operation of the cluster failed.
    #[error(transparent)]
    Cluster(#[from] CephError),
    /// Other clients have the image open.
    ///
    /// Remedy: `rbd status POOL/IMAGE` shows who has it open; unmap it there.
    #[error(
        "image {image} is in use by {}; it is mapped for a single writer once they close it",
        addresses(watchers)
    )]
    InUse {
        image: String,
        /// The others.
        watchers: Vec<Watcher>,
    },
    /// Its data is another cluster's, and changes below a reader.
    #[error(
        "image {image} is the secondary of a mirror, which rbd-mirror rewrites; promote it (rbd mirror image promote), or stage the volume where the image is primary"
    )]
    Secondary { image: String },
    /// The pool has the id that cluster-mapping.json gives it.
    ///
    /// Remedy: correct cluster-mapping.json of --ceph-config: `ceph osd pool ls detail` shows the
    /// ids.
    #[error(
        "image {image} is in a pool with the id {is}, as cluster-mapping.json says, not {wanted}"
    )]
    OtherPool {
        image: String,
        /// The id of its pool.
        is: i64,
        /// The one where it was looked for.
        wanted: i64,
    },
    /// The controller has not published the volume to this node, or has unpublished it.
    ///
    /// Remedy: delete the pod, so that Kubernetes attaches the volume anew; `kubectl get
    /// volumeattachments` shows where it is.
    #[error(
        "image {image} is not published to node {node} (any more), so the agent does not use it: another node may have it"
    )]
    Unpublished {
        image: String,
        /// This node's id.
        node: String,
    },
    /// The client to fence is unknown.
    #[error(
        "cannot determine which Ceph client maps image {image} on {}, so the controller could not fence it; try again",
        node.display()
    )]
    UnknownClient { image: String, node: PathBuf },
    /// The passphrase is missing, or cannot be unsealed.
    #[error(transparent)]
    Encryption(#[from] EncryptionError),
    /// All volumes of the KMS have one passphrase.
    #[error(
        "its passphrase is the secret's, which other volumes have, too; only a KMS that gives each volume its own can rotate it (encryptionKMSID)"
    )]
    OnePassphrase,
    /// ceph-csi has no rotation of keys for files either.
    ///
    /// Remedy: none: copy the data to a new volume to change its key.
    #[error("its files are encrypted (encryptionType `file`), whose key cannot be rotated")]
    FilesKey,
    /// ceph-csi or another node has the lock.
    #[error("another node, or ceph-csi, rotates its key; try again")]
    RotatedElsewhere,
    /// The copy of a mirrored image has its key slots of an earlier moment.
    #[error(
        "its image is mirrored, and its copy would not open with a new passphrase until it has the new key slot; end the replication, rotate the key, and begin the replication again"
    )]
    KeyOfMirror,
    /// The cluster failed over since the image was mapped.
    #[error(
        "{} is mapped from another cluster than the one that has image {image} now, so its key is not rotated; end the volume's pods on this node, so that it is unstaged and staged again",
        node.display()
    )]
    AnotherCluster { image: String, node: PathBuf },
    /// The volume's entry in the journal cannot be read.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The passphrase is in the image's metadata, which cannot be read.
    #[error(
        "the passphrase of image {image} is in its metadata, which only librbd reads; install librbd1 in the agent's image"
    )]
    Unreadable { image: String },
    /// Its metadata say that it is encrypted, and it is blank.
    ///
    /// Remedy: if it should have data, restore it from a backup; if it may be empty: `uringctl
    /// format VOLUME --fs TYPE --confirm VOLUME`.
    #[error(
        "image {image} is encrypted according to its metadata, but is blank; the agent does not format it"
    )]
    Emptied { image: String },
    /// It needs a LUKS header, and only a single writer may write that.
    #[error(
        "image {image} is blank, and the agent encrypts it only for a single writer; stage it for one first"
    )]
    Blank { image: String },
    /// Its class has options of luksFormat that only ceph-csi supports.
    ///
    /// Remedy: stage it by ceph-csi first, or create it by a class without these options.
    #[error(
        "image {image} is blank, and this driver does not support the encryption options of its volume context ({}): stage it by ceph-csi first, or create it by a class without them",
        TUNING.join(", ")
    )]
    Tuned { image: String },
    /// Several mapped images have the names in a stage file.
    ///
    /// Remedy: unmap the images that the volume does not have (`rbd device list`, `rbd unmap`).
    #[error(
        "{} have the names of image {image}; cannot determine which of them the volume has: unmap the others (rbd unmap)",
        list(nodes)
    )]
    Ambiguous {
        image: String,
        /// Their nodes.
        nodes: Vec<PathBuf>,
    },
    /// The call failed, and the image could not be unmapped.
    ///
    /// Remedy: nothing: the call is repeated; `uringctl volumes` shows the step.
    #[error("{cause}; the image stays mapped ({undo}), and the next call continues")]
    NotUndone {
        /// The error of the call.
        cause: String,
        /// The error of the undo.
        undo: String,
    },
    /// The class requests rbd-nbd, and this node has no supervisor.
    #[error(
        "image {image} requires rbd-nbd; start uring-csi-holder on this node, and its agent with --holder"
    )]
    NoSupervisor { image: String },
    /// Two drivers on one image destroy it.
    #[error(
        "image {image} is mapped on this node already, by {by}, and a second mapping would destroy it; unmap the first one"
    )]
    Taken {
        image: String,
        /// The driver, and its device or process.
        by: String,
    },
    /// The supervisor is starting rbd-nbd for a call of an agent that was killed.
    #[error(
        "uring-csi-holder is starting rbd-nbd for this volume; repeat the call once rbd-nbd serves it or has failed"
    )]
    BeingMapped,
    /// The image has a device without a daemon, and the supervisor cannot be reached.
    ///
    /// Remedy: start uring-csi-holder (`systemctl start uring-csi-holder`, or its DaemonSet), and
    /// then `uringctl reattach VOLUME`.
    #[error("{} is image {image}, and no rbd-nbd serves it: its I/O waits", node.display())]
    Unserved {
        image: String,
        node: PathBuf,
        /// The error of the call to the supervisor.
        source: ClientError,
    },
    /// The device of a staged volume is gone, or of another cluster.
    #[error(
        "image {image} is staged, and krbd has no device for it any more; end the volume's pods on this node, so that it is unstaged and staged again"
    )]
    Unmapped { image: String },
    /// The supervisor of rbd-nbd failed.
    #[error(transparent)]
    Supervisor(#[from] ClientError),
    /// krbd failed.
    #[error(transparent)]
    Rbd(#[from] krbd::KrbdError),
    /// The encryption layer failed.
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
    /// The error of a call whose undo failed, too.
    pub fn not_undone(cause: &dyn Error, undo: &dyn Error) -> Self {
        Self::NotUndone {
            cause: error_chain(cause),
            undo: error_chain(undo),
        }
    }

    /// The kind of the error.
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
                EncryptionError::Service { kind, .. } => *kind,
                _ => Kind::Precondition,
            },
            Self::Cluster(error) if error.is_access_denied() => Kind::Unauthenticated,
            Self::Cluster(error) if error.is_not_found() => Kind::NotFound,
            Self::Rbd(error) => error.kind(),
            Self::Supervisor(error) => error.kind(),
            Self::Luks(error) => error.kind(),
            Self::Credentials(_) => Kind::Unauthenticated,
            Self::BeingMapped | Self::RotatedElsewhere => Kind::InUse,
            Self::Cluster(_)
            | Self::Journal(JournalError::Ceph(_))
            | Self::NotUndone { .. }
            | Self::UnknownClient { .. }
            | Self::Unserved { .. } => Kind::Transient,
            _ => Kind::Precondition,
        }
    }

    /// Whether the volume's device, if it has one, is of another cluster.
    pub fn has_other_device(&self) -> bool {
        matches!(
            self,
            Self::Unmapped { .. } | Self::Supervisor(ClientError::Refused(Refusal::Elsewhere, _))
        )
    }

    /// Whether the cluster has no such image, user or device: the image may be in a cluster
    /// to which this one failed over.
    pub fn is_elsewhere(&self) -> bool {
        let is_unknown = matches!(
            self,
            Self::Config(ConfigError::Unknown { .. } | ConfigError::NoMonitors { .. })
        );
        is_unknown
            || self.has_other_device()
            || matches!(self, Self::OtherPool { .. })
            || matches!(self.kind(), Kind::NotFound | Kind::Unauthenticated)
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
