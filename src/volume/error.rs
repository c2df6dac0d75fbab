//! Why a call on a volume failed.

use std::{io, path::PathBuf};

use super::progress::UnderWay;
use crate::{
    Kind,
    admission::Full,
    device::{
        DeviceError, SourceError,
        openers::{self, Opener},
    },
    error_chain,
    fs::{fsck::FsckError, fscrypt::FscryptError, grow::GrowError, trim::TrimError},
    mount::{
        attach::MountError, options::MountOptionError, ownership::OwnershipError, path::PathError,
        unmount::UnmountError,
    },
    size::exact,
};

/// A call that failed.
///
/// Remedy: that of the cause that follows.
#[derive(Debug, thiserror::Error)]
#[error("volume {volume}")]
pub struct VolumeError {
    /// The volume's handle.
    pub volume: String,
    /// Why it failed.
    #[source]
    pub cause: Cause,
}

impl VolumeError {
    /// What the caller may do about it.
    pub fn kind(&self) -> Kind {
        self.cause.kind()
    }
}

/// Why a call on a volume failed, or a request for one was refused.
#[derive(Debug, thiserror::Error)]
pub enum Cause {
    /// A field of the request makes no sense.
    #[error("{field}: {why}")]
    Invalid {
        /// The request's field.
        field: &'static str,
        /// The defect.
        why: String,
    },
    /// The volume context names no usable source.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A mount option cannot be used.
    #[error(transparent)]
    Option(#[from] MountOptionError),
    /// A path of the request is outside the allowed directories, or holds something else.
    #[error("{field}")]
    Path {
        /// The request's field.
        field: &'static str,
        /// The defect.
        source: PathError,
    },
    /// This node holds no such volume, or not at that path.
    #[error("{0}")]
    NotFound(String),
    /// The volume is there with other arguments than those requested.
    ///
    /// Remedy: unstage the volume first, or request it as it is; `uringctl volumes` shows how it is
    /// staged.
    #[error("it is already {have}; requested: {want}")]
    Incompatible {
        /// The arguments that it has.
        have: String,
        /// The arguments that were requested.
        want: String,
    },
    /// The volume is not in the state that the call needs; the text has the remedy.
    #[error("{0}")]
    Precondition(String),
    /// Another call works on the volume.
    ///
    /// Remedy: wait, or find what hangs: `uringctl volumes` shows each step and its age.
    #[error("{} is under way, {}", .0.call, .0)]
    Pending(UnderWay),
    /// Another volume's call works on the same path.
    #[error(
        "volume {other} is being mounted at {}, or unmounted from it; try again",
        path.display()
    )]
    Occupied {
        path: PathBuf,
        /// The other volume's handle.
        other: String,
    },
    /// The agent has just started, and has not recovered its volumes yet.
    ///
    /// Remedy: repeat the call; if it lasts, `uringctl info` and the agent's log say what it waits
    /// for.
    #[error("this node's agent has just started and is still recovering its volumes")]
    NotRecovered,
    /// The volume may be an inline one, whose record is not read yet.
    ///
    /// Remedy: repair the disk of --state-dir; `uringctl info` shows when the records are read.
    #[error("it may be an inline volume, and those are not recovered yet: {0}")]
    RecordsUnread(String),
    /// The caller's deadline passed; the work continues.
    ///
    /// Remedy: nothing: kubelet repeats the call, which joins the work; `uringctl volumes` shows
    /// the step.
    #[error("{} continues after this call's deadline, {}; the next equal call joins it", .0.call, .0)]
    Deadline(UnderWay),
    /// Another opener keeps the device busy; nothing was disconnected.
    ///
    /// Remedy: end the opener that the message names (`kill`, `umount`, `losetup -d`); the repeat
    /// succeeds.
    #[error(
        "{device} is busy, nothing was disconnected: {}",
        openers::describe(openers)
    )]
    Busy {
        /// The device's node.
        device: PathBuf,
        /// Its openers, as far as they could be found.
        openers: Vec<Opener>,
    },
    /// As many unmounts as may wait for the server do.
    ///
    /// Remedy: bring the server back, or repair the network to it (`rpcinfo -t SERVER nfs`, or a
    /// connection to port 2049).
    #[error(
        "{count} unmounts wait for the server {server}, which does not answer; nothing more of it \
         is unmounted until one of them ends"
    )]
    ServerAway {
        /// The server's name or address.
        server: String,
        /// How many wait.
        count: usize,
    },
    /// The device is not proven blank and does not hold the requested file system.
    ///
    /// Remedy: if its content may be lost: `uringctl format VOLUME --fs TYPE --confirm VOLUME`.
    #[error(
        "{device} holds {what}, which is neither blank nor {wanted}; it is left as it is (`uringctl format` destroys it on request)"
    )]
    Foreign {
        /// The device's node.
        device: PathBuf,
        /// The content of the device.
        what: String,
        /// The requested file system.
        wanted: &'static str,
    },
    /// The program that makes file systems failed.
    ///
    /// Remedy: read the program's output and the kernel log (`journalctl -k`); correct mkfsOptions
    /// in the class, or repair the device.
    #[error("{program} on {device} failed ({status}): {output}")]
    Mkfs {
        /// The device's node.
        device: PathBuf,
        /// The program, such as `mkfs.ext4`.
        program: &'static str,
        /// Its exit status.
        status: String,
        /// A signal or an I/O error ended it: the next try may succeed.
        may_pass: bool,
        /// The end of its output.
        output: String,
    },
    /// The file system is damaged.
    ///
    /// Remedy: detach the volume (`uringctl down VOLUME`), back up its image, and run fsck by hand.
    #[error("{device} needs repair by hand")]
    Fsck {
        /// The device's node.
        device: PathBuf,
        /// What fsck found.
        source: FsckError,
    },
    /// Attaching or detaching failed.
    #[error(transparent)]
    Device(DeviceError),
    /// Mounting failed.
    #[error(transparent)]
    Mount(MountError),
    /// Publishing by bind mount failed.
    #[error(transparent)]
    Bind(MountError),
    /// Unmounting failed.
    #[error(transparent)]
    Unmount(#[from] UnmountError),
    /// Its files are encrypted, and their directory cannot be used.
    #[error(transparent)]
    Files(#[from] FscryptError),
    /// The volume could not be given to its group.
    #[error(transparent)]
    Ownership(#[from] OwnershipError),
    /// Growing the file system failed.
    #[error(transparent)]
    Grow(#[from] GrowError),
    /// Returning unused space failed.
    #[error(transparent)]
    Trim(#[from] TrimError),
    /// The volume does not support the operation; the text says why.
    #[error("{0}")]
    Unsupported(String),
    /// The node has as many volumes as it may have.
    ///
    /// Remedy: move pods to other nodes, or raise --max-volumes.
    #[error("this node holds {limit} volumes already, as many as --max-volumes allows")]
    Full { limit: i64 },
    /// Too many volumes wait for a step; nothing was done.
    #[error("{0}")]
    Overloaded(Full),
    /// An impossible size; the text has the requested and the possible size.
    #[error("{0}")]
    Range(String),
    /// The source is smaller than requested, and may still grow.
    #[error(
        "its source has {}, and {} are required; grow the source first",
        exact(*size), exact(*required)
    )]
    NotGrown {
        /// The source's size in bytes.
        size: u64,
        /// The requested size in bytes.
        required: u64,
    },
    /// The kernel refused something else.
    ///
    /// Remedy: read the kernel log (`journalctl -k`); the call is repeated.
    #[error("cannot {what}")]
    Io {
        /// The operation.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A call failed, and the volume is in use, or has data of an earlier call: a final code
    /// would make kubelet forget the volume, and never unstage it.
    ///
    /// Remedy: that of the message before the semicolon; the call is repeated.
    #[error("{}; it stays as it was", error_chain(.0))]
    Kept(Box<Cause>),
    /// A device was formatted, and is still attached.
    #[error(
        "its device is formatted, but not detached ({}); stage the volume, or unstage it",
        error_chain(.0)
    )]
    NotDetached(Box<Cause>),
    /// A call failed, and so did its undo.
    ///
    /// Remedy: read the kernel log (`journalctl -k`) and `uringctl volumes`; the call is repeated.
    #[error(
        "{}; its undo failed, too ({}); the next call repeats it",
        error_chain(cause),
        error_chain(undo)
    )]
    NotUndone {
        /// Why the call failed.
        cause: Box<Cause>,
        /// Why the undo failed.
        undo: Box<Cause>,
    },
}

