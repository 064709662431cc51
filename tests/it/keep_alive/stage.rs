//! Streams that are read with patience, and whose ends are never OK.

use std::time::{Duration, Instant};

use fencepost_proto::v1::{KeepAliveRequest, KeepAliveResponse, Lock};
use fencepost_support::{
    calls::{acquire, expect_error, span, time},
    server::Client,
    wait::{PATIENCE, within},
};
use tonic::{Code, Status, Streaming};

/// What a stream is opened with for a lease: nothing set that may be unset.
pub(crate) fn request(lock: &Lock) -> KeepAliveRequest {
    KeepAliveRequest {
        resource: lock.resource.clone(),
        owner: lock.owner.clone(),
        fencing_token: lock.fencing_token,
        ttl: None,
        max_duration: None,
    }
}

/// The same, with a limit to the stream's time.
pub(crate) fn request_for(lock: &Lock, max_duration: Duration) -> KeepAliveRequest {
    KeepAliveRequest {
        max_duration: Some(fencepost_support::calls::duration(max_duration)),
        ..request(lock)
    }
}

/// An open stream.
#[derive(Debug)]
pub(crate) struct Stream(Streaming<KeepAliveResponse>);

/// One message, every field of which must be there.
#[derive(Clone, Debug)]
pub(crate) struct Renewal {
    pub(crate) lock: Lock,
    pub(crate) slack: Duration,
    pub(crate) stream_remaining: Duration,
    pub(crate) at: Instant,
}

impl Renewal {
    /// When the renewal landed, on the database's clock. Only for one that
    /// made the lease longer.
    pub(crate) fn landed(&self) -> std::time::SystemTime {
        time(self.lock.expires_at) - span(self.lock.ttl)
    }

    /// How long the holder may count on the lease, as far as it can know.
    pub(crate) fn deadline(&self) -> Instant {
        self.at + span(self.lock.remaining)
    }
}

impl Stream {
    /// Opens a stream that must be taken.
    pub(crate) async fn open(client: &mut Client, request: KeepAliveRequest) -> Self {
        Self::try_open(client, request).await.unwrap()
    }

    /// Opens a stream.
    pub(crate) async fn try_open(
        client: &mut Client,
        request: impl tonic::IntoRequest<KeepAliveRequest>,
    ) -> Result<Self, Status> {
        Ok(Self(client.keep_alive(request).await?.into_inner()))
    }

    /// The next renewal, or the end, which is never OK.
    pub(crate) async fn try_next(&mut self) -> Result<Renewal, Status> {
        let message = tokio::time::timeout(PATIENCE, self.0.message()).await;
        let message = message.unwrap_or_else(|_| panic!("nothing for {PATIENCE:?}"))?;
        let message = message.expect("a stream never ends OK");
        Ok(Renewal {
            lock: message.lock.expect("a renewal carries the lease"),
            slack: span(message.slack),
            stream_remaining: span(message.stream_remaining),
            at: Instant::now(),
        })
    }

    /// The next renewal.
    pub(crate) async fn next(&mut self) -> Renewal {
        match self.try_next().await {
            Ok(renewal) => renewal,
            Err(status) => panic!("the stream ended: {status:?}"),
        }
    }

    /// Reads on to the end. Returns how often the lease was renewed until then.
    pub(crate) async fn end(&mut self) -> (usize, Status) {
        let mut renewals = 0;
        loop {
            match self.try_next().await {
                Ok(_) => renewals += 1,
                Err(status) => return (renewals, status),
            }
        }
    }

    /// Reads on to the end, which must be this one.
    pub(crate) async fn expect_end(&mut self, code: Code, reason: &str) -> Status {
        expect_error(Err::<(), _>(self.end().await.1), code, reason)
    }
}

/// How long after `since` another owner gets the lock; at most `bound`.
pub(crate) async fn free_within(
    client: &mut Client,
    name: &str,
    since: Instant,
    bound: Duration,
) -> Duration {
    // What an answer takes on a busy machine is not part of the bound.
    let patience = (bound + Duration::from_millis(1500)).saturating_sub(since.elapsed());
    within(patience, "another owner gets the lock", async || {
        let answer = acquire(client, name, "another", Duration::from_secs(60)).await;
        answer.unwrap().acquired.then_some(())
    })
    .await;
    since.elapsed()
}
