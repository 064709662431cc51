//! Accepted connections, for a server that outlives a shortage of files.
//!
//! An accept that fails must neither end the server nor be tried again at
//! once: without free file handles it would fail in a busy loop. And a flood of
//! connections must not take the last handles, which the connections to the
//! database need: beyond a limit, new ones wait to be accepted.
//!
//! So a place is worth something, and whoever has nothing to say does not keep
//! it: see [`seat`](super::seat). HTTP/2's pings find out the silent ones, but begin only after the
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
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Sleep,
};
use tokio_stream::Stream;
use tokio_util::sync::PollSemaphore;

use super::{
    connection::Connection,
    seat::{Seat, Seats},
    turn::Queue,
};
use crate::{caller::Caller, metrics::Gauge};

const REST: Duration = Duration::from_millis(100);

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
    limit: usize,
    /// How long a connection may be silent later on.
    silence: Option<Duration>,
    rest: Option<Pin<Box<Sleep>>>,
    room: PollSemaphore,
    seats: Arc<Seats>,
    turns: Queue,
    open: Gauge,
    /// The place of the next connection.
    place: Option<OwnedSemaphorePermit>,
    /// Until somebody is asked for room again.
    patience: Option<Pin<Box<Sleep>>>,
    /// Whether it was logged that there is no room.
    full: bool,
}

impl Incoming {
    /// Accepts at most `room` connections at one time.
    pub(crate) fn new(listener: TcpListener, room: usize) -> Self {
        Self {
            listener,
            limit: room,
            silence: None,
            rest: None,
            room: PollSemaphore::new(Arc::new(Semaphore::new(room))),
            seats: Arc::default(),
            turns: Queue::default(),
            open: Gauge::default(),
            place: None,
            patience: None,
            full: false,
        }
    }

    /// Ends connections that were silent for this long, for a protocol that does
    /// not look after them.
    pub(crate) fn silent_for(mut self, silence: Duration) -> Self {
        self.silence = Some(silence);
        self
    }

    /// Keeps the number of connections there.
    pub(super) fn counted(mut self, open: Gauge) -> Self {
        self.open = open;
        self
    }

    /// Waits until there is room for one more connection; somebody may have to go.
    fn poll_place(&mut self, cx: &mut Context<'_>) -> Poll<OwnedSemaphorePermit> {
        if let Some(place) = self.place.take() {
            return Poll::Ready(place);
        }
        loop {
            // Never closed.
            if let Poll::Ready(Some(place)) = self.room.poll_acquire(cx) {
                self.full = false;
                self.patience = None;
                return Poll::Ready(place);
            }
            if let Some(patience) = &mut self.patience {
                ready!(patience.as_mut().poll(cx));
            }
            if !self.seats.make_room() && !std::mem::replace(&mut self.full, true) {
                tracing::warn!(
                    limit = self.limit,
                    "no room for more connections: new ones wait to be accepted"
                );
            }
            self.patience = Some(Box::pin(tokio::time::sleep(REST)));
        }
    }

    /// Accepts the next connection, whatever happens until then.
    pub(crate) fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<Accepted> {
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
                    return Poll::Ready(Accepted {
                        stream,
                        peer,
                        silence: self.silence,
                        place: Place::new(place, self),
                    });
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
        let accepted = ready!(self.poll_accept(cx));
        Poll::Ready(Some(Ok(accepted.plain())))
    }
}

/// A connection's place, given back on drop.
pub(super) struct Place {
    seats: Arc<Seats>,
    turns: Queue,
    open: Gauge,
    _permit: OwnedSemaphorePermit,
}

impl Place {
    fn new(permit: OwnedSemaphorePermit, incoming: &Incoming) -> Self {
        incoming.open.inc();
        Self {
            seats: Arc::clone(&incoming.seats),
            turns: incoming.turns.clone(),
            open: incoming.open.clone(),
            _permit: permit,
        }
    }

    /// What is open on it, for when it begins: a handshake has a limit of its own.
    pub(super) fn seat(&self) -> Arc<Seat> {
        self.seats.seat()
    }

    pub(super) fn turns(&self) -> Queue {
        self.turns.clone()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.open.dec();
    }
}

/// A connection on which nothing was said yet.
pub(crate) struct Accepted {
    pub(super) stream: TcpStream,
    pub(crate) peer: SocketAddr,
    pub(super) silence: Option<Duration>,
    pub(super) place: Place,
}

impl Accepted {
    /// As it is, without TLS.
    pub(crate) fn plain(self) -> Connection {
        let caller = Caller::at(self.peer);
        Connection::new(self.stream, caller, self.silence, self.place)
    }
}
