//! What no generated client sends: broken text, broken messages, too much of
//! them. Each is the caller's fault, and harms nobody else.

use fencepost_proto::v1::{AcquireRequest, AcquireResponse, GetResponse, ReleaseResponse};
use fencepost_support::{
    Server,
    calls::{self, expect_error, expect_final, get, granted, send},
    eventually,
    postgres::fresh_database,
    raw::{Body, unary},
    server::Client,
};
use serde_json::Value;
use tonic::{Code, Status, transport::Channel};

use crate::world::{LONG, client, fresh, shared};

/// Bytes that are no UTF-8: a lone continuation, a cut sequence, an overlong
/// slash and NUL, halves of a surrogate pair, beyond the last character.
const NOT_UTF_8: [&[u8]; 8] = [
    b"\x80",
    b"a\xc3",
    b"\xc0\xaf",
    b"\xc0\x80",
    b"\xed\xa0\x80",
    b"\xed\xb0\x80",
    b"\xf4\x90\x80\x80",
    b"\xff",
];

#[track_caller]
fn expect_invalid<T: std::fmt::Debug>(answer: Result<T, Status>) {
    let status = expect_error(answer, Code::InvalidArgument, "INVALID_REQUEST");
    expect_final(&status);
}

async fn acquire_raw(channel: &Channel, body: Body) -> Result<AcquireResponse, Status> {
    unary(channel, "Acquire", body).await
}

#[tokio::test]
async fn invalid_utf_8_is_the_callers_fault_in_every_field() {
    let channel = shared().await.server.channel().await;
    let ttl = calls::seconds(60);
    for bad in NOT_UTF_8 {
        let label = |key: &[u8], value: &[u8]| {
            let entry = Vec::from(bytes_of(Body::new().bytes(1, key).bytes(2, value)));
            let start = Body::new().bytes(1, fresh("utf-8")).bytes(2, "a");
            start.message(3, &ttl).bytes(4, entry)
        };
        let bodies = [
            Body::new().bytes(1, bad).bytes(2, "a").message(3, &ttl),
            Body::new().bytes(1, "a").bytes(2, bad).message(3, &ttl),
            Body::new()
                .bytes(1, "a")
                .bytes(2, "a")
                .message(3, &ttl)
                .bytes(5, bad),
            label(bad, b"v"),
            label(b"k", bad),
        ];
        for body in bodies {
            expect_invalid(acquire_raw(&channel, body).await);
        }
        let body = Body::new().bytes(1, bad);
        expect_invalid(unary::<GetResponse>(&channel, "Get", body).await);
        for method in ["Release", "Renew"] {
            let body = Body::new().bytes(1, "a").bytes(2, bad).integer(3, 1);
            expect_invalid(unary::<ReleaseResponse>(&channel, method, body).await);
        }
    }
    granted(&mut Client::new(channel), &fresh("utf-8"), "a", LONG).await;
}

fn bytes_of(body: Body) -> bytes::Bytes {
    body.into()
}

#[tokio::test]
async fn a_message_that_is_none_is_the_callers_fault() {
    let channel = shared().await.server.channel().await;
    let broken: [&[u8]; 6] = [
        b"\xff",                     // a key without its end
        b"\x0a\x05ab",               // a string shorter than it says
        b"\x0a\xff\xff\xff\xff\x0f", // a string of 4 GiB
        b"\x08\x01",                 // an integer where a string belongs
        b"\x00\x00",                 // field 0
        b"\x0b",                     // a group without its end
    ];
    for body in broken {
        let answer = unary::<AcquireResponse>(&channel, "Acquire", body).await;
        expect_invalid(answer);
    }
    granted(&mut Client::new(channel), &fresh("broken"), "a", LONG).await;
}

#[tokio::test]
async fn an_unknown_field_is_ignored() {
    let channel = shared().await.server.channel().await;
    let ask = Body::new()
        .bytes(1, fresh("unknown-field"))
        .bytes(2, "a")
        .message(3, &calls::seconds(60))
        .bytes(900, "from the future")
        .integer(901, -1);
    assert!(acquire_raw(&channel, ask).await.unwrap().acquired);
}

#[tokio::test]
async fn a_message_is_at_most_64_kib() {
    let channel = shared().await.server.channel().await;
    let sized = |size: usize| {
        let ask = || {
            Body::new()
                .bytes(1, "sixty-four")
                .bytes(2, "a")
                .message(3, &calls::seconds(60))
        };
        // A field that nobody knows fills it up: its key takes two bytes, its
        // length three.
        let rest = size - bytes_of(ask()).len() - 5;
        let body = ask().bytes(900, vec![b'x'; rest]);
        assert_eq!(bytes_of(body.clone()).len(), size);
        body
    };
    let limit = 64 * 1024;
    assert!(acquire_raw(&channel, sized(limit)).await.unwrap().acquired);
    for size in [limit + 1, limit * 2, 1_000_000] {
        expect_invalid(acquire_raw(&channel, sized(size)).await);
    }
    assert!(acquire_raw(&channel, sized(limit)).await.unwrap().acquired);
}

