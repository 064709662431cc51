#!/bin/sh
# The Python agent; tests/polyglot/setup-python.sh comes first.
exec target/polyglot/python/bin/python tests/polyglot/agents/python/agent.py
