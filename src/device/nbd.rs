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
//! and sysfs shows (Linux 5.14): ours is the driver's name, the export's address
//! and the volume's handle. So nothing is attached twice, what a killed agent
//! attached is found, and drivers of several names share a node.
//!
//! **Detach.** `DISCONNECT` does not look at openers: where a file system is
//! alive on the device, in a mount namespace that we can't see, it throws its
//! dirty pages away. So the device is claimed first (`O_EXCL`), and what it is
//! checked on that descriptor.
//!
//! All of this may block for as long as the device or the server does: call it
//! on a lane.

use std::{
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    fs::{FlockOperation, OFlags, flock},
    io::Errno,
};

use crate::{
    crash_point,
    kernel::{
        Dev, block,
        busy::{outwait, outwait_for},
        nbd::{
            ReservedIndex,
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
mod links;
mod shape;

pub use client::ConnectError;
pub use error::NbdError;
pub use keep::keep;
pub use link::{Away, Link};
pub use links::Links;

use client::Connection;
use error::{at, failed};
use handshake::Info;
use shape::Shape;

/// Stands before the export's address in a backend identifier, so that what
/// others attached is not taken for ours.
const OURS: &str = "uring-csi:";

/// How long requests and readers are waited for before a device is disconnected.
const QUIET_WITHIN: Duration = Duration::from_secs(1);

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
    /// The least that the export must have, in bytes; 0 where that is all the
    /// same. A volume grows, so it may have more.
    pub minimum_bytes: u64,
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

/// What stands behind a device, as its backend identifier says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Behind {
    /// The name of the CSI driver that attached it.
    pub driver: String,
    /// The export.
    pub export: Export,
    /// The handle of the volume that it was attached for.
    pub volume_id: String,
}

impl Behind {
    /// What the kernel is told. No space is in a driver's name or an export's
    /// address.
    fn identifier(&self) -> String {
        format!("{OURS}{} {} {}", self.driver, self.export, self.volume_id)
    }

    fn parse(identifier: &str) -> Option<Self> {
        let (driver, rest) = identifier.strip_prefix(OURS)?.split_once(' ')?;
        let (export, volume_id) = rest.split_once(' ')?;
        Some(Self {
            driver: driver.to_owned(),
            export: export.parse().ok()?,
            volume_id: volume_id.to_owned(),
        })
    }

    /// What stands behind a device, where an agent attached it. The identifier
    /// outlives what it names by a moment, in which the device has no size.
    pub fn of(dev: Dev) -> Option<Self> {
        let behind = Self::parse(&sysfs::nbd_backend(dev).ok()?)?;
        (sysfs::size_bytes(dev).ok()? > 0).then_some(behind)
    }
}

/// Whether the device is attached, and to this export.
pub fn is_behind(dev: Dev, export: &Export) -> bool {
    Behind::of(dev).is_some_and(|behind| behind.export == *export)
}

/// The attached device that pleases, and what stands behind it. No device is
/// opened.
pub fn find(pleases: impl Fn(&Behind) -> bool) -> io::Result<Option<(NbdDevice, Behind)>> {
    for index in sysfs::numbers("nbd")? {
        let dev = sysfs::dev_of(&format!("nbd{index}"))?;
        // Where nothing is attached there is no such file.
        let behind = sysfs::nbd_backend(dev).ok();
        let behind = behind.and_then(|identifier| Behind::parse(&identifier));
        if let Some(behind) = behind.filter(&pleases) {
            let device = NbdDevice {
                dev,
                node: sysfs::node_of(dev)?,
                read_only: sysfs::is_read_only(dev)?,
            };
            return Ok(Some((device, behind)));
        }
    }
    Ok(None)
}

/// The number by which the driver knows the device, the 7 of `nbd7`.
fn index_of(dev: Dev) -> io::Result<u32> {
    let name = sysfs::name_of(dev)?;
    let index = sysfs::number_in(&name, "nbd");
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
    large_enough(export, shape.bytes, options)?;
    let mut connections = vec![first];
    if info.flags & handshake::flags::CAN_MULTI_CONN != 0 {
        // The driver has a queue for each, but no more queues than CPUs.
        let useful = sysfs::cpus().map_err(failed(Path::new("CPUs"), "count"))?;
        for _ in 1..useful.min(options.connections.into()) {
            connections.push(open(export)?.0);
        }
    }
    let sockets: Vec<_> = connections.iter().map(std::os::fd::AsFd::as_fd).collect();
    let identifier = behind.identifier();
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
    let made = || failed(Path::new("an NBD device"), "make");
    let mut chosen = Vec::new();
    // Straight after the module was loaded udevd has the nodes open, and the
    // kernel may choose one just then.
    let index = outwait(
        || {
            if !shape.writes_zeroes() {
                chosen.push(ReservedIndex::without_zeroes()?);
            }
            driver.connect(&connect(chosen.last().map(ReservedIndex::get)))
        },
        |made| made.as_ref().is_err_and(is_busy),
    )
    .map_err(made())?;
    crash_point();
    let dev = sysfs::dev_of(&format!("nbd{index}")).map_err(made())?;
    let device = NbdDevice {
        dev,
        node: sysfs::node_of(dev).map_err(made())?,
        read_only,
    };
    if let Err(source) = complete(dev, &shape) {
        let undone = driver.disconnect(index);
        tracing::debug!(
            ?undone,
            "a device that is not as it should be was taken down"
        );
        return Err(failed(&device.node, "use")(source));
    }
    Ok((device, connections))
}

/// An export that was cut short, or is another than was meant, is not touched.
fn large_enough(export: &Export, has: u64, options: &Options) -> Result<(), NbdError> {
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

/// Makes sure that a fresh device is what the server has.
fn complete(dev: Dev, shape: &Shape) -> io::Result<()> {
    let bytes = sysfs::size_bytes(dev)?;
    if bytes != shape.bytes {
        let why = format!("it has {bytes} bytes, its export {}", shape.bytes);
        return Err(io::Error::other(why));
    }
    if !shape.writes_zeroes() && sysfs::most_zeroes(dev)? > 0 {
        let why = "it would write zeroes as an earlier export could, and this one cannot";
        return Err(io::Error::other(why));
    }
    let limit = shape.largest_kibibytes;
    limit.map_or(Ok(()), |limit| sysfs::limit_requests(dev, limit))
}

/// Opens a device so that nobody else uses it, nor can begin to. None where it
/// is not over the export any more, or another volume's.
fn claim(behind: &Behind, device: &NbdDevice) -> Result<Option<OwnedFd>, NbdError> {
    let node = &device.node;
    let flags = OFlags::RDONLY | OFlags::EXCL;
    let is_its = || Behind::of(device.dev).as_ref() == Some(behind);
    if !is_its() {
        return Ok(None);
    }
    let opened = outwait(
        || block::open(node, device.dev, flags),
        |opened| opened.as_ref().is_err_and(is_busy),
    );
    // While it is open it stays what it is, which may be another's by now.
    match opened {
        _ if !is_its() => Ok(None),
        Ok(file) => Ok(Some(file)),
        Err(error) if is_busy(&error) => Err(NbdError::Busy { node: node.clone() }),
        Err(error) => Err(failed(node, "open")(error)),
    }
}

/// Lets requests under way end, and keeps udevd from beginning more: it reads a
/// device that appears or changes, unless somebody has it locked
/// (<https://systemd.io/BLOCK_DEVICE_LOCKING>). Where a device is disconnected
/// before they are answered, the server answers to nobody, on which nbdkit 1.32
/// was seen to abort, for all of its exports. What takes longer than
/// [`QUIET_WITHIN`] is not waited for: the server may never answer.
fn quiet(device: &NbdDevice, claimed: &OwnedFd) {
    let deadline = Instant::now() + QUIET_WITHIN;
    let left = || deadline.saturating_duration_since(Instant::now());
    let locked = outwait_for(
        left(),
        || flock(claimed, FlockOperation::NonBlockingLockExclusive),
        |locked| *locked == Err(Errno::WOULDBLOCK),
    );
    let under_way = outwait_for(
        left(),
        || sysfs::in_flight(device.dev),
        |count| count.as_ref().is_ok_and(|&count| count > 0),
    );
    tracing::debug!(device = %device.node.display(), ?locked, ?under_way, "disconnected next");
}

fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::BUSY.raw_os_error())
}

fn open(export: &Export) -> Result<(Connection, Info), NbdError> {
    Connection::open(export).map_err(at(export))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn identifiers_of_others_are_not_ours() {
        for identifier in [
            "",
            "nbd://host/x",
            "uring-csi:",
            "uring-csi:driver nbd://host:10809/x",
            "uring-csi:driver http://host/x volume",
        ] {
            assert_eq!(Behind::parse(identifier), None, "{identifier}");
        }
    }

    proptest! {
        #[test]
        fn what_the_kernel_is_told_is_read_back(
            driver in "[a-z0-9.-]{1,63}",
            name in "[^\0]{0,80}",
            volume_id in "[^\0\n]{1,128}",
        ) {
            let server = crate::nbd::Server::unix("/run/a socket").unwrap();
            let export = Export::new(server, &name).unwrap();
            let behind = Behind { driver, export, volume_id };
            prop_assert_eq!(Behind::parse(&behind.identifier()), Some(behind));
        }

        #[test]
        fn any_identifier_is_read_or_passed_over(identifier: String) {
            let _ = Behind::parse(&identifier);
            let _ = Behind::parse(&format!("{OURS}{identifier}"));
        }
    }
}
