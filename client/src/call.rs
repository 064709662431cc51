//! One call, however many attempts it takes.
//!
//! A call has a time budget. Attempts go to the endpoints in turn, the one that
//! answered last first; when each has failed once there is a pause, and the
//! round begins again. An attempt gets its share of what is left of the budget,
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
use tokio::time::{Instant, sleep, timeout};
use tonic::{
    Request, Response, Status, Streaming, metadata::AsciiMetadataValue, transport::Channel,
};
use tonic_types::StatusExt as _;

use crate::{
    Error,
    clock::Moment,
    decode::{decode, never_sent},
    endpoints::Address,
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
    names: Vec<String>,
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
    /// With how many there were before.
    channel: Mutex<(u64, Channel)>,
}

impl Line {
    fn new(address: Address, connect_timeout: Duration, tls: Option<&Arc<ClientTls>>) -> Self {
        let channel = address.connect_lazy(connect_timeout, tls);
        Self {
            address,
            connect_timeout,
            tls: tls.cloned(),
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
            let anew = self
                .address
                .connect_lazy(self.connect_timeout, self.tls.as_ref());
            *channel = (number + 1, anew);
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
            names: addresses
                .iter()
                .map(|address| address.name.clone())
                .collect(),
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
        let mut last = Error::TimedOut;
        for attempt in 0..self.channels.len() {
            let index = (first + attempt) % self.channels.len();
            let limit = share(deadline, self.channels.len() - attempt);
            let asked = Moment::now();
            let channel = self.streams[index].get();
            let stub = Stub::new(channel.1);
            match timeout(limit, method(stub, budget.request(message.clone()))).await {
                Ok(Ok(response)) => {
                    return Ok(Opened {
                        messages: response.into_inner(),
                        asked,
                        server: index,
                    });
                }
                Ok(Err(status)) => last = self.error(index, &status),
                Err(_elapsed) => {
                    self.streams[index].timed_out(channel.0, limit);
                    last = Error::TimedOut;
                }
            }
            self.stream_failed(index);
            if !last.is_transient() && !is_of_one_server(&last) {
                break;
            }
        }
        Err(last)
    }

    /// What a status of this server means. A server that is not there has a name.
    fn error(&self, server: usize, status: &Status) -> Error {
        match decode(status) {
            Error::Unavailable { detail } if never_sent(status) => Error::Unavailable {
                detail: format!("no connection to {}: {detail}", self.names[server]),
            },
            error => error,
        }
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
                    error: Error::TimedOut,
                    maybe_done_before,
                });
            }
            let mut request = budget.request(message.clone());
            request.set_timeout(limit);

            let sent = Moment::now();
            let channel = self.channels[index].get();
            let stub = Stub::new(channel.1);
            let outcome = timeout(limit, method(stub, request)).await;
            let (error, was_sent, wish) = match outcome {
                Ok(Ok(response)) => {
                    self.preferred.store(index, Ordering::Relaxed);
                    return Ok(Answer {
                        message: response.into_inner(),
                        sent,
                    });
                }
                Ok(Err(status)) => (
                    self.error(index, &status),
                    !never_sent(&status),
                    wish(&status),
                ),
                Err(_elapsed) => {
                    self.channels[index].timed_out(channel.0, limit);
                    (Error::TimedOut, true, None)
                }
            };

            attempt += 1;
            let pause = pause_after(attempt, self.channels.len(), wish);
            let over = deadline.saturating_duration_since(Instant::now()) <= pause;
            rejections += usize::from(is_of_one_server(&error));
            let rejected_by_all = rejections == self.channels.len();
            let goes_on = error.is_transient() || (is_of_one_server(&error) && !rejected_by_all);
            if over || !goes_on {
                return Err(Failure {
                    error,
                    maybe_done_before,
                });
            }
            maybe_done_before |= was_sent;
            if untried == 1 {
                rejections = 0;
            }
            sleep(pause).await;
        }
    }
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
