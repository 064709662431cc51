//! What a certificate says that rustls keeps to itself.

use std::time::Duration;

use tokio_rustls::rustls::pki_types::{CertificateDer, UnixTime};
use x509_cert::{
    Certificate,
    der::{
        Decode as _,
        oid::{ObjectIdentifier, db::rfc5280::ID_KP_SERVER_AUTH},
    },
    ext::pkix::ExtendedKeyUsage,
};

use crate::files::Problem;

/// What a certificate says of itself. Whoever has verified it may believe it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Whom it names, as RFC 4514 writes it: `CN=worker,O=example`.
    pub subject: String,
    /// When it begins, since 1970.
    begins: Duration,
    /// When it ends, since 1970.
    pub ends: Duration,
    /// Whether a server may show it.
    for_servers: bool,
    /// With which algorithm its issuer signed it.
    pub(crate) signature: ObjectIdentifier,
}

impl Facts {
    /// None when it is none.
    #[must_use]
    pub fn of(certificate: &CertificateDer<'_>) -> Option<Self> {
        let parsed = Certificate::from_der(certificate).ok()?;
        let to_be_signed = parsed.tbs_certificate();
        let validity = to_be_signed.validity();
        // One that says nothing is for everything. `anyExtendedKeyUsage` is not enough for
        // rustls, OpenSSL and BoringSSL, and so not for most clients.
        let for_servers = match to_be_signed.get_extension::<ExtendedKeyUsage>() {
            Ok(Some((_, uses))) => uses.0.contains(&ID_KP_SERVER_AUTH),
            Ok(None) => true,
            Err(_) => false,
        };
        Some(Self {
            subject: to_be_signed.subject().to_string(),
            begins: validity.not_before.to_unix_duration(),
            ends: validity.not_after.to_unix_duration(),
            for_servers,
            signature: parsed.signature_algorithm().oid,
        })
    }

    /// What is wrong with its time, by this machine's clock. Its peers judge it by
    /// theirs.
    #[must_use]
    pub fn untimely(&self) -> Option<Problem> {
        let now = UnixTime::now().as_secs();
        if now < self.begins.as_secs() {
            Some(Problem::NotYet)
        } else if now > self.ends.as_secs() {
            Some(Problem::Expired)
        } else {
            None
        }
    }

    /// Whether clients take it from a server, as far as it says so itself.
    #[must_use]
    pub fn is_for_servers(&self) -> bool {
        self.for_servers
    }
}
