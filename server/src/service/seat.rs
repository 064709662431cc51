//! The connections that have a place, and what each has open: its calls, from their
//! headers until their answer is sent, and its streams.
//!
//! An answer that its caller does not read stays in memory, and so do the headers of a
//! call whose message does not come. The store's room is free again by then, or not taken
//! yet: so a connection may have only so many calls open, whoever they wait for. KeepAlive
//! streams are not among them: there are many on one connection, and each holds little.
//! Answers are few on all connections together, too: when they are not, whoever has left
//! the most of them unread is disconnected.
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
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Status, body::Body};

/// Calls that a connection may have open. What the store lets one connection have at
/// work comes to about as much.
const MOST: usize = 2_000;

/// Answers that may wait to be sent on all connections. With the most of labels that is
/// some 200 MiB; a server that is busy and well has far less than a thousand.
const MOST_ANSWERS: usize = 20_000;

/// What a connection has for its first call when others wait.
const BEGINNING: Duration = Duration::from_secs(1);

/// What it has between two calls then.
const PAUSE: Duration = Duration::from_secs(60);

/// The connections of one port.
#[derive(Default)]
pub(super) struct Seats {
    seats: Mutex<Vec<Weak<Seat>>>,
    /// Those that wait to be sent.
    answers: AtomicUsize,
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
                answers: 0,
                streams: 0,
                was_used: false,
                since: Instant::now(),
            }),
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

    /// One more answer waits. Who has most of them goes when they are too many.
    fn answer(&self) {
        if self.answers.fetch_add(1, Ordering::Relaxed) < MOST_ANSWERS {
            return;
        }
        let mut leaving = self.leaving.lock().unwrap_or_else(PoisonError::into_inner);
        if leaving.strong_count() > 0 {
            return;
        }
        let seats = self.seats();
        let seats = seats.iter().filter_map(Weak::upgrade);
        if let Some(most) = seats.max_by_key(|seat| seat.state().answers) {
            tracing::warn!(
                answers = most.state().answers,
                "too many answers are not read: whoever has most of them is disconnected"
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
    ended: CancellationToken,
}

struct State {
    /// Those whose answer waits to be sent are among them.
    calls: usize,
    answers: usize,
    streams: usize,
    was_used: bool,
    /// When it came, or had its last call.
    since: Instant,
}

/// A call or a stream that is open, until it is dropped.
pub(super) struct Open {
    seat: Arc<Seat>,
    is_call: bool,
    is_answer: bool,
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
    pub(super) fn stream(self: &Arc<Self>) -> Open {
        self.state().streams += 1;
        let seat = Arc::clone(self);
        Open {
            seat,
            is_call: false,
            is_answer: false,
        }
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
        Some(Open {
            seat,
            is_call: true,
            is_answer: false,
        })
    }
}

impl Open {
    /// The answer is there, and waits to be sent.
    fn answered(mut self) -> Self {
        if self.is_call {
            self.is_answer = true;
            self.seat.state().answers += 1;
            self.seat.seats.answer();
        }
        self
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut state = self.seat.state();
        if self.is_answer {
            state.answers -= 1;
            self.seat.seats.answers.fetch_sub(1, Ordering::Relaxed);
        }
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
    pub(super) fn new(body: Body, open: Open) -> Self {
        let open = Arc::new(open.answered());
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
