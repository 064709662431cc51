#!/bin/sh
# Runs the runbook's SQL on the schema of the migrations, in a Postgres of its own:
# each query of README.md, and free-lock.sql on leases that it must free and on
# leases that it must leave alone.
set -eu

cd "$(dirname "$0")"
die() { printf 'check-sql: %s\n' "$*" >&2; exit 1; }
bin=$(./setup.sh where) || die 'PostgreSQL is missing: make setup'

tmp=$(mktemp -d)
# Postgres does not run as root. A socket in $tmp is all that it listens on.
as_user() { "$@"; }
if [ "$(id -u)" -eq 0 ]; then
    chown nobody "$tmp"
    as_user() { (cd "$tmp" && setpriv --reuid=nobody --regid="$(id -g nobody)" --clear-groups "$@"); }
fi
clean_up() {
    as_user "$bin/pg_ctl" -D "$tmp/data" -m immediate stop >/dev/null 2>&1 || true
    rm -rf "$tmp"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

as_user "$bin/initdb" -D "$tmp/data" -U fencepost -A trust -E UTF8 --locale=C -N >"$tmp/log" 2>&1 || die "$(cat "$tmp/log")"
as_user "$bin/pg_ctl" -D "$tmp/data" -w -l "$tmp/data/log" \
    -o "-c listen_addresses='' -c unix_socket_directories='$tmp' -c fsync=off" start >"$tmp/log" 2>&1 || die "$(cat "$tmp/log")"

sql() { "$bin/psql" -X -q -A -t -v ON_ERROR_STOP=1 -h "$tmp" -U fencepost "$@" postgres; }
# is WHAT WANTED SQL
is() {
    got=$(sql -c "$3")
    [ "$got" = "$2" ] || die "$1: $got instead of $2"
}
acquire() { sql -c "SELECT fencing_token FROM fencepost.acquire_v1('$1', '$2', '$3', gen_random_uuid(), 60000, '{}')"; }
free() { sql -v resource="$1" -v token="$2" -f free-lock.sql; }

sql -c 'CREATE SCHEMA fencepost'
for migration in ../server/src/store/migrations/*.sql; do
    sql -f "$migration"
done
sql -c 'SELECT fencepost.leap_v1(0, true)' >/dev/null

first=$(acquire job A a1)
[ "$(free job "$first")" ] || die 'a live lease was not freed'
is 'the holder renews' not_found "SELECT outcome FROM fencepost.renew_v1('{job}', '{A}', '{$first}', '{null}', false)"
is 'the holder releases' not_found "SELECT outcome FROM fencepost.release_v1('job', 'A', $first)"
is 'its Acquire comes again' spent "SELECT outcome FROM fencepost.acquire_v1('job', 'A', 'a1', gen_random_uuid(), 60000, '{}')"
[ -z "$(free job "$first")" ] || die 'a lease was freed twice'

second=$(acquire job B b1)
[ "$second" -gt "$first" ] || die "the next token $second is not above $first"
[ -z "$(free job "$first")" ] || die "another holder's lease was freed by the former's token"
is 'the next holder renews' renewed "SELECT outcome FROM fencepost.renew_v1('{job}', '{B}', '{$second}', '{null}', false)"

# The queries of the runbook: between ```sql and ```, those that only read.
awk '/^```sql$/ { on = 1; text = ""; next } /^```$/ { if (on && text ~ /^SELECT/) print text; on = 0 } on { text = text $0 "\n" }' \
    README.md >"$tmp/queries.sql"
sql -f "$tmp/queries.sql" >"$tmp/rows"
grep -q "^job|B|$second|" "$tmp/rows" || die "the runbook's query does not show who holds what"
