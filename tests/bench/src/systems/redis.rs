//! Redis with the recipe of its manual: SET NX PX, and scripts that delete or
//! extend a key of one's own. With an append-only file that is flushed at each
//! write, or with nothing kept at all.

use std::net::SocketAddr;

use fencepost_support::{
    process::Process,
    system::{self, PrivateDirectory, free_address},
};
use redis::{AsyncConnectionConfig, IntoConnectionInfo as _, aio::MultiplexedConnection, cmd};
use uuid::Uuid;

use super::{Shim, System, TTL_S, program, serve};
use crate::load::{Client, Result};

/// More than this many multiplexed connections give Redis no more.
const CONNECTIONS: usize = 16;

const RELEASE: &str = "if redis.call('get', KEYS[1]) == ARGV[1] then \
    return redis.call('del', KEYS[1]) else return 0 end";
const RENEW: &str = "if redis.call('get', KEYS[1]) == ARGV[1] then \
    return redis.call('pexpire', KEYS[1], ARGV[2]) else return 0 end";

/// What Redis writes down.
#[derive(Clone, Copy, Debug)]
pub(super) enum Log {
    EveryWrite,
    None,
}

pub(super) struct Redis {
    process: Process,
    _directory: PrivateDirectory,
    address: SocketAddr,
}

impl Redis {
    pub(super) async fn start(log: Log, shim: Option<&Shim>) -> Result<Self> {
        let directory = system::private_directory();
        let address = free_address();
        let mut command = program("redis-server")?;
        if let Some(shim) = shim {
            shim.slow_down(&mut command, &directory)?;
        }
        command
            .args(["--bind", "127.0.0.1", "--port", &address.port().to_string()])
            .args(["--save", "", "--dir"])
            .arg(&*directory);
        match log {
            Log::EveryWrite => command.args(["--appendonly", "yes", "--appendfsync", "always"]),
            Log::None => command.args(["--appendonly", "no"]),
        };
        let process = serve("redis-server", &mut command, address).await?;
        Ok(Self {
            process,
            _directory: directory,
            address,
        })
    }

    async fn connect(&self) -> Result<MultiplexedConnection> {
        let info = format!("redis://{}", self.address).into_connection_info()?;
        let tcp = info.tcp_settings().clone().set_nodelay(true);
        let client = redis::Client::open(info.set_tcp_settings(tcp))?;
        // A timer for each call would only slow it down.
        let config = AsyncConnectionConfig::new().set_response_timeout(None);
        Ok(client
            .get_multiplexed_async_connection_with_config(&config)
            .await?)
    }
}

#[tonic::async_trait]
impl System for Redis {
    async fn clients(&self, names: &[String]) -> Result<Vec<Box<dyn Client>>> {
        let mut connections = Vec::new();
        for _ in 0..names.len().min(CONNECTIONS) {
            connections.push(self.connect().await?);
        }
        let mut first = self.connect().await?;
        let mut load = async |script| -> Result<String> {
            let mut load = cmd("SCRIPT");
            Ok(load.arg("LOAD").arg(script).query_async(&mut first).await?)
        };
        let (release, renew) = (load(RELEASE).await?, load(RENEW).await?);
        let pairs = names.iter().zip(connections.iter().cycle());
        Ok(pairs
            .map(|(name, connection)| {
                Box::new(Holder {
                    connection: connection.clone(),
                    name: name.clone(),
                    value: Uuid::new_v4().to_string(),
                    release: release.clone(),
                    renew: renew.clone(),
                }) as Box<dyn Client>
            })
            .collect())
    }

    fn processes(&self) -> Vec<(&'static str, u32)> {
        vec![("server", self.process.pid())]
    }
}

struct Holder {
    connection: MultiplexedConnection,
    name: String,
    value: String,
    /// The scripts, as SCRIPT LOAD named them.
    release: String,
    renew: String,
}

const TTL_MS: u32 = TTL_S as u32 * 1000;

#[tonic::async_trait]
impl Client for Holder {
    async fn acquire(&mut self) -> Result<bool> {
        let mut set = cmd("SET");
        set.arg(&self.name)
            .arg(&self.value)
            .arg("NX")
            .arg("PX")
            .arg(TTL_MS);
        let granted: Option<String> = set.query_async(&mut self.connection).await?;
        Ok(granted.is_some())
    }

    async fn release(&mut self) -> Result<()> {
        let mut script = cmd("EVALSHA");
        script
            .arg(&self.release)
            .arg(1)
            .arg(&self.name)
            .arg(&self.value);
        held(script.query_async(&mut self.connection).await?)
    }

    async fn renew(&mut self) -> Result<()> {
        let mut script = cmd("EVALSHA");
        script
            .arg(&self.renew)
            .arg(1)
            .arg(&self.name)
            .arg(&self.value)
            .arg(TTL_MS);
        held(script.query_async(&mut self.connection).await?)
    }
}

fn held(keys: i64) -> Result<()> {
    if keys == 1 {
        Ok(())
    } else {
        Err("not held".into())
    }
}
