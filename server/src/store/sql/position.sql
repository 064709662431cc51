-- Where the tokens are, and where a leap would take them by the clock.
SELECT s.last_value AS token,
       floor(extract(epoch FROM clock_timestamp() - timestamptz '2026-01-01 00:00:00+00') * 4194304)::bigint
           AS by_clock
  FROM fencepost.fencing_tokens AS s
