//! More than there is room for: connections, streams, calls.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use fencepost_support::{
    Server,
    calls::{acquire, expect_error, expect_retryable, granted, renew, request},
    frames::Peer,
    postgres::{Database, fresh_database},
    row_lock::RowLock,
    server::{Client, channel_at},
    system::free_address,
    wait::within,
};
use tokio::{io::AsyncWriteExt as _, net::TcpStream, task::JoinSet, time::timeout};
use tonic::Code;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::{
    health::get,
    holders::Holders,
    keep_alive::stage::{self as keep_alive, Stream},
    metrics::scrape::Scrape,
};

const LONG: Duration = Duration::from_secs(600);

/// Files that the server may have open.
const FILES: usize = 200;
/// Connections of the flood, and how many are tried at once.
const FLOOD: usize = 3_000;
const WAVE: usize = 200;

/// Connects, and stays silent, sends nonsense, or resets at once. None when
/// there is no connection to keep; beyond the backlog there is none to be had.
async fn knock(address: SocketAddr, n: usize) -> Option<TcpStream> {
    let connected = timeout(Duration::from_millis(200), TcpStream::connect(address)).await;
    let mut stream = connected.ok()?.ok()?;
    match n % 4 {
        0 => {
            let _ = stream.write_all(b"\x16\x03\x01\x02\x00broken").await;
        }
        1 => {
            let _ = stream.set_zero_linger();
            return None;
        }
        _ => {}
    }
    Some(stream)
}

/// A server that may open few files.
async fn short_of_files(database: &Database) -> Server {
    let limit = format!("ulimit -n {FILES} && exec \"$@\"");
    Server::builder(&database.url())
        .flag("--database-pool-size", "4")
        .wrapper(&["/bin/sh", "-c", &limit, "sh"])
        .ready()
        .await
}

