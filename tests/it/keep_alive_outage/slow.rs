//! A database that answers slowly, and rows that somebody else has locked.

use std::time::{Duration, Instant};

use fencepost_proto::v1::KeepAliveRequest;
use fencepost_support::{
    Server,
    calls::{duration, granted, release},
    postgres::fresh_database,
    row_lock::RowLock,
};
use tokio::{task::JoinSet, time::sleep};
use tonic::Code;

use super::behind_proxy;
use crate::keep_alive::stage::{
    Report, Stream, follow, follow_all, leases, open_many, request_for,
};

/// What others may be late on a busy machine.
const TOLERANCE: Duration = Duration::from_millis(600);

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_is_locked_delays_its_own_stream_alone() {
    let ttl = Duration::from_secs(5);
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let mut client = server.client().await;
    let others = open_many(&mut client, &database, "other", 50, ttl).await;
    let mut locked = open_many(&mut client, &database, "locked", 1, ttl).await;
    let row = RowLock::hold(&database.url(), "locked-1").await;
    let until = Instant::now() + Duration::from_secs(9);
    let others = follow_all(others, until);
    let locked = tokio::spawn(follow(locked.remove(0), until));
    // Most of a lease, in which it is due twice.
    sleep(Duration::from_millis(2500)).await;
    row.rollback().await;
    let locked = locked.await.unwrap();
    locked.assert_kept("the locked one");
    let others = others.join_all().await;
    let (renewals, tightest, longest) = Report::sum(&others);
    println!(
        "the locked one: {:?} of silence, {:?} left; {renewals} renewals of the others, \
         {longest:?} and {tightest:?}",
        locked.longest, locked.tightest
    );
    assert!(locked.longest > Duration::from_millis(2400), "{locked:?}");
    assert!(locked.tightest < ttl - Duration::from_millis(2400));
    for other in &others {
        other.assert_kept("another");
    }
    assert!(longest < ttl / 3 + TOLERANCE, "{longest:?}");
}

/// More than are waited for at a time: they take turns, and nobody else waits.
#[tokio::test(flavor = "multi_thread")]
async fn many_locked_rows_delay_nobody_else() {
    const LOCKED: usize = 150;
    let ttl = Duration::from_secs(6);
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let mut client = server.client().await;
    let others = open_many(&mut client, &database, "other", 50, ttl).await;
    let locked = open_many(&mut client, &database, "locked", LOCKED, ttl).await;
    let admin = database.client().await;
    let until = Instant::now() + Duration::from_secs(10);
    let others = follow_all(others, until);
    let locked = follow_all(locked, until);
    admin
        .run(
            "BEGIN;
             SELECT 1 FROM fencepost.locks WHERE resource LIKE 'locked-%' FOR UPDATE",
        )
        .await;
    sleep(Duration::from_millis(2500)).await;
    admin.run("ROLLBACK").await;
    let (others, locked) = (others.join_all().await, locked.join_all().await);
    let (renewals, tightest, longest) = Report::sum(&others);
    let (_, locked_tightest, locked_longest) = Report::sum(&locked);
    println!(
        "locked: {locked_longest:?} of silence, {locked_tightest:?} left; {renewals} renewals of \
         the others, {longest:?} and {tightest:?}"
    );
    for report in others.iter().chain(&locked) {
        report.assert_kept("a stream");
    }
    assert!(longest < ttl / 3 + TOLERANCE, "{longest:?}");
}

/// Streams are opened on rows that stay locked, again and again: for longer
/// than any of them waits, and longer than a lock wait in the database.
#[tokio::test(flavor = "multi_thread")]
async fn streams_opened_on_locked_rows_cost_others_nothing() {
    const LOCKED: usize = 120;
    const LENGTH: Duration = Duration::from_secs(7);
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let mut client = server.client().await;
    let short = Duration::from_millis(600);
    let hour = Duration::from_secs(3600);
    let rows = leases(&database, "locked", LOCKED, hour).await;
    let admin = database.client().await;
    admin
        .run("BEGIN; SELECT 1 FROM fencepost.locks WHERE resource LIKE 'locked-%' FOR UPDATE")
        .await;

    let good = open_many(&mut client, &database, "good", 10, short).await;
    let until = Instant::now() + LENGTH;
    let good = follow_all(good, until);
    let locked: JoinSet<_> = rows
        .into_iter()
        .enumerate()
        .map(|(n, lock)| {
            let mut client = client.clone();
            async move {
                let asks = KeepAliveRequest {
                    // Half of them give up long before the database does.
                    ttl: (n % 2 == 0).then(|| duration(short)),
                    ..request_for(&lock, hour)
                };
                let mut ends = 0;
                while Instant::now() < until {
                    let mut stream = Stream::open(&mut client, asks.clone()).await;
                    stream
                        .expect_end(Code::Unavailable, "STORE_UNAVAILABLE")
                        .await;
                    ends += 1;
                }
                ends
            }
        })
        .collect();
    let (mut calls, mut slowest) = (0, Duration::ZERO);
    while Instant::now() < until {
        let asked = Instant::now();
        let token = granted(&mut client, "call", "a", hour).await.fencing_token;
        release(&mut client, "call", "a", token).await.unwrap();
        slowest = slowest.max(asked.elapsed());
        calls += 1;
        sleep(Duration::from_millis(20)).await;
    }
    let good = good.join_all().await;
    let (renewals, tightest, longest) = Report::sum(&good);
    let ends: usize = locked.join_all().await.into_iter().sum();
    println!(
        "{ends} streams ended on {LOCKED} locked rows; {renewals} renewals of the others, \
         {longest:?} of silence, {tightest:?} left; {calls} calls, the slowest {slowest:?}"
    );
    for report in &good {
        report.assert_kept("a stream");
    }
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    admin.run("ROLLBACK").await;
}

