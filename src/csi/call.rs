//! The frame of every call: a span with a trace id, a line in the log, its metrics, and a
//! deadline.

use std::time::Duration;

use tonic::{Code, Response, Status, metadata::MetadataMap};
use tracing::Instrument as _;

use crate::{
    observe::{
        logs, metrics,
        traces::{self, TraceParent},
    },
    proto::code_name,
};

/// The timeout of a call without `grpc-timeout`: kubelet's two minutes.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(120);

/// The key of a request's metadata by which a caller of ListVolumes accepts a list without the entries of unreachable storage. CSI has no such option, and
/// no sidecar must get such a list: a missing volume looks deleted to it.
pub const TAKES_LESS: &str = "uring-csi-takes-less";
/// The key under which the answer then names the omitted storage, a sentence each.
pub const OMITTED: &str = "uring-csi-omitted-bin";

/// The key in the metadata of an answer to NodeGetVolumeStats under which it says how old its
/// statistics are, in milliseconds. CSI has no field for it.
pub const STATISTICS_AGE: &str = "uring-csi-statistics-age";

/// The caller of a call, as the request's metadata tell of it.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// How long the call may wait for its work: a second less than its caller waits, so that
    /// the pod's events show the answer and not a timeout of the transport.
    pub timeout: Duration,
    /// The caller's span, if it has one.
    parent: Option<TraceParent>,
}

impl Caller {
    pub fn of(metadata: &MetadataMap) -> Self {
        let text = |key| metadata.get(key).and_then(|value| value.to_str().ok());
        Self {
            timeout: timeout(text("grpc-timeout")),
            parent: text(TRACE_PARENT).and_then(|value| value.parse().ok()),
        }
    }
}

/// The key of the span that a call is made in. Source: W3C Trace Context.
pub const TRACE_PARENT: &str = "traceparent";

/// Runs one call.
pub async fn observed<T>(
    method: &'static str,
    volume_id: &str,
    caller: Caller,
    work: impl Future<Output = Result<T, Status>>,
) -> Result<Response<T>, Status> {
    let timer = metrics::call(method);
    async {
        let answer = work.await;
        let code = answer.as_ref().map_or_else(Status::code, |_| Code::Ok);
        let took = timer.answered(code_name(code));
        match &answer {
            Ok(_) => {
                tracing::debug!(
                    micros = logs::micros(took),
                    code = code_name(code),
                    "answered"
                );
                traces::answered(i32::from(code), None);
            }
            Err(status) => {
                let error = status.message();
                tracing::warn!(
                    micros = logs::micros(took),
                    code = code_name(code),
                    error,
                    "answered with an error"
                );
                traces::answered(i32::from(code), Some(error));
            }
        }
        answer.map(Response::new)
    }
    .instrument(logs::call_span(method, volume_id, caller.parent))
    .await
}

/// Source: the gRPC protocol over HTTP/2, `Timeout`.
fn timeout(told: Option<&str>) -> Duration {
    let told = told.and_then(parse_timeout).unwrap_or(DEFAULT_TIMEOUT);
    told.saturating_sub(Duration::from_secs(1).min(told / 4))
}

fn parse_timeout(text: &str) -> Option<Duration> {
    let unit = text.chars().next_back()?;
    let digits = &text[..text.len() - unit.len_utf8()];
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let amount: u64 = digits.parse().ok()?;
    Some(match unit {
        'H' => Duration::from_secs(amount * 3600),
        'M' => Duration::from_secs(amount * 60),
        'S' => Duration::from_secs(amount),
        'm' => Duration::from_millis(amount),
        'u' => Duration::from_micros(amount),
        'n' => Duration::from_nanos(amount),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_call_is_answered_before_its_caller_gives_up() {
        let timeout_of = |text: &'static str| {
            let mut metadata = MetadataMap::new();
            metadata.insert("grpc-timeout", text.parse().unwrap());
            Caller::of(&metadata).timeout
        };
        assert_eq!(timeout_of("120S"), Duration::from_secs(119));
        assert_eq!(timeout_of("2M"), Duration::from_secs(119));
        assert_eq!(timeout_of("119999m"), Duration::from_millis(118_999));
        assert_eq!(timeout_of("400m"), Duration::from_millis(300));
        assert_eq!(timeout_of("rubbish"), Duration::from_secs(119));
        let without = Caller::of(&MetadataMap::new());
        assert_eq!(without.timeout, Duration::from_secs(119));
    }

    proptest! {
        #[test]
        fn no_timeout_text_panics(text in ".{0,12}") {
            let _ = parse_timeout(&text);
        }
    }
}
