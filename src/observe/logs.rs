//! Log lines on stderr, and the span that all lines of one call share.
//!
//! A node serves dozens of calls at once, and kubelet repeats each that fails.
//! So every call gets a span with a trace id, that of its caller's trace if there is one; a
//! line written anywhere within it, however deep, carries `method`, `trace_id` and
//! `volume_id`, and one from within a step of its work the `step`:
//!
//! ```text
//! 2025-05-07T10:21:09.218Z  WARN call{method="NodeStageVolume" trace_id=4bf9… volume_id="…"}: …
//! ```
//!
//! In JSON the same fields are in the objects of `spans`.
//!
//! Logging never waits for stderr: the thread of [`writer`] does.

use std::{
    backtrace::{Backtrace, BacktraceStatus},
    fmt::{Display, Formatter},
    io,
    os::fd::AsFd as _,
    panic::{self, PanicHookInfo},
    time::Duration,
};

use tracing::{Level, Span, Subscriber, field, level_filters::LevelFilter};
use tracing_subscriber::{
    filter::Targets,
    fmt::{self, MakeWriter},
    layer::{Layer as _, SubscriberExt as _},
    registry,
};

use super::traces::{self, ExportError, SpanExport, TraceOptions, TraceParent};

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
    ///
    /// Remedy: raise the limit of threads (`ulimit -u`, pids of the container), or add memory.
    #[error("cannot start the thread that writes log lines")]
    Thread(#[source] io::Error),
    /// The export of traces could not be set up.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// [`init`] was called before, or a test's subscriber is in place.
    ///
    /// Remedy: report a defect.
    #[error("logging is already set up")]
    Already,
}

/// The process's logging; dropped, it waits up to a second for the last spans to be exported,
/// and another for the last lines to be written.
#[derive(Debug)]
#[must_use = "lines are lost at the end of a process that does not keep it"]
pub struct Logs {
    // Dropped first: its end may write lines.
    _export: SpanExport,
    _lines: Flushed,
}

#[derive(Debug)]
struct Flushed(LineWriter);

impl Drop for Flushed {
    fn drop(&mut self) {
        self.0.flush(FLUSH_TIMEOUT);
    }
}

