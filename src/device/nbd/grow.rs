//! Growth of a device in use.
//!
//! The protocol has no word for a new size: it is fixed for a connection when
//! the connection is made, and a server may refuse what lies beyond the size of
//! that time. The driver takes fresh sockets in place of dead ones only. So the
//! old connections are shut down and replaced; requests that were under way on
//! them are repeated by the kernel once their request timeout is over, the
//! others go on at once. Then the device is told its size, and the last block
//! is read to prove it.
//!
//! To set a size the kernel freezes the device's queue (since Linux 6.13): it
//! waits for every request under way, with the lock held that all of generic
//! netlink's commands for the driver need. If the server dies just then, no
//! connection of this node can be renewed until those requests have failed. No
//! way around it is left to a device that netlink made: `NBD_SET_SIZE` is
//! refused, and takes the same lock. So the device is told its size only while
//! it answers, when no request is left on connections that were shut down and
//! every fresh one is alive; and for that moment, a millisecond, requests wait
//! for [`RESIZE_PATIENCE`] only, which is then as long as one server's death can
//! hold up the connections to the others.
//!
//! Where a request finds an old connection dead before the receiver of its answers
//! does, that comes to it when the fresh one is in its place, and ends that instead
//! (drivers/block/nbd.c, `recv_work`; seen in Linux 7.2). It is mended as any that
//! dies, and waited for.
//!
//! Connections that an earlier agent made can't be shut down: nobody but the
//! kernel has their descriptors. Then the size alone is changed, and where the
//! proof fails it is changed back before anybody could use it.

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

/// How long the driver may take to notice that its connections were shut down.
const NOTICED_WITHIN: Duration = Duration::from_secs(10);

/// Seconds that requests wait for a live connection, before they fail, while the
/// device's size is being set.
const RESIZE_PATIENCE: u32 = 5;

/// The longest time between two offers; an announcement comes first.
const OFFER_AGAIN: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 20_000_000,
};

/// The kernel looks for requests that are overdue about so much too late.
const ON_TOP: Duration = Duration::from_secs(2);

/// Bytes of the proof, and its alignment in memory and on the device.
const PROOF: usize = 4096;

impl Links {
    /// Makes the device as large as its export is now. Answers its size in
    /// bytes.
    pub fn grow(&self, export: &Export) -> Result<u64, NbdError> {
        let Some(link) = self.of(export) else {
            let why = io::Error::from(io::ErrorKind::NotFound);
            return Err(failed(export.to_string().as_ref(), "grow")(why));
        };
        let node = &link.device.block.node;
        let had =
            sysfs::size_bytes(link.device.block.dev).map_err(failed(node, "read the size of"))?;
        let shape = link.look()?;
        link.fits(&shape)?;
        let has = shape.bytes;
        let old = || NbdError::OldConnections {
            export: export.clone(),
            node: node.clone(),
            had,
            has,
        };
        if has == had {
            // An agent that was killed may have set the size and proven nothing.
            return link.prove(has).map(|()| has).map_err(|error| {
                let error = crate::error_chain(&error);
                tracing::error!(device = %node.display(), error, "its end cannot be read");
                old()
            });
        }
        let driver = Driver::open().map_err(NbdError::NoDriver)?;
        let has_outage = || lock(&link.outage).is_some();
        if has_outage() {
            return Err(link.is_without_server());
        }
        let renewed = match link.renew(&driver)? {
            Renewed::All => true,
            Renewed::None => false,
            // The proof may go by a fresh one, and what follows it by an old one.
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
    /// None: all are an earlier agent's.
    None,
    Some,
}

impl Link {
    fn is_without_server(&self) -> NbdError {
        let why = lock(&self.outage).as_ref().map(|outage| outage.why.clone());
        let why = why.unwrap_or_else(|| "a connection has died".to_owned());
        let why = io::Error::new(io::ErrorKind::NotConnected, why);
        failed(&self.device.block.node, "grow, whose server is away,")(why)
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
            // Who offers a connection in place of a dead one sets the patience, too.
            let state = lock(&self.state);
            if !state.are_alive() {
                return Ok(false);
            }
            change(Change::DeadSeconds(usual.min(RESIZE_PATIENCE)))?;
        }
        let resized = change(Change::Bytes(bytes));
        change(Change::DeadSeconds(usual))?;
        resized.map(|()| true)
    }

    /// Replaces every connection of the device by a fresh one; none where some are
    /// out of reach.
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
            // Woken early or in vain, it offers once more than it must.
            let _ = poll(
                &mut [PollFd::new(&heard, PollFlags::IN)],
                Some(&OFFER_AGAIN),
            );
        }
    }

    /// Waits until requests on connections that were shut down have been given to
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

    /// Reads the last block, past every cache.
    fn prove(&self, bytes: u64) -> io::Result<()> {
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
