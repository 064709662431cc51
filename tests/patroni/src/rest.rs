//! Patroni's REST API, by as much HTTP as it takes.

use std::{io, net::SocketAddr, time::Duration};

use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

/// A question is answered at once.
const PATIENCE: Duration = Duration::from_secs(5);

/// Longer than Patroni itself waits for the end of a switchover.
const LONG: Duration = Duration::from_secs(40);

/// What it answered.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: String,
}

impl Answer {
    /// The body; null when it is no JSON.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_default()
    }
}

/// Asks.
pub(crate) async fn get(at: SocketAddr, path: &str) -> io::Result<Answer> {
    call(at, &format!("GET {path} HTTP/1.0\r\n\r\n"), PATIENCE).await
}

/// Tells it to do something.
pub(crate) async fn post(at: SocketAddr, path: &str, body: &Value) -> io::Result<Answer> {
    let body = body.to_string();
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {length}"
    );
    call(at, &format!("{head}\r\n\r\n{body}"), LONG).await
}

async fn call(at: SocketAddr, request: &str, patience: Duration) -> io::Result<Answer> {
    let talk = async {
        let mut stream = TcpStream::connect(at).await?;
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        io::Result::Ok(answer)
    };
    let answer: String = timeout(patience, talk)
        .await
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_default();
    let status = head.split_whitespace().nth(1).and_then(|s| s.parse().ok());
    Ok(Answer {
        status: status.ok_or(io::ErrorKind::InvalidData)?,
        body: body.to_owned(),
    })
}
