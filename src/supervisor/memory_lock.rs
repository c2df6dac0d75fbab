//! Keeps what is in memory there: not in swap, not in a core dump, and not for
//! another process of the same user to read.
//!
//! Sources: mlock(2), core(5), PR_SET_DUMPABLE(2const).

use std::io;

use rustix::{
    mm::{MlockAllFlags, mlockall},
    process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit},
};

/// Locks the memory of this process, as far as it is used, now and later
/// (CAP_IPC_LOCK, which must be kept), and forbids other processes to read it. Children
/// inherit only the limit on core dumps.
pub fn lock() -> io::Result<()> {
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    setrlimit(Resource::Core, none)?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT)?;
    Ok(())
}
