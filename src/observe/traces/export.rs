//! Spans of calls and their steps, by OTLP over HTTP.
//!
//! The SDK's batch processor has a thread of its own and a bounded queue in front of it: a
//! collector that does not answer delays no call, and beyond the queue spans are dropped and
//! counted. That thread blocks in a plain HTTP client, so no second runtime is needed.

use std::time::Duration;

use opentelemetry::{
    KeyValue, TraceFlags, TraceId,
    trace::{SpanContext, SpanKind, Status, TraceContextExt as _, TraceState, TracerProvider as _},
};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::{
    Resource,
    error::OTelSdkResult,
    trace::{BatchConfig, BatchSpanProcessor, SdkTracerProvider, Span, SpanData, SpanProcessor},
};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_subscriber::{Layer, Registry, filter::Targets};
use ureq::Agent;

use super::{TraceOptions, TraceParent};

/// The longest a request to the collector takes.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long the process waits for its last spans to be sent before it exits.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// The export could not be set up.
///
/// Remedy: correct --otlp-endpoint.
#[derive(Debug, thiserror::Error)]
#[error("cannot export traces to the collector")]
pub struct ExportError {
    source: Box<dyn std::error::Error + Send + Sync>,
}

/// The process's export; dropped, it waits up to a second for the last spans to be sent.
#[derive(Debug)]
pub struct SpanExport(Option<SdkTracerProvider>);

/// Starts the thread that sends, if a collector is configured. The standard variables of
/// OpenTelemetry change its name, sampling, queue and headers.
pub fn start(service: &'static str, options: &TraceOptions) -> Result<SpanExport, ExportError> {
    let Some(endpoint) = &options.otlp_endpoint else {
        return Ok(SpanExport(None));
    };
    let endpoint = format!("{}/v1/traces", endpoint.trim_end_matches('/'));
    // Before the exporter does: its error would show the URL, which may have a password.
    let parsed = Request::builder().uri(&*endpoint).body(());
    parsed.map_err(|source| ExportError {
        source: source.into(),
    })?;
    let exporter = SpanExporter::builder()
        .with_http()
        .with_http_client(Blocking::new())
        .with_endpoint(endpoint)
        .build()
        .map_err(|source| ExportError {
            source: source.into(),
        })?;
    let mut resource = Resource::builder()
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")));
    if std::env::var_os("OTEL_SERVICE_NAME").is_none() {
        resource = resource.with_service_name(service);
    }
    let batches = BatchSpanProcessor::new(exporter, BatchConfig::default());
    let provider = SdkTracerProvider::builder()
        .with_span_processor(SpanNames(batches))
        .with_resource(resource.build())
        .build();
    Ok(SpanExport(Some(provider)))
}

/// What makes spans of tracing's; lines become their events, except those of debug and trace,
/// and of libraries, the export's own among them.
pub fn layer(export: &SpanExport) -> impl Layer<Registry> + Send + Sync + use<> {
    let layer = export.0.as_ref().map(|provider| {
        tracing_opentelemetry::layer()
            .with_tracer(provider.tracer("uring-csi"))
            .with_location(false)
            .with_threads(false)
            .with_tracked_inactivity(false)
    });
    let exported = match layer {
        Some(_) => Targets::new().with_target("uring_csi", tracing::Level::INFO),
        None => Targets::new(),
    };
    layer.with_filter(exported)
}

impl Drop for SpanExport {
    fn drop(&mut self) {
        if let Some(provider) = &self.0 {
            let _ = provider.shutdown_with_timeout(FLUSH_TIMEOUT);
        }
    }
}

/// Makes a call's span the child of its caller's. Its trace id; `None` if nothing is
/// exported.
pub fn begin(span: &tracing::Span, parent: Option<TraceParent>) -> Option<u128> {
    if let Some(parent) = parent {
        let flags = TraceFlags::default().with_sampled(parent.is_sampled);
        let (trace, id) = (parent.trace_id.into(), parent.span_id.into());
        let remote = SpanContext::new(trace, id, flags, true, TraceState::default());
        let context = opentelemetry::Context::new().with_remote_span_context(remote);
        // Fails where nothing is exported.
        let _ = span.set_parent(context);
    }
    let context = span.context();
    let trace_id = context.span().span_context().trace_id();
    (trace_id != TraceId::INVALID).then(|| u128::from_be_bytes(trace_id.to_bytes()))
}

/// Records how the current call was answered, by gRPC's number of the code.
pub fn answered(code: i32, error: Option<&str>) {
    let span = tracing::Span::current();
    span.set_attribute("rpc.grpc.status_code", i64::from(code));
    if let Some(error) = error {
        span.set_status(Status::error(error.to_owned()));
    }
}

/// Records how a step ended.
pub fn step_ended(span: &tracing::Span, backend: &'static str, failed: bool) {
    span.set_attribute("backend", backend);
    if failed {
        span.set_status(Status::error("the step failed"));
    }
}

/// Names spans by their method or step: the names of tracing's are constants.
#[derive(Debug)]
struct SpanNames(BatchSpanProcessor);

impl SpanProcessor for SpanNames {
    fn on_start(&self, span: &mut Span, context: &opentelemetry::Context) {
        self.0.on_start(span, context);
    }

    fn on_end(&self, mut span: SpanData) {
        let value = |key| {
            let mut attributes = span.attributes.iter();
            let found = attributes.find(|attribute| attribute.key.as_str() == key)?;
            Some(found.value.to_string())
        };
        if let Some(method) = value("method") {
            span.span_kind = SpanKind::Server;
            span.name = method.into();
        } else if let Some(step) = value("step") {
            span.name = step.into();
        }
        self.0.on_end(span);
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.0.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.0.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.0.set_resource(resource);
    }
}

/// An HTTP client that blocks the thread that exports.
#[derive(Debug)]
struct Blocking(Agent);

impl Blocking {
    fn new() -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // The headers may have a token, which goes to no other server.
            .max_redirects(0)
            .timeout_global(Some(TIMEOUT));
        Self(config.build().into())
    }
}

#[async_trait::async_trait]
impl HttpClient for Blocking {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (head, body) = request.into_parts();
        let answer = self.0.run(Request::from_parts(head, &body[..]))?;
        let (head, mut body) = answer.into_parts();
        Ok(Response::from_parts(head, body.read_to_vec()?.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error_chain;

    #[test]
    fn an_error_shows_no_password_of_the_collectors_url() {
        for url in [
            "http://user:pass word@collector:4318",
            "http://user:pass{@collector",
        ] {
            let options = TraceOptions {
                otlp_endpoint: Some(url.to_owned()),
            };
            let error = start("test", &options).expect_err("no URL");
            let shown = error_chain(&error);
            assert!(!shown.contains("pass"), "{shown}");
        }
    }
}
