//! The metrics, their names and units.
//!
//! Every label is a `&'static str`: no volume id, path or error text can become a label,
//! so the number of series is bounded by the code.
//! kubelet's own histogram of CSI calls starts at 100 ms; most of our calls take
//! less than one, hence buckets from 50 µs.
//!
//! Before [`install`] (and in tools and tests that never call it) recording is a
//! no-op of a few nanoseconds.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use metrics::{
    Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};

/// Records the duration of a call of `method`, by its gRPC `code` (`DEADLINE_EXCEEDED`).
pub fn call(method: &'static str, code: &'static str, elapsed: Duration) {
    histogram!(CALL_DURATION, "method" => method, "code" => code).record(elapsed);
}

/// Records the duration of one step (`attach`, `probe`, `mount` …) on a volume of
/// `backend`, whether it succeeded or not.
pub fn step(step: &'static str, backend: &'static str, elapsed: Duration) {
    histogram!(STEP_DURATION, "step" => step, "backend" => backend).record(elapsed);
}

/// Records that a volume changed its state (`staging`, `staged` …); `None`: not on this
/// node.
pub fn volume_state_changed(from: Option<&'static str>, to: Option<&'static str>) {
    if from == to {
        return;
    }
    if let Some(state) = from {
        gauge!(VOLUMES, "state" => state).decrement(1.0);
    }
    if let Some(state) = to {
        gauge!(VOLUMES, "state" => state).increment(1.0);
    }
}

/// Sets how many lane threads there are, idle ones included.
pub fn lane_threads(count: usize) {
    gauge!(LANE_THREADS).set(as_gauge(count));
}

/// Sets how many lane threads are stuck: in one step for longer than any healthy device
/// takes.
pub fn lane_stuck(count: usize) {
    gauge!(LANE_STUCK).set(as_gauge(count));
}

/// Counts log lines that were dropped because stderr was not read.
pub fn log_lines_dropped(count: u64) {
    counter!(LOG_LINES_DROPPED).increment(count);
}

/// Sets the permits of a step, how many are held, how many stuck volumes lost theirs, and
/// how many volumes wait for one.
pub fn admission(step: &'static str, permits: usize, held: usize, stuck: usize, waiting: usize) {
    gauge!(ADMISSION_PLACES, "step" => step).set(as_gauge(permits));
    gauge!(ADMISSION_IN_USE, "step" => step).set(as_gauge(held));
    gauge!(ADMISSION_STUCK, "step" => step).set(as_gauge(stuck));
    gauge!(ADMISSION_WAITING, "step" => step).set(as_gauge(waiting));
}

/// Counts a call that was refused because too many volumes wait for a step.
pub fn admission_refused(step: &'static str) {
    counter!(ADMISSION_REFUSED, "step" => step).increment(1);
}

/// Counts an HTTP connection that was closed before its request was answered.
pub fn http_dropped(reason: &'static str) {
    counter!(HTTP_DROPPED, "reason" => reason).increment(1);
}

/// Sets how many bytes of images were copied since the start, and how many the copies
/// under way have left.
pub fn copies(copied: u64, left: u64) {
    counter!(COPIED_BYTES).absolute(copied);
    #[allow(clippy::cast_precision_loss, reason = "a PiB is exact")]
    gauge!(COPY_REMAINING_BYTES).set(left as f64);
}

/// Installs the process's recorder and describes every metric.
///
/// From then on [`Metrics::upkeep`] or [`Metrics::render`] must be called regularly, or the
/// recorded values accumulate; [`super::http::serve`] does.
/// Fails where a recorder is installed already.
pub fn install() -> Result<Metrics, BuildError> {
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &BUCKETS)?
        .install_recorder()?;
    describe();
    log_lines_dropped(0);
    gauge!(BUILD_INFO, "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    Ok(Metrics {
        handle,
        refresh: Arc::default(),
    })
}

/// The installed recorder.
#[derive(Clone)]
pub struct Metrics {
    handle: PrometheusHandle,
    refresh: Arc<Mutex<Refreshers>>,
}

type Refreshers = Vec<Box<dyn Fn() + Send>>;

impl Metrics {
    /// Calls `refresh` before every scrape, to set gauges from live state like
    /// [`lane_stuck`].
    pub fn before_scrape(&self, refresh: impl Fn() + Send + 'static) {
        self.refreshers().push(Box::new(refresh));
    }

    /// Every series in Prometheus' text format.
    pub fn render(&self) -> String {
        for refresh in self.refreshers().iter() {
            refresh();
        }
        self.handle.render()
    }

    /// Folds recorded values into their histograms, which bounds memory between scrapes.
    pub fn upkeep(&self) {
        self.handle.run_upkeep();
    }

