#!/bin/sh
# Starts fencepostd on its private Postgres, and says how to try it as soon as
# it serves: run.sh BIN_DIR [ARGUMENTS OF fencepostd]
set -eu

bin=$1
shift

address=${FENCEPOST_LISTEN:-127.0.0.1:50051}
before=
for argument do
    case $argument in
    --listen=*) address=${argument#--listen=} ;;
    *) [ "$before" != --listen ] || address=$argument ;;
    esac
    before=$argument
done
export FENCEPOST_ENDPOINT="http://$address"

# A look at a free name: 0 or 1 from a server that answers, anything else is not.
answers() {
    status=0
    "$bin/fencepost" --timeout 500ms get fencepost-ready >/dev/null 2>&1 </dev/null || status=$?
    [ "$status" -le 1 ]
}

say_how_to_try() {
    hint="$bin/fencepost"
    [ "$address" = 127.0.0.1:50051 ] || hint="$hint --endpoint $FENCEPOST_ENDPOINT"
    cat <<HINT

Fencepost serves on $address; ctrl-C stops it. Try, in another terminal:

    $hint acquire demo --ttl 30s
    $hint get demo

HINT
}

case $address in
*:0)
    # The port is known to the server alone: its log line "serving" has it.
    ;;
*)
    if answers; then
        printf 'run: a server answers on %s already\n' "$address" >&2
        exit 1
    fi
    # The server takes over this process, so $$ is its id. The waiter is a
    # grandchild: the server has no child to wait for that it does not know.
    server=$$
    (
        while kill -0 "$server" 2>/dev/null; do
            if answers; then
                say_how_to_try
                break
            fi
            sleep 0.2
        done &
    )
    ;;
esac

unset FENCEPOST_ENDPOINT
printf 'run: starting fencepostd on %s\n' "$address"
exec "$bin/fencepostd" "$@"
