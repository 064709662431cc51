//! Tokens across dumps and copies of the database: into a fresh server, into
//! the same one, under a running server, and by `CREATE DATABASE … TEMPLATE`.

use fencepost_proto::v1::Lock;
use fencepost_support::{
    Postgres, Server, eventually,
    postgres::{Client as Session, fresh_database},
    proxy::Proxy,
    server::Client,
};

use crate::tokens::{Record, assert_forgotten, expect_leaps, position, quick_to_recover};

/// Grants on names old and new, each above all that was ever answered.
async fn assert_above_all(record: &Record, client: &mut Client, new_name: &str) -> Vec<Lock> {
    let highest = record.highest();
    let mut locks = record.burst(client, new_name, 3).await;
    locks.extend(record.burst(client, "hot", 40).await);
    for lock in &locks {
        assert!(
            lock.fencing_token > highest,
            "{lock:?} is not above {highest}"
        );
    }
    record.assert_rising();
    locks
}

#[tokio::test]
async fn tokens_hold_when_a_dump_is_restored_into_fresh_servers() {
    let database = fresh_database().await;
    let name = database.name();
    let (first, second) = tokio::join!(quick_to_recover(), quick_to_recover());
    let proxy = Proxy::start(database.postgres().address()).await;
    let url = Postgres::url_via(proxy.address(), name);
    let server = Server::start(&url).await;
    let mut client = server.client().await;
    let record = Record::new();

    record.burst(&mut client, "hot", 10).await;
    let dump = database.postgres().dump(name, &[]).await;
    let mut lost = record.burst(&mut client, "hot", 60).await;

    // The same old dump twice: the second restore knows nothing of the first,
    // nor of its leap.
    // Who asks there has been up all the time, and has seen none of the tokens.
    let bystanders = tokio::join!(Server::start(&url), Server::start(&url));
    for (fresh, bystander, new_name) in [
        (&first, bystanders.0, "seen-by-first"),
        (&second, bystanders.1, "seen-by-second"),
    ] {
        fresh.restore(name, &dump).await;
        let session = Session::connect(&fresh.url_of(name)).await.unwrap();
        assert_forgotten(&session, &lost).await;
        proxy.retarget(fresh.address());
        proxy.reset().await;
        let mut newcomer = bystander.client().await;
        lost.extend(assert_above_all(&record, &mut newcomer, new_name).await);
    }

    // A dump that was taken after a leap, back to the server of the first leap.
    let dump = second.dump(name, &[]).await;
    lost = record.burst(&mut client, "hot", 60).await;
    let admin = first.admin().await;
    admin
        .run(&format!("DROP DATABASE {name} WITH (FORCE)"))
        .await;
    first.restore(name, &dump).await;
    let session = Session::connect(&first.url_of(name)).await.unwrap();
    assert_forgotten(&session, &lost).await;
    proxy.retarget(first.address());
    proxy.reset().await;
    assert_above_all(&record, &mut client, "seen-again").await;
}

/// A server that has seen no token cannot use its own memory as a belt.
#[tokio::test]
async fn tokens_hold_when_a_fresh_server_starts_on_a_restored_dump() {
    let database = fresh_database().await;
    let (postgres, name) = (database.postgres(), database.name());
    let record = Record::new();
    let server = Server::start(&database.url()).await;
    record.burst(&mut server.client().await, "hot", 3).await;
    let dump = postgres.dump(name, &[]).await;
    let mut lost = record.burst(&mut server.client().await, "lost", 60).await;
    drop(server);
    for _ in 0..2 {
        let admin = postgres.admin().await;
        admin
            .run(&format!("DROP DATABASE {name} WITH (FORCE)"))
            .await;
        postgres.restore(name, &dump).await;
        assert_forgotten(&database.client().await, &lost).await;
        let server = Server::start(&database.url()).await;
        let mut client = server.client().await;
        lost.extend(assert_above_all(&record, &mut client, "lost").await);
        expect_leaps(&[&server], 1).await;
    }
}

#[tokio::test]
async fn tokens_hold_when_a_dump_is_restored_into_the_same_server() {
    let database = fresh_database().await;
    let (postgres, name) = (database.postgres(), database.name());
    let url = database.url();
    let (server, bystander) = tokio::join!(Server::start(&url), Server::start(&url));
    let mut client = server.client().await;
    let record = Record::new();
    record.burst(&mut client, "hot", 10).await;
    let dump = postgres.dump(name, &[]).await;
    record.burst(&mut client, "hot", 60).await;

    // Twice the schema, with servers running all the time, then the database.
    // First, one is asked that has seen no token yet.
    for (server, new_name) in [(&bystander, "after-one"), (&server, "after-two")] {
        let session = database.client().await;
        session.run("DROP SCHEMA fencepost CASCADE").await;
        postgres
            .psql(name, &format!("BEGIN;\n{dump}\nCOMMIT;"))
            .await;
        let mut client = server.client().await;
        assert_above_all(&record, &mut client, new_name).await;
    }
    let admin = postgres.admin().await;
    admin
        .run(&format!("DROP DATABASE {name} WITH (FORCE)"))
        .await;
    postgres.restore(name, &dump).await;
    assert_above_all(&record, &mut client, "after-three").await;
    let renewed_dump = postgres.dump(name, &[]).await;
    record.burst(&mut client, "hot", 60).await;
    let session = database.client().await;
    session.run("DROP SCHEMA fencepost CASCADE").await;
    postgres
        .psql(name, &format!("BEGIN;\n{renewed_dump}\nCOMMIT;"))
        .await;
    assert_above_all(&record, &mut client, "after-four").await;
}

