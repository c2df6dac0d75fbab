//! Growth of a device in use.
//!
//! The protocol has no message for a new size: a connection keeps the size of its
//! handshake, and a server may refuse requests beyond that. The kernel's driver takes
//! fresh sockets only in place of dead ones. So the agent shuts the old connections down
//! and replaces them; the kernel repeats the requests that were in flight on them once
//! their request timeout is over, and sends the others at once. Then the agent sets the
//! device's size, and reads the last block to prove it.
//!
//! To set a size the kernel freezes the device's queue (since Linux 6.13): it waits for
//! every request in flight, and holds the lock that all netlink commands of the driver
//! need. If the server dies just then, no connection of this node can be renewed until
//! those requests have failed. `NBD_SET_SIZE` is no alternative: the driver refuses it on
//! a device that netlink made, and it takes the same lock. So the agent sets the size only
//! while the device answers, when no request is left on connections that were shut down
//! and every fresh one is alive; and for that moment, a millisecond, requests wait for a
//! server only [`RESIZE_TIMEOUT`], which is then as long as one server's death can block
//! the connections to the others.
//!
//! If a request finds an old connection dead before the kernel's receiver does, the
//! receiver sees the error after the fresh socket is in place, and shuts that down instead
//! (drivers/block/nbd.c, `recv_work`; seen in Linux 7.2). The agent renews it like any
//! dead connection, and waits for it.
//!
//! The agent cannot shut down connections that an earlier agent made: only the kernel has
//! their sockets. Then it changes the size alone, and if the read of the last block fails,
//! changes it back before a file system can use it.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt as _,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::OFlags,
};

use super::{Link, Links, NbdError, failed, lock};
use crate::{
    kernel::{
        block,
        busy::retry_while_busy_for,
        nbd::netlink::{Change, Driver},
        sysfs,
    },
    nbd::Export,
};

/// How long the kernel may take to notice that its connections were shut down.
const NOTICED_WITHIN: Duration = Duration::from_secs(10);

/// Seconds that requests wait for a live connection, before they fail, while the
/// device's size is being set.
const RESIZE_TIMEOUT: u32 = 5;

/// The longest time between two offers; an announcement triggers one sooner.
const OFFER_AGAIN: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 20_000_000,
};

/// The kernel detects overdue requests up to this much too late.
const ON_TOP: Duration = Duration::from_secs(2);

/// Bytes of the read that proves a size, and their alignment in memory and on the device.
const PROOF: usize = 4096;

impl Links {
    /// Makes the device as large as its export is now. Returns its size in bytes.
    pub fn grow(&self, export: &Export) -> Result<u64, NbdError> {
        let Some(link) = self.of(export) else {
            let why = io::Error::from(io::ErrorKind::NotFound);
            return Err(failed(export.to_string().as_ref(), "grow")(why));
        };
        let node = &link.device.block.node;
        let had =
            sysfs::size_bytes(link.device.block.dev).map_err(failed(node, "read the size of"))?;
        let shape = link.query()?;
        link.fits(&shape)?;
        let has = shape.bytes;
        let old = || NbdError::OldConnections {
            export: export.clone(),
            node: node.clone(),
            had,
            has,
        };
        if has == had {
            // A killed agent may have set the size without the read that proves it.
            return match link.prove(has) {
                Ok(()) => Ok(has),
                Err(error) if link.is_made_here() => Err(failed(node, "read the end of")(error)),
                Err(error) => {
                    let error = crate::error_chain(&error);
                    tracing::error!(device = %node.display(), error, "cannot read the end of the device");
                    Err(old())
                }
            };
        }
        let driver = Driver::open().map_err(NbdError::NoDriver)?;
        let has_outage = || lock(&link.outage).is_some();
        if has_outage() {
            return Err(link.is_without_server());
        }
        let renewed = match link.renew(&driver)? {
            Renewed::All => true,
            Renewed::None => false,
            // The read may use a fresh connection, and later requests an old one.
            Renewed::Some => return Err(old()),
        };
        let repeated = Duration::from_secs(link.options.request_seconds.into()) + ON_TOP;
        let deadline = Instant::now() + repeated;
        loop {
            if renewed {
                link.wait_until_alive(deadline)
                    .map_err(failed(node, "wait for the requests of"))?;
            }
            link.prove(had).map_err(failed(node, "read the end of"))?;
            if link.resize(&driver, has)? {
                break;
            }
            if has_outage() || Instant::now() > deadline {
                return Err(link.is_without_server());
            }
        }
        match link.prove(has) {
            Ok(()) => Ok(has),
            Err(error) => {
                if !link.resize(&driver, had)? {
                    return Err(link.is_without_server());
                }
                if renewed {
                    return Err(failed(node, "read the new end of")(error));
                }
                Err(old())
            }
        }
    }
}

