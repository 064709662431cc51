//! One case: the lease before, the session that locks its row, the call, and
//! what is made of the answer.

use std::time::{Duration, Instant};

use fencepost_proto::v1::{AcquireResponse, Lock};
use fencepost_support::{
    Server,
    calls::{acquire, expect_retryable, get, granted, reason, release, renew, span},
    postgres::{Client as Psql, Database, fresh_database},
    server::Client,
};
use tokio::task::JoinSet;
use tonic::{Code, Status};

use super::{Before, Call, Case, HOLD, LONG, Truth};

/// How long an answer may take to arrive on a busy machine: what it says of the
/// time left was true when it was sent.
const TRANSIT: Duration = Duration::from_millis(150);

/// The budget of a call, and a second on top.
const BOUND: Duration = Duration::from_secs(6);

/// Two replicas on one database; the second gives the second look.
pub(super) struct Pair {
    database: Database,
    first: Server,
    second: Server,
}

impl Pair {
    pub(super) async fn start() -> Self {
        let database = fresh_database().await;
        let builder = Server::builder(&database.url()).flag("--database-pool-size", "24");
        let first = builder.start().await;
        let second = Server::start(&database.url()).await;
        first.wait_ready().await;
        Self {
            database,
            first,
            second,
        }
    }

    /// Runs the cases side by side, each on a name of its own. An error in
    /// time is allowed, but not as the answer to everything.
    pub(super) async fn run(&self, cases: &[Case]) {
        let mut tasks = JoinSet::new();
        for (n, &case) in cases.iter().enumerate() {
            let sides = (self.first.client().await, self.second.client().await);
            let psql = self.database.client().await;
            let observer = self.database.client().await;
            tasks
                .spawn(async move { one(case, &format!("case-{n}"), sides, psql, observer).await });
        }
        let answered = tasks.join_all().await;
        let errors = answered.iter().filter(|answered| !**answered).count();
        assert!(
            errors * 3 <= cases.len(),
            "{errors} of {} cases ended in an error",
            cases.len()
        );
    }
}

/// True when the call was answered by something else than an error in time.
async fn one(
    case: Case,
    name: &str,
    (mut first, mut second): (Client, Client),
    psql: Psql,
    observer: Psql,
) -> bool {
    let (before, statement, end, call, truth) = case;
    let token = prepare(&mut second, name, before).await;
    psql.run("BEGIN").await;
    psql.run(&statement.replace("$R", name)).await;

    let sent = Instant::now();
    let asked = tokio::spawn({
        let name = name.to_owned();
        async move {
            let answer = ask(&mut first, &name, call, token).await;
            (answer, Instant::now())
        }
    });
    wait_until_it_waits(&psql, &observer).await;
    tokio::time::sleep_until((sent + HOLD).into()).await;
    psql.run(end).await;

    let (answer, arrived) = asked.await.unwrap();
    assert!(arrived - sent < BOUND, "{case:?}: {:?}", arrived - sent);
    if let Err(status) = &answer
        && matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded)
    {
        expect_retryable(status);
        println!("{case:?}: an error in time, after {:?}", arrived - sent);
        return false;
    }
    judge(case, name, answer, arrived, &mut second)
        .await
        .unwrap_or_else(|why| panic!("{case:?}, expected {truth:?}: {why}"));
    true
}

/// Brings the name into its state and returns the token of its lease.
async fn prepare(client: &mut Client, name: &str, before: Before) -> i64 {
    match before {
        Before::Nothing => 0,
        Before::Live(ttl) => granted(client, name, "holder", ttl).await.fencing_token,
        Before::Released => {
            let token = granted(client, name, "holder", LONG).await.fencing_token;
            release(client, name, "holder", token).await.unwrap();
            token
        }
        Before::Expired => {
            let ttl = Duration::from_millis(500);
            let token = granted(client, name, "holder", ttl).await.fencing_token;
            tokio::time::sleep(ttl + Duration::from_millis(50)).await;
            token
        }
    }
}

/// What a call may be answered.
#[derive(Debug)]
enum Answer {
    Acquired(AcquireResponse),
    Renewed(Lock),
    Released,
}

async fn ask(client: &mut Client, name: &str, call: Call, token: i64) -> Result<Answer, Status> {
    match call {
        Call::Acquire(ttl) => acquire(client, name, "taker", ttl)
            .await
            .map(Answer::Acquired),
        Call::Renew(ttl) => renew(client, name, "holder", token, ttl)
            .await
            .map(Answer::Renewed),
        Call::Release => release(client, name, "holder", token)
            .await
            .map(|()| Answer::Released),
    }
}

