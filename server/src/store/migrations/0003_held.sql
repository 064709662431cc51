-- How long a lease was held, told by its release: the row knows when it was
-- granted. These are the functions of 0001 and 0002 with one more column, which is
-- of use only where the outcome is 'released'.

CREATE FUNCTION fencepost.release_v2(
    p_resource text, p_owner text, p_token bigint,
    OUT outcome text, OUT held_us bigint
) LANGUAGE plpgsql VOLATILE AS $function$
#variable_conflict use_column
DECLARE
    held record;
    t    timestamptz;
BEGIN
    SELECT l.owner, l.released, l.fencing_token, l.acquired_at, l.expires_at
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
        held_us := (extract(epoch FROM t - held.acquired_at) * 1000000)::bigint;
        UPDATE fencepost.locks AS l SET released = true, expires_at = t WHERE l.resource = p_resource;
    END IF;
END
$function$;


CREATE FUNCTION fencepost.release_all_v2(p_resources text[], p_owners text[], p_tokens bigint[])
RETURNS TABLE (resource text, outcome text, held_us bigint) LANGUAGE plpgsql VOLATILE AS $function$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH locked AS MATERIALIZED (
        SELECT a.owner AS asked_owner, a.token AS asked_token, k.*
          FROM unnest(p_resources, p_owners, p_tokens) AS a(resource, owner, token)
         CROSS JOIN LATERAL (
                    SELECT l.resource, l.owner, l.released, l.fencing_token, l.acquired_at, l.expires_at
                      FROM fencepost.locks AS l
                     WHERE l.resource = a.resource
                       FOR UPDATE SKIP LOCKED) AS k
    ), timed AS MATERIALIZED (
        SELECT l.*, clock_timestamp() AS t FROM locked AS l
    ), judged AS MATERIALIZED (
        SELECT j.resource,
               (extract(epoch FROM j.t - j.acquired_at) * 1000000)::bigint AS held_us,
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
    SELECT j.resource, j.outcome, j.held_us FROM judged AS j;
END
$function$;
