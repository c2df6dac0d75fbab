//! NBD devices, whoever attached them and whatever serves them.
//!
//! ```text
//!  find        backend identifier ─▶ device, by sysfs; nothing is opened
//!  claim       O_EXCL, and the identifier is still the same
//!  drain       keep udevd off, wait for the requests in flight
//!  disconnect  netlink DISCONNECT
//! ```
//!
//! A device is recognised by its backend identifier, which the kernel keeps and
//! sysfs shows (Linux 5.14). `device::nbd` names the export and the volume in it;
//! what rbd-nbd calls its cookie is the same, and is the volume's handle.
//!
//! `DISCONNECT` does not look at openers: where a file system is alive on the
//! device, in a mount namespace that we can't see, it throws its dirty pages away.
//! So only a [`Claimed`] device can be disconnected.

use std::{
    fs::File,
    io,
    os::fd::{AsFd as _, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    fs::{FlockOperation, OFlags, flock},
    io::Errno,
};

use super::{
    Dev,
    block::{self, BlockDev},
    busy::retry_while_busy_for,
    sysfs,
};

pub mod netlink;
mod reserved_index;

pub use reserved_index::ReservedIndex;

use netlink::Driver;

/// How long readers and requests in flight are waited for before a disconnect.
const DRAIN_WITHIN: Duration = Duration::from_secs(1);

/// An NBD device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdDevice {
    /// Its number and node.
    pub block: BlockDev,
    /// It refuses writes.
    pub read_only: bool,
}

impl NbdDevice {
    /// The device of that index, the 7 of `nbd7`.
    pub fn of_index(index: u32) -> io::Result<Self> {
        let block = BlockDev::of(sysfs::dev_of(&format!("nbd{index}"))?)?;
        let read_only = sysfs::is_read_only(block.dev)?;
        Ok(Self { block, read_only })
    }

    /// The first device whose backend identifier `recognise` accepts, with what it
    /// made of that. Without a size the device is on its way up or down.
    pub fn find<T>(recognise: impl Fn(&str) -> Option<T>) -> io::Result<Option<(Self, T)>> {
        for (index, identifier) in identifiers()? {
            if let Some(found) = recognise(&identifier) {
                return Ok(Some((Self::of_index(index)?, found)));
            }
        }
        Ok(None)
    }

    /// The device that is attached under that backend identifier.
    pub fn attached_as(identifier: &str) -> io::Result<Option<Self>> {
        let found = Self::find(|has| (has == identifier).then_some(()))?;
        match found {
            Some((device, ())) if device.size_bytes()? > 0 => Ok(Some(device)),
            _ => Ok(None),
        }
    }

    /// Its size.
    pub fn size_bytes(&self) -> io::Result<u64> {
        sysfs::size_bytes(self.block.dev)
    }
}

/// The index by which the driver knows the device, the 7 of `nbd7`.
pub fn index_of(dev: Dev) -> io::Result<u32> {
    let name = sysfs::name_of(dev)?;
    let index = sysfs::number_in(&name, "nbd");
    index.ok_or_else(|| io::Error::other(format!("{name} is no NBD device")))
}

/// The backend identifiers of all devices that have one, by index.
pub fn identifiers() -> io::Result<Vec<(u32, String)>> {
    let mut found = Vec::new();
    for index in sysfs::numbers("nbd")? {
        // Most have none.
        let identifier = sysfs::dev_of(&format!("nbd{index}")).and_then(sysfs::nbd_backend);
        found.extend(identifier.ok().map(|identifier| (index, identifier)));
    }
    Ok(found)
}

/// The backend identifier of an attached device. sysfs shows it for a moment after
/// the device was disconnected; then the device has no size.
pub fn identifier_of(dev: Dev) -> Option<String> {
    let identifier = sysfs::nbd_backend(dev).ok()?;
    (sysfs::size_bytes(dev).ok()? > 0).then_some(identifier)
}

/// Whether the driver was loaded to read partitions. Then whoever opens a device of a
/// new size first reads from it, and holds up everybody else who opens it: also the
/// daemon that takes the place of one that has just died.
#[cfg(feature = "holder")]
pub fn reads_partitions() -> bool {
    let max_part = std::fs::read_to_string("/sys/module/nbd/parameters/max_part");
    max_part.is_ok_and(|max_part| max_part.trim_end() != "0")
}

/// A device that no one else has open exclusively, nor can open so. It stays
/// attached to the same backend for as long as this lives.
#[derive(Debug)]
pub struct Claimed<'a> {
    device: &'a BlockDev,
    file: OwnedFd,
}

impl<'a> Claimed<'a> {
    /// Opens the device exclusively. None where it is not attached under an
    /// identifier that `matches`; `EBUSY` where somebody uses it. It may block for as
    /// long as the device does: for a lane.
    pub fn new(device: &'a BlockDev, matches: impl Fn(&str) -> bool) -> io::Result<Option<Self>> {
        let still_matches = || identifier_of(device.dev).is_some_and(|has| matches(&has));
        if !still_matches() {
            return Ok(None);
        }
        let opened = block::open_exclusive(&device.node, device.dev, OFlags::RDONLY);
        // Between the look and the opening it may have become another's, in use there.
        if !still_matches() {
            return Ok(None);
        }
        let file = opened?;
        Ok(Some(Self { device, file }))
    }

    /// Waits until the requests in flight are answered, for a second at most, and
    /// keeps udevd from adding to them: it reads a device that appears or changes,
    /// unless somebody has it locked (<https://systemd.io/BLOCK_DEVICE_LOCKING>). The
    /// lock is taken on `open`, where this process has the device open and locked
    /// already: that lock would be in the way of another. A device that is
    /// disconnected earlier leaves its server with answers to nobody, on which nbdkit
    /// 1.32 was seen to abort, for all of its exports.
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
