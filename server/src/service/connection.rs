//! A connection of a client, plain or through TLS, from its first byte on.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    runtime::{Handle, RuntimeMetrics},
    task::coop,
    time::{Instant, Sleep},
};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::transport::server::Connected;

use super::{incoming::Place, seat::Seat};
use crate::caller::Caller;

/// How long a client may take to begin.
pub(super) const BEGINNING: Duration = Duration::from_secs(10);

/// Bytes of a beginning: HTTP/2's preface. A whole request of HTTP/1, if short.
const BEGUN: usize = 24;

/// Bytes that a connection may be read in one turn. HTTP/2 makes a task of each request
/// that it finds, so without an end to the turn, one that has ten thousand requests in its
/// buffers puts them all before everybody else's.
const TURN: usize = 8 * 1024;

/// Tasks in the runtime's common queue that make it late. A request that is reset has its
/// task until that had its turn, and no limit to streams counts it: who has had a turn
/// then waits for the next.
const LATE: usize = 256;
const WAIT: Duration = Duration::from_millis(1);

/// What carries the bytes.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// What a call knows of the connection that it came on.
#[derive(Clone)]
pub(crate) struct Origin {
    pub(super) caller: Caller,
    pub(super) seat: Arc<Seat>,
}

/// A connection, and its place among those that there is room for.
pub(crate) struct Connection {
    stream: Box<dyn Stream>,
    origin: Origin,
    /// When the next bytes are too late; none once it has begun, without a
    /// limit to its silence.
    patience: Option<Pin<Box<Sleep>>>,
    silence: Option<Duration>,
    /// Bytes so far, as long as they are few.
    heard: usize,
    /// Bytes of this turn, and whether it is the first.
    turn: usize,
    had_turn: bool,
    runtime: RuntimeMetrics,
    wait: Pin<Box<Sleep>>,
    /// When it must make room.
    ended: Pin<Box<WaitForCancellationFutureOwned>>,
    _place: Place,
}

impl Connection {
    pub(super) fn new(
        stream: impl Stream + 'static,
        caller: Caller,
        silence: Option<Duration>,
        place: Place,
    ) -> Self {
        let seat = place.seat();
        let ended = Box::pin(seat.ended().clone().cancelled_owned());
        Self {
            stream: Box::new(stream),
            origin: Origin { caller, seat },
            patience: Some(Box::pin(tokio::time::sleep(BEGINNING))),
            silence,
            heard: 0,
            turn: 0,
            had_turn: false,
            runtime: Handle::current().metrics(),
            wait: Box::pin(tokio::time::sleep(Duration::ZERO)),
            ended,
            _place: place,
        }
    }

    /// Waits while the runtime is late, if this connection has had a turn.
    fn poll_begin(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.had_turn && self.is_late() {
            ready!(self.wait.as_mut().poll(cx));
            self.wait.as_mut().reset(Instant::now() + WAIT);
        }
        self.had_turn = false;
        Poll::Ready(())
    }

    fn is_late(&self) -> bool {
        self.runtime.global_queue_depth() > LATE
    }

    /// Counts bytes, and ends the turn with the last of them.
    fn took(&mut self, bytes: usize, cx: &mut Context<'_>) {
        self.turn += bytes;
        if self.turn < TURN {
            return;
        }
        self.turn = 0;
        self.had_turn = true;
        // HTTP/2 reads on after each request that it makes a task of, whatever a read
        // before has said. Without a budget it finds nothing until the task comes again.
        for _ in 0..u8::MAX {
            match coop::poll_proceed(cx) {
                Poll::Ready(budget) => budget.made_progress(),
                Poll::Pending => break,
            }
        }
    }

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
    type ConnectInfo = Origin;

    fn connect_info(&self) -> Origin {
        self.origin.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.ended.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        if let Some(patience) = &mut self.patience
            && patience.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let budget = ready!(coop::poll_proceed(cx));
        ready!(self.poll_begin(cx));
        let before = buffer.filled().len();
        let Poll::Ready(read) = Pin::new(&mut self.stream).poll_read(cx, buffer) else {
            if !self.is_late() {
                self.turn = 0;
            }
            return Poll::Pending;
        };
        budget.made_progress();
        read?;
        let bytes = buffer.filled().len() - before;
        self.hear(bytes);
        self.took(bytes, cx);
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
