//! Many KeepAlive streams, opened at once on one connection: what they cost
//! the server, and whether a renewal came late.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use fencepost_proto::v1::KeepAliveRequest;
use fencepost_support::system::resident_memory;
use serde_json::json;
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint};

use crate::{
    args::{Kind, Scenario},
    cpu::Times,
    load::{Client as _, Failure, Result, Round},
    stats::{Row, rounded},
    systems::{Fencepost, Holder, System as _, TTL_S},
};

/// How long all streams may take to hear of their first renewal.
const OPENING: Duration = Duration::from_secs(60);
/// After the opening, until the account begins.
const SETTLING: Duration = Duration::from_secs(2);

/// What all streams saw.
#[derive(Debug, Default)]
struct Seen {
    opened: AtomicU64,
    renewals: AtomicU64,
    late: AtomicU64,
    died: AtomicU64,
}

/// Holds `streams` leases on a fresh server for `measured`.
pub(crate) async fn measure(streams: usize, measured: Duration) -> Result<Row> {
    let fencepost = Fencepost::start(None).await?;
    let channel = Endpoint::from_shared(format!("http://{}", fencepost.address()))?
        .tcp_nodelay(true)
        // Half of it is h2's budget for small frames, which come in thousands.
        .initial_connection_window_size(16 * 1024 * 1024)
        .connect()
        .await?;
    let holders = acquire(&channel, streams).await?;
    let memory_before = resident_memory(fencepost.server_pid()).unwrap_or_default();

    let seen = Arc::new(Seen::default());
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for holder in holders {
        let seen = Arc::clone(&seen);
        tasks.spawn(async move {
            let error = listen(holder, &seen).await;
            seen.died.fetch_add(1, Relaxed);
            error
        });
    }
    let all = streams as u64;
    while seen.opened.load(Relaxed) + seen.died.load(Relaxed) < all && began.elapsed() < OPENING {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let opening = began.elapsed();

    tokio::time::sleep(SETTLING).await;
    let processes = fencepost.processes();
    let before = Times::read(&processes);
    let renewals_before = seen.renewals.load(Relaxed);
    tokio::time::sleep(measured).await;
    let cpu = Times::read(&processes).since(&before, measured);
    let renewals = seen.renewals.load(Relaxed) - renewals_before;
    let memory = resident_memory(fencepost.server_pid()).unwrap_or_default();
    let (died, late) = (seen.died.load(Relaxed), seen.late.load(Relaxed));
    let unopened = all.saturating_sub(seen.opened.load(Relaxed));

    let mut row = Row::new(Kind::Fencepost, Scenario::Keepalive, streams, Vec::new());
    if died > 0
        && let Some(Ok(error)) = tasks.join_next().await
    {
        row.notes.push(format!("a stream ended: {error}"));
    }
    let server_cpu = cpu
        .iter()
        .find(|(name, _)| *name == "server")
        .map(|(_, percent)| *percent);
    row.rounds.push(Round {
        cycles_per_s: renewals as f64 / measured.as_secs_f64(),
        errors: died + unopened,
        cpu,
        ..Round::default()
    });
    let kib_a_stream = memory.saturating_sub(memory_before) as f64 / streams as f64;
    let mut set = |key: &str, value| row.extra.insert(key.to_owned(), value);
    set("server_cpu_percent", rounded(server_cpu));
    set("server_rss_mib", rounded(Some(memory as f64 / 1024.0)));
    set("kib_per_stream", rounded(Some(kib_a_stream)));
    set("opened_ms", rounded(Some(opening.as_secs_f64() * 1e3)));
    set("renewals_late", json!(late));
    set("streams_died", json!(died));
    set("streams_never_renewed", json!(unopened));
    Ok(row)
}

/// Leases of as many names, acquired side by side.
async fn acquire(channel: &Channel, count: usize) -> Result<Vec<Holder>> {
    const SIDE_BY_SIDE: usize = 256;
    let mut tasks = JoinSet::new();
    for first in 0..SIDE_BY_SIDE {
        let channel = channel.clone();
        tasks.spawn(async move {
            let mut holders = Vec::new();
            for n in (first..count).step_by(SIDE_BY_SIDE) {
                let mut holder = Holder::new(&channel, format!("kept-{n}"), n);
                holder.acquire().await?;
                holders.push(holder);
            }
            Ok::<_, Failure>(holders)
        });
    }
    let mut all = Vec::with_capacity(count);
    while let Some(holders) = tasks.join_next().await {
        all.extend(holders??);
    }
    Ok(all)
}

/// Listens until the stream ends, which it should not; returns why it did.
async fn listen(mut holder: Holder, seen: &Seen) -> String {
    let request = KeepAliveRequest {
        resource: holder.resource,
        owner: holder.owner,
        fencing_token: holder.fencing_token,
        ..KeepAliveRequest::default()
    };
    let mut stream = match holder.stub.keep_alive(request).await {
        Ok(answer) => answer.into_inner(),
        Err(status) => return status.to_string(),
    };
    let mut is_first = true;
    loop {
        match stream.message().await {
            // What was left at the first says when the lease was acquired.
            Ok(Some(_)) if is_first => {
                is_first = false;
                seen.opened.fetch_add(1, Relaxed);
            }
            Ok(Some(renewed)) => {
                seen.renewals.fetch_add(1, Relaxed);
                let slack = renewed.slack.map_or(0, |slack| slack.seconds);
                let is_late = slack < i64::from(TTL_S) / 2;
                seen.late.fetch_add(is_late.into(), Relaxed);
            }
            Ok(None) => return "without a status".to_owned(),
            Err(status) => return status.to_string(),
        }
    }
}
