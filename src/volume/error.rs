//! Why a call on a volume failed.

use std::{io, path::PathBuf};

use super::task::UnderWay;

use crate::{
    Kind,
    admission::Full,
    chain,
    device::{
        DeviceError, SourceError,
        holders::{self, Holder},
    },
    fs::{fsck::FsckError, grow::GrowError},
    mount::{
        attach::MountError, options::MountOptionError, ownership::OwnershipError, path::PathError,
        unmount::UnmountError,
    },
};

/// Why a call on a volume failed. Which gRPC code each becomes is
/// [`crate::csi::status`]'s business.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A field of the request makes no sense.
    #[error("{field}: {why}")]
    Invalid {
        /// The request's field.
        field: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// The volume context names no usable source.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A mount option cannot be used.
    #[error(transparent)]
    Option(#[from] MountOptionError),
    /// A path of the request is not where it may be, or not what it must be.
    #[error("{field}")]
    Path {
        /// The request's field.
        field: &'static str,
        /// What is wrong with it.
        source: PathError,
    },
    /// This node holds no such volume, or not at that path.
    #[error("volume {volume}: {what}")]
    NotFound {
        /// The volume's handle.
        volume: String,
        /// What was looked for.
        what: String,
    },
    /// The volume is there with other arguments than those asked for.
    #[error("volume {volume} is already {have}; asked: {want}")]
    Incompatible {
        /// The volume's handle.
        volume: String,
        /// How it is.
        have: String,
        /// How it was asked for.
        want: String,
    },
    /// The volume is not in the state that the call needs.
    #[error("volume {volume}: {what}")]
    Precondition {
        /// The volume's handle.
        volume: String,
        /// What is in the way, and what to do.
        what: String,
    },
    /// Another call works on the volume.
    #[error("volume {volume}: {} is under way, {under_way}", under_way.call)]
    Pending {
        /// The volume's handle.
        volume: String,
        /// The call under way.
        under_way: UnderWay,
    },
    /// Another volume's call is about the same path.
    #[error(
        "volume {volume}: volume {other} is being mounted at {}, or unmounted from it; try again",
        path.display()
    )]
    Occupied {
        /// The volume's handle.
        volume: String,
        /// The path.
        path: PathBuf,
        /// The other volume's handle.
        other: String,
    },
    /// The agent has just started, and does not know yet what it holds.
    #[error(
        "volume {volume}: this node's agent has just started and still takes up what the one before it left"
    )]
    NotTakenUp {
        /// The volume's handle.
        volume: String,
    },
    /// The caller's time is up; the work goes on.
    #[error(
        "volume {volume}: {} goes on beyond this call's deadline, {under_way}; the next equal call joins it",
        under_way.call
    )]
    Deadline {
        /// The volume's handle.
        volume: String,
        /// The call under way.
        under_way: UnderWay,
    },
    /// Somebody else keeps the device busy; nothing was disconnected.
    #[error(
        "volume {volume}: {device} is busy, nothing was disconnected: {}",
        holders::describe(holders)
    )]
    Busy {
        /// The volume's handle.
        volume: String,
        /// The device's node.
        device: PathBuf,
        /// Who holds it, as far as could be found.
        holders: Vec<Holder>,
    },
    /// The device is not proven blank and holds no file system that was asked for.
    #[error(
        "volume {volume}: {device} holds {what}, which is neither blank nor {wanted}; it is left as it is (`uringctl format` destroys it on request)"
    )]
    Foreign {
        /// The volume's handle.
        volume: String,
        /// The device's node.
        device: PathBuf,
        /// What stands there.
        what: String,
        /// The file system asked for.
        wanted: &'static str,
    },
    /// The program that makes file systems failed.
    #[error("volume {volume}: {program} on {device} failed ({status}): {output}")]
    Mkfs {
        /// The volume's handle.
        volume: String,
        /// The device's node.
        device: PathBuf,
        /// mkfs.…
        program: &'static str,
        /// Its exit.
        status: String,
        /// A signal or an I/O error ended it: the next try may succeed.
        may_pass: bool,
        /// The end of its output.
        output: String,
    },
    /// The file system is damaged.
    #[error("volume {volume}: {device} needs repair by hand")]
    Fsck {
        /// The volume's handle.
        volume: String,
        /// The device's node.
        device: PathBuf,
        /// What fsck found.
        source: FsckError,
    },
    /// Attaching or detaching failed.
    #[error("volume {volume}")]
    Device {
        /// The volume's handle.
        volume: String,
        /// What the backend says.
        source: DeviceError,
    },
    /// Mounting failed.
    #[error("volume {volume}")]
    Mount {
        /// The volume's handle.
        volume: String,
        /// What the mount API says.
        source: MountError,
    },
    /// Publishing by bind mount failed.
    #[error("volume {volume}")]
    Bind {
        /// The volume's handle.
        volume: String,
        /// What the mount API says.
        source: MountError,
    },
    /// Unmounting failed.
    #[error("volume {volume}")]
    Unmount {
        /// The volume's handle.
        volume: String,
        /// What the kernel says.
        source: UnmountError,
    },
    /// The volume could not be given to its group.
    #[error("volume {volume}")]
    Ownership {
        /// The volume's handle.
        volume: String,
        /// Where it failed.
        source: OwnershipError,
    },
    /// Growing the file system failed.
    #[error("volume {volume}")]
    Grow {
        /// The volume's handle.
        volume: String,
        /// What the file system says.
        source: GrowError,
    },
    /// The node has as many volumes as it may have.
    #[error(
        "volume {volume}: this node holds {limit} volumes already, as many as --max-volumes allows"
    )]
    Full {
        /// The volume's handle.
        volume: String,
        /// The limit.
        limit: i64,
    },
    /// Too many volumes wait for a step; nothing was done.
    #[error("volume {volume}: {full}")]
    Overloaded {
        /// The volume's handle.
        volume: String,
        /// What is full.
        full: Full,
    },
    /// A size that cannot be had.
    #[error("volume {volume}: {why}")]
    Range {
        /// The volume's handle.
        volume: String,
        /// What was asked and what is possible.
        why: String,
    },
    /// The source is smaller than the volume is to be, and may still grow.
    #[error(
        "volume {volume}: its source has {size} bytes, {required} are required; grow the source first"
    )]
    NotGrown {
        /// The volume's handle.
        volume: String,
        /// The source's size in bytes.
        size: u64,
        /// What was asked for.
        required: u64,
    },
    /// The kernel refused something else.
    #[error("volume {volume}: cannot {what}")]
    Io {
        /// The volume's handle.
        volume: String,
        /// What was tried.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A stage failed that nobody undoes, as the volume is staged and used: no code
    /// may say that it is over, or kubelet never unstages it.
    #[error("{}; it stays staged as it was", chain(.0))]
    Kept(Box<Error>),
    /// A call failed, and what it had done could not be undone.
    #[error(
        "{}; and what was done could not be undone ({}): the next call takes it up",
        chain(cause),
        chain(undo)
    )]
    NotUndone {
        /// Why the call failed.
        cause: Box<Error>,
        /// Why the undo failed.
        undo: Box<Error>,
    },
}

