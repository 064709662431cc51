//! The password of the database appears nowhere: not in a log at any level,
//! not in an error, not in an answer, not in what the command line prints.

use std::{fs, time::Duration};

use fencepost_support::{
    Postgres, Server, calls,
    postgres::fresh_database,
    proxy::Proxy,
    server::{self, Builder},
    system::{self, free_address},
};
use rand::Rng as _;
use tonic::{Request, Status};

use crate::{
    health,
    programs::{bare, cli, run},
};

/// A password that is nowhere else.
#[expect(clippy::print_stdout, reason = "for the reader of a failed test")]
pub(crate) fn marker() -> String {
    let marker = format!("swordfish{:08x}", rand::rng().random::<u32>());
    println!("marker: {marker}");
    marker
}

fn talkative(url: &str) -> Builder {
    Server::builder(url)
        .flag("--log", "trace")
        .flag("--request-timeout", "1s")
}

#[track_caller]
pub(crate) fn assert_clean(said: &[String], marker: &str) {
    for line in said {
        assert!(!line.contains(marker), "{line}");
    }
}

/// The whole of a status, with its details and trailers.
fn text(status: &Status) -> String {
    let details = String::from_utf8_lossy(status.details()).into_owned();
    format!("{status:?} {details}")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_is_in_no_log_and_no_answer() {
    let marker = marker();
    let database = fresh_database().await;
    let proxy = Proxy::start(database.postgres().address()).await;
    let url = format!(
        "postgres://postgres:{marker}@{}/{}",
        proxy.address(),
        database.name()
    );
    let server = talkative(&url).start().await;
    server.wait_ready().await;
    let mut client = server.client().await;
    let ttl = Duration::from_secs(60);
    calls::granted(&mut client, "a", "b", ttl).await;

    // The database goes away under way: calls fail, and say so.
    proxy.refuse().await;
    proxy.reset().await;
    let mut failures = 0;
    for _ in 0..3 {
        for answer in [
            calls::acquire(&mut client, "a", "b", ttl).await.map(drop),
            calls::get(&mut client, "a").await.map(drop),
            calls::renew(&mut client, "a", "b", 1, None).await.map(drop),
            calls::release(&mut client, "a", "b", 1).await,
        ] {
            let status = answer.unwrap_err();
            failures += u32::from(status.code() == tonic::Code::Unavailable);
            assert_clean(&[text(&status)], &marker);
        }
    }
    assert!(failures > 0, "nothing failed");
    server
        .wait_for_log("the outage", |line| {
            line["message"]
                .as_str()
                .is_some_and(|message| message.contains("unavailable"))
        })
        .await;
    assert!(server.logs().len() > 50, "trace is a lot");
    assert_clean(&server.logs(), &marker);
}

/// A request id is as good as a secret: whoever repeats it is handed the lease.
#[tokio::test(flavor = "multi_thread")]
async fn no_level_of_any_log_tells_a_password_or_what_proves_a_caller() {
    let marker = marker();
    let database = fresh_database().await;
    let address = database.postgres().address();
    let name = database.name();
    let urls = [
        format!("postgres://postgres:{marker}@{address}/{name}"),
        format!("postgres://postgres@{address}/{name}?password={marker}"),
        format!(
            "host={} port={} user=postgres password={marker} dbname={name}",
            address.ip(),
            address.port()
        ),
    ];
    for (n, filter) in [
        "trace",
        "debug,tokio_postgres=debug",
        "trace,tokio_postgres=trace,h2=trace,hyper=trace,tonic=trace,tower=trace",
        "info,[call]=trace,[statement]=trace,tokio_postgres::connection=trace",
    ]
    .into_iter()
    .enumerate()
    {
        let server = Server::builder(&urls[n % urls.len()])
            .flag("--log", filter)
            .env("RUST_LOG", "trace,tokio_postgres=trace")
            .switch("--audit-log")
            .start()
            .await;
        server.wait_ready().await;
        let mut client = server.client().await;
        let (name, ttl) = (format!("a{n}"), Duration::from_secs(60));
        let ask = || {
            let ask = calls::request_with_id(&name, "b", ttl, &marker);
            let mut request = Request::new(ask);
            let proof = format!("Bearer {marker}").parse().unwrap();
            request.metadata_mut().insert("authorization", proof);
            request
        };
        let lock = client.acquire(ask()).await.unwrap().into_inner().lock;
        // Alone, as a retry, and as an error.
        client.acquire(ask()).await.unwrap();
        let token = lock.unwrap().fencing_token;
        calls::renew(&mut client, &name, "b", token, None)
            .await
            .unwrap();
        let spent = client.acquire(ask()).await.unwrap_err();
        assert_clean(&[text(&spent)], &marker);
        calls::release(&mut client, &name, "b", token)
            .await
            .unwrap();
        let (_, metrics) = health::get(server.http(), "/metrics").await;
        assert_clean(&[metrics], &marker);
        server.sigterm();
        assert!(server.wait_exit().await.success());
        assert!(server.logs().len() > 5, "{filter}");
        assert_clean(&server.logs(), &marker);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_is_in_no_refusal_to_start() {
    let marker = marker();
    let postgres = Postgres::start().await;
    let admin = postgres.admin().await;
    admin.run("ALTER ROLE postgres PASSWORD 'another'").await;
    let rule = "host all all 127.0.0.1/32 scram-sha-256\n";
    fs::write(postgres.data().join("pg_hba.conf"), rule).unwrap();
    admin.run("SELECT pg_reload_conf()").await;
    let closed = free_address();
    let cluster = postgres.address();
    for (url, codes) in [
        (format!("postgres://u:{marker}@127.0.0.1:port/x"), &[78][..]),
        (format!("postgres://u:{marker}@[::1/x"), &[78]),
        (format!("postgrs://u:{marker}@{closed}/x"), &[78]),
        (
            format!("postgres://u:{marker}@{closed}/x?oops={marker}"),
            &[78],
        ),
        (format!("postgres://u@{closed}/x?password={marker}"), &[69]),
        (format!("postgres://u:a@{marker}@{closed}/x"), &[78]),
        (format!("postgres://u:a@b/{marker}@{closed}/x"), &[78]),
        (format!("postgres://u@{closed}/x?{marker}={marker}"), &[78]),
        (
            format!("postgres://u@{closed}/x?password={marker}&sslmode={marker}"),
            &[78],
        ),
        (
            format!("postgres://u@{closed}/x?sslpassword={marker}&sslmode=require"),
            &[78],
        ),
        (
            format!("postgres://u:{marker}@{closed}/x?sslmode=require"),
            &[69],
        ),
        (
            format!("postgres://u:{marker}@{closed}/x?sslmode=verify-full&sslrootcert=/{marker}"),
            &[78],
        ),
        // Whether these are malformed is for the driver to say.
        (format!("postgres://u:{marker}%zz@{closed}/x"), &[78, 69]),
        (
            format!(
                "host={} port={} password='{marker}",
                closed.ip(),
                closed.port()
            ),
            &[78, 69],
        ),
        (format!("postgres://u:{marker}@{closed}/x"), &[69]),
        (
            format!("postgres://u:{marker}@no-such-host.invalid/x"),
            &[69],
        ),
        (
            format!("postgres://postgres:{marker}@{cluster}/postgres"),
            &[69],
        ),
    ] {
        let ended = talkative(&url).try_start().await.unwrap_err();
        assert_clean(&ended.lines, &marker);
        let code = ended.status.code().unwrap();
        assert!(codes.contains(&code), "{code}: {:?}", ended.lines);
        assert!(!ended.lines.is_empty());
    }
}

#[tokio::test]
async fn a_password_is_in_no_usage_message() {
    let marker = marker();
    let url = format!("postgres://u:{marker}@127.0.0.1/x");
    let without_scheme = format!("u:{marker}@127.0.0.1/x");
    for arguments in [
        &["--help"][..],
        &["--nonsense"],
        &["migrate", "--help"],
        &["--database-url", &url, "--database-url-file", "x"],
        &["--database-url", &url, &url],
        &[&url],
        &["migrate", &url],
        &[&format!("--database={url}")],
        &["--database", &url],
        &["--listen", &url],
        &["--request-timeout", &url],
        &[&without_scheme],
        &["--listen", &without_scheme],
        &["--request-timeout", &without_scheme],
        &["--otlp-endpoint", &without_scheme],
        &["--database-url", &url, "--database-url", &url],
    ] {
        let mut command = bare(server::binary());
        command.args(arguments);
        command
            .env("FENCEPOST_DATABASE_URL", &url)
            .env("DATABASE_URL", &url)
            .env("FENCEPOST_OTLP_ENDPOINT", &url);
        let ended = run(command).await;
        assert_clean(&[ended.said()], &marker);
        assert!(!ended.said().is_empty());
    }
}

#[tokio::test]
async fn a_password_in_a_file_is_in_no_process_list() {
    let marker = marker();
    let database = fresh_database().await;
    let address = database.postgres().address();
    let directory = system::private_directory();
    let file = directory.join("url");
    let url = format!("postgres://postgres:{marker}@{address}/{}", database.name());
    fs::write(&file, url).unwrap();
    let server = Server::without_database()
        .flag("--database-url-file", file.to_str().unwrap())
        .start()
        .await;
    server.wait_ready().await;
    for file in ["cmdline", "environ"] {
        let text = fs::read(format!("/proc/{}/{file}", server.pid())).unwrap();
        assert_clean(&[String::from_utf8_lossy(&text).into_owned()], &marker);
    }
}

#[tokio::test]
async fn a_password_in_an_endpoint_is_not_printed() {
    let marker = marker();
    let closed = free_address();
    for endpoint in [
        format!("http://u:{marker}@{closed}"),
        format!("http://u:{marker}@{closed}:port"),
        format!("ftp://u:{marker}@{closed}"),
        format!("u:{marker}@"),
    ] {
        let mut command = bare(cli());
        command.args(["get", "a", "--timeout", "1s", "--endpoint", &endpoint]);
        let ended = run(command).await;
        assert_ne!(ended.code, Some(0));
        assert!(!ended.said().is_empty());
        assert_clean(&[ended.said()], &marker);

        let mut command = bare(cli());
        command
            .args(["get", "--help"])
            .env("FENCEPOST_ENDPOINT", &endpoint);
        assert_clean(&[run(command).await.said()], &marker);
    }
}

/// Whoever has both may renew the lease, and end it.
#[tokio::test]
async fn an_owner_and_its_token_are_in_no_help() {
    let marker = marker();
    let token = "4711004711";
    for subcommand in ["release", "renew", "keepalive", "get", "acquire", "run"] {
        let mut command = bare(cli());
        command
            .args([subcommand, "--help"])
            .env("FENCEPOST_OWNER", &marker)
            .env("FENCEPOST_TOKEN", token);
        let ended = run(command).await;
        assert_eq!(ended.code, Some(0), "{}", ended.said());
        for secret in [&*marker, token] {
            assert_clean(&[ended.said()], secret);
        }
    }
}
