//! Accepted connections, for a server that outlives a shortage of files.
//!
//! An accept that fails must neither end the server nor be tried again at
//! once: without free file handles it would fail in a busy loop. And a flood of
//! connections must not take the last handles, which the connections to the
//! database need: beyond a limit, new ones wait to be accepted.
//!
//! So a place is worth something, and whoever has nothing to say does not keep
//! it. HTTP/2's pings find out the silent ones, but begin only after the
//! client's preface; HTTP/1 has none.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use rustix::process::{Resource, getrlimit};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, Sleep},
};
use tokio_stream::Stream;
use tokio_util::sync::PollSemaphore;
use tonic::transport::server::{Connected, TcpConnectInfo};

const REST: Duration = Duration::from_millis(100);

/// How long a client may take to begin.
const BEGINNING: Duration = Duration::from_secs(10);

/// Bytes of a beginning: HTTP/2's preface. A whole request of HTTP/1, if short.
const BEGUN: usize = 24;

/// Handles for everything beside clients and the pool: listeners, signals, the
/// runtime, the log, and the connections to the HTTP port.
const OTHER_HANDLES: usize = 64;

/// How many connections of clients may be open at one time, so that `reserved`
/// handles and a few more are never theirs.
pub(super) fn room(reserved: usize) -> usize {
    let handles = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let handles = usize::try_from(handles).unwrap_or(usize::MAX);
    handles
        .saturating_sub(reserved + OTHER_HANDLES)
        .clamp(16, Semaphore::MAX_PERMITS)
}

pub(crate) struct Incoming {
    listener: TcpListener,
    /// How long a connection may be silent later on.
    silence: Option<Duration>,
    rest: Option<Pin<Box<Sleep>>>,
    room: PollSemaphore,
    /// The place of the next connection.
    place: Option<OwnedSemaphorePermit>,
    /// Whether it was logged that there is no room.
    full: bool,
}

impl Incoming {
    /// Accepts at most `room` connections at one time.
    pub(crate) fn new(listener: TcpListener, room: usize) -> Self {
        Self {
            listener,
            silence: None,
            rest: None,
            room: PollSemaphore::new(Arc::new(Semaphore::new(room))),
            place: None,
            full: false,
        }
    }

    /// Ends connections that were silent for this long, for a protocol that does
    /// not look after them.
    pub(crate) fn silent_for(mut self, silence: Duration) -> Self {
        self.silence = Some(silence);
        self
    }

    /// Waits until there is room for one more connection.
    fn poll_place(&mut self, cx: &mut Context<'_>) -> Poll<OwnedSemaphorePermit> {
        if let Some(place) = self.place.take() {
            return Poll::Ready(place);
        }
        match self.room.poll_acquire(cx) {
            Poll::Ready(Some(place)) => {
                self.full = false;
                Poll::Ready(place)
            }
            // Never closed.
            Poll::Ready(None) | Poll::Pending => {
                if !std::mem::replace(&mut self.full, true) {
                    tracing::warn!("no room for more connections: new ones wait to be accepted");
                }
                Poll::Pending
            }
        }
    }

    /// Accepts the next connection, whatever happens until then.
    pub(crate) fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<(Connection, SocketAddr)> {
        loop {
            if let Some(rest) = &mut self.rest {
                ready!(rest.as_mut().poll(cx));
                self.rest = None;
            }
            let place = ready!(self.poll_place(cx));
            let Poll::Ready(accepted) = self.listener.poll_accept(cx) else {
                self.place = Some(place);
                return Poll::Pending;
            };
            match accepted {
                Ok((stream, peer)) => {
                    // An answer is one small write: it must not wait for an ACK.
                    // A peer that is gone already is found out by its first read.
                    let _ = stream.set_nodelay(true);
                    let connection = Connection {
                        stream,
                        patience: Some(Box::pin(tokio::time::sleep(BEGINNING))),
                        silence: self.silence,
                        heard: 0,
                        _place: place,
                    };
                    return Poll::Ready((connection, peer));
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    self.rest = Some(Box::pin(tokio::time::sleep(REST)));
                }
            }
        }
    }

    /// Where it listens.
    pub(crate) fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

impl Stream for Incoming {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let (connection, _) = ready!(self.poll_accept(cx));
        Poll::Ready(Some(Ok(connection)))
    }
}

/// An accepted connection, and its place among those that there is room for.
pub(crate) struct Connection {
    stream: TcpStream,
    /// When the next bytes are too late; none once it has begun, without a
    /// limit to its silence.
    patience: Option<Pin<Box<Sleep>>>,
    silence: Option<Duration>,
    /// Bytes so far, as long as they are few.
    heard: usize,
    _place: OwnedSemaphorePermit,
}

impl Connection {
    /// Gives it new time when bytes came after which it may have some.
    fn hear(&mut self, bytes: usize) {
        if bytes == 0 || self.patience.is_none() {
            return;
        }
        self.heard = self.heard.saturating_add(bytes);
        if self.heard < BEGUN {
            return;
        }
        match (self.silence, &mut self.patience) {
            (Some(silence), Some(patience)) => patience.as_mut().reset(Instant::now() + silence),
            _ => self.patience = None,
        }
    }
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(patience) = &mut self.patience
            && patience.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        self.hear(buffer.filled().len() - before);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