async fn wait_until_it_waits(psql: &Psql, observer: &Psql) {
    let pid: i32 = psql.value("SELECT pg_backend_pid()").await;
    let count = format!(
        "SELECT count(*) FROM pg_stat_activity
          WHERE wait_event_type = 'Lock' AND {pid} = ANY (pg_blocking_pids(pid))"
    );
    let start = Instant::now();
    while observer.value::<i64>(&count).await == 0 {
        assert!(start.elapsed() < BOUND, "the call never waited for the row");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Compares an answer with the truth, and the truth with the other replica.
async fn judge(
    (_, _, _, call, truth): Case,
    name: &str,
    answer: Result<Answer, Status>,
    arrived: Instant,
    second: &mut Client,
) -> Result<(), String> {
    match (truth, answer) {
        (
            Truth::Granted,
            Ok(Answer::Acquired(AcquireResponse {
                acquired: true,
                lock: Some(lock),
                ..
            })),
        ) => {
            let Call::Acquire(ttl) = call else {
                return Err("not asked for".to_owned());
            };
            hold_true(name, &lock, "taker", arrived, ttl, second).await
        }
        (Truth::Renewed, Ok(Answer::Renewed(lock))) => {
            // A renewal never shortens: what was left may be more.
            hold_true(name, &lock, "holder", arrived, LONG, second).await
        }
        (
            Truth::Held,
            Ok(Answer::Acquired(AcquireResponse {
                acquired: false,
                holder: Some(holder),
                ..
            })),
        ) => {
            let seen = get(second, name).await.map_err(|why| why.to_string())?;
            // Both are a little less than what is really left: the first by
            // the wait, the second by a round trip.
            let left = span(seen.remaining) + arrived.elapsed();
            let told = span(holder.remaining);
            let fits = seen.owner == holder.owner && told <= left && left <= told + HOLD * 2;
            fits.then_some(())
                .ok_or(format!("{holder:?}, then {seen:?}"))
        }
        (Truth::Released, Ok(Answer::Released)) => is_free(name, second).await,
        (Truth::Refused(code, why), Err(status))
            if status.code() == code && reason(&status).as_deref() == Some(why) =>
        {
            match why {
                "NOT_OWNER" => {
                    let seen = get(second, name).await.map_err(|why| why.to_string())?;
                    (seen.owner == "psql")
                        .then_some(())
                        .ok_or(format!("{seen:?}"))
                }
                _ => is_free(name, second).await,
            }
        }
        (_, other) => Err(format!("{other:?}")),
    }
}

/// The lease of an answer is there, and another owner gets it not before its
/// `remaining` is over, and soon after. A long one is tried only for a while.
async fn hold_true(
    name: &str,
    lock: &Lock,
    owner: &str,
    arrived: Instant,
    ttl: Duration,
    second: &mut Client,
) -> Result<(), String> {
    let remaining = span(lock.remaining);
    let seen = get(second, name)
        .await
        .map_err(|why| format!("{lock:?}, then {why}"))?;
    if seen.fencing_token != lock.fencing_token || seen.owner != owner {
        return Err(format!("{lock:?}, then {seen:?}"));
    }
    let deadline = arrived + remaining;
    let patience = remaining.min(Duration::from_secs(2)) + Duration::from_secs(3);
    while arrived.elapsed() < patience {
        let answer = acquire(second, name, "next", ttl).await;
        let now = Instant::now();
        if answer.map_err(|why| why.to_string())?.acquired {
            return (now + TRANSIT >= deadline).then_some(()).ok_or(format!(
                "promised {remaining:?}, taken {:?} after the answer",
                now - arrived
            ));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    (Instant::now() < deadline).then_some(()).ok_or(format!(
        "still held {:?} after the answer that promised {remaining:?}",
        arrived.elapsed()
    ))
}

async fn is_free(name: &str, second: &mut Client) -> Result<(), String> {
    match get(second, name).await {
        Err(status) if status.code() == Code::NotFound => {}
        other => return Err(format!("not free: {other:?}")),
    }
    let answer = acquire(second, name, "next", LONG)
        .await
        .map_err(|why| why.to_string())?;
    answer
        .acquired
        .then_some(())
        .ok_or(format!("not to be had: {answer:?}"))
}
