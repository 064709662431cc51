//! What a client is told that no server lets in, or that speaks to the wrong port.

use std::net::SocketAddr;

use fencepost_client::{Client, Error};
use fencepost_support::{
    Server,
    postgres::fresh_database,
    system::free_address,
    tls::{Authority, HOUR, Usage},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    task::JoinSet,
};

use super::stage::{Stage, options};
use crate::programs::{Ended, bare, cli, run};

const UNAVAILABLE: i32 = 69;

const WANTED: &str = "(does it want a client certificate, --tls-cert and --tls-key?)";
const NOT_TRUSTED: &str = "(does it trust the client certificate, and is that one for clients?)";

/// What the command line says, which trusts the stage's authority and has `NAME.crt`.
async fn said(stage: &Stage, url: &str, name: Option<&str>, arguments: &[&str]) -> Ended {
    let mut command = bare(cli());
    command.args(["--endpoint", url, "--timeout", "1s"]);
    command.args(["--tls-ca", &stage.folder.name("ca.crt")]);
    if let Some(name) = name {
        command.args(["--tls-cert", &stage.folder.name(&format!("{name}.crt"))]);
        command.args(["--tls-key", &stage.folder.name(&format!("{name}.key"))]);
    }
    command.args(arguments);
    run(command).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_is_not_let_in_is_told_what_is_likely_wrong() {
    let stage = Stage::new(true).await;
    let (authority, folder) = (&stage.authority, &stage.folder);
    folder.write_both(
        "for-servers",
        &authority.issue_for("me", &[], Usage::Server),
    );
    folder.write_both("expired", &authority.issue_expired("me", &[]));
    let stranger = Authority::new("somebody else").issue("me", &[], HOUR);
    folder.write_both("stranger", &stranger);
    let url = stage.url();
    for (name, alert, hint) in [
        (None, "CertificateRequired", WANTED),
        (Some("for-servers"), "UnsupportedCertificate", NOT_TRUSTED),
        (Some("expired"), "CertificateExpired", NOT_TRUSTED),
        (Some("stranger"), "UnknownCA", NOT_TRUSTED),
    ] {
        let told = format!("not available now: no connection to {url}/: the server ended the ");
        let hint = &format!("{alert} {hint}");
        let ended = said(&stage, &url, name, &["get", "a"]).await;
        assert_eq!(ended.code, Some(UNAVAILABLE), "{}", ended.said());
        assert!(ended.stderr.contains(&told), "{name:?}: {}", ended.stderr);
        assert!(ended.stderr.contains(hint), "{name:?}: {}", ended.stderr);
    }
    let job = ["run", "a", "--wait", "2s", "--", "true"];
    let ended = said(&stage, &url, None, &job).await;
    assert_eq!(ended.code, Some(UNAVAILABLE), "{}", ended.said());
    let waiting = ended.stderr.lines().find(|line| line.contains("waiting:"));
    assert!(waiting.unwrap().contains(WANTED), "{}", ended.stderr);

    let keep = "keepalive a --owner a --token 1 --ttl 1s";
    let keep: Vec<_> = keep.split_whitespace().collect();
    let ended = said(&stage, &url, None, &keep).await;
    assert!(ended.stderr.contains(WANTED), "{}", ended.said());

    // The certificate is mended, and the same client goes on.
    let client = stage.client(stage.as_client("expired"));
    client.get("a").await.unwrap_err();
    stage.issue_client("expired", HOUR);
    client.get("a").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_wrong_scheme_and_the_wrong_port_are_told() {
    let stage = Stage::new(false).await;
    let database = fresh_database().await;
    let plain = Server::start(&database.url()).await;
    let (web, _serving) = answers(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
    for (url, hint) in [
        (
            format!("http://{}", stage.server.grpc()),
            "(does it speak TLS? then https://)",
        ),
        (format!("https://{}", plain.grpc()), "(does it speak TLS?)"),
        (format!("https://{}", plain.http()), "(does it speak TLS?)"),
        (format!("http://{web}"), "(is it the port for clients?)"),
    ] {
        let ended = said(&stage, &url, None, &["get", "a"]).await;
        assert_eq!(ended.code, Some(UNAVAILABLE), "{}", ended.said());
        assert!(ended.stderr.contains(hint), "{url}: {}", ended.stderr);
        let told = format!("no connection to {url}/: ");
        assert!(ended.stderr.contains(&told), "{url}: {}", ended.stderr);
    }
}

/// A port where every connection ends with this answer.
async fn answers(answer: &'static [u8]) -> (SocketAddr, JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            // The client may be gone.
            let _ = stream.read(&mut [0; 1024]).await;
            let _ = stream.write_all(answer).await;
        }
    });
    (address, serving)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_merely_away_is_told_without_a_guess() {
    let stage = Stage::new(true).await;
    stage.issue_client("me", HOUR);
    let (closes, _serving) = answers(b"").await;
    for address in [free_address(), closes] {
        for scheme in ["http", "https"] {
            let url = format!("{scheme}://{address}");
            let ended = said(&stage, &url, None, &["get", "a"]).await;
            assert_eq!(ended.code, Some(UNAVAILABLE), "{}", ended.said());
            assert!(!ended.stderr.contains('?'), "{}", ended.stderr);
            assert!(ended.stderr.contains(&url), "{}", ended.stderr);
        }
    }

    let url = stage.url();
    let client: Client = stage.client(stage.as_client("me"));
    let guard = client.acquire("a", options()).await.unwrap();
    drop(stage);
    match client.get("a").await {
        Err(Error::Unavailable { detail }) => {
            assert!(detail.contains(&url) && !detail.contains('?'), "{detail}");
        }
        other => panic!("{other:?}"),
    }
    drop(guard);
}
