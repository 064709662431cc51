-- The lock table, the token sequence, the identity of both, and the functions
-- that judge a single row.
--
-- Functions are named by version: replicas of two releases run side by side
-- during an upgrade, each with the functions it was built for. A function that
-- has shipped is never changed; a new one takes the next number.

CREATE TABLE fencepost.locks (
    resource      text COLLATE "C" NOT NULL,
    owner         text COLLATE "C" NOT NULL,
    released      boolean          NOT NULL,
    fencing_token bigint           NOT NULL,
    -- The token of the lease before this one.
    prev_token    bigint           NOT NULL,
    ttl_ms        bigint           NOT NULL,
    acquired_at   timestamptz      NOT NULL,
    expires_at    timestamptz      NOT NULL,
    -- Whether this lease was ever renewed: from then on its answer has arrived.
    renewed       boolean          NOT NULL,
    -- The caller's name for this acquisition; '' = none, or given back.
    request_id    text COLLATE "C" NOT NULL,
    -- Our own name for the statement that created this lease.
    attempt       uuid             NOT NULL,
    -- How many answers named this lease: the grant, and each replay of it.
    claims        integer          NOT NULL,
    labels        jsonb            NOT NULL,
    CONSTRAINT locks_pkey PRIMARY KEY (resource),
    CONSTRAINT locks_token_rises CHECK (fencing_token > prev_token)
) WITH (
    -- Every renewal updates its row in place (HOT) while its page has room, so
    -- leave room, tidy up early, and never index expires_at.
    fillfactor = 50,
    autovacuum_vacuum_threshold = 500,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_threshold = 500,
    autovacuum_analyze_scale_factor = 0.1
);

-- One sequence for all resources. It is never cached, since a cached range
-- would be handed out late, and stays below 2^53 for languages whose numbers
-- are doubles.
CREATE SEQUENCE fencepost.fencing_tokens
    AS bigint MINVALUE 1 MAXVALUE 9007199254740991 CACHE 1 NO CYCLE;

-- Which running server, and which incarnation of the sequence, the tokens so
-- far came from. A sequence remembers only what its own server durably knew;
-- where this row differs from what is running, tokens must leap first. The
-- file path names the database and the sequence's storage, so it differs after
-- a restore, a CREATE DATABASE … TEMPLATE and an ALTER SEQUENCE … RESTART.
CREATE TABLE fencepost.identity (
    singleton        boolean     NOT NULL DEFAULT true,
    postmaster_start timestamptz NOT NULL,
    sequence_file    text        NOT NULL,
    -- Where the last leap went: a smaller token comes from a sequence that was
    -- set back since, as the end of a plain dump does.
    first_token      bigint      NOT NULL,
    CONSTRAINT identity_pkey PRIMARY KEY (singleton),
    CONSTRAINT identity_one_row CHECK (singleton)
);

-- Matches no server, so that a fresh database leaps before its first token.
INSERT INTO fencepost.identity (postmaster_start, sequence_file, first_token) VALUES ('-infinity', '', 1);


