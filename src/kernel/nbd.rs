//! NBD devices, of this driver and of others, whatever their server.
//!
//! ```text
//!  find        backend identifier ─▶ device, by sysfs; nothing is opened
//!  claim       open with O_EXCL, check that the identifier is still the same
//!  drain       lock out udevd, wait for the requests in flight
//!  disconnect  netlink DISCONNECT
//! ```
//!
//! A device is recognised by its backend identifier, which the kernel keeps and
//! sysfs shows (Linux 5.14). `device::nbd` writes the export and the volume to it; rbd-nbd
//! calls the identifier its cookie, and writes the volume's handle to it.
//!
//! `DISCONNECT` ignores openers: if the device's file system is mounted, perhaps in another
//! mount namespace, its dirty pages are lost. So only a [`Claimed`] device can be
//! disconnected.

use std::{
    fs::File,
    io,
    os::fd::{AsFd as _, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    fs::{FlockOperation, OFlags, flock, fsync},
    io::Errno,
};

use super::{
    Dev,
    block::{self, BlockDev},
    busy::retry_while_busy_for,
    sysfs,
};

mod identifiers;
pub mod netlink;
mod reserved_index;

pub use identifiers::Identifiers;
pub use reserved_index::ReservedIndex;

use netlink::Driver;

/// How long a disconnect waits for readers and requests in flight.
const DRAIN_WITHIN: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdDevice {
    pub block: BlockDev,
    /// Whether it refuses writes: it was attached read-only, or was marked so (`BLKROSET`).
    pub read_only: bool,
}

impl NbdDevice {
    /// The device of that index, the 7 of `nbd7`.
    pub fn of_index(index: u32) -> io::Result<Self> {
        let block = BlockDev::of(sysfs::dev_of(&format!("nbd{index}"))?)?;
        let read_only = sysfs::is_read_only(block.dev)?;
        Ok(Self { block, read_only })
    }

    /// The device that is attached under that backend identifier; none while it has no size,
    /// because it is being attached or detached.
    pub fn attached_as(identifier: &str) -> io::Result<Option<Self>> {
        let found = identifiers()?
            .into_iter()
            .find(|(_, has)| has == identifier);
        let Some((index, _)) = found else {
            return Ok(None);
        };
        let device = Self::of_index(index)?;
        Ok((device.size_bytes()? > 0).then_some(device))
    }

    /// Its size in bytes, by sysfs.
    pub fn size_bytes(&self) -> io::Result<u64> {
        sysfs::size_bytes(self.block.dev)
    }
}

/// The driver's index of the device, the 7 of `nbd7`.
pub fn index_of(dev: Dev) -> io::Result<u32> {
    let name = sysfs::name_of(dev)?;
    let index = sysfs::number_in(&name, "nbd");
    index.ok_or_else(|| io::Error::other(format!("{name} is no NBD device")))
}

/// The backend identifiers of all devices that have one, by index.
pub fn identifiers() -> io::Result<Vec<(u32, String)>> {
    let mut found = Vec::new();
    for index in sysfs::numbers("nbd")? {
        // Most devices have none: one system call says so.
        let identifier = sysfs::nbd_backend_at(index);
        found.extend(identifier.ok().map(|identifier| (index, identifier)));
    }
    Ok(found)
}

/// The backend identifier of an attached device. sysfs still shows it for a moment after
/// a disconnect; but then the device has no size.
pub fn identifier_of(dev: Dev) -> Option<String> {
    let identifier = sysfs::nbd_backend(dev).ok()?;
    (sysfs::size_bytes(dev).ok()? > 0).then_some(identifier)
}

/// Whether the driver was loaded to read partitions. Then the first open of a device of a
/// new size reads from it, and blocks every other open: also that of a daemon that
/// replaces a dead one.
#[cfg(feature = "holder")]
pub fn reads_partitions() -> bool {
    let max_part = std::fs::read_to_string("/sys/module/nbd/parameters/max_part");
    max_part.is_ok_and(|max_part| max_part.trim_end() != "0")
}

/// A device that this process has open exclusively. It stays attached to the same backend
/// until this is dropped.
#[derive(Debug)]
pub struct Claimed {
    device: BlockDev,
    file: OwnedFd,
}

impl Claimed {
    /// Opens the device exclusively. None if it is not attached under an identifier that
    /// `matches`; `EBUSY` if it has an exclusive opener. It may block as long as the device
    /// does, and belongs on a lane.
    pub fn new(device: &BlockDev, matches: impl Fn(&str) -> bool) -> io::Result<Option<Self>> {
        let still_matches = || identifier_of(device.dev).is_some_and(|has| matches(&has));
        if !still_matches() {
            return Ok(None);
        }
        let opened = block::open_exclusive(&device.node, device.dev, OFlags::RDONLY);
        // Between the check and the open the device may have become another volume's.
        if !still_matches() {
            return Ok(None);
        }
        let file = opened?;
        let device = device.clone();
        Ok(Some(Self { device, file }))
    }

    /// Writes what programs wrote to the device and the kernel still has in memory. Else it
    /// is lost where another process, such as the device's server, has the device open: the
    /// kernel writes it at the last close alone. The server writes what it caches, too: an
    /// rbd-nbd that is late at that after its disconnect is killed. Blocks for as long as the
    /// device does, also with nothing to write; not on a read-only device.
    pub fn flush(&self) {
        if sysfs::is_read_only(self.device.dev).unwrap_or(false) {
            return;
        }
        if let Err(error) = fsync(&self.file) {
            tracing::warn!(
                device = %self.device.node.display(),
                %error,
                "the device is disconnected with data that could not be written to it"
            );
        }
    }

    /// Waits until the requests in flight are answered, for a second at most, and
    /// prevents that udevd adds to them: udevd reads a device that appears or changes,
    /// unless it is locked (<https://systemd.io/BLOCK_DEVICE_LOCKING>). If this process has
    /// the device open and locked already, the lock is taken on that descriptor, `open`, as it
    /// would conflict with another. After an earlier disconnect the server cannot send its
    /// answers, whereupon nbdkit 1.32 was seen to abort, for all of its exports.
    pub fn drain(&self, open: Option<&File>) {
        let deadline = Instant::now() + DRAIN_WITHIN;
        let left = || deadline.saturating_duration_since(Instant::now());
        let file = open.map_or(self.file.as_fd(), File::as_fd);
        let locked = retry_while_busy_for(
            left(),
            || flock(file, FlockOperation::NonBlockingLockExclusive),
            |locked| *locked == Err(Errno::WOULDBLOCK),
        );
        let in_flight = retry_while_busy_for(
            left(),
            || sysfs::in_flight(self.device.dev),
            |count| count.as_ref().is_ok_and(|&count| count > 0),
        );
        tracing::debug!(device = %self.device.node.display(), ?locked, ?in_flight, "drained, about to be disconnected");
    }

    /// Disconnects the device from its server.
    pub fn disconnect(&self, driver: &Driver) -> io::Result<()> {
        driver.disconnect(index_of(self.device.dev)?)
    }
}

#[cfg(test)]
mod tests;
