//! KeepAlive in numbers: many streams on one connection, calls cancelled beside
//! them, streams that break; and what is left behind by all of it.

mod broken;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use fencepost_support::{
    Server,
    calls::{
        acquire, expect_error, expect_resource, expect_retryable, get, granted, reason, release,
        renew,
    },
    postgres::fresh_database,
    server::Client,
    wait::within,
};
use tokio::task::JoinSet;
use tonic::{Code, transport::Channel};

use crate::{
    keep_alive::stage::{Report, Stream, follow, follow_all, leases, open_many, request_for},
    metrics::scrape::Scrape,
    world::LONG,
};

/// A connection for thousands of streams. HTTP/2 libraries end one on which too
/// many small frames come at once, by the size of this window, and one with late
/// answers to more than a thousand calls that were cancelled and forgotten.
pub(crate) async fn wide(server: &Server) -> Channel {
    server
        .endpoint()
        .initial_connection_window_size(16 * 1024 * 1024)
        .http2_max_concurrent_reset_streams(10_000)
        .http2_reset_stream_duration(Duration::from_secs(10))
        .connect()
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_beside_a_thousand_streams_are_answered_within_a_second() {
    const STREAMS: usize = 1_000;
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    // As it comes: this many need no setting.
    let mut client = server.client().await;
    let ttl = Duration::from_secs(3);
    let streams = open_many(&mut client, &database, "stream", STREAMS, ttl).await;
    let until = Instant::now() + Duration::from_secs(8);
    let streams = follow_all(streams, until);
    let (mut calls, mut slowest) = (0, Duration::ZERO);
    while Instant::now() < until {
        let name = format!("call-{calls}");
        let began = Instant::now();
        let token = granted(&mut client, &name, "a", LONG).await.fencing_token;
        slowest = slowest.max(began.elapsed());
        let began = Instant::now();
        renew(&mut client, &name, "a", token, None).await.unwrap();
        slowest = slowest.max(began.elapsed());
        let began = Instant::now();
        get(&mut client, "stream-1").await.unwrap();
        slowest = slowest.max(began.elapsed());
        let began = Instant::now();
        release(&mut client, &name, "a", token).await.unwrap();
        slowest = slowest.max(began.elapsed());
        calls += 4;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let streams = streams.join_all().await;
    let (renewals, tightest, longest) = Report::sum(&streams);
    println!(
        "{calls} calls, the slowest {slowest:?}; {renewals} renewals, {tightest:?} left of \
         {ttl:?} at the tightest, {longest:?} of silence at most"
    );
    for stream in &streams {
        stream.assert_kept("a stream");
    }
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    assert!(tightest > ttl / 2, "{tightest:?}");
}

/// Opened at once on one connection: all stand, all are renewed in time, and
/// all hear of the end.
#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_streams_opened_at_once_stand() {
    const STREAMS: usize = 10_000;
    let ttl = Duration::from_secs(30);
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .flag("--drain-delay", "0s")
        .flag("--drain-timeout", "15s")
        .ready()
        .await;
    let leases = leases(&database, "lock", STREAMS, ttl).await;
    let client = Client::new(wide(&server).await);
    let began = Instant::now();
    let mut opening = JoinSet::new();
    for lock in leases {
        let mut client = client.clone();
        opening.spawn(async move {
            let asks = request_for(&lock, Duration::from_secs(300));
            let mut stream = Stream::try_open(&mut client, asks).await?;
            stream.try_next().await.map(|_| stream)
        });
    }
    let (mut streams, mut errors) = (Vec::new(), Vec::new());
    for opened in opening.join_all().await {
        match opened {
            Ok(stream) => streams.push(stream),
            Err(status) => errors.push(status),
        }
    }
    let took = began.elapsed();
    println!("{} opened in {took:?}, {} not", streams.len(), errors.len());
    assert!(errors.is_empty(), "{} like {:?}", errors.len(), errors[0]);

    // One interval, in which each is renewed again.
    let until = Instant::now() + ttl / 3 + Duration::from_secs(1);
    let (cpu, since) = (server.cpu_time(), Instant::now());
    let mut readers = JoinSet::new();
    for mut stream in streams {
        readers.spawn(async move {
            let mut tightest = Duration::MAX;
            let mut renewals = 0;
            loop {
                match stream.try_next().await {
                    Ok(renewal) => {
                        renewals += 1;
                        tightest = tightest.min(renewal.slack);
                    }
                    Err(status) => return (renewals, tightest, Instant::now(), status),
                }
            }
        });
    }
    tokio::time::sleep_until(until.into()).await;
    let share = (server.cpu_time() - cpu).as_secs_f64() / since.elapsed().as_secs_f64();
    let told = Instant::now();
    server.sigterm();
    let status = server.wait_exit().await;
    println!(
        "{:.0} % of a core; drained in {:?}",
        share * 100.0,
        told.elapsed()
    );
    assert_eq!(status.code(), Some(0));
    let mut tightest = Duration::MAX;
    let (mut renewals, mut never, mut cut) = (0, 0, Vec::new());
    for (count, least, ended, status) in readers.join_all().await {
        assert!(ended >= told, "{status:?} long before the end");
        renewals += count;
        never += usize::from(count == 0);
        tightest = tightest.min(least);
        if reason(&status).as_deref() != Some("DRAINING") || status.code() != Code::Unavailable {
            cut.push(status);
        }
    }
    println!(
        "{renewals} renewals more, {tightest:?} left of {ttl:?} at the tightest; {} cut off",
        cut.len()
    );
    assert_eq!(never, 0, "streams that were not renewed again");
    assert!(tightest > ttl / 2, "renewed late: {tightest:?} left");
    assert!(cut.is_empty(), "{} like {:?}", cut.len(), cut[0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn five_thousand_calls_cancelled_at_once_end_no_stream() {
    const STREAMS: usize = 100;
    const CALLS: usize = 5_000;
    let ttl = Duration::from_secs(4);
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let mut client = Client::new(wide(&server).await);
    let streams = open_many(&mut client, &database, "stream", STREAMS, ttl).await;
    let streams = follow_all(streams, Instant::now() + Duration::from_secs(9));
    let mut calls = JoinSet::new();
    for n in 0..CALLS {
        let mut client = client.clone();
        calls.spawn(async move {
            let name = format!("call-{n}");
            acquire(&mut client, &name, "a", LONG).await.map(drop)
        });
    }
    // All are under way, the first few answered.
    let first = calls.join_next().await.unwrap().unwrap();
    let left = calls.len();
    calls.abort_all();
    while calls.join_next().await.is_some() {}
    println!("{left} cancelled, the first one {first:?}");
    assert!(left > CALLS / 2, "{left}");
    let streams = streams.join_all().await;
    let (renewals, tightest, longest) = Report::sum(&streams);
    println!(
        "{renewals} renewals, {tightest:?} left of {ttl:?} at the tightest, {longest:?} of \
         silence at most"
    );
    for stream in &streams {
        stream.assert_kept("a stream");
    }
    // The connection itself is as good as new.
    granted(&mut client, "after", "a", LONG).await;
}

/// Renewals go first: acquires beyond what a server can do delay no lease.
#[tokio::test(flavor = "multi_thread")]
async fn a_burst_of_calls_delays_no_renewal() {
    let ttl = Duration::from_secs(3);
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let mut client = server.client().await;
    let streams = open_many(&mut client, &database, "stream", 200, ttl).await;
    let streams = follow_all(streams, Instant::now() + Duration::from_secs(8));
    let stop = Arc::new(AtomicBool::new(false));
    let mut load = JoinSet::new();
    for worker in 0..200 {
        let stop = Arc::clone(&stop);
        let mut client = Client::new(server.channel().await);
        load.spawn(async move {
            let mut calls = 0_usize;
            while !stop.load(Ordering::Relaxed) {
                let name = format!("call-{worker}-{calls}");
                // Refused as overload is an answer, too.
                let _ = acquire(&mut client, &name, "a", LONG).await;
                calls += 1;
            }
            calls
        });
    }
    let streams = streams.join_all().await;
    stop.store(true, Ordering::Relaxed);
    let calls: usize = load.join_all().await.into_iter().sum();
    let (renewals, tightest, _) = Report::sum(&streams);
    println!("{calls} acquires, {renewals} renewals, {tightest:?} left of {ttl:?} at the tightest");
    for stream in &streams {
        stream.assert_kept("a stream");
    }
    assert!(tightest > ttl / 3, "{tightest:?}");
}

/// Nobody reads, and nothing piles up for them: a late reader hears the latest.
#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_was_away_hears_the_latest_and_not_each_renewal() {
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let endpoint = server.endpoint().initial_stream_window_size(1024);
    let mut client = Client::new(endpoint.connect().await.unwrap());
    let ttl = Duration::from_millis(500);
    let lock = granted(&mut client, "a", "a", ttl).await;
    let mut stream = Stream::open(&mut client, request_for(&lock, LONG)).await;
    stream.next().await;
    // Some forty renewals, of which the window takes ten.
    tokio::time::sleep(Duration::from_secs(6)).await;
    let back = Instant::now();
    let mut heard = 0;
    let fresh = loop {
        let renewal = stream.next().await;
        heard += 1;
        // What is left of it is told, or none when it was on the way for long.
        if renewal.at - back > Duration::from_millis(100) {
            break renewal;
        }
    };
    println!("{heard} messages of some forty renewals");
    assert!(heard < 25, "{heard}");
    assert!(fresh.slack > Duration::ZERO);
    let report = follow(stream, Instant::now() + Duration::from_secs(1)).await;
    report.assert_kept("the stream");
}

#[tokio::test(flavor = "multi_thread")]
async fn there_are_no_more_streams_than_the_server_allows() {
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        // A connection has half of them.
        .flag("--keepalive-max-streams", "6")
        .ready()
        .await;
    let mut client = server.client().await;
    // Often renewed, so that a stream soon hears that its lease is over.
    let second = Duration::from_secs(1);
    let mut streams = open_many(&mut client, &database, "stream", 2, second * 3).await;
    let lock = granted(&mut client, "lost", "a", second).await;
    let mut lost = Stream::open(&mut client, request_for(&lock, LONG)).await;
    lost.next().await;

    let one_more = granted(&mut client, "one more", "a", LONG).await;
    let open = async || {
        let asks = request_for(&one_more, LONG);
        Stream::try_open(&mut client.clone(), asks).await
    };
    let expect_refused = async || {
        let status = expect_error(open().await, Code::ResourceExhausted, "OVERLOADED");
        expect_retryable(&status);
        expect_resource(&status, "one more");
    };
    let opened = async || {
        let room = within(second * 2, "there is room", async || open().await.ok());
        room.await
    };
    expect_refused().await;
    // There is room for the streams of others.
    let mut another = server.client().await;
    let other = Stream::open(&mut another, request_for(&one_more, LONG)).await;
    expect_refused().await;
    drop(other);
    let scrape = Scrape::of(&server).await;
    for (why, count) in [("share", 2.0), ("full", 0.0)] {
        let labels = [("method", "KeepAlive"), ("why", why)];
        assert_eq!(scrape.value("fencepost_shed_total", &labels), count);
    }
    // Calls are not counted.
    get(&mut client.clone(), "one more").await.unwrap();

    // One that is dropped makes room, and so does one whose lease is over.
    drop(streams.remove(0));
    streams.push(opened().await);
    expect_refused().await;
    release(&mut client.clone(), "lost", "a", lock.fencing_token)
        .await
        .unwrap();
    lost.expect_end(Code::NotFound, "LOCK_NOT_FOUND").await;
    drop(lost);
    streams.push(opened().await);
    expect_refused().await;
    for stream in &mut streams {
        stream.next().await;
    }
}
