//! Calls under way, and answered.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use metrics::{Counter, Histogram, counter, gauge, histogram};

use super::{as_gauge, names as name};

static METHODS: Mutex<BTreeMap<&'static str, Method>> = Mutex::new(BTreeMap::new());

/// Nothing can panic under this lock.
fn methods() -> MutexGuard<'static, BTreeMap<&'static str, Method>> {
    METHODS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The calls of one method. Its series are looked up once, not in each call.
#[derive(Default)]
struct Method {
    /// The beginnings of those under way; the oldest has the lowest number.
    under_way: BTreeMap<u64, Instant>,
    durations: Option<Histogram>,
    succeeded: Option<Counter>,
}

impl Method {
    fn ended(&mut self, timer: &CallTimer) {
        let CallTimer { method, code, .. } = *timer;
        self.under_way.remove(&timer.number);
        self.durations
            .get_or_insert_with(|| histogram!(name::CALL_DURATION, "method" => method))
            .record(timer.begun.elapsed());
        if code == OK {
            self.succeeded(method).increment(1);
        } else {
            counter!(name::CALLS, "method" => method, "code" => code).increment(1);
        }
    }

    fn succeeded(&mut self, method: &'static str) -> &Counter {
        let counter = || counter!(name::CALLS, "method" => method, "code" => OK);
        self.succeeded.get_or_insert_with(counter)
    }
}

const OK: &str = "OK";

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
    let mut methods = methods();
    let calls = &mut methods.entry(method).or_default().under_way;
    calls.insert(number, begun);
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
        if let Some(method) = methods().get_mut(self.method) {
            method.ended(self);
        }
    }
}

/// Shows the methods of a program before their first call.
pub fn announce(names: &[&'static str]) {
    let mut methods = methods();
    for name in names {
        let method = methods.entry(name).or_default();
        method.succeeded(name).increment(0);
    }
}

/// Sets the gauges of the calls under way.
pub fn report() {
    for (method, calls) in methods().iter() {
        let under_way = &calls.under_way;
        let oldest = under_way
            .first_key_value()
            .map(|(_, begun)| begun.elapsed());
        gauge!(name::CALLS_IN_FLIGHT, "method" => *method).set(as_gauge(under_way.len()));
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