/// The most urgent go first, so a slow database costs nobody a lease.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_database_costs_no_lease() {
    let (database, proxy, server) = behind_proxy().await;
    let mut client = server.client().await;
    let short = Duration::from_secs(2);
    let many = open_many(&mut client, &database, "long", 1500, Duration::from_secs(9)).await;
    let urgent = open_many(&mut client, &database, "urgent", 20, short).await;
    let until = Instant::now() + Duration::from_secs(12);
    let many = follow_all(many, until);
    let urgent = follow_all(urgent, until);
    proxy.delay(Duration::from_millis(150));
    let (many, urgent) = (many.join_all().await, urgent.join_all().await);
    let (renewals, tightest, _) = Report::sum(&many);
    let (urgent_renewals, urgent_tightest, urgent_longest) = Report::sum(&urgent);
    println!(
        "300 ms for a statement: {renewals} renewals of 9 s, {tightest:?} left at the tightest; \
         {urgent_renewals} of {short:?}, {urgent_tightest:?} left, {urgent_longest:?} of silence"
    );
    for report in many.iter().chain(&urgent) {
        report.assert_kept("a stream");
    }
    assert!(urgent_tightest > short / 5, "{urgent_tightest:?}");
}

/// All are due at once, and one statement does not hold them all: whose lease
/// ends first goes first, whoever came first.
#[tokio::test(flavor = "multi_thread")]
async fn the_most_urgent_go_first() {
    // A machine that has no time for anybody proves nothing.
    for _ in 0..3 {
        if urgent_in_a_crowd().await.end.is_none() {
            return;
        }
    }
    panic!("the urgent one was lost, three times");
}

async fn urgent_in_a_crowd() -> Report {
    const MANY: usize = 5_000;
    let (database, proxy, server) = behind_proxy().await;
    let mut client = server.client().await;
    let lock = granted(&mut client, "urgent", "a", Duration::from_secs(60)).await;
    let ttl = Duration::from_secs(5);
    let urgent = {
        let asks = KeepAliveRequest {
            ttl: Some(duration(ttl)),
            ..request_for(&lock, Duration::from_secs(60))
        };
        let mut stream = Stream::open(&mut client, asks).await;
        stream.next().await;
        // Ends in five seconds from now on.
        let cut = "UPDATE fencepost.locks SET expires_at = clock_timestamp() + interval '5 s'
                   WHERE resource = 'urgent'";
        database.client().await.run(cut).await;
        // Two renewals with what it has now.
        stream.next().await;
        stream
    };
    let urgent = tokio::spawn(follow(urgent, Instant::now() + Duration::from_secs(9)));
    proxy.delay(Duration::from_millis(200));
    // Every one of them is due at once when it is opened, again and again.
    let mut flood = JoinSet::new();
    let crowd = granted(&mut client, "crowd", "a", Duration::from_secs(60)).await;
    for _ in 0..MANY {
        let (mut client, lock) = (client.clone(), crowd.clone());
        flood.spawn(async move {
            let asks = request_for(&lock, Duration::from_secs(60));
            // Its first word: on a slow machine that its time is over.
            let _ = Stream::open(&mut client, asks).await.try_next().await;
        });
    }
    let begun = Instant::now();
    flood.join_all().await;
    println!("{MANY} first words took {:?}", begun.elapsed());
    let urgent = urgent.await.unwrap();
    println!(
        "the urgent one meanwhile: {:?} of silence, {:?} left of {ttl:?}",
        urgent.longest, urgent.tightest
    );
    urgent
}

/// All of them are due again and again while nobody can renew them.
#[tokio::test(flavor = "multi_thread")]
async fn many_streams_do_not_besiege_an_absent_database() {
    let (database, proxy, server) = behind_proxy().await;
    let mut client = server.client().await;
    let ttl = Duration::from_secs(9);
    let streams = open_many(&mut client, &database, "many", 2_000, ttl).await;
    let streams = follow_all(streams, Instant::now() + Duration::from_secs(9));
    sleep(Duration::from_secs(1)).await;
    proxy.refuse().await;
    proxy.reset().await;
    // Until all of them are overdue.
    sleep(Duration::from_secs(2)).await;
    let (began, before) = (Instant::now(), server.cpu_time());
    sleep(Duration::from_secs(2)).await;
    let used = (server.cpu_time() - before).as_secs_f64() / began.elapsed().as_secs_f64();
    proxy.forward().await;
    let streams = streams.join_all().await;
    println!("{:.0} % of a core while the database is away", used * 100.0);
    for stream in &streams {
        stream.assert_kept("a stream");
    }
    assert!(used < 0.4, "{used} of a core");
}
