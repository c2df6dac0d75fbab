//! Why an image could not be mapped, grown or unmapped.

use std::{io, path::PathBuf};

use rustix::io::Errno;

use super::ImageSpec;
use crate::{
    Kind,
    ceph::client::{monitor::MonitorError, rbd::Features},
};

/// Why an image could not be mapped, grown or unmapped.
#[derive(Debug, thiserror::Error)]
pub enum KrbdError {
    /// No RBD driver.
    ///
    /// Remedy: `modprobe rbd` on this node.
    #[error("the kernel's RBD driver is not there; load the kernel module \"rbd\" on this node")]
    NoDriver(#[source] io::Error),
    /// The configuration has no address of a monitor.
    #[error(transparent)]
    Monitor(#[from] MonitorError),
    /// No monitor's name is known.
    ///
    /// Remedy: write the monitor's address in place of its name, or correct the node's DNS (`getent
    /// hosts NAME`).
    #[error("cannot look up the monitor {monitor}")]
    Lookup {
        /// The configured name.
        monitor: String,
        /// The resolver's answer.
        source: io::Error,
    },
    /// There is no address for the version of the protocol.
    ///
    /// Remedy: add monitors on these ports to the file of --ceph-config, or correct ms_mode in
    /// mapOptions.
    #[error(
        "ms_mode={mode} needs monitors on the ports of that protocol (3300; 6789 with legacy), but the configuration has {monitors}"
    )]
    WrongVersion {
        mode: String,
        /// The configured addresses.
        monitors: String,
    },
    /// No monitor answers; the agent did not ask the driver.
    ///
    /// Remedy: repair the monitors or the network to them: `ceph -s`; `ceph mon dump` shows their
    /// addresses.
    #[error("cannot map image {image}")]
    Silent {
        image: String,
        /// The monitors, and the time waited.
        source: MonitorError,
    },
    /// The driver lacks features of the image.
    ///
    /// Remedy: disable them (`rbd feature disable`), or map by rbd-nbd (mounter rbd-nbd).
    #[error(
        "image {image} has features that this kernel's RBD driver lacks: {lacking}; it has {supported}"
    )]
    Features {
        image: String,
        /// The features.
        lacking: Features,
        /// The driver's features.
        supported: Features,
    },
    /// The names do not fit into the driver's line.
    ///
    /// Remedy: take names that the kernel's driver accepts, or map by rbd-nbd (mounter rbd-nbd).
    #[error("image {image}: {what}")]
    Unsuited {
        image: String,
        /// The reason, and the remedy.
        what: &'static str,
    },
    /// The image is mapped already, but not as it is needed.
    #[error("image {image} is mapped already, as {node}, {how}; unmap it first (rbd unmap {node})")]
    MappedOtherwise {
        image: String,
        node: PathBuf,
        /// The difference.
        how: &'static str,
    },
    /// An image of that name is mapped, and may be another cluster's.
    #[error(
        "image {image}: another program mapped an image of that name as {node}, by the monitors {monitors}; the agent cannot determine whether it is this image, and maps nothing: unmap it (rbd unmap {node}), configure one of these monitors, or install librbd, by which the agent asks the cluster for its fsid"
    )]
    Doubtful {
        image: String,
        node: PathBuf,
        monitors: String,
    },
    /// The image is mapped several times.
    #[error("image {image} is mapped as {} and {}; unmap one of them (rbd unmap)", nodes.0, nodes.1)]
    Twice {
        image: String,
        /// The devices' nodes.
        nodes: (String, String),
    },
    /// An agent that was killed meanwhile is still mapping it.
    ///
    /// Remedy: nothing: the call is repeated; if it lasts, read the kernel log (`journalctl -k`).
    #[error(
        "an agent that was killed is still mapping the image, and cannot be stopped; a later call finds the device"
    )]
    UnderWay,
    /// The cluster refused the user.
    #[error(
        "the cluster does not let client.{user} map image {image}; check userID, userKey and the user's caps (ceph auth get client.{user})"
    )]
    Denied {
        image: String,
        /// The user's id.
        user: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Pool, namespace, image or snapshot is missing.
    ///
    /// Remedy: `rbd ls --pool POOL` shows the images; restore the image, or correct the volume.
    #[error("the cluster has no image {image}, or no such pool, namespace or snapshot")]
    Missing { image: String },
    /// The driver failed.
    ///
    /// Remedy: read the kernel log (`journalctl -k`).
    #[error(
        "cannot map image {image}{}; the kernel's log says more",
        reason(source)
    )]
    Map {
        image: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A file system, device mapper, md or a process holds the device.
    ///
    /// Remedy: `uringctl volumes`, or `lsof DEVICE`, shows who has it open; end that.
    #[error("{node} is in use; it stays mapped until its opener closes it")]
    Busy { node: PathBuf },
    /// The image has not grown to the size.
    ///
    /// Remedy: `rbd info POOL/IMAGE` shows the image's size; if it has grown, unstage the volume
    /// and stage it again.
    #[error(
        "{node} has {bytes} bytes, fewer than the required {wanted}: image {image} was not grown, or the cluster has not notified this node"
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
    ///
    /// Remedy: read the kernel log (`journalctl -k`); the call is repeated.
    #[error("cannot {what} {subject}")]
    Device {
        /// What was tried.
        what: &'static str,
        subject: String,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// A hint on the kernel's answer.
fn reason(source: &io::Error) -> &'static str {
    match source.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NXIO) => {
            ": it has features that this kernel's RBD driver lacks (rbd info; rbd feature disable)"
        }
        Some(Errno::INVAL) => {
            ": the driver does not know one of its map options, or the type of the user's key (AES-256 of Ceph 20 takes a newer kernel, or rbd-nbd)"
        }
        Some(Errno::TIMEDOUT | Errno::IO) => ": the cluster did not answer in time",
        Some(Errno::SHUTDOWN) => ": the cluster has blocklisted this node",
        _ => "",
    }
}

