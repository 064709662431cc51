//! Calls, and what came of them.

use std::{sync::Arc, time::Duration};

use super::{
    registry::{Counter, Histogram, Registered, latencies},
    shed::ShedMetrics,
};

/// The methods of the lock service. Health, reflection and what is not there are
/// `other`: callers choose those names.
const METHODS: [&str; 5] = ["Acquire", "Release", "Renew", "Get", "KeepAlive"];
const STREAM: &str = "KeepAlive";
pub(super) const OTHER: &str = "other";

/// By their numbers.
const CODES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

#[derive(Clone)]
pub(crate) struct RpcMetrics {
    methods: Arc<[(&'static str, Arc<RpcMethod>)]>,
    other: Arc<RpcMethod>,
}

/// The calls of one method.
pub(crate) struct RpcMethod {
    /// None for any other.
    pub(crate) name: Option<&'static str>,
    ended: [Counter; CODES.len()],
    /// Those that were one too many of their connection's; none of a stream's.
    shed: Option<Counter>,
    /// Of a unary method.
    duration: Option<Histogram>,
}

impl RpcMetrics {
    pub(super) fn new(registered: &mut Registered, shed: &ShedMetrics) -> Self {
        let ended = registered.family(
            "fencepost_rpcs",
            "Calls that have ended; dropped ones as CANCELLED",
            ["method", "code"],
            Counter::default,
        );
        let duration = registered.family(
            "fencepost_rpc_duration_seconds",
            "From the arrival of a unary call to its answer",
            ["method"],
            latencies,
        );
        let method = |name, duration| {
            let mut open = shed.open.iter();
            let shed = open.find(|(method, _)| *method == name);
            Arc::new(RpcMethod {
                shed: shed.map(|(_, counter)| counter.clone()),
                name: (name != OTHER).then_some(name),
                ended: CODES.map(|code| ended([name, code])),
                duration,
            })
        };
        let ours = METHODS.map(|name| {
            let duration = (name != STREAM).then(|| duration([name]));
            (name, method(name, duration))
        });
        Self {
            methods: Arc::new(ours),
            other: method(OTHER, None),
        }
    }

    /// The method of the lock service with this name; any other for None.
    pub(crate) fn method(&self, name: Option<&str>) -> &Arc<RpcMethod> {
        let mut methods = self.methods.iter();
        name.and_then(|name| methods.find(|(method, _)| *method == name))
            .map_or(&self.other, |(_, method)| method)
    }
}

impl RpcMethod {
    /// Whether a call ends with its answer.
    pub(crate) fn is_unary(&self) -> bool {
        self.duration.is_some()
    }

    /// Whether a connection may have only so many open: not of streams.
    pub(crate) fn is_bounded(&self) -> bool {
        self.shed.is_some()
    }

    /// A call was one too many of its connection's.
    pub(crate) fn shed(&self) {
        if let Some(shed) = &self.shed {
            shed.inc();
        }
    }

    /// A call was answered, after so long.
    pub(crate) fn answered(&self, after: Duration) {
        if let Some(duration) = &self.duration {
            duration.observe(after.as_secs_f64());
        }
    }

    /// A call has ended with the code of this number.
    pub(crate) fn ended(&self, code: i32) {
        if let Some(ended) = usize::try_from(code)
            .ok()
            .and_then(|code| self.ended.get(code))
        {
            ended.inc();
        }
    }
}
