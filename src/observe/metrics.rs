//! The metrics: recording them, and rendering them for a scrape.
//!
//! Every label is a `&'static str`, apart from the names of pools and Ceph clusters, which
//! are few, and the handles of volumes with a condition, of which a scrape has a hundred at most:
//! no error text can become a label, so the number of series is bounded by the code and the
//! configuration. Counters and gauges with known labels show 0 from the start, so that the
//! first event is an increase and not a new series.
//!
//! kubelet's own histogram of CSI calls starts at 100 ms; most of our calls take
//! less than one, hence buckets from 50 µs.
//!
//! Before [`install`] (and in tools and tests that never call it) recording is a
//! no-op of a few nanoseconds.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use metrics::{counter, gauge, histogram};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use metrics_process::Collector;
use tokio::sync::Notify;

mod calls;
mod names;

pub use calls::call;

use names as name;

/// Records the duration of one step (`attach`, `probe`, `mount` …) on a volume of
/// `backend`, and whether it failed.
pub fn step(step: &'static str, backend: &'static str, elapsed: Duration, failed: bool) {
    histogram!(name::STEP_DURATION, "step" => step, "backend" => backend).record(elapsed);
    counter!(name::STEP_FAILURES, "step" => step, "backend" => backend)
        .increment(u64::from(failed));
}

/// Counts what became of making a file system: `formatted`, `refused` because the device
/// was not blank, or `failed`.
pub fn mkfs(outcome: &'static str) {
    counter!(name::MKFS, "outcome" => outcome).increment(1);
}

/// Counts what fsck found: `clean`, `repaired`, `uncorrected`, or that it `failed`.
pub fn fsck(outcome: &'static str) {
    counter!(name::FSCK, "outcome" => outcome).increment(1);
}

/// Sets how many volumes have the condition.
fn conditions(reason: &'static str, volumes: usize) {
    gauge!(name::VOLUME_CONDITIONS, "reason" => reason).set(as_gauge(volumes));
}

/// The most volumes that have series of their own.
const MOST_VOLUMES: usize = 100;

/// Records that a volume changed its state (`staging`, `staged` …); `None`: not on this
/// node.
pub fn volume_state_changed(from: Option<&'static str>, to: Option<&'static str>) {
    if from == to {
        return;
    }
    if let Some(state) = from {
        gauge!(name::VOLUMES, "state" => state).decrement(1.0);
    }
    if let Some(state) = to {
        gauge!(name::VOLUMES, "state" => state).increment(1.0);
    }
}

