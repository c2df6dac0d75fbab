//! A device's connections to its server, and one attempt to reconnect them.

use std::{
    io,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use super::{
    Connection, Identifier, LinkOptions, Links, NbdError, Shape, at, client, failed,
    handshake::flags, is_behind, lock, open,
};
use crate::kernel::{
    nbd::{
        NbdDevice,
        netlink::{Change, Driver},
    },
    sysfs,
};

/// A device and its connections to the server.
#[derive(Debug)]
pub struct Link {
    pub(super) identifier: Identifier,
    pub(super) device: NbdDevice,
    pub(super) index: u32,
    pub(super) options: LinkOptions,
    /// The transmission flags of its attach; none where an earlier agent attached it.
    pub(super) flags: u16,
    /// How many connections the device has, dead or alive.
    pub(super) connections: usize,
    /// Those of them that this agent made. Locked while the device's sockets change, but
    /// never while the agent waits for a server.
    pub(super) state: Mutex<LinkState>,
    pub(super) outage: Mutex<Option<Outage>>,
    pub(super) reconnecting: AtomicBool,
    /// Another connection died during a reconnect.
    pub(super) again: AtomicBool,
}

#[derive(Debug, Default)]
pub(super) struct LinkState {
    pub(super) connections: Vec<Connection>,
    /// Dead ones. The kernel's receiver may not have noticed yet, and has no reference
    /// to its socket: Linux 7.2 was seen to panic when a replacement dropped the last
    /// reference.
    retired: Vec<(Instant, Connection)>,
    /// How many of the dead ones have no replacement yet.
    missing: usize,
    /// The device was disconnected: no socket may be offered any more.
    pub(super) closed: bool,
}

/// How long a dead connection's descriptor is kept.
const KEPT_DEAD: Duration = Duration::from_secs(10);

impl LinkState {
    pub(super) fn new(connections: Vec<Connection>) -> Self {
        Self {
            connections,
            ..Self::default()
        }
    }

    /// Moves dead connections to `retired`; returns how many.
    pub(super) fn retire_dead(&mut self) -> usize {
        let missed = self.missing;
        self.retire(|connection| !connection.is_alive());
        self.missing - missed
    }

    /// Shuts all connections down.
    pub(super) fn shut(&mut self) {
        self.connections.iter().for_each(Connection::shut);
        self.retire(|_| true);
    }

    fn retire(&mut self, which: impl Fn(&Connection) -> bool) {
        self.retired
            .retain(|(since, _)| since.elapsed() < KEPT_DEAD);
        let (closed, kept) = self.connections.drain(..).partition(which);
        self.connections = kept;
        let closed: Vec<_> = closed;
        self.missing += closed.len();
        let now = Instant::now();
        self.retired
            .extend(closed.into_iter().map(|connection| (now, connection)));
    }

    /// Keeps the connections that the device has taken, and returns the others.
    pub(super) fn keep_taken(&mut self, fresh: Vec<Connection>) -> Vec<Connection> {
        // The replaced ones may have died a moment ago.
        self.retire_dead();
        let (taken, left): (Vec<_>, _) = fresh.into_iter().partition(Connection::is_taken);
        self.missing = self.missing.saturating_sub(taken.len());
        self.connections.extend(taken);
        left
    }

    /// How many of the device's connections are this agent's, dead or alive.
    pub(super) fn count(&self) -> usize {
        self.connections.len() + self.missing
    }

    /// Whether none of the device's connections is dead.
    pub(super) fn are_alive(&self) -> bool {
        self.missing == 0 && self.connections.iter().all(Connection::is_alive)
    }
}

/// An outage of a server.
#[derive(Clone, Debug)]
pub struct Outage {
    /// Its start.
    pub since: Instant,
    /// For how long requests wait before they fail.
    pub timeout: Duration,
    /// The error of the last attempt.
    pub why: String,
}

/// The result of an attempt to reconnect a link.
pub(super) enum Reconnected {
    /// The device has fresh connections.
    Now,
    /// It needed none.
    Already,
    /// The device is not attached any more.
    Gone,
}

impl Link {
    /// One attempt to give the device live connections in place of dead ones.
    pub(super) fn reconnect(&self, links: &Links) -> Result<Reconnected, NbdError> {
        let node = &self.device.block.node;
        let missing = {
            let mut state = lock(&self.state);
            if state.closed || !is_behind(self.device.block.dev, &self.identifier.export) {
                return Ok(Reconnected::Gone);
            }
            let dead = u64::try_from(state.retire_dead()).unwrap_or_default();
            links.0.lost.fetch_add(dead, Relaxed);
            self.connections - state.connections.len().min(self.connections)
        };
        if missing == 0 {
            return Ok(Reconnected::Already);
        }
        let driver = Driver::open().map_err(NbdError::NoDriver)?;
        links.listen(&driver).map_err(NbdError::NoDriver)?;
        let fresh = self.open(missing)?;
        let mut state = lock(&self.state);
        if state.closed {
            return Ok(Reconnected::Gone);
        }
        let offered = self.offer(&driver, &fresh);
        state.keep_taken(fresh);
        if state.missing > 0 {
            // The kernel will notice shortly that it is dead.
            self.again.store(true, Relaxed);
        }
        offered
            .map(|()| Reconnected::Now)
            .map_err(failed(node, "give fresh connections to"))
    }

    /// Whether a connection may be alive: one that this agent made is, or an earlier agent
    /// made some.
    pub(super) fn may_be_alive(&self) -> bool {
        let state = lock(&self.state);
        !state.connections.is_empty() || state.count() < self.connections
    }

    /// Whether this agent has made none of the connections.
    pub(super) fn is_of_earlier_agent(&self) -> bool {
        lock(&self.state).count() == 0
    }

    /// Whether the server answers a read, by any connection. Waits as long as requests do.
    pub(super) fn answers(&self) -> bool {
        // A device that was detached meanwhile is none to open, and has no last block.
        if self.is_detached() {
            return false;
        }
        let bytes = sysfs::size_bytes(self.device.block.dev);
        bytes.is_ok_and(|bytes| bytes > 0 && self.prove(bytes).is_ok())
    }

    /// Whether the device is no longer the export's.
    pub(super) fn is_detached(&self) -> bool {
        lock(&self.state).closed || !is_behind(self.device.block.dev, &self.identifier.export)
    }

    /// Fresh connections to the export, which must still fit ([`Link::fits`]).
    pub(super) fn open(&self, count: usize) -> Result<Vec<Connection>, NbdError> {
        let mut fresh = Vec::with_capacity(count);
        for _ in 0..count {
            let (connection, info) = open(&self.identifier.export)?;
            self.fits(&Shape::of(
                &self.identifier.export,
                &info,
                self.device.read_only,
            )?)?;
            fresh.push(connection);
        }
        Ok(fresh)
    }

    /// Checks that the export still accepts the device's requests.
    pub(super) fn fits(&self, shape: &Shape) -> Result<(), NbdError> {
        let (dev, node) = (self.device.block.dev, &self.device.block.node);
        let failed = |what| failed(node, what);
        let had = sysfs::size_bytes(dev).map_err(failed("read the size of"))?;
        if shape.bytes < had {
            return Err(NbdError::Shrunk {
                export: self.identifier.export.clone(),
                node: node.clone(),
                had,
                has: shape.bytes,
            });
        }
        let block = sysfs::block_bytes(dev).map_err(failed("read the block size of"))?;
        let largest = sysfs::largest_kibibytes(dev).map_err(failed("read the limits of"))?;
        let zeroes = sysfs::most_zeroes(dev).map_err(failed("read the limits of"))?;
        let requests = Requests {
            writes: !self.device.read_only,
            writes_zeroes: zeroes > 0,
            connections: self.connections,
        };
        let what = if let Some(what) = requests.no_longer(self.flags, shape.flags) {
            format!("no longer supports {what}, which {} uses", node.display())
        } else if u64::from(shape.block_bytes) > block {
            format!(
                "now requires requests of at least {} bytes, and {} sends some of {block}",
                shape.block_bytes,
                node.display()
            )
        } else if let Some(limit) = shape.largest_kibibytes.map(u64::from)
            && limit < largest
        {
            format!(
                "now allows requests of at most {limit} KiB, and {} sends some of {largest} KiB",
                node.display()
            )
        } else {
            return Ok(());
        };
        Err(NbdError::Unsuited {
            export: self.identifier.export.clone(),
            what: format!("{what}; serve it as before, or unstage and stage the volume"),
        })
    }

    pub(super) fn offer(&self, driver: &Driver, fresh: &[Connection]) -> io::Result<()> {
        let sockets: Vec<_> = fresh.iter().map(std::os::fd::AsFd::as_fd).collect();
        let change = Change::Sockets {
            fresh: &sockets,
            // Also where a killed agent had set another.
            dead_seconds: self.options.dead_seconds,
        };
        driver.reconfigure(self.index, &self.identifier.to_string(), &change)
    }

    /// The server's current announcement of the export.
    pub(super) fn query(&self) -> Result<Shape, NbdError> {
        let info = client::query(&self.identifier.export).map_err(at(&self.identifier.export))?;
        Shape::of(&self.identifier.export, &info, self.device.read_only)
    }
}

/// The requests that the kernel sends to a device's server.
struct Requests {
    /// Whether it writes to the device.
    writes: bool,
    /// Whether it sends `NBD_CMD_WRITE_ZEROES`, which the driver has since Linux 6.12.
    writes_zeroes: bool,
    connections: usize,
}

impl Requests {
    /// What the first of them needs that an export `had` and no longer `has`: without it the
    /// request fails, or does not have its effect. File systems bear a trim that fails.
    fn no_longer(&self, had: u16, has: u16) -> Option<&'static str> {
        // The driver forces writes only where it also flushes (`nbd_set_size`).
        let forces = self.writes && had & flags::FLUSH != 0;
        let needed = [
            (flags::FLUSH, "flushes", true),
            (flags::FUA, "forced writes (FUA)", forces),
            (
                flags::WRITE_ZEROES,
                "writes of zeros",
                self.writes && self.writes_zeroes,
            ),
            (
                flags::CAN_MULTI_CONN,
                "several connections",
                self.connections > 1,
            ),
        ];
        let lost = had & !has;
        let mut lost = needed
            .iter()
            .filter(|(flag, _, is_sent)| *is_sent && lost & flag != 0);
        lost.next().map(|(_, what, _)| *what)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::client::tests::pair, *};

    #[test]
    fn dead_connections_are_counted_until_replaced() {
        let mut others = Vec::new();
        let mut fresh = |taken| {
            let (connection, other) = pair(taken);
            others.push(other);
            connection
        };
        let state = &mut LinkState::new(vec![fresh(true), fresh(true)]);
        let is = |state: &LinkState, alive, missing| {
            let found = (state.are_alive(), state.missing, state.count());
            assert_eq!(found, (alive, missing, 2));
        };
        is(state, true, 0);
        state.connections[0].shut();
        is(state, false, 0);
        // Replaced before this agent had checked them.
        assert!(state.keep_taken(vec![fresh(true)]).is_empty());
        is(state, true, 0);
        state.connections[0].shut();
        state.retire_dead();
        is(state, false, 1);
        assert_eq!(state.keep_taken(vec![fresh(false), fresh(true)]).len(), 1);
        is(state, true, 0);
        state.shut();
        is(state, false, 2);
    }

    #[test]
    fn only_what_the_kernel_sends_is_required_of_an_export() {
        let all = Requests {
            writes: true,
            writes_zeroes: true,
            connections: 2,
        };
        let one = Requests {
            connections: 1,
            ..all
        };
        let without_zeroes = Requests {
            writes_zeroes: false,
            ..all
        };
        let read_only = Requests {
            writes: false,
            ..all
        };
        let flushes = flags::FLUSH | flags::FUA;
        let every = flushes | flags::WRITE_ZEROES | flags::CAN_MULTI_CONN;
        for (requests, had, lost, what) in [
            (&all, every, 0, None),
            (&all, every, flushes, Some("flushes")),
            (&all, every, flags::FUA, Some("forced writes (FUA)")),
            (&all, flags::FUA, flags::FUA, None),
            (&all, every, flags::WRITE_ZEROES, Some("writes of zeros")),
            (&without_zeroes, every, flags::WRITE_ZEROES, None),
            (
                &all,
                every,
                flags::CAN_MULTI_CONN,
                Some("several connections"),
            ),
            (&one, every, flags::CAN_MULTI_CONN, None),
            (&read_only, every, flags::FUA | flags::WRITE_ZEROES, None),
            (&read_only, every, flushes, Some("flushes")),
            // Rotational, and that there are flags.
            (&all, every | 1 | 1 << 4, 1 | 1 << 4, None),
        ] {
            let has = had & !lost;
            assert_eq!(requests.no_longer(had, has), what, "{had:b} {lost:b}");
        }
    }

    #[test]
    fn an_earlier_agent_s_connections_are_not_counted() {
        let state = &mut LinkState::default();
        assert!(state.are_alive() && state.count() == 0);
        let ((taken, _one), (left, _other)) = (pair(true), pair(false));
        state.keep_taken(vec![taken, left]);
        assert!(state.are_alive() && state.count() == 1);
    }
}