/// Which of a device's connections are fresh.
enum Renewed {
    All,
    /// None: an earlier agent made all of them.
    None,
    Some,
}

impl Link {
    fn is_without_server(&self) -> NbdError {
        let why = lock(&self.outage).as_ref().map(|outage| outage.why.clone());
        let why = why.unwrap_or_else(|| "a connection has died".to_owned());
        let why = io::Error::new(io::ErrorKind::NotConnected, why);
        failed(&self.device.block.node, "reach the server of")(why)
    }

    /// Whether this agent has made all of its connections.
    fn is_made_here(&self) -> bool {
        lock(&self.state).count() >= self.connections
    }

    /// Sets the device's size; false where a connection has died.
    pub(super) fn resize(&self, driver: &Driver, bytes: u64) -> Result<bool, NbdError> {
        let change = |change| {
            let identifier = self.identifier.to_string();
            driver
                .reconfigure(self.index, &identifier, &change)
                .map_err(failed(&self.device.block.node, "resize"))
        };
        let usual = self.options.dead_seconds;
        {
            // A reconnect in another call would set the timeout, too.
            let state = lock(&self.state);
            if !state.are_alive() {
                return Ok(false);
            }
            change(Change::DeadSeconds(usual.min(RESIZE_TIMEOUT)))?;
        }
        let resized = change(Change::Bytes(bytes));
        change(Change::DeadSeconds(usual))?;
        resized.map(|()| true)
    }

    /// Replaces every connection of the device by a fresh one; none if an earlier agent made
    /// some of them.
    fn renew(&self, driver: &Driver) -> Result<Renewed, NbdError> {
        let node = &self.device.block.node;
        let mut fresh = self.open(self.connections)?;
        let heard = driver.listen().map_err(NbdError::NoDriver)?;
        let mut state = lock(&self.state);
        match state.count() {
            0 => return Ok(Renewed::None),
            some if some < self.connections => return Ok(Renewed::Some),
            _ => {}
        }
        state.shut();
        let deadline = Instant::now() + NOTICED_WITHIN;
        loop {
            let offered = self.offer(driver, &fresh);
            fresh = state.keep_taken(fresh);
            offered.map_err(failed(node, "give fresh connections to"))?;
            if fresh.is_empty() {
                return Ok(Renewed::All);
            }
            if Instant::now() > deadline {
                let why = io::Error::from(io::ErrorKind::TimedOut);
                return Err(failed(node, "renew the connections of")(why));
            }
            while heard.take().is_ok() {}
            // An early wake-up only costs one more offer.
            let _ = poll(
                &mut [PollFd::new(&heard, PollFlags::IN)],
                Some(&OFFER_AGAIN),
            );
        }
    }

    /// Waits until the kernel has moved the requests of connections that were shut down to
    /// others, and until none of these is dead, unless the server is away.
    fn wait_until_alive(&self, deadline: Instant) -> io::Result<()> {
        let is_settled = || {
            let has_outage = lock(&self.outage).is_some();
            let alive = has_outage || lock(&self.state).are_alive();
            sysfs::in_flight(self.device.block.dev).map(|count| count == 0 && alive)
        };
        let time = deadline.saturating_duration_since(Instant::now());
        retry_while_busy_for(time, is_settled, |settled| matches!(settled, Ok(false))).map(drop)
    }

    /// Reads the last block with O_DIRECT.
    pub(super) fn prove(&self, bytes: u64) -> io::Result<()> {
        let now = sysfs::size_bytes(self.device.block.dev)?;
        if now != bytes {
            let why = format!("the device has {now} bytes instead of {bytes}");
            return Err(io::Error::other(why));
        }
        let file = block::open(
            &self.device.block.node,
            self.device.block.dev,
            OFlags::RDONLY | OFlags::DIRECT,
        )?;
        let mut memory = vec![0; 2 * PROOF];
        let start = memory.as_ptr().align_offset(PROOF);
        let at = (bytes - 1) / PROOF as u64 * PROOF as u64;
        let wanted = usize::try_from(bytes - at).unwrap_or(PROOF).min(PROOF);
        File::from(file).read_exact_at(&mut memory[start..start + wanted], at)
    }
}
