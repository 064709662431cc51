//! Streams that are read with patience, and whose ends are never OK.

use std::time::{Duration, Instant};

use fencepost_proto::v1::{KeepAliveRequest, KeepAliveResponse, Lock};
use fencepost_support::{
    calls::{acquire, expect_error, span, time},
    postgres::Database,
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
pub(crate) struct Stream {
    messages: Streaming<KeepAliveResponse>,
    last: Option<Renewal>,
}

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
        Ok(Self {
            messages: client.keep_alive(request).await?.into_inner(),
            last: None,
        })
    }

    /// The next renewal, or the end, which is never OK.
    pub(crate) async fn try_next(&mut self) -> Result<Renewal, Status> {
        let message = tokio::time::timeout(PATIENCE, self.messages.message()).await;
        let message = message.unwrap_or_else(|_| panic!("nothing for {PATIENCE:?}"))?;
        let message = message.expect("a stream never ends OK");
        let renewal = Renewal {
            lock: message.lock.expect("a renewal carries the lease"),
            slack: span(message.slack),
            stream_remaining: span(message.stream_remaining),
            at: Instant::now(),
        };
        self.last = Some(renewal.clone());
        Ok(renewal)
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

/// What a reader saw of a stream.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) renewals: usize,
    /// The least that was left of the lease when a renewal landed.
    pub(crate) tightest: Duration,
    /// The longest time without a message.
    pub(crate) longest: Duration,
    pub(crate) end: Option<End>,
}

/// A stream's end, seen by its reader.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) status: Status,
    /// How much of the lease was left to stop in, as far as the reader knew.
    pub(crate) left: Option<Duration>,
}

impl Report {
    /// Expects that the stream went on to the end of the test.
    #[track_caller]
    pub(crate) fn assert_kept(&self, what: &str) {
        if let Some(end) = &self.end {
            panic!("{what} ended: {:?}, {self:?}", end.status);
        }
    }

    /// Of several: all renewals, the tightest and the longest.
    pub(crate) fn sum(reports: &[Self]) -> (usize, Duration, Duration) {
        (
            reports.iter().map(|report| report.renewals).sum(),
            reports.iter().map(|report| report.tightest).min().unwrap(),
            reports.iter().map(|report| report.longest).max().unwrap(),
        )
    }
}

/// Reads a stream that is open until it ends or it is `until`.
pub(crate) async fn follow(mut stream: Stream, until: Instant) -> Report {
    let mut report = Report {
        renewals: 0,
        tightest: Duration::MAX,
        longest: Duration::ZERO,
        end: None,
    };
    let mut heard = Instant::now();
    loop {
        let next = tokio::time::timeout_at(until.into(), stream.try_next()).await;
        report.longest = report.longest.max(heard.elapsed());
        heard = Instant::now();
        match next {
            Ok(Ok(renewal)) => {
                report.renewals += 1;
                report.tightest = report.tightest.min(renewal.slack);
            }
            Ok(Err(status)) => {
                let left = stream
                    .last
                    .and_then(|last| last.deadline().checked_duration_since(heard));
                report.end = Some(End { status, left });
                return report;
            }
            Err(_) => return report,
        }
    }
}

/// Live leases, made in the database: thousands are there at once.
pub(crate) async fn leases(
    database: &Database,
    stem: &str,
    count: usize,
    ttl: Duration,
) -> Vec<Lock> {
    let made = database
        .client()
        .await
        .query(
            "INSERT INTO fencepost.locks
             SELECT $1::text || '-' || n, 'a', false, nextval('fencepost.fencing_tokens'), 0,
                    $2::bigint, clock_timestamp(), clock_timestamp() + $2 * interval '1 ms',
                    false, '', gen_random_uuid(), 1, '{}'
               FROM generate_series(1, $3::bigint) AS n
             RETURNING resource, fencing_token",
            &[
                &stem,
                &i64::try_from(ttl.as_millis()).unwrap(),
                &i64::try_from(count).unwrap(),
            ],
        )
        .await
        .unwrap();
    made.iter()
        .map(|row| Lock {
            resource: row.get(0),
            owner: "a".to_owned(),
            fencing_token: row.get(1),
            ..Lock::default()
        })
        .collect()
}

/// Takes `count` locks, opens a stream for each, and waits until all renew.
pub(crate) async fn open_many(
    client: &mut Client,
    database: &Database,
    stem: &str,
    count: usize,
    ttl: Duration,
) -> Vec<Stream> {
    let mut opening = tokio::task::JoinSet::new();
    for lock in leases(database, stem, count, ttl).await {
        let mut client = client.clone();
        opening.spawn(async move {
            let asks = request_for(&lock, Duration::from_secs(300));
            let mut stream = Stream::open(&mut client, asks).await;
            stream.next().await;
            stream
        });
    }
    opening.join_all().await
}

/// Reads many streams at once, each until it ends or it is `until`.
pub(crate) fn follow_all(streams: Vec<Stream>, until: Instant) -> tokio::task::JoinSet<Report> {
    streams
        .into_iter()
        .map(|stream| follow(stream, until))
        .collect()
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