/// Restored statement by statement: the server leaps as soon as the identity
/// is there, and then the dump sets the sequence back. The belts hold.
#[tokio::test]
async fn tokens_hold_when_the_server_leaps_in_the_middle_of_a_restore() {
    let database = fresh_database().await;
    let (postgres, name) = (database.postgres(), database.name());
    let server = Server::start(&database.url()).await;
    let mut client = server.client().await;
    let record = Record::new();
    record.burst(&mut client, "hot", 10).await;
    let dump = postgres.dump(name, &[]).await;
    // Newer versions of pg_dump bracket the whole script, which is cut here.
    let bracket =
        |line: &&str| !line.starts_with("\\restrict") && !line.starts_with("\\unrestrict");
    let dump: String = dump.split_inclusive('\n').filter(bracket).collect();
    record.burst(&mut client, "hot", 60).await;
    let highest = record.highest();

    let session = database.client().await;
    session.run("DROP SCHEMA fencepost CASCADE").await;
    let at = dump.find("SELECT pg_catalog.setval").unwrap();
    postgres.psql(name, &dump[..at]).await;
    let leapt = eventually("the server leaps in between", async || {
        let at = position(&session).await;
        (at > highest).then_some(at)
    })
    .await;
    postgres.psql(name, &dump[at..]).await;
    let at = position(&session).await;
    assert!(at < highest && at < leapt, "the dump set no sequence");
    assert_above_all(&record, &mut client, "after").await;
}

#[tokio::test]
async fn tokens_hold_when_a_template_copy_takes_the_place_of_the_original() {
    let database = fresh_database().await;
    let (postgres, name) = (database.postgres(), database.name());
    let server = Server::start(&database.url()).await;
    let record = Record::new();
    record.burst(&mut server.client().await, "hot", 10).await;
    drop(server);
    let admin = postgres.admin().await;
    for copy in ["copy_one", "copy_two"] {
        // Refused while anybody is connected to the original.
        let create = format!("CREATE DATABASE {name}_{copy} TEMPLATE {name}");
        eventually("the database is copied", async || {
            admin.batch_execute(&create).await.ok()
        })
        .await;
    }
    let server = Server::start(&database.url()).await;
    let mut lost = record.burst(&mut server.client().await, "lost", 60).await;
    drop(server);

    // Under its own name, by a fresh server.
    let copy = postgres.url_of(&format!("{name}_copy_one"));
    assert_forgotten(&Session::connect(&copy).await.unwrap(), &lost).await;
    let server = Server::start(&copy).await;
    let mut client = server.client().await;
    lost.extend(assert_above_all(&record, &mut client, "lost").await);
    drop(server);

    // Under the name of the original.
    put_in_place(&admin, name, "copy_two").await;
    assert_forgotten(&database.client().await, &lost).await;
    let server = Server::start(&database.url()).await;
    let mut client = server.client().await;
    assert_above_all(&record, &mut client, "lost").await;
}

/// Puts the database that is called `name` and `suffix` in the place of `name`.
async fn put_in_place(admin: &Session, name: &str, suffix: &str) {
    let drop = format!("DROP DATABASE {name} WITH (FORCE)");
    admin.run(&drop).await;
    let rename = format!("ALTER DATABASE {name}_{suffix} RENAME TO {name}");
    admin.run(&rename).await;
}

/// Put aside and put back it is as it was, identity included, while another has
/// given tokens in its place.
#[tokio::test]
async fn tokens_hold_when_a_database_that_was_put_aside_comes_back() {
    let database = fresh_database().await;
    let (postgres, name) = (database.postgres(), database.name());
    let server = Server::start(&database.url()).await;
    let record = Record::new();
    record.burst(&mut server.client().await, "hot", 10).await;
    drop(server);
    let admin = postgres.admin().await;
    let rename = format!("ALTER DATABASE {name} RENAME TO {name}_aside");
    // Refused while anybody is connected to it.
    eventually("the database is put aside", async || {
        admin.batch_execute(&rename).await.ok()
    })
    .await;
    admin
        .run(&format!("CREATE DATABASE {name} TEMPLATE {name}_aside"))
        .await;
    let server = Server::start(&database.url()).await;
    let lost = record.burst(&mut server.client().await, "lost", 60).await;
    drop(server);

    put_in_place(&admin, name, "aside").await;
    assert_forgotten(&database.client().await, &lost).await;
    let server = Server::start(&database.url()).await;
    let mut client = server.client().await;
    assert_above_all(&record, &mut client, "lost").await;
}