-- Acquire. Looks first and writes only what looks free; each look and each
-- write is a statement with a snapshot of its own.
--
-- outcome: granted | replayed | held | spent | contended | identity
CREATE FUNCTION fencepost.acquire_v1(
    p_resource text, p_owner text, p_request_id text, p_attempt uuid, p_ttl_ms bigint, p_labels jsonb,
    OUT outcome text, OUT owner text, OUT fencing_token bigint, OUT acquired_at timestamptz,
    OUT expires_at timestamptz, OUT remaining_us bigint, OUT ttl_ms bigint, OUT labels jsonb
) LANGUAGE plpgsql VOLATILE AS $function$
#variable_conflict use_column
DECLARE
    seen record;
    t    timestamptz;
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
            RETURN;
        END IF;

        IF seen.present AND seen.owner = p_owner AND p_request_id <> '' AND seen.request_id = p_request_id THEN
            -- A retry of the row's latest acquisition.
            IF seen.released OR seen.renewed OR seen.expires_at <= t THEN
                outcome := 'spent';
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
            RETURN;
        END IF;

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
         -- The one decision, evaluated under the row's lock: not a retry (a
         -- concurrent twin may have won), and ours to take or free.
         WHERE NOT (l.owner = EXCLUDED.owner AND EXCLUDED.request_id <> '' AND l.request_id = EXCLUDED.request_id)
           AND (l.owner = EXCLUDED.owner OR l.released OR l.expires_at <= clock_timestamp())
        RETURNING 'granted', l.owner, l.fencing_token, l.acquired_at, l.expires_at,
                  (extract(epoch FROM l.expires_at - clock_timestamp()) * 1000000)::bigint, l.ttl_ms, l.labels
             INTO outcome, owner, fencing_token, acquired_at, expires_at, remaining_us, ttl_ms, labels;
        IF FOUND THEN
            IF fencing_token < seen.first_token THEN
                RAISE check_violation USING
                    MESSAGE = 'the sequence was set back', CONSTRAINT = 'locks_token_rises';
            END IF;
            RETURN;
        END IF;
    END LOOP;
    outcome := 'contended';
END
$function$;


-- Renew, one lease or many. Locks a row first, then judges it by one read of the
-- clock. A null TTL stands for the lease's own. With p_skip_locked a row that
-- somebody else has locked is passed over, so that one row never delays the
-- others; without, it is waited for.
--
-- outcome: renewed | locked | not_found | expired | not_owner | superseded | token_unknown
CREATE FUNCTION fencepost.renew_v1(
    p_resources text[], p_owners text[], p_tokens bigint[], p_ttls_ms bigint[], p_skip_locked boolean
) RETURNS TABLE (
    place integer, outcome text, acquired_at timestamptz, expires_at timestamptz,
    remaining_us bigint, slack_us bigint, ttl_ms bigint, labels jsonb
) LANGUAGE plpgsql VOLATILE AS $function$
#variable_conflict use_column
DECLARE
    held    record;
    t       timestamptz;
    is_live boolean;
BEGIN
    FOR n IN 1..cardinality(p_resources) LOOP
        place := n;
        IF p_skip_locked THEN
            SELECT l.owner, l.released, l.fencing_token, l.ttl_ms, l.acquired_at, l.expires_at, l.labels
              INTO held
              FROM fencepost.locks AS l
             WHERE l.resource = p_resources[n]
               FOR UPDATE SKIP LOCKED;
        ELSE
            SELECT l.owner, l.released, l.fencing_token, l.ttl_ms, l.acquired_at, l.expires_at, l.labels
              INTO held
              FROM fencepost.locks AS l
             WHERE l.resource = p_resources[n]
               FOR UPDATE;
        END IF;
        IF NOT FOUND THEN
            -- Not there, or passed over.
            PERFORM FROM fencepost.locks AS l WHERE p_skip_locked AND l.resource = p_resources[n];
            outcome := CASE WHEN FOUND THEN 'locked' ELSE 'not_found' END;
            RETURN NEXT;
            CONTINUE;
        END IF;
        t := clock_timestamp();
        is_live := NOT held.released AND held.expires_at > t;

        outcome := CASE
            WHEN p_tokens[n] > held.fencing_token               THEN 'token_unknown'
            WHEN is_live AND held.owner <> p_owners[n]          THEN 'not_owner'
            WHEN is_live AND p_tokens[n] < held.fencing_token   THEN 'superseded'
            WHEN is_live                                        THEN 'renewed'
            WHEN NOT held.released AND held.owner = p_owners[n]
                 AND p_tokens[n] = held.fencing_token           THEN 'expired'
            ELSE 'not_found'
        END;
        IF outcome = 'renewed' THEN
            acquired_at := held.acquired_at;
            labels := held.labels;
            ttl_ms := coalesce(p_ttls_ms[n], held.ttl_ms);
            slack_us := (extract(epoch FROM held.expires_at - t) * 1000000)::bigint;
            -- Never shortened: a holder counts on what it was told.
            expires_at := greatest(held.expires_at, t + make_interval(secs => ttl_ms / 1000.0));
            UPDATE fencepost.locks AS l
               SET expires_at = renew_v1.expires_at, ttl_ms = renew_v1.ttl_ms, renewed = true
             WHERE l.resource = p_resources[n];
            remaining_us := (extract(epoch FROM expires_at - clock_timestamp()) * 1000000)::bigint;
        END IF;
        RETURN NEXT;
    END LOOP;
