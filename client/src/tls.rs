//! Whom to trust, and who to be, for endpoints that begin with `https`.

use std::path::{Path, PathBuf};

use fencepost_tls::{BadFile, ClientTls, PemFile, Roots, Trust};

/// Whom to trust, and who to be, for endpoints that begin with `https`.
///
/// The files are PEM, and may change: each new connection is made with what they
/// hold by then, or held when they could last be used.
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct Tls {
    ca: Option<PathBuf>,
    identity: Option<(PathBuf, PathBuf)>,
}

impl Tls {
    /// Trusts the servers with a certificate of these roots, in place of those that
    /// the machine trusts.
    pub fn ca_file(self, path: impl AsRef<Path>) -> Self {
        let ca = Some(path.as_ref().to_owned());
        Self { ca, ..self }
    }

    /// Shows this certificate to servers that ask for one. In the file of the
    /// certificate it is followed by those that lead to its root.
    pub fn identity_files(self, certificate: impl AsRef<Path>, key: impl AsRef<Path>) -> Self {
        let identity = (certificate.as_ref().to_owned(), key.as_ref().to_owned());
        let identity = Some(identity);
        Self { identity, ..self }
    }

    pub(crate) fn read(self) -> Result<ClientTls, BadFile> {
        let roots = self.ca.map_or(Roots::System, |path| {
            Roots::File(PemFile::new("the CA file", path))
        });
        let identity = self.identity.map(|(certificate, key)| {
            (
                PemFile::new("the file of the client's certificate", certificate),
                PemFile::new("the file of the client's key", key),
            )
        });
        ClientTls::new(Trust::Name(roots), identity, &[b"h2"])
    }
}
