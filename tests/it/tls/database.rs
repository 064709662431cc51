//! TLS to Postgres, as the parameters of the database's URL ask for it.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path, time::Duration};

use fencepost_support::{
    Postgres, Server, calls,
    system::give_away,
    tls::{Authority, Folder, HOUR, Issued},
};

use crate::programs::{bare, cli, expect_no_start, run};

const UNAVAILABLE: i32 = 69;
const MINUTE: Duration = Duration::from_secs(60);

/// A Postgres with a certificate for one name, and what a client needs.
pub(super) struct Stage {
    pub(super) postgres: Postgres,
    pub(super) authority: Authority,
    pub(super) folder: Folder,
}

impl Stage {
    pub(super) async fn new(name: &str) -> Self {
        let (authority, folder) = (Authority::new("the tests"), Folder::default());
        folder.write("ca.crt", &authority.pem());
        folder.write_both("me", &authority.issue("postgres", &[], HOUR));
        folder.write("other.crt", &Authority::new("somebody else").pem());
        let postgres = Postgres::start().await;
        let data = postgres.data();
        serve(&data, &authority.issue("postgres", &[name], HOUR));
        own(&data.join("ca.crt"), &authority.pem());
        postgres.configure("ssl_ca_file", "ca.crt").await;
        postgres.configure("ssl", "on").await;
        Self {
            postgres,
            authority,
            folder,
        }
    }

    pub(super) fn file(&self, name: &str) -> String {
        self.folder.name(name)
    }

    pub(super) fn url(&self, parameters: &str) -> String {
        format!("{}?{parameters}", self.postgres.url())
    }

    /// Starts a server, which takes a lock, and returns it with how many
    /// connections to Postgres are encrypted, and how many are not.
    async fn serves(&self, url: &str) -> (Server, i64, i64) {
        let name = if url.contains("application_name=plain") {
            "plain"
        } else {
            "fencepostd"
        };
        let server = Server::start(url).await;
        let mut client = server.client().await;
        calls::granted(&mut client, "through-tls", "me", MINUTE).await;
        // Over the socket, where there is no TLS.
        let count = async |ssl: bool| -> i64 {
            let admin = self.admin().await;
            let sql = format!(
                "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) \
                 WHERE application_name = '{name}' AND ssl = {ssl}"
            );
            admin.value(&sql).await
        };
        let (secure, plain) = (count(true).await, count(false).await);
        (server, secure, plain)
    }

    pub(super) async fn admin(&self) -> fencepost_support::postgres::Client {
        let directory = self.postgres.socket_directory().display();
        let port = self.postgres.address().port();
        let url = format!("host={directory} port={port} user=postgres dbname=postgres");
        fencepost_support::postgres::Client::connect(&url)
            .await
            .unwrap()
    }

    /// Of servers: they need new ones.
    pub(super) async fn end_connections(&self) {
        let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
                   WHERE application_name = 'fencepostd'";
        assert!(self.admin().await.value::<i64>(end).await > 0);
    }

    /// Lets in over TCP only whom this line of `pg_hba.conf` does.
    pub(super) async fn only(&self, line: &str) {
        let hba = format!("local all all trust\n{line}\n");
        own(&self.postgres.data().join("pg_hba.conf"), &hba);
        self.admin().await.run("SELECT pg_reload_conf()").await;
        // The postmaster has read it when it says so.
        fencepost_support::eventually("pg_hba.conf was read", async || {
            let log = self.postgres.log();
            let reloads = log.iter().filter(|line| line.contains("SIGHUP"));
            (reloads.count() >= 3).then_some(())
        })
        .await;
    }
}

fn serve(data: &Path, issued: &Issued) {
    own(&data.join("server.crt"), &issued.certificate);
    own(&data.join("server.key"), &issued.key);
}

