//! Who makes a call: what the edge knows of it, for the audit log.

use std::net::SocketAddr;

use opentelemetry::trace::TraceId;

/// Taken down when a call arrives, and carried to where its outcome is known, which
/// may be after the caller has gone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Caller {
    /// The other end of the connection: the caller's, or a proxy's.
    pub(crate) peer: Option<SocketAddr>,
    /// The trace that the call belongs to.
    pub(crate) trace_id: Option<TraceId>,
}