impl Cause {
    /// The failure of a call on this volume.
    pub(super) fn of(self, volume: &str) -> VolumeError {
        VolumeError {
            volume: volume.to_owned(),
            cause: self,
        }
    }

    /// The volume is not in the state that the call needs; `what` has the remedy.
    pub(super) fn precondition(what: impl Into<String>) -> Self {
        Self::Precondition(what.into())
    }

    /// The failure of a call whose undo failed, too.
    pub(super) fn not_undone(self, undo: Self) -> Self {
        Self::NotUndone {
            cause: Box::new(self),
            undo: Box::new(undo),
        }
    }

    /// The kernel refused the operation.
    pub(super) fn io<W: Into<String>>(what: W) -> impl FnOnce(io::Error) -> Self + use<W> {
        let what = what.into();
        move |source| Self::Io { what, source }
    }

    /// What the caller may do about it.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Invalid { .. } | Self::Source(_) | Self::Option(_) => Kind::Invalid,
            Self::Path { source, .. } => source.kind(),
            Self::NotFound(_) => Kind::NotFound,
            Self::Incompatible { .. } => Kind::Conflict,
            Self::Unsupported(_) | Self::Trim(TrimError::Unsupported) => Kind::Unsupported,
            Self::Precondition(_) | Self::Foreign { .. } => Kind::Precondition,
            Self::Pending(_) | Self::Occupied { .. } | Self::Busy { .. } => Kind::InUse,
            Self::Deadline(_) => Kind::Deadline,
            Self::Mkfs {
                may_pass: false, ..
            } => Kind::Internal,
            Self::Fsck { source, .. } => source.kind(),
            Self::Files(error) => error.kind(),
            Self::Device(error) => error.kind(),
            Self::Mount(error) => error.kind(),
            Self::Unmount(error) => error.kind(),
            Self::Grow(error) => error.kind(),
            Self::Full { .. } | Self::Overloaded(_) => Kind::Exhausted,
            Self::Range(_) => Kind::OutOfRange,
            Self::Mkfs { .. }
            | Self::Bind(_)
            | Self::Ownership(_)
            | Self::Io { .. }
            | Self::Trim(TrimError::Io(_))
            | Self::Kept(_)
            // Not OUT_OF_RANGE: kubelet takes that as infeasible and tries no more.
            | Self::NotGrown { .. }
            | Self::NotRecovered
            | Self::RecordsUnread(_)
            | Self::NotDetached(_)
            | Self::ServerAway { .. }
            | Self::NotUndone { .. } => Kind::Transient,
        }
    }
}

impl From<DeviceError> for Cause {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Busy { device, openers } => Self::Busy { device, openers },
            error => Self::Device(error),
        }
    }
}
