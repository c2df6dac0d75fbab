//! The backend identifiers of all attached devices, kept from one look to the next.
//!
//! A look at each device takes three system calls, so staging a thousand exports would take
//! millions. When a device gets a server, the kernel sends a uevent before the attach of any
//! process returns (drivers/block/nbd.c, `nbd_set_size`). So a device is read again after an
//! event, and for as long as it is attached without an identifier, which comes after its event.
//! The event of a disconnect comes before the identifier is gone: a match is read once more
//! before it is returned.
//!
//! In some network namespaces no events arrive. Until the first one did, every look reads all
//! devices.

use std::{
    collections::{BTreeMap, BTreeSet},
    io, mem,
    sync::{Mutex, MutexGuard},
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
    /// None if uevents cannot be received.
    events: Option<PendingUevents>,
    /// Whether an event of a block device was ever received.
    hears: bool,
    /// By the device's index.
    known: BTreeMap<u32, T>,
    /// The devices to read before the next answer.
    changed: BTreeSet<u32>,
    /// Whether all of them are.
    all_changed: bool,
}

impl<T: Clone> Identifiers<T> {
    /// Starts to listen.
    pub fn new(parse: fn(&str) -> Option<T>) -> Self {
        let events = PendingUevents::listen().inspect_err(|error| {
            tracing::warn!(%error, "no uevents: each stage of an NBD export reads all NBD devices");
        });
        Self::with(parse, events.ok())
    }

    fn with(parse: fn(&str) -> Option<T>, events: Option<PendingUevents>) -> Self {
        let table = Table {
            events,
            hears: false,
            known: BTreeMap::new(),
            changed: BTreeSet::new(),
            all_changed: true,
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
        loop {
            table.listen();
            table.read_changed(self.parse)?;
            let Some(index) = table.first(&predicate) else {
                return Ok(None);
            };
            table.read(index, self.parse)?;
            if let Some(identifier) = table.known.get(&index).filter(|it| predicate(it)) {
                return Ok(Some((NbdDevice::of_index(index)?, identifier.clone())));
            }
            // It was disconnected; meanwhile its export may have got another device.
        }
    }

    fn table(&self) -> MutexGuard<'_, Table<T>> {
        self.table.lock().unwrap_or_else(|poisoned| {
            let mut table = poisoned.into_inner();
            table.all_changed = true;
            table
        })
    }
}

impl<T> Table<T> {
    /// Takes the events that are there.
    fn listen(&mut self) {
        match self.events.as_ref().map(PendingUevents::take) {
            Some(Ok(Some(names))) => {
                self.hears |= !names.is_empty();
                let indexes = names
                    .iter()
                    .filter_map(|name| sysfs::number_in(name, "nbd"));
                self.changed.extend(indexes);
            }
            // Some were lost.
            _ => self.all_changed = true,
        }
        self.all_changed |= !self.hears;
    }

    fn read_changed(&mut self, parse: fn(&str) -> Option<T>) -> io::Result<()> {
        if self.all_changed {
            self.known.clear();
            self.changed = sysfs::numbers("nbd")?.into_iter().collect();
        }
        // Should one of the reads fail.
        self.all_changed = true;
        for index in mem::take(&mut self.changed) {
            self.read(index, parse)?;
        }
        self.all_changed = false;
        Ok(())
    }

    fn read(&mut self, index: u32, parse: fn(&str) -> Option<T>) -> io::Result<()> {
        let identifier = match sysfs::nbd_backend_at(index) {
            Ok(identifier) => parse(&identifier),
            Err(error) if !sysfs::is_missing(&error) => return Err(error),
            Err(_) => {
                if sysfs::nbd_is_attached_at(index)? {
                    self.changed.insert(index);
                }
                None
            }
        };
        match identifier {
            Some(identifier) => self.known.insert(index, identifier),
            None => self.known.remove(&index),
        };
        Ok(())
    }

    fn first(&self, predicate: impl Fn(&T) -> bool) -> Option<u32> {
        let mut known = self.known.iter();
        known.find(|(_, it)| predicate(it)).map(|(index, _)| *index)
    }
}

#[cfg(test)]
mod tests;
