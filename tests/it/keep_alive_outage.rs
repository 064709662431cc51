//! KeepAlive while its database is away, slow, silent or busy: a lease is kept
//! as long as it can be, and its holder is told in time when it cannot.

#![expect(
    clippy::print_stdout,
    reason = "shown when a test fails, or when asked for"
)]

mod slow;

use std::time::{Duration, Instant};

use fencepost_support::{
    Postgres, Server,
    calls::{expect_error, expect_retryable, granted},
    pgbouncer::PgBouncer,
    postgres::{Database, fresh_database},
    proxy::Proxy,
    server::Client,
    wait::within,
};
use tokio::{task::JoinSet, time::sleep};
use tonic::Code;

use crate::keep_alive::stage::{Report, Stream, follow_all, open_many, request_for};

/// A server behind a proxy to its database.
async fn behind_proxy() -> (Database, Proxy, Server) {
    let database = fresh_database().await;
    let proxy = Proxy::start(database.postgres().address()).await;
    let server = Server::start(&Postgres::url_via(proxy.address(), database.name())).await;
    (database, proxy, server)
}

/// How a database is away.
#[derive(Clone, Copy, Debug)]
enum Away {
    /// Connections are reset, and new ones refused.
    Refused,
    /// Packets wait on their way.
    Held,
    /// Packets are lost, and with them the connections they belonged to.
    Swallowed,
}

impl Away {
    async fn begin(self, proxy: &Proxy) {
        match self {
            Self::Refused => {
                proxy.refuse().await;
                proxy.reset().await;
            }
            Self::Held => proxy.hold(),
            Self::Swallowed => proxy.black_hole(),
        }
    }
}

