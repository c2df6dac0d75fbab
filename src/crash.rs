//! Points at which tests crash a process, to check the recovery of the next one, or block
//! a thread, to check what else it delays.

#[cfg(all(feature = "node", debug_assertions))]
use std::{path::PathBuf, sync::LazyLock};

/// Between two steps after which a crash must be recoverable.
#[cfg(not(debug_assertions))]
pub(crate) fn crash_point() {}

/// Aborts the process, without any cleanup as by kill -9, at the n-th call, n being the
/// environment variable `CRASH_AT`; stops it instead with `STALL_AT`. Only in debug
/// builds.
#[cfg(debug_assertions)]
pub(crate) fn crash_point() {
    use std::sync::{
        LazyLock,
        atomic::{AtomicI64, Ordering::Relaxed},
    };

    use rustix::process::{Signal, getpid, kill_process};

    fn countdown(name: &str) -> AtomicI64 {
        let at = std::env::var(name).ok();
        AtomicI64::new(at.and_then(|n| n.parse().ok()).unwrap_or(i64::MAX))
    }
    static CRASH: LazyLock<AtomicI64> = LazyLock::new(|| countdown("CRASH_AT"));
    static STALL: LazyLock<AtomicI64> = LazyLock::new(|| countdown("STALL_AT"));
    if CRASH.fetch_sub(1, Relaxed) == 0 {
        std::process::abort();
    }
    if STALL.fetch_sub(1, Relaxed) == 0 {
        let stopped = kill_process(getpid(), Signal::STOP);
        stopped.expect("a process may stop itself");
    }
}

/// Before a call of volume `of` that may block.
#[cfg(all(feature = "node", not(debug_assertions)))]
pub(crate) fn hold_point(_step: &str, _of: &str) {}

/// Whether [`hold_point`] would block now.
#[cfg(all(feature = "node", not(debug_assertions)))]
pub(crate) fn is_held(_step: &str, _of: &str) -> bool {
    false
}

/// Whether [`hold_point`] would block now.
#[cfg(all(feature = "node", debug_assertions))]
pub(crate) fn is_held(step: &str, of: &str) -> bool {
    let held = |directory: &PathBuf| directory.join(format!("{step}-{of}")).exists();
    HOLD_AT.as_ref().is_some_and(held)
}

/// The directory of the environment variable `HOLD_AT`.
#[cfg(all(feature = "node", debug_assertions))]
static HOLD_AT: LazyLock<Option<PathBuf>> =
    LazyLock::new(|| std::env::var_os("HOLD_AT").map(PathBuf::from));

/// Blocks the calling thread while there is a FIFO named `STEP-OF` in the directory of the
/// environment variable `HOLD_AT`, until its writer closes it. Only in debug builds.
#[cfg(all(feature = "node", debug_assertions))]
pub(crate) fn hold_point(step: &str, of: &str) {
    use std::{fs::File, io};

    if let Some(directory) = &*HOLD_AT
        && let Ok(mut held) = File::open(directory.join(format!("{step}-{of}")))
    {
        let _ = io::copy(&mut held, &mut io::sink());
    }
}
