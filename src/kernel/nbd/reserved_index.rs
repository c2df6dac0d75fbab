//! The choice of an NBD device for a server without WRITE_ZEROES.
//!
//! A device that had a server with WRITE_ZEROES still sends it, also to a later server
//! without (drivers/block/nbd.c, `nbd_set_size` sets the limit and never clears it; Linux
//! has the request since 6.12, and 7.2 was seen to do this). A server of exports
//! answers with an error, which fails the file system's write; rbd-nbd (16.2) stops
//! answering any request, so that mkfs waits for ever. So a server without WRITE_ZEROES
//! gets a device that never had it, from the end of the list, as the kernel itself chooses
//! from the beginning. Among those the choice is random, since other processes may choose
//! at the same time: of two that choose the same device, one has to choose again, and
//! rbd-nbd opens its image anew for that.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::{Mutex, MutexGuard, PoisonError},
};

use uuid::Uuid;

use crate::kernel::{Dev, sysfs};

/// The indexes that this process has reserved.
static RESERVED: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// The index of a device, the 7 of `nbd7`, which this process does not reserve again until
/// this is dropped.
#[derive(Debug)]
pub struct ReservedIndex(u32);

impl ReservedIndex {
    /// A free device for a server without WRITE_ZEROES. The kernel makes the device if there
    /// is none of that index, and answers `EBUSY` if another process has attached it, or only
    /// has it open. A caller that keeps the reservation gets another index the next time.
    pub fn without_zeroes() -> io::Result<Self> {
        let devices = suitable_devices()?;
        let mut reserved = reserved();
        let index = choose(&devices, &reserved, Uuid::new_v4().as_u128());
        reserved.insert(index);
        Ok(Self(index))
    }

    /// The index, the 7 of `nbd7`.
    pub fn get(&self) -> u32 {
        self.0
    }
}

impl Drop for ReservedIndex {
    fn drop(&mut self) {
        reserved().remove(&self.0);
    }
}

fn reserved() -> MutexGuard<'static, BTreeSet<u32>> {
    RESERVED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All devices by their indexes, and whether each is suitable.
fn suitable_devices() -> io::Result<BTreeMap<u32, bool>> {
    let mut found = BTreeMap::new();
    for index in sysfs::numbers("nbd")? {
        let suits = match sysfs::dev_of(&format!("nbd{index}")).and_then(is_suitable) {
            // The device is being made, or removed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            suits => suits?,
        };
        found.insert(index, suits);
    }
    Ok(found)
}

fn is_suitable(dev: Dev) -> io::Result<bool> {
    // Reading the limits of a device in use may block: a change of them in progress waits
    // for the device's server.
    let free = sysfs::size_bytes(dev)? == 0 && !sysfs::nbd_is_attached(dev);
    Ok(free && sysfs::most_zeroes(dev)? == 0)
}

/// A suitable index before the first gap: rbd-nbd (16.2) looks for an image's device by
/// counting from 0 to the first missing index, and would not find a device behind a gap;
/// nor would ceph-csi, which unmaps by rbd-nbd. `dice` is any number.
fn choose(devices: &BTreeMap<u32, bool>, reserved: &BTreeSet<u32>, dice: u128) -> u32 {
    let is_missing = |index: &u32| !devices.contains_key(index);
    let gap = (0..u32::MAX).find(is_missing).unwrap_or(u32::MAX);
    let free = devices.range(..gap).rev().filter(|(_, suits)| **suits);
    let free = free.map(|(index, _)| *index);
    let mut free: Vec<_> = free.filter(|index| !reserved.contains(index)).collect();
    free.truncate(free.len().div_ceil(2));
    if free.is_empty() {
        let mut new = (gap..u32::MAX).filter(is_missing);
        return new.find(|index| !reserved.contains(index)).unwrap_or(gap);
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
        fn a_chosen_nbd_index_is_suitable_or_the_next_new_one(
            found in btree_map(0..20_u32, any::<bool>(), 0..20),
            dice: [u128; 30],
        ) {
            let gap = (0..u32::MAX).find(|index| !found.contains_key(index)).unwrap();
            let mut reserved = BTreeSet::new();
            for dice in dice {
                let index = choose(&found, &reserved, dice);
                if let Some(suits) = found.get(&index) {
                    prop_assert!(*suits && index < gap);
                } else {
                    let mut before = gap..index;
                    prop_assert!(before.all(|one| found.contains_key(&one) || reserved.contains(&one)));
                    let mut free = found.range(..gap).filter(|(_, suits)| **suits);
                    prop_assert!(free.all(|(one, _)| reserved.contains(one)));
                }
                prop_assert!(reserved.insert(index));
            }
        }
    }
}
