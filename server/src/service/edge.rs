//! The layer around every call: its time, its count, its trace, and its bare errors.
//!
//! A call ends at its `grpc-timeout` or at our own budget, whichever comes
//! first, as `DEADLINE_EXCEEDED`. tonic keeps `grpc-timeout` too, outside of
//! this layer, and answers CANCELLED; ours is a millisecond shorter, so it is
//! the one that speaks. The handler is dropped then, and the store gives back
//! what it may still be granted.
//!
//! tonic answers some requests by itself, without our details: they are
//! rewritten to the contract's table.

use std::{
    future::ready,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use http::{HeaderMap, Request, Response};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use tonic::{Code, body::Body};
use tower::{Layer, Service};
use tracing::Instrument as _;

use super::{
    connection::Origin,
    observe::{Observed, code, method},
    seat::OpenBody,
    status,
};
use crate::{metrics::RpcMetrics, trace::Tracer};

/// When a call is over, as its handler finds it among the extensions.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadline {
    /// A unary call: the caller's deadline or our budget.
    pub(super) call: Instant,
    /// A stream: the caller's deadline alone.
    pub(super) caller: Option<Instant>,
}

#[derive(Clone)]
pub(crate) struct EdgeLayer {
    budget: Duration,
    calls: TaskTracker,
    metrics: RpcMetrics,
    tracer: Tracer,
}

impl EdgeLayer {
    /// `calls` counts the calls under way.
    pub(crate) fn new(
        budget: Duration,
        calls: TaskTracker,
        metrics: RpcMetrics,
        tracer: Tracer,
    ) -> Self {
        Self {
            budget,
            calls,
            metrics,
            tracer,
        }
    }
}

impl<S> Layer<S> for EdgeLayer {
    type Service = Edge<S>;

    fn layer(&self, inner: S) -> Edge<S> {
        Edge {
            inner,
            settings: self.clone(),
        }
    }
}

#[derive(Clone)]
pub(crate) struct Edge<S> {
    inner: S,
    settings: EdgeLayer,
}

impl<S> Service<Request<Body>> for Edge<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let now = Instant::now();
        let caller = grpc_timeout(request.headers())
            .map(|timeout| now + timeout.saturating_sub(Duration::from_millis(1)));
        let budget = now + self.settings.budget;
        let deadline = caller.map_or(budget, |caller| caller.min(budget));
        request.extensions_mut().insert(Deadline {
            call: deadline,
            caller,
        });
        let path = request.uri().path();
        let method = method(&self.settings.metrics, path);
        let trace = self.settings.tracer.call(method.name, request.headers());
        let origin = request.extensions().get::<Origin>().cloned();
        let (caller, seat) = origin.map(|origin| (origin.caller, origin.seat)).unzip();
        let caller = caller.unwrap_or_default().in_trace(trace.id());
        let span = match trace.id() {
            Some(trace_id) => tracing::info_span!("call", rpc = path, %caller, %trace_id),
            None => tracing::debug_span!("call", rpc = path, %caller),
        };
        let observed = Observed::new(method, now, trace.clone());
        let open = seat.map(|seat| {
            if method.is_bounded() {
                seat.call(request.headers())
            } else {
                Some(seat.stream(request.headers()))
            }
        });
        let open = match open {
            Some(None) => {
                method.shed();
                let answer = status::overloaded().into_http();
                return Box::pin(ready(
                    Ok(observed.answered(answer, Code::ResourceExhausted)),
                ));
            }
            open => open.flatten().map(Arc::new),
        };
        request.extensions_mut().insert(caller);
        let token = self.settings.calls.token();
        let answer = self.inner.call(observed.asked(request, open.clone()));
        let call = async move {
            let response = match tokio::time::timeout_at(deadline, answer).await {
                Ok(answer) => rewrite(answer?),
                Err(_) => status::deadline().into_http(),
            };
            drop(token);
            let code = code(response.headers());
            tracing::debug!(?code, "answered");
            let response = observed.answered(response, code);
            Ok(match open {
                Some(open) => response.map(|body| Body::new(OpenBody::new(body, open))),
                None => response,
            })
        };
        let call = call.instrument(span);
        if trace.is_empty() {
            Box::pin(call)
        } else {
            Box::pin(trace.scope(call))
        }
    }
}

/// Gives an answer that is not ours the form of the contract.
fn rewrite(response: Response<Body>) -> Response<Body> {
    let bare = !response.headers().contains_key("grpc-status-details-bin");
    match status::rewrite(code(response.headers())) {
        Some(status) if bare => status.into_http(),
        _ => response,
    }
}

/// `grpc-timeout`: up to eight digits and a unit. None when absent or
/// malformed, which tonic ignores too.
fn grpc_timeout(headers: &HeaderMap) -> Option<Duration> {
    let value = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(count * 3600)),
        "M" => Some(Duration::from_secs(count * 60)),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http::{HeaderMap, HeaderValue};

    use super::grpc_timeout;

    #[test]
    fn grpc_timeout_is_eight_digits_and_a_unit() {
        let parse = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("grpc-timeout", HeaderValue::from_str(value).unwrap());
            grpc_timeout(&headers)
        };
        assert_eq!(parse("250m"), Some(Duration::from_millis(250)));
        assert_eq!(parse("5S"), Some(Duration::from_secs(5)));
        assert_eq!(
            parse("99999999H"),
            Some(Duration::from_secs(99_999_999 * 3600))
        );
        for bad in ["", "S", "5", "5s", "-1S", "123456789S", "1.5S", "५S"] {
            if let Ok(value) = HeaderValue::from_str(bad) {
                let mut headers = HeaderMap::new();
                headers.insert("grpc-timeout", value);
                assert_eq!(grpc_timeout(&headers), None, "{bad}");
            }
        }
        assert_eq!(grpc_timeout(&HeaderMap::new()), None);
    }
}
