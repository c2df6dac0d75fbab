//! Log lines on stderr, and the span that all lines of one call share.
//!
//! A node serves dozens of calls at once, and kubelet repeats each that fails.
//! So every call gets a span with a short request id; a line written anywhere
//! within it, however deep, carries `request_id`, `method` and `volume_id`:
//!
//! ```text
//! 2025-05-07T10:21:09.218Z  WARN call{request_id=5be1a02c method="NodeStageVolume" volume_id="…"}: …
//! ```
//!
//! In JSON the same fields are in the objects of `spans`.
//!
//! Logging never waits for stderr: the thread of [`writer`] does.

use std::{
    backtrace::{Backtrace, BacktraceStatus},
    io,
    os::fd::AsFd as _,
    panic::{self, PanicHookInfo},
    sync::{
        LazyLock,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use tracing::{Level, Span, Subscriber, field, level_filters::LevelFilter};
use tracing_subscriber::{
    filter::Targets,
    fmt::{self, MakeWriter},
    layer::SubscriberExt as _,
    registry,
};

mod writer;

use writer::LineWriter;

/// How long the process waits for its last lines to be written before it exits.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// The format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people: one line, fields as `key=value`.
    #[default]
    Text,
    /// For log collectors: one JSON object a line.
    Json,
}

/// Why logging could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// A part of the list is neither a level nor a directive.
    #[error(
        "invalid log level {level:?}: {part:?} is neither a level nor TARGET=LEVEL; \
         give error, warn, info, debug, trace, or directives such as info,uring_csi::mount=debug"
    )]
    Level {
        /// The given text.
        level: String,
        part: String,
    },
    /// The writer thread could not be started.
    #[error("cannot start the thread that writes log lines")]
    Thread(#[source] io::Error),
    /// [`init`] was called before, or a test's subscriber is in place.
    #[error("logging is already set up")]
    Already,
}

/// The process's logging; dropped, it waits up to a second for the last lines to be
/// written.
#[derive(Debug)]
#[must_use = "lines are lost at the end of a process that does not keep it"]
pub struct Logs(LineWriter);

impl Drop for Logs {
    fn drop(&mut self) {
        self.0.flush(FLUSH_TIMEOUT);
    }
}

/// Sends the process's log lines and panics to stderr, from a thread that it starts: drop
/// privileges that need a single-threaded process before.
///
/// `level` is a level (`info`) for this project's lines, or a comma-separated list of
/// levels and of `target=level` directives; the longest target that begins a line's counts.
/// The environment is not read. Call it once, before the first line.
pub fn init(format: LogFormat, level: &str) -> Result<Logs, LogError> {
    let filter = filter(level)?;
    let stderr = io::stderr().as_fd().try_clone_to_owned();
    let writer = stderr
        .and_then(LineWriter::start)
        .map_err(LogError::Thread)?;
    let subscriber = subscriber(format, filter, writer.clone());
    tracing::subscriber::set_global_default(subscriber).map_err(|_| LogError::Already)?;
    panic::set_hook(Box::new(log_panic));
    Ok(Logs(writer))
}

/// Like the standard library's hook, without waiting for stderr.
fn log_panic(panic: &PanicHookInfo<'_>) {
    let trace = Backtrace::capture();
    if trace.status() == BacktraceStatus::Captured {
        tracing::error!("{panic}\n{trace}");
    } else {
        tracing::error!("{panic}");
    }
}

/// A time for a field of a line, as the number that JSON has for it: of 128 bits it would
/// be a string there.
pub fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// The span of one call, to `.instrument` its future with. `volume_id` may be empty.
pub fn call_span(method: &'static str, volume_id: &str) -> Span {
    // Error level: the fields must be present at every configured level.
    let span = tracing::span!(
        Level::ERROR,
        "call",
        request_id = %request_id(),
        method,
        request_name = field::Empty,
        volume_id = field::Empty
    );
    if !volume_id.is_empty() {
        span.record("volume_id", volume_id);
    }
    span
}

/// Adds the name that the current call gives to what it creates.
pub fn record_name(name: &str) {
    Span::current().record("request_name", name);
}

/// Adds the id of the volume that the current call created.
pub fn record_volume_id(volume_id: &str) {
    Span::current().record("volume_id", volume_id);
}

/// Eight hexadecimal digits, unique among four billion calls.
///
/// The start is random, so that the ids of two runs of an agent differ in one log; the
/// odd step visits every value before it repeats one.
fn request_id() -> String {
    const STEP: u32 = 0x9e37_79b9;
    static NEXT: LazyLock<AtomicU32> =
        LazyLock::new(|| AtomicU32::new(uuid::Uuid::new_v4().as_fields().0));
    format!("{:08x}", NEXT.fetch_add(STEP, Ordering::Relaxed))
}

