//! HAProxy with HTTP/2 on both sides: a proxy that answers pings itself.

use std::{fs, net::SocketAddr, process::Command};

use crate::{
    leash::End,
    process::Process,
    system::{self, PrivateDirectory, free_address},
    wait::eventually,
};

/// A running proxy. Dropping it kills it and removes its files.
#[derive(Debug)]
pub struct HaProxy {
    // Dropped before the directory.
    process: Process,
    _directory: PrivateDirectory,
    address: SocketAddr,
}

impl HaProxy {
    /// Starts a proxy in front of `target` that cuts nothing by itself.
    pub async fn start(target: SocketAddr) -> Self {
        let directory = system::private_directory();
        let address = free_address();
        let configuration = format!(
            "global
    maxconn 200
defaults
    mode http
    timeout connect 5s
    timeout client 1h
    timeout server 1h
frontend clients
    bind {address} proto h2
    default_backend servers
backend servers
    server one {target} proto h2
"
        );
        let path = directory.join("haproxy.cfg");
        fs::write(&path, configuration).expect("room on the disk");
        system::give_away(&path);
        let program = system::find_program("haproxy");
        let mut command = Command::new(
            program.expect("haproxy is missing: run `deploy/setup.sh test`, or install it"),
        );
        system::drop_root(&mut command)
            .arg("-db")
            .arg("-f")
            .arg(&path)
            .current_dir("/");
        let process = Process::start("haproxy", &mut command, End::KillGroup);
        let proxy = Self {
            process,
            _directory: directory,
            address,
        };
        eventually("haproxy listens", async || {
            if let Some(status) = proxy.process.exit_status() {
                panic!("haproxy ended: {status}\n{}", proxy.process.tail());
            }
            tokio::net::TcpStream::connect(address).await.ok()
        })
        .await;
        proxy
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}
