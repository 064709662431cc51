//! How calls end, counted once for each.
//!
//! A unary call ends with its answer, a stream with its last message. Whatever is
//! dropped before that, because its caller left or the connection broke, counts as
//! CANCELLED. So does a call whose caller left in the middle of its request, of
//! which the handler sees no more than a request without a message.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
};

use fencepost_proto::v1::{LOCK_SERVICE, reason};
use http::{HeaderMap, Request, Response};
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::time::Instant;
use tonic::{Code, Status, body::Body};
use tonic_types::StatusExt as _;

use super::seat::Open;
use crate::{
    metrics::{RpcMethod, RpcMetrics},
    trace::Trace,
};

/// The method of a path.
pub(super) fn method<'a>(metrics: &'a RpcMetrics, path: &str) -> &'a Arc<RpcMethod> {
    let ours = path
        .strip_prefix('/')
        .and_then(|path| path.strip_prefix(LOCK_SERVICE)?.strip_prefix('/'));
    metrics.method(ours)
}

/// A call under way.
pub(super) struct Observed {
    method: Arc<RpcMethod>,
    arrived: Instant,
    /// What it counts as when it is dropped.
    code: Code,
    /// Whether it ended because a stream's time was over, or the server drains.
    in_order: bool,
    /// Whether its caller left before the request was whole.
    left: Arc<AtomicBool>,
    trace: Trace,
}

impl Observed {
    pub(super) fn new(method: &Arc<RpcMethod>, arrived: Instant, trace: Trace) -> Self {
        Self {
            method: Arc::clone(method),
            arrived,
            code: Code::Cancelled,
            in_order: false,
            left: Arc::default(),
            trace,
        }
    }

    /// Watches what the caller sends.
    pub(super) fn asked(&self, request: Request<Body>, open: Option<Arc<Open>>) -> Request<Body> {
        let left = Arc::clone(&self.left);
        request.map(|body| Body::new(AskedBody { body, left, open }))
    }

    /// Notes why a call failed, which these headers or trailers say.
    fn note_reason(&mut self, headers: &HeaderMap) {
        if self.trace.is_recorded()
            && let Some(status) = Status::from_header_map(headers)
            && let Some(info) = status.get_details_error_info()
        {
            self.in_order = [reason::REOPEN, reason::DRAINING].contains(&info.reason.as_str());
            self.trace.note("fencepost.reason", info.reason);
        }
    }

    /// The call was answered with this code, if it has one yet: the end of a stream
    /// is still to come.
    pub(super) fn answered(mut self, response: Response<Body>, code: Code) -> Response<Body> {
        if self.left.load(Ordering::Relaxed) {
            return response;
        }
        self.method.answered(self.arrived.elapsed());
        self.note_reason(response.headers());
        if self.method.is_unary() || code != Code::Ok {
            self.code = code;
            return response;
        }
        response.map(|body| {
            Body::new(ObservedBody {
                body,
                observed: self,
            })
        })
    }
}

impl Drop for Observed {
    fn drop(&mut self) {
        self.method.ended(self.code.into());
        self.trace.end(self.code.into(), self.in_order);
    }
}

/// A request, which ends before its time when the caller leaves.
struct AskedBody {
    body: Body,
    left: Arc<AtomicBool>,
    open: Option<Arc<Open>>,
}

impl HttpBody for AskedBody {
    type Data = <Body as HttpBody>::Data;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Status>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        // hyper ends a body that is reset with CANCEL like one that is whole.
        let is_whole = self.body.is_end_stream();
        match &frame {
            Some(Ok(_)) | None if is_whole => {
                if let Some(open) = self.open.take() {
                    open.heard();
                }
            }
            Some(Ok(part)) => {
                if let (Some(open), Some(data)) = (&self.open, part.data_ref()) {
                    open.waits(data.len());
                }
            }
            Some(Err(_)) | None => self.left.store(true, Ordering::Relaxed),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The messages of a stream, the last of which says how it ended.
struct ObservedBody {
    body: Body,
    observed: Observed,
}

impl HttpBody for ObservedBody {
    type Data = <Body as HttpBody>::Data;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Status>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &frame
            && let Some(trailers) = frame.trailers_ref()
        {
            self.observed.code = code(trailers);
            self.observed.note_reason(trailers);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The code in the head of an answer that failed before its first message, or in
/// the trailers of any.
pub(super) fn code(headers: &HeaderMap) -> Code {
    Status::from_header_map(headers).map_or(Code::Ok, |status| status.code())
}