impl KrbdError {
    /// Turns the driver's answer to a map into an error.
    pub(super) fn of_map(image: &ImageSpec, user: &str, source: io::Error) -> Self {
        let image = image.to_string();
        match source.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::ACCESS | Errno::PERM) => Self::Denied {
                image,
                user: user.to_owned(),
                source,
            },
            Some(Errno::NOENT) => Self::Missing { image },
            _ => Self::Map { image, source },
        }
    }

    /// What the caller may do about it.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Missing { .. } => Kind::NotFound,
            Self::Denied { .. } => Kind::Unauthenticated,
            Self::UnderWay => Kind::InUse,
            Self::Monitor(_)
            | Self::WrongVersion { .. }
            | Self::Features { .. }
            | Self::Unsuited { .. }
            | Self::MappedOtherwise { .. }
            | Self::Doubtful { .. }
            | Self::Twice { .. } => Kind::Precondition,
            Self::Map { source, .. } => match source.raw_os_error().map(Errno::from_raw_os_error) {
                Some(Errno::NXIO | Errno::INVAL) => Kind::Precondition,
                _ => Kind::Transient,
            },
            _ => Kind::Transient,
        }
    }

    /// Whether another mounter may map the image if this driver cannot.
    pub fn is_for_another_mounter(&self) -> bool {
        match self {
            Self::NoDriver(_) | Self::Features { .. } => true,
            Self::Map { source, .. } => source.raw_os_error() == Some(Errno::NXIO.raw_os_error()),
            _ => false,
        }
    }

    /// Whether the cluster's fsid decides.
    pub fn is_doubtful(&self) -> bool {
        matches!(self, Self::Doubtful { .. })
    }

    /// Whether the client that it would share is blocklisted.
    pub fn is_fenced(&self) -> bool {
        match self {
            Self::Map { source, .. } => {
                source.raw_os_error() == Some(Errno::SHUTDOWN.raw_os_error())
            }
            _ => false,
        }
    }

    /// Whether the device is in use.
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Busy { .. })
    }
}

/// Turns the kernel's answer into an error that names the operation.
pub(super) fn failed(what: &'static str, subject: String) -> impl FnOnce(io::Error) -> KrbdError {
    move |source| KrbdError::Device {
        what,
        subject,
        source,
    }
}
