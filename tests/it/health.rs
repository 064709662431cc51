//! What probes are told: grpc.health.v1 under its three names, /livez and
//! /readyz, and reflection.

use std::{net::SocketAddr, time::Duration};

use fencepost_proto::v1::{GetRequest, LOCK_SERVICE};
use fencepost_support::{
    Server, eventually,
    postgres::fresh_database,
    server::{Client, channel_at},
    system::free_address,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};
use tonic::{Code, Streaming, transport::Channel};
use tonic_health::pb::{
    HealthCheckRequest, HealthCheckResponse,
    health_check_response::ServingStatus::{self, NotServing, ServiceUnknown, Serving},
    health_client::HealthClient,
};

const READINESS: [&str; 2] = ["", LOCK_SERVICE];

fn ask(service: &str) -> HealthCheckRequest {
    HealthCheckRequest {
        service: service.to_owned(),
    }
}

/// What Check says, or the code of its error.
async fn check(channel: &Channel, service: &str) -> Result<ServingStatus, Code> {
    let mut client = HealthClient::new(channel.clone());
    match client.check(ask(service)).await {
        Ok(answer) => Ok(answer.into_inner().status()),
        Err(status) => Err(status.code()),
    }
}

/// An open Watch.
struct Watch(Streaming<HealthCheckResponse>);

impl Watch {
    async fn open(channel: &Channel, service: &str) -> Self {
        let mut client = HealthClient::new(channel.clone());
        Self(client.watch(ask(service)).await.unwrap().into_inner())
    }

    async fn next(&mut self) -> ServingStatus {
        let message = timeout(Duration::from_secs(20), self.0.message()).await;
        let message = message.expect("a change is told").unwrap();
        message.expect("the stream goes on").status()
    }

    /// Expects that nothing is told for a while, and that it does not end.
    async fn expect_quiet(&mut self) {
        let message = timeout(Duration::from_millis(1500), self.0.message()).await;
        assert!(message.is_err(), "{message:?}");
    }
}

