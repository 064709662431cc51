//! What a program may want to count of its locks.
//!
//! The library brings no metrics library with it and none into a program that has
//! another: it tells each thing that happens, once, to whoever wants to know, and how
//! that is counted is the program's. See the sidecar of `fencepost` for Prometheus.

use std::{fmt, sync::Arc, time::Duration};

use tonic::metadata::AsciiMetadataValue;

use crate::{Error, LostReason};

/// Is told what happens to a client's guards. See
/// [`ClientBuilder::observer`](crate::ClientBuilder::observer).
///
/// Called on the client's thread, which renews all of its leases: count, and return.
pub trait Observer: Send + Sync + 'static {
    /// It happened just now.
    fn observe(&self, event: &Event<'_>);
}

/// What happened to one guard.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Event<'a> {
    /// It took its lock.
    Acquired {
        /// How long that took, all waiting included.
        after: Duration,
    },
    /// Its lease was renewed.
    Renewed {
        /// How much longer the lease would have been trusted without it. Near zero:
        /// nearly lost.
        slack: Duration,
    },
    /// One attempt to renew its lease failed. The lease stands, and others follow.
    RenewalFailed {
        /// How it was tried.
        via: Via,
        /// Why it failed.
        error: &'a Error,
    },
    /// Its lease is lost: stop working.
    Lost {
        /// In which way.
        reason: LostReason,
        /// How long it was held.
        held: Duration,
    },
    /// It is done with the lock, which is given back from now on.
    Released {
        /// How long the lock was held.
        held: Duration,
    },
}

/// How a lease is renewed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Via {
    /// By a stream, as a rule.
    Stream,
    /// By calls, when the streams are late.
    Call,
}

impl Via {
    /// In small letters, for a label.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stream => "stream",
            Self::Call => "call",
        }
    }
}

/// Whom the client tells, if anybody.
#[derive(Clone, Default)]
pub(crate) struct Told(Option<Arc<dyn Observer>>);

impl Told {
    pub(crate) fn by(observer: Arc<dyn Observer>) -> Self {
        Self(Some(observer))
    }

    pub(crate) fn observe(&self, event: &Event<'_>) {
        if let Some(observer) = &self.0 {
            observer.observe(event);
        }
    }
}

impl fmt::Debug for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Told").field(&self.0.is_some()).finish()
    }
}

/// Gives the trace context of the work at hand, as W3C's `traceparent` has it.
#[derive(Clone, Default)]
pub(crate) struct Tracing(Option<Arc<dyn Fn() -> Option<String> + Send + Sync>>);

impl Tracing {
    pub(crate) fn by(hook: impl Fn() -> Option<String> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(hook)))
    }

    /// None as well for what cannot be sent.
    pub(crate) fn traceparent(&self) -> Option<AsciiMetadataValue> {
        self.0.as_ref()?()?.parse().ok()
    }
}

impl fmt::Debug for Tracing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tracing").field(&self.0.is_some()).finish()
    }
}