END
$function$;


-- Release. Locks first, then judges by one read of the clock. The row stays,
-- so that the resource's next token is larger whatever the sequence does.
--
-- outcome: released | not_found | not_owner | superseded | token_unknown
CREATE FUNCTION fencepost.release_v1(
    p_resource text, p_owner text, p_token bigint,
    OUT outcome text
) LANGUAGE plpgsql VOLATILE AS $function$
#variable_conflict use_column
DECLARE
    held record;
    t    timestamptz;
BEGIN
    SELECT l.owner, l.released, l.fencing_token, l.expires_at
      INTO held
      FROM fencepost.locks AS l
     WHERE l.resource = p_resource
       FOR UPDATE;
    IF NOT FOUND THEN
        outcome := 'not_found';
        RETURN;
    END IF;
    t := clock_timestamp();

    outcome := CASE
        WHEN p_token > held.fencing_token                         THEN 'token_unknown'
        WHEN held.released OR held.expires_at <= t                THEN 'not_found'
        WHEN held.owner <> p_owner                                THEN 'not_owner'
        WHEN p_token < held.fencing_token                         THEN 'superseded'
        ELSE 'released'
    END;
    IF outcome = 'released' THEN
        UPDATE fencepost.locks AS l SET released = true, expires_at = t WHERE l.resource = p_resource;
    END IF;
END
$function$;


-- Gives back leases that nobody was told of, each named by the attempt that
-- created it. A lease that a replay has claimed or that was renewed is somebody's.
-- Rows locked by others are skipped and not reported. Reports each row that was
-- looked at under its lock: its place in the arrays, and whether it was given back.
CREATE FUNCTION fencepost.give_back_v1(p_resources text[], p_attempts uuid[])
RETURNS TABLE (place integer, given_back boolean) LANGUAGE plpgsql VOLATILE AS $function$
#variable_conflict use_column
DECLARE
    held record;
BEGIN
    FOR n IN 1..cardinality(p_resources) LOOP
        SELECT l.attempt, l.claims, l.renewed, l.released, l.expires_at
          INTO held
          FROM fencepost.locks AS l
         WHERE l.resource = p_resources[n]
           FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        place := n;
        given_back := held.attempt = p_attempts[n] AND held.claims = 1 AND NOT held.renewed AND NOT held.released;
        IF given_back THEN
            -- Nobody was told of it, so its request id is not spent.
            UPDATE fencepost.locks AS l
               SET released = true, expires_at = least(held.expires_at, clock_timestamp()), request_id = ''
             WHERE l.resource = p_resources[n];
        END IF;
        RETURN NEXT;
    END LOOP;
END
$function$;


-- Deletes rows idle for longer than the retention, one page of names in key
-- order. The retention must be far above every statement limit: an Acquire that
-- drew its token before the delete must be over long before the row could go.
-- p_clock is where the caller expects the clock to be: one that was just set
-- ahead makes nothing idle. last_resource is null when the page was empty.
CREATE FUNCTION fencepost.purge_v1(
    p_after text, p_page integer, p_retention_ms bigint, p_clock timestamptz,
    OUT last_resource text, OUT purged integer
) LANGUAGE plpgsql VOLATILE AS $function$
#variable_conflict use_column
DECLARE
    idle_before timestamptz := least(clock_timestamp(), p_clock) - make_interval(secs => p_retention_ms / 1000.0);
    candidate   record;
