//! Accepted connections, for a server that outlives a shortage of files.
//!
//! An accept that fails must neither end the server nor be tried again at
//! once: without free file handles it would fail in a busy loop.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    net::{TcpListener, TcpStream},
    time::Sleep,
};
use tokio_stream::Stream;

const REST: Duration = Duration::from_millis(100);

pub(super) struct Incoming {
    listener: TcpListener,
    rest: Option<Pin<Box<Sleep>>>,
}

impl Incoming {
    pub(super) fn new(listener: TcpListener) -> Self {
        Self {
            listener,
            rest: None,
        }
    }
}

impl Stream for Incoming {
    type Item = io::Result<TcpStream>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(rest) = &mut self.rest {
                ready!(rest.as_mut().poll(cx));
                self.rest = None;
            }
            match ready!(self.listener.poll_accept(cx)) {
                Ok((stream, _)) => {
                    // An answer is one small write: it must not wait for an ACK.
                    // A peer that is gone already is found out by its first read.
                    let _ = stream.set_nodelay(true);
                    return Poll::Ready(Some(Ok(stream)));
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    self.rest = Some(Box::pin(tokio::time::sleep(REST)));
                }
            }
        }
    }
}
