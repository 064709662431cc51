-- The functions that judge many rows at once: the calls that came while the
-- statement before was under way.
--
-- Each takes at most one call a resource, in the order of the names, and answers
-- for the rows that it could judge. A name that is missing from the answer was
-- not judged: somebody else has locked its row, or the case is a rare one. It
-- goes singly, to the functions of 0001.
--
-- Rows are looked up in a lateral sub-select and written by an upsert, or by an
-- UPDATE of an array of keys. None is a join with the lock table, so all find a row
-- by its key whatever the planner believes of the table. Rows are locked first, then judged by one read of the
-- clock each, then written.
--
-- An upsert judges the row that it proposes before it finds the old one: a column
-- that is added later needs a default, or these functions fail.

-- A token from a sequence that was set back since the last leap: nothing of the
-- statement may stand.
CREATE FUNCTION fencepost.refuse_token_v1() RETURNS text LANGUAGE plpgsql VOLATILE AS $function$
BEGIN
    RAISE check_violation USING
        MESSAGE = 'the sequence was set back', CONSTRAINT = 'locks_token_rises';
END
$function$;


-- Acquire. Only rows that look free in the statement's snapshot are locked, so that
-- a refusal writes nothing.
-- Where the identity does not hold, and for a retry of a row's latest acquisition,
-- there is no answer.
--
-- outcome: granted | held
CREATE FUNCTION fencepost.acquire_all_v1(
    p_resources text[], p_owners text[], p_request_ids text[], p_attempts uuid[], p_ttls_ms bigint[], p_labels jsonb[]
) RETURNS TABLE (
    resource text, outcome text, owner text, fencing_token bigint, acquired_at timestamptz,
    expires_at timestamptz, remaining_us bigint, ttl_ms bigint, labels jsonb
) LANGUAGE plpgsql VOLATILE
-- A name that somebody else is just bringing into being cannot be passed over.
SET lock_timeout = '100ms' AS $function$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH identity AS MATERIALIZED (
        SELECT i.first_token
          FROM fencepost.identity AS i
         WHERE i.postmaster_start = pg_postmaster_start_time()
           AND i.sequence_file = pg_relation_filepath('fencepost.fencing_tokens')
    ), locked AS MATERIALIZED (
        SELECT a.resource, a.owner, a.request_id, a.attempt, a.ttl_ms, a.labels,
               k.fencing_token IS NOT NULL AS is_locked,
               k.owner AS old_owner, k.released AS old_released, k.expires_at AS old_expires_at
          FROM identity AS i
         CROSS JOIN unnest(p_resources, p_owners, p_request_ids, p_attempts, p_ttls_ms, p_labels)
                 AS a(resource, owner, request_id, attempt, ttl_ms, labels)
          LEFT JOIN LATERAL (
                    SELECT l.owner, l.released, l.fencing_token, l.expires_at
                      FROM fencepost.locks AS l
                     WHERE l.resource = a.resource
                       AND (l.owner = a.owner OR l.released OR l.expires_at <= clock_timestamp())
                       AND NOT (l.owner = a.owner AND a.request_id <> '' AND l.request_id = a.request_id)
                       FOR UPDATE SKIP LOCKED) AS k
                 ON true
    ), judged AS MATERIALIZED (
        SELECT l.*, clock_timestamp() AS t FROM locked AS l
    ), looked AS MATERIALIZED (
        -- Those that were not locked: held, not there, or passed over.
        SELECT j.resource, j.owner AS new_owner, j.request_id, j.attempt, j.ttl_ms, j.labels AS new_labels,
               h.is_present, h.owner, h.released, h.acquired_at, h.expires_at, h.labels,
               clock_timestamp() AS t
          FROM judged AS j
          LEFT JOIN LATERAL (
                    SELECT true AS is_present, l.owner, l.released, l.acquired_at, l.expires_at, l.labels
                      FROM fencepost.locks AS l
                     WHERE l.resource = j.resource
                    OFFSET 0) AS h
                 ON true
         WHERE NOT j.is_locked
    ), free AS (
        -- A locked row draws its token below, under its lock; this one is only there to
        -- pass the table's check.
        SELECT j.resource, j.owner, 1 AS fencing_token, j.ttl_ms, j.t, j.request_id, j.attempt, j.labels
          FROM judged AS j
         WHERE j.is_locked AND (j.old_owner = j.owner OR j.old_released OR j.old_expires_at <= j.t)
         UNION ALL
        SELECT a.resource, a.new_owner, nextval('fencepost.fencing_tokens'), a.ttl_ms, a.t, a.request_id, a.attempt,
               a.new_labels
          FROM looked AS a
         WHERE a.is_present IS NULL
    ), granted AS (
        INSERT INTO fencepost.locks AS l (
                   resource, owner, released, fencing_token, prev_token, ttl_ms,
                   acquired_at, expires_at, renewed, request_id, attempt, claims, labels)
        SELECT f.resource, f.owner, false, f.fencing_token, 0, f.ttl_ms,
               f.t, f.t + make_interval(secs => f.ttl_ms / 1000.0), false, f.request_id, f.attempt, 1, f.labels
          FROM free AS f
        ON CONFLICT ON CONSTRAINT locks_pkey DO UPDATE
           SET owner = EXCLUDED.owner,
               released = false,
               fencing_token = nextval('fencepost.fencing_tokens'),
               prev_token = l.fencing_token,
               ttl_ms = EXCLUDED.ttl_ms,
               acquired_at = EXCLUDED.acquired_at,
               expires_at = EXCLUDED.expires_at,
               renewed = false,
               request_id = EXCLUDED.request_id,
               attempt = EXCLUDED.attempt,
               claims = 1,
               labels = EXCLUDED.labels
         -- Not a row that came into being since the look: its lock was waited for, and
         -- the times are older than that.
         WHERE EXCLUDED.fencing_token = 1
        RETURNING l.resource, l.owner, l.fencing_token, l.acquired_at, l.expires_at, l.ttl_ms, l.labels
    )
    SELECT g.resource,
           CASE WHEN g.fencing_token < i.first_token THEN fencepost.refuse_token_v1() ELSE 'granted' END,
           g.owner, g.fencing_token, g.acquired_at, g.expires_at,
           (extract(epoch FROM g.expires_at - clock_timestamp()) * 1000000)::bigint, g.ttl_ms, g.labels
      FROM granted AS g
     CROSS JOIN identity AS i
     UNION ALL
    SELECT h.resource, 'held', h.owner, NULL, h.acquired_at, h.expires_at,
           (extract(epoch FROM h.expires_at - h.t) * 1000000)::bigint, NULL, h.labels
      FROM looked AS h
     WHERE h.owner <> h.new_owner AND NOT h.released AND h.expires_at > h.t;
