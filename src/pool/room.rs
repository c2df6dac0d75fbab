//! How much room a pool has, for the controller's volumes and for inline ones.

use std::{io, os::unix::fs::MetadataExt as _};

use super::{Pool, PoolError};

/// The room of a pool, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// What the pool's file system has free for us.
    pub free: u64,
    /// What images were promised and have not written.
    pub promised: u64,
}

impl Room {
    /// What may still be promised.
    pub fn available(self) -> u64 {
        self.free.saturating_sub(self.promised)
    }
}

impl Pool {
    /// The room of this pool. Every image counts, whoever made it; blocks that
    /// reflinked images share count in each.
    pub fn room(&self) -> Result<Room, PoolError> {
        let fs = self.statvfs()?;
        let failed = |step| move |error| self.io(step, &self.dir, error);
        let mut promised = 0_u64;
        for entry in std::fs::read_dir(&self.dir).map_err(failed("list"))? {
            let entry = entry.map_err(failed("list"))?;
            match entry.metadata() {
                // st_blocks counts 512 bytes each, whatever the file system (stat(2)).
                Ok(found) if found.is_file() => {
                    let unwritten = found.len().saturating_sub(found.blocks() * 512);
                    promised = promised.saturating_add(unwritten);
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(self.io("look at", &entry.path(), error)),
            }
        }
        Ok(Room {
            free: fs.f_bavail.saturating_mul(fs.f_frsize),
            promised,
        })
    }
}
