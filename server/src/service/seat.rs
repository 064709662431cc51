//! The connections that have a place, and what each has open: its calls, from their
//! headers until their answer is sent, and its streams.
//!
//! An answer that its caller does not read stays in memory, and so do the headers of a
//! call whose message does not come. The store's room is free again by then, or not taken
//! yet: so a connection may have only so many calls open, whoever they wait for. KeepAlive
//! streams are not among them: there are many on one connection, and each holds little.
//!
//! What waits for its caller is bounded on all connections together, too: headers and parts
//! of messages until the rest comes, those of KeepAlive included, and answers until they are
//! sent. When it is too much, whoever lets the most of it wait is disconnected.
//!
//! When there is no place left, a connection that has nothing open makes room: first one
//! that never had, once it has had a second to begin, then one that had nothing for a
//! minute; the longest of them. Those who renew keep theirs, and whoever only connects and
//! answers pings keeps nobody out. On ports that do not count calls the oldest goes: there
//! a connection is for one probe, which is answered in less than a second.

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Status, body::Body};

/// Calls that a connection may have open. What the store lets one connection have at
/// work comes to about as much.
const MOST: usize = 2_000;

/// Bytes that may wait for callers on all connections. A server that is busy and well has
/// some hundred calls that are being read or sent, and fifty thousand streams that open at
/// once have less than half of it in headers.
const MOST_WAITING: usize = 160 * 1024 * 1024;

/// What an answer counts: the largest, which has as many labels as there may be, with what
/// HTTP/2 keeps of its stream.
const ANSWER: usize = 8 * 1024;

/// What HTTP/2 keeps of a stream, beside its headers.
const STREAM: usize = 1024;

/// What a connection has for its first call when others wait.
const BEGINNING: Duration = Duration::from_secs(1);

/// What it has between two calls then.
const PAUSE: Duration = Duration::from_secs(60);

/// The connections of one port.
#[derive(Default)]
pub(super) struct Seats {
    seats: Mutex<Vec<Weak<Seat>>>,
    /// Bytes that wait for callers.
    waiting: AtomicUsize,
    /// Whoever was disconnected last for them.
    leaving: Mutex<Weak<Seat>>,
}

impl Seats {
    fn seats(&self) -> MutexGuard<'_, Vec<Weak<Seat>>> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For a new connection.
    pub(super) fn seat(self: &Arc<Self>) -> Arc<Seat> {
        let seat = Arc::new(Seat {
            seats: Arc::clone(self),
            state: Mutex::new(State {
                calls: 0,
                streams: 0,
                was_used: false,
                since: Instant::now(),
            }),
            waiting: AtomicUsize::new(0),
            ended: CancellationToken::new(),
        });
        let mut seats = self.seats();
        if seats.len() == seats.capacity() {
            seats.retain(|seat| seat.strong_count() > 0);
        }
        seats.push(Arc::downgrade(&seat));
        seat
    }

    /// Ends the connection that can be spared best. Says whether there is one.
    pub(super) fn make_room(&self) -> bool {
        let now = Instant::now();
        let seats = self.seats();
        let seats = seats.iter().filter_map(Weak::upgrade);
        let idle = seats.filter_map(|seat| Some((seat.idle(now)?, seat)));
        let longest = idle.min_by_key(|(idle, _)| *idle);
        if let Some((_, seat)) = &longest {
            seat.ended.cancel();
        }
        longest.is_some()
    }

    /// So much more waits. Who lets the most wait goes when it is too much.
    fn wait(&self, bytes: usize) {
        if self.waiting.fetch_add(bytes, Ordering::Relaxed) < MOST_WAITING {
            return;
        }
        let mut leaving = self.leaving.lock().unwrap_or_else(PoisonError::into_inner);
        if leaving.strong_count() > 0 {
            return;
        }
        let seats = self.seats();
        let seats = seats.iter().filter_map(Weak::upgrade);
        if let Some(most) = seats.max_by_key(|seat| seat.waiting.load(Ordering::Relaxed)) {
            tracing::warn!(
                bytes = most.waiting.load(Ordering::Relaxed),
                "too much waits for callers that do not read or do not go on: whoever has most of it is disconnected"
            );
            most.ended.cancel();
            *leaving = Arc::downgrade(&most);
        }
    }
}

/// A connection, as its calls know it.
pub(super) struct Seat {
    seats: Arc<Seats>,
    state: Mutex<State>,
    /// Bytes that wait for it.
    waiting: AtomicUsize,
    ended: CancellationToken,
}

