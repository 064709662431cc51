//! A stream that renews.
//!
//! A message on a stream may have been under way for any time, so what is left
//! of the lease cannot be counted from its arrival alone. The first renewal is
//! counted from just before the stream was asked for; each later one from there,
//! by how much later it ends on the database's clock. Whichever of that and
//! "from its arrival" is less counts, so that a step of the database's clock
//! promises nothing.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use fencepost_proto::v1;
use tokio::time::{Instant, timeout_at};
use tonic::Streaming;

use crate::{
    Error, Lock,
    call::{Opened, Servers},
    client::Shared,
    clock::Moment,
    decode::decode,
    lease::Confirmation,
    lock::{self, duration},
};

/// The longest time between two renewals.
pub(crate) const LONGEST_INTERVAL: Duration = Duration::from_secs(20);

/// What a stream may be asked for besides its lease.
#[derive(Debug, Clone, Copy, Default)]
#[must_use]
pub struct KeepAliveOptions {
    pub(crate) ttl: Option<Duration>,
    pub(crate) max_duration: Option<Duration>,
}

impl KeepAliveOptions {
    /// How long each renewal makes the lease last. Unset: its own time to live.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// How long the stream renews at most, from the shortest time to live that
    /// the server grants. Unset: the server's default. The server may have a
    /// lower limit; [`Renewal::stream_remaining`] tells.
    pub fn max_duration(mut self, max_duration: Duration) -> Self {
        self.max_duration = Some(max_duration);
        self
    }
}

/// An open stream. While it is polled and the server can, the lease is renewed;
/// dropping it ends that, and leaves the lease to its deadline.
#[derive(Debug)]
pub struct KeepAlive {
    pub(crate) stream: Stream,
    // Keeps the connection.
    pub(crate) _shared: Arc<Shared>,
}

impl KeepAlive {
    /// Waits for the next renewal, within a Tokio runtime. There is no end but an
    /// error, and after one nobody renews; may be dropped and called again.
    ///
    /// The first one comes at once, or the time for a call is over. Another one
    /// comes within two intervals of a third of the TTL, at most 20 s each: the
    /// second is for one that has failed. The server may hang where its connection,
    /// or a proxy, does not; silence for longer is [`TimedOut`](Error::TimedOut).
    ///
    /// # Errors
    ///
    /// [`Lost`](Error::Lost) when the lease is over. After every other error the
    /// lease stands until its deadline: open another stream, or renew.
    pub async fn next(&mut self) -> Result<Renewal, Error> {
        let (renewal, _) = self.stream.next().await?;
        Ok(renewal)
    }
}

/// The same, for the client itself.
#[derive(Debug)]
pub(crate) struct Stream {
    messages: Streaming<v1::KeepAliveResponse>,
    asked: Moment,
    /// Who is told when it fails, and by which number.
    servers: Arc<Servers>,
    server: usize,
    /// When the next word must have come.
    patience: Instant,
    first: Option<First>,
}

/// The renewal that the later ones are counted from.
#[derive(Debug, Clone, Copy)]
struct First {
    /// How long after the stream was asked for the lease ends.
    lasts: Duration,
    expires_at: SystemTime,
}

/// One renewal, as the stream reported it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Renewal {
    /// The lease as renewed; `remaining` counts from the return of
    /// [`KeepAlive::next`].
    pub lock: Lock,
    /// What was left of the old lease when the renewal landed.
    pub slack: Duration,
    /// How long this stream still renews: open the next one before.
    pub stream_remaining: Duration,
}

impl Stream {
    pub(crate) fn new(
        servers: Arc<Servers>,
        opened: Opened<v1::KeepAliveResponse>,
        patience: Instant,
    ) -> Self {
        Self {
            servers,
            messages: opened.messages,
            asked: opened.asked,
            server: opened.server,
            patience,
            first: None,
        }
    }

    /// The next renewal, with the deadline on our clock.
    pub(crate) async fn next(&mut self) -> Result<(Renewal, Confirmation), Error> {
        let word = self.next_word().await;
        if word.as_ref().is_err_and(Error::is_transient) {
            self.servers.stream_failed(self.server);
        }
        word
    }

    async fn next_word(&mut self) -> Result<(Renewal, Confirmation), Error> {
        let message = timeout_at(self.patience, self.messages.message())
            .await
            .map_err(|_elapsed| Error::TimedOut)?;
        let arrived = Moment::now();
        let message = match message {
            Ok(Some(message)) => message,
            // No server of ours ends a stream well.
            Ok(None) => {
                return Err(Error::Unavailable {
                    detail: "the stream ended without a word".to_owned(),
                });
            }
            Err(status) => return Err(decode(&status)),
        };
        let (mut lock, as_if_sent_now) = lock::lock(message.lock, arrived)?;
        self.patience = Instant::now() + (lock.ttl / 3).min(LONGEST_INTERVAL) * 2;
        let lasts = match self.first {
            None => {
                let lasts = as_if_sent_now.until.since(arrived);
                self.first = Some(First {
                    lasts,
                    expires_at: lock.expires_at,
                });
                lasts
            }
            // A renewal never ends earlier than the one before.
            Some(first) => {
                let later = lock.expires_at.duration_since(first.expires_at);
                first.lasts + later.unwrap_or_default()
            }
        };
        let until = (self.asked + lasts).min(as_if_sent_now.until);
        lock.remaining = until.since(Moment::now());
        let confirmation = Confirmation {
            seen: arrived,
            until,
            ttl: lock.ttl,
        };
        let renewal = Renewal {
            lock,
            slack: duration(message.slack, "slack")?,
            stream_remaining: duration(message.stream_remaining, "stream_remaining")?,
        };
        Ok((renewal, confirmation))
    }
}
