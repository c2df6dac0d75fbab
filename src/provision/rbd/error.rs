//! The errors of RBD volumes, and the kind of each.

use crate::{
    Kind,
    ceph::{
        client::{CephError, CredentialsError},
        csi_format::{config::ConfigError, encryption::EncryptionError, journal::JournalError},
        fencing::NetworkError,
    },
};

/// A call on an RBD volume failed.
#[derive(Debug, thiserror::Error)]
pub enum RbdError {
    /// Its mirroring is not as the call needs it.
    ///
    /// Remedy: `rbd mirror image status POOL/IMAGE` shows its state; enable or promote it.
    #[error("image {image}: {why}")]
    NotReplicated {
        image: String,
        /// The defect, and what to do.
        why: String,
    },
    /// The passphrase of a deleted volume is in a KMS that is not configured: the configuration
    /// may not be mounted yet.
    ///
    /// Remedy: give the configuration by --kms-config. If this KMS is gone for good, one without it
    /// is enough (`{}`, or a directory with any other key), and the log names the passphrase that
    /// stays.
    #[error(
        "the passphrase of {handle:?} is not removed: {why}; if this KMS is gone for good, a configuration without it is enough"
    )]
    KeyStays {
        handle: String,
        why: EncryptionError,
    },
    /// A change of its mirroring goes on.
    #[error("image {image}: {why}; try again")]
    Resyncing { image: String, why: &'static str },
    /// The passphrase of a copy's source was replaced meanwhile.
    #[error("the key of volume {0} was rotated while it was copied; try again")]
    KeyRotated(String),
    /// No other cluster has copied it yet.
    ///
    /// Remedy: wait, and look at `rbd mirror image status POOL/IMAGE` in the other cluster.
    #[error("no other cluster has reported a complete copy of image {0} yet")]
    NotSynced(String),
    /// The configuration lacks the cluster, or cannot be read.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The secrets of the request lack a user or its key.
    ///
    /// Remedy: name the Secret in the class (csi.storage.k8s.io/provisioner-secret-name and the
    /// others), or --secrets DIR.
    #[error("secrets: this volume needs the user and key of its cluster")]
    Secrets(#[from] CredentialsError),
    /// The request has no secrets, and the controller has none for the cluster.
    #[error(
        "cannot connect to cluster {0:?} without a user: the request has no secrets; start the \
         controller with --ceph-secret"
    )]
    NoSecrets(String),
    /// A directory of `--ceph-secret` has no user or key.
    ///
    /// Remedy: put userID and userKey into that directory; in Kubernetes mount the Secret there.
    #[error("--ceph-secret {}: no user and key", path.display())]
    OwnSecrets {
        /// The directory.
        path: std::path::PathBuf,
        /// The error of the read.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The class names a pool that the cluster does not have.
    ///
    /// Remedy: correct `pool` of the class (`ceph osd pool ls`), or the user's rights (`ceph auth
    /// get client.USER`).
    #[error("cluster {cluster_id:?} has no pool {pool:?} that this user may see")]
    NoPool { cluster_id: String, pool: String },
    /// The configuration names a RADOS namespace that the pool does not have.
    #[error(
        "cluster {cluster_id:?} has radosNamespace {namespace:?} in its configuration, and pool \
         {pool:?} has no such namespace; create it (rbd namespace create)"
    )]
    NoNamespace {
        cluster_id: String,
        namespace: String,
        pool: String,
    },
    /// There is no connection to the cluster.
    ///
    /// Remedy: that of the cause that follows.
    #[error("cluster {cluster_id:?}")]
    Cluster {
        cluster_id: String,
        /// The error of the connection.
        source: CephError,
    },
    /// The cluster refused an operation.
    #[error(transparent)]
    Ceph(#[from] CephError),
    /// A network could not be fenced.
    #[error(transparent)]
    Network(NetworkError),
    /// The journal cannot be read or written.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// Another client has the image open.
    ///
    /// Remedy: `rbd status POOL/IMAGE` shows them; unmap it there, or wait until the watch of a
    /// dead client has expired.
    #[error(
        "image {image} is in use by {watchers}; unmap it there, or wait until the watch of \
         a dead client has expired"
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
    /// One node may have the volume, and another has it.
    #[error(
        "volume {handle:?} is published to node {node:?}, and one node at a time may have it; \
         unpublish it there first"
    )]
    OnOtherNode {
        handle: String,
        /// The other node's id.
        node: String,
    },
    /// No such node is known.
    #[error(
        "there is no node {node:?} in {} (--known-nodes); add its id, if there is one",
        path.display()
    )]
    NoNode {
        /// The node's id.
        node: String,
        path: std::path::PathBuf,
    },
    /// The known nodes cannot be read.
    ///
    /// Remedy: create the file, or correct --known-nodes.
    #[error("--known-nodes {} cannot be read", path.display())]
    KnownNodesUnreadable {
        path: std::path::PathBuf,
        source: std::io::Error,
    },
    /// The unpublish of a node has begun.
    #[error("volume {handle:?} is being unpublished from node {node:?}; try again")]
    Unpublishing {
        handle: String,
        /// The node's id.
        node: String,
    },
    /// The node has the volume in another access mode.
    #[error("volume {handle:?} is published to node {node:?} {how}; unpublish it first")]
    PublishedOtherwise {
        handle: String,
        /// The node's id.
        node: String,
        /// For which use.
        how: &'static str,
    },
    /// A client that no node registered has the image open.
    #[error(
        "image {image} is still in use by {watchers}, which node {node:?} has not registered as its \
         client, so it is not fenced; end it there, or take it off the cluster (ceph osd \
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
    /// The chain of clones has its maximum length, and is being flattened.
    #[error("image {0} is being flattened, because its chain of clones is long; try again")]
    Flattening(String),
    /// Another controller abandoned the image while this one created it.
    #[error("another controller abandoned image {0} while this one created it; try again")]
    Contended(String),
    /// A repeat cannot remove what an earlier attempt has left.
    #[error("cannot remove what an earlier attempt at {what} has left; try again")]
    NotRemoved {
        /// What was requested, with its name.
        what: String,
        /// Why not.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// ceph-csi may be creating the image now.
    #[error(
        "ceph-csi was at work on image {image} {seconds} s ago and has not completed it; if its \
         controller still runs, stop it: the two must not make volumes of one class. After {quiet} \
         s of quiet this driver completes the image; try again"
    )]
    Foreign {
        /// The image, with its pool.
        image: String,
        seconds: u64,
        /// How long it must have been left alone.
        quiet: u64,
    },
    /// The image has the maximum number of snapshots.
    #[error(
        "image {image} has {count} snapshots, and the kernel maps images with at most {limit}; its \
         clones are being flattened: try again later"
    )]
    Snapshots {
        image: String,
        /// The number of its snapshots.
        count: usize,
        /// The maximum.
        limit: usize,
    },
    /// The image cannot be cloned.
    ///
    /// Remedy: make volumes by a class with imageFeatures: layering; copy this one's data.
    #[error("image {0} lacks the feature layering, so its snapshots cannot be cloned")]
    NoLayering(String),
    /// The place of an encrypted image's data is unknown.
    ///
    /// Remedy: back up the whole volume: changed blocks are told of LUKS2 with one segment alone.
    #[error(
        "cannot tell the blocks of image {image}, which is encrypted: {why}, so it is unknown where the data of its device begins"
    )]
    NoDataOffset { image: String, why: &'static str },
    /// Nothing holds the writes to the image.
    #[error(
        "image {0} lacks the feature exclusive-lock, so Ceph cannot hold its writes while a group \
         snapshot is taken; enable it (rbd feature enable), then unstage and stage the volume \
         again, or make volumes by a class with imageFeatures: layering,exclusive-lock"
    )]
    NoExclusiveLock(String),
    /// The image is in a group already, and Ceph allows one.
    #[error(
        "image {image} is a member of group {group:?}, and Ceph allows one group an image: another \
         group snapshot is being taken of it, or has been given up; if the group is not needed, \
         remove it (rbd group rm)"
    )]
    OtherGroup {
        /// The image, with its pool.
        image: String,
        group: String,
    },
    /// The volumes of a group are in several clusters.
    ///
    /// Remedy: select volumes of one cluster for the group snapshot.
    #[error(
        "volume {handle:?} is not in cluster {cluster_id:?}: the volumes of a group snapshot must \
         be in one cluster"
    )]
    SeveralClusters { handle: String, cluster_id: String },
    /// ceph-csi has not completed the group snapshot.
    #[error(
        "ceph-csi has begun group snapshot {0:?} and not completed it; complete or delete it by \
         ceph-csi, or take another name"
    )]
    ForeignGroup(String),
    /// The source of a copy is in another cluster.
    ///
    /// Remedy: use a class of the source's cluster.
    #[error(
        "the source is in cluster {there:?}, and the class creates volumes in {here:?}: a copy must \
         be in the cluster of its source"
    )]
    OtherCluster {
        /// The source's cluster.
        there: String,
        /// The class'.
        here: String,
    },
    /// The class and the source differ in encryption.
    #[error(
        "the source is {there}, and the class requests {here}; use a class with the encryption of the source's"
    )]
    OtherEncryption {
        /// The encryption of the source.
        there: String,
        /// The encryption of the class.
        here: String,
    },
    /// The copy's KMS cannot store its passphrase.
    ///
    /// Remedy: use a class with the KMS of the source's.
    #[error(
        "the source has a passphrase of its own, and encryptionKMSID {0:?} stores no passphrases; \
         use a class with the KMS of the source's"
    )]
    OwnPassphrase(String),
    /// This driver cannot copy the keys of that encryption.
    #[error(
        "image {image} is encrypted with encryptionType {how:?}, and this driver knows `block` and \
         `file` alone; copy it with ceph-csi"
    )]
    EncryptedOtherwise {
        image: String,
        /// The type in the journal.
        how: String,
    },
    /// The request has no passphrase, or the KMS no configuration.
    #[error(transparent)]
    Encryption(#[from] EncryptionError),
    /// The cluster's id is too long for a handle.
    ///
    /// Remedy: shorten clusterID in the file of --ceph-config and in the class.
    #[error("clusterID {0:?} is too long for a handle: 64 bytes are allowed")]
    LongId(String),
    /// The journal has the volume, and its image does not exist.
    #[error("image {image} of volume {handle:?} does not exist; restore it, or delete the volume")]
    Lost {
        /// The volume's handle.
        handle: String,
        /// The image, with its pool.
        image: String,
    },
    /// The cluster reports no capacity of the pool.
    ///
    /// Remedy: start a manager: `ceph mgr stat`, `ceph -s`.
    #[error(
        "the cluster reports no capacity of {what}: its manager (ceph-mgr) has not measured it, \
         or does not run"
    )]
    NotMeasured { what: String },
    /// A group snapshot of the image is being taken, or was given up.
    #[error(
        "a group snapshot of image {image} is being taken, or was given up (group {group:?}); try \
         again; if it was given up, uringctl orphans --remove ends it"
    )]
    GroupSnapshotUnderWay {
        /// The image, with its pool.
        image: String,
        /// The temporary group's name.
        group: String,
    },
    /// The image belongs to a group.
    #[error(
        "image {image} is a member of group {group:?}; remove it from the group before the delete \
         (rbd group image remove)"
    )]
    Grouped {
        /// The image, with its pool.
        image: String,
        /// The group's name.
        group: String,
    },
    /// A secondary image whose primary may not exist.
    #[error(
        "image {image} is the secondary of a mirror, and rbd-mirror does not replay it here \
         (status {status:?}), so it may be the volume's last; start rbd-mirror, or promote the \
         image, to delete the volume"
    )]
    NotReplayed {
        /// The image, with its pool.
        image: String,
        /// What the daemon reports.
        status: String,
    },
    /// A deleted image has snapshots that are not this driver's.
    #[error(
        "deleted image {image} of pool {pool} stays in the trash, because it has the snapshots \
         {snapshots}, which no copy of this driver has left; remove them (rbd snap rm --image-id \
         {id} --pool POOL --snap NAME), or restore the image (rbd trash restore)"
    )]
    Snapshotted {
        pool: String,
        image: String,
        id: String,
        /// The names of the snapshots.
        snapshots: String,
    },
    /// What was named to be removed is no orphan, or must stay.
    ///
    /// Remedy: none is needed; `uringctl orphans` lists what may be removed.
    #[error("{path} is not removed: {why}")]
    NoOrphan {
        path: String,
        /// The reason, and what to do.
        why: String,
    },
    /// A volume without a journal cannot be copied.
    ///
    /// Remedy: copy its data to a new volume, in a pod with both.
    #[error("{0:?} cannot be copied: Kubernetes' own RBD plugin created it, without a journal")]
    Migrated(String),
}

