//! What the server's own sessions have set, as the database sees it at the
//! very moment a lock is written.

use fencepost_support::postgres::Client;

const RECORD: &str = "
CREATE TABLE public.seen (name text, setting text, source text, UNIQUE (name, setting, source));
CREATE FUNCTION public.record_settings() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.seen
    SELECT s.name, s.setting, s.source
      FROM pg_catalog.pg_settings AS s
     WHERE s.source IN ('client', 'session') OR s.name IN ('synchronous_commit', 'transaction_isolation')
     ORDER BY s.name
        ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$;
CREATE TRIGGER record_settings AFTER INSERT OR UPDATE ON fencepost.locks
   FOR EACH ROW EXECUTE FUNCTION public.record_settings()";

/// Records the settings of every session that writes a lock, from now on.
pub(crate) async fn record(client: &Client) {
    client.run(RECORD).await;
}

/// Ends [`record`], and forgets what was seen.
pub(crate) async fn end(client: &Client) {
    client
        .run("DROP TRIGGER record_settings ON fencepost.locks; DROP TABLE public.seen")
        .await;
}

/// All values that a setting had at any write.
pub(crate) async fn seen(client: &Client, name: &str) -> Vec<String> {
    let rows = client
        .query(
            "SELECT DISTINCT setting FROM public.seen WHERE name = $1 ORDER BY setting",
            &[&name],
        )
        .await
        .unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// What the server itself has set, to be set elsewhere as well.
pub(crate) async fn of_the_server(client: &Client) -> Vec<(String, String)> {
    let rows = client
        .query(
            "SELECT name, setting FROM public.seen
              WHERE source IN ('client', 'session') AND name NOT IN ('application_name', 'client_encoding')",
            &[],
        )
        .await
        .unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}
