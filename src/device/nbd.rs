//! NBD exports as block devices: our own handshake, then the sockets to the
//! kernel's driver.
//!
//! ```text
//!  attach   server ◀─ handshake ─ client        netlink CONNECT ─▶ /dev/nbd7
//!                                  └── sockets ──────────────────────▲
//!  links    LINK_DEAD ─▶ handshake again ─ fresh sockets ─ RECONFIGURE
//! ```
//!
//! **The backend identifier** recognises a device: the kernel keeps it and sysfs shows
//! it (Linux 5.14). Ours has the driver's name, the export's address and the volume's
//! handle. So no export is attached twice, an agent finds the devices that a killed one
//! attached, and drivers of several names share a node.
//!
//! Every function may block for as long as the device or the server does: call it on a
//! lane.

use std::{
    fmt, io,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::{
    crash_point,
    kernel::{
        Dev, block,
        busy::retry_while_busy,
        nbd::{
            Identifiers, NbdDevice, ReservedIndex, identifier_of,
            netlink::{Connect, Driver},
        },
        sysfs,
    },
    nbd::Export,
};

mod client;
mod error;
mod grow;
pub mod handshake;
mod keep;
mod link;
mod link_table;
mod shape;

pub use client::ConnectError;
pub use error::NbdError;
pub use keep::keep;
pub use link::{Link, Outage};
pub use link_table::Links;

use client::Connection;
use error::{at, failed};
use handshake::ExportInfo;
use shape::Shape;

/// The prefix of a backend identifier, which distinguishes this driver's devices from those
/// of other programs.
const OURS: &str = "uring-csi:";

/// Locks, also after a panic: no code changes the guarded data in several steps.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How a device connects to an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LinkOptions {
    /// Connections to make where the server allows more than one
    /// (`NBD_FLAG_CAN_MULTI_CONN`).
    pub connections: u8,
    /// Seconds after which a request without an answer makes the kernel close its
    /// connection as dead.
    pub request_seconds: u32,
    /// Seconds that requests wait for a server that is away before they fail.
    pub dead_seconds: u32,
    /// The minimum size of the export in bytes; 0 for any. A volume grows, so the
    /// export may be larger.
    pub minimum_bytes: u64,
}

/// A device's backend identifier, as this driver writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identifier {
    /// The name of the CSI driver that attached it.
    pub driver: String,
    pub export: Export,
    /// The handle of the volume that it was attached for.
    pub volume_id: String,
}

impl fmt::Display for Identifier {
    /// Neither a driver's name nor an export's address has a space.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{OURS}{} {} {}",
            self.driver, self.export, self.volume_id
        )
    }
}

impl Identifier {
    fn parse(text: &str) -> Option<Self> {
        let (driver, rest) = text.strip_prefix(OURS)?.split_once(' ')?;
        let (export, volume_id) = rest.split_once(' ')?;
        Some(Self {
            driver: driver.to_owned(),
            export: export.parse().ok()?,
            volume_id: volume_id.to_owned(),
        })
    }

    /// The identifier of an attached device, if an agent of this driver attached it.
    pub fn of(dev: Dev) -> Option<Self> {
        Self::parse(&identifier_of(dev)?)
    }
}

/// Whether the device is attached, and to this export.
pub fn is_behind(dev: Dev, export: &Export) -> bool {
    Identifier::of(dev).is_some_and(|identifier| identifier.export == *export)
}

/// An error of a look at all devices.
fn listed() -> impl FnOnce(io::Error) -> NbdError {
    failed(Path::new("/sys/block"), "look for the export in")
}

/// The export has a device that is being attached or detached.
fn between() -> NbdError {
    let doing = "wait for the export's device in";
    failed(Path::new("/sys/block"), doing)(io::ErrorKind::ResourceBusy.into())
}

