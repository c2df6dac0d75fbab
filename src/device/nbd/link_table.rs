//! The devices' links to their servers.
//!
//! A connection dies with its server, or because a request got no answer. The kernel
//! announces it (`NBD_CMD_LINK_DEAD`, multicast) and keeps requests for the
//! dead-connection timeout. Meanwhile [`keep`] connects anew and offers fresh sockets
//! (`RECONFIGURE`), until the kernel takes one or the volume is unstaged.
//!
//! The agent's own descriptors of the sockets show which are dead, and shut them down
//! where a device grows. They are closed when the agent ends: after a restart it cannot
//! tell the state of a device's connections. So it offers each device a full set once; a
//! healthy one drops it. A server at its limit of clients refuses that set while the device
//! works: before a server is reported away, all connections are known to be dead, or a read
//! of the device is not answered.

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};

use super::{
    Identifier, Link, LinkOptions, NbdError, Outage, attach, between, failed, is_behind,
    large_enough, link::LinkState, listed, lock,
};
use crate::{
    Detached, Done,
    kernel::{
        block::{self, BlockDev},
        busy::retry_while_busy,
        nbd::{
            Claimed, Identifiers, NbdDevice, index_of,
            netlink::{Driver, LinkListener},
        },
        sysfs,
    },
    nbd::Export,
};

pub(super) enum Event {
    Listening(LinkListener),
    Check(Arc<Link>),
}

/// The links of all attached exports. Clones share them.
#[derive(Clone, Debug)]
pub struct Links(pub(super) Arc<LinksInner>);

#[derive(Debug)]
pub(super) struct LinksInner {
    /// This CSI driver's name.
    driver: String,
    identifiers: Identifiers<Identifier>,
    pub(super) links: Mutex<HashMap<u32, Arc<Link>>>,
    pub(super) listening: Mutex<bool>,
    tell: UnboundedSender<Event>,
    pub(super) events: Mutex<Option<UnboundedReceiver<Event>>>,
    /// How many connections were found dead.
    pub(super) lost: AtomicU64,
}

impl Links {
    /// For the CSI driver of this name; it leaves other drivers' links alone.
    pub fn new(driver: &str) -> Self {
        let (tell, events) = mpsc::unbounded_channel();
        Self(Arc::new(LinksInner {
            driver: driver.to_owned(),
            identifiers: Identifiers::new(Identifier::parse),
            links: Mutex::default(),
            listening: Mutex::default(),
            tell,
            events: Mutex::new(Some(events)),
            lost: AtomicU64::default(),
        }))
    }

    /// How many connections that this agent made were lost.
    pub fn lost(&self) -> u64 {
        self.0.lost.load(Relaxed)
    }

    /// The identifier of a device that this driver attaches for a volume.
    pub fn identifier(&self, export: &Export, volume_id: &str) -> Identifier {
        Identifier {
            driver: self.0.driver.clone(),
            export: export.clone(),
            volume_id: volume_id.to_owned(),
        }
    }

    /// The first device of this driver whose identifier satisfies the predicate.
    pub fn find(
        &self,
        predicate: impl Fn(&Identifier) -> bool,
    ) -> io::Result<Option<(NbdDevice, Identifier)>> {
        let its = |found: &Identifier| found.driver == self.0.driver && predicate(found);
        self.0.identifiers.find(its)
    }

    /// Attaches the export, or finds it attached with these options.
    pub fn attach(
        &self,
        identifier: &Identifier,
        read_only: bool,
        options: &LinkOptions,
    ) -> Result<(NbdDevice, Done), NbdError> {
        let export = &identifier.export;
        let driver = Driver::open().map_err(NbdError::NoDriver)?;
        self.listen(&driver).map_err(NbdError::NoDriver)?;
        // Without a size the kernel is detaching it, or is completing a killed agent's
        // attach.
        let is_between = |found: &io::Result<Option<(NbdDevice, _)>>| matches!(found, Ok(Some((device, _))) if matches!(device.size_bytes(), Ok(0)));
        let identifiers = &self.0.identifiers;
        let find = || identifiers.find(|found| found.export == *export);
        let found = retry_while_busy(find, is_between);
        if is_between(&found) {
            return Err(between());
        }
        if let Some((mut device, found)) = found.map_err(listed())? {
            let otherwise = |how: String| NbdError::AttachedOtherwise {
                export: export.clone(),
                node: device.block.node.clone(),
                how,
            };
            if found.driver != identifier.driver {
                return Err(otherwise(format!("by the driver {}", found.driver)));
            }
            if found.volume_id != identifier.volume_id {
                return Err(otherwise(format!("for volume {}", found.volume_id)));
            }
            // What the kernel shows may be a mark (`device::read_only_mark`).
            device.read_only &= read_only || self.is_attached_read_only(export);
            if device.read_only != read_only {
                let how = if read_only { "writable" } else { "read-only" };
                return Err(otherwise(how.to_owned()));
            }
            let node = &device.block.node;
            let has = device
                .size_bytes()
                .map_err(failed(node, "read the size of"))?;
            large_enough(export, has, options)?;
            self.recover(&found, &device, options)?;
            return Ok((device, Done::Already));
        }
        let (device, flags, connections) =
            attach(&driver, identifiers, identifier, read_only, options)?;
        let state = LinkState::new(connections);
        self.insert(identifier, &device, options, flags, state)?;
        Ok((device, Done::Now))
    }

