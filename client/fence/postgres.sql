-- Fencepost: the fencing kit for PostgreSQL, version 1.
--
-- For the database that holds your data; it knows nothing of the lock server's
-- own. Needs PostgreSQL 13 or later; tested on 14 to 18. Install with `fencepost
-- fence install`, with `psql -1 -v ON_ERROR_STOP=1 -f postgres.sql`, or from your
-- migrations (one transaction). Installing again keeps all tokens and all GRANTs
-- to roles, and takes back what was granted to PUBLIC.
--
-- THE RULE OF USE
--
--   1. A new holder COMMITS `SELECT fence.admit(resource, token)` before it
--      reads anything. From then on every older token is refused.
--   2. Every transaction after that starts with the same admit, as a STATEMENT
--      OF ITS OWN, and then reads and writes.
--   3. FP409 means: a newer holder has been here. Stop; do not repeat, and do
--      not catch it to go on. psql's ON_ERROR_ROLLBACK and pgjdbc's autosave=always
--      do catch it: what follows in the transaction commits, and only a guarded
--      table refuses it. Turn them off.
--
-- Why a statement of its own: on read committed a statement sees the database
-- as it was when the statement began. In `SELECT fence.admit(...), balance FROM ...`
-- the admit may wait for another holder's transaction, and then `balance` is the
-- one from before that transaction.
--
-- Several resources in one transaction: admit them in one order everywhere
-- (sorted), or two transactions may deadlock (40P01).
--
-- ISOLATION. Right on all three levels. On repeatable read and serializable an
-- admit that meets a concurrent transaction of the same resource ends in 40001
-- (serialization_failure): repeat the transaction, from its admit, with the same
-- token. It then is admitted or gets FP409. An older token is never admitted.
--
-- WAITING. Transactions of one resource run one after the other, from admit to
-- commit: that is what makes the comparison and the write one step. A holder
-- that freezes inside a transaction keeps the row until its session ends, so
-- give the writers' role a limit:
--     ALTER ROLE writer SET idle_in_transaction_session_timeout = '10s';
-- Nothing cuts off a transaction that was prepared (PREPARE TRANSACTION): it keeps
-- the row until COMMIT or ROLLBACK PREPARED, and no other holder gets in.
--
-- DURABILITY. A transaction that admits commits with synchronous_commit, whatever
-- the session, a function around it or a later SET LOCAL says: a token that a crash
-- forgets would let an older one in. One thing gets around it: SET CONSTRAINTS ALL
-- IMMEDIATE, and SET LOCAL synchronous_commit = off after that.
--
-- PRIVILEGES. The role that installs needs CREATE on the database, owns the schema,
-- and grants. Nobody else has any privilege at first, whatever is given by default.
--     a writer:    GRANT USAGE ON SCHEMA fence TO writer;
--                  GRANT EXECUTE ON FUNCTION fence.admit(text, bigint) TO writer;
--     a watcher:   GRANT USAGE ON SCHEMA fence TO watcher;       -- check, rejected_total
--     an operator: as a watcher, and
--                  GRANT EXECUTE ON FUNCTION fence.reset(text), fence.reset(text, bigint) TO operator;
-- The functions that touch the table are SECURITY DEFINER: a writer with UPDATE
-- on it could lower a token, by mistake as well as by will. They take plain text
-- and bigint only, and their search_path is pinned. fence.guard() is SECURITY
-- INVOKER: it reads columns of other people's types, whose casts are their code.
--
-- SQLSTATES
--     FP409  the token is older than one that was seen, or than a guarded row's: stop
--     FP428  guard: a write that does not show a token of its transaction: a bug
--     22023  not a token, or not a resource: NULL, empty, zero, negative, too large
--     40001  see ISOLATION
--     55P03, 57014  lock_timeout, statement_timeout: not admitted, and not known
--            whether the token is older

DO $$
DECLARE
    ours CONSTANT integer := 1;
    installed text;
