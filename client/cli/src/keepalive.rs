//! `fencepost keepalive`: renews a lease until it is over, and says so.
//!
//! A stream ends when its time is over; the next one is opened before that, so
//! that the renewals do not pause. When a stream fails the next one is tried, on
//! any of the servers, for as long as the lease can still be held.

use std::time::Duration;

use fencepost_client::{Calls, Error, KeepAlive, KeepAliveOptions, Lock, LostReason};
use humantime::parse_duration;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::{
    args::Lease,
    exit::{Exit, Failure},
    output::Output,
};

/// What `keepalive` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    lease: Lease,

    /// How long each renewal makes the lease last. [default: its own time to live]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    ttl: Option<Duration>,

    /// How long one stream renews before the next is opened; the server cuts it
    /// to its own limit. [default: the server's]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    max_duration: Option<Duration>,
}

/// Between streams that fail.
const PAUSE: Duration = Duration::from_millis(200);

pub(crate) async fn run(
    args: Args,
    client: &Calls,
    timeout: Duration,
    output: &Output,
) -> Result<Exit, Failure> {
    let open = async || {
        let Lease {
            resource,
            owner,
            token,
        } = &args.lease;
        let mut options = KeepAliveOptions::default();
        if let Some(ttl) = args.ttl {
            options = options.ttl(ttl);
        }
        if let Some(max_duration) = args.max_duration {
            options = options.max_duration(max_duration);
        }
        client.keep_alive(resource, owner, *token, options).await
    };
    let mut stream: Option<KeepAlive> = None;
    let mut spoken = false;
    // Before the first renewal it is not known how long the lease lasts.
    let first_by = Instant::now() + timeout;
    let mut deadline: Option<Instant> = None;
    loop {
        let next = async {
            let current = match &mut stream {
                Some(current) => current,
                None => stream.insert(open().await?),
            };
            current.next().await
        };
        let answer = match deadline {
            None => next.await,
            Some(deadline) => match timeout_at(deadline, next).await {
                Ok(answer) => answer,
                Err(_elapsed) => return Err(Failure::Call(unconfirmed())),
            },
        };
        match answer {
            Ok(renewal) => {
                let until = Instant::now() + renewal.lock.remaining;
                deadline = Some(until);
                output.renewal(&renewal)?;
                let last_word = renewal.stream_remaining < longest_silence(&renewal.lock);
                // Never on its first word, or short streams would chase each other.
                if last_word && spoken {
                    // The old one is dropped once the new one is open; when that
                    // fails it has its own time left.
                    if let Ok(Ok(next)) = timeout_at(until, open()).await {
                        stream = Some(next);
                        spoken = false;
                        continue;
                    }
                }
                spoken = true;
            }
            Err(error)
                if error.is_transient()
                    && (deadline.is_some() || Instant::now() + PAUSE < first_by) =>
            {
                output.retry(&error);
                // At once after a stream that has renewed; the next server's turn.
                if !spoken || stream.is_none() {
                    let until = deadline.unwrap_or(first_by);
                    sleep_until(until.min(Instant::now() + PAUSE)).await;
                }
                stream = None;
                spoken = false;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// How long a stream may say nothing: a third of the TTL, at most 20 s, and the
/// same again for a renewal that has to be tried twice.
fn longest_silence(lock: &Lock) -> Duration {
    (lock.ttl / 3).min(Duration::from_secs(20)) * 2
}

fn unconfirmed() -> Error {
    let reason = LostReason::Unconfirmed;
    Error::Lost { reason }
}
