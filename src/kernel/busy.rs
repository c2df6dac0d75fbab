//! Retries of calls that a transient `EBUSY` fails.
//!
//! A mount is busy while a process examines it: a NodeGetVolumeStats, the node's
//! monitoring, kubelet; a device is busy while udevd reads its superblocks. Neither is a
//! use of the volume, and neither lasts longer than the other process waits for a
//! processor on a busy machine. So a caller that gets `EBUSY` retries for a moment before
//! it reports the error. A file that is being closed is such a cause, too: the kernel
//! announces the close a moment before the file counts as closed. The agent's own children
//! are no such cause (`kernel::exec`).

use std::time::{Duration, Instant};

use rustix::thread::{Timespec, nanosleep};

/// An `EBUSY` that lasts longer is caused by a use of the volume.
const PASSES_WITHIN: Duration = Duration::from_millis(500);

/// The time between the first two attempts; it doubles up to [`LONGEST_PAUSE`].
const PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// Calls `attempt` until its result is not `busy`, for half a second. It blocks, and
/// belongs on a lane.
pub fn retry_while_busy<T>(attempt: impl FnMut() -> T, busy: impl Fn(&T) -> bool) -> T {
    retry_while_busy_for(PASSES_WITHIN, attempt, busy)
}

/// Calls `attempt` until its result is not `busy`, at growing intervals, until the time is
/// up. It blocks, and belongs on a lane.
pub fn retry_while_busy_for<T>(
    time: Duration,
    mut attempt: impl FnMut() -> T,
    busy: impl Fn(&T) -> bool,
) -> T {
    let deadline = Instant::now() + time;
    let mut time_between = PAUSE;
    loop {
        let result = attempt();
        if !busy(&result) || Instant::now() >= deadline {
            return result;
        }
        pause(time_between);
        time_between = (time_between * 2).min(LONGEST_PAUSE);
    }
}

fn pause(time: Duration) {
    // At most LONGEST_PAUSE, so the conversion cannot fail.
    let time = Timespec::try_from(time).unwrap_or_default();
    // A sleep that a signal cuts short only makes the next attempt earlier.
    #[expect(clippy::disallowed_methods, reason = "the one place")]
    let _ = nanosleep(&time);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_retry_ends_at_the_first_result_that_is_not_busy_or_in_time() {
        let mut calls = 0..;
        let minute = Duration::from_secs(60);
        assert_eq!(
            retry_while_busy_for(minute, || calls.next(), |call| *call < Some(3)),
            Some(3)
        );
        assert!(retry_while_busy_for(PAUSE, || calls.next(), |_| true) > Some(3));
    }
}
