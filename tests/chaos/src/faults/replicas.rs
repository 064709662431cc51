//! Replicas that die, freeze, come and go.

use std::{process::Stdio, time::Duration};

use fencepost_support::{Server, eventually, server};

use super::Stage;

/// One is killed, and started again at the end.
pub(super) async fn kill(mut stage: Stage<'_>) {
    let mut server = stage.replica().server.lock().await;
    server.kill9().await;
    stage.hold().await;
    start(&mut server).await;
}

/// All are.
pub(super) async fn kill_all(stage: Stage<'_>) {
    let mut servers = Vec::new();
    for replica in &stage.world.replicas {
        let server = replica.server.lock().await;
        server.kill9().await;
        servers.push(server);
    }
    stage.hold().await;
    for server in &mut servers {
        start(server).await;
    }
}

/// One stands still with all its connections open.
pub(super) async fn freeze(mut stage: Stage<'_>) {
    let server = stage.replica().server.lock().await;
    server.sigstop();
    stage.hold().await;
    server.sigcont();
}

/// One after the other is drained and started again.
pub(super) async fn restart(mut stage: Stage<'_>) {
    let mut turns = stage.world.replicas.iter().cycle();
    stage
        .repeat(100..500, async || {
            let Some(replica) = turns.next() else { return };
            start(&mut *replica.server.lock().await).await;
        })
        .await;
}

/// The schema is migrated again and again, and one more replica of this version
/// comes and goes.
pub(super) async fn migrate(mut stage: Stage<'_>) {
    let url = stage.world.url_of("postgres");
    let come_and_go = async |url: &str| {
        let builder = Server::builder(url).flag("--drain-delay", "0s");
        // It may find no database now.
        if let Ok(mut server) = builder.try_start().await {
            start(&mut server).await;
            server.sigterm();
            server.wait_exit().await;
        }
    };
    let time = stage.time;
    let migrations = stage.repeat(20..100, async || migrate_once(&url).await);
    tokio::join!(migrations, async {
        let _ = tokio::time::timeout(time, come_and_go(&url)).await;
    });
}

/// As whoever supervises it does: it ends at its start while its database is away.
async fn start(server: &mut Server) {
    eventually("the replica starts", async || {
        server.try_restart().await.ok()
    })
    .await;
}

async fn migrate_once(url: &str) {
    let mut command = std::process::Command::new(server::binary());
    command.args(["migrate", "--database-url", url]);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut command = tokio::process::Command::from(command);
    command.kill_on_drop(true);
    let Ok(mut migrating) = command.spawn() else {
        return;
    };
    // With the database away it fails, and that is no news.
    let _ = tokio::time::timeout(Duration::from_secs(10), migrating.wait()).await;
}
