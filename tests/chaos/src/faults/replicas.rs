//! Replicas that die, freeze, come and go.

use fencepost_support::{Server, eventually, system::is_frozen};
use tokio::time::Instant;

use super::{
    Ended, Seen, Stage,
    stage::{counted, refuses},
};

/// One is killed, and started again at the end.
pub(super) async fn kill(mut stage: Stage<'_>) -> Ended {
    let mut server = stage.replica().server.lock().await;
    server.kill9().await;
    let seen = stage.watch(async || refuses(server.grpc()).await).await;
    let at = start(&mut server).await;
    Ended { seen, at }
}

/// All are.
pub(super) async fn kill_all(stage: Stage<'_>) -> Ended {
    let mut servers = Vec::new();
    for replica in &stage.world.replicas {
        let server = replica.server.lock().await;
        server.kill9().await;
        servers.push(server);
    }
    let all_refuse = async || {
        let mut seen = None;
        for server in &servers {
            seen = Some(refuses(server.grpc()).await?);
        }
        seen
    };
    let seen = stage.watch(all_refuse).await;
    let starting = servers.iter_mut().map(|server| start(server));
    let began = futures_util::future::join_all(starting).await;
    let at = began.into_iter().max().unwrap_or_else(Instant::now);
    Ended { seen, at }
}

/// One stands still with all its connections open.
pub(super) async fn freeze(mut stage: Stage<'_>) -> Seen {
    let server = stage.replica().server.lock().await;
    server.sigstop();
    let stands = async || is_frozen(server.pid()).then(|| "its state is T".to_owned());
    let seen = stage.watch(stands).await;
    server.sigcont();
    seen
}

/// One after the other is drained and started again.
pub(super) async fn restart(mut stage: Stage<'_>) -> Ended {
    let mut turns = stage.world.replicas.iter().cycle();
    let (mut restarts, mut at) = (0, Instant::now());
    stage
        .repeat(100..500, async || {
            let Some(replica) = turns.next() else { return };
            let mut server = replica.server.lock().await;
            let before = server.pid();
            at = start(&mut server).await;
            restarts += usize::from(server.pid() != before);
        })
        .await;
    let seen = counted(restarts, "replicas drained and started again");
    Ended { seen, at }
}

/// As whoever supervises it does: it ends at its start while its database is away.
/// Says when it began to.
async fn start(server: &mut Server) -> Instant {
    server.sigterm();
    server.wait_exit().await;
    let began = Instant::now();
    eventually("the replica starts", async || {
        server.try_restart().await.ok()
    })
    .await;
    began
}
