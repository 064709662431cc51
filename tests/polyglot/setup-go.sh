#!/bin/sh
# Tests the Go package and builds its agent, with Debian's Go and its libraries. They come as source under a GOPATH, and nothing else is downloaded.
# The stubs are in the repository, as Go users expect.
set -eu
cd "$(dirname "$0")/../.."

package=github.com/fencepost/fencepost-go
home=$PWD/target/polyglot/go
libraries=/usr/share/gocode
# The last one because grpc's package is content with an older protobuf as well.
packages='golang-go golang-google-grpc-dev golang-google-genproto-dev golang-golang-x-sys-dev golang-google-protobuf-dev golang-github-golang-protobuf-1-5-dev'

missing() {
    command -v go >/dev/null || return 0
    for library in google.golang.org/grpc google.golang.org/genproto google.golang.org/protobuf golang.org/x/sys; do
        [ -d $libraries/src/$library ] || return 0
    done
    return 1
}

install() {
    command -v apt-get >/dev/null || return 1
    if [ "$(id -u)" = 0 ]; then
        root=
    elif sudo -n true 2>/dev/null; then
        root='sudo -n'
    else
        return 1
    fi
    apt="$root env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300"
    # shellcheck disable=SC2086 # lists of words
    { $apt update && $apt install -y --no-install-recommends $packages; } >&2
}

if missing && { ! install || missing; }; then
    echo "setup-go: Go and its gRPC library cannot be had here (Debian: apt-get install $packages)" >&2
    exit 3
fi

# GOPATH wants the package under its name.
mkdir -p "$home/src/${package%/*}"
ln -sfn "$PWD/client/polyglot/go" "$home/src/$package"
export GO111MODULE=off GOFLAGS='' GOPATH="$home:$libraries"
go test "$package" >&2 # quick when nothing has changed
go build -o "$home/agent" tests/polyglot/agents/go/main.go
