//! A server whose round can be held under way, so that what comes meanwhile
//! makes the next one.

use std::{future::poll_fn, pin::Pin, task::Poll, time::Duration};

use fencepost_support::{
    Postgres, Server, calls, eventually,
    postgres::{Client as Psql, Database, fresh_database},
    proxy::Proxy,
    server::Client,
};
use futures_util::future::{JoinAll, join_all};
use tokio::task::{JoinHandle, unconstrained};

/// Long enough that no lease ends during a test.
pub(super) const LONG: Duration = Duration::from_secs(60);

/// Rows are written only while no gate of their name is closed.
const GATES: &str = "
    CREATE TABLE public.gates (name text);
    CREATE FUNCTION public.wait_at_gate() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        WHILE EXISTS (SELECT FROM public.gates AS g WHERE g.name = NEW.resource) LOOP
            PERFORM pg_sleep(0.002);
        END LOOP;
        RETURN NEW;
    END $$;
    CREATE TRIGGER gate BEFORE INSERT ON fencepost.locks FOR EACH ROW
        WHEN (NEW.resource LIKE '!%') EXECUTE FUNCTION public.wait_at_gate()";

/// Counts the statements that take many locks, and says how many the latest asks for.
const COUNTER: &str = "
    CREATE SEQUENCE public.statements;
    CREATE SEQUENCE public.asked_for;
    ALTER FUNCTION fencepost.acquire_all_v2 RENAME TO acquire_all_real;
    CREATE FUNCTION fencepost.acquire_all_v2(text[], text[], text[], uuid[], bigint[], jsonb[])
    RETURNS TABLE (
        resource text, outcome text, owner text, fencing_token bigint, acquired_at timestamptz,
        expires_at timestamptz, remaining_us bigint, ttl_ms bigint, labels jsonb
    ) LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM nextval('public.statements'), setval('public.asked_for', cardinality($1));
        RETURN QUERY SELECT * FROM fencepost.acquire_all_real($1, $2, $3, $4, $5, $6);
    END $$";

/// A server, and the database behind it.
pub(super) struct Stage {
    pub(super) database: Database,
    /// Between the server and its database.
    pub(super) proxy: Proxy,
    _server: Server,
    pub(super) client: Client,
    pub(super) psql: Psql,
}

/// Calls that were sent, and whose answers are still to come.
pub(super) struct Sent<F: Future>(Pin<Box<JoinAll<F>>>);

impl<F: Future> Sent<F> {
    pub(super) async fn answers(self) -> Vec<F::Output> {
        self.0.await
    }
}

impl Stage {
    pub(super) async fn start() -> Self {
        let database = fresh_database().await;
        let proxy = Proxy::start(database.postgres().address()).await;
        let builder = Server::builder(&Postgres::url_via(proxy.address(), database.name()))
            // Gates are closed for longer than a statement usually may take.
            .flag("--request-timeout", "20s")
            // Calls are taken up in their order.
            .env("TOKIO_WORKER_THREADS", "1");
        let server = builder.ready().await;
        let psql = database.client().await;
        psql.run(GATES).await;
        psql.run(COUNTER).await;
        Self {
            client: server.client().await,
            database,
            proxy,
            _server: server,
            psql,
        }
    }

    pub(super) async fn close(&self, gate: &str) {
        self.psql
            .run(&format!("INSERT INTO public.gates VALUES ('{gate}')"))
            .await;
    }

    pub(super) async fn open(&self, gate: &str) {
        self.psql
            .run(&format!("DELETE FROM public.gates WHERE name = '{gate}'"))
            .await;
    }

    /// Waits until a session stands at a gate.
    pub(super) async fn wait_at_gate(&self) {
        let waiting = "SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND wait_event = 'PgSleep'";
        eventually("a round is under way", async || {
            (self.psql.value::<i64>(waiting).await == 1).then_some(())
        })
        .await;
    }

    /// Sends a call that is under way until its gate is opened. When that takes
    /// too long, the server begins the next round without it.
    pub(super) async fn hold_round(&self, gate: &'static str) -> JoinHandle<()> {
        self.close(gate).await;
        let mut client = self.client.clone();
        let held = tokio::spawn(async move {
            calls::granted(&mut client, gate, "gate", LONG).await;
        });
        self.wait_at_gate().await;
        held
    }

    /// Sends calls, in this order, and returns when they are in the server's
    /// queue.
    pub(super) async fn send<F: Future>(&self, calls: impl IntoIterator<Item = F>) -> Sent<F> {
        let mut sent = Box::pin(join_all(calls));
        // A call goes out when it is first polled; all of them now, however many.
        unconstrained(poll_fn(|context| {
            assert!(sent.as_mut().poll(context).is_pending());
            Poll::Ready(())
        }))
        .await;
        self.settle().await;
        Sent(sent)
    }

    /// Waits until what was sent before is where it waits: renewals have a lane
    /// of their own, and come after it on the same connection.
    pub(super) async fn settle(&self) {
        for _ in 0..3 {
            let mut client = self.client.clone();
            let renewed = calls::renew(&mut client, "nothing", "nobody", 1, None).await;
            assert_eq!(renewed.unwrap_err().code(), tonic::Code::NotFound);
        }
    }

    /// How many transactions have written the rows whose names are like this,
    /// and how many rows the largest of them wrote.
    pub(super) async fn transactions(&self, like: &str) -> (i64, i64) {
        let query = "SELECT count(*), coalesce(max(n), 0) FROM (
            SELECT count(*) AS n FROM fencepost.locks WHERE resource LIKE $1 GROUP BY xmin) AS t";
        let row = self.psql.query_one(query, &[&like]).await.unwrap();
        (row.get(0), row.get(1))
    }

    /// How many statements have taken many locks.
    pub(super) async fn statements(&self) -> i64 {
        self.psql
            .value("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM public.statements")
            .await
    }

    /// How many locks the latest of them asks for, which may be under way.
    pub(super) async fn asked_for(&self) -> i64 {
        self.psql
            .value("SELECT last_value FROM public.asked_for")
            .await
    }

    pub(super) async fn is_there(&self, resource: &str) -> bool {
        let query = "SELECT count(*) FROM fencepost.locks WHERE resource = $1";
        let row = self.psql.query_one(query, &[&resource]).await.unwrap();
        row.get::<_, i64>(0) == 1
    }
}