/// A bare level applies to this project's own lines only: the libraries log each frame of
/// each connection.
///
/// Not `EnvFilter`: its directives for spans take a library for regular expressions, and
/// it takes a mistyped level for a target, and then passes no other lines.
fn filter(level: &str) -> Result<Targets, LogError> {
    if let Ok(level) = level.parse::<Level>() {
        return Ok(Targets::new()
            .with_default(Level::WARN)
            .with_target("uring_csi", level));
    }
    let mut filter = Targets::new();
    for part in level.split(',') {
        let (target, word) = match part.split_once('=') {
            Some((target, word)) => (Some(target), word),
            None => (None, part),
        };
        let is_target = |target: &str| !target.is_empty() && !target.contains(['[', '=']);
        // An empty word would parse, as `error`.
        filter = match (target, word.parse::<LevelFilter>()) {
            (None, Ok(level)) if !word.is_empty() => filter.with_default(level),
            (Some(target), Ok(level)) if !word.is_empty() && is_target(target) => {
                filter.with_target(target, level)
            }
            _ => {
                return Err(LogError::Level {
                    level: level.to_owned(),
                    part: part.to_owned(),
                });
            }
        };
    }
    Ok(filter)
}

fn subscriber<W>(format: LogFormat, filter: Targets, writer: W) -> Box<dyn Subscriber + Send + Sync>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let lines = fmt::layer().with_writer(writer).with_ansi(false);
    match format {
        LogFormat::Text => Box::new(registry().with(lines).with(filter)),
        LogFormat::Json => {
            let lines = lines
                .json()
                .flatten_event(true)
                .with_current_span(false)
                .with_span_list(true);
            Box::new(registry().with(lines).with(filter))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{self, Write},
        sync::{Arc, Mutex},
    };

    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn written(format: LogFormat, level: &str, body: impl FnOnce()) -> String {
        let sink = Sink::default();
        let writer = sink.clone();
        let subscriber = subscriber(format, filter(level).unwrap(), move || writer.clone());
        tracing::subscriber::with_default(subscriber, body);
        String::from_utf8(sink.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn a_line_deep_inside_a_call_carries_its_fields() {
        let body = || {
            call_span("NodeStageVolume", "vol-1").in_scope(|| {
                let micros = micros(Duration::from_micros(7));
                tracing::info_span!("mount").in_scope(|| tracing::warn!(micros, "busy"));
            });
        };
        let text = written(LogFormat::Text, "warn", body);
        assert!(text.contains("request_id="), "{text}");
        assert!(
            text.contains(r#"method="NodeStageVolume" volume_id="vol-1""#),
            "{text}"
        );

        let line: serde_json::Value =
            serde_json::from_str(&written(LogFormat::Json, "warn", body)).unwrap();
        assert_eq!(line["message"], "busy");
        assert_eq!(line["micros"], 7);
        let call = &line["spans"][0];
        assert_eq!(call["method"], "NodeStageVolume");
        assert_eq!(call["volume_id"], "vol-1");
        assert_eq!(call["request_id"].as_str().unwrap().len(), 8);
        assert!(call.get("request_name").is_none(), "{line}");
    }

    #[test]
    fn a_call_that_creates_has_the_name_and_then_the_id() {
        let body = || {
            call_span("CreateVolume", "").in_scope(|| {
                record_name("pvc-1");
                tracing::warn!("busy");
                record_volume_id("vol-1");
                tracing::warn!("answered");
            });
        };
        let lines = written(LogFormat::Json, "warn", body);
        let lines: Vec<serde_json::Value> = lines
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let call = |line: usize| &lines[line]["spans"][0];
        assert_eq!(call(0)["request_name"], "pvc-1");
        assert!(call(0).get("volume_id").is_none(), "{}", lines[0]);
        assert_eq!(call(1)["request_name"], "pvc-1");
        assert_eq!(call(1)["volume_id"], "vol-1");
        let text = written(LogFormat::Text, "warn", body);
        assert!(
            text.contains(r#"request_name="pvc-1" volume_id="vol-1""#),
            "{text}"
        );
    }

    #[test]
    fn the_level_filters_by_target() {
        let text = written(LogFormat::Text, "warn,quiet=error", || {
            tracing::info!("too low");
            tracing::warn!(target: "quiet", "also too low");
            tracing::warn!("seen");
        });
        assert!(text.contains("seen") && !text.contains("low"), "{text}");
    }

    #[test]
    fn a_bad_level_is_named() {
        for bad in [
            "info,=,x=loud",
            "warning",
            "info,verbose",
            "uring_csi",
            "",
            "info,",
            "=",
            "x=",
            "x=info=debug",
            "[call]=trace",
        ] {
            let error = filter(bad).unwrap_err().to_string();
            assert!(error.contains(&format!("{bad:?}")), "{error}");
        }
        for good in ["WARN", "off", "info,uring_csi::mount=debug", "x=1"] {
            filter(good).unwrap();
        }
    }

    #[test]
    fn request_ids_differ() {
        assert_ne!(request_id(), request_id());
    }
}