BEGIN
    purged := 0;
    FOR candidate IN
        SELECT l.resource, l.expires_at
          FROM fencepost.locks AS l
         WHERE l.resource > p_after
         ORDER BY l.resource COLLATE "C"
         LIMIT p_page
    LOOP
        last_resource := candidate.resource;
        CONTINUE WHEN candidate.expires_at >= idle_before;
        PERFORM FROM fencepost.locks AS l
          WHERE l.resource = candidate.resource AND l.expires_at < idle_before
            FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        DELETE FROM fencepost.locks AS l
         WHERE l.resource = candidate.resource AND l.expires_at < idle_before;
        purged := purged + 1;
    END LOOP;
END
$function$;


-- Moves the sequence ahead of every token that a lost or restored past may have
-- handed out, and stores the identity that the tokens now come from. Does nothing
-- when that identity holds and the sequence is above p_floor, unless p_always.
--
-- The leap is absolute, to T = seconds since 2026-01-01 UTC × 2^22, because a
-- relative one gives the same tokens on two standbys that are promoted in turn.
-- Only when the sequence is already beyond T, by a clock that went wrong, is it
-- relative (clock_behind).
CREATE FUNCTION fencepost.leap_v1(
    p_floor bigint, p_always boolean,
    OUT leapt boolean, OUT clock_behind boolean, OUT from_token bigint, OUT to_token bigint
) LANGUAGE plpgsql VOLATILE AS $function$
#variable_conflict use_column
DECLARE
    identity_holds boolean;
    now_token      bigint;
    -- The largest token that there may have been.
    past_token     bigint;
BEGIN
    PERFORM FROM fencepost.identity AS i FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'fencepost.identity has lost its row';
    END IF;
    SELECT s.last_value INTO from_token FROM fencepost.fencing_tokens AS s;
    -- Judged after that: only a look at the sequence tells a session that waited
    -- for the row of the file that another one's leap has given it.
    SELECT i.postmaster_start = pg_postmaster_start_time()
               AND i.sequence_file = pg_relation_filepath('fencepost.fencing_tokens')
      INTO identity_holds
      FROM fencepost.identity AS i;
    leapt := p_always OR identity_holds IS NOT TRUE OR from_token <= p_floor;
    clock_behind := false;
    to_token := from_token;
    IF NOT leapt THEN
        RETURN;
    END IF;
    -- Keeps nextval out until this transaction is over. It gives the sequence a
    -- new file, so it must not run where the identity is then left as it is.
    ALTER SEQUENCE fencepost.fencing_tokens NO CYCLE;
    SELECT s.last_value INTO from_token FROM fencepost.fencing_tokens AS s;
    past_token := greatest(from_token, p_floor);
    now_token := floor(extract(epoch FROM clock_timestamp() - timestamptz '2026-01-01 00:00:00+00') * 4194304)::bigint;
    -- Nothing indexes the tokens, so the table is read only where a look at it
    -- matters: a row that is ahead of the clock refuses a smaller token itself.
    IF p_always OR now_token <= past_token THEN
        SELECT greatest(past_token, max(l.fencing_token)) INTO past_token FROM fencepost.locks AS l;
    END IF;
    clock_behind := now_token <= past_token;
    to_token := CASE WHEN clock_behind THEN past_token + 268435456 ELSE now_token END;
    EXECUTE format('ALTER SEQUENCE fencepost.fencing_tokens RESTART WITH %s', to_token);
    UPDATE fencepost.identity AS i
       SET postmaster_start = pg_postmaster_start_time(),
           sequence_file = pg_relation_filepath('fencepost.fencing_tokens'),
           first_token = to_token;
END
$function$;
