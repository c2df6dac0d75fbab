//! NBD exports as block devices: our own handshake, then the sockets to the
//! kernel's driver.
//!
//! ```text
//!  attach   server ◀─ handshake ─ client        netlink CONNECT ─▶ /dev/nbd7
//!                                  └── sockets ──────────────────────▲
//!  links    LINK_DEAD ─▶ handshake again ─ fresh sockets ─ RECONFIGURE
//! ```
//!
//! **Recognised** is a device by its backend identifier, which the kernel keeps
//! and sysfs shows (Linux 5.14): ours is the export's address. So nothing is
//! attached twice, and what a killed agent attached is found.
//!
//! **Detach.** `DISCONNECT` does not look at openers: where a file system is
//! alive on the device, in a mount namespace that we can't see, it throws its
//! dirty pages away. So the device is claimed first (`O_EXCL`), and what it is
//! checked on that descriptor.
//!
//! All of this may block for as long as the device or the server does: call it
//! on a lane.

use std::{
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use rustix::{fs::OFlags, io::Errno};

use super::sysfs;
use crate::{
    kernel::{Dev, block, busy::outwait},
    nbd::Export,
};

mod client;
mod grow;
pub mod handshake;
mod links;
mod netlink;

pub use client::ConnectError;
pub use links::{Away, Link, Links, keep};

use client::Connection;
use handshake::{HandshakeError, Info};
use netlink::{Connect, Driver};

/// Stands before the export's address in a backend identifier, so that what
/// others attached is not taken for ours.
const OURS: &str = "uring-csi:";

/// Logical block sizes that the driver takes, in bytes.
const BLOCKS: std::ops::RangeInclusive<u32> = 512..=4096;

/// How an export is put behind a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Options {
    /// Connections to make where the server allows more than one
    /// (`NBD_FLAG_CAN_MULTI_CONN`).
    pub connections: u8,
    /// Seconds after which a request that got no answer makes its connection a
    /// dead one.
    pub request_seconds: u32,
    /// Seconds that requests wait for the server to come back before they fail.
    pub dead_seconds: u32,
}

/// An attached export.
#[derive(Clone, Debug)]
pub struct NbdDevice {
    /// Its device number.
    pub dev: Dev,
    /// `/dev/nbd7`.
    pub node: PathBuf,
    /// It refuses writes.
    pub read_only: bool,
}

/// Why an export could not be attached, kept, grown or detached.
#[derive(Debug, thiserror::Error)]
pub enum NbdError {
    /// No NBD driver.
    #[error("the kernel's NBD driver does not answer; load the kernel module \"nbd\" on this node")]
    NoDriver(#[source] io::Error),
    /// The server is away, or does not serve the export.
    #[error("export {export}")]
    Server {
        /// The export.
        export: Export,
        /// What happened.
        source: ConnectError,
    },
    /// The export is not what the volume needs.
    #[error("export {export} {what}")]
    Unsuited {
        /// The export.
        export: Export,
        /// What is wrong with it, and what to do.
        what: String,
    },
    /// The export became smaller than the device over it.
    #[error(
        "export {export} has shrunk from {had} to {has} bytes under {node}, which is refused: make it as large as it was, or restore its data"
    )]
    Shrunk {
        /// The export.
        export: Export,
        /// The device's node.
        node: PathBuf,
        /// The device's size in bytes.
        had: u64,
        /// What the server says, in bytes.
        has: u64,
    },
    /// The export is attached already, but not as it is needed.
    #[error(
        "export {export} is attached as {node} {how}, which this volume did not do; detach it first (nbd-client -d {node})"
    )]
    AttachedOtherwise {
        /// The export.
        export: Export,
        /// The device's node.
        node: PathBuf,
        /// What is different about it.
        how: &'static str,
    },
    /// The device's connections to the server cannot be renewed.
    #[error(
        "export {export} has {has} bytes, but {node} still has connections of an earlier agent, on which the server refuses what lies beyond byte {had}; unstage and stage the volume, or restart the server, then expand again"
    )]
    OldConnections {
        /// The export.
        export: Export,
        /// The device's node.
        node: PathBuf,
        /// The device's size in bytes.
        had: u64,
        /// What the server says, in bytes.
        has: u64,
    },
    /// A file system, device mapper, md or a process holds the device.
    #[error("{node} is in use; it stays attached until its user lets go")]
    Busy {
        /// The device's node.
        node: PathBuf,
    },
    /// The kernel refused something else.
    #[error("cannot {what} {node}")]
    Device {
        /// The device's node, or what shall become one.
        node: String,
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
}

