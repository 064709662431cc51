//! What the probes of an orchestrator and the health checks of a client see.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use fencepost_proto::v1::LOCK_SERVICE;
use fencepost_support::Server;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::watch,
    task::JoinSet,
    time::timeout,
};
use tonic::transport::Channel;
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

/// How long a check may take, whatever the database does.
const PROMPT: Duration = Duration::from_secs(1);

/// All views of a server's health, followed until dropped.
pub(super) struct Watch {
    /// The newest of each: Check of both names, `/readyz`, Watch.
    ready: watch::Receiver<[bool; 4]>,
    faults: Arc<Mutex<Vec<String>>>,
    _tasks: JoinSet<()>,
}

impl Watch {
    pub(super) async fn start(server: &Server) -> Self {
        let (sender, ready) = watch::channel([true; 4]);
        let faults = Arc::<Mutex<Vec<String>>>::default();
        let mut tasks = JoinSet::new();

        for (place, name) in ["", LOCK_SERVICE, "liveness"].into_iter().enumerate() {
            let (sender, faults) = (sender.clone(), Arc::clone(&faults));
            let mut client = HealthClient::new(server.channel().await);
            tasks.spawn(async move {
                loop {
                    match check(&mut client, name).await {
                        Some(status) if name == "liveness" => {
                            if status != ServingStatus::Serving {
                                fault(&faults, format!("liveness says {status:?}"));
                            }
                        }
                        Some(status) => set(&sender, place, status == ServingStatus::Serving),
                        None => fault(&faults, format!("no prompt answer to Check({name:?})")),
                    }
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            });
        }
        tasks.spawn(http(server.http(), sender.clone(), Arc::clone(&faults)));
        let mut client = HealthClient::new(server.channel().await);
        let stream_faults = Arc::clone(&faults);
        tasks.spawn(async move {
            let faults = stream_faults;
            let request = HealthCheckRequest {
                service: LOCK_SERVICE.to_owned(),
            };
            let mut changes = client.watch(request).await.unwrap().into_inner();
            let mut last = None;
            while let Ok(Some(change)) = changes.message().await {
                if last.replace(change.status) == Some(change.status) {
                    fault(&faults, "Watch repeats itself".to_owned());
                }
                set(&sender, 3, change.status() == ServingStatus::Serving);
            }
            fault(&faults, "the Watch ended".to_owned());
        });
        Self {
            ready,
            faults,
            _tasks: tasks,
        }
    }

    /// Waits until all views agree, and says when that was.
    pub(super) async fn wait_for(
        &mut self,
        wanted: bool,
        since: Instant,
        within: Duration,
    ) -> Duration {
        let agree = self
            .ready
            .wait_for(|ready| ready.iter().all(|ready| *ready == wanted));
        let agreed = timeout(within, agree).await.is_ok();
        assert!(
            agreed,
            "not ready = {wanted} within {within:?}: Check, Check, /readyz, Watch are {:?}",
            *self.ready.borrow()
        );
        since.elapsed()
    }

    /// Whether no view has ever said that the server is not ready.
    pub(super) fn stayed_ready(&self) -> bool {
        self.ready.has_changed().is_ok_and(|changed| !changed)
    }

    /// Liveness has stayed, every check was prompt, the stream lives.
    #[track_caller]
    pub(super) fn assert_sound(&self) {
        let faults = self.faults.lock().unwrap();
        assert!(faults.is_empty(), "{faults:?}");
    }
}

fn set(sender: &watch::Sender<[bool; 4]>, place: usize, ready: bool) {
    sender.send_if_modified(|all| std::mem::replace(&mut all[place], ready) != ready);
}

fn fault(faults: &Mutex<Vec<String>>, what: String) {
    faults.lock().unwrap().push(what);
}

async fn check(client: &mut HealthClient<Channel>, name: &str) -> Option<ServingStatus> {
    let request = HealthCheckRequest {
        service: name.to_owned(),
    };
    let answer = timeout(PROMPT, client.check(request)).await.ok()?.ok()?;
    Some(answer.into_inner().status())
}

async fn http(
    address: SocketAddr,
    sender: watch::Sender<[bool; 4]>,
    faults: Arc<Mutex<Vec<String>>>,
) {
    loop {
        match timeout(PROMPT, get(address, "/livez")).await {
            Ok(Some(200)) => {}
            other => fault(&faults, format!("/livez: {other:?}")),
        }
        match timeout(PROMPT, get(address, "/readyz")).await {
            Ok(Some(code @ (200 | 503))) => set(&sender, 2, code == 200),
            other => fault(&faults, format!("/readyz: {other:?}")),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The code of an answer over HTTP.
pub(crate) async fn get(address: SocketAddr, path: &str) -> Option<u16> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    answer.split(' ').nth(1)?.parse().ok()
}