    fn refreshers(&self) -> MutexGuard<'_, Refreshers> {
        self.refresh.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn describe() {
    describe_histogram!(
        CALL_DURATION,
        Unit::Seconds,
        "Time from reading a CSI call to its answer, by method and gRPC code."
    );
    describe_histogram!(
        STEP_DURATION,
        Unit::Seconds,
        "Time of one step of the work on a volume, by step and backend."
    );
    describe_gauge!(
        VOLUMES,
        Unit::Count,
        "Volumes that this node holds, by state."
    );
    describe_gauge!(
        LANE_THREADS,
        Unit::Count,
        "Threads for calls that a device can hold up, idle ones included."
    );
    describe_gauge!(
        LANE_STUCK,
        Unit::Count,
        "Threads held up by a device for longer than any healthy device takes."
    );
    describe_counter!(
        LOG_LINES_DROPPED,
        Unit::Count,
        "Log lines that the agent dropped because stderr was not read."
    );
    describe_gauge!(
        ADMISSION_PLACES,
        Unit::Count,
        "Volumes that may be in a step at once, by step."
    );
    describe_gauge!(
        ADMISSION_IN_USE,
        Unit::Count,
        "Volumes in a step that a gate limits, by step."
    );
    describe_gauge!(
        ADMISSION_STUCK,
        Unit::Count,
        "Volumes that hang in such a step and have lost their permit, by step."
    );
    describe_gauge!(
        ADMISSION_WAITING,
        Unit::Count,
        "Volumes that wait for a permit, by step."
    );
    describe_counter!(
        ADMISSION_REFUSED,
        Unit::Count,
        "Calls refused because too many volumes wait for a permit, by step."
    );
    describe_counter!(
        COPIED_BYTES,
        Unit::Bytes,
        "Bytes of images that were copied, holes included."
    );
    describe_gauge!(
        COPY_REMAINING_BYTES,
        Unit::Bytes,
        "Bytes that the copies of images under way have left, holes included."
    );
    describe_counter!(
        HTTP_DROPPED,
        Unit::Count,
        "HTTP connections closed before they were answered, by reason."
    );
    describe_gauge!(
        BUILD_INFO,
        Unit::Count,
        "Always 1; the labels describe the build."
    );
}

/// Counts of threads are far below 2^32, where f64 is exact.
fn as_gauge(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

const CALL_DURATION: &str = "uring_csi_call_duration_seconds";
const STEP_DURATION: &str = "uring_csi_step_duration_seconds";
const VOLUMES: &str = "uring_csi_volumes";
const LANE_THREADS: &str = "uring_csi_lane_threads";
const LANE_STUCK: &str = "uring_csi_lane_stuck";
const LOG_LINES_DROPPED: &str = "uring_csi_log_lines_dropped_total";
const ADMISSION_PLACES: &str = "uring_csi_admission_places";
const ADMISSION_IN_USE: &str = "uring_csi_admission_in_use";
const ADMISSION_STUCK: &str = "uring_csi_admission_stuck";
const ADMISSION_WAITING: &str = "uring_csi_admission_waiting";
const ADMISSION_REFUSED: &str = "uring_csi_admission_refused_total";
const COPIED_BYTES: &str = "uring_csi_copied_bytes_total";
const COPY_REMAINING_BYTES: &str = "uring_csi_copy_remaining_bytes";
const HTTP_DROPPED: &str = "uring_csi_http_dropped_total";
const BUILD_INFO: &str = "uring_csi_build_info";

/// Upper bounds in seconds, 50 µs to 120 s (kubelet's time for one call).
const BUCKETS: [f64; 20] = [
    50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
];

#[cfg(test)]
pub(super) mod tests {
    use std::sync::LazyLock;

    use super::*;

    /// One recorder a process: the tests share it.
    pub fn installed() -> Metrics {
        static INSTALLED: LazyLock<Metrics> = LazyLock::new(|| install().unwrap());
        INSTALLED.clone()
    }

    #[test]
    fn series_have_units_labels_and_fine_buckets() {
        let metrics = installed();
        call("NodeStageVolume", "OK", Duration::from_micros(70));
        step("mount", "loop", Duration::from_millis(3));
        for (from, to) in [
            (None, Some("staging")),
            (None, Some("staging")),
            (Some("staging"), Some("staged")),
            (Some("staged"), Some("staged")),
        ] {
            volume_state_changed(from, to);
        }
        metrics.before_scrape(|| {
            lane_threads(3);
            lane_stuck(1);
        });
        metrics.upkeep();
        let text = metrics.render();
        for line in [
            "# TYPE uring_csi_call_duration_seconds histogram",
            r#"uring_csi_call_duration_seconds_bucket{method="NodeStageVolume",code="OK",le="0.00005"} 0"#,
            r#"uring_csi_call_duration_seconds_bucket{method="NodeStageVolume",code="OK",le="0.0001"} 1"#,
            r#"uring_csi_step_duration_seconds_bucket{step="mount",backend="loop",le="120"} 1"#,
            r#"uring_csi_volumes{state="staged"} 1"#,
            r#"uring_csi_volumes{state="staging"} 1"#,
            "uring_csi_lane_threads 3",
            "uring_csi_lane_stuck 1",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
        assert!(text.contains("# HELP uring_csi_lane_stuck "), "{text}");
    }

    #[test]
    fn buckets_rise() {
        assert!(BUCKETS.is_sorted());
        assert!((BUCKETS[0] - 50e-6).abs() < 1e-12 && (BUCKETS[19] - 120.0).abs() < 1e-12);
    }
}
