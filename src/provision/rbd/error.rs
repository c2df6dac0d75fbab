//! What can go wrong with RBD volumes, and of which kind it is.

use crate::{
    Kind,
    ceph::{
        client::{CephError, CredentialsError},
        csi_format::{config::ConfigError, encryption::EncryptionError, journal::JournalError},
    },
};

/// Why an RBD volume could not be worked on.
#[derive(Debug, thiserror::Error)]
pub enum RbdError {
    /// The configuration does not tell of the cluster.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The secrets of the request are of no use.
    #[error("secrets: this volume needs the user and key of its cluster")]
    Secrets(#[from] CredentialsError),
    /// The request has no secrets, and none were given for such.
    #[error(
        "cluster {0:?} cannot be asked without a user: the request has no secrets; give the \
         controller some (--ceph-secret)"
    )]
    NoSecrets(String),
    /// The files of `--ceph-secret` are of no use.
    #[error("--ceph-secret {}: no user and key", path.display())]
    OwnSecrets {
        /// The directory.
        path: std::path::PathBuf,
        /// What is wrong.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The class names a pool that the cluster does not have.
    #[error("cluster {cluster_id:?} has no pool {pool:?} that this user may see")]
    NoPool { cluster_id: String, pool: String },
    /// There is no connection to the cluster.
    #[error("cluster {cluster_id:?}")]
    Cluster {
        cluster_id: String,
        /// Why not.
        source: CephError,
    },
    /// The cluster refused.
    #[error(transparent)]
    Ceph(#[from] CephError),
    /// The journal cannot be used.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// Somebody has the image open.
    #[error(
        "image {image} is in use by {watchers}; unmap it there, or wait until Ceph has given up \
         a dead client"
    )]
    InUse {
        /// The image, with its pool.
        image: String,
        /// The clients' addresses.
        watchers: String,
    },
    /// A node has not detached the volume yet.
    #[error(
        "node {node:?} still has image {image}; the controller fences it if it does not release \
         the image in time: try again"
    )]
    StillAttached {
        /// The image, with its pool.
        image: String,
        /// The node's id.
        node: String,
    },
    /// A client that no node registered has the image open.
    #[error(
        "image {image} is still in use by {watchers}, which node {node:?} has not registered as its \
         client, so it is not fenced: end it there, or take it off the cluster (ceph osd \
         blocklist add ADDRESS)"
    )]
    ClientNotRegistered {
        /// The image, with its pool.
        image: String,
        /// The node's id.
        node: String,
        /// The clients' addresses.
        watchers: String,
    },
    /// The chain of clones is as long as it may be, and is being cut.
    #[error("image {0} is being flattened, as its chain of clones has become long; try again")]
    Flattening(String),
    /// The image was given up while it was being made.
    #[error("image {0} was given up by another controller while it was being made; try again")]
    Contended(String),
    /// The image has as many snapshots as it may have.
    #[error(
        "image {image} has {count} snapshots, and the kernel takes {limit}; clones of it are \
         being flattened: try again later"
    )]
    Snapshots {
        image: String,
        /// How many it has.
        count: usize,
        /// How many are let be.
        limit: usize,
    },
    /// The image cannot be cloned.
    #[error("image {0} has no layering, so that no snapshot of it can be a volume")]
    NoLayering(String),
    /// The source of a copy is elsewhere.
    #[error(
        "the source is in cluster {there:?}, and the class makes volumes in {here:?}: copies stay \
         in one cluster"
    )]
    OtherCluster {
        /// The source's cluster.
        there: String,
        /// The class'.
        here: String,
    },
    /// A copy has to be encrypted as its source is, or not at all.
    #[error("the source is {there}, and the class asks for {here}; use a class like the source's")]
    OtherEncryption {
        /// How the source is encrypted.
        there: String,
        /// What the class says.
        here: String,
    },
    /// The copy's KMS could not keep its passphrase.
    #[error(
        "the source has a passphrase of its own, and encryptionKMSID {0:?} keeps the secret's \
         alone: use a class like the source's"
    )]
    OwnPassphrase(String),
    /// A copy of it would be without its keys.
    #[error(
        "image {image} is encrypted with encryptionType {how:?}, and `block` is the only one \
         here: have ceph-csi copy it"
    )]
    EncryptedOtherwise {
        image: String,
        /// What the journal says.
        how: String,
    },
    /// There is no passphrase to encrypt with.
    #[error(transparent)]
    Encryption(#[from] EncryptionError),
    /// The cluster's id does not fit a handle.
    #[error("clusterID {0:?} is too long for a handle: 64 bytes are allowed")]
    LongId(String),
    /// The journal knows the volume, and its image is gone.
    #[error("volume {handle:?} has lost its image {image}; restore it, or delete the volume")]
    Lost {
        /// The volume's handle.
        handle: String,
        /// The image, with its pool.
        image: String,
    },
    /// Nothing is known of a pool's room.
    #[error(
        "the cluster has no figures of pool {pool}: its manager (ceph-mgr) has not measured it, or \
         does not run"
    )]
    NotMeasured { pool: String },
    /// The image belongs to a group.
    #[error(
        "image {image} is a member of group {group:?} (rbd group), which it has to leave before \
         it can be deleted: rbd group image remove"
    )]
    Grouped {
        /// The image, with its pool.
        image: String,
        /// The group's name.
        group: String,
    },
    /// The snapshot belongs to a group.
    #[error("snapshot {handle:?} is of group {group:?}: delete the group, not its members")]
    InGroup {
        /// The snapshot's handle.
        handle: String,
        group: String,
    },
    /// What only volumes with a journal can do.
    #[error(
        "{0:?} was made by Kubernetes' own RBD plugin, which kept no journal: it cannot be copied"
    )]
    Migrated(String),
}