/// Sends the process's log lines and panics to stderr, from a thread that it starts: drop
/// privileges that need a single-threaded process before. `service` names the program in
/// traces, whose export starts a thread, too.
///
/// `level` is a level (`info`) for this project's lines, or a comma-separated list of
/// levels and of `target=level` directives; the longest target that begins a line's counts.
/// The environment is not read. Call it once, before the first line.
pub fn init(
    service: &'static str,
    format: LogFormat,
    level: &str,
    traces: &TraceOptions,
) -> Result<Logs, LogError> {
    let filter = filter(level)?;
    let stderr = io::stderr().as_fd().try_clone_to_owned();
    let writer = stderr
        .and_then(LineWriter::start)
        .map_err(LogError::Thread)?;
    let export = traces::start(service, traces)?;
    let subscriber = subscriber(format, filter, writer.clone(), &export);
    tracing::subscriber::set_global_default(subscriber).map_err(|_| LogError::Already)?;
    panic::set_hook(Box::new(log_panic));
    Ok(Logs {
        _export: export,
        _lines: Flushed(writer),
    })
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
pub fn call_span(method: &'static str, volume_id: &str, parent: Option<TraceParent>) -> Span {
    let volume_id = Some(volume_id).filter(|id| !id.is_empty());
    // An export chooses the trace. What is known is given to the span at once: in JSON each
    // later field reads and writes those before it again.
    let trace_id = match parent {
        Some(parent) => Some(parent.trace_id),
        None if cfg!(feature = "otel") => None,
        None => Some(traces::new_trace_id()),
    };
    // Error level: the fields must be present at every configured level.
    let span = tracing::span!(
        Level::ERROR,
        "call",
        method,
        trace_id = trace_id.map(Hex).map(field::display),
        request_name = field::Empty,
        volume_id = volume_id.filter(|_| trace_id.is_some())
    );
    let begun = traces::begin(&span, parent);
    if trace_id.is_none() {
        let trace_id = Hex(begun.unwrap_or_else(traces::new_trace_id));
        span.record("trace_id", field::display(trace_id));
        span.record("volume_id", volume_id);
    }
    span
}

struct Hex(u128);

impl Display for Hex {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// The span of one step of a call's work.
pub fn step_span(step: &'static str) -> Span {
    tracing::span!(Level::ERROR, "step", step)
}

/// Adds the name that the current call gives to what it creates.
pub fn record_name(name: &str) {
    Span::current().record("request_name", name);
}

/// Adds the id of the volume that the current call created.
pub fn record_volume_id(volume_id: &str) {
    Span::current().record("volume_id", volume_id);
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

fn subscriber<W>(
    format: LogFormat,
    filter: Targets,
    writer: W,
    export: &SpanExport,
) -> Box<dyn Subscriber + Send + Sync>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let lines = fmt::layer().with_writer(writer).with_ansi(false);
    let exported = registry().with(traces::layer(export));
    match format {
        LogFormat::Text => Box::new(exported.with(lines.with_filter(filter))),
        LogFormat::Json => {
            let lines = lines
                .json()
                .flatten_event(true)
                .with_current_span(false)
                .with_span_list(true);
            Box::new(exported.with(lines.with_filter(filter)))
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
        let subscriber = subscriber(
            format,
            filter(level).unwrap(),
            move || writer.clone(),
            &traces::start("test", &TraceOptions::default()).unwrap(),
        );
        tracing::subscriber::with_default(subscriber, body);
        String::from_utf8(sink.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn a_line_deep_inside_a_call_carries_its_fields() {
        let body = || {
            call_span("NodeStageVolume", "vol-1", None).in_scope(|| {
                let micros = micros(Duration::from_micros(7));
                step_span("mount").in_scope(|| tracing::warn!(micros, "busy"));
            });
        };
        let text = written(LogFormat::Text, "warn", body);
        let (before, after) = text.split_once(" trace_id=").unwrap();
        assert!(
            before.ends_with(r#"call{method="NodeStageVolume""#),
            "{text}"
        );
        let fields = r#" volume_id="vol-1"}:step{step="mount"}: "#;
        assert!(after[32..].starts_with(fields), "{text}");

        let line: serde_json::Value =
            serde_json::from_str(&written(LogFormat::Json, "warn", body)).unwrap();
        assert_eq!(line["message"], "busy");
        assert_eq!(line["micros"], 7);
        let call = &line["spans"][0];
        assert_eq!(call["method"], "NodeStageVolume");
        assert_eq!(call["volume_id"], "vol-1");
        assert_eq!(call["trace_id"].as_str().unwrap().len(), 32);
        assert_eq!(line["spans"][1]["step"], "mount");
        assert!(call.get("request_name").is_none(), "{line}");
    }

    #[test]
    fn a_call_that_creates_has_the_name_and_then_the_id() {
        let body = || {
            call_span("CreateVolume", "", None).in_scope(|| {
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

    /// The HTTP library has spans for each frame of each connection: to make them takes
    /// longer than many a call.
    #[test]
    fn spans_below_the_level_are_not_made() {
        written(LogFormat::Text, "info", || {
            let span = tracing::trace_span!(target: "h2", "poll");
            assert!(span.is_disabled() && !call_span("Probe", "", None).is_disabled());
        });
        written(LogFormat::Text, "h2=trace", || {
            assert!(!tracing::trace_span!(target: "h2", "poll").is_disabled());
        });
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
    fn a_call_within_a_trace_has_its_id() {
        let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let text = written(LogFormat::Text, "warn", || {
            call_span("DeleteVolume", "", parent.parse().ok()).in_scope(|| tracing::warn!("busy"));
        });
        let id = "trace_id=4bf92f3577b34da6a3ce929d0e0e4736}";
        assert!(text.contains(id), "{text}");
    }
}
