//! ZooKeeper by the recipe of its manual: an ephemeral sequential node; the
//! lowest holds, each other one watches the node before its own.

use std::{fs, net::SocketAddr, path::Path, time::Duration};

use fencepost_support::{
    process::Process,
    system::{self, PrivateDirectory, free_address},
};
use zookeeper_client::{self as zk, Acls, CreateMode, CreateOptions};

use super::{Shim, System, TTL_S, program, serve};
use crate::load::{Client, Result};

/// Where Debian's package lies; it names the jars that it needs.
const JAR: &str = "/usr/share/java/zookeeper.jar";
/// As long as the other leases.
const SESSION: Duration = Duration::from_secs(TTL_S as u64);

const FOLDER: CreateOptions<'static> = CreateMode::Persistent.with_acls(Acls::anyone_all());
const CLAIM: CreateOptions<'static> = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());

pub(super) struct Zookeeper {
    process: Process,
    _directory: PrivateDirectory,
    address: SocketAddr,
}

impl Zookeeper {
    pub(super) async fn start(shim: Option<&Shim>) -> Result<Self> {
        if !Path::new(JAR).exists() {
            return Err("zookeeper is not installed".into());
        }
        let directory = system::private_directory();
        let address = free_address();
        let settings = directory.join("zoo.cfg");
        // forceSync is on by default.
        let lines = format!(
            "tickTime=2000\ndataDir={}\nclientPort={}\nclientPortAddress=127.0.0.1\n\
             maxClientCnxns=0\nadmin.enableServer=false\n",
            directory.join("data").display(),
            address.port(),
        );
        fs::write(&settings, lines)?;
        let mut command = program("java")?;
        if let Some(shim) = shim {
            shim.slow_down(&mut command, &directory)?;
        }
        command
            .args(["-cp", JAR])
            .arg("org.apache.zookeeper.server.quorum.QuorumPeerMain")
            .arg(settings);
        let process = serve("zookeeper", &mut command, address).await?;
        Ok(Self {
            process,
            _directory: directory,
            address,
        })
    }
}

#[tonic::async_trait]
impl System for Zookeeper {
    async fn clients(&self, names: &[String]) -> Result<Vec<Box<dyn Client>>> {
        let mut clients: Vec<Box<dyn Client>> = Vec::new();
        for name in names {
            // A session each, as holders have. Sharing them would not help: the
            // library leaves Nagle's algorithm on, so calls would wait for calls.
            let connector = zk::Client::connector().with_session_timeout(SESSION);
            let session = connector.connect(&self.address.to_string()).await?;
            let folder = format!("/{name}");
            match session.create(&folder, b"", &FOLDER).await {
                Ok(_) | Err(zk::Error::NodeExists) => {}
                Err(error) => return Err(error.into()),
            }
            clients.push(Box::new(Holder {
                session,
                prefix: format!("{folder}/lock-"),
                folder,
                node: String::new(),
            }));
        }
        Ok(clients)
    }

    fn processes(&self) -> Vec<(&'static str, u32)> {
        vec![("server", self.process.pid())]
    }
}

struct Holder {
    session: zk::Client,
    folder: String,
    prefix: String,
    /// Our node, once there is one.
    node: String,
}

#[tonic::async_trait]
impl Client for Holder {
    async fn acquire(&mut self) -> Result<bool> {
        let (_, sequence) = self.session.create(&self.prefix, b"", &CLAIM).await?;
        self.node = format!("lock-{sequence}");
        loop {
            let nodes = self.session.list_children(&self.folder).await?;
            // Numbers have leading zeros, so names sort as they do.
            let Some(before) = nodes.iter().filter(|node| **node < self.node).max() else {
                return Ok(true);
            };
            let path = format!("{}/{before}", self.folder);
            let (stat, watcher) = self.session.check_and_watch_stat(&path).await?;
            if stat.is_some() {
                watcher.changed().await;
            }
        }
    }

    async fn release(&mut self) -> Result<()> {
        let path = format!("{}/{}", self.folder, self.node);
        Ok(self.session.delete(&path, None).await?)
    }

    async fn renew(&mut self) -> Result<()> {
        Err("a session is renewed, not a lock".into())
    }
}
