#!/bin/sh
# Installs the Python package, as it is here, with its libraries into
# target/polyglot/python, and runs its own tests. Run from the repository's
# root. Quick when nothing is to do; exits 3 when this machine has no Python.
set -eu

venv=target/polyglot/python
package=client/polyglot/python

cannot() {
    echo "setup-python: $1" >&2
    exit 3
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

# What the package is made of; checksums, since times change with every checkout.
made_of() {
    cat "$package"/*.py "$package"/*.toml "$package"/*.in "$package"/src/fencepost/*.py \
        "$package"/tests/*.py proto/fencepost/v1/*.proto tests/polyglot/setup-python.sh | cksum
}

if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.made_of" 2>/dev/null)" = "$(made_of)" ]; then
    exit 0
fi

usable() {
    python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 9))' 2>/dev/null
}
if ! usable && command -v apt-get >/dev/null; then
    { as_root apt-get update -q && as_root apt-get install -qy python3 python3-venv; } >&2 ||
        echo "setup-python: apt-get failed" >&2
fi
usable || cannot "Python 3.9 or later with venv is missing (Debian: apt-get install python3-venv)"

rm -rf "$venv"
python3 -m venv "$venv" || cannot "python3 -m venv failed"
"$venv/bin/pip" install -q --disable-pip-version-check "./$package" >&2 ||
    cannot "pip cannot install the package and its libraries"
"$venv/bin/python" -m unittest discover -q -s "$package/tests" >&2
made_of >"$venv/.made_of"
