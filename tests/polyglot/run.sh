#!/bin/sh
# Sets up each language, runs the tests of its own, and the scenario, in those that can be had here:
# run.sh [LANGUAGE...]. Python and Node can be had wherever the registries are.
set -eu
cd "$(dirname "$0")/../.."

[ $# -gt 0 ] || set -- python node go java
ready=rust
for language do
    status=0
    sh "tests/polyglot/setup-$language.sh" </dev/null || status=$?
    case $status:$language in
    0:*)
        ready="$ready $language"
        [ ! -e "tests/polyglot/test-$language.sh" ] || sh "tests/polyglot/test-$language.sh" </dev/null
        ;;
    3:go | 3:java) echo "not to be had here: $language" >&2 ;;
    *) echo "the set-up of $language has failed" >&2 && exit 1 ;;
    esac
done
cargo build --workspace --bins
POLYGLOT=$ready cargo test --test polyglot
