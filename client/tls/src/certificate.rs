//! What a certificate says that rustls keeps to itself.

use std::time::Duration;

use tokio_rustls::rustls::pki_types::{CertificateDer, UnixTime};
use x509_cert::{
    Certificate,
    der::{Decode as _, oid::ObjectIdentifier},
};

/// What a certificate says of itself. Whoever has verified it may believe it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Whom it names, as RFC 4514 writes it: `CN=worker,O=example`.
    pub subject: String,
    /// When it ends, since 1970.
    pub ends: Duration,
    /// With which algorithm its issuer signed it.
    pub(crate) signature: ObjectIdentifier,
}

impl Facts {
    /// None when it is none.
    #[must_use]
    pub fn of(certificate: &CertificateDer<'_>) -> Option<Self> {
        let parsed = Certificate::from_der(certificate).ok()?;
        let to_be_signed = parsed.tbs_certificate();
        Some(Self {
            subject: to_be_signed.subject().to_string(),
            ends: to_be_signed.validity().not_after.to_unix_duration(),
            signature: parsed.signature_algorithm().oid,
        })
    }

    /// Whether it has ended, by this machine's clock, which is what its peers
    /// judge it by as well.
    #[must_use]
    pub fn has_expired(&self) -> bool {
        self.ends.as_secs() < UnixTime::now().as_secs()
    }
}
