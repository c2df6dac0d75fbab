//! A clock of the kernel that rustix reads through the vDSO alone, and panics where there is
//! none, as on User-Mode Linux.

use std::mem;

/// The time by which file systems set the times of their files (clock_gettime(2),
/// `CLOCK_REALTIME_COARSE`), in seconds and nanoseconds; None where the kernel has no such
/// clock.
pub fn realtime_coarse() -> Option<(i64, i64)> {
    // SAFETY: all of its fields are integers.
    let mut now: libc::timespec = unsafe { mem::zeroed() };
    // SAFETY: clock_gettime writes one timespec.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_REALTIME_COARSE, &raw mut now) };
    (result == 0).then_some((now.tv_sec, now.tv_nsec))
}
