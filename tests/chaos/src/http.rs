//! What a server says of itself over HTTP.

use std::{io, net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

/// Head and body of the answer, when one comes soon.
pub(crate) async fn get(address: SocketAddr, path: &str) -> Option<String> {
    let asking = async {
        let mut stream = TcpStream::connect(address).await?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        io::Result::Ok(answer)
    };
    timeout(Duration::from_secs(1), asking).await.ok()?.ok()
}
