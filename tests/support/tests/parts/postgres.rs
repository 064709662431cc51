//! Clusters start, stop, die and come back.

use fencepost_support::postgres::{Client, Postgres, Stop, fresh_database};

#[tokio::test]
async fn committed_rows_survive_every_way_down() {
    let mut postgres = Postgres::start().await;
    let url = postgres.url();
    let admin = postgres.admin().await;
    admin.run("CREATE TABLE t (n int)").await;
    assert_eq!(admin.value::<String>("SHOW fsync").await, "on");
    assert_eq!(admin.value::<String>("SHOW server_encoding").await, "UTF8");

    for (n, way) in ["fast", "immediate", "kill"].into_iter().enumerate() {
        let admin = postgres.admin().await;
        admin.run(&format!("INSERT INTO t VALUES ({n})")).await;
        match way {
            "fast" => postgres.stop(Stop::Fast).await,
            "immediate" => postgres.stop(Stop::Immediate).await,
            _ => postgres.kill9().await,
        }
        assert!(Client::connect(&url).await.is_err());
        postgres.start_again().await;
        let admin = postgres.admin().await;
        let rows: i64 = admin.value("SELECT count(*) FROM t").await;
        assert_eq!(rows, i64::try_from(n + 1).unwrap(), "after {way}");
    }
}

#[tokio::test]
async fn a_frozen_cluster_answers_when_it_is_thawed() {
    let postgres = Postgres::start().await;
    let admin = postgres.admin().await;
    postgres.freeze();
    let query = tokio::spawn(async move { admin.value::<i32>("SELECT 7").await });
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    assert!(!query.is_finished());
    postgres.thaw();
    assert_eq!(query.await.unwrap(), 7);
}

#[tokio::test]
async fn a_copy_of_a_running_cluster_is_a_cluster_of_its_own() {
    let postgres = Postgres::start().await;
    let admin = postgres.admin().await;
    admin.run("CREATE TABLE t AS SELECT 1 AS n").await;
    let copy = postgres.copy().await;
    copy.admin().await.run("INSERT INTO t VALUES (2)").await;
    assert_eq!(admin.value::<i64>("SELECT count(*) FROM t").await, 1);
    let there = copy.admin().await;
    assert_eq!(there.value::<i64>("SELECT count(*) FROM t").await, 2);
}

#[tokio::test]
async fn a_restore_of_the_files_brings_the_old_rows_back() {
    let mut postgres = Postgres::start().await;
    postgres
        .admin()
        .await
        .run("CREATE TABLE t AS SELECT 1 AS n")
        .await;
    postgres.stop(Stop::Fast).await;
    let backup = postgres.copy_stopped().await;
    postgres.start_again().await;
    postgres.admin().await.run("INSERT INTO t VALUES (2)").await;
    postgres.stop(Stop::Fast).await;
    postgres.restore_files_of(&backup).await;
    postgres.start_again().await;
    let admin = postgres.admin().await;
    assert_eq!(admin.value::<i64>("SELECT count(*) FROM t").await, 1);
}

#[tokio::test]
async fn a_dump_loads_into_another_database() {
    let database = fresh_database().await;
    let client = database.client().await;
    client.run("CREATE TABLE t AS SELECT 'ä' AS name").await;
    let postgres = database.postgres();
    let dump = postgres.dump(database.name(), &[]).await;
    let name = format!("{}_restored", database.name());
    postgres.restore(&name, &dump).await;
    let there = Client::connect(&postgres.url_of(&name)).await.unwrap();
    assert_eq!(there.value::<String>("SELECT name FROM t").await, "ä");
}

#[tokio::test]
async fn every_test_has_a_database_of_its_own_in_one_cluster() {
    let (one, other) = (fresh_database().await, fresh_database().await);
    assert_eq!(one.postgres().pid(), other.postgres().pid());
    one.client().await.run("CREATE TABLE t ()").await;
    other.client().await.run("CREATE TABLE t ()").await;
}

#[tokio::test]
async fn settings_of_the_builder_and_of_a_running_cluster_hold() {
    let postgres = Postgres::builder()
        .setting("autovacuum", "off")
        .env("TZ", "Asia/Tokyo")
        .start()
        .await;
    let admin = postgres.admin().await;
    assert_eq!(admin.value::<String>("SHOW autovacuum").await, "off");
    postgres.configure("work_mem", "1MB").await;
    let admin = postgres.admin().await;
    assert_eq!(admin.value::<String>("SHOW work_mem").await, "1MB");
}
