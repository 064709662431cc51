//! A server with TLS, and clients that trust it.

use std::time::Duration;

use fencepost_client::{AcquireOptions, Client, Tls};
use fencepost_support::{
    Server, eventually,
    postgres::{Database, fresh_database},
    server::Builder,
    tls::{Authority, Folder, HOUR, Issued},
};

use crate::health::get;

/// The server's own names.
pub(super) const NAMES: [&str; 2] = ["127.0.0.1", "localhost"];

/// A lease that outlasts a test that does not renew it.
pub(super) fn options() -> AcquireOptions {
    AcquireOptions::default().ttl(Duration::from_secs(30))
}

pub(super) struct Stage {
    pub(super) authority: Authority,
    pub(super) folder: Folder,
    pub(super) server: Server,
    _database: Database,
}

impl Stage {
    /// With `mutual`, clients must have a certificate of the same authority.
    pub(super) async fn new(mutual: bool) -> Self {
        Self::with(mutual, |server| server).await
    }

    pub(super) async fn with(mutual: bool, more: impl FnOnce(Builder) -> Builder) -> Self {
        let authority = Authority::new("the tests");
        let folder = Folder::default();
        folder.write("ca.crt", &authority.pem());
        folder.write_both("server", &authority.issue("server", &NAMES, HOUR));
        Self::of(authority, folder, mutual, more).await
    }

    /// With the files that are in the folder.
    pub(super) async fn of(
        authority: Authority,
        folder: Folder,
        mutual: bool,
        more: impl FnOnce(Builder) -> Builder,
    ) -> Self {
        let database = fresh_database().await;
        let mut server = Server::builder(&database.url())
            .flag("--tls-cert", &folder.name("server.crt"))
            .flag("--tls-key", &folder.name("server.key"));
        if mutual {
            server = server.flag("--tls-client-ca", &folder.name("ca.crt"));
        }
        let server = more(server).start().await;
        eventually("the server is ready", async || {
            (get(server.http(), "/readyz").await.0 == 200).then_some(())
        })
        .await;
        Self {
            authority,
            folder,
            server,
            _database: database,
        }
    }

    pub(super) fn url(&self) -> String {
        format!("https://{}", self.server.grpc())
    }

    /// For a client that has no certificate.
    pub(super) fn trust(&self) -> Tls {
        Tls::default().ca_file(self.folder.path("ca.crt"))
    }

    /// For one that has `NAME.crt`.
    pub(super) fn as_client(&self, name: &str) -> Tls {
        let file = |kind| self.folder.path(&format!("{name}.{kind}"));
        self.trust().identity_files(file("crt"), file("key"))
    }

    pub(super) fn issue_client(&self, name: &str, life: Duration) -> Issued {
        let issued = self.authority.issue(name, &[], life);
        self.folder.write_both(name, &issued);
        issued
    }

    pub(super) fn client(&self, tls: Tls) -> Client {
        Client::builder(self.url())
            .tls(tls)
            .timeout(Duration::from_secs(2))
            .build()
            .unwrap()
    }

    /// A metric without labels.
    pub(super) async fn metric(&self, name: &str) -> f64 {
        let (_, text) = get(self.server.http(), "/metrics").await;
        let mut lines = text.lines();
        let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value
            .unwrap_or_else(|| panic!("no {name}"))
            .parse()
            .unwrap()
    }

    pub(super) async fn reload_failures(&self) -> f64 {
        self.metric("fencepost_tls_reload_failures_total").await
    }

    pub(super) fn has_logged(&self, text: &str) -> bool {
        self.server.logs().iter().any(|line| line.contains(text))
    }
}
