//! TLS on accepted connections.
//!
//! Accepting never waits for a handshake: each has a task of its own, which keeps
//! the connection's place among those that there is room for, and a limit of
//! time. There is a limit to their number as well. When it is reached, the one that
//! has waited longest is ended, once it has had a second: a handshake that is
//! going to end takes less, and whoever only opens connections keeps nobody out.

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use fencepost_tls::Facts;
use tokio::{
    task::{AbortHandle, JoinSet},
    time::{Instant, Sleep, sleep, timeout},
};
use tokio_rustls::TlsAcceptor;
use tokio_stream::Stream;

use super::{
    connection::{BEGINNING, Connection},
    incoming::{Accepted, Incoming},
};
use crate::{
    caller::Caller,
    metrics::TlsMetrics,
    telemetry::{Chain, Seldom},
    tls::Tls,
};

/// At one time. One costs some 50 KB.
const ROOM: usize = 512;

/// What a handshake has when others wait.
const LEAST: Duration = Duration::from_secs(1);

/// Connections whose handshake is done.
pub(super) struct Handshakes {
    incoming: Incoming,
    tls: Arc<Tls>,
    metrics: TlsMetrics,
    under_way: JoinSet<Option<Connection>>,
    /// Those of them that may not be over, the oldest first.
    begun: VecDeque<(Instant, AbortHandle)>,
    /// Until the oldest has had its time.
    rest: Pin<Box<Sleep>>,
}

impl Handshakes {
    pub(super) fn new(incoming: Incoming, tls: Arc<Tls>, metrics: TlsMetrics) -> Self {
        Self {
            incoming,
            tls,
            metrics,
            under_way: JoinSet::new(),
            begun: VecDeque::new(),
            rest: Box::pin(sleep(Duration::ZERO)),
        }
    }

    /// Waits until there is room for one more.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.begun.len() < ROOM {
            return Poll::Ready(());
        }
        self.begun.retain(|(_, handshake)| !handshake.is_finished());
        if self.begun.len() < ROOM {
            return Poll::Ready(());
        }
        if let Some((since, oldest)) = self.begun.front() {
            self.rest.as_mut().reset(*since + LEAST);
            ready!(self.rest.as_mut().poll(cx));
            oldest.abort();
            self.metrics.handshakes_failed.inc();
            self.begun.pop_front();
        }
        Poll::Ready(())
    }

    fn begin(&mut self, accepted: Accepted) {
        let acceptor = TlsAcceptor::from(self.tls.current());
        let failed = self.metrics.handshakes_failed.clone();
        let handshake = async move {
            let peer = accepted.peer;
            match timeout(BEGINNING, shake(acceptor, accepted)).await {
                Ok(Ok(connection)) => return Some(connection),
                Ok(Err(error)) => log(&error, peer),
                Err(_) => tracing::debug!(%peer, "a TLS handshake took too long"),
            }
            failed.inc();
            None
        };
        let handle = self.under_way.spawn(handshake);
        self.begun.push_back((Instant::now(), handle));
    }
}

async fn shake(acceptor: TlsAcceptor, accepted: Accepted) -> io::Result<Connection> {
    let Accepted {
        stream,
        peer,
        silence,
        place,
    } = accepted;
    let stream = acceptor.accept(stream).await?;
    let (_, session) = stream.get_ref();
    let certificate = session.peer_certificates().and_then(<[_]>::first);
    let caller = Caller::at(peer).with_certificate(certificate.and_then(Facts::of));
    Ok(Connection::new(stream, caller, silence, place))
}

/// What TLS itself refuses is for an operator to see, if not each time; that
/// somebody knocked and left is not.
fn log(error: &io::Error, peer: SocketAddr) {
    static SELDOM: Seldom = Seldom::new();
    let is_of_tls = error.kind() == io::ErrorKind::InvalidData;
    let error = Chain(error);
    if is_of_tls && SELDOM.passes() {
        tracing::warn!(%error, %peer, "a TLS handshake failed (one in ten seconds is told)");
    } else {
        tracing::debug!(%error, %peer, "a TLS handshake failed");
    }
}

impl Stream for Handshakes {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            match self.under_way.poll_join_next(cx) {
                Poll::Ready(Some(Ok(Some(connection)))) => {
                    return Poll::Ready(Some(Ok(connection)));
                }
                // One that failed, or was ended.
                Poll::Ready(Some(_)) => continue,
                Poll::Ready(None) | Poll::Pending => {}
            }
            ready!(self.poll_room(cx));
            let accepted = ready!(self.incoming.poll_accept(cx));
            self.begin(accepted);
        }
    }
}
