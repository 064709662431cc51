//! What a connection has open: its calls, from their headers until their answer is sent.
//!
//! An answer that its caller does not read stays in memory, and so do the headers of a
//! call whose message does not come. The store's room is free again by then, or not taken
//! yet: so a connection may have only so many calls open, whoever they wait for. KeepAlive
//! streams are not among them: there are many on one connection, and each holds little.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use tonic::{Status, body::Body};

/// Calls that a connection may have open. What the store lets one connection have at
/// work comes to about as much.
const MOST: usize = 2_000;

/// A connection, as its calls know it.
#[derive(Default)]
pub(super) struct Seat(Mutex<State>);

#[derive(Default)]
struct State {
    calls: usize,
}

/// One that is open, until it is dropped.
pub(super) struct Open {
    seat: Arc<Seat>,
}

impl Seat {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a call. None when there are too many.
    pub(super) fn call(self: &Arc<Self>) -> Option<Open> {
        let mut state = self.state();
        if state.calls >= MOST {
            return None;
        }
        state.calls += 1;
        drop(state);
        let seat = Arc::clone(self);
        Some(Open { seat })
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.seat.state().calls -= 1;
    }
}

/// An answer, whose call is open until the last of it is sent.
pub(super) struct OpenBody {
    pub(super) body: Body,
    pub(super) open: Arc<Open>,
}

/// Bytes that HTTP/2 keeps until the connection has taken them.
struct Unsent {
    bytes: Bytes,
    _open: Arc<Open>,
}

impl AsRef<[u8]> for Unsent {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl HttpBody for OpenBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        frame.map_ok(|frame| {
            frame.map_data(|bytes| {
                let _open = Arc::clone(&self.open);
                Bytes::from_owner(Unsent { bytes, _open })
            })
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