struct State {
    calls: usize,
    streams: usize,
    was_used: bool,
    /// When it came, or had its last call.
    since: Instant,
}

/// A call or a stream that is open, until it is dropped.
pub(super) struct Open {
    seat: Arc<Seat>,
    is_call: bool,
    /// Bytes of it that wait for its caller.
    waiting: AtomicUsize,
}

impl Seat {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the connection to make room.
    pub(super) fn ended(&self) -> &CancellationToken {
        &self.ended
    }

    /// Whether it can be spared, the smallest first.
    fn idle(&self, now: Instant) -> Option<(bool, Instant)> {
        let state = self.state();
        let patience = if state.was_used { PAUSE } else { BEGINNING };
        let is_idle = state.calls + state.streams == 0
            && now.duration_since(state.since) >= patience
            && !self.ended.is_cancelled();
        is_idle.then_some((state.was_used, state.since))
    }

    /// Opens a stream.
    pub(super) fn stream(self: &Arc<Self>, headers: &HeaderMap) -> Open {
        self.state().streams += 1;
        Open::new(self, false, headers)
    }

    /// Opens a call. None when there are too many.
    pub(super) fn call(self: &Arc<Self>, headers: &HeaderMap) -> Option<Open> {
        let mut state = self.state();
        if state.calls >= MOST {
            return None;
        }
        state.calls += 1;
        drop(state);
        Some(Open::new(self, true, headers))
    }
}

impl Open {
    fn new(seat: &Arc<Seat>, is_call: bool, headers: &HeaderMap) -> Self {
        let open = Self {
            seat: Arc::clone(seat),
            is_call,
            waiting: AtomicUsize::new(0),
        };
        let headers = headers
            .iter()
            .map(|(name, value)| name.as_str().len() + value.len());
        open.waits(STREAM + headers.sum::<usize>());
        open
    }

    /// So much has come, and waits for the rest.
    pub(super) fn waits(&self, bytes: usize) {
        self.waiting.fetch_add(bytes, Ordering::Relaxed);
        self.seat.waiting.fetch_add(bytes, Ordering::Relaxed);
        self.seat.seats.wait(bytes);
    }

    /// The request is whole: it waits for its caller no longer.
    pub(super) fn heard(&self) {
        let bytes = self.waiting.swap(0, Ordering::Relaxed);
        if bytes == 0 {
            return;
        }
        self.seat.waiting.fetch_sub(bytes, Ordering::Relaxed);
        self.seat.seats.waiting.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.heard();
        let mut state = self.seat.state();
        if self.is_call {
            state.calls -= 1;
        } else {
            state.streams -= 1;
        }
        state.was_used = true;
        state.since = Instant::now();
    }
}

/// An answer, whose call is open until the last of it is sent.
pub(super) struct OpenBody {
    body: Body,
    open: Arc<Open>,
}

impl OpenBody {
    pub(super) fn new(body: Body, open: Arc<Open>) -> Self {
        open.heard();
        // Of a stream, there are small messages now and then.
        if open.is_call {
            open.waits(ANSWER);
        }
        Self { body, open }
    }
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

#[cfg(test)]
mod tests {
    use std::sync::{Arc, atomic::Ordering};

    use http::{HeaderMap, HeaderValue};

    use super::{MOST_WAITING, Open, Seats};

    #[test]
    fn whoever_lets_the_most_wait_goes_when_it_is_too_much() {
        let seats = Arc::new(Seats::default());
        let [few, many] = [seats.seat(), seats.seat()];
        let mut headers = HeaderMap::new();
        headers.insert(
            "authorization",
            HeaderValue::from_str(&"x".repeat(7_000)).unwrap(),
        );
        let few_open: Vec<_> = (0..10).map(|_| few.stream(&headers)).collect();
        let mut open: Vec<Open> = Vec::new();
        while seats.waiting.load(Ordering::Relaxed) < MOST_WAITING {
            assert!(!many.ended().is_cancelled());
            open.push(many.stream(&headers));
        }
        // Whose it is that is too much does not matter.
        few_open[0].waits(1);
        assert!(many.ended().is_cancelled());
        assert!(!few.ended().is_cancelled());
        // Until it is gone nobody else has to go.
        few_open[0].waits(1);
        assert!(!few.ended().is_cancelled());

        for open in &open {
            open.heard();
        }
        drop((open, few_open));
        assert_eq!(seats.waiting.load(Ordering::Relaxed), 0);
        assert_eq!(many.waiting.load(Ordering::Relaxed), 0);
    }
}
