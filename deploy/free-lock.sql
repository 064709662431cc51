-- Takes a lease from its holder, as a release does: the row and its token stay, so the next lease
-- has a larger token. Never DELETE the row. Changes nothing when another lease has begun meanwhile.
--
--   psql -X -v ON_ERROR_STOP=1 -v resource=NAME -v token=N -f free-lock.sql postgresql://fencepost@HOST:5432/fencepost
--
-- The password is in ~/.pgpass or the file that PGPASSFILE names: in the URL `ps` would show it.
-- UPDATE 1: freed. UPDATE 0: this lease is over already. No audit log has a line of it: note down
-- what is printed.
BEGIN;
SET LOCAL synchronous_commit = on;
SET LOCAL lock_timeout = '5s';
UPDATE fencepost.locks
   SET released = true, expires_at = clock_timestamp()
 WHERE resource = :'resource' AND fencing_token = :'token'::bigint
   AND NOT released AND expires_at > clock_timestamp()
RETURNING owner, acquired_at, labels;
COMMIT;
