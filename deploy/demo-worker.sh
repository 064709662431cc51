#!/bin/sh
# Worker A of the demo, a process of its own: takes the lock, writes with its
# token, then does what it is told on its standard input. Needs FENCEPOST (the
# client), FENCEPOST_ENDPOINT, PSQL and DEMO_DATABASE.
set -eu

# One write of the protected resource: the destination compares the token in
# the same statement. Prints how many rows that changed.
write() {
    "$PSQL" -X -v ON_ERROR_STOP=1 "$DEMO_DATABASE" -c \
        "UPDATE orders SET state = '$1', fencing_token = $token WHERE id = 1 AND fencing_token <= $token" \
        </dev/null
}

grant=$("$FENCEPOST" acquire demo --owner A --ttl 3s --output text </dev/null)
token=$(printf '%s\n' "$grant" | sed -n 's/^fencing_token: *//p')
echo "token $token"
echo "first write: $(write paid)"

while read -r order; do
    case $order in
    renew)
        grant=$("$FENCEPOST" renew demo --owner A --token "$token" --ttl 3s --output text </dev/null)
        echo "renewed: $(printf '%s\n' "$grant" | sed -n 's/^fencing_token: *//p')"
        ;;
    write)
        echo "late write: $(write shipped)"
        ;;
    esac
done
