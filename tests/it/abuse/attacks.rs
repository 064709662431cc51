//! What hostile and broken peers do, one connection each.

use std::{io, net::SocketAddr, time::Duration};

use fencepost_proto::v1::GetRequest;
use fencepost_support::{
    calls::request,
    frames::{
        END_HEADERS, END_STREAM, PREFACE, Peer, call, frame, header,
        kind::{CONTINUATION, DATA, HEADERS, PING, PRIORITY, RST_STREAM, SETTINGS, WINDOW_UPDATE},
        message,
    },
};
use rand::{Rng as _, rngs::StdRng};

use crate::world::LONG;

/// Streams of one connection, when it opens many.
const MANY: u32 = 2_000;

/// What one peer does with its connection, until it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attack {
    /// Bytes that are no HTTP at all.
    Garbage,
    /// Frames of any kind, flags, stream and content.
    AnyFrames,
    /// Frames that break a rule each.
    BadFrames,
    Pings,
    Settings,
    EmptyData,
    /// Headers that never end, of nothing.
    Continuations,
    /// Headers that end after far too much.
    LargeHeaders,
    /// Calls that are taken back at once.
    Resets,
    /// Calls whose message never comes.
    OpenCalls,
    /// Calls whose answers have no room to go.
    Unread,
    /// Nothing is said, or half of the first words.
    Silent,
    /// A call, and the end of what the peer has to say.
    HalfClosed,
    /// A call in single bytes.
    Drip,
}

impl Attack {
    pub(crate) const ALL: [Self; 14] = [
        Self::Garbage,
        Self::AnyFrames,
        Self::BadFrames,
        Self::Pings,
        Self::Settings,
        Self::EmptyData,
        Self::Continuations,
        Self::LargeHeaders,
        Self::Resets,
        Self::OpenCalls,
        Self::Unread,
        Self::Silent,
        Self::HalfClosed,
        Self::Drip,
    ];

    /// Does it once. An error is the server's way to have enough of it.
    pub(crate) async fn run(self, address: SocketAddr, mut rng: StdRng) -> io::Result<()> {
        let mut peer = match self {
            Self::Garbage | Self::Silent => Peer::connect(address).await?,
            // No answer may have a body.
            Self::Unread => Peer::greet(address, &[(4, 0)]).await?,
            _ => Peer::greet(address, &[]).await?,
        };
        let name = format!("junk-{}", rng.random_range(0..1000));
        let junk = message(&request(&name, "junk", LONG));
        let acquire = |flags, stream| frame(HEADERS, flags, stream, &call("Acquire"));
        match self {
            Self::Garbage => {
                let bytes: Vec<u8> = (0..4096).map(|_| rng.random()).collect();
                peer.send(&bytes).await?;
            }
            Self::AnyFrames => {
                for _ in 0..200 {
                    let payload: Vec<u8> =
                        (0..rng.random_range(0..64)).map(|_| rng.random()).collect();
                    let (kind, flags) = (rng.random_range(0..12), rng.random());
                    peer.send(&frame(kind, flags, rng.random_range(0..8), &payload))
                        .await?;
                }
            }
            Self::BadFrames => {
                let broken = [
                    frame(WINDOW_UPDATE, 0, 0, &u32::MAX.to_be_bytes()),
                    frame(WINDOW_UPDATE, 0, 0, &[0; 4]),
                    frame(SETTINGS, 0, 1, &[]),
                    frame(SETTINGS, 0, 0, &[0; 5]),
                    frame(PING, 0, 0, &[0; 7]),
                    frame(DATA, 0, 1, b"before its headers"),
                    frame(HEADERS, END_HEADERS, 2, &call("Acquire")),
                    frame(HEADERS, END_HEADERS, 1, &[0xff; 64]),
                    frame(PRIORITY, 0, 1, &[0, 0, 0, 1, 0]),
                    frame(RST_STREAM, 0, 99, &[0; 4]),
                    frame(CONTINUATION, END_HEADERS, 1, &[]),
                    vec![0xff; 9],
                ];
                peer.send(&broken[rng.random_range(0..broken.len())])
                    .await?;
            }
            Self::Pings => repeat(&mut peer, &frame(PING, 0, 0, &[7; 8])).await?,
            Self::Settings => repeat(&mut peer, &frame(SETTINGS, 0, 0, &[])).await?,
            Self::EmptyData => {
                peer.send(&acquire(END_HEADERS, 1)).await?;
                repeat(&mut peer, &frame(DATA, 0, 1, &[])).await?;
            }
            Self::Continuations => {
                peer.send(&acquire(0, 1)).await?;
                repeat(&mut peer, &frame(CONTINUATION, 0, 1, &[])).await?;
            }
            Self::LargeHeaders => {
                peer.send(&acquire(0, 1)).await?;
                let filler = header("filler", &"x".repeat(16_000));
                let more = frame(CONTINUATION, 0, 1, &filler);
                for _ in 0..200 {
                    peer.send(&more).await?;
                }
                peer.send(&frame(CONTINUATION, END_HEADERS, 1, &[])).await?;
            }
            Self::Resets => {
                for stream in odd(MANY) {
                    let all = [
                        acquire(END_HEADERS, stream),
                        frame(DATA, END_STREAM, stream, &junk),
                        frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes()),
                    ];
                    peer.send(&all.concat()).await?;
                }
            }
            Self::OpenCalls => {
                for stream in odd(MANY) {
                    peer.send(&acquire(END_HEADERS, stream)).await?;
                }
            }
            Self::Unread => {
                let get = message(&GetRequest { resource: name });
                for stream in odd(MANY) {
                    let all = [
                        frame(HEADERS, END_HEADERS, stream, &call("Get")),
                        frame(DATA, END_STREAM, stream, &get),
                    ];
                    peer.send(&all.concat()).await?;
                }
            }
            Self::Silent => {
                let half = rng.random_range(0..PREFACE.len());
                peer.send(&PREFACE[..half]).await?;
            }
            Self::HalfClosed => {
                let all = [acquire(END_HEADERS, 1), frame(DATA, 0, 1, &junk)];
                peer.send(&all.concat()).await?;
                peer.half_close().await?;
            }
            Self::Drip => {
                let all = [acquire(END_HEADERS, 1), frame(DATA, END_STREAM, 1, &junk)];
                peer.drip(&all.concat(), Duration::from_millis(20)).await?;
            }
        }
        peer.closed().await;
        Ok(())
    }
}

/// The same frame, very often, read by nobody.
async fn repeat(peer: &mut Peer, frame: &[u8]) -> io::Result<()> {
    let hundred = frame.repeat(100);
    for _ in 0..500 {
        peer.send(&hundred).await?;
    }
    Ok(())
}

/// The first `count` streams of a client.
fn odd(count: u32) -> impl Iterator<Item = u32> {
    (0..count).map(|n| 2 * n + 1)
}
