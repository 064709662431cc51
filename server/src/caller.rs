//! Who calls: all that is known of it, and the one place to ask.
//!
//! A [`Connection`](crate::service::connection::Connection) hands its `Caller` to each
//! call that comes on it, among the request's extensions. The edge adds the trace that
//! the call belongs to, and the handlers carry it to where the call's outcome is known,
//! for the audit log: that may be after the caller has gone. Its address has a share of
//! the [`room`](crate::room); nothing else is decided by it yet: with a
//! `--tls-client-ca`, whoever has a certificate may do everything.

use std::{fmt, net::SocketAddr, sync::Arc};

use fencepost_tls::Facts;
use http::Extensions;
use opentelemetry::trace::TraceId;

/// The other side of a connection, in one of its calls. By default, nobody.
#[derive(Debug, Clone, Default)]
pub(crate) struct Caller {
    /// The other end of the connection: the caller's, or a proxy's.
    peer: Option<SocketAddr>,
    /// Of the certificate whose key it was shown to hold, when one is asked for.
    certificate: Option<Arc<Facts>>,
    trace_id: Option<TraceId>,
}

impl Caller {
    /// Somebody of whom nothing but the address is known.
    pub(crate) fn at(peer: SocketAddr) -> Self {
        Self {
            peer: Some(peer),
            ..Self::default()
        }
    }

    /// The same, with a certificate that was verified.
    pub(crate) fn with_certificate(self, certificate: Option<Facts>) -> Self {
        Self {
            certificate: certificate.map(Arc::new),
            ..self
        }
    }

    /// The same, in a call that belongs to this trace.
    pub(crate) fn in_trace(self, trace_id: Option<TraceId>) -> Self {
        Self { trace_id, ..self }
    }

    /// Who sent a request.
    pub(crate) fn of(extensions: &Extensions) -> Self {
        extensions.get().cloned().unwrap_or_default()
    }

    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        self.peer
    }

    /// Whom its certificate names.
    pub(crate) fn subject(&self) -> Option<&str> {
        let certificate = self.certificate.as_ref();
        certificate.map(|certificate| certificate.subject.as_str())
    }

    pub(crate) fn trace_id(&self) -> Option<TraceId> {
        self.trace_id
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(subject) = self.subject() {
            write!(f, "{subject} at ")?;
        }
        match self.peer {
            Some(peer) => peer.fmt(f),
            None => f.write_str("nobody"),
        }
    }
}