END
$function$;


-- Renew. A null TTL stands for the lease's own.
--
-- outcome: renewed | not_found | expired | not_owner | superseded | token_unknown
CREATE FUNCTION fencepost.renew_all_v1(
    p_resources text[], p_owners text[], p_tokens bigint[], p_ttls_ms bigint[]
) RETURNS TABLE (
    resource text, outcome text, acquired_at timestamptz, expires_at timestamptz,
    remaining_us bigint, slack_us bigint, ttl_ms bigint, labels jsonb
) LANGUAGE plpgsql VOLATILE AS $function$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH locked AS MATERIALIZED (
        SELECT a.owner AS asked_owner, a.token AS asked_token, a.ttl_ms AS asked_ttl_ms, k.*
          FROM unnest(p_resources, p_owners, p_tokens, p_ttls_ms) AS a(resource, owner, token, ttl_ms)
         CROSS JOIN LATERAL (
                    SELECT l.resource, l.owner, l.released, l.fencing_token, l.prev_token, l.ttl_ms, l.acquired_at,
                           l.expires_at, l.request_id, l.attempt, l.claims, l.labels
                      FROM fencepost.locks AS l
                     WHERE l.resource = a.resource
                       FOR UPDATE SKIP LOCKED) AS k
    ), timed AS MATERIALIZED (
        SELECT l.*, clock_timestamp() AS t FROM locked AS l
    ), judged AS MATERIALIZED (
        SELECT j.*,
               coalesce(j.asked_ttl_ms, j.ttl_ms) AS new_ttl_ms,
               -- Never shortened: a holder counts on what it was told.
               greatest(j.expires_at, j.t + make_interval(secs => coalesce(j.asked_ttl_ms, j.ttl_ms) / 1000.0))
                   AS new_expires_at,
               CASE
                   WHEN j.asked_token > j.fencing_token               THEN 'token_unknown'
                   WHEN j.released                                    THEN 'not_found'
                   WHEN j.expires_at <= j.t AND j.owner = j.asked_owner
                        AND j.asked_token = j.fencing_token           THEN 'expired'
                   WHEN j.expires_at <= j.t                           THEN 'not_found'
                   WHEN j.owner <> j.asked_owner                      THEN 'not_owner'
                   WHEN j.asked_token < j.fencing_token               THEN 'superseded'
                   ELSE 'renewed'
               END AS outcome
          FROM timed AS j
    ), written AS (
        INSERT INTO fencepost.locks AS l (
                   resource, owner, released, fencing_token, prev_token, ttl_ms,
                   acquired_at, expires_at, renewed, request_id, attempt, claims, labels)
        SELECT j.resource, j.owner, j.released, j.fencing_token, j.prev_token, j.new_ttl_ms,
               j.acquired_at, j.new_expires_at, true, j.request_id, j.attempt, j.claims, j.labels
          FROM judged AS j
         WHERE j.outcome = 'renewed'
        ON CONFLICT ON CONSTRAINT locks_pkey DO UPDATE
           SET expires_at = EXCLUDED.expires_at, ttl_ms = EXCLUDED.ttl_ms, renewed = true
    )
    SELECT j.resource, j.outcome, j.acquired_at, j.new_expires_at,
           (extract(epoch FROM j.new_expires_at - clock_timestamp()) * 1000000)::bigint,
           (extract(epoch FROM j.expires_at - j.t) * 1000000)::bigint, j.new_ttl_ms, j.labels
      FROM judged AS j;
