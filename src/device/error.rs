//! Why a source is no device, or a device does not go.

use std::{io, path::PathBuf};

use super::{
    Device, ceph::error::CephImageError, loopdev::LoopError, luks::LuksError, nbd::NbdError,
    openers::Opener,
};
use crate::{
    Kind,
    ceph::{client::CephError, krbd::KrbdError},
    pool::{PoolError, claim::ClaimError},
};

/// Why a source is no device, or a device does not go.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The pool or its image.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// Another node holds the image.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// The loop driver.
    #[error(transparent)]
    Loop(#[from] LoopError),
    /// The NBD driver, or the server.
    #[error(transparent)]
    Nbd(Box<NbdError>),
    /// The Ceph cluster, the RBD driver, or the encryption over it.
    #[error(transparent)]
    Ceph(Box<CephImageError>),
    /// The image is attached for another volume, whose record is lost.
    #[error("image {image} is attached as {device} for volume {volume}; unstage that first")]
    AttachedFor {
        image: PathBuf,
        /// The device's node.
        device: PathBuf,
        /// The other volume's handle.
        volume: String,
    },
    /// The image is attached already, but not as it is needed.
    #[error(
        "image {image} is attached already, as {device}, {how}; detach it first (losetup -d {device})"
    )]
    AttachedOtherwise {
        /// The image file.
        image: PathBuf,
        /// The loop device's node.
        device: PathBuf,
        /// The difference.
        how: String,
    },
    /// A process or a mount has the device open exclusively.
    ///
    /// Remedy: `uringctl volumes`, or `lsof DEVICE`, shows who has it open; end that.
    #[error("{device} is busy")]
    Busy {
        /// The device's node.
        device: PathBuf,
        /// Its openers.
        openers: Vec<Opener>,
    },
    /// The device's number is another's by now, or about to be.
    ///
    /// Remedy: stage the volume again.
    #[error(
        "another process has detached {device}, or is detaching it; the agent does not touch it; stage the volume again"
    )]
    Changed {
        /// The device's node.
        device: PathBuf,
    },
    /// The device was attached read-only, and should take writes.
    #[error("{device} is attached read-only; unstage the volume and stage it again")]
    AttachedReadOnly {
        /// The device's node.
        device: PathBuf,
    },
    /// The image is smaller than any device can be.
    ///
    /// Remedy: delete the image, or make it as large as the volume (`truncate --size`).
    #[error("image {image} has {bytes} bytes, too few for a block device")]
    TooSmall {
        /// The image file.
        image: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// It has no passphrase.
    ///
    /// Remedy: none: the volume's class does not encrypt.
    #[error("{device} is not encrypted")]
    NotEncrypted {
        /// The device's node.
        device: PathBuf,
    },
    /// The source is a directory of a server.
    ///
    /// Remedy: use what the message asks for on a volume with a device; a directory needs neither.
    #[error("it is a directory of a server and has no block device")]
    NoDevice,
    /// The kernel refused something else.
    ///
    /// Remedy: read the kernel log (`journalctl -k`); the call is repeated.
    #[error("cannot {what}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The image file cannot take that size.
    ///
    /// Remedy: make room in the pool (`df POOL-DIRECTORY`), or on its quota.
    #[error("image {image} cannot be made {bytes} bytes long")]
    Extend {
        /// The image file.
        image: PathBuf,
        /// The requested size.
        bytes: u64,
        /// The file system's answer.
        source: io::Error,
    },
}

impl DeviceError {
    /// What the caller may do about it.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Pool(error) => error.kind(),
            Self::Claim(error) => error.kind(),
            Self::Loop(error) => error.kind(),
            Self::Nbd(error) => error.kind(),
            Self::Ceph(error) => error.kind(),
            Self::AttachedFor { .. }
            | Self::AttachedOtherwise { .. }
            | Self::AttachedReadOnly { .. }
            | Self::TooSmall { .. }
            | Self::NoDevice => Kind::Precondition,
            Self::Busy { .. } => Kind::InUse,
            Self::NotEncrypted { .. } => Kind::Unsupported,
            Self::Extend { source, .. } => match source.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Kind::Exhausted,
                _ => Kind::Transient,
            },
            Self::Changed { .. } | Self::Io { .. } => Kind::Transient,
        }
    }

    /// Whether the device is in use.
    pub fn is_busy(&self) -> bool {
        match self {
            Self::Loop(error) => matches!(error, LoopError::Busy { .. }),
            Self::Nbd(error) => matches!(**error, NbdError::Busy { .. }),
            Self::Ceph(error) => error.is_busy(),
            _ => false,
        }
    }
}

impl From<CephImageError> for DeviceError {
    fn from(error: CephImageError) -> Self {
        Self::Ceph(Box::new(error))
    }
}

impl From<CephError> for DeviceError {
    fn from(error: CephError) -> Self {
        CephImageError::from(error).into()
    }
}

impl From<LuksError> for DeviceError {
    fn from(error: LuksError) -> Self {
        CephImageError::from(error).into()
    }
}

impl From<KrbdError> for DeviceError {
    fn from(error: KrbdError) -> Self {
        CephImageError::from(error).into()
    }
}

impl From<NbdError> for DeviceError {
    fn from(error: NbdError) -> Self {
        Self::Nbd(Box::new(error))
    }
}

/// The device of a source without a passphrase.
pub fn not_encrypted(device: &Device) -> DeviceError {
    DeviceError::NotEncrypted {
        device: device.node.clone(),
    }
}

/// Turns the kernel's answer into an error that names the operation.
pub fn io(what: &'static str) -> impl FnOnce(io::Error) -> DeviceError {
    move |source| DeviceError::Io { what, source }
}
