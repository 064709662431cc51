//! TLS on the port of clients, and to Postgres.

mod database;
mod hints;
mod keys;
mod no_files;
mod refusals;
mod reload;
mod stage;

use fencepost_proto::v1::{GetRequest, LOCK_SERVICE};
use fencepost_support::{
    Server,
    server::{Client, channel_at},
    system::free_address,
    tls::{HOUR, Usage},
};
use serde_json::Value;
use tonic::Code;
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use self::stage::{Stage, options};
use crate::programs::{bare, cli, expect_no_start, run};

const UNAVAILABLE: i32 = 69;
const CONFIGURATION: i32 = 78;

#[tokio::test(flavor = "multi_thread")]
async fn locks_are_taken_through_tls() {
    let stage = Stage::new(false).await;
    let client = stage.client(stage.trust());
    let guard = client.acquire("through-tls", options()).await.unwrap();
    assert!(guard.is_held());
    guard.release().await.unwrap();
    let tls = stage.metric("fencepost_tls_certificate_expires_timestamp_seconds");
    assert!(tls.await > 1e9);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_line_speaks_tls() {
    let stage = Stage::new(true).await;
    stage.issue_client("me", HOUR);
    let acquire = |flags: &[(&str, &str)], environment: &[(&str, &str)]| {
        let mut command = bare(cli());
        command.args(["acquire", "by-cli", "--owner", "a", "--ttl", "30s"]);
        command.args(["--timeout", "2s"]);
        command.args(["--endpoint", &stage.url()]);
        for (flag, file) in flags {
            command.args([*flag, &stage.folder.name(file)]);
        }
        let named = environment.iter();
        command.envs(named.map(|(name, file)| (*name, stage.folder.name(file))));
        run(command)
    };
    let ended = acquire(
        &[
            ("--tls-ca", "ca.crt"),
            ("--tls-cert", "me.crt"),
            ("--tls-key", "me.key"),
        ],
        &[],
    );
    let ended = ended.await;
    assert_eq!(ended.code, Some(0), "{}", ended.said());
    let ended = acquire(
        &[],
        &[
            ("FENCEPOST_TLS_CA", "ca.crt"),
            ("FENCEPOST_TLS_CERT", "me.crt"),
            ("FENCEPOST_TLS_KEY", "me.key"),
        ],
    );
    let ended = ended.await;
    assert_eq!(ended.code, Some(0), "{}", ended.said());
    // No certificate of its own; then nobody to trust.
    let ended = acquire(&[("--tls-ca", "ca.crt")], &[]).await;
    assert_eq!(ended.code, Some(69), "{}", ended.said());
    let ended = acquire(&[], &[]).await;
    assert_eq!(ended.code, Some(69), "{}", ended.said());
    assert!(ended.stderr.contains("certificate"), "{}", ended.stderr);
    for (flags, named) in [
        (&[("--tls-ca", "not-there")][..], "CA file"),
        (
            &[("--tls-ca", "ca.crt"), ("--tls-cert", "me.crt")],
            "--tls-key",
        ),
        (
            &[
                ("--tls-ca", "ca.crt"),
                ("--tls-cert", "me.crt"),
                ("--tls-key", "server.key"),
            ],
            "key does not match",
        ),
    ] {
        let ended = acquire(flags, &[]).await;
        assert_eq!(ended.code, Some(CONFIGURATION), "{}", ended.said());
        assert!(ended.stderr.contains(named), "{}", ended.stderr);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_health_port_stays_plain_and_serves_health_alone() {
    let health = free_address();
    let stage = Stage::with(true, |server| {
        server.flag("--health-listen", &health.to_string())
    })
    .await;
    let channel = channel_at(health).await;
    let mut probe = HealthClient::new(channel.clone());
    for name in ["", LOCK_SERVICE, "liveness"] {
        let service = name.to_owned();
        let answer = probe.check(HealthCheckRequest { service }).await.unwrap();
        assert_eq!(answer.into_inner().status(), ServingStatus::Serving);
    }
    let resource = "a".to_owned();
    let refused = Client::new(channel).get(GetRequest { resource }).await;
    assert_eq!(refused.unwrap_err().code(), Code::Unimplemented);

    // It drains with the rest.
    stage.server.sigterm();
    let service = LOCK_SERVICE.to_owned();
    fencepost_support::eventually("the health port says so", async || {
        let request = HealthCheckRequest {
            service: service.clone(),
        };
        let answer = probe.check(request).await.ok()?.into_inner();
        (answer.status() == ServingStatus::NotServing).then_some(())
    })
    .await;
    assert!(stage.server.wait_exit().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_audit_log_names_whom_a_certificate_names() {
    let stage = Stage::with(true, |server| server.switch("--audit-log")).await;
    stage.issue_client("worker", HOUR);
    let client = stage.client(stage.as_client("worker"));
    let guard = client.acquire("by-worker", options()).await.unwrap();
    guard.release().await.unwrap();
    for event in ["acquired", "released"] {
        let told = |line: &Value| line["target"] == "audit" && line["event"] == event;
        let line = stage.server.wait_for_log(event, told).await;
        assert_eq!(line["subject"], "CN=worker", "{line}");
        assert!(line["peer"].is_string(), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn flags_of_tls_are_checked_at_the_start() {
    let stage = Stage::new(true).await;
    let url = "postgres://u@127.0.0.1:1/locks";
    let (crt, key) = (
        stage.folder.name("server.crt"),
        stage.folder.name("server.key"),
    );
    let nothing = stage.folder.write("nothing", "no PEM at all");
    let nothing = nothing.to_str().unwrap();
    let for_clients = stage.authority.issue_for("server", &[], Usage::Client);
    stage.folder.write_both("for-clients", &for_clients);
    for (flags, named) in [
        (&[("--tls-cert", &*crt)][..], "--tls-key"),
        (&[("--tls-key", &key)], "--tls-cert"),
        (&[("--tls-client-ca", &crt)], "--tls-cert"),
        (
            &[("--tls-cert", "/not/there"), ("--tls-key", &key)],
            "--tls-cert cannot be read",
        ),
        (
            &[("--tls-cert", nothing), ("--tls-key", &key)],
            "--tls-cert holds no certificate",
        ),
        (
            &[("--tls-cert", &crt), ("--tls-key", nothing)],
            "--tls-key holds no private key",
        ),
        (
            &[
                ("--tls-cert", &stage.folder.name("ca.crt")),
                ("--tls-key", &key),
            ],
            "--tls-key does not match",
        ),
        (
            &[
                ("--tls-cert", &stage.folder.name("for-clients.crt")),
                ("--tls-key", &stage.folder.name("for-clients.key")),
            ],
            "--tls-cert holds a certificate that is not for servers",
        ),
        (
            &[
                ("--tls-cert", &crt),
                ("--tls-key", &key),
                ("--tls-client-ca", nothing),
            ],
            "--tls-client-ca holds no certificate",
        ),
    ] {
        let mut server = Server::builder(url);
        for (flag, value) in flags {
            server = server.flag(flag, value);
        }
        let line = expect_no_start(server, CONFIGURATION).await;
        assert!(line.contains(named), "{named}: {line}");
        assert!(!line.contains("/not/there"), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn plaintext_for_other_machines_is_asked_for_by_name() {
    // Nobody has this address, so nothing is opened: it fails a step later.
    let elsewhere = "192.0.2.1:1".parse().unwrap();
    let server = || Server::builder("postgres://u@127.0.0.1:1/locks").listen(elsewhere);
    let line = expect_no_start(server(), CONFIGURATION).await;
    assert!(line.contains("--allow-plaintext"), "{line}");
    let asked = server().switch("--allow-plaintext");
    let line = expect_no_start(asked, UNAVAILABLE).await;
    assert!(line.contains("cannot listen on 192.0.2.1:1"), "{line}");
    let asked = server().env("FENCEPOST_ALLOW_PLAINTEXT", "true");
    let line = expect_no_start(asked, UNAVAILABLE).await;
    assert!(line.contains("cannot listen on 192.0.2.1:1"), "{line}");
}
