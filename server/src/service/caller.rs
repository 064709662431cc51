//! Who calls: all that is known of it, and the one place to ask.
//!
//! A [`Connection`](super::connection::Connection) hands its `Caller` to each call
//! that comes on it, among the request's extensions, from where
//! [`of`](Caller::of) takes it. Nothing is decided by it yet: with a
//! `--tls-client-ca`, whoever has a certificate may do everything.

use std::{fmt, net::SocketAddr, sync::Arc};

use fencepost_tls::Facts;
use http::Extensions;

/// The other side of a connection.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    address: SocketAddr,
    /// Of the certificate whose key it was shown to hold, when one is asked for.
    certificate: Option<Arc<Facts>>,
}

impl Caller {
    /// Somebody of whom nothing but the address is known.
    pub(super) fn at(address: SocketAddr) -> Self {
        Self {
            address,
            certificate: None,
        }
    }

    /// The same, with a certificate that was verified.
    pub(super) fn with_certificate(self, certificate: Option<Facts>) -> Self {
        Self {
            certificate: certificate.map(Arc::new),
            ..self
        }
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Who sent a request.
    pub(super) fn of(extensions: &Extensions) -> Option<&Self> {
        extensions.get()
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(certificate) = &self.certificate {
            write!(f, "{} at ", certificate.subject)?;
        }
        self.address.fmt(f)
    }
}