fn failed(node: &Path, what: &'static str) -> impl FnOnce(io::Error) -> NbdError {
    let node = node.display().to_string();
    move |source| NbdError::Device { node, what, source }
}

/// What stands behind a device of ours, as its backend identifier says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Behind {
    /// The export.
    pub export: Export,
    /// The handle of the volume that it was attached for.
    pub volume_id: String,
}

impl Behind {
    /// What the kernel is told. No space is in an export's address.
    fn identifier(&self) -> String {
        format!("{OURS}{} {}", self.export, self.volume_id)
    }

    fn parse(identifier: &str) -> Option<Self> {
        let (export, volume_id) = identifier.strip_prefix(OURS)?.split_once(' ')?;
        Some(Self {
            export: export.parse().ok()?,
            volume_id: volume_id.to_owned(),
        })
    }

    /// What stands behind a device, where this or an earlier agent attached it.
    pub fn of(dev: Dev) -> Option<Self> {
        Self::parse(&sysfs::nbd_backend(dev).ok()?)
    }
}

/// Whether the device is attached, and to this export.
pub fn is_behind(dev: Dev, export: &Export) -> bool {
    Behind::of(dev).is_some_and(|behind| behind.export == *export)
}

/// The attached device that pleases, and what stands behind it. No device is
/// opened.
pub fn find(pleases: impl Fn(&Behind) -> bool) -> io::Result<Option<(NbdDevice, Behind)>> {
    for entry in fs::read_dir("/sys/block")? {
        let name = entry?.file_name();
        let Some(name) = name.to_str().filter(|name| name.starts_with("nbd")) else {
            continue;
        };
        // Where nothing is attached there is no such file.
        let Ok(identifier) = fs::read_to_string(format!("/sys/block/{name}/backend")) else {
            continue;
        };
        let Some(behind) = Behind::parse(identifier.trim_end_matches('\n')) else {
            continue;
        };
        if pleases(&behind) {
            let dev = block::dev_of(name)?;
            let device = NbdDevice {
                dev,
                node: block::node_of(dev)?,
                read_only: sysfs::is_read_only(dev)?,
            };
            return Ok(Some((device, behind)));
        }
    }
    Ok(None)
}

/// The number by which the driver knows the device, the 7 of `nbd7`.
fn index_of(dev: Dev) -> io::Result<u32> {
    let name = sysfs::sysname_of(dev)?;
    let index = name
        .strip_prefix("nbd")
        .and_then(|index| index.parse().ok());
    index.ok_or_else(|| io::Error::other(format!("{name} is no NBD device")))
}

/// Makes a device over the export. The caller has looked for one.
fn attach(
    driver: &Driver,
    behind: &Behind,
    read_only: bool,
    options: &Options,
) -> Result<(NbdDevice, Vec<Connection>), NbdError> {
    let export = &behind.export;
    let (first, info) = open(export)?;
    let shape = Shape::of(export, &info, read_only)?;
    let mut connections = vec![first];
    if info.flags & handshake::flags::CAN_MULTI_CONN != 0 {
        for _ in 1..options.connections {
            connections.push(open(export)?.0);
        }
    }
    let sockets: Vec<_> = connections.iter().map(std::os::fd::AsFd::as_fd).collect();
    let connect = Connect {
        identifier: &behind.identifier(),
        bytes: shape.bytes,
        block_bytes: shape.block_bytes,
        flags: shape.flags,
        request_seconds: options.request_seconds,
        dead_seconds: options.dead_seconds,
        sockets: &sockets,
    };
    let made = || failed(Path::new("an NBD device"), "make");
    // Straight after the module was loaded udevd has the nodes open, and the
    // kernel may choose one just then.
    let index = outwait(
        || driver.connect(&connect),
        |made| made.as_ref().is_err_and(is_busy),
    )
    .map_err(made())?;
    let dev = block::dev_of(&format!("nbd{index}")).map_err(made())?;
    let device = NbdDevice {
        dev,
        node: block::node_of(dev).map_err(made())?,
        read_only,
    };
    if let Some(kibibytes) = shape.largest_kibibytes
        && let Err(source) = sysfs::limit_requests(dev, kibibytes)
    {
        let undone = driver.disconnect(index);
        tracing::debug!(?undone, "a device that cannot be limited was taken down");
        return Err(failed(&device.node, "limit the requests of")(source));
    }
    Ok((device, connections))
}

