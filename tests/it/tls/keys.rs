//! A private key appears nowhere: not in a log at any level, not in an error, an
//! answer or a metric, not in what the command line prints, not in a process list.

use std::{fs, time::Duration};

use fencepost_client::{Client, Error, Tls};
use fencepost_support::{
    Server, eventually,
    server::Builder,
    tls::{Folder, HOUR, Issued},
    wait::within,
};

use super::{
    database,
    stage::{NAMES, options},
};
use crate::{
    health::get,
    programs::{Ended, bare, cli, run},
    secrets::{assert_clean, marker},
};

/// As whoever wrote it out would: a line of its PEM, and the same as a list of bytes.
fn ways(key: &str) -> Vec<String> {
    let lines = key.lines().filter(|line| !line.starts_with("-----"));
    let ways = lines.flat_map(|line| [line.to_owned(), as_bytes(line)]);
    ways.collect()
}

fn as_bytes(text: &str) -> String {
    let list = format!("{:?}", text.as_bytes());
    list.trim_matches(['[', ']']).to_owned()
}

/// Files that hold a marker where a key should be: not PEM; PEM that is not base64;
/// base64 that is no key.
fn bad_keys(marker: &str) -> [String; 3] {
    let pem =
        |body: &str| format!("-----BEGIN PRIVATE KEY-----\n{body}\n-----END PRIVATE KEY-----\n");
    [
        marker.to_owned(),
        pem(&format!("!{marker}!")),
        pem(&format!("{marker}AAA")),
    ]
}

struct Stage {
    database: database::Stage,
    folder: Folder,
    secrets: Vec<String>,
}

impl Stage {
    /// Postgres and the server want certificates from their clients.
    async fn new() -> Self {
        let database = database::Stage::new("127.0.0.1").await;
        database.only("hostssl all all 127.0.0.1/32 cert").await;
        let folder = Folder::default();
        folder.write("ca.crt", &database.authority.pem());
        let mut stage = Self {
            database,
            folder,
            secrets: Vec::new(),
        };
        stage.issue("server", &NAMES);
        stage.issue("me", &[]);
        // The database's client has one of the database's stage.
        let key = fs::read_to_string(stage.database.folder.path("me.key")).unwrap();
        stage.secrets.extend(ways(&key));
        stage
    }

    fn issue(&mut self, name: &str, names: &[&str]) -> Issued {
        let issued = self.database.authority.issue(name, names, HOUR);
        self.folder.write_both(name, &issued);
        self.secrets.extend(ways(&issued.key));
        issued
    }

    fn database_url(&self, key: &str) -> String {
        let file = |name| self.database.file(name);
        self.database.url(&format!(
            "sslmode=verify-full&sslrootcert={}&sslcert={}&sslkey={key}",
            file("ca.crt"),
            file("me.crt"),
        ))
    }

    fn server(&self) -> Builder {
        self.server_with(
            &self.database.file("me.key"),
            &self.folder.name("server.key"),
        )
    }

    fn server_with(&self, database_key: &str, key: &str) -> Builder {
        let every = "trace,tokio_postgres=trace,rustls=trace,h2=trace,hyper=trace,tonic=trace";
        Server::builder(&self.database_url(database_key))
            .flag("--tls-cert", &self.folder.name("server.crt"))
            .flag("--tls-key", key)
            .flag("--tls-client-ca", &self.folder.name("ca.crt"))
            .flag("--log", every)
            .env("RUST_LOG", every)
            .switch("--audit-log")
    }

    fn tls(&self) -> Tls {
        Tls::default()
            .ca_file(self.folder.path("ca.crt"))
            .identity_files(self.folder.path("me.crt"), self.folder.path("me.key"))
    }

    fn client(&self, server: &Server) -> Client {
        Client::builder(format!("https://{}", server.grpc()))
            .tls(self.tls())
            .timeout(Duration::from_secs(2))
            .build()
            .unwrap()
    }

    async fn command_line(&self, server: &Server, key: &str) -> Ended {
        let mut command = bare(cli());
        command
            .args(["get", "a", "--timeout", "2s"])
            .args(["--endpoint", &format!("https://{}", server.grpc())])
            .args(["--tls-ca", &self.folder.name("ca.crt")])
            .args(["--tls-cert", &self.folder.name("me.crt")])
            .args(["--tls-key", key])
            .env("RUST_LOG", "trace");
        run(command).await
    }

    /// Ends the server's connections to the database, and tells how many.
    async fn end_sessions(&self) -> i64 {
        let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
                   WHERE application_name = 'fencepostd'";
        self.database.admin().await.value(end).await
    }

    #[track_caller]
    fn assert_clean(&self, said: &[String]) {
        for secret in &self.secrets {
            assert_clean(said, secret);
        }
    }
}

