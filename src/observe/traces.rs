//! Traces: the id by which the log lines of a call are found from its caller's trace, and,
//! with the feature `otel`, the export of spans to an OpenTelemetry collector.

use std::{
    str::FromStr,
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
};

use clap::Args;

#[cfg(feature = "otel")]
mod export;

#[cfg(feature = "otel")]
pub use export::{ExportError, SpanExport, answered, begin, layer, start, step_ended};
#[cfg(not(feature = "otel"))]
pub use no_export::{ExportError, SpanExport, answered, begin, layer, start, step_ended};

/// Where spans are exported to.
#[derive(Clone, Debug, Default, Args)]
pub struct TraceOptions {
    /// Export traces to the OpenTelemetry collector at this URL, by OTLP over HTTP, e.g.
    /// http://localhost:4318.
    #[cfg(feature = "otel")]
    #[arg(long, env = "OTEL_EXPORTER_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,
}

/// The span that a call was made in, as `traceparent` of W3C Trace Context names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceParent {
    /// The trace of the span.
    pub trace_id: u128,
    /// Its id.
    #[cfg(feature = "otel")]
    span_id: u64,
    /// Whether the caller records it.
    #[cfg(feature = "otel")]
    is_sampled: bool,
}

/// The text is no `traceparent`.
#[derive(Debug, PartialEq, Eq)]
pub struct NoTraceParent;

impl FromStr for TraceParent {
    type Err = NoTraceParent;

    /// `VERSION-TRACE-SPAN-FLAGS`; versions after 00 may append further parts.
    fn from_str(text: &str) -> Result<Self, NoTraceParent> {
        let number = |part: Option<&str>, digits: usize| {
            let part = part
                .filter(|part| part.len() == digits)
                .ok_or(NoTraceParent)?;
            let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
            if !part.bytes().all(is_digit) {
                return Err(NoTraceParent);
            }
            u128::from_str_radix(part, 16).map_err(|_| NoTraceParent)
        };
        let mut parts = text.split('-');
        let version = number(parts.next(), 2)?;
        let trace_id = number(parts.next(), 32)?;
        let span_id = number(parts.next(), 16)?;
        let flags = number(parts.next(), 2)?;
        let is_whole = parts.next().is_none() || version > 0;
        if version == 0xff || trace_id == 0 || span_id == 0 || !is_whole {
            return Err(NoTraceParent);
        }
        #[cfg(not(feature = "otel"))]
        let _ = flags;
        Ok(Self {
            trace_id,
            #[cfg(feature = "otel")]
            span_id: u64::try_from(span_id).map_err(|_| NoTraceParent)?,
            #[cfg(feature = "otel")]
            is_sampled: flags & 1 == 1,
        })
    }
}

/// A trace id for a call without a caller's. The first half is random for each run, and the
/// odd step of the second visits every value before it repeats one: no system call for each.
pub fn new_trace_id() -> u128 {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
    static RUN: LazyLock<(u64, AtomicU64)> = LazyLock::new(|| {
        let (run, first) = uuid::Uuid::new_v4().as_u64_pair();
        (run, AtomicU64::new(first))
    });
    let (run, next) = &*RUN;
    u128::from(*run) << 64 | u128::from(next.fetch_add(STEP, Ordering::Relaxed))
}

/// What a program without the feature does: nothing.
#[cfg(not(feature = "otel"))]
mod no_export {
    use std::convert::Infallible;

    use tracing::Span;
    use tracing_subscriber::{
        Layer as _, Registry,
        filter::{Filtered, LevelFilter},
        layer::Identity,
    };

    use super::{TraceOptions, TraceParent};

    pub type ExportError = Infallible;
    pub type SpanExport = Identity;

    #[allow(clippy::unnecessary_wraps, reason = "that of the feature can fail")]
    pub fn start(_: &'static str, _: &TraceOptions) -> Result<SpanExport, ExportError> {
        Ok(Identity::new())
    }

    /// Without a filter it would take every span that a library has at any level.
    pub fn layer(_: &SpanExport) -> Filtered<Identity, LevelFilter, Registry> {
        Identity::new().with_filter(LevelFilter::OFF)
    }

    pub fn begin(_: &Span, _: Option<TraceParent>) -> Option<u128> {
        None
    }

    pub fn answered(_: i32, _: Option<&str>) {}

    pub fn step_ended(_: &Span, _: &'static str, _: bool) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_callers_span_is_read_as_the_standard_has_it() {
        let trace_id = |text: &str| text.parse::<TraceParent>().map(|parent| parent.trace_id);
        let id = 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736;
        for good in [
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00",
            "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
        ] {
            assert_eq!(trace_id(good), Ok(id), "{good}");
        }
        for bad in [
            "",
            "rubbish",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
        ] {
            assert_eq!(trace_id(bad), Err(NoTraceParent), "{bad}");
        }
    }

    #[test]
    fn trace_ids_differ() {
        let (first, second) = (new_trace_id(), new_trace_id());
        assert_ne!(first, second);
        assert_eq!(first >> 64, second >> 64);
    }
}
