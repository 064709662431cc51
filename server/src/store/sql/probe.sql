-- Can locks be taken here, and what does the database's clock say? The empty
-- name is never stored; it is there to fail when the lock table is gone.
SELECT i.postmaster_start = pg_postmaster_start_time()
           AND i.sequence_file = pg_relation_filepath('fencepost.fencing_tokens') AS identity_holds,
       current_setting('transaction_read_only') = 'on' AS read_only,
       current_setting('fsync') = 'on' AS fsync,
       EXISTS (SELECT FROM pg_class AS c
                WHERE c.oid IN ('fencepost.locks'::regclass, 'fencepost.identity'::regclass,
                                'fencepost.fencing_tokens'::regclass)
                  AND c.relpersistence <> 'p') AS unlogged,
       clock_timestamp() AS clock,
       -- The last one that was drawn, by whichever server.
       s.last_value - CASE WHEN s.is_called THEN 0 ELSE 1 END AS token
  FROM fencepost.identity AS i
 CROSS JOIN fencepost.fencing_tokens AS s
  LEFT JOIN fencepost.locks AS l ON l.resource = ''
