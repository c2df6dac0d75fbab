//! `EBUSY` that passes.
//!
//! A mount is busy for as long as somebody looks at it: a NodeGetVolumeStats, the
//! node's monitoring, kubelet; a device for as long as udevd reads its superblocks.
//! Neither is a use of the volume, and neither lasts longer than a busy machine lets
//! the other process wait for its turn; so whoever is told `EBUSY` tries on for a
//! moment before saying so to anybody. The same goes for a file that is being closed:
//! it is told of a moment before it counts as closed. The agent's own children
//! are no such cause (`kernel::exec`).

use std::time::{Duration, Instant};

use rustix::thread::{Timespec, nanosleep};

/// After that it is somebody's use of the volume.
const PASSES_WITHIN: Duration = Duration::from_millis(500);

/// The time between two tries, at first.
const PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// Calls `attempt` until its result is not `busy`, for half a second. It blocks:
/// for a lane.
pub fn retry_while_busy<T>(attempt: impl FnMut() -> T, busy: impl Fn(&T) -> bool) -> T {
    retry_while_busy_for(PASSES_WITHIN, attempt, busy)
}

/// Calls `attempt` until its result is not `busy`, less and less often, until the
/// time is up. It blocks: for a lane.
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
    // No longer than it is above, so it always fits.
    let time = Timespec::try_from(time).unwrap_or_default();
    // Cut short by a signal, it has served as well.
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
