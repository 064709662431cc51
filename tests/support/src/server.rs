//! The real server binary, started as a process.

use std::{
    env,
    net::SocketAddr,
    path::PathBuf,
    process::{Command, ExitStatus},
    time::Duration,
};

use fencepost_proto::v1::{LOCK_SERVICE, lock_service_client::LockServiceClient};
use rustix::process::Signal;
use serde_json::Value;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use crate::{
    leash::End,
    process::{Log, Process},
    system,
    wait::{PATIENCE, eventually},
};

/// The generated client over one connection.
pub type Client = LockServiceClient<Channel>;

/// How a server is started.
#[derive(Clone, Debug)]
pub struct Builder {
    database_url: Option<String>,
    listen: String,
    flags: Vec<String>,
    environment: Vec<(String, String)>,
    wrapper: Vec<String>,
}

/// A running server. Dropping it kills it.
#[derive(Debug)]
pub struct Server {
    builder: Builder,
    process: Process,
    grpc: SocketAddr,
    http: SocketAddr,
}

/// A server that ended instead of serving.
#[derive(Debug)]
pub struct NoStart {
    /// How it ended.
    pub status: ExitStatus,
    /// What it logged.
    pub lines: Vec<String>,
}

impl Builder {
    /// Adds a flag and its value.
    pub fn flag(mut self, name: &str, value: &str) -> Self {
        self.flags.extend([name.to_owned(), value.to_owned()]);
        self
    }

    /// Adds a flag without a value.
    pub fn switch(mut self, name: &str) -> Self {
        self.flags.push(name.to_owned());
        self
    }

    /// Adds a variable to its environment.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Listens for gRPC on this address rather than on a free port.
    pub fn listen(mut self, address: SocketAddr) -> Self {
        self.listen = address.to_string();
        self
    }

    /// Starts it through a program that executes its arguments, such as
    /// `["faketime", "-f", "+5m"]`.
    pub fn wrapper(mut self, wrapper: &[&str]) -> Self {
        self.wrapper = wrapper.iter().map(|&word| word.to_owned()).collect();
        self
    }

    /// Starts it and waits until its ports are open; panics when it ends.
    pub async fn start(self) -> Server {
        match self.try_start().await {
            Ok(server) => server,
            Err(NoStart { status, lines }) => {
                panic!("the server did not start: {status}\n{}", lines.join("\n"))
            }
        }
    }

    /// Starts it and waits until it is ready.
    pub async fn ready(self) -> Server {
        let server = self.start().await;
        server.wait_ready().await;
        server
    }

    /// Starts it and waits until its ports are open.
    ///
    /// # Errors
    ///
    /// When it ends instead.
    pub async fn try_start(self) -> Result<Server, NoStart> {
        let process = self.spawn();
        let addresses = process.log().wait_for(|line| {
            let line: Value = serde_json::from_str(line).ok()?;
            if line.get("message")?.as_str()? != "serving" {
                return None;
            }
            let address = |name| line.get(name)?.as_str()?.parse::<SocketAddr>().ok();
            Some((address("grpc")?, address("http")?))
        });
        match tokio::time::timeout(PATIENCE, addresses).await {
            Ok(Some((grpc, http))) => Ok(Server {
                builder: self,
                process,
                grpc,
                http,
            }),
            Ok(None) => Err(NoStart {
                status: process.wait_exit().await,
                lines: process.log().lines(),
            }),
            Err(_) => panic!(
                "the server never said that it is serving\n{}",
                process.tail()
            ),
        }
    }

    /// Starts it and waits for nothing, to look at its start from outside.
    pub fn spawn(&self) -> Process {
        let mut words = self.wrapper.clone();
        words.push(binary().display().to_string());
        let mut command = Command::new(&words[0]);
        command
            .args(&words[1..])
            .args(["--listen", &self.listen, "--http-listen", "127.0.0.1:0"])
            .args(["--log-format", "json"]);
        if let Some(url) = &self.database_url {
            command.args(["--database-url", url]);
        }
        command.args(&self.flags).current_dir("/");
        for (name, _) in env::vars_os() {
            let prefixes = ["FENCEPOST_", "DATABASE_", "PG", "RUST_LOG"];
            let name = name.to_string_lossy();
            if prefixes.iter().any(|prefix| name.starts_with(prefix)) {
                command.env_remove(name.as_ref());
            }
        }
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        Process::start("fencepostd", &mut command, End::KillGroup)
    }
}

impl Server {
    /// A server for this database, to be configured further.
    pub fn builder(database_url: &str) -> Builder {
        Builder {
            database_url: Some(database_url.to_owned()),
            ..Self::without_database()
        }
    }

    /// A server that is given no database URL.
    pub fn without_database() -> Builder {
        Builder {
            database_url: None,
            listen: "127.0.0.1:0".to_owned(),
            flags: Vec::new(),
            environment: Vec::new(),
            wrapper: Vec::new(),
        }
    }

    /// Starts a server for this database and waits until it is ready.
    pub async fn start(database_url: &str) -> Self {
        Self::builder(database_url).ready().await
    }