impl RbdError {
    /// What the caller should make of it.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Config(error) => match error {
                ConfigError::Unknown { .. } | ConfigError::NoMonitors { .. } => Kind::Invalid,
                ConfigError::Unreadable { .. } | ConfigError::Malformed { .. } => Kind::Transient,
            },
            Self::Secrets(_)
            | Self::NoPool { .. }
            | Self::LongId(_)
            | Self::OtherCluster { .. }
            | Self::OtherEncryption { .. }
            | Self::OwnPassphrase(_)
            | Self::InGroup { .. } => Kind::Invalid,
            Self::Encryption(error) => match error {
                EncryptionError::Config { .. } => Kind::Transient,
                EncryptionError::Malformed => Kind::Internal,
                EncryptionError::Wrong => Kind::Unauthenticated,
                _ => Kind::Invalid,
            },
            Self::NoSecrets(_)
            | Self::OwnSecrets { .. }
            | Self::InUse { .. }
            | Self::Grouped { .. }
            | Self::ClientNotRegistered { .. }
            | Self::NoLayering(_)
            | Self::EncryptedOtherwise { .. }
            | Self::Migrated(_) => Kind::Precondition,
            Self::Flattening(_) | Self::Contended(_) | Self::StillAttached { .. } => Kind::InUse,
            Self::Snapshots { .. } => Kind::Exhausted,
            Self::Lost { .. } => Kind::NotFound,
            Self::NotMeasured { .. } => Kind::Transient,
            Self::Cluster { source: error, .. }
            | Self::Ceph(error)
            | Self::Journal(JournalError::Ceph(error)) => of_ceph(error),
            Self::Journal(_) => Kind::Internal,
        }
    }

    /// Whether the operation may have taken effect, or may do so later.
    pub fn is_uncertain(&self) -> bool {
        match self {
            Self::Cluster { source: error, .. }
            | Self::Ceph(error)
            | Self::Journal(JournalError::Ceph(error)) => {
                error.is_timed_out() || error.is_blocklisted()
            }
            _ => false,
        }
    }

    /// Whether the object, image or pool does not exist.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Cluster { source: error, .. } | Self::Ceph(error) if error.is_not_found())
    }

    /// Whether the user may not do it.
    pub fn is_access_denied(&self) -> bool {
        matches!(self, Self::Cluster { source: error, .. } | Self::Ceph(error) if error.is_access_denied())
    }
}

/// What the cluster cannot do now, it may do later.
fn of_ceph(error: &CephError) -> Kind {
    match error {
        CephError::Library(_) => Kind::Precondition,
        error if error.is_access_denied() => Kind::Unauthenticated,
        error if error.is_full() => Kind::Exhausted,
        error if error.is_invalid() => Kind::Invalid,
        error if error.is_busy() => Kind::InUse,
        _ => Kind::Transient,
    }
}
