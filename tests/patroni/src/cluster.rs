//! Three nodes, etcd and HAProxy, on this machine.
//!
//! One etcd: what happens when it fails is Patroni's affair, and no lock depends on
//! it. In production it has three members.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use fencepost_support::{
    eventually,
    leash::End,
    postgres::{Client, find},
    process::Process,
    system::{self, PrivateDirectory, free_address},
    wait::within,
};
use rustix::process::Signal;
use serde_json::json;
use tokio::net::TcpStream;

use crate::{
    Mode, Route,
    node::{Node, WayBack, fill, write},
    programs::program,
    rest,
};

const HAPROXY: &str = include_str!("../../../deploy/patroni/haproxy.cfg");
const NODES: [&str; 3] = ["a", "b", "c"];

/// Only this machine can reach it, and only for minutes.
const PASSWORD: &str = "secret";

/// A node that is copied anew, on a busy machine, and the passing of Patroni's TTL.
const PATIENCE: Duration = Duration::from_secs(120);

/// A running cluster. Dropping it ends it and removes its files.
#[derive(Debug)]
pub(crate) struct Cluster {
    mode: Mode,
    // Before etcd, which they would miss.
    nodes: Vec<Node>,
    _haproxy: Process,
    _etcd: Process,
    _directory: PrivateDirectory,
    through_haproxy: SocketAddr,
}

impl Cluster {
    /// Starts it, and makes Fencepost's account and database.
    pub(crate) async fn start(mode: Mode) -> Self {
        let directory = system::private_directory();
        let (etcd, etcd_at) = start_etcd(&directory).await;
        let mut names = BTreeMap::from([
            ("ETCD", etcd_at.to_string()),
            ("PASSWORD", PASSWORD.to_owned()),
            ("NETWORK", "127.0.0.1/32".to_owned()),
            ("SYNCHRONOUS", (mode == Mode::Synchronous).to_string()),
            // This machine is to stay.
            ("WATCHDOG", "\"off\"".to_owned()),
        ]);
        let postgres = find("postgres").expect("Postgres is installed");
        let bin_dir = postgres.parent().expect("a program is in a directory");
        names.insert("BIN_DIR", bin_dir.display().to_string());
        let mut nodes = NODES.map(|name| Node::new(name, &names));
        nodes.iter_mut().for_each(Node::start);
        let (haproxy, through_haproxy) = start_haproxy(&directory, &nodes).await;
        let cluster = Self {
            mode,
            nodes: nodes.into(),
            _haproxy: haproxy,
            _etcd: etcd,
            _directory: directory,
            through_haproxy,
        };
        cluster.wait_whole().await;
        let leader = cluster
            .leader()
            .await
            .expect("a whole cluster has a leader");
        let admin = cluster.admin(leader).await.expect("the leader answers");
        let role = format!("CREATE ROLE fencepost LOGIN PASSWORD '{PASSWORD}'");
        admin.run(&role).await;
        admin.run("CREATE DATABASE locks OWNER fencepost").await;
        cluster
    }

    /// What Fencepost is given.
    pub(crate) fn url(&self, route: Route) -> String {
        let hosts = match route {
            Route::Haproxy => self.through_haproxy.to_string(),
            Route::Hosts => {
                let all: Vec<_> = self.nodes.iter().map(|n| n.postgres.to_string()).collect();
                all.join(",")
            }
        };
        format!("postgresql://fencepost:{PASSWORD}@{hosts}/locks?target_session_attrs=read-write")
    }

    /// The node that has the leader's lock.
    pub(crate) async fn leader(&self) -> Option<usize> {
        for (n, node) in self.nodes.iter().enumerate().filter(|(_, n)| n.runs()) {
            if rest::get(node.rest, "/primary")
                .await
                .is_ok_and(|answer| answer.status == 200)
            {
                return Some(n);
            }
        }
        None
    }

    /// Waits until one leads, the others stream from it, and in synchronous mode one
    /// of them is what commits wait for.
    pub(crate) async fn wait_whole(&self) {
        within(PATIENCE, "the cluster is whole", async || {
            self.nodes.iter().for_each(Node::assert_runs);
            tokio::time::sleep(Duration::from_millis(200)).await;
            self.is_whole().await
        })
        .await;
    }

    async fn is_whole(&self) -> Option<()> {
        let leader = self.leader().await?;
        let members = self.settled_members(leader).await?;
        let admin = self.admin(leader).await?;
        let streaming = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'
                            AND application_name IN ('a', 'b', 'c')";
        let streaming: i64 = admin.query_one(streaming, &[]).await.ok()?.get(0);
        // One that was frozen may believe for a moment that it leads.
        for node in (0..NODES.len()).filter(|n| *n != leader) {
            let standby = "SELECT pg_is_in_recovery()";
            let admin = self.admin(node).await?;
            let standby: bool = admin.query_one(standby, &[]).await.ok()?.get(0);
            standby.then_some(())?;
        }
        (members == NODES.len() && streaming == 2).then_some(())
    }

    /// How many members there are, once one of them is what commits wait for, in
    /// synchronous mode.
    async fn settled_members(&self, leader: usize) -> Option<usize> {
        let cluster = rest::get(self.nodes[leader].rest, "/cluster").await;
        let cluster = cluster.ok()?.json();
        let members = cluster["members"].as_array()?;
        let mut roles = members.iter().map(|member| &member["role"]);
        let settled = self.mode == Mode::Asynchronous || roles.any(|role| role == "sync_standby");
        settled.then_some(members.len())
    }