/// Attaches a new device to the export; returns its transmission flags, too. The caller has
/// found none that is attached.
fn attach(
    driver: &Driver,
    identifiers: &Identifiers<Identifier>,
    identifier: &Identifier,
    read_only: bool,
    options: &LinkOptions,
) -> Result<(NbdDevice, u16, Vec<Connection>), NbdError> {
    let export = &identifier.export;
    let (first, info) = open(export)?;
    let shape = Shape::of(export, &info, read_only)?;
    large_enough(export, shape.bytes, options)?;
    let mut connections = vec![first];
    if info.flags & handshake::flags::CAN_MULTI_CONN != 0 {
        // The kernel has one queue for each connection, but no more queues than CPUs.
        let useful = sysfs::cpus().map_err(failed(Path::new("CPUs"), "count"))?;
        for _ in 1..useful.min(options.connections.into()) {
            connections.push(open(export)?.0);
        }
    }
    let sockets: Vec<_> = connections.iter().map(std::os::fd::AsFd::as_fd).collect();
    let identifier = identifier.to_string();
    let connect = |index| Connect {
        index,
        identifier: &identifier,
        bytes: shape.bytes,
        block_bytes: shape.block_bytes,
        flags: shape.flags,
        request_seconds: options.request_seconds,
        dead_seconds: options.dead_seconds,
        sockets: &sockets,
    };
    // The handshake took a while, and another agent may have been faster.
    let found = identifiers.find(|found| found.export == *export);
    if found.map_err(listed())?.is_some() {
        return Err(between());
    }
    let made = || failed(Path::new("an NBD device"), "make");
    let mut chosen = Vec::new();
    // Just after the module was loaded udevd has the nodes open, and the kernel may
    // choose such a device.
    let index = retry_while_busy(
        || {
            if !shape.writes_zeroes() {
                chosen.push(ReservedIndex::without_zeroes()?);
            }
            driver.connect(&connect(chosen.last().map(ReservedIndex::get)))
        },
        |made| made.as_ref().is_err_and(block::is_busy),
    )
    .map_err(made())?;
    crash_point();
    // Without the mark that the number may have (`device::read_only_mark`).
    let device = NbdDevice {
        read_only,
        ..NbdDevice::of_index(index).map_err(made())?
    };
    if let Err(source) = complete(device.block.dev, &shape) {
        let undone = driver.disconnect(index);
        tracing::debug!(
            ?undone,
            "disconnected a device whose size or limits are wrong"
        );
        return Err(failed(&device.block.node, "use")(source));
    }
    Ok((device, shape.flags, connections))
}

/// Refuses an export that is smaller than the volume: it was truncated, or is another.
fn large_enough(export: &Export, has: u64, options: &LinkOptions) -> Result<(), NbdError> {
    if has >= options.minimum_bytes {
        return Ok(());
    }
    Err(NbdError::Unsuited {
        export: export.clone(),
        what: format!(
            "has {has} bytes, less than the {} that the volume must have (minSize); make it larger at its server",
            options.minimum_bytes
        ),
    })
}

/// Checks a new device against the server's announcement, and limits its requests.
fn complete(dev: Dev, shape: &Shape) -> io::Result<()> {
    let bytes = sysfs::size_bytes(dev)?;
    if bytes != shape.bytes {
        let why = format!("it has {bytes} bytes, its export {}", shape.bytes);
        return Err(io::Error::other(why));
    }
    if !shape.writes_zeroes() && sysfs::most_zeroes(dev)? > 0 {
        let why =
            "the kernel would send it write-zeroes requests, which its server does not support";
        return Err(io::Error::other(why));
    }
    let limit = shape.largest_kibibytes;
    limit.map_or(Ok(()), |limit| sysfs::limit_requests(dev, limit))
}

fn open(export: &Export) -> Result<(Connection, ExportInfo), NbdError> {
    Connection::open(export).map_err(at(export))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn identifiers_of_other_drivers_are_ignored() {
        for identifier in [
            "",
            "nbd://host/x",
            "uring-csi:",
            "uring-csi:driver nbd://host:10809/x",
            "uring-csi:driver http://host/x volume",
        ] {
            assert_eq!(Identifier::parse(identifier), None, "{identifier}");
        }
    }

    proptest! {
        #[test]
        fn a_backend_identifier_parses_back(
            driver in "[a-z0-9.-]{1,63}",
            name in "[^\0]{0,80}",
            volume_id in "[^\0\n]{1,128}",
        ) {
            let server = crate::nbd::Server::unix("/run/a socket").unwrap();
            let export = Export::new(server, &name).unwrap();
            let identifier = Identifier { driver, export, volume_id };
            prop_assert_eq!(Identifier::parse(&identifier.to_string()), Some(identifier));
        }

        #[test]
        fn any_identifier_is_parsed_or_ignored(identifier: String) {
            let _ = Identifier::parse(&identifier);
            let _ = Identifier::parse(&format!("{OURS}{identifier}"));
        }
    }
}
