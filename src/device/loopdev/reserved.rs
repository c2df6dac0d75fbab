//! Numbers of loop devices that are being configured.
//!
//! The kernel does not count a device as taken while `LOOP_CONFIGURE` is still
//! at work on it. That may last as long as the image's storage likes, and all
//! who were given the same number meanwhile wait behind it. So the numbers that
//! this process is at work on are kept aside: an attach that hangs holds up no
//! other.

use std::{
    collections::BTreeSet,
    io,
    os::fd::AsFd,
    sync::{Mutex, PoisonError},
};

use super::is_configured;
use crate::kernel::loopctl;

/// A number that no other thread of this process tries meanwhile.
pub(super) struct Reserved(u32);

static RESERVED: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

impl Reserved {
    /// The number.
    pub(super) fn get(&self) -> u32 {
        self.0
    }

    /// A free number, at least `least`.
    pub(super) fn take(control: impl AsFd, least: u32) -> io::Result<Self> {
        let mut reserved = RESERVED.lock().unwrap_or_else(PoisonError::into_inner);
        let free = loopctl::get_free(&control)?;
        let mut number = free.max(least);
        while reserved.contains(&number) || (number != free && is_configured(number)) {
            number += 1;
        }
        if number != free {
            match loopctl::add(control, number) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
                _ => {}
            }
        }
        reserved.insert(number);
        Ok(Self(number))
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let mut reserved = RESERVED.lock().unwrap_or_else(PoisonError::into_inner);
        reserved.remove(&self.0);
    }
}