async fn wait_ready(server: &Server) {
    eventually("the server is ready", async || {
        (get(server.http(), "/readyz").await.0 == 200).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_private_key_is_in_no_log_and_no_answer() {
    let mut stage = Stage::new().await;
    let marker = marker();
    stage.secrets.extend([marker.clone(), as_bytes(&marker)]);
    let server = stage.server().start().await;
    wait_ready(&server).await;

    // All is well, and a refusal.
    let client = stage.client(&server);
    client
        .acquire("a", options())
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    let nobody = Client::builder(format!("https://{}", server.grpc()))
        .tls(Tls::default().ca_file(stage.folder.path("ca.crt")))
        .timeout(Duration::from_secs(2))
        .build()
        .unwrap();
    let refused = nobody.acquire("a", options()).await.unwrap_err();
    stage.assert_clean(&[format!(
        "{refused} {refused:?} {client:?} {:?}",
        stage.tls()
    )]);

    // The server's key is replaced by what is none, and by somebody else's.
    let told = |what: &'static str, times: usize| {
        let server = &server;
        async move {
            eventually(what, async || {
                let lines = server.logs();
                let lines = lines.iter().filter(|line| line.contains(what));
                (lines.count() >= times).then_some(())
            })
            .await;
        }
    };
    let good = fs::read_to_string(stage.folder.path("server.key")).unwrap();
    let other = stage.issue("other", &[]);
    for (bad, what) in bad_keys(&marker).iter().zip([
        "--tls-key holds no private key",
        "--tls-key holds no private key",
        "--tls-key holds a private key that cannot be used",
    ]) {
        stage.folder.write("server.key", bad);
        told(what, 1).await;
    }
    stage.folder.write("server.key", &other.key);
    told("--tls-key does not match", 1).await;
    stage.folder.write("server.key", &good);

    // And that for the database, which is read with each new connection.
    let [_, _, bad] = bad_keys(&marker);
    stage.database.folder.write("me.key", &bad);
    assert!(stage.end_sessions().await > 0);
    told("sslkey holds a private key that cannot be used", 1).await;
    drop(
        within(
            Duration::from_secs(20),
            "locks are taken again",
            async || client.acquire("a", options()).await.ok(),
        )
        .await,
    );

    // The client's own.
    for bad in bad_keys(&marker).iter().chain([&other.key]) {
        stage.folder.write("bad.key", bad);
        let ended = stage
            .command_line(&server, &stage.folder.name("bad.key"))
            .await;
        assert_eq!(ended.code, Some(78), "{}", ended.said());
        stage.assert_clean(&[ended.said()]);
        let tls = Tls::default()
            .identity_files(stage.folder.path("me.crt"), stage.folder.path("bad.key"))
            .ca_file(stage.folder.path("ca.crt"));
        let built = Client::builder(server.url().replace("http", "https"))
            .tls(tls)
            .build();
        let error = built.unwrap_err();
        stage.assert_clean(&[format!("{error} {error:?}")]);
    }
    let path = format!("/{marker}.key");
    let ended = stage.command_line(&server, &path).await;
    stage.assert_clean(&[ended.said()]);
    let ended = stage
        .command_line(&server, &stage.folder.name("me.key"))
        .await;
    assert!(!matches!(ended.code, Some(69 | 78)), "{}", ended.said());
    stage.assert_clean(&[ended.said()]);

    let (_, metrics) = get(server.http(), "/metrics").await;
    stage.assert_clean(&[metrics]);
    for file in ["cmdline", "environ"] {
        let text = fs::read(format!("/proc/{}/{file}", server.pid())).unwrap();
        stage.assert_clean(&[String::from_utf8_lossy(&text).into_owned()]);
    }
    server.sigterm();
    assert!(server.wait_exit().await.success());
    assert!(server.logs().len() > 100, "trace is a lot");
    stage.assert_clean(&server.logs());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_private_key_is_in_no_refusal_to_start() {
    let mut stage = Stage::new().await;
    let marker = marker();
    stage.secrets.extend([marker.clone(), as_bytes(&marker)]);
    let other = stage.issue("other", &[]);
    let nowhere = format!("/{marker}.key");
    let mut servers = vec![
        stage.server_with(&nowhere, &stage.folder.name("server.key")),
        stage.server_with(&stage.database.file("me.key"), &nowhere),
    ];
    for (n, bad) in bad_keys(&marker).iter().chain([&other.key]).enumerate() {
        let name = format!("bad{n}.key");
        stage.folder.write(&name, bad);
        let bad = stage.folder.name(&name);
        servers.push(stage.server_with(&bad, &stage.folder.name("server.key")));
        servers.push(stage.server_with(&stage.database.file("me.key"), &bad));
    }
    for server in servers {
        let ended = server.try_start().await.unwrap_err();
        assert_eq!(ended.status.code(), Some(78), "{:?}", ended.lines);
        assert!(!ended.lines.is_empty());
        stage.assert_clean(&ended.lines);
    }
}

/// A server's key and where it lies are no business of its clients.
#[tokio::test(flavor = "multi_thread")]
async fn no_client_is_told_where_a_key_lies() {
    let stage = Stage::new().await;
    let server = stage.server().start().await;
    wait_ready(&server).await;
    fs::remove_file(stage.folder.path("server.key")).unwrap();
    fs::remove_file(stage.database.folder.path("me.key")).unwrap();
    fs::remove_file(stage.database.folder.path("ca.crt")).unwrap();
    // What it had of them stays in use, so the database says no in another way.
    stage
        .database
        .only("hostssl all all 127.0.0.1/32 reject")
        .await;
    let client = stage.client(&server);
    let (paths, mut said) = (["server.key", "me.key", "ca.crt", "me.crt"], Vec::new());
    eventually("a call fails", async || {
        stage.end_sessions().await;
        match client.get("a").await {
            Err(error @ Error::Unavailable { .. }) => {
                said.push(format!("{error} {error:?}"));
                Some(())
            }
            _ => None,
        }
    })
    .await;
    said.push(get(server.http(), "/metrics").await.1);
    said.push(get(server.http(), "/readyz").await.1);
    for path in paths {
        assert_clean(&said, path);
    }
    assert_clean(&server.logs(), "server.key");
}
