//! Where tests end a process, to see whether the next one puts everything right.

/// Between any two steps that a crash must not tear apart.
#[cfg(not(debug_assertions))]
pub(crate) fn crash_point() {}

/// Ends the process without any cleaning up, as kill -9 would, at the n-th call
/// after the environment variable `CRASH_AT` was found to hold n. Only in builds
/// for tests.
#[cfg(debug_assertions)]
pub(crate) fn crash_point() {
    use std::sync::{
        LazyLock,
        atomic::{AtomicI64, Ordering::Relaxed},
    };
    static LEFT: LazyLock<AtomicI64> = LazyLock::new(|| {
        let at = std::env::var("CRASH_AT").ok();
        AtomicI64::new(at.and_then(|n| n.parse().ok()).unwrap_or(i64::MAX))
    });
    if LEFT.fetch_sub(1, Relaxed) == 0 {
        std::process::abort();
    }
}
