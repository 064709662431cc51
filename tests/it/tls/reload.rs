//! Certificates that are renewed under way.

use std::{
    os::unix::fs::symlink,
    time::{Duration, Instant},
};

use fencepost_client::{Error, Tls};
use fencepost_support::{
    eventually,
    tls::{Authority, Folder, HOUR, Issued, Usage},
};

use super::stage::{NAMES, Stage, options};

const UNUSABLE: &str = "fencepost_tls_files_unusable";
pub(super) const EXPIRES: &str = "fencepost_tls_certificate_expires_timestamp_seconds";

/// Holds locks while the certificates of both sides, which last for `life`, are
/// renewed every third of it, and connects anew all along.
async fn renew_under_load(life: Duration, total: Duration) {
    let authority = Authority::new("the tests");
    let folder = Folder::default();
    folder.write("ca.crt", &authority.pem());
    folder.write_both("server", &authority.issue("server", &NAMES, life));
    let stage = Stage::of(authority, folder, true, |server| server).await;
    stage.issue_client("me", life);
    let mut begun = Instant::now();
    let first = stage.metric(EXPIRES).await;

    let holder = stage.client(stage.as_client("me"));
    let mut guards = Vec::new();
    for n in 0..20 {
        let name = format!("held-{n}");
        let options = options().ttl(Duration::from_secs(3));
        guards.push(holder.acquire(&name, options).await.unwrap());
    }
    let until = begun + total;
    while Instant::now() < until {
        if begun.elapsed() >= life / 3 {
            begun = Instant::now();
            let server = stage.authority.issue("server", &NAMES, life);
            stage.folder.write_both("server", &server);
            stage.issue_client("me", life);
        }
        // The files may be one of each, for a moment.
        let client = stage.client(stage.as_client("me"));
        let fresh = client.acquire("fresh", options()).await;
        fresh.unwrap().release().await.unwrap();
        tokio::time::sleep(life / 30).await;
    }
    // Whatever has connected first did so with certificates that are over.
    for guard in &guards {
        assert!(guard.is_held(), "{guard:?}");
        let lock = holder.get(guard.resource()).await.unwrap().unwrap();
        assert_eq!(lock.fencing_token, guard.fencing_token());
    }
    assert!(stage.metric(EXPIRES).await > first);
    assert_eq!(stage.reload_failures().await, 0.0);
    // By TLS, that is: a client that leaves may be in the middle of one.
    assert!(!stage.has_logged("a TLS handshake failed"));
}

#[tokio::test(flavor = "multi_thread")]
async fn no_lock_is_lost_while_certificates_are_renewed() {
    renew_under_load(Duration::from_secs(6), Duration::from_secs(16)).await;
}

/// `make soak`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "ten minutes"]
async fn no_lock_is_lost_in_ten_minutes_of_certificates_of_two() {
    renew_under_load(Duration::from_secs(120), Duration::from_secs(600)).await;
}