/// Ends the server's sessions, which it then opens anew.
async fn end_sessions(database: &Database) {
    let admin = database.client().await;
    admin
        .run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
              WHERE datname = current_database() AND application_name = 'fencepostd'",
        )
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_connections_does_not_end_the_server() {
    let database = fresh_database().await;
    let server = short_of_files(&database).await;
    let mut client = server.client().await;
    let token = granted(&mut client, "a", "holder", LONG)
        .await
        .fencing_token;

    let cpu = server.cpu_time();
    let began = Instant::now();
    let mut flood = Vec::new();
    let mut renewals = 0;
    for wave in 0..FLOOD / WAVE {
        let mut connects = JoinSet::new();
        for n in 0..WAVE {
            connects.spawn(knock(server.grpc(), n));
        }
        flood.extend(connects.join_all().await.into_iter().flatten());
        // The connection that was there works all along.
        renew(&mut client, "a", "holder", token, None)
            .await
            .unwrap_or_else(|status| panic!("wave {wave}: {status:?}"));
        renewals += 1;
    }
    // For a while nothing changes; the server does not spin.
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end {
        renew(&mut client, "a", "holder", token, None)
            .await
            .unwrap();
        renewals += 1;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let open = server.open_files();
    assert!(flood.len() > FILES, "{} were not enough", flood.len());
    // What the database needs is kept free.
    assert!((FILES / 2..FILES - 4).contains(&open), "{open} files");
    end_sessions(&database).await;
    within(
        Duration::from_secs(5),
        "the database is there again",
        async || renew(&mut client, "a", "holder", token, None).await.ok(),
    )
    .await;
    let busy = (server.cpu_time() - cpu).as_secs_f64() / began.elapsed().as_secs_f64();
    println!(
        "{FLOOD} connections tried, {} stood, {renewals} renewals meanwhile, {:.0} % of a core",
        flood.len(),
        busy * 100.0
    );

    drop(flood);
    let over = Instant::now();
    within(
        Duration::from_secs(5),
        "a new client is served",
        async || {
            let endpoint = server.endpoint().connect_timeout(Duration::from_secs(1));
            let mut fresh = Client::new(endpoint.connect().await.ok()?);
            acquire(&mut fresh, "b", "new", LONG).await.ok()
        },
    )
    .await;
    println!(
        "a new client is served {:?} after the flood",
        over.elapsed()
    );
    assert!(server.process().exit_status().is_none());
    server.wait_ready().await;
}

/// Whoever only connects keeps nobody out, on any port, and nobody who has something
/// open has to go.
#[tokio::test(flavor = "multi_thread")]
async fn connections_with_nothing_open_make_room() {
    // Less than the ten seconds after which silent ones are found out.
    const SOON: Duration = Duration::from_secs(5);
    let database = fresh_database().await;
    let health = free_address();
    let limit = format!("ulimit -n {FILES} && exec \"$@\"");
    let server = Server::builder(&database.url())
        .flag("--database-pool-size", "4")
        .flag("--health-listen", &health.to_string())
        .wrapper(&["/bin/sh", "-c", &limit, "sh"])
        .ready()
        .await;
    let mut holder = server.client().await;
    let lock = granted(&mut holder, "a", "holder", Duration::from_secs(3)).await;
    let mut stream = Stream::try_open(&mut holder, keep_alive::request(&lock))
        .await
        .unwrap();

    let mut flood = Vec::new();
    for address in [server.grpc(), health, server.http()] {
        for _ in 0..FILES {
            // Beyond the backlog there is no connection to be had.
            let greeted = timeout(Duration::from_millis(100), Peer::greet(address, &[])).await;
            flood.extend(greeted.ok());
        }
    }
    let began = Instant::now();
    let newcomers = async {
        let mut fresh = server.client().await;
        acquire(&mut fresh, "b", "new", LONG).await.unwrap();
        let channel = channel_at(health).await;
        let ask = HealthCheckRequest {
            service: "liveness".into(),
        };
        HealthClient::new(channel).check(ask).await.unwrap();
        assert_eq!(get(server.http(), "/livez").await.0, 200);
    };
    let served = timeout(SOON, newcomers).await;
    assert!(served.is_ok(), "somebody is kept out");
    println!("all were served {:?} after the flood", began.elapsed());
    let scrape = Scrape::of(&server).await;
    let open = scrape.value("fencepost_connections", &[]);
    let limit = scrape.value("fencepost_connections_limit", &[]);
    assert!((10.0..=limit).contains(&open), "{open} of {limit}");
    assert!((16.0..200.0).contains(&limit), "{limit}");
    for _ in 0..3 {
        stream.try_next().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_the_http_port_takes_nothing_from_locks() {
    let database = fresh_database().await;
    let server = short_of_files(&database).await;
    let mut flood = Vec::new();
    for _ in 0..FILES * 2 {
        flood.extend(knock(server.http(), 2).await);
    }
    assert!(flood.len() > FILES, "{} were not enough", flood.len());
    let open = server.open_files();
    assert!(open < FILES / 2, "{open} files");
    end_sessions(&database).await;
    let mut client = server.client().await;
    within(
        Duration::from_secs(5),
        "locks are there again",
        async || acquire(&mut client, "a", "holder", LONG).await.ok(),
    )
    .await;
    drop(flood);
    within(Duration::from_secs(5), "probes are answered", async || {
        let answer = get(server.http(), "/readyz").await;
        (answer.0 == 200).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_resets_costs_holders_nothing() {
    const HOLDERS: usize = 20;
    const TTL: Duration = Duration::from_secs(5);
    const PEERS: usize = 4;
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let holders = Holders::start(&server, HOLDERS, TTL).await;

    // Peers that open streams and reset them at once, as fast as they can. Tasks of reset
    // streams that wait for their turn would put off everybody by seconds.
    let opened = Arc::new(AtomicUsize::new(0));
    let began = Instant::now();
    let mut peers = JoinSet::new();
    for peer in 0..PEERS {
        let opened = Arc::clone(&opened);
        let address = server.grpc();
        peers.spawn(async move {
            let mut client = Client::new(channel_at(address).await);
            while began.elapsed() < Duration::from_secs(5) {
                let mut batch = JoinSet::new();
                for _ in 0..50 {
                    let n = opened.fetch_add(1, Ordering::Relaxed);
                    let mut client = client.clone();
                    let name = format!("junk-{peer}-{}", n % 1000);
                    batch.spawn(async move {
                        let call = client.acquire(request(&name, &format!("o-{n}"), LONG));
                        let _ = timeout(Duration::from_micros(200), call).await;
                    });
                }
                if timeout(Duration::from_secs(1), batch.join_all())
                    .await
                    .is_err()
                {
                    // The server has had enough of this connection.
                    client = Client::new(channel_at(address).await);
                }
            }
        });
    }
    peers.join_all().await;
    let report = holders.end().await;
    let opened = opened.load(Ordering::Relaxed);
    println!("{opened} streams opened and reset in 5 s; beside them {report:?}");
    assert!(opened > 2_000);

    // The work they left behind does not stand in the way for long.
    let mut client = server.client().await;
    let over = Instant::now();
    within(Duration::from_secs(10), "a call is answered", async || {
        acquire(&mut client, "after", "owner", LONG).await.ok()
    })
    .await;
    println!("a new name is granted {:?} after the flood", over.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn too_much_in_flight_is_refused_with_a_hint_when_to_return() {
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .flag("--database-pool-size", "4")
        .flag("--max-in-flight", "16")
        .ready()
        .await;
    let mut client = server.client().await;
    let token = granted(&mut client, "a", "holder", LONG)
        .await
        .fencing_token;
    let row = RowLock::hold(&database.url(), "a").await;
    let mut calls = JoinSet::new();
    for _ in 0..12 {
        let mut client = client.clone();
        calls.spawn(async move { renew(&mut client, "a", "holder", token, None).await });
    }
    // Eight wait, which is half of the room; four are too many; that is said at once, not after a wait.
    let asked = Instant::now();
    for _ in 0..4 {
        let refused = calls.join_next().await.unwrap().unwrap();
        let status = expect_error(refused, Code::ResourceExhausted, "OVERLOADED");
        expect_retryable(&status);
    }
    let refused = renew(&mut client, "a", "holder", token, None).await;
    expect_error(refused, Code::ResourceExhausted, "OVERLOADED");
    assert!(
        asked.elapsed() < Duration::from_millis(1500),
        "{:?}",
        asked.elapsed()
    );

    row.rollback().await;
    for answer in calls.join_all().await {
        answer.unwrap();
    }
    granted(&mut client, "b", "owner", LONG).await;
}
