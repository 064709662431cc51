//! HTTP/2 written by hand: frames that no library would send.

use std::{io, net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

/// What a client says first.
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The kinds of frame, as they are numbered on the wire.
pub mod kind {
    #![allow(missing_docs, reason = "the names are those of RFC 9113")]
    pub const DATA: u8 = 0;
    pub const HEADERS: u8 = 1;
    pub const PRIORITY: u8 = 2;
    pub const RST_STREAM: u8 = 3;
    pub const SETTINGS: u8 = 4;
    pub const PUSH_PROMISE: u8 = 5;
    pub const PING: u8 = 6;
    pub const WINDOW_UPDATE: u8 = 8;
    pub const CONTINUATION: u8 = 9;
}

/// The stream ends here.
pub const END_STREAM: u8 = 1;
/// On PING: this is an answer.
const ACK: u8 = 1;
/// No CONTINUATION follows.
pub const END_HEADERS: u8 = 4;

/// One frame. The length in its head is the payload's, whatever may be allowed.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a frame's length has 24 bits");
    let mut bytes = length.to_be_bytes()[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// A header, spelled out and remembered by nobody.
pub fn header(name: &str, value: &str) -> Vec<u8> {
    let mut bytes = vec![0];
    for text in [name, value] {
        prefixed(text.len(), &mut bytes);
        bytes.extend(text.as_bytes());
    }
    bytes
}

/// A length as HPACK writes it, on seven bits and then some.
fn prefixed(length: usize, bytes: &mut Vec<u8>) {
    let Ok(short @ ..0x7f) = u8::try_from(length) else {
        bytes.push(0x7f);
        let mut rest = length - 0x7f;
        while rest >= 0x80 {
            bytes.push((rest & 0x7f) as u8 | 0x80);
            rest >>= 7;
        }
        bytes.push(rest as u8);
        return;
    };
    bytes.push(short);
}

/// The headers of a call of the lock service, without further ones.
pub fn call(method: &str) -> Vec<u8> {
    let path = format!("/{}/{method}", fencepost_proto::v1::LOCK_SERVICE);
    [
        header(":method", "POST"),
        header(":scheme", "http"),
        header(":path", &path),
        header(":authority", "fencepost"),
        header("content-type", "application/grpc"),
        header("te", "trailers"),
    ]
    .concat()
}

/// A message as gRPC puts it into DATA frames.
pub fn message(message: &impl prost::Message) -> Vec<u8> {
    let body = message.encode_to_vec();
    let length = u32::try_from(body.len()).expect("a small message");
    [&[0], &length.to_be_bytes()[..], &body].concat()
}

/// A peer that keeps no rules of its own. Dropping it closes its connection.
#[derive(Debug)]
pub struct Peer(TcpStream);

impl Peer {
    /// Connects, and says nothing.
    ///
    /// # Errors
    ///
    /// When nobody listens.
    pub async fn connect(address: SocketAddr) -> io::Result<Self> {
        TcpStream::connect(address).await.map(Self)
    }

    /// Connects, and begins as a client does, with these settings.
    ///
    /// # Errors
    ///
    /// When nobody listens.
    pub async fn greet(address: SocketAddr, settings: &[(u16, u32)]) -> io::Result<Self> {
        let mut peer = Self::connect(address).await?;
        let settings: Vec<u8> = settings
            .iter()
            .flat_map(|(name, value)| [&name.to_be_bytes()[..], &value.to_be_bytes()].concat())
            .collect();
        let first = [PREFACE, &frame(kind::SETTINGS, 0, 0, &settings)].concat();
        peer.send(&first).await?;
        Ok(peer)
    }

    /// Sends bytes. Waits for as long as the other side does not read.
    ///
    /// # Errors
    ///
    /// When the other side has closed.
    pub async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all(bytes).await
    }

    /// Sends bytes one by one, with a pause after each.
    ///
    /// # Errors
    ///
    /// When the other side has closed.
    pub async fn drip(&mut self, bytes: &[u8], pause: Duration) -> io::Result<()> {
        for byte in bytes {
            self.send(&[*byte]).await?;
            tokio::time::sleep(pause).await;
        }
        Ok(())
    }

    /// Says that nothing follows, and still reads.
    ///
    /// # Errors
    ///
    /// When the other side has closed.
    pub async fn half_close(&mut self) -> io::Result<()> {
        self.0.shutdown().await
    }

    /// Answers pings and nothing else, until the other side closes.
    pub async fn pinged(&mut self) {
        let mut head = [0; 9];
        while self.0.read_exact(&mut head).await.is_ok() {
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
            let mut payload = vec![0; usize::try_from(length).expect("24 bits")];
            let read = self.0.read_exact(&mut payload).await.is_ok();
            let is_asked = head[3] == kind::PING && head[4] & ACK == 0;
            if !read
                || is_asked
                    && self
                        .send(&frame(kind::PING, ACK, 0, &payload))
                        .await
                        .is_err()
            {
                return;
            }
        }
    }

    /// Reads and answers nothing, until the other side closes.
    pub async fn closed(&mut self) {
        let mut buffer = vec![0; 64 * 1024];
        while matches!(self.0.read(&mut buffer).await, Ok(1..)) {}
    }
}
