//! One call, however many attempts it takes.
//!
//! A call has a time budget. Attempts go to the endpoints in turn, the one that
//! answered last first; when each has failed once there is a pause, and the
//! round begins again. When the budget is used up, the most telling of their last
//! failures is that of the call. An attempt gets its share of what is left of the budget,
//! so that a server that hangs does not use up the others' time. Only errors
//! that are transient are tried again, with the very same message.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use fencepost_proto::v1::lock_service_client::LockServiceClient;
use fencepost_tls::ClientTls;
use tokio::time::{Instant, error::Elapsed, sleep, timeout};
use tonic::{
    Request, Response, Status, Streaming, metadata::AsciiMetadataValue, transport::Channel,
};
use tonic_types::StatusExt as _;

use crate::{
    Error,
    clock::Moment,
    connect::Trouble,
    decode::{Origin, decode, never_sent, origin, timed_out},
    endpoints::Address,
    failures::Failures,
};

pub(crate) type Stub = LockServiceClient<Channel>;

/// The pause after the first round; it doubles from round to round.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause of our own accord. A server may ask for a longer one.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// No answer for this long says something of the connection, and not only of the
/// time that there was.
const LONG: Duration = Duration::from_secs(2);

/// HTTP/2 libraries allow small frames up to half of this window, and end a
/// connection on which thousands of streams speak at once beyond it.
const STREAMS_WINDOW: u32 = 16 * 1024 * 1024;

/// What a call may take, and the trace that it belongs to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Budget<'a> {
    pub(crate) time: Duration,
    pub(crate) traceparent: Option<&'a AsciiMetadataValue>,
}

impl Budget<'_> {
    fn request<Q>(self, message: Q) -> Request<Q> {
        let mut request = Request::new(message);
        if let Some(traceparent) = self.traceparent {
            let metadata = request.metadata_mut();
            metadata.insert("traceparent", traceparent.clone());
        }
        request
    }
}

/// An answer, with what the caller needs to judge it.
#[derive(Debug)]
pub(crate) struct Answer<T> {
    pub(crate) message: T,
    /// Just before the request was sent.
    pub(crate) sent: Moment,
}

/// A stream that a server has taken.
#[derive(Debug)]
pub(crate) struct Opened<T> {
    pub(crate) messages: Streaming<T>,
    /// Just before it was asked for.
    pub(crate) asked: Moment,
    /// Which of the servers it was.
    pub(crate) server: usize,
}

/// A failure of the whole call.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) error: Error,
    /// Whether an attempt before the last one may have done it.
    pub(crate) maybe_done_before: bool,
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        failure.error
    }
}

/// The servers, and which of them answered last.
#[derive(Debug)]
pub(crate) struct Servers {
    channels: Vec<Line>,
    /// Connections for streams alone: enough calls that are cancelled at once
    /// kill the connection they are on.
    streams: Vec<Line>,
    preferred: AtomicUsize,
    preferred_for_streams: AtomicUsize,
}

/// What leads to a server, and can be laid anew.
///
/// A channel connects again by itself, but one was seen that answered nothing ever
/// again, with no connection at all: after thousands of cancelled calls and of
/// connections that were cut under them. So one that let a call wait for long is
/// not asked again; calls that are under way keep it until they end.
#[derive(Debug)]
struct Line {
    address: Address,
    connect_timeout: Duration,
    tls: Option<Arc<ClientTls>>,
    trouble: Trouble,
    /// With how many there were before.
    channel: Mutex<(u64, Channel)>,
}

impl Line {
    fn new(address: Address, connect_timeout: Duration, tls: Option<&Arc<ClientTls>>) -> Self {
        let trouble = Trouble::default();
        let channel = address.connect_lazy(connect_timeout, tls, &trouble);
        Self {
            address,
            connect_timeout,
            tls: tls.cloned(),
            trouble,
            channel: Mutex::new((0, channel)),
        }
    }

    fn get(&self) -> (u64, Channel) {
        let channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        channel.clone()
    }

