//! The frame of every call: a span with a request id, a line in the log, its metrics, and a
//! deadline.

use std::time::Duration;

use tonic::{Code, Response, Status, metadata::MetadataMap};
use tracing::Instrument as _;

use crate::{
    observe::{logs, metrics},
    proto::code_name,
};

/// The timeout of a call without `grpc-timeout`: kubelet's two minutes.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(120);

/// The key of a request's metadata by which a caller of ListVolumes accepts a list without the entries of unreachable storage. CSI has no such option, and
/// no sidecar must get such a list: a missing volume looks deleted to it.
pub const TAKES_LESS: &str = "uring-csi-takes-less";
/// The key under which the answer then names the omitted storage, a sentence each.
pub const OMITTED: &str = "uring-csi-omitted-bin";

/// Runs one call.
pub async fn observed<T>(
    method: &'static str,
    volume_id: &str,
    work: impl Future<Output = Result<T, Status>>,
) -> Result<Response<T>, Status> {
    let timer = metrics::call(method);
    async {
        let answer = work.await;
        let code = answer.as_ref().map_or_else(Status::code, |_| Code::Ok);
        let took = timer.answered(code_name(code));
        match &answer {
            Ok(_) => tracing::debug!(micros = logs::micros(took), "answered"),
            Err(status) => tracing::warn!(
                micros = logs::micros(took),
                code = code_name(code),
                error = status.message(),
                "answered with an error"
            ),
        }
        answer.map(Response::new)
    }
    .instrument(logs::call_span(method, volume_id))
    .await
}

/// How long a call may wait for its work: a second less than its caller waits, so that
/// the pod's events show the answer and not a timeout of the transport. Source: the gRPC
/// protocol over HTTP/2, `Timeout`.
pub fn timeout(metadata: &MetadataMap) -> Duration {
    let told = metadata
        .get("grpc-timeout")
        .and_then(|value| value.to_str().ok())
        .and_then(parse_timeout)
        .unwrap_or(DEFAULT_TIMEOUT);
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
            timeout(&metadata)
        };
        assert_eq!(timeout_of("120S"), Duration::from_secs(119));
        assert_eq!(timeout_of("2M"), Duration::from_secs(119));
        assert_eq!(timeout_of("119999m"), Duration::from_millis(118_999));
        assert_eq!(timeout_of("400m"), Duration::from_millis(300));
        assert_eq!(timeout_of("rubbish"), Duration::from_secs(119));
        assert_eq!(timeout(&MetadataMap::new()), Duration::from_secs(119));
    }

    proptest! {
        #[test]
        fn no_timeout_text_panics(text in ".{0,12}") {
            let _ = parse_timeout(&text);
        }
    }
}
