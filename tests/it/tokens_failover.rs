//! Tokens and leases across the promotion of a standby: one that lost the last
//! grants, directly and behind a pooler; two in a row; and a synchronous one.

use std::{collections::BTreeSet, time::Duration};

use fencepost_support::{
    Postgres, Server, calls, eventually,
    pgbouncer::PgBouncer,
    postgres::{Client as Session, Replication},
    proxy::Proxy,
    server::Client,
};
use tokio_postgres::SimpleQueryMessage;
use tonic::Code;

use crate::tokens::{
    LONG, Load, Record, assert_forgotten, expect_leaps, quick_to_recover, url_behind,
};

/// Leases of an old primary, some of which the standby never hears of.
struct Leases {
    /// Known to the standby, and held.
    kept: i64,
    /// On a name that the standby knows by an earlier lease.
    lost_again: i64,
    /// On a name that the standby has never heard of.
    lost_new: i64,
}

impl Leases {
    async fn take(
        record: &Record,
        client: &mut Client,
        primary: &Postgres,
        standby: &Postgres,
    ) -> Self {
        let kept = record.granted(client, "kept", "keeper", LONG).await;
        record.burst(client, "again", 3).await;
        primary.wait_replayed(standby).await;
        standby.cut_off().await;
        let mut lost = record.burst(client, "hot", 80).await;
        let again = record.granted(client, "again", "loser", LONG).await;
        let new = record.granted(client, "new", "loser", LONG).await;
        lost.extend([again.clone(), new.clone()]);
        standby.promote().await;
        assert_forgotten(&standby.admin().await, &lost).await;
        Self {
            kept: kept.fencing_token,
            lost_again: again.fencing_token,
            lost_new: new.fencing_token,
        }
    }

    /// What holders and newcomers hear from the promoted standby. The newcomers
    /// ask `bystander`: it has seen none of the lost tokens, so that its own
    /// memory cannot help.
    async fn assert_fenced(&self, record: &Record, server: &Server, bystander: &Server) {
        let client = &mut server.client().await;
        // The lease that was replicated is still there.
        let kept = eventually("the promoted standby answers", async || {
            calls::renew(client, "kept", "keeper", self.kept, None)
                .await
                .ok()
        })
        .await;
        assert_eq!(kept.fencing_token, self.kept);

        // A forgotten lease is refused, and somebody hears of it.
        let renewed = calls::renew(client, "again", "loser", self.lost_again, None).await;
        calls::expect_error(renewed, Code::Aborted, "TOKEN_UNKNOWN");
        let released = calls::release(client, "again", "loser", self.lost_again).await;
        calls::expect_error(released, Code::Aborted, "TOKEN_UNKNOWN");
        server
            .wait_for_log("an alarm that names the resource", |line| {
                line["level"] == "ERROR"
                    && line["resource"] == "again"
                    && line["message"].as_str().unwrap().contains("forgot")
            })
            .await;
        let renewed = calls::renew(client, "new", "loser", self.lost_new, None).await;
        calls::expect_error(renewed, Code::NotFound, "LOCK_NOT_FOUND");
        let released = calls::release(client, "new", "loser", self.lost_new).await;
        calls::expect_error(released, Code::NotFound, "LOCK_NOT_FOUND");

        // Whoever comes next is above every token that was ever shown.
        let highest = record.highest();
        let newcomer = &mut bystander.client().await;
        for name in ["again", "never-seen", "new", "hot"] {
            let lock = record.granted(newcomer, name, "next", LONG).await;
            assert!(
                lock.fencing_token > highest,
                "{lock:?} is not above {highest}"
            );
        }
        let renewed = calls::renew(client, "again", "loser", self.lost_again, None).await;
        calls::expect_error(renewed, Code::Aborted, "NOT_OWNER");
        let released = calls::release(client, "new", "loser", self.lost_new).await;
        calls::expect_error(released, Code::PermissionDenied, "NOT_OWNER");
        record.assert_rising();
    }
}