    /// A call had no answer on the channel of this number, for so long.
    fn timed_out(&self, number: u64, limit: Duration) {
        let mut channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        if limit >= LONG && channel.0 == number {
            let (limit, tls) = (self.connect_timeout, self.tls.as_ref());
            let anew = self.address.connect_lazy(limit, tls, &self.trouble);
            *channel = (number + 1, anew);
        }
    }

    /// What the failure of a call means that went this way; of one without an answer it
    /// is told whose.
    fn error(&self, status: Option<&Status>) -> Error {
        let Some(status) = status else {
            return Error::TimedOut;
        };
        match decode(status) {
            Error::Unavailable { detail } if origin(status) == Origin::Connection => {
                let name = &self.address.name;
                let detail = if never_sent(status) {
                    format!("no connection to {name}: {detail}")
                } else if let Some(trouble) = self.trouble.last() {
                    format!("no connection to {name}: {trouble}")
                } else {
                    format!("no answer from {name}: {detail}")
                };
                Error::Unavailable { detail }
            }
            error => error,
        }
    }
}

impl Servers {
    /// Connects nothing yet.
    pub(crate) fn new(
        addresses: &[Address],
        connect_timeout: Duration,
        tls: Option<&Arc<ClientTls>>,
    ) -> Self {
        let line = |address| Line::new(address, connect_timeout, tls);
        let for_streams = |address: &Address| {
            let endpoint = address.endpoint.clone();
            line(Address {
                endpoint: endpoint.initial_connection_window_size(STREAMS_WINDOW),
                ..address.clone()
            })
        };
        Self {
            channels: addresses.iter().cloned().map(line).collect(),
            streams: addresses.iter().map(for_streams).collect(),
            preferred: AtomicUsize::new(0),
            preferred_for_streams: AtomicUsize::new(0),
        }
    }

    /// Opens a stream with `method` at the first endpoint that takes it. Only the
    /// opening has a time limit.
    pub(crate) async fn open<Q: Clone, A>(
        &self,
        budget: Budget<'_>,
        message: Q,
        method: impl AsyncFn(Stub, Request<Q>) -> Result<Response<Streaming<A>>, Status>,
    ) -> Result<Opened<A>, Error> {
        let deadline = Instant::now() + budget.time;
        let first = self.preferred_for_streams.load(Ordering::Relaxed);
        let mut failures = Failures::of(self.channels.len());
        for attempt in 0..self.channels.len() {
            let index = (first + attempt) % self.channels.len();
            let limit = share(deadline, self.channels.len() - attempt);
            let asked = Moment::now();
            let line = &self.streams[index];
            let channel = line.get();
            let stub = Stub::new(channel.1);
            let request = budget.request(message.clone());
            let status = match in_time(timeout(limit, method(stub, request)).await) {
                Ok(response) => {
                    return Ok(Opened {
                        messages: response.into_inner(),
                        asked,
                        server: index,
                    });
                }
                Err(status) => status,
            };
            if status.is_none() {
                line.timed_out(channel.0, limit);
            }
            self.stream_failed(index);
            let error = line.error(status.as_ref());
            if is_final(&error) {
                return Err(error);
            }
            failures.failed(index, status.as_ref(), error);
        }
        Err(failures.most_telling())
    }

