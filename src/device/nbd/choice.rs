//! Which of the driver's devices it shall be, where that matters.
//!
//! A device that had a server which takes WRITE_ZEROES goes on sending that, also
//! to a later server which does not (drivers/block/nbd.c, `nbd_set_size`: the limit
//! is set and never cleared; the request is there since Linux 6.10, this was seen in
//! 7.2). A server of exports answers with an error, which fails the file system's
//! write; rbd-nbd (16.2) stops answering anything, so that mkfs waits for ever. So
//! who does not take it gets a device that never did.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    sync::Mutex,
};

use super::links::lock;
use crate::{device::sysfs, kernel::block};

/// Those that this process is about to use.
static CHOSEN: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// What a device is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Found {
    free: bool,
    writes_zeroes: bool,
}

/// A device that nobody else of this process chooses, until it is dropped.
#[derive(Debug)]
pub struct Choice(u32);

impl Choice {
    /// A free device for a server that does not take WRITE_ZEROES; None where the
    /// kernel may choose itself, for no device sends that. The kernel makes it if
    /// there is none of that number, and refuses with `EBUSY` if somebody else was
    /// faster.
    pub fn without_zeroes() -> io::Result<Option<Self>> {
        let found = all()?;
        let mut chosen = lock(&CHOSEN);
        let index = choose(&found, &chosen);
        chosen.extend(index);
        Ok(index.map(Self))
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

fn all() -> io::Result<BTreeMap<u32, Found>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir("/sys/block")? {
        let name = entry?.file_name();
        let Some(index) = name.to_str().and_then(|name| name.strip_prefix("nbd")) else {
            continue;
        };
        let Ok(index) = index.parse() else { continue };
        let device = block::dev_of(&format!("nbd{index}"))?;
        let state = Found {
            free: sysfs::size_bytes(device)? == 0 && !sysfs::nbd_is_attached(device),
            writes_zeroes: sysfs::most_zeroes(device)? > 0,
        };
        found.insert(index, state);
    }
    Ok(found)
}

fn choose(found: &BTreeMap<u32, Found>, chosen: &BTreeSet<u32>) -> Option<u32> {
    if !found.values().any(|device| device.writes_zeroes) {
        return None;
    }
    let suits = |device: &Found| device.free && !device.writes_zeroes;
    (0..u32::MAX).find(|index| !chosen.contains(index) && found.get(index).is_none_or(suits))
}

#[cfg(test)]
mod tests {
    use proptest::{collection::btree_map, prelude::*};

    use super::*;

    fn devices() -> impl Strategy<Value = BTreeMap<u32, Found>> {
        let device = any::<(bool, bool)>().prop_map(|(free, writes_zeroes)| Found {
            free,
            writes_zeroes,
        });
        btree_map(0..20_u32, device, 0..20)
    }

    proptest! {
        #[test]
        fn what_is_chosen_is_free_and_sends_no_zeroes(found in devices()) {
            let (mut chosen, mut count) = (BTreeSet::new(), 0);
            while let Some(index) = choose(&found, &chosen).filter(|_| count < 30) {
                prop_assert!(chosen.insert(index));
                prop_assert!(found.get(&index).is_none_or(|it| it.free && !it.writes_zeroes));
                count += 1;
            }
            prop_assert_eq!(count > 0, found.values().any(|it| it.writes_zeroes));
        }
    }
}
