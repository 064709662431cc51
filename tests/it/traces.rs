//! Traces: what is exported of calls, and that nobody waits for it.

mod collector;

use std::time::{Duration, Instant};

use fencepost_support::{
    Server,
    calls::{self, granted, refused, release},
    postgres::fresh_database,
    proxy::Proxy,
    row_lock::RowLock,
    server::{Builder, Client},
    system::free_address,
};
use opentelemetry_proto::tonic::trace::v1::{Span, status::StatusCode};
use tonic::{Request, Status};

use self::collector::{Collector, attribute, is_call};
use crate::{
    health,
    keep_alive::stage::{Stream, request, request_for},
    metrics::{scrape::Scrape, wait_for},
    programs::{bare, cli, run},
    secrets::{assert_clean, marker},
    world::{LONG, SHORT},
};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

fn traced(url: &str, collector: &str) -> Builder {
    Server::builder(url)
        .flag("--otlp-endpoint", collector)
        .flag("--drain-delay", "0s")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Looks at a lock, with this for a trace context.
async fn look(client: &mut Client, resource: &str, traceparent: &str) -> Result<(), Status> {
    let mut request = Request::new(fencepost_proto::v1::GetRequest {
        resource: resource.to_owned(),
    });
    let value = traceparent.parse().unwrap();
    request.metadata_mut().insert("traceparent", value);
    client.get(request).await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_has_a_span_and_a_link_to_its_round() {
    let database = fresh_database().await;
    let collector = Collector::start().await;
    let server = traced(&database.url(), &collector.url()).ready().await;
    let mut client = server.client().await;
    let owner = "somebody's name";
    let lock = granted(&mut client, "nightly-report", owner, LONG).await;
    refused(&mut client, "nightly-report", "another", LONG).await;
    let sampled = format!("00-{TRACE}-{PARENT}-01");
    look(&mut client, "nightly-report", &sampled).await.unwrap();
    let token = lock.fencing_token;
    release(&mut client, "nightly-report", owner, token + 1)
        .await
        .unwrap_err();

    let call = |method: &'static str, key: &'static str, value: String| {
        let collector = &collector;
        async move {
            let what = format!("{method} with {key} = {value}");
            let span = collector.span(&what, |span| is_call(span, method, key, &value));
            span.await
        }
    };
    let acquire = call("Acquire", "token", token.to_string()).await;
    assert_eq!(attribute(&acquire, "fencepost.outcome").unwrap(), "granted");
    // printf %s nightly-report | sha256sum | cut -c1-16
    let hash = attribute(&acquire, "fencepost.resource_hash").unwrap();
    assert_eq!(hash, "6743ba10a2b2c487");
    assert_eq!(attribute(&acquire, "rpc.grpc.status_code").unwrap(), "0");
    assert!(acquire.end_time_unix_nano > acquire.start_time_unix_nano);
    call("Acquire", "outcome", "held".to_owned()).await;
    call("Release", "reason", "TOKEN_UNKNOWN".to_owned()).await;

    let [link] = &acquire.links[..] else {
        panic!("{acquire:?}");
    };
    let is_round = |span: &Span| {
        span.name == "round" && span.span_id == link.span_id && span.trace_id == link.trace_id
    };
    let round = collector.span("the round", is_round).await;
    assert_eq!(round.links[0].span_id, acquire.span_id);
    let names = attribute(&round, "fencepost.statements");
    assert_eq!(names.as_deref(), Some("acquire_all"));

    let all = Scrape::of(&server)
        .await
        .value("fencepost_spans_total", &[]);
    assert!(all >= 5.0, "{all}");
    wait_for(&server, "fencepost_spans_exported_total", &[], all).await;

    let get = call("Get", "outcome", "held".to_owned()).await;
    assert_eq!(hex(&get.trace_id), TRACE);
    assert_eq!(hex(&get.parent_span_id), PARENT);

    let text = collector.text();
    for secret in ["nightly-report", owner, "another"] {
        assert!(!text.contains(secret), "{secret} in {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_span_of_a_dropped_call_ends_with_it() {
    let database = fresh_database().await;
    let collector = Collector::start().await;
    let server = traced(&database.url(), &collector.url()).ready().await;
    let mut client = server.client().await;
    let lock = granted(&mut client, "a", "owner", LONG).await;
    let mut stream = Stream::open(&mut client, request(&lock)).await;
    stream.next().await;
    drop(stream);
    let cancelled = |method: &'static str| {
        let collector = &collector;
        async move {
            let what = format!("a cancelled {method}");
            let is_it = |span: &_| {
                let code = attribute(span, "rpc.grpc.status_code");
                attribute(span, "rpc.method").as_deref() == Some(method)
                    && code.as_deref() == Some("1")
            };
            collector.span(&what, is_it).await
        }
    };
    cancelled("KeepAlive").await;

    let row = RowLock::hold(&database.url(), "a").await;
    let call = tokio::spawn({
        let mut client = client.clone();
        async move { calls::acquire(&mut client, "a", "owner", LONG).await }
    });
    row.wait_for_waiters(1).await;
    call.abort();
    cancelled("Acquire").await;
    row.rollback().await;
    // What it waited for is told of all the same: its statement, as a child.
    let statement = collector
        .span("the statement", |span| span.name == "acquire")
        .await;
    let acquire = cancelled("Acquire").await;
    assert_eq!(statement.parent_span_id, acquire.span_id);
}

/// Whether a span is one of an error.
fn is_error(span: &Span) -> bool {
    let status = span.status.as_ref();
    status.is_some_and(|status| status.code() == StatusCode::Error)
}

#[tokio::test(flavor = "multi_thread")]
async fn statements_that_fail_say_so_in_their_spans() {
    let database = fresh_database().await;
    let collector = Collector::start().await;
    let server = traced(&database.url(), &collector.url()).ready().await;
    let mut client = server.client().await;
    let admin = database.client().await;
    admin
        .run("ALTER TABLE fencepost.locks RENAME TO hidden")
        .await;
    calls::get(&mut client, "a").await.unwrap_err();
    // Its round, and then the call's own.
    for name in ["round", "get"] {
        let span = collector
            .span(name, |span| span.name == name && is_error(span))
            .await;
        assert_eq!(attribute(&span, "error.type").as_deref(), Some("refused"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_whose_time_is_over_is_no_error() {
    let database = fresh_database().await;
    let collector = Collector::start().await;
    let server = traced(&database.url(), &collector.url()).ready().await;
    let mut client = server.client().await;
    let lock = granted(&mut client, "a", "owner", LONG).await;
    let mut over = Stream::open(&mut client, request_for(&lock, SHORT)).await;
    while over.try_next().await.is_ok() {}
    let mut drained = Stream::open(&mut client, request(&lock)).await;
    drained.next().await;
    server.sigterm();
    while drained.try_next().await.is_ok() {}
    for reason in ["REOPEN", "DRAINING"] {
        let is_it = |span: &_| is_call(span, "KeepAlive", "reason", reason);
        let span = collector.span(reason, is_it).await;
        assert_eq!(attribute(&span, "rpc.grpc.status_code").unwrap(), "14");
        assert!(!is_error(&span), "{span:?}");
    }
    assert!(server.wait_exit().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_caller_decides_and_else_the_ratio() {
    let database = fresh_database().await;
    let collector = Collector::start().await;
    let server = traced(&database.url(), &collector.url())
        .flag("--otlp-sample-ratio", "0")
        .ready()
        .await;
    let mut client = server.client().await;
    // Anything else than a trace context is as good as none.
    let long = "0".repeat(5000);
    for malformed in [
        "",
        "00",
        "-",
        "00-xyz",
        &long,
        &format!("00-{TRACE}-{PARENT}"),
    ] {
        let answer = look(&mut client, "nobody's", malformed).await;
        assert_eq!(answer.unwrap_err().code(), tonic::Code::NotFound);
    }
    let unsampled = format!("00-{TRACE}-{PARENT}-00");
    look(&mut client, "nobody's", &unsampled).await.unwrap_err();
    let sampled = format!("00-{TRACE}-{PARENT}-01");
    look(&mut client, "nobody's", &sampled).await.unwrap_err();
    server.sigterm();
    // The last spans are sent before the end.
    assert!(server.wait_exit().await.success());
    let spans = collector.spans();
    let calls = spans.iter().filter(|span| span.name.contains('/'));
    assert_eq!(calls.count(), 1, "{spans:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_call_waits_for_a_collector() {
    let database = fresh_database().await;
    let collector = Collector::start().await;
    let silent = Proxy::start(collector.url()[7..].parse().unwrap()).await;
    silent.black_hole();
    for endpoint in [silent.address(), free_address()] {
        let endpoint = format!("http://{endpoint}");
        let server = traced(&database.url(), &endpoint).ready().await;
        let mut client = server.client().await;
        // More than wait for it.
        let begun = Instant::now();
        for n in 0..3000 {
            let name = format!("nobody's {n}");
            calls::get(&mut client, &name).await.unwrap_err();
        }
        let took = begun.elapsed();
        assert!(took < Duration::from_secs(60), "{took:?}");
        let scrape = Scrape::of(&server).await;
        assert!(scrape.value("fencepost_spans_total", &[]) >= 3000.0);
        assert_eq!(scrape.value("fencepost_spans_exported_total", &[]), 0.0);
        server.sigterm();
        let begun = Instant::now();
        assert!(server.wait_exit().await.success());
        let took = begun.elapsed();
        assert!(took < Duration::from_secs(10), "{took:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_and_the_audit_log_name_the_callers_trace_without_a_collector() {
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .switch("--audit-log")
        .ready()
        .await;
    let fencepost = async |arguments: &[&str]| {
        let mut command = bare(cli());
        command
            .args(arguments)
            .args(["--endpoint", &server.url()])
            .env("TRACEPARENT", format!("00-{TRACE}-{PARENT}-01"));
        run(command).await
    };
    let acquired = fencepost(&["acquire", "a", "--owner", "b", "--ttl", "1m"]).await;
    assert_eq!(acquired.code, Some(0), "{}", acquired.stderr);
    let unknown = (1_i64 << 52).to_string();
    let renewed = fencepost(&["renew", "a", "--owner", "b", "--token", &unknown]).await;
    assert_eq!(renewed.code, Some(76), "{}", renewed.stderr);
    server
        .wait_for_log("the audit", |line| {
            line["target"] == "audit" && line["trace_id"] == TRACE
        })
        .await;
    server
        .wait_for_log("the alarm", |line| {
            line["level"] == "ERROR" && line["span"]["trace_id"] == TRACE
        })
        .await;
}

#[tokio::test]
async fn an_endpoint_with_credentials_is_refused_and_not_repeated() {
    let database = fresh_database().await;
    for endpoint in [
        "http://user:swordfish@127.0.0.1:4317",
        "https://127.0.0.1:4317",
        "swordfish",
        "http://127.0.0.1:4317/?key=swordfish",
    ] {
        let ended = traced(&database.url(), endpoint)
            .try_start()
            .await
            .unwrap_err();
        assert_eq!(ended.status.code(), Some(78), "{endpoint}");
        let said = ended.lines.join("\n");
        assert!(said.contains("--otlp-endpoint"), "{said}");
        assert!(!said.contains("swordfish"), "{said}");
    }
}

/// Collectors of others want a token, which the exporter takes from its usual variable.
#[tokio::test(flavor = "multi_thread")]
async fn the_token_for_a_collector_is_sent_and_told_to_nobody_else() {
    let (marker, database) = (marker(), fresh_database().await);
    let collector = Collector::start().await;
    let proxy = Proxy::start(collector.url()[7..].parse().unwrap()).await;
    let started = |headers: &str| {
        traced(&database.url(), &format!("http://{}", proxy.address()))
            .flag(
                "--log",
                "trace,h2=trace,hyper=trace,tonic=trace,opentelemetry=trace",
            )
            .env("OTEL_EXPORTER_OTLP_HEADERS", headers)
    };
    let server = started(&format!("authorization=Bearer%20{marker}"))
        .ready()
        .await;
    let mut client = server.client().await;
    granted(&mut client, "a", "owner", LONG).await;
    let is_acquire = |span: &_| attribute(span, "rpc.method").as_deref() == Some("Acquire");
    collector.span("the call", is_acquire).await;
    assert_eq!(
        collector.header("authorization").unwrap(),
        format!("Bearer {marker}")
    );
    // An export fails.
    proxy.refuse().await;
    proxy.reset().await;
    let looked = calls::get(&mut client, "a").await;
    assert_clean(&[format!("{looked:?}")], &marker);
    let (_, metrics) = health::get(server.http(), "/metrics").await;
    assert_clean(&[metrics], &marker);
    server.sigterm();
    assert!(server.wait_exit().await.success());
    let lines = server.logs();
    assert!(
        lines.iter().any(|line| line.contains("tcp connect error")),
        "{lines:?}"
    );
    assert_clean(&lines, &marker);

    // What is no header is told without its value, whether it is left out or refused.
    for bad in [
        marker.clone(),
        format!("authorization=Bearer%0A{marker}"),
        format!("not a name=Bearer {marker}"),
    ] {
        let lines = match started(&bad).try_start().await {
            Ok(server) => {
                server.sigterm();
                server.wait_exit().await;
                server.logs()
            }
            Err(ended) => ended.lines,
        };
        assert_clean(&lines, &marker);
    }
}
