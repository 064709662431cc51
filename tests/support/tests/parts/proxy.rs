//! The proxy passes, delays, holds, swallows, resets and refuses.

use std::{
    io::ErrorKind,
    net::SocketAddr,
    time::{Duration, Instant},
};

use fencepost_support::{
    proxy::{Flow, Proxy},
    wait::eventually,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::timeout,
};

/// Nothing comes for at least this long.
const QUIET: Duration = Duration::from_millis(150);

/// A server that answers every byte with the byte above it.
async fn answering() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                while let Ok(byte) = stream.read_u8().await {
                    if stream.write_u8(byte + 1).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

async fn connected() -> (Proxy, TcpStream) {
    let proxy = Proxy::start(answering().await).await;
    let stream = TcpStream::connect(proxy.address()).await.unwrap();
    (proxy, stream)
}

async fn ask(stream: &mut TcpStream, byte: u8) -> std::io::Result<u8> {
    stream.write_u8(byte).await?;
    stream.read_u8().await
}

async fn hears_nothing(stream: &mut TcpStream) -> bool {
    timeout(QUIET, stream.read_u8()).await.is_err()
}

#[tokio::test]
async fn it_forwards_and_counts() {
    let (proxy, mut stream) = connected().await;
    assert_eq!(ask(&mut stream, 7).await.unwrap(), 8);
    assert_eq!((proxy.open(), proxy.accepted()), (1, 1));
    assert_eq!((proxy.passed_up(), proxy.passed_down()), (1, 1));
    drop(stream);
    eventually("the end is passed on", async || {
        (proxy.open() == 0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_delay_is_kept_on_both_ways() {
    let (proxy, mut stream) = connected().await;
    proxy.delay(Duration::from_millis(100));
    let start = Instant::now();
    assert_eq!(ask(&mut stream, 7).await.unwrap(), 8);
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(200), "{took:?}");
    assert_eq!(proxy.hindered(), 2);
}

#[tokio::test]
async fn what_is_held_comes_when_it_is_let_go() {
    let (proxy, mut stream) = connected().await;
    proxy.hold();
    stream.write_u8(7).await.unwrap();
    assert!(hears_nothing(&mut stream).await);
    assert_eq!(proxy.hindered(), 1);
    proxy.forward().await;
    assert_eq!(stream.read_u8().await.unwrap(), 8);
}

#[tokio::test]
async fn what_is_swallowed_never_comes() {
    let (proxy, mut stream) = connected().await;
    proxy.swallow_up();
    stream.write_u8(7).await.unwrap();
    assert!(hears_nothing(&mut stream).await);
    assert_eq!(proxy.passed_up(), 0);
    proxy.forward().await;
    proxy.swallow_down();
    stream.write_u8(17).await.unwrap();
    assert!(hears_nothing(&mut stream).await);
    assert_eq!((proxy.passed_up(), proxy.passed_down()), (1, 0));
    proxy.forward().await;
    assert_eq!(ask(&mut stream, 27).await.unwrap(), 28);
    assert_eq!(proxy.hindered(), 2);
}

#[tokio::test]
async fn a_black_hole_accepts_even_with_nobody_behind_it() {
    let proxy = Proxy::start("127.0.0.1:1".parse().unwrap()).await;
    proxy.black_hole();
    let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
    stream.write_u8(7).await.unwrap();
    assert!(hears_nothing(&mut stream).await);
    assert_eq!(proxy.hindered(), 1);
}

#[tokio::test]
async fn answers_end_after_so_many_bytes() {
    let (proxy, mut stream) = connected().await;
    assert_eq!(ask(&mut stream, 1).await.unwrap(), 2);
    proxy.set_down(Flow::SwallowAfter(1));
    assert_eq!(ask(&mut stream, 3).await.unwrap(), 4);
    stream.write_u8(5).await.unwrap();
    assert!(hears_nothing(&mut stream).await);
    assert_eq!((proxy.passed_up(), proxy.passed_down()), (3, 1));
    assert_eq!(proxy.hindered(), 1);
}

#[tokio::test]
async fn the_next_answer_breaks_the_connection() {
    let (proxy, mut stream) = connected().await;
    proxy.set_down(Flow::ResetAfter(0));
    let error = ask(&mut stream, 3).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    // The request itself was delivered.
    assert_eq!((proxy.passed_up(), proxy.hindered()), (1, 1));
}

#[tokio::test]
async fn a_reset_and_a_cut_end_what_is_open_and_nothing_else() {
    let (proxy, mut stream) = connected().await;
    proxy.reset().await;
    let error = stream.read_u8().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);

    let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
    assert_eq!(ask(&mut stream, 1).await.unwrap(), 2);
    proxy.cut().await;
    let error = stream.read_u8().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnexpectedEof);

    let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
    assert_eq!(ask(&mut stream, 1).await.unwrap(), 2);
}

#[tokio::test]
async fn a_closed_listener_refuses_and_opens_again() {
    let (proxy, mut stream) = connected().await;
    assert_eq!(ask(&mut stream, 1).await.unwrap(), 2);
    proxy.refuse().await;
    let error = TcpStream::connect(proxy.address()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    assert_eq!(ask(&mut stream, 1).await.unwrap(), 2);
    proxy.forward().await;
    let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
    assert_eq!(ask(&mut stream, 1).await.unwrap(), 2);
}

#[tokio::test]
async fn a_new_target_gets_the_new_connections() {
    let proxy = Proxy::start("127.0.0.1:1".parse().unwrap()).await;
    let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
    assert!(ask(&mut stream, 1).await.is_err());
    proxy.retarget(answering().await);
    let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
    assert_eq!(ask(&mut stream, 1).await.unwrap(), 2);
}
