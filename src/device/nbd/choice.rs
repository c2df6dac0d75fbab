//! Which of the driver's devices it shall be, where that matters.
//!
//! A device that had a server which takes WRITE_ZEROES goes on sending that, also
//! to a later server which does not (drivers/block/nbd.c, `nbd_set_size`: the limit
//! is set and never cleared; the request is there since Linux 6.12, this was seen in
//! 7.2). A server of exports answers with an error, which fails the file system's
//! write; rbd-nbd (16.2) stops answering anything, so that mkfs waits for ever. So
//! who does not take it gets a device that never did, from the end of the list: the
//! kernel's own choice is from its beginning. Which one of those chance says, for
//! others may be choosing just now: of two that choose the same, one has to choose
//! again, and rbd-nbd opens its image anew for that.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::Mutex,
};

use uuid::Uuid;

use super::links::lock;
use crate::{
    device::sysfs,
    kernel::{Dev, block},
};

/// Of how many that are not there yet one is chosen.
const NEW: u32 = 8;

/// Those that this process is about to use.
static CHOSEN: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// A device that nobody else of this process chooses, until it is dropped.
#[derive(Debug)]
pub struct Choice(u32);

impl Choice {
    /// A free device for a server that does not take WRITE_ZEROES. The kernel makes
    /// it if there is none of that number, and answers `EBUSY` if somebody else has
    /// it, or only has it open: who keeps the choice gets another the next time.
    pub fn without_zeroes() -> io::Result<Self> {
        let suiting = all()?;
        let mut chosen = lock(&CHOSEN);
        let index = choose(&suiting, &chosen, Uuid::new_v4().as_u128());
        chosen.insert(index);
        Ok(Self(index))
    }

    /// Its number, the 7 of `nbd7`.
    pub fn index(&self) -> u32 {
        self.0
    }
}

impl Drop for Choice {
    fn drop(&mut self) {
        lock(&CHOSEN).remove(&self.0);
    }
}

/// All devices by their numbers, and whether each suits.
fn all() -> io::Result<BTreeMap<u32, bool>> {
    let mut found = BTreeMap::new();
    for index in sysfs::numbers("nbd")? {
        let suits = block::dev_of(&format!("nbd{index}")).and_then(suits);
        let suits = match suits {
            // It is being made, or removed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            suits => suits?,
        };
        found.insert(index, suits);
    }
    Ok(found)
}

fn suits(dev: Dev) -> io::Result<bool> {
    // The limits of what is in use may be about to change, which waits for its server,
    // and who reads them waits, too.
    let free = sysfs::size_bytes(dev)? == 0 && !sysfs::nbd_is_attached(dev);
    Ok(free && sysfs::most_zeroes(dev)? == 0)
}

/// `dice` is any number.
fn choose(found: &BTreeMap<u32, bool>, chosen: &BTreeSet<u32>, dice: u128) -> u32 {
    let free = found.iter().rev().filter(|(_, suits)| **suits);
    let free = free.map(|(index, _)| *index);
    let mut free: Vec<_> = free.filter(|index| !chosen.contains(index)).collect();
    free.truncate(free.len().div_ceil(2));
    if free.is_empty() {
        let last = found.last_key_value().map(|(index, _)| *index);
        let next = last.max(chosen.last().copied()).map_or(0, |last| last + 1);
        free.extend(next..next + NEW);
    }
    let thrown = dice % free.len() as u128;
    free[usize::try_from(thrown).unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use proptest::{collection::btree_map, prelude::*};

    use super::*;

    proptest! {
        #[test]
        fn what_is_chosen_suits_or_is_new(found in btree_map(0..20_u32, any::<bool>(), 0..20), dice: [u128; 30]) {
            let mut chosen = BTreeSet::new();
            for dice in dice {
                let index = choose(&found, &chosen, dice);
                prop_assert!(found.get(&index).is_none_or(|suits| *suits));
                prop_assert!(chosen.insert(index));
            }
            prop_assert!(found.iter().all(|(index, suits)| chosen.contains(index) == *suits));
        }
    }
}
