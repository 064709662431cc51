//! PgBouncer in transaction mode in front of a Postgres.

use std::{fs, net::SocketAddr, process::Command};

use rustix::process::Signal;

use crate::{
    leash::End,
    postgres::{Client, Postgres},
    process::Process,
    system::{self, PrivateDirectory, free_address},
    wait::eventually,
};

/// A running pooler. Dropping it kills it and removes its files.
#[derive(Debug)]
pub struct PgBouncer {
    // Dropped before the directory.
    process: Option<Process>,
    directory: PrivateDirectory,
    address: SocketAddr,
    target: SocketAddr,
    pool_size: u32,
    ignored: String,
}

impl PgBouncer {
    /// Starts a pooler in front of `target`, with `pool_size` server
    /// connections for each database.
    pub async fn start(target: SocketAddr, pool_size: u32) -> Self {
        Self::start_ignoring(target, pool_size, "extra_float_digits").await
    }

    /// The same, but ignores these parameters of a client's start
    /// (`ignore_startup_parameters`).
    pub async fn start_ignoring(target: SocketAddr, pool_size: u32, ignored: &str) -> Self {
        let mut pooler = Self {
            directory: system::private_directory(),
            address: free_address(),
            target,
            pool_size,
            ignored: ignored.to_owned(),
            process: None,
        };
        pooler.start_again().await;
        pooler
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The URL of a database through it.
    pub fn url_of(&self, database: &str) -> String {
        Postgres::url_via(self.address, database)
    }

    /// Kills it with all connections, and starts it again.
    pub async fn restart(&mut self) {
        self.kill9().await;
        self.start_again().await;
    }

    /// Kills it and waits until it is gone.
    pub async fn kill9(&mut self) {
        self.running().signal(Signal::KILL);
        self.running().wait_exit().await;
        self.process = None;
    }

    /// Starts it again on the same address.
    pub async fn start_again(&mut self) {
        self.write_configuration();
        self.process = None;
        let mut command =
            Command::new(system::find_program("pgbouncer").expect("pgbouncer is installed"));
        system::drop_root(&mut command)
            .arg(self.directory.join("pgbouncer.ini"))
            .current_dir("/");
        let process = Process::start("pgbouncer", &mut command, End::KillGroup);
        let process = self.process.insert(process);
        let console = Postgres::url_via(self.address, "pgbouncer");
        eventually("pgbouncer answers", async || {
            if let Some(status) = process.exit_status() {
                panic!("pgbouncer ended: {status}\n{}", process.tail());
            }
            Client::connect(&console).await.ok()
        })
        .await;
    }

    /// Puts it in front of another address, with all clients kept. Their
    /// server connections are replaced as each becomes free.
    pub async fn retarget(&mut self, target: SocketAddr) {
        self.target = target;
        self.write_configuration();
        self.command("RELOAD").await;
    }

    /// Runs a command of its console, such as `RECONNECT` or `KILL db`.
    pub async fn command(&self, command: &str) {
        let console = Client::connect(&self.url_of("pgbouncer"))
            .await
            .expect("the console answers");
        if let Err(error) = console.simple_query(command).await {
            panic!("{command}: {error:?}");
        }
    }

    fn running(&self) -> &Process {
        self.process.as_ref().expect("pgbouncer is started")
    }

    fn write_configuration(&self) {
        let Self {
            directory,
            address,
            target,
            pool_size,
            ignored,
            ..
        } = self;
        let configuration = format!(
            "[databases]
* = host={} port={} user=postgres

[pgbouncer]
listen_addr = {}
listen_port = {}
unix_socket_dir =
auth_type = any
admin_users = postgres
pool_mode = transaction
default_pool_size = {pool_size}
max_client_conn = 500
server_login_retry = 1
server_connect_timeout = 5
ignore_startup_parameters = {ignored}
pidfile = {}/pgbouncer.pid
",
            target.ip(),
            target.port(),
            address.ip(),
            address.port(),
            directory.display()
        );
        let path = directory.join("pgbouncer.ini");
        fs::write(&path, configuration).expect("room on the disk");
        system::give_away(&path);
    }
}
