//! Who is not let in, and that they keep nobody out.

use std::time::{Duration, Instant};

use fencepost_client::{Client, Error, Tls};
use fencepost_support::{
    eventually,
    proxy::Proxy,
    server::Builder,
    tls::{Authority, HOUR},
    wait::within,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use super::stage::{Stage, options};

/// What this client is told.
async fn refusal(stage: &Stage, tls: Tls) -> String {
    let refused = stage.client(tls).acquire("refused", options()).await;
    match refused {
        Err(Error::Unavailable { detail }) => detail,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_good_certificate_no_client_is_let_in() {
    // Each refusal is told at that level, and to the client as little as can be.
    let debug = |server: Builder| server.flag("--log", "info,fencepostd=debug");
    let stage = Stage::with(true, debug).await;
    let folder = &stage.folder;
    stage.issue_client("good", HOUR);
    let expired = stage.authority.issue_expired("expired", &[]);
    folder.write_both("expired", &expired);
    let stranger = Authority::new("somebody else").issue("stranger", &[], HOUR);
    folder.write_both("stranger", &stranger);

    let good = stage.client(stage.as_client("good"));
    drop(good.acquire("let-in", options()).await.unwrap());
    assert_eq!(
        stage.metric("fencepost_tls_handshakes_failed_total").await,
        0.0
    );
    for (tls, told) in [
        (stage.trust(), "peer sent no certificates"),
        (stage.as_client("expired"), "certificate expired"),
        (stage.as_client("stranger"), "UnknownIssuer"),
    ] {
        refusal(&stage, tls).await;
        eventually(told, async || stage.has_logged(told).then_some(())).await;
    }
    assert!(stage.metric("fencepost_tls_handshakes_failed_total").await >= 3.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_earlier_session_lets_an_expired_certificate_in() {
    let stage = Stage::with(true, |server| server.flag("--log", "info,fencepostd=debug")).await;
    let proxy = Proxy::start(stage.server.grpc()).await;
    let life = Duration::from_secs(5);
    stage.issue_client("brief", life);
    let client = Client::builder(format!("https://{}", proxy.address()))
        .tls(stage.as_client("brief"))
        .timeout(Duration::from_secs(2))
        .build()
        .unwrap();
    client.get("a").await.unwrap();
    // It goes on with the session that it has, where the server lets it.
    proxy.reset().await;
    client.get("a").await.unwrap();
    let told = "certificate expired";
    within(4 * life, told, async || {
        proxy.reset().await;
        let refused = client.get("a").await.is_err();
        (refused && stage.has_logged(told)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_trusts_no_other_server() {
    let stage = Stage::new(false).await;
    let other = Authority::new("somebody else");
    stage.folder.write("other.crt", &other.pem());
    let tls = Tls::default().ca_file(stage.folder.path("other.crt"));
    let detail = refusal(&stage, tls).await;
    assert!(detail.contains("UnknownIssuer"), "{detail}");

    // The right authority, for another name.
    let other = stage.authority.issue("other", &["other.example"], HOUR);
    stage.folder.write_both("server", &other);
    eventually("the other certificate is served", async || {
        let detail = match stage.client(stage.trust()).get("a").await {
            Err(Error::Unavailable { detail }) => detail,
            _ => return None,
        };
        detail.contains("not valid for name").then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn plaintext_is_refused_at_once() {
    let stage = Stage::new(false).await;
    let asked = Instant::now();
    let mut stream = TcpStream::connect(stage.server.grpc()).await.unwrap();
    stream
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        .await
        .unwrap();
    let mut answer = Vec::new();
    // An end, or a reset.
    let _ = stream.read_to_end(&mut answer).await;
    assert!(asked.elapsed() < Duration::from_secs(2));
    // At most an alert of TLS.
    assert!(answer.is_empty() || answer[0] == 21, "{answer:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn half_open_handshakes_keep_nobody_out() {
    let stage = Stage::new(false).await;
    let before = stage.client(stage.trust());
    let guard = before.acquire("held", options()).await.unwrap();
    // More than there is room for at one time: a part says nothing, a part begins.
    let mut open = Vec::new();
    for n in 0..600 {
        let mut stream = TcpStream::connect(stage.server.grpc()).await.unwrap();
        if n % 2 == 0 {
            stream.write_all(&[22, 3, 1, 2, 0, 1]).await.unwrap();
        }
        open.push(stream);
    }
    for n in 0..5 {
        let asked = Instant::now();
        let client = stage.client(stage.trust());
        let name = format!("beside-{n}");
        drop(client.acquire(&name, options()).await.unwrap());
        assert!(asked.elapsed() < Duration::from_millis(1900), "{asked:?}");
    }
    assert!(guard.is_held());
    // Each of them is ended in time.
    within(Duration::from_secs(15), "all are ended", async || {
        let failed = stage.metric("fencepost_tls_handshakes_failed_total").await;
        (failed >= 600.0).then_some(())
    })
    .await;
    drop(open);
}
