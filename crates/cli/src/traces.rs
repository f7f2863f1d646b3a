//! Spans of the way of a message, exported to an OpenTelemetry collector over OTLP (HTTP, protobuf).
//!
//! Switched on by the variables that OpenTelemetry defines for every program: `OTEL_EXPORTER_OTLP_ENDPOINT`, or
//! `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`. Sampling, headers, time-outs and batches are read from their `OTEL_…` variables by the library.
//!
//! Invariants: without an endpoint nothing is built; a collector that is away costs spans and nothing else, and is said once; a span
//! holds no payload, no header and no key.

use std::{
    env,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime},
};

use anyhow::Context as _;
use opentelemetry::{
    Context, KeyValue,
    trace::{
        Span as _, SpanContext, SpanId, SpanKind, Status, TraceContextExt as _, TraceFlags, TraceId, TraceState,
        Tracer as _, TracerProvider as _,
    },
};
use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::{
    Resource,
    error::OTelSdkResult,
    trace::{SdkTracer, SdkTracerProvider, SpanData},
};
use queuebox_api::checked::Relay;
use queuebox_core::redact::redact;
use queuebox_engine::spans::{Begin, Span, Spans, Step};

/// What is still to be exported at the end gets so long.
const FLUSH_MAX: Duration = Duration::from_secs(5);

/// The export of one process.
pub struct Traces {
    provider: SdkTracerProvider,
}

impl Traces {
    /// As the variables of the process say; `None` = off.
    ///
    /// # Errors
    /// An endpoint, a header or another value that cannot be used.
    pub fn of_environment(relay: &Relay, instance: &str) -> anyhow::Result<Option<Self>> {
        if !is_on(|name| env::var(name).ok()) {
            return Ok(None);
        }
        let exporter =
            SpanExporter::builder().with_http().build().context("OTEL_EXPORTER_OTLP_…: traces cannot be exported")?;
        let mut resource = Resource::builder()
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .with_attribute(KeyValue::new("service.instance.id", instance.to_owned()))
            .with_attribute(KeyValue::new("queuebox.relay", format!("{}/{}", relay.namespace, relay.name)));
        let is_named = env::var("OTEL_SERVICE_NAME").is_ok_and(|name| !name.is_empty())
            || env::var("OTEL_RESOURCE_ATTRIBUTES").is_ok_and(|given| given.contains("service.name="));
        if !is_named {
            resource = resource.with_service_name("queuebox");
        }
        let provider = SdkTracerProvider::builder()
            .with_resource(resource.build())
            .with_batch_exporter(Said { exporter, fails: AtomicBool::new(false) })
            .build();
        tracing::info!("Spans are exported as the OTEL_EXPORTER_OTLP_… variables say.");
        Ok(Some(Self { provider }))
    }

    /// Where the engine's spans go.
    pub fn spans(&self) -> Arc<dyn Spans> {
        Arc::new(Otel(self.provider.tracer("queuebox")))
    }

    /// Exports what is left.
    pub async fn end(self) {
        let flush = tokio::task::spawn_blocking(move || self.provider.shutdown_with_timeout(FLUSH_MAX));
        if let Ok(Err(error)) = flush.await {
            tracing::debug!("The last spans were not exported: {}", redact(&error.to_string()));
        }
    }
}

