//! Timers on the ring: IORING_OP_TIMEOUT, exact to the kernel's timer slack
//! where tokio's wheel counts milliseconds.
//!
//! [`timeout`] drops its future. A deadline ends the waiting, never the work, so work that
//! must continue is spawned, and its handle is awaited here.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    task::Poll,
    time::Duration,
};

use super::poll;

/// The timeout expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("timed out")]
pub struct Elapsed;

/// Waits for `time`, by the monotonic clock, from the first poll on.
pub async fn sleep(time: Duration) {
    if let Err(error) = poll::after(time).await {
        // The kernel had no memory for a timer. The runtime's is late by up to a millisecond.
        tracing::warn!(%error, "no timer on the ring; using the runtime's");
        tokio::time::sleep(time).await;
    }
}

/// The output of `future`, or [`Elapsed`] after `time`.
///
/// A future that is ready at its first poll sets no timer.
pub async fn timeout<F: Future>(time: Duration, future: F) -> Result<F::Output, Elapsed> {
    let mut future = pin!(future);
    let mut timer = pin!(sleep(time));
    poll_fn(|context| {
        if let Poll::Ready(output) = future.as_mut().poll(context) {
            return Poll::Ready(Ok(output));
        }
        timer.as_mut().poll(context).map(|()| Err(Elapsed))
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::{future::pending, time::Instant};

    use super::*;
    use crate::ring;

    #[test]
    fn timers_fire_in_order_and_not_early() {
        ring::start(async {
            let begun = Instant::now();
            let long = sleep(Duration::from_millis(20));
            let short = sleep(Duration::from_millis(2));
            tokio::select! {
                biased;
                () = long => panic!("the long timer came first"),
                () = short => {}
            }
            assert!(begun.elapsed() >= Duration::from_millis(2));
        })
        .unwrap();
    }

    #[test]
    fn a_timeout_ends_the_waiting_only() {
        ring::start(async {
            let never = timeout(Duration::from_millis(1), pending::<()>()).await;
            assert_eq!(never, Err(Elapsed));
            assert_eq!(timeout(Duration::ZERO, async { 7 }).await, Ok(7));
            let hour = Duration::from_secs(3600);
            let soon = timeout(hour, sleep(Duration::from_millis(1))).await;
            assert_eq!(soon, Ok(()));
        })
        .unwrap();
    }

    #[test]
    fn a_thousand_timers_at_once() {
        ring::start(async {
            let timers = (0..1000).map(|n| sleep(Duration::from_micros(n)));
            futures_util::future::join_all(timers).await;
        })
        .unwrap();
    }
}
