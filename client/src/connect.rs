//! How connections are made, and what is told of those that fail.
//!
//! tonic's own TLS would read certificates once. So it is given connections that
//! are made here, each with what the files hold by then; and an endpoint without
//! the `s`, since it takes care of that letter itself.
//!
//! A server refuses a client's certificate when the client's part of the handshake
//! is over (TLS 1.3). The connection belongs to the HTTP library by then, which
//! tells its calls only that it was closed. So what a connection begins with is
//! watched here, and noted when it is no answer.

use std::{
    io,
    net::{IpAddr, Ipv6Addr},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use fencepost_tls::ClientTls;
use hyper_util::{client::legacy::connect::HttpConnector, rt::TokioIo};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{self, pki_types::ServerName},
};
use tonic::transport::{Channel, Endpoint, Uri};
use tower::{Service as _, service_fn};

/// A channel whose connections may take so long each. It connects with the first
/// call.
pub(crate) fn connect_lazy(
    endpoint: &Endpoint,
    connect_timeout: Duration,
    tls: Option<&Arc<ClientTls>>,
    trouble: &Trouble,
) -> Channel {
    let mut http = HttpConnector::new();
    http.set_nodelay(true);
    http.set_connect_timeout(Some(connect_timeout));
    let (tls, trouble) = (tls.cloned(), trouble.clone());
    endpoint.connect_with_connector_lazy(service_fn(move |uri: Uri| {
        let (http, tls, trouble) = (http.clone(), tls.clone(), trouble.clone());
        async move {
            // Not the endpoint's own limit: its error would hide that of connecting,
            // by which it is known that nothing was sent.
            let connecting = connect(http, tls.as_ref(), uri, trouble);
            let connected = timeout(connect_timeout, connecting).await;
            connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
        }
    }))
}

async fn connect(
    mut http: HttpConnector,
    tls: Option<&Arc<ClientTls>>,
    uri: Uri,
    trouble: Trouble,
) -> io::Result<TokioIo<Watched>> {
    let name = server_name(&uri).ok_or(io::ErrorKind::InvalidInput)?;
    let stream = http.call(uri).await.map_err(io::Error::other)?.into_inner();
    let (io, layer): (Box<dyn Io>, _) = match tls {
        Some(tls) => {
            let identified = tls.has_identity();
            let stream = handshake(tls, name, stream).await?;
            (Box::new(stream), Layer::Tls { identified })
        }
        None => (Box::new(stream), Layer::Plain),
    };
    let trouble = Some(trouble);
    Ok(TokioIo::new(Watched { io, layer, trouble }))
}

async fn handshake(
    tls: &Arc<ClientTls>,
    name: ServerName<'static>,
    stream: TcpStream,
) -> io::Result<TlsStream<TcpStream>> {
    let connector = TlsConnector::from(tls.current().await);
    connector.connect(name, stream).await.map_err(|error| {
        let hint = match tls_error(&error) {
            Some(rustls::Error::InvalidMessage(_)) => "does it speak TLS?",
            Some(error) if is_about_certificate(error) => certificate_hint(tls.has_identity()),
            _ => return error,
        };
        io::Error::other(format!("{error} ({hint})"))
    })
}

/// The name that the server's certificate must have. None when it cannot be one.
pub(crate) fn server_name(uri: &Uri) -> Option<ServerName<'static>> {
    let host = uri.host()?;
    let Some(address) = host.strip_prefix('[') else {
        return ServerName::try_from(host.to_owned()).ok();
    };
    let address: Ipv6Addr = address.strip_suffix(']')?.parse().ok()?;
    Some(ServerName::from(IpAddr::from(address)))
}

fn tls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// Whether it can be about the client's certificate.
fn is_about_certificate(error: &rustls::Error) -> bool {
    use rustls::AlertDescription as Alert;
    matches!(
        error,
        rustls::Error::AlertReceived(
            Alert::CertificateRequired
                | Alert::BadCertificate
                | Alert::UnsupportedCertificate
                | Alert::CertificateRevoked
                | Alert::CertificateExpired
                | Alert::CertificateUnknown
                | Alert::UnknownCA
                | Alert::AccessDenied
        )
    )
}

fn certificate_hint(identified: bool) -> &'static str {
    if identified {
        "does it trust the client certificate, and is that one for clients?"
    } else {
        "does it want a client certificate, --tls-cert and --tls-key?"
    }
}

/// What was the matter with the last connection to a server, if that never began to
/// answer. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Trouble(Arc<Mutex<Option<String>>>);

impl Trouble {
    pub(crate) fn last(&self) -> Option<String> {
        let trouble = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        trouble.clone()
    }

    fn is(&self, what: Option<String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = what;
    }
}

/// What a connection is made of.
trait Io: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Io for T {}

#[derive(Debug, Clone, Copy)]
enum Layer {
    Plain,
    Tls {
        /// We have shown a certificate to a server that asked for one.
        identified: bool,
    },
}