/// Expects leases of this TTL to be kept while the database is away this long.
async fn expect_kept(away: Away, ttl: Duration, length: Duration) {
    let (database, proxy, server) = behind_proxy().await;
    let mut client = server.client().await;
    let streams = open_many(&mut client, &database, "kept", 20, ttl).await;
    let until = Instant::now() + length + ttl * 3 / 2;
    let reports = follow_all(streams, until);
    away.begin(&proxy).await;
    sleep(length).await;
    proxy.forward().await;
    let reports = reports.join_all().await;
    let (renewals, tightest, longest) = Report::sum(&reports);
    println!(
        "{away:?} for {length:?} of {ttl:?}: {renewals} renewals, {tightest:?} left at the \
         tightest, {longest:?} of silence at most"
    );
    for report in &reports {
        report.assert_kept("a stream");
    }
    // The slack shows how close it was.
    assert!(tightest < ttl - length, "{tightest:?}");
    assert!(tightest > Duration::ZERO);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_refuses_for_less_than_a_lease_costs_none() {
    expect_kept(
        Away::Refused,
        Duration::from_secs(5),
        Duration::from_millis(2500),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_stalls_for_less_than_a_lease_costs_none() {
    expect_kept(
        Away::Held,
        Duration::from_secs(5),
        Duration::from_millis(2500),
    )
    .await;
}

/// The connection that renews is dead and nobody says so.
#[tokio::test(flavor = "multi_thread")]
async fn lost_connections_to_the_database_cost_no_lease() {
    expect_kept(
        Away::Swallowed,
        Duration::from_secs(5),
        Duration::from_millis(1500),
    )
    .await;
}

/// Later than a first answer that never came.
#[tokio::test(flavor = "multi_thread")]
async fn lost_connections_do_not_stop_the_renewals_for_long() {
    expect_kept(
        Away::Swallowed,
        Duration::from_secs(12),
        Duration::from_millis(5500),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_crashes_and_recovers_costs_no_lease() {
    let ttl = Duration::from_secs(12);
    let mut postgres = Postgres::start().await;
    let server = Server::start(&postgres.url()).await;
    let mut client = server.client().await;
    let mut streams = Vec::new();
    for n in 0..20 {
        let lock = granted(&mut client, &format!("{n}"), "a", ttl).await;
        let asks = request_for(&lock, Duration::from_secs(60));
        streams.push(Stream::open(&mut client, asks).await);
    }
    let reports = follow_all(streams, Instant::now() + ttl * 3 / 2);
    let down = Instant::now();
    postgres.kill9().await;
    postgres.start_again().await;
    let down = down.elapsed();
    let reports = reports.join_all().await;
    let (renewals, tightest, _) = Report::sum(&reports);
    println!("down for {down:?}: {renewals} renewals, {tightest:?} left at the tightest");
    for report in &reports {
        report.assert_kept("a stream");
    }
}

/// Expects every holder to be told before its lease ends.
async fn expect_told(away: Away) {
    let (database, proxy, server) = behind_proxy().await;
    let mut client = server.client().await;
    let mut streams = Vec::new();
    for ttl in [500, 1000, 2500, 7000] {
        let stem = format!("told-{ttl}");
        streams.extend(
            open_many(
                &mut client,
                &database,
                &stem,
                10,
                Duration::from_millis(ttl),
            )
            .await,
        );
    }
    let reports = follow_all(streams, Instant::now() + Duration::from_secs(15));
    away.begin(&proxy).await;
    let reports = reports.join_all().await;
    let mut least = Duration::MAX;
    for report in reports {
        let end = report.end.expect("nobody can renew");
        let left = end.left.expect("told before the deadline");
        let status = Err::<(), _>(end.status);
        expect_retryable(&expect_error(
            status,
            Code::Unavailable,
            "STORE_UNAVAILABLE",
        ));
        least = least.min(left);
    }
    println!("{away:?}: told {least:?} before the deadline at least");

    // And a stream that is opened now is told so, too.
    let asked = Instant::now();
    let lock = fencepost_proto::v1::Lock {
        resource: "told-7000-1".to_owned(),
        owner: "a".to_owned(),
        fencing_token: 1,
        ..Default::default()
    };
    let asks = request_for(&lock, Duration::from_secs(60));
    let mut stream = Stream::open(&mut client, asks).await;
    stream
        .expect_end(Code::Unavailable, "STORE_UNAVAILABLE")
        .await;
    let took = asked.elapsed();
    println!("{away:?}: a new stream is told after {took:?}");
    assert!(took < Duration::from_secs(7), "{took:?}");

    proxy.forward().await;
    server.wait_ready().await;
    let mut again = open_many(&mut client, &database, "again", 5, Duration::from_secs(5)).await;
    for stream in &mut again {
        stream.next().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_refuses_for_longer_ends_streams_before_the_deadline() {
    expect_told(Away::Refused).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_database_ends_streams_before_the_deadline() {
    expect_told(Away::Swallowed).await;
}

/// A renewal that a crash would make it forget is no renewal.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_lost_its_fsync_renews_nothing() {
    let ttl = Duration::from_secs(4);
    let postgres = Postgres::start().await;
    let server = Server::start(&postgres.url()).await;
    let mut client = server.client().await;
    let lock = granted(&mut client, "a", "a", ttl).await;
    let asks = request_for(&lock, Duration::from_secs(20));
    let mut stream = Stream::open(&mut client, asks).await;
    stream.next().await;
    postgres.configure("fsync", "off").await;
    let (_, status) = stream.end().await;
    let status = Err::<(), _>(status);
    expect_error(status, Code::Unavailable, "STORE_UNAVAILABLE");
}

/// Ends the session that renews, as it would be found by an administrator.
const TERMINATE: &str = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name = 'fencepostd'
      AND query LIKE '%renew\\_all\\_v1%' AND pid <> pg_backend_pid()";

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_session_costs_no_lease() {
    const ROUNDS: i64 = 12;
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let mut client = server.client().await;
    let admin = database.client().await;
    let mut streams = Vec::new();
    for ttl in [1000, 1500, 3000] {
        let stem = format!("{ttl}");
        streams.extend(
            open_many(
                &mut client,
                &database,
                &stem,
                10,
                Duration::from_millis(ttl),
            )
            .await,
        );
    }
    let reports = follow_all(streams, Instant::now() + Duration::from_secs(10));
    let mut killed = 0;
    for _ in 0..ROUNDS {
        // Whatever it is in the middle of.
        sleep(Duration::from_millis(rand::random_range(500..900))).await;
        killed += admin.value::<i64>(TERMINATE).await;
    }
    let reports = reports.join_all().await;
    let (renewals, tightest, longest) = Report::sum(&reports);
    println!(
        "{killed} sessions killed: {renewals} renewals, {tightest:?} left at the tightest, \
         {longest:?} of silence at most"
    );
    assert!(killed >= ROUNDS, "{killed}");
    for report in &reports {
        report.assert_kept("a stream");
    }
}

/// Makes each renewal take long enough to be killed in the middle of it.
const SLOW_ROWS: &str = "CREATE FUNCTION public.rest() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_catalog.pg_sleep(0.005); RETURN NEW; END $$;
    CREATE TRIGGER slow BEFORE UPDATE ON fencepost.locks
    FOR EACH ROW EXECUTE FUNCTION public.rest()";

#[tokio::test(flavor = "multi_thread")]
async fn a_session_killed_at_work_costs_not_even_the_shortest_lease() {
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let mut client = server.client().await;
    let admin = database.client().await;
    admin.run(SLOW_ROWS).await;
    let at_work = format!("{TERMINATE} AND state = 'active'");
    for round in 0..8 {
        let stem = format!("{round}");
        let shortest = Duration::from_millis(500);
        let streams = open_many(&mut client, &database, &stem, 8, shortest).await;
        let reports = follow_all(streams, Instant::now() + Duration::from_millis(1200));
        within(Duration::from_secs(1), "one is at work", async || {
            (admin.value::<i64>(&at_work).await > 0).then_some(())
        })
        .await;
        for report in reports.join_all().await {
            report.assert_kept("a stream");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_are_kept_behind_a_pooler() {
    let database = fresh_database().await;
    let pooler = PgBouncer::start(database.postgres().address(), 2).await;
    let server = Server::builder(&pooler.url_of(database.name()))
        .switch("--pgbouncer")
        .ready()
        .await;
    let mut client = server.client().await;
    let ttl = Duration::from_secs(2);
    let streams = open_many(&mut client, &database, "pooled", 200, ttl).await;
    let reports = follow_all(streams, Instant::now() + Duration::from_secs(8));
    sleep(Duration::from_secs(2)).await;
    // Server connections die under the pooler.
    let admin = database.client().await;
    admin
        .run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
        .await;
    let reports = reports.join_all().await;
    let (renewals, tightest, _) = Report::sum(&reports);
    println!("{renewals} renewals, {tightest:?} left at the tightest");
    for report in &reports {
        report.assert_kept("a stream");
    }
    assert!(renewals > 200 * 9, "{renewals}");
}

/// Each holder goes to the other server when its stream breaks.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_costs_no_lease_of_those_who_reopen_elsewhere() {
    const HOLDERS: usize = 100;
    const TTL: Duration = Duration::from_secs(3);
    let database = fresh_database().await;
    let first = Server::start(&database.url()).await;
    let second = Server::start(&database.url()).await;
    let until = Instant::now() + Duration::from_secs(8);
    let mut holders = JoinSet::new();
    let clients = [first.client().await, second.client().await];
    for n in 0..HOLDERS {
        let mut clients = clients.clone();
        holders.spawn(async move {
            let lock = granted(&mut clients[0], &format!("{n}"), "a", TTL).await;
            let mut ends = 0;
            let mut tightest = TTL;
            while Instant::now() < until {
                let client: &mut Client = &mut clients[ends % 2];
                let asks = request_for(&lock, Duration::from_secs(60));
                if let Ok(mut stream) = Stream::try_open(client, asks).await {
                    while Instant::now() < until {
                        match stream.try_next().await {
                            Ok(renewal) => tightest = tightest.min(renewal.slack),
                            Err(status) => {
                                assert_ne!(status.code(), Code::Aborted, "{status:?}");
                                assert_ne!(status.code(), Code::NotFound, "{status:?}");
                                break;
                            }
                        }
                    }
                }
                ends += 1;
            }
            (ends, tightest)
        });
    }
    sleep(Duration::from_secs(3)).await;
    first.kill9().await;
    let holders = holders.join_all().await;
    let tightest = holders.iter().map(|(_, tightest)| *tightest).min().unwrap();
    println!("{tightest:?} of {TTL:?} left at the tightest");
    assert!(holders.iter().all(|(ends, _)| *ends >= 2), "{holders:?}");
    let kept: i64 = database
        .client()
        .await
        .value(
            "SELECT count(*) FROM fencepost.locks
             WHERE NOT released AND prev_token = 0 AND expires_at > clock_timestamp()",
        )
        .await;
    assert_eq!(usize::try_from(kept).unwrap(), HOLDERS);
}