/// Sets how many volumes that files ask for are in each state, how many are `managed`, and for
/// how long the first of them has not been as its file asks.
pub fn wanted_volumes(
    states: impl IntoIterator<Item = (&'static str, usize)>,
    managed: usize,
    oldest: Duration,
) {
    for (state, volumes) in states {
        gauge!(name::WANTED_VOLUMES, "state" => state).set(as_gauge(volumes));
    }
    gauge!(name::MANAGED_VOLUMES).set(as_gauge(managed));
    gauge!(name::WANTED_AGE).set(oldest.as_secs_f64());
}

/// Sets how many connections to NBD servers were lost so far.
pub fn nbd_connections_lost(count: u64) {
    counter!(name::NBD_CONNECTIONS_LOST).absolute(count);
}

/// Sets how many of the supervisor's volumes are in the state.
pub fn supervised_volumes(state: &'static str, volumes: usize) {
    gauge!(name::SUPERVISED_VOLUMES, "state" => state).set(as_gauge(volumes));
}

/// Counts an attempt to start another daemon for a device, because the last one had
/// `ended`, or to replace the one of an earlier supervisor (`adopted`) or of another size
/// (`grown`).
pub fn daemon_restart(reason: &'static str, is_started: bool) {
    let result = if is_started { "ok" } else { "failed" };
    counter!(name::DAEMON_RESTARTS, "reason" => reason, "result" => result).increment(1);
}

/// Sets how many threads there are for calls that a device can block, idle ones included,
/// and how many are stuck: in one step for longer than any healthy device takes.
pub fn blocking_threads(all: usize, stuck: usize) {
    gauge!(name::BLOCKING_THREADS).set(as_gauge(all));
    gauge!(name::STUCK_THREADS).set(as_gauge(stuck));
}

/// Counts log lines that were dropped because stderr was not read.
pub fn log_lines_dropped(count: u64) {
    counter!(name::LOG_LINES_DROPPED).increment(count);
}

/// Sets the permits of a step, how many are held, how many stuck volumes lost theirs, and
/// how many volumes wait for one.
pub fn admission(step: &'static str, permits: usize, held: usize, stuck: usize, waiting: usize) {
    gauge!(name::ADMISSION_PLACES, "step" => step).set(as_gauge(permits));
    gauge!(name::ADMISSION_IN_USE, "step" => step).set(as_gauge(held));
    gauge!(name::ADMISSION_STUCK, "step" => step).set(as_gauge(stuck));
    gauge!(name::ADMISSION_WAITING, "step" => step).set(as_gauge(waiting));
    counter!(name::ADMISSION_REFUSED, "step" => step).increment(0);
}

/// Counts a call that was refused because too many volumes wait for a step.
pub fn admission_refused(step: &'static str) {
    counter!(name::ADMISSION_REFUSED, "step" => step).increment(1);
}

/// Counts an HTTP connection that was closed before its request was answered.
pub fn http_dropped(reason: &'static str) {
    counter!(name::HTTP_DROPPED, "reason" => reason).increment(1);
}

/// Sets whether the agent is ready.
pub fn ready(is_ready: bool) {
    gauge!(name::READY).set(f64::from(u8::from(is_ready)));
}

/// Sets how many bytes of images were copied since the start, and how many the copies
/// under way have left.
pub fn copies(copied: u64, left: u64) {
    counter!(name::COPIED_BYTES).absolute(copied);
    gauge!(name::COPY_REMAINING_BYTES).set(bytes(left));
}

/// The space of a pool, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct PoolSpace {
    /// Of the pool's file system.
    pub size: u64,
    /// Of these, free.
    pub free: u64,
    /// Of images, not written yet.
    pub promised: u64,
}

/// Sets the space of a pool; `None` where it cannot be read.
pub fn pool(pool: &str, space: Option<PoolSpace>) {
    let value = |part: fn(PoolSpace) -> u64| space.map_or(f64::NAN, |space| bytes(part(space)));
    let pool = || pool.to_owned();
    gauge!(name::POOL_SIZE_BYTES, "pool" => pool()).set(value(|space| space.size));
    gauge!(name::POOL_FREE_BYTES, "pool" => pool()).set(value(|space| space.free));
    gauge!(name::POOL_PROMISED_BYTES, "pool" => pool()).set(value(|space| space.promised));
}

/// Sets whether a Ceph cluster answers; `None` where nothing has called it lately.
pub fn ceph_cluster(cluster_id: &str, is_reachable: Option<bool>) {
    let value = is_reachable.map_or(f64::NAN, |it| f64::from(u8::from(it)));
    gauge!(name::CEPH_REACHABLE, "cluster_id" => cluster_id.to_owned()).set(value);
}

/// Sets how many attempts to reach a Ceph cluster failed for this reason so far.
pub fn ceph_errors(cluster_id: &str, reason: &'static str, count: u64) {
    let cluster_id = cluster_id.to_owned();
    counter!(name::CEPH_ERRORS, "cluster_id" => cluster_id, "reason" => reason).absolute(count);
}

/// Sets how many operations were submitted to io_uring so far, and how many of these have not
/// ended.
pub fn ring_operations(operation: &'static str, submitted: u64, in_flight: u64) {
    counter!(name::RING_OPERATIONS, "operation" => operation).absolute(submitted);
    let in_flight = as_gauge(usize::try_from(in_flight).unwrap_or(usize::MAX));
    gauge!(name::RING_IN_FLIGHT, "operation" => operation).set(in_flight);
}

