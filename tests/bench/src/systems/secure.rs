//! TLS as users have it: a certificate for the address, and clients that verify it by the
//! code that the client library does it by.

use std::{io, net::SocketAddr, sync::Arc};

use fencepost_support::{
    server::Builder,
    tls::{Authority, Folder, HOUR},
};
use fencepost_tls::{ClientTls, PemFile, Roots, Trust};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, rustls::pki_types::ServerName};
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

use crate::load::Result;

pub(super) struct Secure {
    folder: Folder,
    client: Arc<ClientTls>,
}

impl Secure {
    pub(super) fn new() -> Result<Self> {
        let authority = Authority::new("the benchmark");
        let folder = Folder::default();
        folder.write("ca.crt", &authority.pem());
        folder.write_both("server", &authority.issue("server", &["127.0.0.1"], HOUR));
        let roots = PemFile::new("the CA file", folder.path("ca.crt"));
        let client = ClientTls::new(Trust::Name(Roots::File(roots)), None, &[b"h2"])?;
        Ok(Self {
            folder,
            client: Arc::new(client),
        })
    }

    pub(super) fn flags(&self, server: Builder) -> Builder {
        server
            .flag("--tls-cert", &self.folder.name("server.crt"))
            .flag("--tls-key", &self.folder.name("server.key"))
    }

    pub(super) async fn channel(&self, address: SocketAddr) -> Result<Channel> {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))?
            .origin(format!("https://{address}").parse()?);
        let client = Arc::clone(&self.client);
        let connect = service_fn(move |_: Uri| {
            let tls = Arc::clone(&client);
            async move {
                let tls = TlsConnector::from(tls.current().await);
                let stream = TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                let name = ServerName::from(address.ip());
                io::Result::Ok(TokioIo::new(tls.connect(name, stream).await?))
            }
        });
        Ok(endpoint.connect_with_connector(connect).await?)
    }
}
