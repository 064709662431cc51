#!/bin/sh
# The agent for Node.js: what tests/polyglot/README.md describes. Run from the root, after setup-node.sh.
set -eu
PATH=$PWD/target/polyglot/node/bin:$PATH
exec node tests/polyglot/agents/node/agent.mjs