/// Sets how many images of Ceph wait to be removed and to be flattened, and how many
/// clients were fenced so far.
pub fn ceph_work(to_remove: usize, to_flatten: usize, fences: u64) {
    gauge!(name::CEPH_TRASH_IMAGES).set(as_gauge(to_remove));
    gauge!(name::CEPH_FLATTEN_IMAGES).set(as_gauge(to_flatten));
    counter!(name::CEPH_FENCES).absolute(fences);
}

/// Installs the process's recorder and describes every metric. `methods`: the calls that
/// this program answers.
///
/// From then on [`Metrics::upkeep`] or [`Metrics::render`] must be called regularly, or the
/// recorded values accumulate; [`super::http::serve`] does.
/// Fails where a recorder is installed already.
pub fn install(methods: &[&'static str]) -> Result<Metrics, BuildError> {
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &BUCKETS)?
        .install_recorder()?;
    names::describe();
    let process = Collector::default();
    process.describe();
    log_lines_dropped(0);
    for reason in ["crowded", "slow"] {
        counter!(name::HTTP_DROPPED, "reason" => reason).increment(0);
    }
    gauge!(name::BUILD_INFO, "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    calls::announce(methods);
    let metrics = Metrics {
        handle,
        refresh: Arc::default(),
        scraped: Arc::default(),
        volumes: Arc::default(),
    };
    metrics.before_scrape(calls::report);
    metrics.before_scrape(move || process.collect());
    Ok(metrics)
}

/// Shows what only a node agent counts. `reasons`: of conditions.
pub fn announce_node(reasons: impl IntoIterator<Item = &'static str>) {
    for state in ["staging", "staged", "unstaging", "inline"] {
        gauge!(name::VOLUMES, "state" => state).increment(0.0);
    }
    for outcome in ["formatted", "refused", "failed"] {
        counter!(name::MKFS, "outcome" => outcome).increment(0);
    }
    for outcome in ["clean", "repaired", "uncorrected", "failed"] {
        counter!(name::FSCK, "outcome" => outcome).increment(0);
    }
    for reason in reasons {
        conditions(reason, 0);
    }
}

/// Shows what only a supervisor counts.
pub fn announce_supervisor() {
    for reason in ["ended", "adopted", "grown"] {
        for result in ["ok", "failed"] {
            counter!(name::DAEMON_RESTARTS, "reason" => reason, "result" => result).increment(0);
        }
    }
}

/// The installed recorder.
#[derive(Clone)]
pub struct Metrics {
    handle: PrometheusHandle,
    refresh: Arc<Mutex<Refreshers>>,
    scraped: Arc<Notify>,
    /// The series of single volumes.
    volumes: Arc<Mutex<String>>,
}

type Refreshers = Vec<Box<dyn Fn() + Send>>;

impl Metrics {
    /// Calls `refresh` before every scrape, to set gauges from live state like
    /// [`blocking_threads`].
    pub fn before_scrape(&self, refresh: impl Fn() + Send + 'static) {
        self.refreshers().push(Box::new(refresh));
    }

    /// Ends at the next scrape. What takes too long for [`Metrics::before_scrape`] is
    /// refreshed then, for the scrape after it: no work without a reader.
    pub async fn next_scrape(&self) {
        self.scraped.notified().await;
    }

    /// Every series in Prometheus' text format.
    pub fn render(&self) -> String {
        for refresh in self.refreshers().iter() {
            refresh();
        }
        self.scraped.notify_waiters();
        self.handle.render() + &lock(&self.volumes)
    }

    /// Sets the number of volumes with each condition, and the series of single volumes:
    /// `found` has their handles and reasons. Each call replaces the series of the previous one.
    pub fn volume_conditions(
        &self,
        reasons: impl IntoIterator<Item = &'static str>,
        found: &BTreeMap<String, Vec<&'static str>>,
    ) {
        for reason in reasons {
            let has = |has: &&Vec<_>| has.contains(&reason);
            conditions(reason, found.values().filter(has).count());
        }
        // The exporter cannot remove a series, so these have a recorder of their own.
        let recorder = PrometheusBuilder::new().build_recorder();
        metrics::with_local_recorder(&recorder, || {
            names::describe();
            for (handle, reasons) in found.iter().take(MOST_VOLUMES) {
                for &reason in reasons {
                    let volume_id = handle.clone();
                    gauge!(name::VOLUME_CONDITION_INFO, "volume_id" => volume_id, "reason" => reason)
                        .set(1.0);
                }
            }
        });
        *lock(&self.volumes) = recorder.handle().render();
    }

    /// Folds recorded values into their histograms, which bounds memory between scrapes.
    pub fn upkeep(&self) {
        self.handle.run_upkeep();
    }

    fn refreshers(&self) -> MutexGuard<'_, Refreshers> {
        lock(&self.refresh)
    }
}

