//! Traces: one span a call, one for each round that carries out calls, for whoever
//! collects them by OTLP (`--otlp-endpoint`).
//!
//! Only what is named here leaves the house: no names, owners or labels. A resource is
//! told by the first 16 hexadecimal digits of the SHA-256 of its name.
//!
//! A caller's trace context (W3C `traceparent`) says which trace a call belongs to; one
//! that is malformed is as good as none. Logs carry the trace's id also when nothing is
//! exported. Without either, a [`Trace`] is empty and costs nothing.
//!
//! Spans wait in a bounded queue, for a thread of its own; where a collector is away or
//! slow they are dropped, and no call waits for it. Metrics tell how many were to go out,
//! and how many did.

mod counted;

use std::{sync::Arc, time::Duration};

use fencepost_proto::v1::LOCK_SERVICE;
use http::HeaderMap;
use opentelemetry::{
    Context, InstrumentationScope, KeyValue, Value,
    propagation::{Extractor, TextMapPropagator as _},
    trace::{
        Link, SpanContext, SpanKind, Status, TraceContextExt as _, TraceId, Tracer as _,
        TracerProvider as _,
    },
};
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::{
    Resource,
    propagation::TraceContextPropagator,
    trace::{
        BatchConfigBuilder, BatchSpanProcessor, Sampler, SamplingResult, SdkTracer,
        SdkTracerProvider, ShouldSample,
    },
};
use sha2::{Digest as _, Sha256};
use tokio::task::spawn_blocking;

use self::counted::Counted;
use crate::metrics::TraceMetrics;

/// How long one export may take.
const EXPORT: Duration = Duration::from_secs(3);

/// How long spans wait for others before they are exported.
const DELAY: Duration = Duration::from_secs(1);

/// How long the end of the process waits for the last ones.
const FLUSH: Duration = Duration::from_secs(2);

/// What is traced, and where it goes.
#[derive(Debug, Clone)]
pub(crate) struct TraceConfig {
    /// `http://host:port` of a collector.
    pub(crate) endpoint: String,
    /// How many of the calls, from 0 to 1, whose caller does not decide it.
    pub(crate) ratio: f64,
}

/// Makes the spans of calls. Cheap to clone; without a collector it makes none.
#[derive(Clone, Default)]
pub(crate) struct Tracer(Option<(SdkTracerProvider, SdkTracer)>);

impl Tracer {
    /// Starts to export. Connects when there is something to send.
    pub(crate) fn start(
        config: Option<&TraceConfig>,
        metrics: &TraceMetrics,
    ) -> Result<Self, ExporterBuildError> {
        let Some(config) = config else {
            return Ok(Self(None));
        };
        let exporter = SpanExporter::builder()
            .with_tonic()
            .with_endpoint(&config.endpoint)
            .with_timeout(EXPORT)
            .build()?;
        let batches = BatchConfigBuilder::default()
            .with_scheduled_delay(DELAY)
            .build();
        let exporter = Counted {
            inner: exporter,
            spans: metrics.exported.clone(),
        };
        let processor = Counted {
            inner: BatchSpanProcessor::builder(exporter)
                .with_batch_config(batches)
                .build(),
            spans: metrics.ended.clone(),
        };
        let resource = Resource::builder()
            .with_service_name("fencepostd")
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .build();
        let provider = SdkTracerProvider::builder()
            .with_sampler(Sampler::ParentBased(Box::new(Sampling(
                Sampler::TraceIdRatioBased(config.ratio),
            ))))
            .with_span_processor(processor)
            .with_resource(resource)
            .build();
        let tracer =
            provider.tracer_with_scope(InstrumentationScope::builder("fencepostd").build());
        Ok(Self(Some((provider, tracer))))
    }

    /// Exports what is left, for a moment.
    pub(crate) async fn stop(self) {
        if let Some((provider, _)) = self.0 {
            let flush = move || provider.shutdown_with_timeout(FLUSH);
            if !matches!(spawn_blocking(flush).await, Ok(Ok(()))) {
                tracing::warn!("the last spans were not exported");
            }
        }
    }

    /// A call has come. Those of other services have no span: their names are the
    /// callers'.
    pub(crate) fn call(&self, method: Option<&'static str>, headers: &HeaderMap) -> Trace {
        let caller = headers
            .contains_key("traceparent")
            .then(|| {
                TraceContextPropagator::new()
                    .extract_with_context(&Context::new(), &Headers(headers))
            })
            .filter(Context::has_active_span);
        let (Some((_, tracer)), Some(method)) = (&self.0, method) else {
            return Trace(caller.map(|caller| {
                Arc::new(Inner {
                    id: caller.span().span_context().trace_id(),
                    recorded: None,
                })
            }));
        };
        let span = tracer
            .span_builder(format!("{LOCK_SERVICE}/{method}"))
            .with_kind(SpanKind::Server)
            .with_attributes([
                KeyValue::new("rpc.system", "grpc"),
                KeyValue::new("rpc.service", LOCK_SERVICE),
                KeyValue::new("rpc.method", method),
            ])
            .start_with_context(tracer, &caller.unwrap_or_default());
        let context = Context::new().with_span(span);
        let (id, is_recorded) = {
            let span = context.span();
            (span.span_context().trace_id(), span.is_recording())
        };
        Trace(Some(Arc::new(Inner {
            id,
            recorded: is_recorded.then(|| (context, tracer.clone())),
        })))
    }
}