#[tokio::test]
async fn tokens_hold_when_an_asynchronous_standby_lost_the_last_grants() {
    let mut primary = quick_to_recover().await;
    let proxy = Proxy::start(primary.address()).await;
    let url = url_behind(&proxy);
    let (server, bystander) = tokio::join!(Server::start(&url), Server::start(&url));
    let record = Record::new();
    let standby = primary.standby("one", Replication::Asynchronous).await;

    let mut client = server.client().await;
    let leases = Leases::take(&record, &mut client, &primary, &standby).await;
    primary.kill9().await;
    proxy.retarget(standby.address());
    leases.assert_fenced(&record, &server, &bystander).await;
    expect_leaps(&[&server, &bystander], 1).await;
}

/// The ports of the server's connections to the pooler.
async fn connections(pooler: &PgBouncer) -> BTreeSet<String> {
    let console = Session::connect(&pooler.url_of("pgbouncer")).await.unwrap();
    let messages = console.simple_query("SHOW CLIENTS").await.unwrap();
    let port_of = |message| match message {
        SimpleQueryMessage::Row(row) if row.get("database") == Some("postgres") => {
            row.get("port").map(str::to_owned)
        }
        _ => None,
    };
    messages.into_iter().filter_map(port_of).collect()
}

/// The server's own connections outlive the database behind them, so that a
/// check made once for each connection would see nothing.
#[tokio::test]
async fn tokens_hold_behind_a_pooler_whose_clients_stay_connected() {
    let mut primary = quick_to_recover().await;
    let mut pooler = PgBouncer::start(primary.address(), 4).await;
    let start = async || {
        let url = pooler.url_of("postgres");
        let server = Server::builder(&url).switch("--pgbouncer").start().await;
        server.wait_ready().await;
        server
    };
    let (server, bystander) = tokio::join!(start(), start());
    let mut client = server.client().await;
    let record = Record::new();
    let standby = primary.standby("one", Replication::Asynchronous).await;

    let leases = Leases::take(&record, &mut client, &primary, &standby).await;
    let before = connections(&pooler).await;
    pooler.retarget(standby.address()).await;
    pooler.command("RECONNECT postgres").await;
    eventually("the pooler has left the old primary", async || {
        let sessions = "SELECT count(*) FROM pg_stat_activity
                         WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";
        let left: i64 = primary.admin().await.value(sessions).await;
        (left == 0).then_some(())
    })
    .await;
    primary.kill9().await;
    leases.assert_fenced(&record, &server, &bystander).await;
    let after = connections(&pooler).await;
    assert!(
        !before.is_disjoint(&after),
        "no connection was kept: {before:?}, {after:?}"
    );
    expect_leaps(&[&server, &bystander], 1).await;
}

/// A leap that is relative to what the standby knows gives the same tokens
/// twice here.
#[tokio::test]
async fn tokens_hold_when_two_standbys_are_promoted_one_after_the_other() {
    let mut primary = quick_to_recover().await;
    let proxy = Proxy::start(primary.address()).await;
    let url = url_behind(&proxy);
    let (server, bystander) = tokio::join!(Server::start(&url), Server::start(&url));
    let mut client = server.client().await;
    let record = Record::new();
    let mut first = primary.standby("first", Replication::Asynchronous).await;
    let second = primary.standby("second", Replication::Asynchronous).await;

    record.burst(&mut client, "hot", 5).await;
    primary.wait_replayed(&first).await;
    primary.wait_replayed(&second).await;
    second.cut_off().await;
    let lost_to_second = record.burst(&mut client, "hot", 60).await;
    primary.wait_replayed(&first).await;
    first.cut_off().await;
    let lost_to_first = record.burst(&mut client, "hot", 60).await;

    primary.kill9().await;
    first.promote().await;
    assert_forgotten(&first.admin().await, &lost_to_first).await;
    let highest = record.highest();
    proxy.retarget(first.address());
    let new = record.burst(&mut client, "hot", 60).await;
    assert!(new[0].fencing_token > highest);

    first.kill9().await;
    second.promote().await;
    let session = second.admin().await;
    assert_forgotten(&session, &lost_to_second).await;
    assert_forgotten(&session, &new).await;
    let highest = record.highest();
    proxy.retarget(second.address());
    // A name that the row's own check knows nothing of, and one that it does,
    // through a server that has seen no token yet.
    let mut client = bystander.client().await;
    for name in ["first-seen", "hot"] {
        let newest = record.burst(&mut client, name, 2).await;
        assert!(newest[0].fencing_token > highest);
    }
    record.assert_rising();
}

