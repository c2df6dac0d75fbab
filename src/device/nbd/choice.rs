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

/// Of those before the first gap: rbd-nbd (16.2), which looks for an image's device by
/// counting from 0 until there is none, finds what is behind it no more, nor does
/// ceph-csi where it is to unmap that. `dice` is any number.
fn choose(found: &BTreeMap<u32, bool>, chosen: &BTreeSet<u32>, dice: u128) -> u32 {
    let is_missing = |index: &u32| !found.contains_key(index);
    let gap = (0..u32::MAX).find(is_missing).unwrap_or(u32::MAX);
    let free = found.range(..gap).rev().filter(|(_, suits)| **suits);
    let free = free.map(|(index, _)| *index);
    let mut free: Vec<_> = free.filter(|index| !chosen.contains(index)).collect();
    free.truncate(free.len().div_ceil(2));
    if free.is_empty() {
        let mut new = (gap..u32::MAX).filter(is_missing);
        return new.find(|index| !chosen.contains(index)).unwrap_or(gap);
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
        fn what_is_chosen_suits_or_is_the_next_new_one(
            found in btree_map(0..20_u32, any::<bool>(), 0..20),
            dice: [u128; 30],
        ) {
            let gap = (0..u32::MAX).find(|index| !found.contains_key(index)).unwrap();
            let mut chosen = BTreeSet::new();
            for dice in dice {
                let index = choose(&found, &chosen, dice);
                if let Some(suits) = found.get(&index) {
                    prop_assert!(*suits && index < gap);
                } else {
                    let mut before = gap..index;
                    prop_assert!(before.all(|one| found.contains_key(&one) || chosen.contains(&one)));
                    let mut free = found.range(..gap).filter(|(_, suits)| **suits);
                    prop_assert!(free.all(|(one, _)| chosen.contains(one)));
                }
                prop_assert!(chosen.insert(index));
            }
        }
    }
}
