-- The live lease of a resource, if there is one. A row always comes back, with nulls
-- when the resource is free.
--
-- Judged by now(), the start of the transaction, which is before the snapshot. By a later
-- clock a lease would be over that was renewed since the snapshot: a resource that never
-- was free would be shown as free.
SELECT i.postmaster_start = pg_postmaster_start_time()
           AND i.sequence_file = pg_relation_filepath('fencepost.fencing_tokens') AS identity_holds,
       -- A demoted or switched-over server must not answer for the lock table.
       current_setting('transaction_read_only') = 'on' AS read_only,
       l.owner,
       l.fencing_token,
       l.acquired_at,
       l.expires_at,
       (extract(epoch FROM l.expires_at - now()) * 1000000)::bigint AS remaining_us,
       l.ttl_ms,
       l.labels
  FROM fencepost.identity AS i
  LEFT JOIN fencepost.locks AS l
         ON l.resource = $1 AND NOT l.released AND l.expires_at > now()
