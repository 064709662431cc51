#!/bin/sh
# Makes the secrets of compose.yaml, with a new password, unless they are there.
set -eu

cd "$(dirname "$0")"
[ ! -e secrets ] || { echo 'compose-secrets: deploy/secrets is there already' >&2; exit 0; }

# The containers' users must be able to read the files; the folder keeps others out.
mkdir -m 700 secrets
password=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
printf '%s' "$password" >secrets/postgres-password
printf 'postgresql://fencepost:%s@postgres:5432/fencepost\n' "$password" >secrets/database-url
chmod 444 secrets/*
