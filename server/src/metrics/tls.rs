//! TLS on the port of clients.

use super::registry::{Counter, Gauge, Registered};

#[derive(Clone)]
pub(crate) struct TlsMetrics {
    /// In seconds since 1970.
    pub(crate) expires: Gauge,
    pub(crate) reload_failures: Counter,
    /// Whether those before are kept.
    pub(crate) unusable: Gauge,
    pub(crate) handshakes_failed: Counter,
}

impl TlsMetrics {
    pub(super) fn new(registered: &mut Registered) -> Self {
        Self {
            expires: registered.one(
                "fencepost_tls_certificate_expires_timestamp_seconds",
                "When the certificate that new connections get ends; 0 without TLS",
                Gauge::default(),
            ),
            reload_failures: registered.one(
                "fencepost_tls_reload_failures",
                "Changes of the TLS files that could not be used",
                Counter::default(),
            ),
            unusable: registered.one(
                "fencepost_tls_files_unusable",
                "1 while the TLS files cannot be used, and what they held before still is",
                Gauge::default(),
            ),
            handshakes_failed: registered.one(
                "fencepost_tls_handshakes_failed",
                "Connections that ended before their TLS handshake had",
                Counter::default(),
            ),
        }
    }
}
