//! The backend identifiers of all attached devices, kept from one look to the next.
//!
//! A look at each device takes three system calls for each, so that to stage a thousand
//! exports would take millions. The kernel sends a uevent when a device gets a server
//! (drivers/block/nbd.c, `nbd_set_size`), before the call that attaches it returns, whichever
//! process makes it. So only devices with an event are read anew. A disconnect sends none:
//! what is found is read once more.
//!
//! Whether events arrive here is tested by each attach of this process: if the one of its own
//! device is missing, every look reads all devices.

use std::{
    collections::{BTreeMap, BTreeSet},
    io, mem,
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::NbdDevice;
use crate::kernel::{sysfs, uevents::PendingUevents};

/// The identifiers that `parse` accepts.
#[derive(Debug)]
pub struct Identifiers<T> {
    parse: fn(&str) -> Option<T>,
    table: Mutex<Table<T>>,
}

#[derive(Debug)]
struct Table<T> {
    /// Nothing where no events can be had.
    events: Option<PendingUevents>,
    /// By the device's index.
    known: BTreeMap<u32, T>,
    /// The devices to read before the next answer.
    changed: BTreeSet<u32>,
    /// Whether all are.
    all_changed: bool,
    /// How often events were taken.
    taken: u64,
    /// When the last event of a device was taken, by index.
    heard: BTreeMap<u32, u64>,
    /// When events were last lost.
    lost: u64,
}

impl<T: Clone> Identifiers<T> {
    /// Starts to listen.
    pub fn new(parse: fn(&str) -> Option<T>) -> Self {
        let events = PendingUevents::listen()
            .inspect_err(|error| tracing::warn!(%error, "cannot hear uevents: each stage of an NBD export looks at all NBD devices"));
        Self::with(parse, events.ok())
    }

    fn with(parse: fn(&str) -> Option<T>, events: Option<PendingUevents>) -> Self {
        let table = Table {
            events,
            known: BTreeMap::new(),
            changed: BTreeSet::new(),
            all_changed: true,
            taken: 0,
            heard: BTreeMap::new(),
            lost: 0,
        };
        Self {
            parse,
            table: Mutex::new(table),
        }
    }

    /// The first device whose identifier satisfies the predicate. No device is opened. A
    /// device without a size is being attached or detached.
    pub fn find(&self, predicate: impl Fn(&T) -> bool) -> io::Result<Option<(NbdDevice, T)>> {
        let mut table = self.table();
        table.listen();
        table.read_changed(self.parse)?;
        let found = table.known.iter().filter(|(_, it)| predicate(it));
        let found: Vec<_> = found.map(|(index, _)| *index).collect();
        for index in found {
            table.read(index, self.parse);
            if let Some(identifier) = table.known.get(&index).filter(|it| predicate(it)) {
                return Ok(Some((NbdDevice::of_index(index)?, identifier.clone())));
            }
        }
        Ok(None)
    }

    /// Attaches a device by `connect`, which returns its index.
    pub fn connect(&self, connect: impl FnOnce() -> io::Result<u32>) -> io::Result<u32> {
        let before = self.table().listen();
        let index = connect()?;
        let mut table = self.table();
        table.listen();
        let heard = table.heard.get(&index).copied().unwrap_or(table.lost);
        if table.events.is_some() && heard.max(table.lost) <= before {
            tracing::warn!(
                index,
                "no uevent of an attached NBD device: each stage of an export looks at all"
            );
            table.events = None;
        }
        Ok(index)
    }

    /// A panic leaves nothing half done.
    fn table(&self) -> MutexGuard<'_, Table<T>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Table<T> {
    /// Takes the events that are there. Returns how often that was done.
    fn listen(&mut self) -> u64 {
        self.taken += 1;
        let taken = self.events.as_ref().map(PendingUevents::take);
        if let Some(Ok(Some(names))) = taken {
            for index in names
                .iter()
                .filter_map(|name| sysfs::number_in(name, "nbd"))
            {
                self.heard.insert(index, self.taken);
                self.changed.insert(index);
            }
        } else {
            self.lost = self.taken;
            self.all_changed = true;
        }
        self.taken
    }

    fn read_changed(&mut self, parse: fn(&str) -> Option<T>) -> io::Result<()> {
        if self.all_changed {
            self.changed = sysfs::numbers("nbd")?.into_iter().collect();
            self.known.clear();
            self.all_changed = false;
        }
        for index in mem::take(&mut self.changed) {
            self.read(index, parse);
        }
        Ok(())
    }

    fn read(&mut self, index: u32, parse: fn(&str) -> Option<T>) {
        let identifier = sysfs::nbd_backend_at(index);
        // Its event may come before its identifier.
        if identifier.is_err() && sysfs::nbd_is_attached_at(index) {
            self.changed.insert(index);
        }
        match identifier.ok().as_deref().and_then(parse) {
            Some(identifier) => self.known.insert(index, identifier),
            None => self.known.remove(&index),
        };
    }
}

#[cfg(test)]
mod tests;
