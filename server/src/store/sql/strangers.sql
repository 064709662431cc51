-- What of the schema belongs to a role that is not trusted: whoever owns it could
-- put code of their own into it, which we would run with our rights. Trusted are
-- the role that connects and those it was made a member of (a superuser counts as
-- a member of all, hence not pg_has_role), superusers and the database's owner.
WITH RECURSIVE mine (role) AS (
    SELECT oid FROM pg_roles WHERE rolname = current_user
    UNION
    SELECT m.roleid FROM pg_auth_members AS m JOIN mine ON m.member = mine.role
), ours (what, owner) AS (
    SELECT 'schema ' || nspname, nspowner FROM pg_namespace WHERE nspname = 'fencepost'
    UNION ALL
    SELECT 'relation ' || c.relname, c.relowner
      FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE n.nspname = 'fencepost'
    UNION ALL
    SELECT 'function ' || f.proname, f.proowner
      FROM pg_proc AS f JOIN pg_namespace AS n ON n.oid = f.pronamespace WHERE n.nspname = 'fencepost'
)
SELECT format('%s is owned by %I', ours.what, r.rolname)
  FROM ours JOIN pg_roles AS r ON r.oid = ours.owner
 WHERE NOT r.rolsuper
   AND r.rolname <> 'pg_database_owner'
   AND r.oid NOT IN (SELECT role FROM mine)
   AND r.oid NOT IN (SELECT datdba FROM pg_database WHERE datname = current_database())
 LIMIT 1
