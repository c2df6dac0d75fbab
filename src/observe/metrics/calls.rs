//! Calls under way, and answered.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use metrics::{counter, gauge, histogram};

use super::{as_gauge, names as name};

/// The beginnings of the calls under way, by method; the oldest has the lowest number.
static UNDER_WAY: Mutex<BTreeMap<&'static str, BTreeMap<u64, Instant>>> =
    Mutex::new(BTreeMap::new());

/// Nothing can panic under this lock.
fn under_way() -> MutexGuard<'static, BTreeMap<&'static str, BTreeMap<u64, Instant>>> {
    UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A call under way. One that is dropped without an answer was cancelled by its caller.
#[derive(Debug)]
#[must_use]
pub struct CallTimer {
    method: &'static str,
    number: u64,
    begun: Instant,
    code: &'static str,
}

/// Begins a call of `method`.
pub fn call(method: &'static str) -> CallTimer {
    static LAST: AtomicU64 = AtomicU64::new(0);
    let (number, begun) = (LAST.fetch_add(1, Relaxed), Instant::now());
    let mut under_way = under_way();
    under_way.entry(method).or_default().insert(number, begun);
    CallTimer {
        method,
        number,
        begun,
        code: "CANCELLED",
    }
}

impl CallTimer {
    /// Records the call as answered with the gRPC `code`; returns how long it took.
    #[must_use]
    pub fn answered(mut self, code: &'static str) -> Duration {
        self.code = code;
        self.begun.elapsed()
    }
}

impl Drop for CallTimer {
    fn drop(&mut self) {
        if let Some(calls) = under_way().get_mut(self.method) {
            calls.remove(&self.number);
        }
        histogram!(name::CALL_DURATION, "method" => self.method).record(self.begun.elapsed());
        counter!(name::CALLS, "method" => self.method, "code" => self.code).increment(1);
    }
}

/// Shows the methods of a program before their first call.
pub fn announce(methods: &[&'static str]) {
    let mut under_way = under_way();
    for method in methods {
        under_way.entry(method).or_default();
        counter!(name::CALLS, "method" => *method, "code" => "OK").increment(0);
    }
}

/// Sets the gauges of the calls under way.
pub fn report() {
    for (method, calls) in under_way().iter() {
        let oldest = calls.first_key_value().map(|(_, begun)| begun.elapsed());
        gauge!(name::CALLS_IN_FLIGHT, "method" => *method).set(as_gauge(calls.len()));
        gauge!(name::OLDEST_CALL_AGE, "method" => *method)
            .set(oldest.unwrap_or_default().as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::installed;

    use super::*;

    #[test]
    fn calls_are_in_flight_until_answered_or_cancelled() {
        let metrics = installed();
        let value = |series: &str| -> Option<f64> {
            let text = metrics.render();
            let line = text.lines().find_map(|line| line.strip_prefix(series));
            line.and_then(|value| value.trim().parse().ok())
        };
        let in_flight = r#"uring_csi_calls_in_flight{method="OfThisTest"}"#;
        let oldest = r#"uring_csi_oldest_call_age_seconds{method="OfThisTest"}"#;
        let (first, second) = (call("OfThisTest"), call("OfThisTest"));
        let before = first.begun.elapsed().as_secs_f64();
        assert_eq!(value(in_flight), Some(2.0));
        assert!(value(oldest) >= Some(before), "{:?}", value(oldest));
        let _ = first.answered("ABORTED");
        assert_eq!(value(in_flight), Some(1.0));
        drop(second);
        assert_eq!(value(in_flight), Some(0.0));
        assert_eq!(value(oldest), Some(0.0));
        for code in ["ABORTED", "CANCELLED"] {
            let answered = format!(r#"uring_csi_calls_total{{method="OfThisTest",code="{code}"}}"#);
            assert_eq!(value(&answered), Some(1.0), "{code}");
        }
    }
}
