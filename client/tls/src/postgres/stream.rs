//! The handshake, and the connection that it makes.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use ring::digest;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::{
    Socket,
    tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream},
};
use tokio_rustls::{
    TlsConnector, client,
    rustls::pki_types::{CertificateDer, ServerName},
};
use x509_cert::der::oid::{
    ObjectIdentifier,
    db::rfc5912::{
        ECDSA_WITH_SHA_256, ECDSA_WITH_SHA_384, ECDSA_WITH_SHA_512, MD_5_WITH_RSA_ENCRYPTION,
        SHA_1_WITH_RSA_ENCRYPTION, SHA_256_WITH_RSA_ENCRYPTION, SHA_384_WITH_RSA_ENCRYPTION,
        SHA_512_WITH_RSA_ENCRYPTION,
    },
};

use crate::{certificate::Facts, client::ClientTls};

/// How to make TLS connections to a server, for the driver.
#[derive(Debug, Clone)]
pub struct PostgresTls {
    /// None when no TLS is wanted.
    pub(super) client: Option<Arc<ClientTls>>,
    /// Whether it would also do without.
    pub(super) optional: bool,
}

/// Why there is no TLS connection.
#[derive(Debug, thiserror::Error)]
pub enum NoHandshake {
    /// The host has no name to look for.
    #[error("the host's name cannot be that of a certificate")]
    Name,
    /// Nobody has asked for one.
    #[error("TLS is disabled")]
    Disabled,
    /// The two sides did not come to terms.
    #[error("{0}")]
    Failed(#[from] io::Error),
}

impl MakeTlsConnect<Socket> for PostgresTls {
    type Stream = Stream;
    type TlsConnect = Handshake;
    type Error = NoHandshake;

    fn make_tls_connect(&mut self, host: &str) -> Result<Handshake, NoHandshake> {
        Ok(Handshake {
            client: self.client.clone(),
            host: host.to_owned(),
        })
    }
}

/// One handshake to come.
#[derive(Debug)]
pub struct Handshake {
    client: Option<Arc<ClientTls>>,
    host: String,
}

impl TlsConnect<Socket> for Handshake {
    type Stream = Stream;
    type Error = NoHandshake;
    type Future = Pin<Box<dyn Future<Output = Result<Stream, NoHandshake>> + Send>>;

    fn connect(self, socket: Socket) -> Self::Future {
        Box::pin(async move {
            let client = self.client.ok_or(NoHandshake::Disabled)?;
            let name = ServerName::try_from(self.host).map_err(|_| NoHandshake::Name)?;
            let connector = TlsConnector::from(client.current().await);
            Ok(Stream(Box::new(connector.connect(name, socket).await?)))
        })
    }
}

/// A connection through TLS.
#[derive(Debug)]
pub struct Stream(Box<client::TlsStream<Socket>>);

impl TlsStream for Stream {
    fn channel_binding(&self) -> ChannelBinding {
        let (_, session) = self.0.get_ref();
        let certificate = session.peer_certificates().and_then(<[_]>::first);
        certificate
            .and_then(end_point)
            .map_or_else(ChannelBinding::none, ChannelBinding::tls_server_end_point)
    }
}

/// The hash of a server's certificate to which SCRAM binds a password (RFC 5929,
/// 4.1): by the hash of its signature, or SHA-256 for those that are too weak.
/// None where that is not defined.
fn end_point(certificate: &CertificateDer<'_>) -> Option<Vec<u8>> {
    const SHA_256: [ObjectIdentifier; 4] = [
        MD_5_WITH_RSA_ENCRYPTION,
        SHA_1_WITH_RSA_ENCRYPTION,
        SHA_256_WITH_RSA_ENCRYPTION,
        ECDSA_WITH_SHA_256,
    ];
    let algorithm = match Facts::of(certificate)?.signature {
        oid if SHA_256.contains(&oid) => &digest::SHA256,
        SHA_384_WITH_RSA_ENCRYPTION | ECDSA_WITH_SHA_384 => &digest::SHA384,
        SHA_512_WITH_RSA_ENCRYPTION | ECDSA_WITH_SHA_512 => &digest::SHA512,
        _ => return None,
    };
    Some(digest::digest(algorithm, certificate).as_ref().to_vec())
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
