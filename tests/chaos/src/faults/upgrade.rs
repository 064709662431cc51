//! The next version of Fencepost beside this one.

use std::{process::Stdio, time::Duration};

use fencepost_support::{Server, server};
use tokio::time::timeout;

use super::{Seen, Stage, stage::counted};
use crate::world::World;

/// The schema goes on under replicas that do not know of it, one version after the
/// other; this version's own migrations run beside it, and one more replica of this
/// version comes and goes on the newer schema.
pub(super) async fn migrate(mut stage: Stage<'_>) -> Seen {
    let world = stage.world;
    let url = world.url_of("postgres");
    let time = stage.time;
    let (mut migrations, mut replicas) = (0, 0);
    let migrating = stage.repeat(20..200, async || {
        let (next, _) = tokio::join!(next_version(world), migrate_once(&url));
        migrations += usize::from(next.is_some());
    });
    let coming_and_going = async {
        loop {
            // It may find no database now.
            let builder = Server::builder(&url).flag("--drain-delay", "0s");
            if let Ok(server) = builder.try_start().await {
                replicas += 1;
                server.sigterm();
                server.wait_exit().await;
            }
        }
    };
    tokio::join!(migrating, async {
        let _ = timeout(time, coming_and_going).await;
    });
    let what = format!("newer schemas under load, {replicas} more replicas on them");
    counted(migrations, &what)
}

/// What a newer version may do: it only adds, in one transaction under the lock of
/// migrations, and gives way to who holds the table.
async fn next_version(world: &World) -> Option<()> {
    let session = world.session("postgres").await?;
    let migration = "BEGIN; SET LOCAL lock_timeout = '1s';
         DO $$
         DECLARE v integer := 1000 + (SELECT max(version) FROM fencepost.migrations);
         BEGIN
             IF NOT pg_try_advisory_xact_lock(x'66656e6365706f73'::bigint) THEN RETURN; END IF;
             EXECUTE format('ALTER TABLE fencepost.locks ADD COLUMN next_%s bigint NOT NULL DEFAULT 0', v);
             EXECUTE format('ALTER TABLE fencepost.identity ADD COLUMN next_%s text', v);
             EXECUTE format('CREATE FUNCTION fencepost.next_%s() RETURNS bigint LANGUAGE sql AS ''SELECT max(fencing_token) FROM fencepost.locks''', v);
             INSERT INTO fencepost.migrations (version, name) VALUES (v, 'next');
         END $$;
         COMMIT";
    let done = timeout(Duration::from_secs(10), session.batch_execute(migration)).await;
    done.ok()?.ok()
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
    let _ = timeout(Duration::from_secs(10), migrating.wait()).await;
}
