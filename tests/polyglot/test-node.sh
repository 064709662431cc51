#!/bin/sh
# The Node.js client against servers made up for it. Run from anywhere, after setup-node.sh.
set -eu
cd "$(dirname "$0")/../.."
PATH=$PWD/target/polyglot/node/bin:$PATH
exec npm test --prefix client/polyglot/node --silent
