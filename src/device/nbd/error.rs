//! Why an export could not be attached, kept, grown or detached.

use std::{
    io,
    path::{Path, PathBuf},
};

use super::{ConnectError, handshake::HandshakeError};
use crate::{Kind, nbd::Export};

/// Why an export could not be attached, kept, grown or detached.
#[derive(Debug, thiserror::Error)]
pub enum NbdError {
    /// No NBD driver.
    ///
    /// Remedy: `modprobe nbd` on this node.
    #[error("the kernel's NBD driver does not answer; load the kernel module \"nbd\" on this node")]
    NoDriver(#[source] io::Error),
    /// The server is away, or refuses the export.
    ///
    /// Remedy: that of the cause that follows.
    #[error("export {export}")]
    Server {
        export: Export,
        /// The error of the connection or the handshake.
        source: ConnectError,
    },
    /// The export does not fit the volume.
    ///
    /// Remedy: correct the export on the server: `nbdinfo nbd://SERVER/EXPORT` shows what it
    /// offers.
    #[error("export {export} {what}")]
    Unsuited {
        export: Export,
        /// The defect, and its remedy.
        what: String,
    },
    /// The export became smaller than the device over it.
    #[error(
        "export {export} has shrunk from {had} to {has} bytes under {node}; make it as large as before, or restore its data"
    )]
    Shrunk {
        export: Export,
        node: PathBuf,
        /// The device's size in bytes.
        had: u64,
        /// The size that the server announces, in bytes.
        has: u64,
    },
    /// The export is attached already, with other options.
    #[error(
        "export {export} is attached already, as {node}, {how}; detach it first (nbd-client -d {node})"
    )]
    AttachedOtherwise {
        export: Export,
        node: PathBuf,
        /// The difference.
        how: String,
    },
    /// The device's connections to the server cannot be renewed.
    #[error(
        "export {export} has {has} bytes, but {node} still has connections of an earlier agent, on which the server refuses requests beyond byte {had}; unstage and stage the volume, or restart the server, then expand again"
    )]
    OldConnections {
        export: Export,
        node: PathBuf,
        /// The device's size in bytes.
        had: u64,
        /// The size that the server announces, in bytes.
        has: u64,
    },
    /// A file system, device mapper, md or a process has the device open.
    ///
    /// Remedy: `uringctl volumes`, or `lsof DEVICE`, shows who has it open; end that.
    #[error("{node} is in use; it stays attached until its opener closes it")]
    Busy { node: PathBuf },
    /// Another operation on the device failed.
    ///
    /// Remedy: read the kernel log (`journalctl -k`); the call is repeated.
    #[error("cannot {what} {node}")]
    Device {
        /// The device's node, or the driver's control interface.
        node: String,
        /// The operation.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

impl NbdError {
    /// Its kind: an error of the export lasts until an operator changes the export.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Unsuited { .. }
            | Self::Shrunk { .. }
            | Self::AttachedOtherwise { .. }
            | Self::OldConnections { .. } => Kind::Precondition,
            Self::Server {
                source: ConnectError::Handshake(error),
                ..
            } => match error {
                HandshakeError::NoExport { .. } => Kind::NotFound,
                HandshakeError::Io(_) | HandshakeError::ShuttingDown { .. } => Kind::Transient,
                _ => Kind::Precondition,
            },
            _ => Kind::Transient,
        }
    }
}

pub(super) fn failed(node: &Path, what: &'static str) -> impl FnOnce(io::Error) -> NbdError {
    let node = node.display().to_string();
    move |source| NbdError::Device { node, what, source }
}

pub(super) fn at(export: &Export) -> impl FnOnce(ConnectError) -> NbdError {
    let export = export.clone();
    move |source| NbdError::Server { export, source }
}
