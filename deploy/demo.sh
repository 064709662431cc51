#!/bin/sh
# The reason for fencing tokens, shown with real processes: a holder is frozen
# past the end of its lease, another takes over, and the late write of the first
# one is refused by the database it writes to. Exits 0 only if all was seen.
#
#   demo.sh BIN_DIR
set -eu

bin=$1
here=$(dirname "$0")
# No setting of the caller's may lead the demo to another server.
for name in $(env | sed -n 's/^\(FENCEPOST_[A-Z_]*\)=.*/\1/p'); do unset "$name"; done
unset DATABASE_URL

export FENCEPOST="$bin/fencepost"
PSQL=$("$here/setup.sh" where)/psql
[ -x "$PSQL" ] || PSQL=psql
export PSQL

step=0
step() { step=$((step + 1)); printf '%2d. %s\n' "$step" "$*"; }
seen() { printf '      %s\n' "$*"; }
fail() {
    printf 'demo: FAILED in step %s: %s\n' "$step" "$*" >&2
    for log in "$tmp"/*.log; do
        printf -- '--- last lines of %s\n' "${log##*/}" >&2
        tail -n 15 "$log" >&2
    done
    exit 1
}

# until_true TENTHS COMMAND...: repeats the command for so long.
until_true() {
    tenths=$1
    shift
    while ! "$@"; do
        tenths=$((tenths - 1))
        [ "$tenths" -gt 0 ] || return 1
        sleep 0.1
    done
}

# run COMMAND...: puts what it prints into $out and its exit code into $code.
run() {
    code=0
    out=$("$@" 2>&1 </dev/null) || code=$?
}

field() { printf '%s\n' "$out" | sed -n "s/^$1: *//p"; }
is_number() { case $1 in '' | *[!0-9]*) return 1 ;; esac; }
sql() { "$PSQL" -X -A -t -v ON_ERROR_STOP=1 "$DEMO_DATABASE" -c "$1"; }

# logged MESSAGE FIELD: a field of the server's log line with this message.
logged() {
    sed -n "/\"message\":\"$1\"/s/.*\"$2\":\"\([^\"]*\)\".*/\1/p" "$tmp/server.log" | head -n 1
}

server=
worker=
tmp=$(mktemp -d)
# The private Postgres runs as another user when this is root.
chmod 755 "$tmp"

# Gives the server 30 s to drain, and returns its exit code. A server that had
# to be killed leaves its Postgres running, which is then stopped by itself.
stop_server() {
    [ -n "$server" ] || return 0
    kill -TERM "$server" 2>/dev/null || true
    gone() { ! kill -0 "$server" 2>/dev/null; }
    until_true 300 gone || kill -KILL "$server"
    stopped=0
    wait "$server" || stopped=$?
    server=
    pid_file=$(find "$tmp" -name postmaster.pid)
    if [ -n "$pid_file" ]; then
        stopped=1
        kill -INT "$(head -n 1 "$pid_file")" && until_true 100 test ! -e "$pid_file"
    fi
    return "$stopped"
}

clean_up() {
    status=$?
    trap - EXIT
    trap '' HUP INT TERM
    if [ -n "$worker" ]; then
        kill -KILL "$worker" 2>/dev/null || true
    fi
    stop_server || true
    rm -rf "$tmp"
    exit "$status"
}
trap clean_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# -----------------------------------------------------------------------------

step 'A server of its own on free ports, with a private Postgres, starts'
: >"$tmp/server.log"
"$bin/fencepostd" --data-dir "$tmp/data" --listen 127.0.0.1:0 --http-listen 127.0.0.1:0 \
    --drain-delay 0s --log-format json >"$tmp/server.log" 2>&1 </dev/null &