BEGIN
    -- Two installations at once would both find the schema missing.
    PERFORM pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('fencepost fencing kit', 0));
    -- No word about what is there already.
    PERFORM pg_catalog.set_config('client_min_messages', 'warning', true);
    installed := pg_catalog.obj_description(pg_catalog.to_regnamespace('fence'), 'pg_namespace');
    IF pg_catalog.to_regnamespace('fence') IS NULL THEN
        CREATE SCHEMA fence;
    ELSIF EXISTS (
        SELECT FROM pg_catalog.pg_namespace AS n
         WHERE n.nspname = 'fence'
           AND (pg_catalog.pg_get_userbyid(n.nspowner) <> current_user
                OR EXISTS (SELECT FROM pg_catalog.pg_class AS c WHERE c.relnamespace = n.oid AND c.relowner <> n.nspowner)
                OR EXISTS (SELECT FROM pg_catalog.pg_proc AS f WHERE f.pronamespace = n.oid AND f.proowner <> n.nspowner)))
    THEN
        -- Whoever owns a part of it could put code of their own into it.
        RAISE EXCEPTION 'schema "fence" belongs to another role, in whole or in part'
            USING ERRCODE = 'insufficient_privilege', HINT = 'Install as the role that owns it, or drop it.';
    ELSIF installed LIKE 'Fencepost fencing kit, version %' THEN
        IF pg_catalog.substring(installed, '[0-9]+$')::integer > ours THEN
            RAISE EXCEPTION 'a newer version of the fencing kit is installed'
                USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = installed;
        END IF;
    ELSIF EXISTS (SELECT FROM pg_catalog.pg_class WHERE relnamespace = 'fence'::regnamespace)
       OR EXISTS (SELECT FROM pg_catalog.pg_proc WHERE pronamespace = 'fence'::regnamespace) THEN
        RAISE EXCEPTION 'schema "fence" is in use by something else'
            USING ERRCODE = 'duplicate_schema';
    END IF;
    -- What is there already, for the end of this installation.
    PERFORM pg_catalog.set_config('fence.before', pg_catalog.concat_ws(' ', 'known',
        (SELECT pg_catalog.string_agg('c' || oid, ' ') FROM pg_catalog.pg_class WHERE relnamespace = 'fence'::regnamespace),
        (SELECT pg_catalog.string_agg('p' || oid, ' ') FROM pg_catalog.pg_proc WHERE pronamespace = 'fence'::regnamespace),
        CASE WHEN installed LIKE 'Fencepost fencing kit, version %' THEN 'schema' END), true);
END $$;

-- The row of a resource is rewritten by each transaction that admits, hence the
-- room for heap-only updates.
CREATE TABLE IF NOT EXISTS fence.tokens (
    resource    text COLLATE "C" PRIMARY KEY,
    token       bigint NOT NULL CHECK (token > 0 AND token < 9007199254740992),
    -- The transaction that last admitted a token, by its number (none after a
    -- reset) and the time of its beginning: a transaction that finds both its own
    -- here has shown its token, which is what fence.guard() asks. The number alone
    -- would not do, since a dump or logical replication takes rows to a server
    -- that gives the same numbers again. No clock that is set back can part the
    -- two: transaction_timestamp() stays the same within a transaction.
    admitted_in xid8,
    admitted_at timestamptz NOT NULL
) WITH (fillfactor = 50);
COMMENT ON TABLE fence.tokens IS 'The highest fencing token seen, per resource';

-- What a rejected admit writes is rolled back with its transaction; a sequence
-- is the one counter that is not.
CREATE SEQUENCE IF NOT EXISTS fence.rejections;
COMMENT ON SEQUENCE fence.rejections IS 'Writes with an older token that were stopped: see fence.rejected_total()';

