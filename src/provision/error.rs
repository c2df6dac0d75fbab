//! The errors of the stores, and their kinds.

use std::{error::Error, io, path::PathBuf, time::Duration};

use super::rbd::RbdError;
use crate::{
    Kind,
    admission::Full,
    error_chain,
    pool::{PoolError, Scope, claim::ClaimError},
    size::exact,
};

/// Why a call failed. Its changes are undone, or the next equal call or start finishes or
/// undoes them.
#[derive(Debug, thiserror::Error)]
pub enum ProvisionError {
    /// No store has such a parameter.
    ///
    /// Remedy: remove the parameter from the class, or correct it, by [Parameters](parameters.md).
    #[error("unknown parameter {name:?}; there are {known}")]
    UnknownParameter {
        name: String,
        /// The known names.
        known: String,
    },
    /// The parameter's value makes no sense.
    ///
    /// Remedy: correct the parameter in the class, by [Parameters](parameters.md).
    #[error("parameter {name} = {value:?}: {why}")]
    BadParameter {
        name: &'static str,
        value: String,
        /// The reason.
        why: String,
    },
    /// The capacity range contradicts itself.
    #[error("{0}")]
    Range(String),
    /// The volume does not support the use.
    #[error("{0}")]
    UnsupportedUse(String),
    /// The store does not have the operation.
    #[error("{0}")]
    Unsupported(&'static str),
    /// No such volume.
    ///
    /// Remedy: `uringctl list` shows the volumes that exist.
    #[error("there is no volume {0:?}")]
    NoVolume(String),
    /// No such snapshot.
    ///
    /// Remedy: `uringctl snapshot list` shows the snapshots that exist.
    #[error("there is no snapshot {0:?}")]
    NoSnapshot(String),
    /// What a failed create left is not removed.
    #[error("cannot make {what}, nor remove what was begun ({left}); try again")]
    NotUndone {
        /// What was requested, with its name.
        what: String,
        /// The error of the removal.
        left: String,
        /// Why it failed.
        source: Box<ProvisionError>,
    },
    /// No such group snapshot.
    ///
    /// Remedy: `uringctl snapshot group list` shows those that exist.
    #[error("there is no group snapshot {0:?}")]
    NoGroupSnapshot(String),
    /// The delete of a group snapshot has begun.
    #[error(
        "group snapshot {0:?} is being deleted, and some of its snapshots may remain; delete it again"
    )]
    GroupDeleting(String),
    /// The request names other snapshots than the group has.
    ///
    /// Remedy: name the snapshots that `uringctl snapshot group list` shows.
    #[error("group snapshot {0:?} does not have the snapshots that the request names")]
    OtherMembers(String),
    /// Only snapshots of one volume are compared.
    ///
    /// Remedy: name two snapshots of one volume: `uringctl snapshot list` shows their sources.
    #[error("snapshots {base:?} and {target:?} are of different volumes")]
    OtherSource { base: String, target: String },
    /// The snapshot belongs to a group.
    #[error("snapshot {handle:?} belongs to group {group:?}; delete the group, not its members")]
    InGroup {
        /// The snapshot's handle.
        handle: String,
        group: String,
    },
    /// The volumes of a group are in several pools.
    ///
    /// Remedy: select volumes of one pool for the group snapshot.
    #[error("volume {0:?} is in another pool than the others of the group snapshot")]
    SeveralPools(String),
    /// The volumes of a group are of several backends.
    ///
    /// Remedy: select volumes of one backend for the group snapshot.
    #[error("volume {0:?} is of another backend than the others of the group snapshot")]
    SeveralBackends(String),
    /// The name belongs to a different volume or snapshot.
    ///
    /// Remedy: take another name, or request what exists; `uringctl list` shows it.
    #[error("{name:?} exists already and differs: {how}")]
    Differs {
        /// The requested name.
        name: String,
        /// What differs.
        how: String,
    },
    /// No size satisfies the request.
    #[error("{field}: {why}")]
    Size {
        /// The field of the capacity range.
        field: &'static str,
        /// Why not.
        why: String,
    },
    /// The volume or snapshot is in the local pool of another node.
    ///
    /// Remedy: call the controller on that node, in the same pod as its node agent.
    #[error("{0:?} is in the local pool of another node; only the controller there can reach it")]
    Elsewhere(String),
    /// The source of a copy is in the local pool of another node.
    #[error("the source {0:?} is in the local pool of another node; make the volume on that node")]
    SourceElsewhere(String),
    /// The handle names a pool that is not configured.
    #[error("{handle:?} is in a pool that this controller does not serve; add it by --pool")]
    PoolNotGiven {
        handle: String,
        /// The pools that it serves.
        source: PoolError,
    },
    /// The handle names a local pool, and the pool is shared, or the other way round.
    ///
    /// Remedy: use the volumeHandle that `uringctl list` shows; if the pool had another scope,
    /// give it that again by --pool.
    #[error("{handle:?} is not in pool {pool:?} of this controller, which is {scope}")]
    OtherScope {
        handle: String,
        /// The pool's name.
        pool: String,
        scope: Scope,
    },
    /// The handle is of a backend that the controller was started without.
    ///
    /// Remedy: start the controller with the option that the message names: --pool, --ceph-config
    /// or --nfs-export.
    #[error("this controller does not serve the backend of {handle:?}; add {option}")]
    HandleOfNoBackend {
        handle: String,
        /// The missing option.
        option: &'static str,
    },
    /// The class is for a backend that the controller was started without.
    ///
    /// Remedy: start the controller with the option that the message names: --pool, --ceph-config
    /// or --nfs-export.
    #[error("the class {kind}, a backend that this controller does not serve; add {option}")]
    ClassOfNoBackend {
        /// The kind of class, and the parameter that shows it.
        kind: &'static str,
        /// The missing option.
        option: &'static str,
    },
    /// The controller was started without the share.
    #[error(
        "this controller does not serve share \"/{share}\" of server {server:?}; add it by --nfs-export"
    )]
    ShareNotGiven {
        server: String,
        /// Without its first slash.
        share: String,
    },
    /// The controller was started with `--nfs-quota=required`.
    ///
    /// Remedy: enable project quotas of the export's file system (`mount -o prjquota`), or start
    /// the controller with --nfs-quota=auto.
    #[error("the volume of directory {directory} cannot have a quota: {why}")]
    NoQuota {
        directory: String,
        /// What it lacks.
        why: &'static str,
    },
    /// Another volume has a directory above or below the new one.
    #[error(
        "{field}: directory {directory:?} and {other:?}, that of another volume, would be one in \
         the other, and the outer one's pods could replace the inner one; name a directory beside it"
    )]
    Nested {
        /// What names the directory: the request's `name`, or the parameter `subDir`.
        field: &'static str,
        directory: String,
        other: String,
    },
    /// What has a snapshot's name is none.
    ///
    /// Remedy: none is needed: look at the directory, and remove it by hand if it may go.
    #[error(
        "directory {name:?} of the share is no snapshot, so it stays; nothing else has the name \
         of snapshot {handle:?}"
    )]
    NotSnapshot { handle: String, name: String },
    /// The directory of an earlier volume was archived under the name.
    #[error("cannot archive {directory}: the share has {archived:?} already; move that away")]
    Archived { directory: String, archived: String },
    /// Its directory is not the snapshot's alone.
    #[error("a volume has its directory in that of snapshot {0:?}; delete the volume first")]
    VolumeInSnapshot(String),
    /// Orphans of another store.
    ///
    /// Remedy: name a Ceph pool: `uringctl orphans --help`.
    #[error("{0} is not in a Ceph cluster, and only there are orphans found")]
    NoOrphans(String),
    /// A cluster has not answered in time.
    ///
    /// Remedy: repair the cluster: `ceph -s`, and its monitors' ports (3300, 6789) from the
    /// controller.
    #[error("cluster {cluster_id:?} has not answered for {} s", after.as_secs())]
    SilentCluster {
        cluster_id: String,
        /// The time waited.
        after: Duration,
    },
    /// The controller was started without a store.
    #[error(
        "this controller was started without any storage; add --pool, --ceph-config or --nfs-export"
    )]
    NoBackend,
    /// This node has no such local pool; another may.
    ///
    /// Remedy: nothing: the provisioner tries another node; add the pool to this one by --pool.
    #[error("this node does not have the pool")]
    PoolNotHere(#[source] PoolError),
    /// A volume in the catalogue has no image.
    #[error(
        "volume {handle:?} has lost its image {}; put it back, or delete the volume",
        path.display()
    )]
    Lost {
        /// The volume's handle.
        handle: String,
        /// Where the image was.
        path: PathBuf,
    },
    /// The requested topology does not include the node of the local pool.
    ///
    /// Remedy: nothing: the provisioner tries another node.
    #[error("pool {pool:?} is local to this node, and the volume is wanted on {wanted}")]
    NotHere {
        /// The pool's name.
        pool: String,
        /// The requested topology.
        wanted: String,
    },
    /// A loop device of this machine uses the image.
    #[error("image {image} is in use by /dev/{device} of this machine; detach it first")]
    LoopDevice {
        /// The image's file name.
        image: String,
        /// The device's name.
        device: String,
    },
    /// An NBD server writes to the image.
    #[error(
        "image {0} is open for writing on this machine: the NBD server has it for a node that \
         has the volume attached; unstage it there first (where that node is gone for good: \
         restart the server)"
    )]
    Exported(String),
    /// It cannot be determined whether an NBD server writes to the image.
    #[error(
        "the file system of pool {pool:?} cannot clone files at one point in time, and other \
         machines can mount it, so the controller cannot determine whether an NBD server \
         writes to image {image}, and a copy might be torn; use a pool on xfs or btrfs"
    )]
    WritersUnknown {
        /// The pool of the image.
        pool: String,
        /// The image's file name.
        image: String,
    },
    /// A copy would show no single point in time.
    #[error(
        "the file system of pool {pool:?} cannot clone files at one point in time, and a copy of \
         an image that is being written would be torn; unstage the volume first, or use a pool \
         on xfs or btrfs"
    )]
    NoPointInTime {
        /// The pool of the image.
        pool: String,
        /// Its user.
        #[source]
        holder: Box<ProvisionError>,
    },
    /// A create that failed is complete all the same.
    ///
    /// Remedy: delete it: `uringctl delete NAME`.
    #[error("record {} shows it as complete, so it may be in use by now", .0.display())]
    Complete(PathBuf),
    /// The source of a copy has another size than when it was opened.
    #[error("image {} changed its size before it was copied; try again", .0.display())]
    Resized(PathBuf),
    /// Another controller works on it.
    #[error("another controller works on {0:?}; try again")]
    Busy(String),
    /// The token of a listing is not one of this driver.
    #[error("starting_token {0:?} is not one of this driver's; list from the beginning")]
    BadToken(String),
    /// A file of the catalogue is invalid.
    ///
    /// Remedy: correct the record by hand, or restore it from a backup; remove it only if its
    /// volume may go.
    #[error("cannot parse {} of the catalogue; correct or remove it by hand", path.display())]
    Corrupt {
        path: PathBuf,
        /// The reason.
        source: serde_json::Error,
    },
    /// The pool has less room than the volume may take.
    #[error(
        "pool {pool:?} has {} available beyond the sizes of its volumes, and \
         this needs {}; free space, or let the class exceed the pool (parameter overcommit)",
        exact(*available), exact(*more)
    )]
    NoRoom {
        /// The pool's name.
        pool: String,
        /// The bytes needed.
        more: u64,
        /// The bytes available.
        available: u64,
    },
    /// An image has a reservation and no record.
    #[error(
        "image {} has lost its record {}, so the controller cannot determine whether it is in \
         use, and keeps it; restore the record, or, if the image is not needed, remove it and \
         then {}",
        image.display(), record.display(), reservation.display()
    )]
    Unrecorded {
        image: PathBuf,
        /// Where the record was.
        record: PathBuf,
        /// The files that belong to it.
        reservation: PathBuf,
    },
    /// A pool has not answered in time.
    ///
    /// Remedy: repair the pool's disk or server: `ls DIRECTORY` hangs as long as it does not
    /// answer.
    #[error("pool {pool:?} has not answered for {} s", after.as_secs())]
    Silent {
        /// The pool's name.
        pool: String,
        /// The time waited.
        after: Duration,
    },
    /// Too many copies wait.
    #[error(transparent)]
    Full(#[from] Full),
    /// Another node holds the image.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// The pool failed.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// An RBD volume, or its cluster.
    #[error(transparent)]
    Rbd(#[from] RbdError),
    /// A system call failed.
    ///
    /// Remedy: read the kernel log (`journalctl -k`); `df DIRECTORY` shows whether the file system
    /// is full.
    #[error("cannot {step} {}", path.display())]
    Io {
        /// The system call.
        step: &'static str,
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
}

impl ProvisionError {
    /// The answer to a create that failed with this error and was undone: none that is final
    /// while something is left, which a repeat removes.
    pub fn after_undo(self, what: &str, undone: Result<(), impl Error>) -> Self {
        match undone {
            Ok(()) => self,
            Err(left) => Self::NotUndone {
                what: what.to_owned(),
                left: error_chain(&left),
                source: Box::new(self),
            },
        }
    }

    /// The kind of the error.
    pub fn kind(&self) -> Kind {
        match self {
            Self::UnknownParameter { .. }
            | Self::BadParameter { .. }
            | Self::ClassOfNoBackend { .. }
            | Self::Range(_)
            | Self::OtherMembers(_)
            | Self::InGroup { .. }
            | Self::OtherSource { .. }
            | Self::UnsupportedUse(_) => Kind::Invalid,
            Self::Unsupported(_) => Kind::Unsupported,
            Self::NoVolume(_) | Self::NoSnapshot(_) | Self::NoGroupSnapshot(_) => Kind::NotFound,
            Self::Differs { .. } => Kind::Conflict,
            Self::Size { .. } => Kind::OutOfRange,
            Self::NotHere { .. }
            | Self::SourceElsewhere(_)
            | Self::PoolNotHere(_)
            | Self::NoRoom { .. } => Kind::Exhausted,
            Self::Elsewhere(_)
            | Self::PoolNotGiven { .. }
            | Self::OtherScope { .. }
            | Self::HandleOfNoBackend { .. }
            | Self::ShareNotGiven { .. }
            | Self::NoQuota { .. }
            | Self::Nested { .. }
            | Self::NotSnapshot { .. }
            | Self::Archived { .. }
            | Self::VolumeInSnapshot(_)
            | Self::NoBackend
            | Self::NoOrphans(_)
            | Self::SeveralBackends(_)
            | Self::SeveralPools(_)
            | Self::LoopDevice { .. }
            | Self::Exported(_)
            | Self::WritersUnknown { .. }
            | Self::NoPointInTime { .. } => Kind::Precondition,
            Self::Busy(_)
            | Self::Resized(_)
            | Self::GroupDeleting(_)
            | Self::BadToken(_)
            | Self::Claim(ClaimError::UsedByController { .. }) => Kind::InUse,
            Self::Corrupt { .. }
            | Self::Lost { .. }
            | Self::Unrecorded { .. }
            | Self::Claim(ClaimError::Corrupt { .. }) => Kind::Internal,
            Self::Silent { .. }
            | Self::SilentCluster { .. }
            | Self::NotUndone { .. }
            | Self::Complete(_)
            | Self::Full(_) => Kind::Transient,
            Self::Io { source, .. } => of_io(source),
            Self::Rbd(error) => error.kind(),
            Self::Pool(error) | Self::Claim(ClaimError::Pool(error)) => match error {
                // No node has a volume yet that could be used as large as it is.
                PoolError::NoRoomToGrow { .. } => Kind::Exhausted,
                PoolError::Io { source, .. } => of_io(source),
                error => error.kind(),
            },
            Self::Claim(error) => error.kind(),
        }
    }
}

/// The scheduler handles a full file system, the caller a file too large for it, the
/// administrator an unsupported operation (preallocate) and names that are too long; other
/// errors may pass.
fn of_io(error: &io::Error) -> Kind {
    use io::ErrorKind as E;
    match error.kind() {
        E::StorageFull | E::QuotaExceeded => Kind::Exhausted,
        E::FileTooLarge => Kind::OutOfRange,
        E::Unsupported | E::InvalidFilename | E::InvalidData => Kind::Precondition,
        _ => Kind::Transient,
    }
}