impl Error {
    /// The kernel refused what was tried for the volume.
    pub fn io<W: Into<String>>(volume: &str, what: W) -> impl FnOnce(io::Error) -> Self + use<W> {
        let volume = volume.to_owned();
        let what = what.into();
        move |source| Self::Io {
            volume,
            what,
            source,
        }
    }

    /// The volume is not in the state that the call needs.
    pub fn precondition(volume: &str, what: impl Into<String>) -> Self {
        Self::Precondition {
            volume: volume.to_owned(),
            what: what.into(),
        }
    }

    /// The volume's device failed, or somebody uses it.
    pub fn device(volume: &str, source: DeviceError) -> Self {
        let volume = volume.to_owned();
        match source {
            DeviceError::Busy { device, holders } => Self::Busy {
                volume,
                device,
                holders,
            },
            source => Self::Device { volume, source },
        }
    }

    /// What the caller may do about it.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Invalid { .. } | Self::Source(_) | Self::Option(_) => Kind::Invalid,
            Self::Path { source, .. } => source.kind(),
            Self::NotFound { .. } => Kind::NotFound,
            Self::Incompatible { .. } => Kind::Conflict,
            Self::Precondition { .. } | Self::Foreign { .. } => Kind::Precondition,
            Self::Pending { .. } | Self::Occupied { .. } | Self::Busy { .. } => Kind::InUse,
            Self::Deadline { .. } => Kind::Deadline,
            Self::Mkfs {
                may_pass: false, ..
            } => Kind::Internal,
            Self::Fsck { source, .. } => source.kind(),
            Self::Device { source, .. } => source.kind(),
            Self::Mount { source, .. } => source.kind(),
            Self::Unmount { source, .. } => source.kind(),
            Self::Grow { source, .. } => source.kind(),
            Self::Full { .. } | Self::Overloaded { .. } => Kind::Exhausted,
            Self::Range { .. } => Kind::OutOfRange,
            Self::Mkfs { .. }
            | Self::Bind { .. }
            | Self::Ownership { .. }
            | Self::Io { .. }
            | Self::Kept(_)
            // Not OUT_OF_RANGE: kubelet takes that as infeasible and tries no more.
            | Self::NotGrown { .. }
            | Self::NotTakenUp { .. }
            | Self::NotUndone { .. } => Kind::Transient,
        }
    }
}
