//! Connections through TLS, for endpoints that begin with `https`.
//!
//! tonic's own would read certificates once. So it is given connections that are
//! made here, each with what the files hold by then; and an endpoint without the
//! `s`, since it takes care of that letter itself.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use fencepost_tls::{BadFile, ClientTls, PemFile, Roots, Trust};
use hyper_util::{client::legacy::connect::HttpConnector, rt::TokioIo};
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::{TlsConnector, client::TlsStream, rustls::pki_types::ServerName};
use tonic::transport::{Channel, Endpoint, Uri};
use tower::{Service as _, service_fn};

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

/// A channel through TLS, each of whose connections may take so long. It connects with the first call.
pub(crate) fn connect_lazy(
    endpoint: &Endpoint,
    connect_timeout: Duration,
    tls: &Arc<ClientTls>,
) -> Channel {
    let mut http = HttpConnector::new();
    http.set_nodelay(true);
    http.set_connect_timeout(Some(connect_timeout));
    let tls = Arc::clone(tls);
    endpoint.connect_with_connector_lazy(service_fn(move |uri: Uri| {
        let (http, tls) = (http.clone(), Arc::clone(&tls));
        async move {
            // Not the endpoint's own limit: its error would hide that of connecting,
            // by which it is known that nothing was sent.
            let connected = timeout(connect_timeout, connect(http, &tls, uri)).await;
            connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
        }
    }))
}

async fn connect(
    mut http: HttpConnector,
    tls: &Arc<ClientTls>,
    uri: Uri,
) -> io::Result<TokioIo<TlsStream<TcpStream>>> {
    let host = uri.host().unwrap_or_default();
    let host = host
        .trim_start_matches('[')
        .trim_end_matches(']')
        .to_owned();
    let name = ServerName::try_from(host).map_err(io::Error::other)?;
    let stream = http.call(uri).await.map_err(io::Error::other)?;
    let connector = TlsConnector::from(tls.current().await);
    Ok(TokioIo::new(
        connector.connect(name, stream.into_inner()).await?,
    ))
}