/// Locks, also after a panic, which leaves nothing half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts of threads are far below 2^32, where f64 is exact.
fn as_gauge(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

#[allow(clippy::cast_precision_loss, reason = "a PiB is exact")]
fn bytes(count: u64) -> f64 {
    count as f64
}

/// Upper bounds in seconds, 50 µs to 120 s (kubelet's time for one call), two for each power
/// of ten: each makes a series for every method and step of every node.
const BUCKETS: [f64; 14] = [
    50e-6, 100e-6, 300e-6, 1e-3, 3e-3, 10e-3, 30e-3, 100e-3, 300e-3, 1.0, 3.0, 10.0, 30.0, 120.0,
];

#[cfg(test)]
pub(super) mod tests {
    use std::sync::LazyLock;

    use super::*;

    /// One recorder a process: the tests share it.
    pub fn installed() -> Metrics {
        static INSTALLED: LazyLock<Metrics> =
            LazyLock::new(|| install(&["NodeStageVolume", "NodeExpandVolume"]).unwrap());
        INSTALLED.clone()
    }

    #[test]
    fn series_have_units_labels_and_fine_buckets() {
        let metrics = installed();
        let _ = call("NodeStageVolume").answered("OK");
        step("mount", "loop", Duration::from_millis(3), false);
        step("attach", "loop", Duration::from_micros(70), true);
        mkfs("refused");
        for (from, to) in [
            (None, Some("staging")),
            (None, Some("staging")),
            (Some("staging"), Some("staged")),
            (Some("staged"), Some("staged")),
        ] {
            volume_state_changed(from, to);
        }
        metrics.before_scrape(|| blocking_threads(3, 1));
        metrics.upkeep();
        let text = metrics.render();
        for line in [
            "# TYPE uring_csi_call_duration_seconds histogram",
            r#"uring_csi_call_duration_seconds_bucket{method="NodeStageVolume",le="120"} 1"#,
            r#"uring_csi_calls_total{method="NodeStageVolume",code="OK"} 1"#,
            r#"uring_csi_step_duration_seconds_bucket{step="attach",backend="loop",le="0.00005"} 0"#,
            r#"uring_csi_step_duration_seconds_bucket{step="attach",backend="loop",le="0.0001"} 1"#,
            r#"uring_csi_step_duration_seconds_bucket{step="mount",backend="loop",le="120"} 1"#,
            r#"uring_csi_step_failures_total{step="mount",backend="loop"} 0"#,
            r#"uring_csi_step_failures_total{step="attach",backend="loop"} 1"#,
            r#"uring_csi_mkfs_total{outcome="refused"} 1"#,
            r#"uring_csi_volumes{state="staged"} 1"#,
            r#"uring_csi_volumes{state="staging"} 1"#,
            "uring_csi_blocking_threads 3",
            "uring_csi_stuck_threads 1",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
        assert!(text.contains("# HELP uring_csi_stuck_threads "), "{text}");
    }

    #[test]
    fn what_has_not_happened_yet_is_0() {
        let metrics = installed();
        announce_node(["NotMounted"]);
        let text = metrics.render();
        for line in [
            r#"uring_csi_calls_total{method="NodeExpandVolume",code="OK"} 0"#,
            r#"uring_csi_calls_in_flight{method="NodeExpandVolume"} 0"#,
            r#"uring_csi_oldest_call_age_seconds{method="NodeExpandVolume"} 0"#,
            r#"uring_csi_mkfs_total{outcome="formatted"} 0"#,
            r#"uring_csi_fsck_total{outcome="uncorrected"} 0"#,
            r#"uring_csi_volume_conditions{reason="NotMounted"} 0"#,
            r#"uring_csi_volumes{state="inline"} 0"#,
            r#"uring_csi_http_dropped_total{reason="slow"} 0"#,
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
    }

    #[test]
    fn a_pool_or_cluster_of_unknown_state_has_no_number() {
        let metrics = installed();
        let space = PoolSpace {
            size: 3 << 40,
            free: 1 << 40,
            promised: 2 << 40,
        };
        pool("fast", Some(space));
        ceph_cluster("east", Some(true));
        ceph_cluster("west", Some(false));
        ceph_errors("west", "unanswered", 3);
        ring_operations("read", 20, 4);
        let text = metrics.render();
        for line in [
            r#"uring_csi_pool_size_bytes{pool="fast"} 3298534883328"#,
            r#"uring_csi_pool_free_bytes{pool="fast"} 1099511627776"#,
            r#"uring_csi_pool_promised_bytes{pool="fast"} 2199023255552"#,
            r#"uring_csi_ceph_cluster_reachable{cluster_id="east"} 1"#,
            r#"uring_csi_ceph_cluster_reachable{cluster_id="west"} 0"#,
            r#"uring_csi_ceph_errors_total{cluster_id="west",reason="unanswered"} 3"#,
            r#"uring_csi_ring_operations_total{operation="read"} 20"#,
            r#"uring_csi_ring_operations_in_flight{operation="read"} 4"#,
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
        pool("fast", None);
        ceph_cluster("west", None);
        let text = metrics.render();
        for line in [
            r#"uring_csi_pool_free_bytes{pool="fast"} NaN"#,
            r#"uring_csi_ceph_cluster_reachable{cluster_id="west"} NaN"#,
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
    }

    #[test]
    fn volumes_with_a_condition_are_shown_until_it_ends() {
        let metrics = installed();
        let reasons = ["ServerAway", "StepStuck"];
        let volume = |handle: &str| (handle.to_owned(), reasons.to_vec());
        let many = (0..200).map(|number| volume(&format!("v{number}")));
        metrics.volume_conditions(reasons, &many.collect());
        let text = metrics.render();
        for line in [
            "# TYPE uring_csi_volume_condition_info gauge",
            r#"uring_csi_volume_conditions{reason="ServerAway"} 200"#,
            r#"uring_csi_volume_condition_info{volume_id="v0",reason="StepStuck"} 1"#,
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
        assert_eq!(
            text.matches("volume_condition_info{").count(),
            2 * MOST_VOLUMES
        );
        metrics.volume_conditions(reasons, &[volume("a\"b\n")].into());
        let text = metrics.render();
        let escaped =
            r#"uring_csi_volume_condition_info{volume_id="a\"b\n",reason="ServerAway"} 1"#;
        assert!(text.contains(escaped), "{text}");
        assert_eq!(text.matches("volume_condition_info{").count(), 2);
        metrics.volume_conditions(reasons, &BTreeMap::new());
        let text = metrics.render();
        assert!(text.contains(r#"uring_csi_volume_conditions{reason="ServerAway"} 0"#));
        assert!(!text.contains("volume_condition_info"), "{text}");
    }

    #[test]
    fn the_process_is_measured() {
        let text = installed().render();
        for metric in [
            "process_cpu_seconds_total",
            "process_open_fds",
            "process_max_fds",
            "process_resident_memory_bytes",
            "process_start_time_seconds",
            "process_threads",
        ] {
            let line = text
                .lines()
                .find(|line| line.starts_with(&format!("{metric} ")));
            let value = line.and_then(|line| line.split(' ').nth(1)?.parse::<f64>().ok());
            assert!(value.is_some_and(|it| it >= 0.0), "{metric}: {line:?}");
            assert!(text.contains(&format!("# HELP {metric} ")), "{metric}");
        }
    }

    #[test]
    fn buckets_rise() {
        assert!(BUCKETS.is_sorted());
        assert!((BUCKETS[0] - 50e-6).abs() < 1e-12 && (BUCKETS[13] - 120.0).abs() < 1e-12);
    }
}