/// Waits for a line of the log of a file that cannot be used.
pub(super) async fn told(stage: &Stage, text: &str) {
    let what = format!("{text} is told");
    eventually(&what, async || stage.has_logged(text).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_file_changes_nothing_and_is_told() {
    let stage = Stage::new(false).await;
    let at_first = stage.metric(EXPIRES).await;
    let works = async || {
        let client = stage.client(stage.trust());
        client.get("a").await.unwrap();
        assert_eq!(stage.metric(EXPIRES).await, at_first);
        assert_eq!(stage.metric(UNUSABLE).await, 1.0);
    };
    assert_eq!(stage.metric(UNUSABLE).await, 0.0);
    stage.folder.write("server.crt", "MARKER-of-rubbish");
    told(&stage, "--tls-cert holds no certificate").await;
    works().await;

    let expired = stage.authority.issue_expired("server", &NAMES);
    stage.folder.write_both("server", &expired);
    told(&stage, "--tls-cert holds a certificate that has expired").await;
    works().await;

    let other = stage.authority.issue("server", &NAMES, 2 * HOUR);
    stage.folder.write("server.crt", &other.certificate);
    told(&stage, "--tls-key does not match the certificate").await;
    works().await;

    std::fs::remove_file(stage.folder.path("server.key")).unwrap();
    told(&stage, "--tls-key cannot be read").await;
    works().await;
    assert_eq!(stage.reload_failures().await, 4.0);

    stage.folder.write("server.key", &other.key);
    eventually("the good ones are used", async || {
        (stage.metric(EXPIRES).await > at_first).then_some(())
    })
    .await;
    stage.client(stage.trust()).get("a").await.unwrap();
    assert_eq!(stage.reload_failures().await, 4.0);
    assert_eq!(stage.metric(UNUSABLE).await, 0.0);
    assert!(!stage.has_logged("MARKER"));
    assert!(!stage.has_logged(stage.folder.path("server.key").to_str().unwrap()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_that_clients_would_refuse_replaces_none() {
    let stage = Stage::new(false).await;
    let at_first = stage.metric(EXPIRES).await;
    let works = async || {
        let client = stage.client(stage.trust());
        client.get("a").await.unwrap();
    };
    let for_clients = stage.authority.issue_for("server", &NAMES, Usage::Client);
    stage.folder.write_both("server", &for_clients);
    told(
        &stage,
        "--tls-cert holds a certificate that is not for servers",
    )
    .await;
    works().await;
    assert_eq!(stage.metric(EXPIRES).await, at_first);

    let wait = Duration::from_secs(12);
    let later = stage.authority.issue_later("server", &NAMES, wait);
    stage.folder.write_both("server", &later);
    told(
        &stage,
        "--tls-cert holds a certificate that is not valid yet",
    )
    .await;
    works().await;
    assert_eq!(stage.metric(EXPIRES).await, at_first);
    // Then it is, by itself.
    let next = eventually("its time has come", async || {
        let next = stage.metric(EXPIRES).await;
        (next > at_first).then_some(next)
    })
    .await;
    works().await;
    assert_eq!(stage.reload_failures().await, 2.0);

    let for_servers = stage.authority.issue_for("server", &NAMES, Usage::Server);
    stage.folder.write_both("server", &for_servers);
    eventually("the one for servers is used", async || {
        (stage.metric(EXPIRES).await > next).then_some(())
    })
    .await;
    works().await;
    assert_eq!(stage.reload_failures().await, 2.0);
}

/// There is no other, and the clock that is wrong may be this machine's.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_starts_with_a_certificate_out_of_its_time_and_says_so() {
    let untimely = |issue: fn(&Authority) -> Issued| {
        let (authority, folder) = (Authority::new("the tests"), Folder::default());
        folder.write("ca.crt", &authority.pem());
        folder.write_both("server", &issue(&authority));
        Stage::of(authority, folder, false, |server| server)
    };
    let stage = untimely(|authority| authority.issue_expired("server", &NAMES)).await;
    assert!(stage.has_logged("--tls-cert holds a certificate that has expired; it is used"));

    let stage =
        untimely(|authority| authority.issue_later("server", &NAMES, Duration::from_secs(5))).await;
    assert!(stage.has_logged("--tls-cert holds a certificate that is not valid yet; it is used"));
    let works = async || stage.client(stage.trust()).get("a").await.ok();
    eventually("its time has come", works).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_list_of_authorities_lets_nobody_else_in() {
    let stage = Stage::new(true).await;
    stage.issue_client("me", HOUR);
    stage.folder.write("trust.crt", &stage.authority.pem());
    let trust = || Tls::default().ca_file(stage.folder.path("trust.crt"));
    let file = |kind| stage.folder.path(&format!("me.{kind}"));
    for (bad, what) in [
        ("", "--tls-client-ca holds no certificate"),
        (
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
            "--tls-client-ca holds a certificate that cannot be used",
        ),
    ] {
        stage.folder.write("ca.crt", bad);
        told(&stage, what).await;
        let me = stage.client(trust().identity_files(file("crt"), file("key")));
        me.get("a").await.unwrap();
        let nobody = stage.client(trust()).get("a").await;
        assert!(
            matches!(nobody, Err(Error::Unavailable { .. })),
            "{nobody:?}"
        );
    }
    // Another authority's clients are let in from now on, and no others.
    let other = Authority::new("somebody else");
    stage.folder.write("ca.crt", &other.pem());
    let next = other.issue("next", &[], HOUR);
    stage.folder.write_both("next", &next);
    let file = |kind| stage.folder.path(&format!("next.{kind}"));
    eventually("the other authority is trusted", async || {
        let next = stage.client(trust().identity_files(file("crt"), file("key")));
        next.get("a").await.ok()
    })
    .await;
    let me = trust().identity_files(stage.folder.path("me.crt"), stage.folder.path("me.key"));
    let refused = stage.client(me).get("a").await;
    assert!(
        matches!(refused, Err(Error::Unavailable { .. })),
        "{refused:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_do_not_match_for_a_moment_are_no_failure() {
    let stage = Stage::new(false).await;
    let at_first = stage.metric(EXPIRES).await;
    let next = stage.authority.issue("server", &NAMES, 2 * HOUR);
    stage.folder.write("server.crt", &next.certificate);
    // One look falls into this, at least.
    tokio::time::sleep(Duration::from_millis(1200)).await;
    stage.client(stage.trust()).get("a").await.unwrap();
    stage.folder.write("server.key", &next.key);
    eventually("the new ones are used", async || {
        (stage.metric(EXPIRES).await > at_first).then_some(())
    })
    .await;
    assert_eq!(stage.reload_failures().await, 0.0);
    assert!(!stage.has_logged("cannot be used"));
}

/// As Kubernetes replaces the files of a secret.
#[tokio::test(flavor = "multi_thread")]
async fn a_directory_that_is_exchanged_is_noticed() {
    let authority = Authority::new("the tests");
    let folder = Folder::default();
    folder.write("ca.crt", &authority.pem());
    let fill = |directory: &str, life| {
        let issued = authority.issue("server", &NAMES, life);
        std::fs::create_dir(folder.path(directory)).unwrap();
        folder.write(&format!("{directory}/server.crt"), &issued.certificate);
        folder.write(&format!("{directory}/server.key"), &issued.key);
    };
    fill("..first", HOUR);
    symlink("..first", folder.path("..data")).unwrap();
    for name in ["server.crt", "server.key"] {
        symlink(format!("..data/{name}"), folder.path(name)).unwrap();
    }
    fill("..second", 2 * HOUR);
    let stage = Stage::of(authority, folder, false, |server| server).await;
    let at_first = stage.metric(EXPIRES).await;
    symlink("..second", stage.folder.path("..next")).unwrap();
    std::fs::rename(stage.folder.path("..next"), stage.folder.path("..data")).unwrap();
    eventually("the new ones are used", async || {
        (stage.metric(EXPIRES).await > at_first).then_some(())
    })
    .await;
    stage.client(stage.trust()).get("a").await.unwrap();
}
