//! What the schedule says of a stream, as messages. The last one is an error.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use fencepost_proto::v1;
use tokio_stream::{Stream, wrappers::WatchStream};
use tonic::Status;

use super::{convert, status};
use crate::{
    keep_alive::{End, Listener, State},
    lock::Resource,
};

/// A reader that falls behind is told the latest renewal and not each of them.
pub(crate) struct KeepAliveStream {
    resource: Resource,
    states: WatchStream<State>,
    _listener: Listener,
    ended: bool,
}

impl KeepAliveStream {
    pub(super) fn new(resource: Resource, listener: Listener) -> Self {
        Self {
            resource,
            states: WatchStream::new(listener.state()),
            _listener: listener,
            ended: false,
        }
    }
}

impl Stream for KeepAliveStream {
    type Item = Result<v1::KeepAliveResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        loop {
            let end = match ready!(Pin::new(&mut self.states).poll_next(cx)) {
                Some(State::Opening) => continue,
                Some(State::Renewed(kept)) => return Poll::Ready(Some(Ok(convert::kept(&kept)))),
                Some(State::Ended(end)) => end,
                // The schedule is gone and said nothing: still not OK.
                None => End::Draining,
            };
            self.ended = true;
            return Poll::Ready(Some(Err(status::end(end, &self.resource))));
        }
    }
}
