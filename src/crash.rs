//! Where tests end a process, to see whether the next one puts everything right, or
//! hold up a thread, to see whom it keeps waiting.

/// Between any two steps that a crash must not tear apart.
#[cfg(not(debug_assertions))]
pub(crate) fn crash_point() {}

/// Ends the process without any cleaning up, as kill -9 would, at the n-th call
/// after the environment variable `CRASH_AT` was found to hold n; or stops it there,
/// as if it had stalled, with `STALL_AT`. Only in builds for tests.
#[cfg(debug_assertions)]
pub(crate) fn crash_point() {
    use std::sync::{
        LazyLock,
        atomic::{AtomicI64, Ordering::Relaxed},
    };

    use rustix::process::{Signal, getpid, kill_process};

    fn left(name: &str) -> AtomicI64 {
        let at = std::env::var(name).ok();
        AtomicI64::new(at.and_then(|n| n.parse().ok()).unwrap_or(i64::MAX))
    }
    static CRASH: LazyLock<AtomicI64> = LazyLock::new(|| left("CRASH_AT"));
    static STALL: LazyLock<AtomicI64> = LazyLock::new(|| left("STALL_AT"));
    if CRASH.fetch_sub(1, Relaxed) == 0 {
        std::process::abort();
    }
    if STALL.fetch_sub(1, Relaxed) == 0 {
        let stopped = kill_process(getpid(), Signal::STOP);
        stopped.expect("a process may stop itself");
    }
}

/// Before a call that some kernels or devices hold up, of the volume `of`.
#[cfg(all(feature = "node", not(debug_assertions)))]
pub(crate) fn hold_point(_step: &str, _of: &str) {}

/// Holds up the calling thread for as long as a test wants it: while there is a FIFO
/// named `STEP-OF` in the directory that the environment variable `HOLD_AT` names and
/// nobody has closed it after writing. Only in builds for tests.
#[cfg(all(feature = "node", debug_assertions))]
pub(crate) fn hold_point(step: &str, of: &str) {
    use std::{fs::File, io, path::PathBuf, sync::LazyLock};

    static DIRECTORY: LazyLock<Option<PathBuf>> =
        LazyLock::new(|| std::env::var_os("HOLD_AT").map(PathBuf::from));
    if let Some(directory) = &*DIRECTORY
        && let Ok(mut held) = File::open(directory.join(format!("{step}-{of}")))
    {
        let _ = io::copy(&mut held, &mut io::sink());
    }
}