/// The trace of a call, and its span where there is one. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Trace(Option<Arc<Inner>>);

struct Inner {
    id: TraceId,
    recorded: Option<(Context, SdkTracer)>,
}

fn postgres() -> KeyValue {
    KeyValue::new("db.system.name", "postgresql")
}

tokio::task_local! {
    static CURRENT: Trace;
}

impl Trace {
    /// That of the call which is carried out here.
    pub(crate) fn current() -> Self {
        CURRENT.try_with(Self::clone).unwrap_or_default()
    }

    /// Carries a call out.
    pub(crate) async fn scope<T>(self, call: impl Future<Output = T>) -> T {
        CURRENT.scope(self, call).await
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    pub(crate) fn id(&self) -> Option<TraceId> {
        self.0.as_ref().map(|inner| inner.id)
    }

    fn recorded(&self) -> Option<&(Context, SdkTracer)> {
        self.0.as_ref()?.recorded.as_ref()
    }

    /// Whether anything that is noted will be seen.
    pub(crate) fn is_recorded(&self) -> bool {
        self.recorded().is_some()
    }

    /// Which resource the call is about.
    pub(crate) fn resource(&self, name: &str) {
        if self.is_recorded() {
            let hash = Sha256::digest(name);
            let hash = hash.iter().take(8).map(|byte| format!("{byte:02x}"));
            self.note("fencepost.resource_hash", hash.collect::<String>());
        }
    }

    pub(crate) fn note(&self, key: &'static str, value: impl Into<Value>) {
        if let Some((context, _)) = self.recorded() {
            context.span().set_attribute(KeyValue::new(key, value));
        }
    }

    /// The call has ended with the code of this number; as it should, if `in_order`,
    /// whatever the code.
    pub(crate) fn end(&self, code: i32, in_order: bool) {
        // What the convention for servers calls an error of theirs.
        const FAULTS: [i32; 6] = [2, 4, 12, 13, 14, 15];
        if let Some((context, _)) = self.recorded() {
            let span = context.span();
            span.set_attribute(KeyValue::new("rpc.grpc.status_code", i64::from(code)));
            if FAULTS.contains(&code) && !in_order {
                span.set_status(Status::error(""));
            }
            span.end();
        }
    }

    /// A statement of the call's own.
    pub(crate) fn statement(&self, name: &'static str) -> Work {
        Work(self.recorded().map(|(context, tracer)| {
            let span = tracer
                .span_builder(name)
                .with_kind(SpanKind::Client)
                .with_attributes([postgres()])
                .start_with_context(tracer, context);
            Context::new().with_span(span)
        }))
    }

    /// The statements that carry out many calls together: a trace of its own, which
    /// names the spans of the calls, and is named by them.
    pub(crate) fn round<'a>(calls: impl Iterator<Item = &'a Self>) -> Work {
        let calls: Vec<_> = calls.filter_map(Self::recorded).collect();
        let Some((_, tracer)) = calls.first() else {
            return Work(None);
        };
        let of = |context: &Context| context.span().span_context().clone();
        let link = |span: SpanContext| Link::new(span, Vec::new(), 0);
        let span = tracer
            .span_builder("round")
            .with_kind(SpanKind::Internal)
            .with_links(calls.iter().map(|(context, _)| link(of(context))).collect())
            .start_with_context(tracer, &Context::new());
        let round = Context::new().with_span(span);
        for (call, _) in calls {
            call.span().add_link(of(&round), Vec::new());
        }
        Work(Some(round))
    }
}

/// Work for one call or for many; its span ends with it.
pub(crate) struct Work(Option<Context>);

impl Work {
    /// The statements of a round.
    pub(crate) fn statements(&self, names: impl Iterator<Item = &'static str>) {
        if let Some(context) = &self.0 {
            let names = names.collect::<Vec<_>>().join(",");
            let span = context.span();
            span.set_attributes([postgres(), KeyValue::new("fencepost.statements", names)]);
        }
    }

    /// It came to nothing, for a reason of this kind.
    pub(crate) fn failed(&self, kind: &'static str) {
        if let Some(context) = &self.0 {
            let span = context.span();
            span.set_attribute(KeyValue::new("error.type", kind));
            span.set_status(Status::error(""));
        }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if let Some(context) = &self.0 {
            context.span().end();
        }
    }
}

/// A round is begun for calls that are recorded, so it is as well.
#[derive(Debug, Clone)]
struct Sampling(Sampler);

impl ShouldSample for Sampling {
    fn should_sample(
        &self,
        parent: Option<&Context>,
        trace_id: TraceId,
        name: &str,
        kind: &SpanKind,
        attributes: &[KeyValue],
        links: &[Link],
    ) -> SamplingResult {
        let sampler = match kind {
            SpanKind::Internal => &Sampler::AlwaysOn,
            _ => &self.0,
        };
        sampler.should_sample(parent, trace_id, name, kind, attributes, links)
    }
}

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(http::HeaderName::as_str).collect()
    }
}