/// A connection, with an eye on what the server says first.
struct Watched {
    io: Box<dyn Io>,
    layer: Layer,
    /// Until it has said something.
    trouble: Option<Trouble>,
}

impl Watched {
    /// The server has begun so, or ended the connection without a word.
    fn begins(&mut self, with: &io::Result<&[u8]>) {
        if let Some(trouble) = self.trouble.take() {
            trouble.is(trouble_of(self.layer, with));
        }
    }

    /// A server that has ended the connection may have said why before: that is read
    /// first, and waited for, since the end of a connection can be read as well.
    fn wrote<T>(
        &mut self,
        cx: &mut Context<'_>,
        outcome: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if let Poll::Ready(Err(_)) = &outcome
            && self.trouble.is_some()
        {
            let mut bytes = [0; 64];
            let mut said = ReadBuf::new(&mut bytes);
            let read = ready!(Pin::new(&mut self.io).poll_read(cx, &mut said));
            self.begins(&read.map(|()| said.filled()));
        }
        outcome
    }
}

fn trouble_of(layer: Layer, beginning: &io::Result<&[u8]>) -> Option<String> {
    let mut text = match (layer, beginning) {
        // An alert of TLS.
        (Layer::Plain, Ok([21, 3, ..])) => {
            return Some("the server answers with TLS (does it speak TLS? then https://)".into());
        }
        (_, Ok([b'H', b'T', b'T', b'P', b'/', b'1', ..])) => {
            return Some("the server answers with HTTP/1 (is it the port for clients?)".into());
        }
        (_, Ok([_, ..])) => return None,
        (Layer::Plain, _) => "the server ended the connection without an answer".to_owned(),
        (Layer::Tls { .. }, _) => {
            "the server ended the connection after the TLS handshake".to_owned()
        }
    };
    let error = beginning.as_ref().err();
    if let Some(error) = error {
        text += &format!(": {error}");
    }
    let otherwise = matches!(
        error.and_then(tls_error),
        Some(error) if !is_about_certificate(error)
    );
    if let Layer::Tls { identified } = layer
        && !otherwise
    {
        text += &format!(" ({})", certificate_hint(identified));
    }
    Some(text)
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let outcome = ready!(Pin::new(&mut self.io).poll_read(cx, buffer));
        let said = outcome.map(|()| &buffer.filled()[before..]);
        self.begins(&said);
        Poll::Ready(said.map(|_| ()))
    }
}

impl AsyncWrite for Watched {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.io).poll_write(cx, bytes);
        self.wrote(cx, outcome)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.io).poll_write_vectored(cx, bytes);
        self.wrote(cx, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.io).poll_flush(cx);
        self.wrote(cx, outcome)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    /// The server has ended the connection, and what it said before is still on its
    /// way.
    #[derive(Default)]
    struct Ended {
        has_arrived: bool,
    }

    impl AsyncRead for Ended {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            if !self.has_arrived {
                self.has_arrived = true;
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            buffer.put_slice(b"HTTP/1.1 400 Bad Request");
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncWrite for Ended {
        fn poll_write(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            _: &[u8],
        ) -> Poll<io::Result<usize>> {
            Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn what_the_server_has_said_is_read_when_it_is_too_late_to_write() {
        let trouble = Trouble::default();
        let mut watched = Watched {
            io: Box::new(Ended::default()),
            layer: Layer::Plain,
            trouble: Some(trouble.clone()),
        };
        let error = watched.write(b"PRI").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        let told = trouble.last().unwrap();
        assert!(told.contains("HTTP/1"), "{told}");
    }

    #[test]
    fn only_what_may_be_the_certificates_fault_is_said_to_be() {
        use rustls::AlertDescription as Alert;
        let alert = |alert| Err(io::Error::other(rustls::Error::AlertReceived(alert)));
        let (plain, tls) = (Layer::Plain, Layer::Tls { identified: false });
        let reset = || Err(io::ErrorKind::ConnectionReset.into());
        for (layer, beginning, guess) in [
            (tls, Ok(&[][..]), Some("--tls-cert")),
            (tls, reset(), Some("--tls-cert")),
            (tls, alert(Alert::UnknownCA), Some("--tls-cert")),
            (tls, alert(Alert::InternalError), None),
            (tls, Ok(b"HTTP/1.1 400"), Some("port")),
            (plain, Ok(b"HTTP/1.1 400"), Some("port")),
            (plain, Ok(&[21, 3, 1, 0, 2]), Some("https://")),
            (plain, Ok(&[]), None),
            (plain, reset(), None),
        ] {
            let told = trouble_of(layer, &beginning).unwrap();
            assert_eq!(told.contains('?'), guess.is_some(), "{told}");
            assert!(told.contains(guess.unwrap_or_default()), "{told}");
        }
        // What a server begins with.
        for layer in [plain, tls] {
            assert_eq!(trouble_of(layer, &Ok(&[0, 0, 24, 4, 0, 0])), None);
        }
    }
}