/// There is an endpoint, and nothing says that it must not be used.
fn is_on(variable: impl Fn(&str) -> Option<String>) -> bool {
    let says = |name: &str, word: &str| variable(name).is_some_and(|value| value.trim().eq_ignore_ascii_case(word));
    let is_given = |name: &str| variable(name).is_some_and(|value| !value.trim().is_empty());
    (is_given("OTEL_EXPORTER_OTLP_ENDPOINT") || is_given("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))
        && !says("OTEL_SDK_DISABLED", "true")
        && !says("OTEL_TRACES_EXPORTER", "none")
}

/// An exporter whose failures are said, once until it works again.
#[derive(Debug)]
struct Said {
    exporter: SpanExporter,
    fails: AtomicBool,
}

impl opentelemetry_sdk::trace::SpanExporter for Said {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let result = self.exporter.export(batch).await;
        let failed_before = self.fails.swap(result.is_err(), Ordering::Relaxed);
        match &result {
            Err(error) if !failed_before => {
                tracing::warn!(
                    "Spans cannot be exported; they are dropped until it works: {}",
                    redact(&error.to_string())
                );
            }
            Ok(()) if failed_before => tracing::info!("Spans are exported again."),
            _ => {}
        }
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

struct Otel(SdkTracer);

impl Spans for Otel {
    fn begin(&self, begin: Begin<'_>) -> Box<dyn Span> {
        let kind = match (begin.step, begin.kind) {
            (Step::Receive, "http") => SpanKind::Server,
            (Step::Receive, _) => SpanKind::Consumer,
            (Step::Forward, _) => SpanKind::Internal,
            (Step::Deliver, "http") => SpanKind::Client,
            (Step::Deliver, _) => SpanKind::Producer,
        };
        let peer = if begin.step == Step::Deliver { "queuebox.destination" } else { "queuebox.source" };
        let mut attributes = vec![
            KeyValue::new(peer, begin.peer.to_owned()),
            KeyValue::new("messaging.message.id", begin.message_id.to_string()),
        ];
        attributes.extend((!begin.kind.is_empty()).then(|| KeyValue::new("messaging.system", begin.kind.to_owned())));
        attributes.extend(begin.topic.map(|topic| KeyValue::new("queuebox.topic", topic.to_owned())));
        if begin.step == Step::Deliver {
            attributes.push(KeyValue::new("queuebox.attempt", i64::from(begin.attempt)));
        }
        let mut builder = self
            .0
            .span_builder(format!("{} {}", begin.step.as_str(), begin.peer))
            .with_kind(kind)
            .with_attributes(attributes);
        if let Some(us) = begin.began_at_us.and_then(|us| u64::try_from(us).ok()) {
            builder = builder.with_start_time(SystemTime::UNIX_EPOCH + Duration::from_micros(us));
        }
        let parent = begin
            .parent
            .and_then(remote)
            .map_or_else(Context::new, |span| Context::new().with_remote_span_context(span));
        Box::new(OtelSpan(self.0.build_with_context(builder, &parent)))
    }
}

/// The context of another process.
fn remote(trace_parent: &str) -> Option<SpanContext> {
    let mut parts = trace_parent.split('-').skip(1);
    let (trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?);
    let flags = TraceFlags::new(u8::from_str_radix(flags, 16).ok()?) & TraceFlags::SAMPLED;
    let context = SpanContext::new(
        TraceId::from_hex(trace).ok()?,
        SpanId::from_hex(span).ok()?,
        flags,
        true,
        TraceState::default(),
    );
    context.is_valid().then_some(context)
}

struct OtelSpan(opentelemetry_sdk::trace::Span);

impl Span for OtelSpan {
    fn context(&self) -> String {
        let context = self.0.span_context();
        format!("00-{}-{}-{:02x}", context.trace_id(), context.span_id(), context.trace_flags())
    }

    fn end(mut self: Box<Self>, failure: Option<&str>) {
        if let Some(failure) = failure {
            self.0.set_status(Status::error(failure.to_owned()));
        }
        self.0.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_off_until_an_endpoint_is_given() {
        let on = |pairs: &[(&str, &str)]| {
            is_on(|name| pairs.iter().find(|(given, _)| *given == name).map(|(_, value)| (*value).to_owned()))
        };
        let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318");
        assert!(!on(&[]) && !on(&[("OTEL_EXPORTER_OTLP_ENDPOINT", " ")]));
        assert!(on(&[endpoint]) && on(&[("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://c/v1/traces")]));
        assert!(!on(&[endpoint, ("OTEL_SDK_DISABLED", "true")]) && !on(&[endpoint, ("OTEL_TRACES_EXPORTER", "none")]));
    }

    #[test]
    fn a_context_of_another_process_is_taken_on() {
        let text = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let context = remote(text).unwrap();
        assert!(context.is_sampled() && context.is_remote());
        assert_eq!(context.trace_id().to_string(), "0af7651916cd43dd8448eb211c80319c");
        for junk in ["", "00-0-0-01", "00-00000000000000000000000000000000-b7ad6b7169203331-01"] {
            assert!(remote(junk).is_none(), "{junk}");
        }
    }

    #[test]
    fn a_span_goes_on_with_the_trace_of_its_parent() {
        let provider = SdkTracerProvider::builder().build();
        let spans = Otel(provider.tracer("test"));
        let begin = Begin {
            step: Step::Deliver,
            peer: "shop",
            kind: "http",
            parent: Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
            message_id: queuebox_core::Uuid::nil(),
            topic: Some("order.made"),
            attempt: 0,
            began_at_us: None,
        };
        let context = spans.begin(begin).context();
        assert!(context.starts_with("00-0af7651916cd43dd8448eb211c80319c-") && context.ends_with("-01"), "{context}");
        assert!(!context.contains("b7ad6b7169203331"), "it is a span of its own: {context}");
        let first = spans.begin(Begin { parent: None, ..begin }).context();
        assert!(!first.contains("0af7651916cd43dd8448eb211c80319c") && first.len() == 55, "{first}");
    }
}