END
$function$;


-- Release. The row stays, so that the resource's next token is larger whatever the
-- sequence does.
--
-- outcome: released | not_found | not_owner | superseded | token_unknown
CREATE FUNCTION fencepost.release_all_v1(p_resources text[], p_owners text[], p_tokens bigint[])
RETURNS TABLE (resource text, outcome text) LANGUAGE plpgsql VOLATILE AS $function$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH locked AS MATERIALIZED (
        SELECT a.owner AS asked_owner, a.token AS asked_token, k.*
          FROM unnest(p_resources, p_owners, p_tokens) AS a(resource, owner, token)
         CROSS JOIN LATERAL (
                    SELECT l.resource, l.owner, l.released, l.fencing_token, l.expires_at
                      FROM fencepost.locks AS l
                     WHERE l.resource = a.resource
                       FOR UPDATE SKIP LOCKED) AS k
    ), timed AS MATERIALIZED (
        SELECT l.*, clock_timestamp() AS t FROM locked AS l
    ), judged AS MATERIALIZED (
        SELECT j.resource,
               CASE
                   WHEN j.asked_token > j.fencing_token  THEN 'token_unknown'
                   WHEN j.released OR j.expires_at <= j.t THEN 'not_found'
                   WHEN j.owner <> j.asked_owner         THEN 'not_owner'
                   WHEN j.asked_token < j.fencing_token  THEN 'superseded'
                   ELSE 'released'
               END AS outcome
          FROM timed AS j
    ), written AS (
        UPDATE fencepost.locks AS l
           SET released = true, expires_at = least(l.expires_at, clock_timestamp())
         WHERE l.resource = ANY (ARRAY(SELECT j.resource FROM judged AS j WHERE j.outcome = 'released'))
    )
    SELECT j.resource, j.outcome FROM judged AS j;
END
$function$;


-- A round renews all rows of a page in one transaction, and what the one before has
-- left may not be tidied up yet: with half of the page free, one renewal in ten of 64
-- leases found no room and moved to another page.
ALTER TABLE fencepost.locks SET (fillfactor = 35);
