//! A connection of a client, plain or through TLS, from its first byte on.

use std::{
    future::poll_fn,
    io,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    task::coop,
    time::{Instant, Sleep},
};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::transport::server::Connected;

use super::{incoming::Place, seat::Seat, turn::Turn};
use crate::caller::Caller;

/// How long a client may take to begin.
pub(super) const BEGINNING: Duration = Duration::from_secs(10);

/// Bytes of a beginning: HTTP/2's preface. A whole request of HTTP/1, if short.
const BEGUN: usize = 24;

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
    turn: Turn,
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
            turn: Turn::new(place.turns()),
            ended,
            _place: place,
        }
    }

    /// Writes, for which there is time when a turn is over, too: else no answer would
    /// leave while requests come in.
    fn poll_out<T>(
        &mut self,
        cx: &mut Context<'_>,
        mut write: impl FnMut(Pin<&mut dyn Stream>, &mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        let stream = &mut self.stream;
        let write = poll_fn(|cx| write(Pin::new(&mut **stream), cx));
        if self.turn.is_over() {
            pin!(coop::unconstrained(write)).poll(cx)
        } else {
            pin!(write).poll(cx)
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
        ready!(self.turn.poll_begin(cx));
        let before = buffer.filled().len();
        let Poll::Ready(read) = Pin::new(&mut self.stream).poll_read(cx, buffer) else {
            return Poll::Pending;
        };
        budget.made_progress();
        read?;
        let bytes = buffer.filled().len() - before;
        self.hear(bytes);
        self.turn.took(bytes, cx);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_out(cx, |stream, cx| stream.poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_out(cx, |stream, cx| stream.poll_write_vectored(cx, parts))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_out(cx, |stream, cx| stream.poll_flush(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_out(cx, |stream, cx| stream.poll_shutdown(cx))
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::{
        io::AsyncWriteExt as _,
        net::{TcpListener, TcpStream},
    };
    use tokio_stream::StreamExt as _;

    use super::*;
    use crate::service::incoming::Incoming;

    const SENT: usize = 64 * 1024;

    /// Reads until there is nothing, as hyper does, and writes then.
    fn serve(connection: &mut Connection, cx: &mut Context<'_>) -> usize {
        let mut bytes = 0;
        loop {
            let mut room = [0; 4096];
            let mut buffer = ReadBuf::new(&mut room);
            match Pin::new(&mut *connection).poll_read(cx, &mut buffer) {
                Poll::Ready(read) => read.unwrap(),
                Poll::Pending => break,
            }
            bytes += buffer.filled().len();
        }
        assert!(Pin::new(connection).poll_write(cx, b"answer").is_ready());
        bytes
    }

    #[tokio::test]
    async fn a_turn_ends_with_its_bytes_and_is_answered() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut incoming = Incoming::new(listener, 1);
        let mut peer = TcpStream::connect(address).await.unwrap();
        peer.write_all(&[0; SENT]).await.unwrap();
        let mut connection = incoming.next().await.unwrap().unwrap();

        let mut turns = Vec::new();
        while turns.iter().sum::<usize>() < SENT {
            poll_fn(|cx| match serve(&mut connection, cx) {
                0 => Poll::Pending,
                bytes => {
                    turns.push(bytes);
                    Poll::Ready(())
                }
            })
            .await;
            // A ready future would be polled in the same turn of its task.
            tokio::task::yield_now().await;
        }
        assert!(turns.len() >= SENT / (2 * 8 * 1024), "{turns:?}");
    }
}