    /// Waits until health says that the lock service serves.
    pub async fn wait_ready(&self) {
        let what = format!("the server at {} is ready", self.grpc);
        eventually(&what, async || {
            if let Some(status) = self.process.exit_status() {
                panic!("the server ended: {status}\n{}", self.process.tail());
            }
            (self.health(LOCK_SERVICE).await == Some(ServingStatus::Serving)).then_some(())
        })
        .await;
    }

    /// What the health service says of a name; none when it does not answer.
    pub async fn health(&self, service: &str) -> Option<ServingStatus> {
        let channel = self.endpoint().connect().await.ok()?;
        let request = HealthCheckRequest {
            service: service.to_owned(),
        };
        let answer = HealthClient::new(channel).check(request).await.ok()?;
        Some(answer.into_inner().status())
    }

    /// Ends it with `SIGTERM` if it still runs, and starts it again with the
    /// same flags on the same address.
    pub async fn restart(&mut self) {
        if let Err(NoStart { status, lines }) = self.try_restart().await {
            panic!(
                "the server did not start again: {status}\n{}",
                lines.join("\n")
            );
        }
    }

    /// The same.
    ///
    /// # Errors
    ///
    /// When it ends again instead: its database may be away.
    pub async fn try_restart(&mut self) -> Result<(), NoStart> {
        self.sigterm();
        self.process.wait_exit().await;
        let again = self.builder.clone().listen(self.grpc);
        *self = again.try_start().await?;
        Ok(())
    }

    /// Where it listens for gRPC.
    pub fn grpc(&self) -> SocketAddr {
        self.grpc
    }

    /// How many files it has open, connections among them.
    pub fn open_files(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid()))
            .expect("a running process has a directory of its files")
            .count()
    }

    /// Where it listens for HTTP: metrics and probes.
    pub fn http(&self) -> SocketAddr {
        self.http
    }

    /// Its address as an endpoint URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.grpc)
    }

    /// Its address, to be configured further and connected to.
    pub fn endpoint(&self) -> Endpoint {
        endpoint_at(self.grpc)
    }

    /// A fresh connection.
    pub async fn channel(&self) -> Channel {
        channel_at(self.grpc).await
    }

    /// The generated client over a fresh connection.
    pub async fn client(&self) -> Client {
        Client::new(self.channel().await)
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Its process.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// The lines of its log so far, as written.
    pub fn logs(&self) -> Vec<String> {
        self.process.log().lines()
    }

    /// Its log.
    pub fn log(&self) -> &Log {
        self.process.log()
    }

    /// Waits for a line of its log that `find` accepts, old or new, and
    /// returns it parsed. Panics when none comes.
    pub async fn wait_for_log(&self, what: &str, mut find: impl FnMut(&Value) -> bool) -> Value {
        let line = self.log().wait_for(|line| {
            let line: Value = serde_json::from_str(line).ok()?;
            find(&line).then_some(line)
        });
        match tokio::time::timeout(PATIENCE, line).await {
            Ok(Some(line)) => line,
            _ => panic!("not logged: {what}\n{}", self.process.tail()),
        }
    }

    /// Asks it to drain.
    pub fn sigterm(&self) {
        self.process.signal(Signal::TERM);
    }

    /// Freezes it.
    pub fn sigstop(&self) {
        self.process.signal(Signal::STOP);
    }

    /// Ends [`Server::sigstop`].
    pub fn sigcont(&self) {
        self.process.signal(Signal::CONT);
    }

    /// Kills it and waits until it is gone.
    pub async fn kill9(&self) {
        self.process.signal(Signal::KILL);
        self.process.wait_exit().await;
    }

    /// Waits for its end.
    pub async fn wait_exit(&self) -> ExitStatus {
        self.process.wait_exit().await
    }

    /// The processor time it has used so far.
    pub fn cpu_time(&self) -> Duration {
        system::cpu_time(self.pid()).expect("the server runs")
    }
}

/// An endpoint at an address, for a proxy in front of a server.
pub fn endpoint_at(address: SocketAddr) -> Endpoint {
    Endpoint::from_shared(format!("http://{address}"))
        .expect("an address makes a URL")
        .tcp_nodelay(true)
}

/// A fresh connection to an address.
pub async fn channel_at(address: SocketAddr) -> Channel {
    endpoint_at(address)
        .connect()
        .await
        .unwrap_or_else(|error| panic!("no connection to {address}: {error:?}"))
}

/// The server's binary.
pub fn binary() -> PathBuf {
    program("fencepostd")
}

/// A binary of this workspace: in the directory of this executable, or in the one
/// above for a test's, which lies in `deps`.
pub fn program(name: &str) -> PathBuf {
    let this = env::current_exe().expect("this process has an executable");
    let directory = this.parent().expect("an executable is in a directory");
    let profile = match directory.parent() {
        Some(profile) if directory.ends_with("deps") => profile,
        _ => directory,
    };
    let binary = profile.join(name);
    assert!(
        binary.exists(),
        "{} is missing: run `make test`, which builds the binaries first",
        binary.display()
    );
    binary
}