-- Shows a token: locks the resource's row until the end of the transaction, and
-- records the token, or raises FP409 when a newer one was seen. Equal is
-- admitted: one holder writes many times.
CREATE OR REPLACE FUNCTION fence.admit(resource text, token bigint) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    highest bigint;
BEGIN
    -- Not STRICT: a NULL token would then be admitted by doing nothing. Tokens of
    -- Fencepost are below 2^53; anything larger would lock all holders out.
    IF admit.token IS NULL OR admit.token <= 0 OR admit.token >= 9007199254740992 THEN
        RAISE EXCEPTION 'not a fencing token'
            USING ERRCODE = 'invalid_parameter_value',
                  DETAIL = format('The token is %s; it must be above 0 and below 2^53.', coalesce(admit.token::text, 'NULL')),
                  HINT = 'Hand over fencing_token of the lease, as a 64-bit integer.';
    ELSIF admit.resource IS NULL OR octet_length(admit.resource) NOT BETWEEN 1 AND 512 THEN
        RAISE EXCEPTION 'not the name of a resource'
            USING ERRCODE = 'invalid_parameter_value',
                  DETAIL = format('It has %s bytes; it must have 1 to 512.', coalesce(octet_length(admit.resource)::text, 'NULL')),
                  HINT = 'Hand over the name that is locked.';
    END IF;

    -- A token that a crash could forget would let an older one in again.
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;

    -- ON CONFLICT locks the row, also of a first admit that is still under way,
    -- and evaluates WHERE after that, on the latest version.
    --
    -- An equal token rewrites the row all the same, once a transaction. A mere
    -- lock would leave no trace: on repeatable read a new holder that waited for
    -- this transaction would go on with a snapshot from before it, in which its
    -- writes are missing. After a rewrite the new holder gets 40001 instead.
    INSERT INTO fence.tokens AS seen (resource, token, admitted_in, admitted_at)
    VALUES (admit.resource, admit.token, pg_current_xact_id(), transaction_timestamp())
        ON CONFLICT (resource) DO UPDATE
       SET token = EXCLUDED.token,
           admitted_in = EXCLUDED.admitted_in,
           admitted_at = EXCLUDED.admitted_at
     WHERE seen.token < EXCLUDED.token
        OR (seen.token = EXCLUDED.token
            AND (seen.admitted_in, seen.admitted_at) IS DISTINCT FROM (EXCLUDED.admitted_in, EXCLUDED.admitted_at));
    IF NOT FOUND THEN
        -- Newer, or this transaction's own. The row is locked, and the next
        -- statement sees it as it is.
        SELECT t.token INTO highest FROM fence.tokens AS t WHERE t.resource = admit.resource COLLATE "C";
        IF admit.token < highest THEN
            PERFORM nextval('fence.rejections');
            RAISE EXCEPTION 'fencing token is older than the highest one seen'
                USING ERRCODE = 'FP409',
                      DETAIL = format('Resource "%s": token %s, highest seen %s.', admit.resource, admit.token, highest),
                      HINT = 'A newer holder has taken over. Stop working: this token is never admitted again.',
                      SCHEMA = 'fence', TABLE = 'tokens';
        END IF;
    END IF;
END $$;

-- Internal: at commit, what admit has set may be undone, by a SET LOCAL that came
-- later or by a function around it that has a SET of its own.
CREATE OR REPLACE FUNCTION fence.commit_durably() RETURNS trigger
LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    RETURN NULL;
END $$;

DO $$
BEGIN
    -- It locks writers out, so only when it is not there.
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_trigger
                    WHERE tgrelid = 'fence.tokens'::regclass AND tgname = 'commit_durably') THEN
        CREATE CONSTRAINT TRIGGER commit_durably AFTER INSERT OR UPDATE ON fence.tokens
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fence.commit_durably();
    END IF;
END $$;

-- The token that this transaction has admitted for a resource; NULL: none.
-- For functions and triggers of your own that want to be sure.
CREATE OR REPLACE FUNCTION fence.admitted(resource text) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    RETURN (SELECT t.token FROM fence.tokens AS t
             WHERE t.resource = admitted.resource COLLATE "C"
               AND t.admitted_in = pg_current_xact_id_if_assigned() AND t.admitted_at = transaction_timestamp());
END $$;

-- Internal: counts a write to a row that carries a newer token. fence.guard() runs as
-- the writer, so whoever may use the schema may call this, but it counts only in a
-- transaction that has admitted a token. What remains: a role that may admit can
-- raise the counter at will, which it also can with an old token.
CREATE OR REPLACE FUNCTION fence.count_rejection(resource text) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF fence.admitted(resource) IS NOT NULL THEN
        PERFORM nextval('fence.rejections');
    END IF;
END $$;

