//! Keeps the process's memory out of swap and core dumps, and from other processes of the
//! same user.
//!
//! Sources: mlock(2), core(5), PR_SET_DUMPABLE(2const).

use std::io;

use rustix::{
    mm::{MlockAllFlags, mlockall},
    process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit},
};

/// Locks the used pages of this process, present and future ones, and forbids other
/// processes to read them. The process needs CAP_IPC_LOCK, and must keep it. Children
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