    /// The next stream begins elsewhere: a server may take one, and not be able
    /// to renew.
    pub(crate) fn stream_failed(&self, server: usize) {
        let next = (server + 1) % self.streams.len();
        // Unless another stream has said so before.
        let _: Result<usize, usize> = self.preferred_for_streams.compare_exchange(
            server,
            next,
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
    }

    /// Calls `method` with `message` until it is answered, fails for good, or
    /// the budget is used up.
    pub(crate) async fn call<Q: Clone, A>(
        &self,
        budget: Budget<'_>,
        message: Q,
        method: impl AsyncFn(Stub, Request<Q>) -> Result<Response<A>, Status>,
    ) -> Result<Answer<A>, Failure> {
        let deadline = Instant::now() + budget.time;
        let first = self.preferred.load(Ordering::Relaxed);
        let mut failures = Failures::of(self.channels.len());
        let mut maybe_done_before = false;
        let mut attempt = 0;
        // How many of this round.
        let mut rejections = 0;
        loop {
            let index = (first + attempt) % self.channels.len();
            // Of this round.
            let untried = self.channels.len() - attempt % self.channels.len();
            let limit = share(deadline, untried);
            // A timer is late by up to a tick, and an answer may be faster.
            if limit.is_zero() {
                return Err(Failure {
                    error: failures.most_telling(),
                    maybe_done_before,
                });
            }
            let mut request = budget.request(message.clone());
            request.set_timeout(limit);

            let sent = Moment::now();
            let line = &self.channels[index];
            let channel = line.get();
            let stub = Stub::new(channel.1);
            let status = match in_time(timeout(limit, method(stub, request)).await) {
                Ok(response) => {
                    self.preferred.store(index, Ordering::Relaxed);
                    return Ok(Answer {
                        message: response.into_inner(),
                        sent,
                    });
                }
                Err(status) => status,
            };
            if status.is_none() {
                line.timed_out(channel.0, limit);
            }
            let status = status.as_ref();
            let error = line.error(status);

            attempt += 1;
            let pause = pause_after(attempt, self.channels.len(), status.and_then(wish));
            let over = deadline.saturating_duration_since(Instant::now()) <= pause;
            rejections += usize::from(is_of_one_server(&error));
            let rejected_by_all = rejections == self.channels.len();
            if is_final(&error) || rejected_by_all {
                return Err(Failure {
                    error,
                    maybe_done_before,
                });
            }
            failures.failed(index, status, error);
            if over {
                return Err(Failure {
                    error: failures.most_telling(),
                    maybe_done_before,
                });
            }
            maybe_done_before |= !status.is_some_and(never_sent);
            if untried == 1 {
                rejections = 0;
            }
            sleep(pause).await;
        }
    }
}

/// None in place of a status: no answer.
fn in_time<T>(outcome: Result<Result<T, Status>, Elapsed>) -> Result<T, Option<Status>> {
    match outcome {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(status)) if !timed_out(&status) => Err(Some(status)),
        Ok(Err(_)) | Err(_) => Err(None),
    }
}

/// Whether no other server would say otherwise.
fn is_final(error: &Error) -> bool {
    !error.is_transient() && !is_of_one_server(error)
}

/// What answers there may not be one of the servers at all, any longer.
fn is_of_one_server(error: &Error) -> bool {
    matches!(error, Error::Rejected { .. })
}

/// An equal share of the time that is left.
fn share(deadline: Instant, among: usize) -> Duration {
    let left = deadline.saturating_duration_since(Instant::now());
    left / u32::try_from(among).unwrap_or(u32::MAX)
}

/// How long the server asks to be left alone.
fn wish(status: &Status) -> Option<Duration> {
    status.get_details_retry_info()?.retry_delay
}

/// None within a round; between rounds at least what the server asked for, and
/// jittered, so that the clients of a failed server do not come back together.
fn pause_after(attempts: usize, servers: usize, wish: Option<Duration>) -> Duration {
    if !attempts.is_multiple_of(servers) {
        return Duration::ZERO;
    }
    let doublings = u32::try_from(attempts / servers - 1)
        .unwrap_or(u32::MAX)
        .min(8);
    let own = (FIRST_PAUSE * 2_u32.pow(doublings)).min(LONGEST_PAUSE);
    let base = wish.unwrap_or_default().max(own);
    base + own.mul_f64(rand::random_range(0.0..0.5))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses() {
        assert_eq!(pause_after(1, 3, Some(LONGEST_PAUSE)), Duration::ZERO);
        for (attempts, least) in [(3, 50), (6, 100), (9, 200), (300, 1000)] {
            let least = Duration::from_millis(least);
            let pause = pause_after(attempts, 3, None);
            assert!(pause >= least && pause <= least.mul_f64(1.5), "{pause:?}");
        }
        let asked = Duration::from_secs(2);
        assert!(pause_after(1, 1, Some(asked)) >= asked);
    }
}