#[tokio::test]
async fn a_message_of_5_mb_leaves_the_other_calls_of_its_connection_alone() {
    let (mut client, name) = (client().await, fresh("five-mb"));
    let token = granted(&mut client, &name, "a", LONG).await.fencing_token;
    let huge: Vec<_> = (0..4)
        .map(|n| {
            let mut client = client.clone();
            tokio::spawn(async move {
                let ask = AcquireRequest {
                    resource: n.to_string().repeat(5_000_000),
                    ..calls::request("", "a", LONG)
                };
                send(&mut client, ask).await
            })
        })
        .collect();
    for _ in 0..50 {
        calls::renew(&mut client, &name, "a", token, None)
            .await
            .unwrap();
    }
    for answer in huge {
        expect_invalid(answer.await.unwrap());
    }
    get(&mut client, &name).await.unwrap();
}

/// Refused before the database: its rows and its sessions know nothing of it.
#[tokio::test]
async fn bad_input_does_not_reach_the_database() {
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let mut client = server.client().await;
    let there = database.client().await;
    let statements = "SELECT xact_commit + xact_rollback FROM pg_stat_database
                      WHERE datname = current_database()";
    granted(&mut client, "good", "a", LONG).await;
    let before: i64 = there.value(statements).await;
    for _ in 0..500 {
        let ask = calls::request("bad\0name", "a", LONG);
        expect_invalid(send(&mut client, ask).await);
    }
    let count: i64 = there.value("SELECT count(*) FROM fencepost.locks").await;
    assert_eq!(count, 1);
    let after: i64 = there.value(statements).await;
    // The server's own checks go on, and these two looks count as well.
    assert!(after - before < 100, "{} transactions", after - before);
}

/// Every line of the log stays one JSON object, whatever callers send.
#[tokio::test]
async fn no_input_forges_a_line_of_the_log() {
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .env("FENCEPOST_LOG", "debug")
        .start()
        .await;
    server.wait_ready().await;
    let mut client = server.client().await;
    let forged = "x\n{\"level\":\"ERROR\",\"message\":\"forged\"}\n";
    for text in [
        forged,
        "x\r\nforged",
        "\u{1b}[2Jforged",
        "x\u{85}forged",
        "x\u{2028}forged",
    ] {
        let bad = |ask: AcquireRequest| send_ignoring(client.clone(), ask);
        bad(calls::request(text, "a", LONG)).await;
        bad(calls::request("a", text, LONG)).await;
        bad(calls::request_with_id("a", "a", LONG, text)).await;
        bad(AcquireRequest {
            labels: [("k".to_owned(), text.to_owned())].into(),
            ..calls::request("labels", "a", LONG)
        })
        .await;
    }
    // A name that is allowed and logged: it has what could end a JSON string.
    let name = "quote\" backslash\\ brace} \u{2028}forged";
    let token = granted(&mut client, name, "a", LONG).await.fencing_token;
    let unknown = calls::renew(&mut client, name, "a", token + 1, None).await;
    expect_error(unknown, Code::Aborted, "TOKEN_UNKNOWN");
    server
        .wait_for_log("the alarm", |line| line["level"] == "ERROR")
        .await;
    for line in server.logs() {
        let parsed: Value = serde_json::from_str(&line)
            .unwrap_or_else(|error| panic!("not JSON: {error}: {line:?}"));
        assert!(parsed.is_object(), "{line}");
        assert_ne!(parsed["message"], "forged");
        assert!(!line.contains(char::is_control), "{line:?}");
    }
}

/// Whoever makes tokens up fills no log.
#[tokio::test(flavor = "multi_thread")]
async fn tokens_that_are_made_up_are_an_error_in_the_log_only_seldom() {
    const TRIES: i64 = 50;
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .flag("--log", "info,fencepostd::service::status=debug")
        .ready()
        .await;
    let mut client = server.client().await;
    let token = granted(&mut client, "a", "a", LONG).await.fencing_token;
    for n in 1..=TRIES {
        let renewed = calls::renew(&mut client, "a", "a", token + n, None).await;
        expect_error(renewed, Code::Aborted, "TOKEN_UNKNOWN");
    }
    let told = |level: &str| {
        let lines = server.logs();
        let lines = lines.iter().filter(|line| line.contains("larger than any"));
        lines.filter(|line| line.contains(level)).count()
    };
    eventually("all are told", async || {
        (told("") >= usize::try_from(TRIES).unwrap()).then_some(())
    })
    .await;
    // A slow run has one more.
    assert!((1..5).contains(&told("\"ERROR\"")), "{:?}", server.logs());
}

async fn send_ignoring(mut client: Client, ask: AcquireRequest) {
    // Refused or not: this is about what is logged.
    let _ = send(&mut client, ask).await;
}
