-- Which lease a grant has ended, and whose, where that lease was not released: told by
-- a row of its own, of a single Acquire before the grant's. These are the Acquires of
-- 0001 and 0002 with two more outcomes; such a row has the owner and the token of the
-- lease that is over.
--
-- outcome: expired | superseded (a live lease of the same owner)
--
-- A round knows the rows that it has locked, so it reads nothing for this. A single
-- Acquire locks its row first, where it only looked before: what an upsert replaces,
-- it does not tell.

CREATE FUNCTION fencepost.acquire_v2(
    p_resource text, p_owner text, p_request_id text, p_attempt uuid, p_ttl_ms bigint, p_labels jsonb
) RETURNS TABLE (
    outcome text, owner text, fencing_token bigint, acquired_at timestamptz,
    expires_at timestamptz, remaining_us bigint, ttl_ms bigint, labels jsonb
) LANGUAGE plpgsql VOLATILE AS $function$
#variable_conflict use_column
DECLARE
    seen    record;
    ended   record;
    granted record;
    t       timestamptz;
BEGIN
    -- A look may see the row free, and lose it before the write: look again.
    FOR round IN 1..10 LOOP
        SELECT i.postmaster_start = pg_postmaster_start_time()
                   AND i.sequence_file = pg_relation_filepath('fencepost.fencing_tokens') AS identity_holds,
               i.first_token,
               l.resource IS NOT NULL AS present,
               l.owner, l.released, l.fencing_token, l.acquired_at, l.expires_at, l.renewed, l.request_id, l.labels
          INTO seen
          FROM fencepost.identity AS i
          LEFT JOIN fencepost.locks AS l ON l.resource = p_resource;
        t := clock_timestamp();

        IF seen.identity_holds IS NOT TRUE THEN
            outcome := 'identity';
            RETURN NEXT;
            RETURN;
        END IF;

        IF seen.present AND seen.owner = p_owner AND p_request_id <> '' AND seen.request_id = p_request_id THEN
            -- A retry of the row's latest acquisition.
            IF seen.released OR seen.renewed OR seen.expires_at <= t THEN
                outcome := 'spent';
                RETURN NEXT;
                RETURN;
            END IF;
            -- Lock, then judge: what the look saw may be over by now.
            SELECT l.released, l.fencing_token, l.renewed, l.expires_at, l.acquired_at, l.ttl_ms, l.labels
              INTO seen
              FROM fencepost.locks AS l
             WHERE l.resource = p_resource AND l.fencing_token = seen.fencing_token
               FOR UPDATE;
            t := clock_timestamp();
            IF FOUND AND NOT seen.released AND NOT seen.renewed AND seen.expires_at > t THEN
                -- From now on two answers name this lease, and the call that
                -- created it may no longer give it back.
                UPDATE fencepost.locks AS l SET claims = l.claims + 1 WHERE l.resource = p_resource;
                outcome := 'replayed';
                owner := p_owner;
                fencing_token := seen.fencing_token;
                acquired_at := seen.acquired_at;
                expires_at := seen.expires_at;
                remaining_us := (extract(epoch FROM seen.expires_at - t) * 1000000)::bigint;
                ttl_ms := seen.ttl_ms;
                labels := seen.labels;
                RETURN NEXT;
                RETURN;
            END IF;
            CONTINUE;
        END IF;

        IF seen.present AND seen.owner <> p_owner AND NOT seen.released AND seen.expires_at > t THEN
            outcome := 'held';
            owner := seen.owner;
            acquired_at := seen.acquired_at;
            expires_at := seen.expires_at;
            remaining_us := (extract(epoch FROM seen.expires_at - t) * 1000000)::bigint;
            labels := seen.labels;
            RETURN NEXT;
            RETURN;
        END IF;

        -- Lock what is there: what is told of the lease that ends must be what ended.
        SELECT l.owner, l.released, l.fencing_token, l.expires_at
          INTO ended
          FROM fencepost.locks AS l
         WHERE l.resource = p_resource
           FOR UPDATE;

        INSERT INTO fencepost.locks AS l (
                   resource, owner, released, fencing_token, prev_token, ttl_ms,
                   acquired_at, expires_at, renewed, request_id, attempt, claims, labels)
        SELECT p_resource, p_owner, false, nextval('fencepost.fencing_tokens'), 0, p_ttl_ms,
               c.t, c.t + make_interval(secs => p_ttl_ms / 1000.0), false, p_request_id, p_attempt, 1, p_labels
          FROM (SELECT clock_timestamp() AS t OFFSET 0) AS c
        ON CONFLICT ON CONSTRAINT locks_pkey DO UPDATE
           SET owner = EXCLUDED.owner,
               released = false,
               -- Drawn here, under the row's lock. EXCLUDED's token was drawn
               -- before the lock was waited for, and may be older.
               fencing_token = nextval('fencepost.fencing_tokens'),
               prev_token = l.fencing_token,
               ttl_ms = EXCLUDED.ttl_ms,
               -- EXCLUDED's times are as old as its token; read the clock once more.
               (acquired_at, expires_at) = (
                   SELECT c.t, c.t + make_interval(secs => p_ttl_ms / 1000.0)
                     FROM (SELECT clock_timestamp() AS t OFFSET 0) AS c),
               renewed = false,
               request_id = EXCLUDED.request_id,
               attempt = EXCLUDED.attempt,
               claims = 1,
               labels = EXCLUDED.labels
         -- The one decision, evaluated under the row's lock: the row that was locked
         -- and none that came into being since, not a retry (a concurrent twin may
         -- have won), and ours to take or free.
         WHERE l.fencing_token = ended.fencing_token
           AND NOT (l.owner = EXCLUDED.owner AND EXCLUDED.request_id <> '' AND l.request_id = EXCLUDED.request_id)
           AND (l.owner = EXCLUDED.owner OR l.released OR l.expires_at <= clock_timestamp())
        RETURNING l.owner, l.fencing_token, l.acquired_at, l.expires_at,
                  (extract(epoch FROM l.expires_at - clock_timestamp()) * 1000000)::bigint AS remaining_us,
                  l.ttl_ms, l.labels
             INTO granted;
        IF FOUND THEN
            IF granted.fencing_token < seen.first_token THEN
                RAISE check_violation USING
                    MESSAGE = 'the sequence was set back', CONSTRAINT = 'locks_token_rises';
            END IF;
            IF NOT ended.released THEN
                outcome := CASE WHEN ended.expires_at <= granted.acquired_at THEN 'expired' ELSE 'superseded' END;
                owner := ended.owner;
                fencing_token := ended.fencing_token;
                RETURN NEXT;
            END IF;
            outcome := 'granted';
            owner := granted.owner;
            fencing_token := granted.fencing_token;
            acquired_at := granted.acquired_at;
            expires_at := granted.expires_at;
            remaining_us := granted.remaining_us;
            ttl_ms := granted.ttl_ms;
            labels := granted.labels;
            RETURN NEXT;
            RETURN;
        END IF;
    END LOOP;
    outcome := 'contended';
    RETURN NEXT;
END
$function$;


CREATE FUNCTION fencepost.acquire_all_v2(
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
               k.owner AS old_owner, k.released AS old_released, k.fencing_token AS old_token,
               k.expires_at AS old_expires_at
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
    -- After the grants: read before, it would have all rows locked before the first is
    -- written.
    SELECT j.resource, CASE WHEN j.old_expires_at <= j.t THEN 'expired' ELSE 'superseded' END,
           j.old_owner, j.old_token, NULL, NULL, NULL, NULL, NULL
      FROM judged AS j
     WHERE j.is_locked AND NOT j.old_released AND (j.old_owner = j.owner OR j.old_expires_at <= j.t)
     UNION ALL
    SELECT h.resource, 'held', h.owner, NULL, h.acquired_at, h.expires_at,
           (extract(epoch FROM h.expires_at - h.t) * 1000000)::bigint, NULL, h.labels
      FROM looked AS h
     WHERE h.owner <> h.new_owner AND NOT h.released AND h.expires_at > h.t;
END
$function$;
