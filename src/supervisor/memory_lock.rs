//! Keeps the process's memory out of swap and core dumps, and from other processes of the
//! same user.
//!
//! Source: mlock(2).

use std::io;

use rustix::mm::{MlockAllFlags, mlockall};

use crate::kernel::core_dumps;

/// Locks the used pages of this process, present and future ones, and forbids other
/// processes to read them. The process needs CAP_IPC_LOCK, and must keep it. Children
/// inherit only the limit on core dumps.
pub fn lock() -> io::Result<()> {
    core_dumps::forbid()?;
    mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT)?;
    Ok(())
}