impl RbdError {
    /// What the caller may do about it.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Config(error) => match error {
                ConfigError::Unknown { .. } | ConfigError::NoMonitors { .. } => Kind::Invalid,
                ConfigError::Unreadable { .. }
                | ConfigError::Malformed { .. }
                | ConfigError::NoMapping { .. } => Kind::Transient,
            },
            Self::Secrets(_)
            | Self::NoPool { .. }
            | Self::NoNamespace { .. }
            | Self::LongId(_)
            | Self::OtherCluster { .. }
            | Self::OtherEncryption { .. }
            | Self::OwnPassphrase(_)
            | Self::Network(NetworkError::Large(_)) => Kind::Invalid,
            Self::Encryption(error) => match error {
                EncryptionError::Config { .. } => Kind::Transient,
                EncryptionError::Service { kind, .. } => *kind,
                EncryptionError::Malformed => Kind::Internal,
                EncryptionError::Wrong => Kind::Unauthenticated,
                _ => Kind::Invalid,
            },
            Self::NoSecrets(_)
            | Self::OwnSecrets { .. }
            | Self::InUse { .. }
            | Self::Grouped { .. }
            | Self::NotReplayed { .. }
            | Self::NotReplicated { .. }
            | Self::NoOrphan { .. }
            | Self::Snapshotted { .. }
            | Self::ClientNotRegistered { .. }
            | Self::OnOtherNode { .. }
            | Self::NoLayering(_)
            | Self::NoDataOffset { .. }
            | Self::NoExclusiveLock(_)
            | Self::SeveralClusters { .. }
            | Self::EncryptedOtherwise { .. }
            | Self::Migrated(_) => Kind::Precondition,
            Self::Flattening(_)
            | Self::KeyRotated(_)
            | Self::Contended(_)
            | Self::OtherGroup { .. }
            | Self::ForeignGroup(_)
            | Self::Foreign { .. }
            | Self::GroupSnapshotUnderWay { .. }
            | Self::Unpublishing { .. }
            | Self::StillAttached { .. } => Kind::InUse,
            Self::PublishedOtherwise { .. } => Kind::Conflict,
            Self::Snapshots { .. } => Kind::Exhausted,
            Self::Lost { .. } | Self::NotSynced(_) | Self::NoNode { .. } => Kind::NotFound,
            // A final error would end the repeats, and leave the rest for ever.
            Self::NotRemoved { .. }
            | Self::NotMeasured { .. }
            | Self::KnownNodesUnreadable { .. }
            | Self::KeyStays { .. }
            | Self::Resyncing { .. } => Kind::Transient,
            Self::Cluster { source: error, .. }
            | Self::Ceph(error)
            | Self::Network(NetworkError::Ceph(error))
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

    /// Whether the user lacks the capability.
    pub fn is_access_denied(&self) -> bool {
        matches!(self, Self::Cluster { source: error, .. } | Self::Ceph(error) if error.is_access_denied())
    }
}

/// Most of the cluster's errors are transient.
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
