//! The second actor holds a row and sees who waits.

use fencepost_support::{
    postgres::{Client, fresh_database},
    row_lock::RowLock,
};

#[tokio::test]
async fn a_row_is_held_until_it_is_let_go() {
    let database = fresh_database().await;
    let client = database.client().await;
    client.run("CREATE SCHEMA fencepost").await;
    client
        .run("CREATE TABLE fencepost.locks AS SELECT 'a'::text AS resource, 1 AS n")
        .await;
    let url = database.url();
    let update = async || {
        let other = Client::connect(&url).await.unwrap();
        other.run("UPDATE fencepost.locks SET n = n + 1").await;
    };

    let held = RowLock::hold(&url, "a").await;
    assert_eq!(held.waiters().await, 0);
    tokio::join!(update(), async {
        held.wait_for_waiters(1).await;
        held.client().run("UPDATE fencepost.locks SET n = 10").await;
        held.rollback().await;
    });
    assert_eq!(
        client.value::<i32>("SELECT n FROM fencepost.locks").await,
        2
    );

    let held = RowLock::hold(&url, "a").await;
    tokio::join!(update(), async {
        held.wait_for_waiters(1).await;
        held.client().run("UPDATE fencepost.locks SET n = 10").await;
        held.commit().await;
    });
    assert_eq!(
        client.value::<i32>("SELECT n FROM fencepost.locks").await,
        11
    );
}