-- The highest token seen, and when the transaction began that last admitted one
-- (NULL after a reset: nobody has shown the token that it set). No row: none yet.
-- To look at, not to decide by: the next moment it may be another.
CREATE OR REPLACE FUNCTION fence.check(resource text)
RETURNS TABLE (token bigint, admitted_at timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT t.token, CASE WHEN t.admitted_in IS NOT NULL THEN t.admitted_at END
      FROM fence.tokens AS t WHERE t.resource = $1 COLLATE "C"
$$;

-- How many writes were stopped with FP409, in this database, ever. After a crash
-- of Postgres it may be up to 32 too high, or miss those of the last moment; the
-- server's log has each.
CREATE OR REPLACE FUNCTION fence.rejected_total() RETURNS bigint
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM fence.rejections
$$;

-- For a poisoned row: someone admitted a token that Fencepost never gave. Sets the
-- highest token, up or DOWN. Use the token of the present lease: every holder from
-- there on is admitted, every older one is not. Returns what it was before. When it
-- was last admitted is gone with it, until the next admit.
--
-- Rows of guarded tables that were written with the bad token still carry it, and
-- refuse every lower one with FP409. Mend them in the transaction of the reset, as
-- the owner of the table (which locks writers out until the commit):
--     BEGIN;
--     SELECT fence.reset('order-7', 120540998346497);
--     ALTER TABLE orders DISABLE TRIGGER fence_guard;
--     UPDATE orders SET fencing_token = 120540998346497 WHERE id = 7 AND fencing_token > 120540998346497;
--     ALTER TABLE orders ENABLE TRIGGER fence_guard;  -- ENABLE ALWAYS, if it was that
--     COMMIT;
CREATE OR REPLACE FUNCTION fence.reset(resource text, token bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    before bigint;
BEGIN
    -- NULL is refused, and does not mean "forget": it may be an empty variable.
    IF reset.token IS NULL OR reset.token <= 0 OR reset.token >= 9007199254740992 OR reset.resource IS NULL THEN
        RAISE EXCEPTION 'not a fencing token, or no resource'
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'The token must be above 0 and below 2^53.';
    END IF;
    SELECT t.token INTO before FROM fence.tokens AS t WHERE t.resource = reset.resource COLLATE "C" FOR UPDATE;
    UPDATE fence.tokens AS t SET token = reset.token, admitted_in = NULL WHERE t.resource = reset.resource COLLATE "C";
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no token was ever seen for this resource'
            USING ERRCODE = 'no_data_found', DETAIL = format('Resource "%s".', reset.resource);
    END IF;
    RETURN before;
END $$;

-- Forgets a resource: from then on ANY token is admitted, that of a holder frozen
-- for hours too. For resources that are gone for good. Returns the token it was; a
-- resource that was never seen is an error, as it may be a name mistyped.
CREATE OR REPLACE FUNCTION fence.reset(resource text) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    before bigint;
BEGIN
    DELETE FROM fence.tokens AS t WHERE t.resource = reset.resource COLLATE "C" RETURNING t.token INTO before;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no token was ever seen for this resource'
            USING ERRCODE = 'no_data_found', DETAIL = format('Resource "%s".', reset.resource);
    END IF;
    RETURN before;
END $$;

-- The guard of a table with a column `fencing_token bigint`: refuses each write
-- whose transaction has not admitted a token, and each row that does not carry it.
--
--   ALTER TABLE orders ADD COLUMN fencing_token bigint NOT NULL DEFAULT 0;
--   CREATE TRIGGER fence_guard AFTER INSERT OR UPDATE OR DELETE ON orders
--      FOR EACH ROW EXECUTE FUNCTION fence.guard('orders');       -- one lock for all rows
--   ... or ...              EXECUTE FUNCTION fence.guard('order-', 'id');  -- resource 'order-' || id
--   CREATE TRIGGER fence_guard_truncate AFTER TRUNCATE ON orders
--      FOR EACH STATEMENT EXECUTE FUNCTION fence.guard('orders');
--
-- INSERT, UPDATE, and both halves of ON CONFLICT DO UPDATE must set fencing_token
-- to the token that this transaction admitted for the row's resource. An UPDATE
-- that leaves the column alone keeps an earlier token, and is refused. A DELETE
-- has no new row to carry a token: that the transaction admitted one is enough.
-- No write may go to a row with a newer token.
--
-- Writers need a writer's privileges on the schema. fence.guard(prefix, column)
-- has no resource for TRUNCATE, which it therefore refuses.
--
-- What passes by: TRUNCATE without the second trigger; TRUNCATE of a partition that
-- has none of its own, as partitions inherit triggers for rows alone; the rows of
-- inheritance children that are no partitions, without triggers of their own;
-- session_replication_role = replica (logical replication, some restores) unless
-- the trigger is made ENABLE ALWAYS; ALTER TABLE ... DISABLE TRIGGER; DDL.
CREATE OR REPLACE FUNCTION fence.guard() RETURNS trigger
LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp
-- A name is made from a column as text, the same one in every session.
SET datestyle = 'ISO, YMD' SET timezone = 'UTC' SET intervalstyle = 'postgres' SET extra_float_digits = 1 SET bytea_output = 'hex' AS $$
DECLARE
    old_resource text := TG_ARGV[0];
    new_resource text := TG_ARGV[0];
    shown bigint;
BEGIN
    -- After the row, so that no other trigger can change it once it was judged.
    IF TG_NARGS NOT IN (1, 2) OR TG_WHEN <> 'AFTER' OR (TG_LEVEL = 'STATEMENT') <> (TG_OP = 'TRUNCATE') THEN
        RAISE EXCEPTION 'fence.guard is not set up rightly'
            USING ERRCODE = 'feature_not_supported',
                  HINT = 'CREATE TRIGGER ... AFTER INSERT OR UPDATE OR DELETE ... FOR EACH ROW EXECUTE FUNCTION '
                         'fence.guard(resource), or fence.guard(prefix, column); TRUNCATE: FOR EACH STATEMENT.';
    END IF;
    IF TG_NARGS = 2 AND TG_OP IN ('UPDATE', 'DELETE') THEN
        EXECUTE format('SELECT $2 || ($1).%I::text', TG_ARGV[1]) INTO old_resource USING OLD, TG_ARGV[0];
    END IF;
    IF TG_NARGS = 2 AND TG_OP = 'TRUNCATE' THEN
        -- The prefix alone may be a row's resource, and a token of that stands for
        -- no other row.
        old_resource := NULL;
    END IF;
    IF TG_NARGS = 2 AND TG_OP IN ('UPDATE', 'INSERT') THEN
        EXECUTE format('SELECT $2 || ($1).%I::text', TG_ARGV[1]) INTO new_resource USING NEW, TG_ARGV[0];
    END IF;

    IF TG_OP IN ('INSERT', 'UPDATE') THEN
        shown := fence.admitted(new_resource);
        -- A token that this write set, and an older one, is worth its own code. 0, NULL
        -- or what stood there before is a forgotten admit, and proves nothing. It is
        -- admit that refuses and counts, so that only who may admit rings the alarm.
        IF shown IS NULL AND NEW.fencing_token > 0 AND NEW.fencing_token IS DISTINCT FROM OLD.fencing_token
           AND NEW.fencing_token < (SELECT c.token FROM fence.check(new_resource) AS c) THEN
            -- A column of another type is compared all the same.
            PERFORM fence.admit(new_resource, NEW.fencing_token::bigint);
        END IF;
        IF shown IS NULL OR NEW.fencing_token IS DISTINCT FROM shown THEN
            RAISE EXCEPTION 'a guarded row was written without a fencing token of its transaction'
                USING ERRCODE = 'FP428',
                      DETAIL = format('%s of %I.%I, resource "%s": the new row carries token %s, the transaction has admitted %s.',
                                      TG_OP, TG_TABLE_SCHEMA, TG_TABLE_NAME, coalesce(new_resource, 'NULL'),
                                      coalesce(NEW.fencing_token::text, 'NULL'), coalesce(shown::text, 'none')),
                      HINT = 'Start the transaction with SELECT fence.admit(resource, token), and set fencing_token to that token.',
                      SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME;
        END IF;
    END IF;
    IF TG_OP IN ('UPDATE', 'DELETE', 'TRUNCATE') THEN
        shown := fence.admitted(old_resource);
        IF shown IS NULL THEN
            RAISE EXCEPTION 'a guarded row was written without a fencing token of its transaction'
                USING ERRCODE = 'FP428',
                      DETAIL = format('%s of %I.%I, resource "%s": the transaction has admitted none.',
                                      TG_OP, TG_TABLE_SCHEMA, TG_TABLE_NAME, coalesce(old_resource, 'NULL')),
                      HINT = 'Start the transaction with SELECT fence.admit(resource, token).',
                      SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME;
        ELSIF TG_OP <> 'TRUNCATE' AND OLD.fencing_token > shown THEN
            PERFORM fence.count_rejection(old_resource);
            RAISE EXCEPTION 'fencing token is older than the one that the row carries'
                USING ERRCODE = 'FP409',
                      DETAIL = format('%s of %I.%I, resource "%s": the transaction has admitted token %s, the existing row carries token %s.',
                                      TG_OP, TG_TABLE_SCHEMA, TG_TABLE_NAME, old_resource, shown, OLD.fencing_token),
                      HINT = 'Stop working. The row was written past the kit, or before a reset: see fence.reset in the kit on how to mend it.',
                      SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME;
        END IF;
    END IF;
    RETURN NULL;
END $$;

-- Of what is new, nobody but the owner keeps anything: the owner's ALTER DEFAULT
-- PRIVILEGES would let writers lower a token. What was there before keeps what was
-- granted to roles on purpose, but writing to the tables is never one of that.
DO $$
DECLARE
    before CONSTANT text[] := pg_catalog.string_to_array(pg_catalog.current_setting('fence.before', true), ' ');
    command text;
BEGIN
    IF EXISTS (SELECT FROM pg_catalog.pg_class WHERE relnamespace = 'fence'::regnamespace
                  AND pg_catalog.pg_get_userbyid(relowner) <> current_user)
       OR EXISTS (SELECT FROM pg_catalog.pg_proc WHERE pronamespace = 'fence'::regnamespace
                  AND pg_catalog.pg_get_userbyid(proowner) <> current_user) THEN
        RAISE EXCEPTION 'another role has made a part of schema "fence" meanwhile'
            USING ERRCODE = 'insufficient_privilege', HINT = 'Drop what is not yours in it, and install again.';
    END IF;
    FOR command IN
        SELECT pg_catalog.format('REVOKE %s ON %s FROM %s CASCADE', given.privilege_type, made.what,
                                 CASE given.grantee WHEN 0 THEN 'PUBLIC' ELSE given.grantee::regrole::text END)
          FROM (SELECT 'schema', 'SCHEMA fence', nspacl, nspowner
                  FROM pg_catalog.pg_namespace WHERE nspname = 'fence'
                UNION ALL
                SELECT 'c' || oid, 'TABLE ' || oid::regclass, relacl, relowner  -- a sequence may be called one
                  FROM pg_catalog.pg_class WHERE relnamespace = 'fence'::regnamespace AND relkind IN ('r', 'S')
                UNION ALL
                SELECT 'p' || oid, 'FUNCTION ' || oid::regprocedure, proacl, proowner
                  FROM pg_catalog.pg_proc WHERE pronamespace = 'fence'::regnamespace) AS made (id, what, acl, owner),
               pg_catalog.aclexplode(made.acl) AS given
         WHERE given.grantee <> made.owner
           AND (made.id <> ALL (before)
                OR made.id LIKE 'c%' AND given.privilege_type <> 'SELECT')
    LOOP
        EXECUTE command;
    END LOOP;
END $$;

REVOKE ALL ON SCHEMA fence FROM PUBLIC;
REVOKE ALL ON TABLE fence.tokens FROM PUBLIC;
REVOKE ALL ON SEQUENCE fence.rejections FROM PUBLIC;
REVOKE ALL ON FUNCTION fence.admit(text, bigint), fence.reset(text), fence.reset(text, bigint),
    fence.commit_durably() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION fence.check(text), fence.rejected_total(), fence.admitted(text),
    fence.count_rejection(text), fence.guard() TO PUBLIC;

-- Last, because it says that all of the above is in place.
COMMENT ON SCHEMA fence IS 'Fencepost fencing kit, version 1';