    /// Hands the place of `leader` over in good order.
    pub(crate) async fn switch_over(&self, leader: usize) {
        let node = &self.nodes[leader];
        let wish = json!({ "leader": node.name });
        eventually("Patroni switches over", async || {
            let answer = rest::post(node.rest, "/switchover", &wish).await;
            // A candidate may just have fallen behind: 412.
            let done = answer.as_ref().is_ok_and(|answer| answer.status == 200);
            if !done {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            done.then_some(())
        })
        .await;
    }

    /// Waits until a node other than `old` commits: what Patroni's part of a failover
    /// takes, the wait for a new synchronous standby included.
    pub(crate) async fn first_commit_elsewhere(&self, old: usize) {
        let others: Vec<_> = (0..self.nodes.len()).filter(|n| *n != old).collect();
        within(PATIENCE, "another node commits", async || {
            for n in &others {
                if self.commits(*n).await == Some(true) {
                    return Some(());
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
            None
        })
        .await;
    }

    /// Writes something that nobody reads.
    async fn commits(&self, node: usize) -> Option<bool> {
        let admin = self.admin(node).await?;
        let standby = admin.query_one("SELECT pg_is_in_recovery()", &[]).await;
        if standby.ok()?.get(0) {
            return Some(false);
        }
        let write = "SELECT pg_logical_emit_message(true, 'fencepost-patroni', '')";
        Some(admin.query_one(write, &[]).await.is_ok())
    }

    /// Keeps what `leader` writes from its standbys, from now on.
    pub(crate) async fn cut_standbys_off(&self, leader: usize) {
        let admin = self.admin(leader).await.expect("the leader answers");
        let senders =
            "SELECT pid FROM pg_stat_replication WHERE application_name IN ('a', 'b', 'c')";
        let senders = admin
            .query(senders, &[])
            .await
            .expect("a superuser sees them");
        for sender in senders {
            let pid: i32 = sender.get(0);
            system::signal(pid.unsigned_abs(), Signal::STOP);
        }
    }

    /// Kills a node's Patroni and Postgres.
    pub(crate) async fn kill(&mut self, node: usize) {
        self.nodes[node].kill9().await;
    }

    /// Freezes a node's Patroni and Postgres.
    pub(crate) fn freeze(&mut self, node: usize) {
        self.nodes[node].freeze();
    }

    /// Brings a killed or frozen node back, and waits until the cluster is whole again.
    pub(crate) async fn bring_back(&mut self, node: usize) -> WayBack {
        if self.nodes[node].is_frozen() {
            // One that wakes up earlier may keep the new leader from naming its standby.
            within(PATIENCE, "the failover is over", async || {
                tokio::time::sleep(Duration::from_millis(200)).await;
                self.settled_members(self.leader().await?).await
            })
            .await;
            self.nodes[node].thaw();
        } else {
            self.nodes[node].start();
        }
        self.wait_whole().await;
        match self.leader().await {
            Some(leader) if leader == node => WayBack::LedAgain,
            _ => self.nodes[node].way_back(),
        }
    }

    /// What each node logged.
    pub(crate) fn logs(&self) -> impl Iterator<Item = (&'static str, Vec<String>)> {
        self.nodes.iter().map(|node| (node.name, node.log()))
    }

    async fn admin(&self, node: usize) -> Option<Client> {
        let at = self.nodes[node].postgres;
        let url = format!("postgres://postgres:{PASSWORD}@{at}/postgres");
        Client::connect(&url).await.ok()
    }
}

async fn start_etcd(directory: &PrivateDirectory) -> (Process, SocketAddr) {
    let at = free_address();
    let client = format!("http://{at}");
    let peer = format!("http://{}", free_address());
    let mut command = program("etcd");
    command
        .args(["--name", "etcd", "--log-level", "error"])
        .args([
            "--listen-client-urls",
            &client,
            "--advertise-client-urls",
            &client,
        ])
        .args([
            "--listen-peer-urls",
            &peer,
            "--initial-advertise-peer-urls",
            &peer,
        ])
        .args(["--initial-cluster", &format!("etcd={peer}")])
        .arg("--data-dir")
        .arg(directory.join("etcd"))
        .current_dir("/");
    let etcd = Process::start("etcd", &mut command, End::KillGroup);
    listens(&etcd, at).await;
    (etcd, at)
}

async fn start_haproxy(directory: &PrivateDirectory, nodes: &[Node]) -> (Process, SocketAddr) {
    let at = free_address();
    let mut names = BTreeMap::from([("LEADER", at.to_string())]);
    let keys = [
        ("A", "A_REST_PORT"),
        ("B", "B_REST_PORT"),
        ("C", "C_REST_PORT"),
    ];
    for (node, (postgres, rest)) in nodes.iter().zip(keys) {
        names.insert(postgres, node.postgres.to_string());
        names.insert(rest, node.rest.port().to_string());
    }
    let file = directory.join("haproxy.cfg");
    write(&file, &fill(HAPROXY, &names));
    let mut command = program("haproxy");
    command.arg("-db").arg("-f").arg(&file).current_dir("/");
    let haproxy = Process::start("haproxy", &mut command, End::KillGroup);
    listens(&haproxy, at).await;
    (haproxy, at)
}

async fn listens(process: &Process, at: SocketAddr) {
    eventually("it listens", async || {
        if let Some(status) = process.exit_status() {
            panic!("it ended: {status}\n{}", process.tail());
        }
        TcpStream::connect(at).await.ok()
    })
    .await;
}
