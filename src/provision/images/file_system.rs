//! The file systems of pools.

use super::{super::ProvisionError, catalogue::failed};
use crate::pool::Pool;

/// The number of the pool's file system (statfs(2)).
pub fn fs_type(pool: &Pool) -> Result<Option<u64>, ProvisionError> {
    let fs = rustix::fs::fstatfs(pool.open_dir()?)
        .map_err(|e| failed("ask the type of", &pool.dir, e.into()))?;
    Ok(u64::try_from(fs.f_type).ok())
}

/// Whether one machine alone can mount a file system of this type.
pub fn is_local(fs_type: u64) -> bool {
    matches!(fs_type, EXT4 | XFS | BTRFS | TMPFS)
}

/// Numbers from statfs(2).
pub const EXT4: u64 = 0xef53;
pub const XFS: u64 = 0x5846_5342;
pub const BTRFS: u64 = 0x9123_683e;
pub const TMPFS: u64 = 0x0102_1994;
