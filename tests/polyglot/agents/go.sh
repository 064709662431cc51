#!/bin/sh
# Starts the Go agent, from the root of the repository. setup-go.sh has built it.
exec target/polyglot/go/agent
