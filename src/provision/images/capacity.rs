//! The capacity of pools.

use std::collections::HashMap;

use super::{
    super::{
        Capacity, Parameters, ProvisionError, VolumeUse,
        range::{MAXIMUM, least},
    },
    ImageStore,
    file_system::{BTRFS, EXT4, TMPFS, XFS, fs_type},
};
use crate::pool::{Pool, Room, Scope};

impl ImageStore {
    /// The room of a pool, by a recent count. Blocks.
    pub fn room(&self, pool: &str) -> Result<Room, ProvisionError> {
        self.room_counts.room(self.pools.get(pool)?)
    }

    /// The capacity of the pool that is named, or of all pools.
    pub(super) fn capacity(
        &self,
        parameters: &HashMap<String, String>,
        uses: &[VolumeUse],
        includes_local: bool,
    ) -> Result<Capacity, ProvisionError> {
        let parameters = Parameters::parse(parameters)?;
        let pools: Vec<_> = match &parameters.pool {
            Some(name) => match self.pool_for(Some(name)) {
                Ok(pool) => vec![pool],
                Err(ProvisionError::PoolNotHere(_)) => Vec::new(),
                Err(error) => return Err(error),
            },
            None => self.pools.iter().collect(),
        };
        let mut sum = Capacity {
            minimum: least(&parameters.file_systems(uses)?),
            ..Capacity::default()
        };
        for pool in pools {
            let out_of_reach = pool.scope == Scope::Local && !includes_local;
            if out_of_reach || parameters.refuse_uses(pool, uses).is_err() {
                continue;
            }
            let available = self.room_counts.room(pool)?.available();
            let largest = largest_file(pool)?.unwrap_or(MAXIMUM);
            sum.available = sum.available.saturating_add(available);
            // A scheduler that sees a maximum looks at nothing else.
            let maximum = if parameters.overcommit {
                largest
            } else {
                largest.min(available)
            };
            sum.maximum = sum.maximum.max(Some(maximum));
        }
        Ok(sum)
    }
}

/// Refuses a change that needs `more` bytes, if the pool has less room.
pub fn refuse_without_room(
    pool: &Pool,
    parameters: &Parameters,
    more: u64,
) -> Result<(), ProvisionError> {
    if parameters.overcommit {
        return Ok(());
    }
    refuse_beyond_room(pool, more)
}

/// The same, whatever the class.
pub fn refuse_beyond_room(pool: &Pool, more: u64) -> Result<(), ProvisionError> {
    let available = pool.room()?.available();
    if more <= available {
        return Ok(());
    }
    Err(ProvisionError::NoRoom {
        pool: pool.name.clone(),
        more,
        available,
    })
}

/// The largest file of the pool's file system, where that is known.
fn largest_file(pool: &Pool) -> Result<Option<u64>, ProvisionError> {
    Ok(match fs_type(pool)? {
        // Block numbers of ext4 files have 32 bits, the last of them is unused.
        Some(EXT4) => Some(pool.statvfs()?.f_bsize * 0xffff_ffff),
        Some(XFS | BTRFS | TMPFS) => Some(MAXIMUM),
        _ => None,
    })
}