server=$!
serves() { [ -n "$(logged serving grpc)" ]; }
serves_or_died() { serves || ! kill -0 "$server" 2>/dev/null; }
until_true 300 serves_or_died || fail 'the server was not ready within 30 s'
serves || fail 'the server ended'
address=$(logged serving grpc)
export FENCEPOST_ENDPOINT="http://$address"
DEMO_DATABASE=$(logged 'private postgres ready' url)
export DEMO_DATABASE
seen "fencepostd serves on $address"
sql "CREATE TABLE orders (id int PRIMARY KEY, state text, fencing_token bigint NOT NULL DEFAULT 0);
     INSERT INTO orders VALUES (1, 'new')" >/dev/null || fail 'no table to protect'
seen 'a table to protect: orders (id, state, fencing_token)'

# The worker's standard input is its queue of orders. It is one process while it
# waits for one, so stopping that process freezes the whole worker.
step 'Worker A acquires the lock "demo" for 3 s and writes with its token'
mkfifo "$tmp/orders"
"$here/demo-worker.sh" <"$tmp/orders" >"$tmp/worker-a.log" 2>&1 &
worker=$!
exec 3>"$tmp/orders"
a_said() { grep -q "^$1" "$tmp/worker-a.log"; }
until_true 50 a_said 'first write: UPDATE 1' || fail 'A did not write'
a_token=$(sed -n 's/^token //p' "$tmp/worker-a.log")
is_number "$a_token" || fail "A's token is not a number: $a_token"
seen "A holds fencing token $a_token; UPDATE 1, the order is $(sql 'SELECT state FROM orders')"

step 'Worker B wants the lock too, is refused and told who has it'
run "$FENCEPOST" acquire demo --owner B --ttl 3s --output text
[ "$code" -eq 75 ] || fail "exit code $code instead of 75: $out"
printf '%s\n' "$out" | grep -q 'owner: *A$' || fail "the holder's name is missing: $out"
seen "exit code 75, held by A, $(field '.*remaining') left"

step 'A renews: the same token, 3 s from now'
echo renew >&3
until_true 50 a_said "renewed: $a_token\$" || fail 'A did not renew'
seen "A still holds fencing token $a_token"

step 'A is frozen with SIGSTOP, its next write already on its way'
kill -STOP "$worker"
echo write >&3
run "$FENCEPOST" acquire demo --owner B --ttl 3s --output text
[ "$code" -eq 75 ] || fail "the lease ended with the freeze: exit code $code, $out"
seen 'B is still refused: a lease outlives the pulse of its holder'

step 'The lease ends'
is_free() { run "$FENCEPOST" get demo --output text; [ "$code" -eq 1 ]; }
until_true 100 is_free || fail "still held after 10 s: exit code $code, $out"
seen 'the lock is free, and A has not been told'

step 'B acquires the lock, with a larger token, and writes'
run "$FENCEPOST" acquire demo --owner B --ttl 30s --output text
[ "$code" -eq 0 ] || fail "exit code $code: $out"
b_token=$(field fencing_token)
is_number "$b_token" || fail "B's token is not a number: $out"
[ "$b_token" -gt "$a_token" ] || fail "B's token $b_token is not above A's $a_token"
run sql "UPDATE orders SET state = 'cancelled', fencing_token = $b_token WHERE id = 1 AND fencing_token <= $b_token"
[ "$out" = 'UPDATE 1' ] || fail "B's write: $out"
seen "B holds fencing token $b_token; UPDATE 1, the order is cancelled"

step 'A wakes up (SIGCONT) and writes, sure that it still holds the lock'
! a_said 'late write' || fail 'A was not frozen'
kill -CONT "$worker"
until_true 50 a_said 'late write: ' || fail 'A never wrote'
a_said 'late write: UPDATE 0$' || fail "A's late write was let in"
seen 'UPDATE 0: the table has seen a newer token, and refuses'
row=$(sql 'SELECT state, fencing_token FROM orders')
[ "$row" = "cancelled|$b_token" ] || fail "the row is $row"
seen "the order is still cancelled, by token $b_token"

step 'Everything is stopped and removed'
exec 3>&-
wait "$worker" || fail "A ended with exit code $?"
worker=
stop_server || fail "the server ended with exit code $?"
seen 'the server drained and exited 0'

printf '\nAll seen: two workers believed that they held the lock, and only the newer one could write.\n'