/// Opens a device so that nobody else uses it, nor can begin to. None where it
/// is not over the export any more.
fn claim(export: &Export, device: &NbdDevice) -> Result<Option<OwnedFd>, NbdError> {
    let node = &device.node;
    let flags = OFlags::RDONLY | OFlags::EXCL;
    if !is_behind(device.dev, export) {
        return Ok(None);
    }
    let opened = outwait(
        || block::open(node, device.dev, flags),
        |opened| opened.as_ref().is_err_and(is_busy),
    );
    // While it is open it stays what it is, which may be another's by now.
    match opened {
        _ if !is_behind(device.dev, export) => Ok(None),
        Ok(file) => Ok(Some(file)),
        Err(error) if is_busy(&error) => Err(NbdError::Busy { node: node.clone() }),
        Err(error) => Err(failed(node, "open")(error)),
    }
}

fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::BUSY.raw_os_error())
}

fn open(export: &Export) -> Result<(Connection, Info), NbdError> {
    Connection::open(export).map_err(at(export))
}

fn at(export: &Export) -> impl FnOnce(ConnectError) -> NbdError {
    let export = export.clone();
    move |source| NbdError::Server { export, source }
}

/// An export, as the driver takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    bytes: u64,
    block_bytes: u32,
    flags: u16,
    /// The largest request, where the server's limit is below the kernel's.
    largest_kibibytes: Option<u32>,
}

impl Shape {
    fn of(export: &Export, info: &Info, read_only: bool) -> Result<Self, NbdError> {
        let unsuited = |what: String| NbdError::Unsuited {
            export: export.clone(),
            what,
        };
        if !read_only && info.flags & handshake::flags::READ_ONLY != 0 {
            return Err(unsuited(
                "is served read-only; stage the volume read-only, or serve it writable".to_owned(),
            ));
        }
        // The unit of a file system made on it: it must not change with the
        // server, so it is as small as the server allows.
        let block_bytes = info.minimum_block.max(*BLOCKS.start());
        if !BLOCKS.contains(&block_bytes) {
            return Err(unsuited(format!(
                "takes requests of {block_bytes} bytes at least, more than the {} of a page",
                BLOCKS.end()
            )));
        }
        let bytes = info.bytes - info.bytes % u64::from(block_bytes);
        if bytes == 0 {
            return Err(unsuited(format!("has {} bytes, not one block", info.bytes)));
        }
        Ok(Self {
            bytes,
            block_bytes,
            flags: if read_only {
                info.flags | handshake::flags::READ_ONLY
            } else {
                info.flags
            },
            largest_kibibytes: (info.maximum_block < KERNELS_LARGEST)
                .then(|| (info.maximum_block / 1024).max(4)),
        })
    }
}

/// Bytes of the largest request that the driver sends unasked.
const KERNELS_LARGEST: u32 = 32 << 20;

impl NbdError {
    /// Whether a repeat meets the same refusal: the server's or the export's
    /// word, not a failure that may pass.
    pub fn is_final(&self) -> bool {
        match self {
            Self::Unsuited { .. }
            | Self::Shrunk { .. }
            | Self::AttachedOtherwise { .. }
            | Self::OldConnections { .. } => true,
            Self::Server {
                source: ConnectError::Handshake(error),
                ..
            } => !matches!(
                error,
                HandshakeError::Io(_) | HandshakeError::ShuttingDown { .. }
            ),
            _ => false,
        }
    }

    /// Whether the server has no such export.
    pub fn is_no_export(&self) -> bool {
        matches!(
            self,
            Self::Server {
                source: ConnectError::Handshake(HandshakeError::NoExport { .. }),
                ..
            }
        )
    }
}
