//! A collector of traces, just large enough to look at what it is sent.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use fencepost_support::{calls::DOMAIN, eventually};
use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::any_value::Value,
    trace::v1::Span,
};
use tokio::{net::TcpListener, task::AbortHandle};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, transport::Server};

#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<Request<ExportTraceServiceRequest>>>>);

#[tonic::async_trait]
impl TraceService for Kept {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.lock().unwrap().push(request);
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// Takes whatever comes. Ends when dropped.
pub(super) struct Collector {
    address: SocketAddr,
    kept: Kept,
    task: AbortHandle,
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Collector {
    pub(super) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let kept = Kept::default();
        let served = Server::builder()
            .add_service(TraceServiceServer::new(kept.clone()))
            .serve_with_incoming(TcpListenerStream::new(listener));
        let task = tokio::spawn(served).abort_handle();
        Self {
            address,
            kept,
            task,
        }
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// All that it was sent, as text.
    pub(super) fn text(&self) -> String {
        let kept = self.kept.0.lock().unwrap();
        let bodies: Vec<_> = kept.iter().map(Request::get_ref).collect();
        format!("{bodies:?}")
    }

    /// With what it was sent last, under the name of a header.
    pub(super) fn header(&self, name: &str) -> Option<String> {
        let kept = self.kept.0.lock().unwrap();
        let value = kept.last()?.metadata().get(name)?;
        Some(value.to_str().unwrap().to_owned())
    }

    pub(super) fn spans(&self) -> Vec<Span> {
        let kept = self.kept.0.lock().unwrap();
        let resources = kept
            .iter()
            .flat_map(|request| &request.get_ref().resource_spans);
        let scopes = resources.flat_map(|resource| &resource.scope_spans);
        scopes.flat_map(|scope| scope.spans.clone()).collect()
    }

    /// Waits for a span.
    pub(super) async fn span(&self, what: &str, find: impl Fn(&Span) -> bool) -> Span {
        eventually(what, async || {
            self.spans().into_iter().find(|span| find(span))
        })
        .await
    }
}

/// An attribute of ours, or of a convention's.
pub(super) fn attribute(span: &Span, key: &str) -> Option<String> {
    let found = span.attributes.iter().find(|found| found.key == key)?;
    Some(match found.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => text.clone(),
        Value::IntValue(number) => number.to_string(),
        other => panic!("{other:?}"),
    })
}

/// Whether it is of a call of this method, with this in an attribute of ours.
pub(super) fn is_call(span: &Span, method: &str, key: &str, value: &str) -> bool {
    span.name
        .strip_suffix(method)
        .is_some_and(|rest| rest.ends_with('/'))
        && attribute(span, &format!("{DOMAIN}.{key}")).as_deref() == Some(value)
}
