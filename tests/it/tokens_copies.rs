//! Tokens across copies of a data directory: as after a crash, as after a
//! stop, an older base backup in the place of the directory itself, and a base
//! backup that is rolled forward to a point in time.

use fencepost_support::{Postgres, Server, calls, eventually, postgres::Stop, proxy::Proxy};

use crate::tokens::{
    LONG, Load, Record, assert_forgotten, assert_rows_forgotten, quick_to_recover, url_behind,
};

#[tokio::test]
async fn tokens_hold_when_copied_data_directories_are_started_elsewhere() {
    let mut original = quick_to_recover().await;
    let proxy = Proxy::start(original.address()).await;
    let server = Server::start(&url_behind(&proxy)).await;
    let mut client = server.client().await;
    let record = Record::new();

    // As a snapshot of the disk, under load.
    let load = Load::start(&record, &[&server], 2, 4).await;
    load.more(100).await;
    let mut snapshot = original.copy_stopped().await;
    load.more(100).await;
    load.stop().await;
    original.stop(Stop::Fast).await;
    let mut stopped = original.copy_stopped().await;
    original.start_again().await;
    let mut lost = record.burst(&mut client, "lost", 60).await;
    original.kill9().await;

    // Neither copy knows of the other, nor of what the original did since.
    for copy in [&mut snapshot, &mut stopped] {
        copy.start_again().await;
        assert_forgotten(&copy.admin().await, &lost).await;
        let highest = record.highest();
        // A server that was there all the time, and one that was not.
        let fresh = Server::start(&copy.url()).await;
        let first = record.burst(&mut fresh.client().await, "lost", 40).await;
        proxy.retarget(copy.address());
        let second = record.burst(&mut client, "load-0", 40).await;
        for lock in first.iter().chain(&second) {
            assert!(lock.fencing_token > highest, "{lock:?}, {highest}");
        }
        lost.extend(first);
        lost.extend(second);
        copy.kill9().await;
    }
    record.assert_rising();
}

#[tokio::test]
async fn tokens_hold_when_an_older_base_backup_replaces_the_data_directory() {
    let mut postgres = quick_to_recover().await;
    let server = Server::start(&postgres.url()).await;
    let mut client = server.client().await;
    let record = Record::new();
    record.burst(&mut client, "hot", 5).await;
    let backup = postgres.base_backup().await;
    let mut lost = record.burst(&mut client, "lost", 60).await;

    // Twice: the second time, nothing is left that would know of the first.
    // The names are asked for through a server that has seen no token yet.
    for _ in 0..2 {
        let bystander = Server::start(&postgres.url()).await;
        postgres.stop(Stop::Fast).await;
        postgres.restore_files_of(&backup).await;
        postgres.start_again().await;
        assert_rows_forgotten(&postgres.admin().await, &lost).await;
        let highest = record.highest();
        let new = record
            .burst(&mut bystander.client().await, "lost", 40)
            .await;
        for lock in &new {
            assert!(lock.fencing_token > highest, "{lock:?}, {highest}");
        }
        lost.extend(new);
    }
    record.burst(&mut client, "lost", 5).await;
    record.assert_rising();
}

#[tokio::test]
async fn tokens_hold_when_a_point_in_time_is_restored() {
    let original = Postgres::builder().archiving().start().await;
    let server = Server::start(&original.url()).await;
    let client = &mut server.client().await;
    let record = Record::new();
    record.burst(client, "hot", 5).await;
    let backup = original.base_backup().await;
    let kept = record.granted(client, "kept", "keeper", LONG).await;
    record.burst(client, "lost", 20).await;
    original.restore_point("before").await;
    let lost = record.burst(client, "lost", 60).await;
    original.archived().await;

    // To the same point twice: the second knows nothing of what the first gave.
    let mut gone = lost.clone();
    for _ in 0..2 {
        let mut restored = backup.copy_stopped().await;
        restored.recover_to(&original, "before");
        restored.start_again().await;
        let session = restored.admin().await;
        eventually("the restored database takes writes", async || {
            let recovers: bool = session.value("SELECT pg_is_in_recovery()").await;
            (!recovers).then_some(())
        })
        .await;
        assert_forgotten(&session, &gone).await;
        let highest = record.highest();
        let fresh = Server::start(&restored.url()).await;
        let client = &mut fresh.client().await;
        let new = record.burst(client, "lost", 40).await;
        for lock in &new {
            assert!(lock.fencing_token > highest, "{lock:?}, {highest}");
        }
        gone.extend(new);
        // The leases are those of that point.
        let held = calls::get(client, "kept").await.unwrap();
        assert_eq!(held.fencing_token, kept.fencing_token);
    }
    record.assert_rising();
}
