//! Keeps a process's memory, which has keys, out of core dumps.
//!
//! Sources: core(5), PR_SET_DUMPABLE(2const).

use std::io;

use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};

/// The kernel writes no core dump of this process, nor passes one to a program, which the
/// limit alone would not prevent; and no other process of its user may read its memory.
/// Children inherit only the limit.
pub fn forbid() -> io::Result<()> {
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    setrlimit(Resource::Core, none)?;
    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}
