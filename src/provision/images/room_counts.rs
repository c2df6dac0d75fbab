//! The room of each pool, as GetCapacity tells it.
//!
//! A count of the room looks at every image, so it is kept in memory while the pool's
//! directory does not change ([`DirectoryStamp`]); this driver's growths change it as well
//! ([`Pool::mark_grown`]). What changes a kept count otherwise:
//!
//! - Nodes write to images: free and promised bytes fall alike, so the room stays. As the
//!   free bytes are read each time, what is told is too small by what was written.
//! - Nodes discard blocks: free and promised bytes rise alike. The free bytes are told as of
//!   the count at most, so that the same room is not told twice.
//! - Copies begin, and snapshots end as copies: the promised bytes change by theirs.
//! - An operator changes the size of a static image.
//!
//! Therefore a count serves a few minutes at most, and only while the free bytes are about
//! the same. A scheduler chooses a pool by the capacity; whether a volume is made or grown is
//! decided by a count of that moment ([`Pool::room`]).

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::{super::ProvisionError, stamp::DirectoryStamp};
use crate::pool::{Pool, Room};

/// The last count of each pool, by its name.
#[derive(Debug, Default)]
pub struct RoomCounts(Mutex<HashMap<String, RoomCount>>);

#[derive(Clone, Copy, Debug)]
struct RoomCount {
    stamp: DirectoryStamp,
    until: Instant,
    room: Room,
}

impl RoomCounts {
    /// The room of a pool, by a recent count.
    pub fn room(&self, pool: &Pool) -> Result<Room, ProvisionError> {
        // The room of the file system that it is mounted on is not the pool's.
        pool.check_scope()?;
        let stamp = DirectoryStamp::of(&pool.dir);
        let now = Instant::now();
        let fs = pool.statvfs()?;
        let [free, size] =
            [fs.f_bavail, fs.f_blocks].map(|blocks| blocks.saturating_mul(fs.f_frsize));
        let last = self.lock().get(&pool.name).copied();
        if let Some(RoomCount { room, .. }) = last.filter(|last| {
            Some(last.stamp) == stamp
                && now < last.until
                && free.abs_diff(last.room.free) <= size / DRIFT
        }) {
            return Ok(Room {
                free: free.min(room.free),
                ..room
            });
        }
        // Not under the lock: a pool that hangs delays no other.
        let room = pool.room()?;
        if let Some(stamp) = stamp {
            let count = RoomCount {
                stamp,
                until: now + LONGEST,
                room,
            };
            self.lock().insert(pool.name.clone(), count);
        }
        Ok(room)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, RoomCount>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
impl RoomCounts {
    /// Makes the count of a pool older than any that serves.
    pub fn age(&self, pool: &Pool) {
        let mut counts = self.lock();
        let count = counts.get_mut(&pool.name).unwrap();
        count.until = Instant::now();
    }

    /// Lets the count of a pool be of more free bytes than there are.
    pub fn drift(&self, pool: &Pool) {
        let fs = pool.statvfs().unwrap();
        let mut counts = self.lock();
        let count = counts.get_mut(&pool.name).unwrap();
        count.room.free += fs.f_blocks * fs.f_frsize / DRIFT * 2;
    }
}

/// How long a count serves: some polls of the external provisioner, which polls once a
/// minute.
const LONGEST: Duration = Duration::from_secs(300);
/// The part of the file system by which the free bytes may differ.
const DRIFT: u64 = 256;