/// Another replica comes up with the new primary: it has seen no token.
#[tokio::test]
async fn tokens_hold_when_a_fresh_server_meets_the_second_promoted_standby() {
    let mut primary = quick_to_recover().await;
    let record = Record::new();
    let mut first = primary.standby("first", Replication::Asynchronous).await;
    let mut second = primary.standby("second", Replication::Asynchronous).await;
    let server = Server::start(&primary.url()).await;
    record.burst(&mut server.client().await, "hot", 2).await;
    primary.wait_replayed(&first).await;
    primary.wait_replayed(&second).await;
    first.cut_off().await;
    second.cut_off().await;
    record.burst(&mut server.client().await, "hot", 40).await;
    primary.kill9().await;
    for standby in [&mut first, &mut second] {
        standby.promote().await;
        let highest = record.highest();
        let server = Server::start(&standby.url()).await;
        let mut client = server.client().await;
        let new = record.burst(&mut client, "only-here", 40).await;
        assert!(new[0].fencing_token > highest);
        drop(server);
        standby.kill9().await;
    }
}

#[tokio::test]
async fn a_synchronous_standby_loses_no_answered_grant() {
    let mut primary = quick_to_recover().await;
    let proxy = Proxy::start(primary.address()).await;
    let url = url_behind(&proxy);
    let (one, two) = tokio::join!(Server::start(&url), Server::start(&url));
    let mut standby = primary.standby("strict", Replication::Synchronous).await;
    let record = Record::new();
    let load = Load::start(&record, &[&one, &two], 3, 8).await;
    let mut client = one.client().await;
    let mut kept = Vec::new();
    for n in 0..30 {
        let name = format!("kept-{n}");
        kept.push(record.granted(&mut client, &name, "keeper", LONG).await);
    }

    // While the standby is away, nobody is told that it has a lock.
    standby.kill9().await;
    let answered = record.len();
    let mut alone = two.client().await;
    let (alone, ()) = tokio::join!(
        record.acquire(&mut alone, "while-it-is-away", "nobody", LONG),
        async {
            eventually("commits wait for the standby", async || {
                let waiting = "SELECT count(*) FROM pg_stat_activity
                                WHERE wait_event = 'SyncRep'";
                let waiting: i64 = primary.admin().await.value(waiting).await;
                // What came together waits in one round.
                (waiting > 0).then_some(())
            })
            .await;
            tokio::time::sleep(Duration::from_millis(500)).await;
            primary.kill9().await;
        }
    );
    assert!(alone.is_err(), "{alone:?}");
    assert!(
        record.len() <= answered + 8,
        "grants while the standby was away"
    );

    standby.start_again().await;
    standby.promote().await;
    // Each row is at least where its last answer was.
    let session = standby.admin().await;
    for grant in record.grants() {
        let row = session
            .query_one(
                "SELECT max(fencing_token) FROM fencepost.locks WHERE resource = $1",
                &[&grant.resource],
            )
            .await
            .unwrap();
        let there: Option<i64> = row.get(0);
        assert!(there >= Some(grant.token), "{grant:?} was lost: {there:?}");
    }
    proxy.retarget(standby.address());
    for lock in &kept {
        let token = lock.fencing_token;
        let renewed = eventually("the new primary answers", async || {
            calls::renew(&mut client, &lock.resource, "keeper", token, None)
                .await
                .ok()
        })
        .await;
        assert_eq!(renewed.fencing_token, token);
    }
    let before = record.len();
    eventually("the load goes on", async || {
        (record.len() > before + 50).then_some(())
    })
    .await;
    load.stop().await;
    record.assert_rising();
}
