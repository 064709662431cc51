//! A kubelet's probes: each time on a connection of its own.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use fencepost_proto::v1::LOCK_SERVICE;
use fencepost_support::{Server, server::endpoint_at, wait::within};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::watch,
    task::JoinSet,
    time::timeout,
};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

const PATIENCE: Duration = Duration::from_secs(2);

/// What a probe saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    Yes,
    No,
    /// Nobody listens any more.
    Closed,
}

/// Who saw what, when; of answers in a row that are the same, the first.
#[derive(Clone, Debug, Default)]
pub(super) struct Timeline(Vec<(&'static str, Seen, Instant)>);

impl Timeline {
    fn add(&mut self, name: &'static str, seen: Seen) {
        if self.words(name).last() != Some(&seen) {
            self.0.push((name, seen, Instant::now()));
        }
    }

    pub(super) fn words(&self, name: &str) -> Vec<Seen> {
        let of = self.0.iter().filter(|(probe, ..)| *probe == name);
        of.map(|(_, seen, _)| *seen).collect()
    }

    pub(super) fn first(&self, name: &str, seen: Seen) -> Option<Instant> {
        let mut all = self.0.iter();
        let found = all.find(|(probe, saw, _)| *probe == name && *saw == seen);
        found.map(|(.., at)| *at)
    }
}

/// Probes at work.
pub(super) struct Probes {
    seen: Arc<Mutex<Timeline>>,
    stop: watch::Sender<bool>,
    tasks: JoinSet<()>,
}

impl Probes {
    pub(super) const ALL: [&'static str; 4] = ["readiness", "liveness", "/readyz", "/livez"];
    pub(super) const EVERY: Duration = Duration::from_millis(50);

    pub(super) fn start(server: &Server) -> Self {
        let (seen, stop) = (Arc::<Mutex<Timeline>>::default(), watch::Sender::new(false));
        let (grpc, http) = (server.grpc(), server.http());
        let mut tasks = JoinSet::new();
        for name in Self::ALL {
            let (seen, stop) = (Arc::clone(&seen), stop.subscribe());
            tasks.spawn(async move {
                while !*stop.borrow() {
                    let saw = match name {
                        "readiness" => by_grpc(grpc, LOCK_SERVICE).await,
                        "liveness" => by_grpc(grpc, "liveness").await,
                        path => by_http(http, path).await,
                    };
                    if let Some(saw) = saw {
                        seen.lock().unwrap().add(name, saw);
                    }
                    tokio::time::sleep(Self::EVERY).await;
                }
            });
        }
        Self { seen, stop, tasks }
    }

    pub(super) async fn wait_for(&self, name: &str, saw: Seen) {
        within(PATIENCE, &format!("{name} is {saw:?}"), async || {
            self.seen.lock().unwrap().first(name, saw)
        })
        .await;
    }

    pub(super) async fn end(self) -> Timeline {
        // One more time each.
        tokio::time::sleep(Self::EVERY * 4).await;
        self.stop.send_replace(true);
        self.tasks.join_all().await;
        self.seen.lock().unwrap().clone()
    }
}

/// None for a connection that was taken and then closed without an answer, as the last
/// ones before the end are: a kubelet tries again.
async fn by_grpc(address: SocketAddr, service: &str) -> Option<Seen> {
    if TcpStream::connect(address).await.is_err() {
        return Some(Seen::Closed);
    }
    let ask = async {
        let channel = endpoint_at(address).connect().await.ok()?;
        let service = service.to_owned();
        let request = HealthCheckRequest { service };
        let answer = HealthClient::new(channel).check(request).await.ok()?;
        match answer.into_inner().status() {
            ServingStatus::Serving => Some(Seen::Yes),
            _ => Some(Seen::No),
        }
    };
    timeout(PATIENCE, ask).await.ok()?
}

async fn by_http(address: SocketAddr, path: &str) -> Option<Seen> {
    let Ok(mut stream) = TcpStream::connect(address).await else {
        return Some(Seen::Closed);
    };
    let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    let ask = async {
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.ok()?;
        let code = answer.split(' ').nth(1)?;
        Some(if code == "200" { Seen::Yes } else { Seen::No })
    };
    timeout(PATIENCE, ask).await.ok()?
}
