//! What most tests start from: one server that all share, and leases in a
//! known state.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use fencepost_proto::v1::Lock;
use fencepost_support::{
    Server,
    calls::{self, granted},
    postgres::{Database, fresh_database},
    server::Client,
};
use tokio::sync::OnceCell;

/// Long enough that no lease ends during a test.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// The shortest lease that there is.
pub(crate) const SHORT: Duration = Duration::from_millis(500);

/// A server and its database.
pub(crate) struct World {
    pub(crate) database: Database,
    pub(crate) server: Server,
}

static SHARED: OnceCell<World> = OnceCell::const_new();

/// The world that all tests share which break nothing.
pub(crate) async fn shared() -> &'static World {
    SHARED.get_or_init(World::start).await
}

/// A connection to the shared server.
pub(crate) async fn client() -> Client {
    shared().await.server.client().await
}

impl World {
    /// A server with a database of its own.
    pub(crate) async fn start() -> Self {
        let database = fresh_database().await;
        let server = Server::builder(&database.url())
            .flag("--log", "info,fencepostd::service::status=debug")
            .ready()
            .await;
        Self { database, server }
    }

    /// Waits until the server has said that a token was shown for this name
    /// which it never gave: as an error, or as one more soon after another.
    pub(crate) async fn wait_for_alarm(&self, resource: &str) {
        let alarm = |line: &serde_json::Value| {
            let said = line["message"].as_str().unwrap_or_default();
            said.contains("larger than any that was given") && line["resource"] == resource
        };
        self.server.wait_for_log("the alarm", alarm).await;
    }
}

/// A name that no other test uses.
pub(crate) fn fresh(stem: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{stem}-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A lease that has expired, its row still there.
pub(crate) async fn expired(client: &mut Client, resource: &str, owner: &str) -> Lock {
    let lock = granted(client, resource, owner, SHORT).await;
    outlive(SHORT).await;
    lock
}

/// A lease that was given back, its row still there.
pub(crate) async fn released(client: &mut Client, resource: &str, owner: &str) -> Lock {
    let lock = granted(client, resource, owner, LONG).await;
    calls::release(client, resource, owner, lock.fencing_token)
        .await
        .expect("a live lease can be released");
    lock
}

/// A lease of each state that a row can be in, the live one first.
pub(crate) async fn in_each_state(client: &mut Client, stem: &str, owner: &str) -> [Lock; 3] {
    [
        granted(client, &fresh(stem), owner, LONG).await,
        released(client, &fresh(stem), owner).await,
        expired(client, &fresh(stem), owner).await,
    ]
}

/// Waits until a lease is over that was granted before this call: the passing
/// of time is what is awaited.
pub(crate) async fn outlive(ttl: Duration) {
    tokio::time::sleep(ttl + Duration::from_millis(20)).await;
}

/// Expects that a lease is as it was: same token, same times.
#[track_caller]
pub(crate) fn assert_same_lease(now: &Lock, before: &Lock) {
    assert_eq!(now.fencing_token, before.fencing_token);
    assert_eq!(now.owner, before.owner);
    assert_eq!(now.acquired_at, before.acquired_at);
    assert_eq!(now.expires_at, before.expires_at);
    assert_eq!(now.ttl, before.ttl);
    assert_eq!(now.labels, before.labels);
}

/// Expects that a lease runs for the whole of `ttl` from its grant.
#[track_caller]
pub(crate) fn assert_full_ttl(lock: &Lock, ttl: Duration) {
    assert_eq!(calls::span(lock.ttl), ttl);
    let runs = calls::time(lock.expires_at)
        .duration_since(calls::time(lock.acquired_at))
        .expect("a lease ends after its grant");
    // Both times are rounded to microseconds.
    let off = runs.abs_diff(ttl);
    assert!(off < Duration::from_millis(1), "{runs:?} is not {ttl:?}");
    let remaining = calls::span(lock.remaining);
    assert!(remaining <= ttl, "{remaining:?} of {ttl:?} remain");
    let near = ttl.saturating_sub(Duration::from_secs(5));
    assert!(remaining > near, "only {remaining:?} of {ttl:?} remain");
}

/// Expects a token that can be one.
#[track_caller]
pub(crate) fn assert_token(token: i64) {
    assert!(token > 0 && token < 1 << 53, "token {token}");
}