    /// Recovers the link of a device that an earlier agent attached.
    pub fn recover(
        &self,
        identifier: &Identifier,
        device: &NbdDevice,
        options: &LinkOptions,
    ) -> Result<(), NbdError> {
        let known = self.of(&identifier.export);
        if known.is_some_and(|link| link.device.block.dev == device.block.dev) {
            return Ok(());
        }
        // The kernel does not show them.
        let flags = 0;
        self.insert(identifier, device, options, flags, LinkState::default())
    }

    /// Detaches the device, where it is still attached under that identifier.
    pub fn detach(&self, identifier: &Identifier, device: &BlockDev) -> Result<Detached, NbdError> {
        let export = &identifier.export;
        let node = &device.node;
        let matches = |text: &str| Identifier::parse(text).as_ref() == Some(identifier);
        let claimed = match Claimed::new(device, matches) {
            Ok(claimed) => claimed,
            Err(error) if block::is_busy(&error) => {
                return Err(NbdError::Busy { node: node.clone() });
            }
            Err(error) => return Err(failed(node, "open")(error)),
        };
        let Some(claimed) = claimed else {
            self.forget(export);
            return Ok(Detached::Already);
        };
        let driver = Driver::open().map_err(NbdError::NoDriver)?;
        let link = self.of(export);
        if self.outage(export).is_none() {
            claimed.flush();
            claimed.drain(None);
        }
        let down = || claimed.disconnect(&driver).map_err(failed(node, "detach"));
        match &link {
            // A socket offered to a disconnected device would reconnect it.
            Some(link) => {
                let mut state = lock(&link.state);
                down()?;
                state.closed = true;
                state.connections.clear();
            }
            None => down()?,
        }
        self.forget(export);
        drop(claimed);
        if is_behind(device.dev, export) {
            Ok(Detached::Deferred)
        } else {
            Ok(Detached::Now)
        }
    }

    fn forget(&self, export: &Export) {
        let its = |_: &u32, link: &mut Arc<Link>| link.identifier.export == *export;
        let removed: Vec<_> = lock(&self.0.links).extract_if(its).collect();
        // A link that is being renewed is locked; others need not wait for it.
        for (_, link) in removed {
            lock(&link.state).closed = true;
        }
    }

    /// The outage of the export's server, if any.
    pub fn outage(&self, export: &Export) -> Option<Outage> {
        self.of(export).and_then(|link| lock(&link.outage).clone())
    }

    /// Whether an agent attached it read-only, as far as is known.
    fn is_attached_read_only(&self, export: &Export) -> bool {
        self.of(export).is_some_and(|link| link.device.read_only)
    }

    pub(super) fn of(&self, export: &Export) -> Option<Arc<Link>> {
        let links = lock(&self.0.links);
        links
            .values()
            .find(|link| link.identifier.export == *export)
            .cloned()
    }

    fn insert(
        &self,
        identifier: &Identifier,
        device: &NbdDevice,
        options: &LinkOptions,
        flags: u16,
        state: LinkState,
    ) -> Result<(), NbdError> {
        let BlockDev { dev, node } = &device.block;
        let index = index_of(*dev).map_err(failed(node, "find"))?;
        let connections = sysfs::queues(*dev).map_err(failed(node, "find"))?;
        let link = Arc::new(Link {
            identifier: identifier.clone(),
            device: device.clone(),
            index,
            options: *options,
            flags,
            connections,
            state: Mutex::new(state),
            outage: Mutex::default(),
            reconnecting: AtomicBool::default(),
            again: AtomicBool::default(),
        });
        // Another program may have disconnected its device, and it has another now.
        self.forget(&identifier.export);
        lock(&self.0.links).insert(index, Arc::clone(&link));
        // The kernel's announcement of a connection that died before the link was in the
        // list is lost, and the state of an earlier agent's connections is unknown. The
        // send fails only where the agent is shutting down.
        let _ = self.0.tell.send(Event::Check(link));
        Ok(())
    }

    /// Listens for dead connections, if no socket does already.
    pub(super) fn listen(&self, driver: &Driver) -> io::Result<()> {
        let mut listening = lock(&self.0.listening);
        if !*listening {
            let _ = self.0.tell.send(Event::Listening(driver.listen()?));
            *listening = true;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