/// The status line and body of `GET path`.
pub(crate) async fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let code = head.split(' ').nth(1).unwrap().parse().unwrap();
    (code, body.to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_serves_says_so_under_its_three_names() {
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let channel = server.channel().await;
    for name in READINESS.into_iter().chain(["liveness"]) {
        assert_eq!(check(&channel, name).await, Ok(Serving), "{name:?}");
        let mut watch = Watch::open(&channel, name).await;
        assert_eq!(watch.next().await, Serving, "{name:?}");
        watch.expect_quiet().await;
    }
    assert_eq!(get(server.http(), "/livez").await.0, 200);
    assert_eq!(get(server.http(), "/readyz").await.0, 200);
    assert_eq!(get(server.http(), "/other").await.0, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_name_is_not_found_and_its_watch_is_kept() {
    let database = fresh_database().await;
    let server = Server::start(&database.url()).await;
    let channel = server.channel().await;
    for name in ["fencepost.v1.Other", "fencepost.v1", "Liveness", " "] {
        assert_eq!(check(&channel, name).await, Err(Code::NotFound), "{name:?}");
        let mut watch = Watch::open(&channel, name).await;
        assert_eq!(watch.next().await, ServiceUnknown, "{name:?}");
        watch.expect_quiet().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn before_the_first_good_check_it_lives_and_is_not_ready() {
    let database = fresh_database().await;
    drop(Server::start(&database.url()).await);
    // The schema is there, and the lock table cannot be looked at.
    let blocker = database.client().await;
    blocker.run("BEGIN").await;
    blocker.run("LOCK TABLE fencepost.locks").await;
    let server = Server::builder(&database.url()).start().await;
    let channel = server.channel().await;
    let mut watches = Vec::new();
    for name in READINESS {
        let mut watch = Watch::open(&channel, name).await;
        assert_eq!(watch.next().await, NotServing, "{name:?}");
        assert_eq!(check(&channel, name).await, Ok(NotServing), "{name:?}");
        watches.push(watch);
    }
    let mut liveness = Watch::open(&channel, "liveness").await;
    assert_eq!(liveness.next().await, Serving);
    assert_eq!(get(server.http(), "/livez").await.0, 200);
    assert_eq!(get(server.http(), "/readyz").await.0, 503);
    watches[0].expect_quiet().await;

    blocker.run("COMMIT").await;
    for watch in &mut watches {
        assert_eq!(watch.next().await, Serving);
    }
    assert_eq!(get(server.http(), "/readyz").await.0, 200);

    // And the same way back, with the process as alive as ever.
    blocker.run("BEGIN").await;
    blocker.run("LOCK TABLE fencepost.locks").await;
    for watch in &mut watches {
        assert_eq!(watch.next().await, NotServing);
    }
    assert_eq!(get(server.http(), "/readyz").await.0, 503);
    assert_eq!(get(server.http(), "/livez").await.0, 200);
    assert_eq!(check(&channel, "liveness").await, Ok(Serving));
    liveness.expect_quiet().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_drains_is_not_ready_and_lives() {
    let database = fresh_database().await;
    let health = free_address();
    let server = Server::builder(&database.url())
        .flag("--drain-delay", "3s")
        .flag("--health-listen", &health.to_string())
        .start()
        .await;
    server.wait_ready().await;
    let channel = server.channel().await;
    let mut watches = Vec::new();
    for name in READINESS {
        for channel in [&channel, &channel_at(health).await] {
            let mut watch = Watch::open(channel, name).await;
            assert_eq!(watch.next().await, Serving);
            watches.push(watch);
        }
    }
    server.sigterm();
    for watch in &mut watches {
        assert_eq!(watch.next().await, NotServing);
    }
    for name in READINESS {
        assert_eq!(check(&channel, name).await, Ok(NotServing));
    }
    assert_eq!(check(&channel, "liveness").await, Ok(Serving));
    assert_eq!(get(server.http(), "/readyz").await.0, 503);
    assert_eq!(get(server.http(), "/livez").await.0, 200);
    assert!(server.wait_exit().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_health_port_serves_health_alone() {
    let database = fresh_database().await;
    let health = free_address();
    let server = Server::builder(&database.url())
        .flag("--health-listen", &health.to_string())
        .start()
        .await;
    server.wait_ready().await;
    let channel = channel_at(health).await;
    for name in READINESS.into_iter().chain(["liveness"]) {
        assert_eq!(check(&channel, name).await, Ok(Serving), "{name:?}");
    }
    assert_eq!(check(&channel, "unknown").await, Err(Code::NotFound));
    let mut locks = Client::new(channel);
    let request = GetRequest {
        resource: "a".to_owned(),
    };
    let status = locks.get(request.clone()).await.unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented, "{status:?}");
    let mut locks = server.client().await;
    let status = locks.get(request).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound, "{status:?}");
}

/// A test of one version of reflection; the two differ in their package only.
macro_rules! reflection {
    ($name:ident, $version:ident) => {
        #[tokio::test(flavor = "multi_thread")]
        async fn $name() {
            use prost::Message as _;
            use tonic_reflection::pb::$version::{
                ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
                server_reflection_request::MessageRequest,
                server_reflection_response::MessageResponse,
            };
            let database = fresh_database().await;
            let server = Server::start(&database.url()).await;
            let mut client = ServerReflectionClient::new(server.channel().await);
            let mut ask = async |request: MessageRequest| {
                let request = ServerReflectionRequest {
                    host: String::new(),
                    message_request: Some(request),
                };
                let answer = client.server_reflection_info(tokio_stream::once(request));
                let mut answers = answer.await.unwrap().into_inner();
                let answer = answers.message().await.unwrap().unwrap();
                answer.message_response.unwrap()
            };

            let listed = ask(MessageRequest::ListServices(String::new())).await;
            let MessageResponse::ListServicesResponse(listed) = listed else {
                panic!("{listed:?}");
            };
            let listed: Vec<_> = listed.service.into_iter().map(|one| one.name).collect();
            for name in [LOCK_SERVICE, "grpc.health.v1.Health"] {
                assert!(listed.iter().any(|listed| listed == name), "{listed:?}");
                let symbol = MessageRequest::FileContainingSymbol(name.to_owned());
                let found = ask(symbol).await;
                let MessageResponse::FileDescriptorResponse(found) = found else {
                    panic!("{found:?}");
                };
                let services = found.file_descriptor_proto.iter().flat_map(|file| {
                    let file = prost_types::FileDescriptorProto::decode(&file[..]).unwrap();
                    let package = file.package().to_owned();
                    let service = move |name: &str| format!("{package}.{name}");
                    let services = file.service.into_iter();
                    services.map(move |one| (service(one.name()), one.method.len()))
                });
                let services: Vec<_> = services.collect();
                let found = services.iter().find(|(found, _)| found == name);
                let methods = found.unwrap_or_else(|| panic!("{services:?}")).1;
                assert!(methods >= if name == LOCK_SERVICE { 5 } else { 2 });
            }
        }
    };
}

reflection!(reflection_v1_lists_and_describes, v1);
reflection!(reflection_v1alpha_lists_and_describes, v1alpha);

#[tokio::test(flavor = "multi_thread")]
async fn readiness_follows_the_database() {
    let mut postgres = fencepost_support::Postgres::start().await;
    let server = Server::start(&postgres.url()).await;
    let mut watch = Watch::open(&server.channel().await, LOCK_SERVICE).await;
    assert_eq!(watch.next().await, Serving);
    postgres.kill9().await;
    assert_eq!(watch.next().await, NotServing);
    assert_eq!(get(server.http(), "/readyz").await.0, 503);
    postgres.start_again().await;
    assert_eq!(watch.next().await, Serving);
    eventually("ready by HTTP as well", async || {
        (get(server.http(), "/readyz").await.0 == 200).then_some(())
    })
    .await;
}
