-- As get.sql, for many resources at once.
SELECT a.resource,
       i.postmaster_start = pg_postmaster_start_time()
           AND i.sequence_file = pg_relation_filepath('fencepost.fencing_tokens') AS identity_holds,
       current_setting('transaction_read_only') = 'on' AS read_only,
       l.owner,
       l.fencing_token,
       l.acquired_at,
       l.expires_at,
       (extract(epoch FROM l.expires_at - now()) * 1000000)::bigint AS remaining_us,
       l.ttl_ms,
       l.labels
  FROM fencepost.identity AS i
 CROSS JOIN unnest($1::text[]) AS a(resource)
  LEFT JOIN LATERAL (
            SELECT o.owner, o.fencing_token, o.acquired_at, o.expires_at, o.ttl_ms, o.labels
              FROM fencepost.locks AS o
             WHERE o.resource = a.resource AND NOT o.released AND o.expires_at > now()
            -- Each by its key: as a join of both, all rows may be read.
            OFFSET 0) AS l
         ON true