/// A file of the account that Postgres runs as, for it alone.
fn own(path: &Path, contents: &str) {
    fs::write(path, contents).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    give_away(path);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_is_verified_as_the_mode_says() {
    let stage = Stage::new("127.0.0.1").await;
    let roots = stage.file("ca.crt");
    for mode in ["verify-full", "verify-ca", "require"] {
        let url = stage.url(&format!("sslmode={mode}&sslrootcert={roots}"));
        let (_server, secure, plain) = stage.serves(&url).await;
        assert!(secure > 0 && plain == 0, "{mode}: {secure} {plain}");
    }
    let address = stage.postgres.address();
    let words = format!(
        "host={} port={} user=postgres dbname=postgres sslmode = verify-full sslrootcert='{roots}'",
        address.ip(),
        address.port()
    );
    let (_server, secure, plain) = stage.serves(&words).await;
    assert!(secure > 0 && plain == 0, "{secure} {plain}");
    // The machine's own list is this file, which holds the right roots, and then others.
    let url = stage.url("sslmode=verify-full&sslrootcert=system");
    let trusting = |file| Server::builder(&url).env("SSL_CERT_FILE", &stage.file(file));
    trusting("ca.crt").ready().await;
    let line = expect_no_start(trusting("other.crt"), UNAVAILABLE).await;
    assert!(line.contains("UnknownIssuer"), "{line}");
    // Without a word, and in vain: whoever does not ask gets what there is.
    let (_server, secure, plain) = stage.serves(&stage.postgres.url()).await;
    assert!(secure > 0 && plain == 0, "{secure} {plain}");
    let (_server, secure, plain) = stage
        .serves(&stage.url("sslmode=disable&application_name=plain"))
        .await;
    assert!(secure == 0 && plain > 0, "{secure} {plain}");

    let other = stage.file("other.crt");
    for mode in ["verify-full", "verify-ca", "require"] {
        let url = stage.url(&format!("sslmode={mode}&sslrootcert={other}"));
        let line = expect_no_start(Server::builder(&url), UNAVAILABLE).await;
        assert!(line.contains("UnknownIssuer"), "{mode}: {line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_another_name_is_refused_by_verify_full_alone() {
    let stage = Stage::new("db.example").await;
    let roots = stage.file("ca.crt");
    let url = |mode| stage.url(&format!("sslmode={mode}&sslrootcert={roots}"));
    let line = expect_no_start(Server::builder(&url("verify-full")), UNAVAILABLE).await;
    assert!(line.contains("not valid for name"), "{line}");
    let (_server, secure, plain) = stage.serves(&url("verify-ca")).await;
    assert!(secure > 0 && plain == 0, "{secure} {plain}");
    // The name to expect, and where it is.
    let address = stage.postgres.address();
    let named = format!(
        "host=db.example hostaddr={} port={} user=postgres dbname=postgres \
         sslmode=verify-full sslrootcert={roots}",
        address.ip(),
        address.port()
    );
    let (_server, secure, _) = stage.serves(&named).await;
    assert!(secure > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_certificate_is_shown() {
    let stage = Stage::new("127.0.0.1").await;
    stage.only("hostssl all all 127.0.0.1/32 cert").await;
    let (roots, crt, key) = (
        stage.file("ca.crt"),
        stage.file("me.crt"),
        stage.file("me.key"),
    );
    let without = format!("sslmode=verify-full&sslrootcert={roots}");
    let line = expect_no_start(Server::builder(&stage.url(&without)), UNAVAILABLE).await;
    assert!(line.contains("certificate"), "{line}");
    let with = stage.url(&format!("{without}&sslcert={crt}&sslkey={key}"));
    let (server, secure, plain) = stage.serves(&with).await;
    assert!(secure > 0 && plain == 0, "{secure} {plain}");

    // Renewed, it is shown by the next connections.
    let next = stage.authority.issue("postgres", &["next"], HOUR);
    stage.folder.write_both("me", &next);
    stage.end_connections().await;
    server.wait_ready().await;
    let mut client = server.client().await;
    fencepost_support::eventually("locks are taken again", async || {
        calls::acquire(&mut client, "again", "me", MINUTE)
            .await
            .ok()
    })
    .await;

    // The kit's installer takes the same.
    let mut command = bare(cli());
    command.args(["fence", "install", "--database-url", &with]);
    let ended = run(command).await;
    assert_eq!(ended.code, Some(0), "{}", ended.said());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_is_bound_to_the_certificate() {
    let stage = Stage::new("127.0.0.1").await;
    let admin = stage.admin().await;
    admin
        .run("ALTER ROLE postgres PASSWORD 'open-sesame'")
        .await;
    stage
        .only("hostssl all all 127.0.0.1/32 scram-sha-256")
        .await;
    let address = stage.postgres.address();
    let url = format!(
        "postgresql://postgres:open-sesame@{address}/postgres?\
         sslmode=require&channel_binding=require"
    );
    let (server, secure, plain) = stage.serves(&url).await;
    assert!(secure > 0 && plain == 0, "{secure} {plain}");
    assert!(!server.logs().iter().any(|line| line.contains("sesame")));
}

#[tokio::test(flavor = "multi_thread")]
async fn no_server_without_tls_is_used_when_tls_is_required() {
    let postgres = Postgres::start().await;
    let url = format!("{}?sslmode=require", postgres.url());
    let line = expect_no_start(Server::builder(&url), UNAVAILABLE).await;
    assert!(line.contains("does not support TLS"), "{line}");
}
