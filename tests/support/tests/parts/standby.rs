//! Standbys stream, wait, and are promoted.

use std::time::Duration;

use fencepost_support::postgres::{Postgres, Replication};
use tokio::time::timeout;

#[tokio::test]
async fn a_standby_streams_and_is_promoted() {
    let mut primary = Postgres::start().await;
    let standby = primary.standby("one", Replication::Asynchronous).await;
    primary
        .admin()
        .await
        .run("CREATE TABLE t AS SELECT 1 AS n")
        .await;
    primary.wait_replayed(&standby).await;
    primary.kill9().await;
    standby.promote().await;
    let admin = standby.admin().await;
    admin.run("INSERT INTO t VALUES (2)").await;
    assert_eq!(admin.value::<i64>("SELECT count(*) FROM t").await, 2);
}

#[tokio::test]
async fn a_paused_replay_shows_old_rows() {
    let primary = Postgres::start().await;
    let standby = primary.standby("one", Replication::Asynchronous).await;
    let admin = primary.admin().await;
    admin.run("CREATE TABLE t AS SELECT 1 AS n").await;
    primary.wait_replayed(&standby).await;
    standby.pause_replay().await;
    admin.run("INSERT INTO t VALUES (2)").await;
    let there = standby.admin().await;
    assert_eq!(there.value::<i64>("SELECT count(*) FROM t").await, 1);
    standby.resume_replay().await;
    primary.wait_replayed(&standby).await;
    assert_eq!(there.value::<i64>("SELECT count(*) FROM t").await, 2);
}

#[tokio::test]
async fn a_commit_waits_for_a_synchronous_standby_and_only_then() {
    let primary = Postgres::start().await;
    let mut standby = primary.standby("one", Replication::Synchronous).await;
    let admin = primary.admin().await;
    admin.run("CREATE TABLE t (n int)").await;
    standby.kill9().await;
    let commit = admin.run("INSERT INTO t VALUES (1)");
    tokio::pin!(commit);
    let waited = timeout(Duration::from_millis(300), &mut commit).await;
    assert!(waited.is_err(), "the commit did not wait");
    standby.start_again().await;
    commit.await;
}

#[tokio::test]
async fn a_backup_of_a_synchronous_primary_does_not_wait_itself() {
    let primary = Postgres::start().await;
    let _standby = primary.standby("one", Replication::Synchronous).await;
    let second = primary.standby("two", Replication::Asynchronous).await;
    second.promote().await;
    second.admin().await.run("CREATE TABLE t ()").await;
}
