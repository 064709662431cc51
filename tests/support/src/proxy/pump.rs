//! Moves the bytes of one direction of one connection.

use std::{
    io,
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    sync::{mpsc, watch},
};

use super::{Flow, Plan};

/// Bytes read at one time, and how many such reads may be under way: what the
/// buffers of a network would hold.
const CHUNK: usize = 16 * 1024;
const CHUNKS_UNDER_WAY: usize = 256;

/// Moves bytes until the reader ends or a side fails. An error means that
/// both sides shall be reset.
pub(super) async fn pump(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    mut plan: watch::Receiver<Plan>,
    flow: impl Fn(&Plan) -> Flow,
    passed: &AtomicU64,
    hindered: &AtomicU64,
) -> io::Result<()> {
    let (queue, mut queued) = mpsc::channel::<(Instant, Vec<u8>)>(CHUNKS_UNDER_WAY);
    let read = async move {
        let mut buffer = vec![0; CHUNK];
        loop {
            let n = from.read(&mut buffer).await?;
            if n == 0 {
                return Ok(());
            }
            if queue
                .send((Instant::now(), buffer[..n].to_vec()))
                .await
                .is_err()
            {
                return Ok(());
            }
        }
    };
    let write = async {
        while let Some((arrived, bytes)) = queued.recv().await {
            let hinder = |bytes| hindered.fetch_add(bytes as u64, Ordering::SeqCst);
            if matches!(flow(&plan.borrow()), Flow::Delay(_) | Flow::Hold) {
                hinder(bytes.len());
            }
            match admit(&mut plan, &flow, arrived).await {
                Flow::Swallow => {
                    hinder(bytes.len());
                    continue;
                }
                Flow::SwallowAfter(limit) => {
                    let n = room(limit, passed, bytes.len());
                    hinder(bytes.len() - n);
                    to.write_all(&bytes[..n]).await?;
                    continue;
                }
                Flow::ResetAfter(limit) => {
                    let n = room(limit, passed, bytes.len());
                    hinder(bytes.len() - n);
                    to.write_all(&bytes[..n]).await?;
                    if n < bytes.len() {
                        return Err(io::ErrorKind::ConnectionReset.into());
                    }
                    continue;
                }
                Flow::Pass | Flow::Delay(_) | Flow::Hold => {}
            }
            to.write_all(&bytes).await?;
            passed.fetch_add(bytes.len() as u64, Ordering::SeqCst);
        }
        // The end of a stream is lost like its bytes.
        let open = |plan: &Plan| {
            !matches!(
                flow(plan),
                Flow::Swallow | Flow::Hold | Flow::SwallowAfter(_)
            )
        };
        if plan.wait_for(open).await.is_ok() {
            to.shutdown().await?;
        }
        Ok(())
    };
    tokio::try_join!(read, write).map(|_| ())
}

/// Waits until bytes that arrived then may go on, and says how.
async fn admit(
    plan: &mut watch::Receiver<Plan>,
    flow: &impl Fn(&Plan) -> Flow,
    arrived: Instant,
) -> Flow {
    loop {
        let now = flow(&plan.borrow_and_update());
        let wait = match now {
            Flow::Delay(by) => by.saturating_sub(arrived.elapsed()),
            Flow::Hold => std::time::Duration::MAX,
            _ => return now,
        };
        if wait.is_zero() {
            return now;
        }
        tokio::select! {
            () = tokio::time::sleep(wait) => return now,
            changed = plan.changed() => if changed.is_err() { return Flow::Swallow },
        }
    }
}

/// How many of `wanted` bytes still pass; takes them from the limit.
fn room(limit: u64, passed: &AtomicU64, wanted: usize) -> usize {
    let wanted = wanted as u64;
    let before = passed
        .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |before| {
            Some(before.saturating_add(wanted).min(limit.max(before)))
        })
        .unwrap_or_else(|before| before);
    let n = limit.saturating_sub(before).min(wanted);
    usize::try_from(n).expect("not more than was wanted")
}

/// Reads and throws away until the other side ends.
pub(super) async fn discard(stream: &mut TcpStream, hindered: &AtomicU64) {
    let mut buffer = vec![0; CHUNK];
    while let Ok(n @ 1..) = stream.read(&mut buffer).await {
        hindered.fetch_add(n as u64, Ordering::SeqCst);
    }
}

/// Makes the coming drop of `stream` send a reset.
pub(super) fn close(stream: &TcpStream, with_reset: bool) {
    if with_reset {
        // A stream that is closed already needs none.
        let _ = stream.set_zero_linger();
    }
}
