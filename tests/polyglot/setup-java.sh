#!/bin/sh
# Installs what the Java helper, its test and its agent need, from the distribution, generates the stubs and
# compiles, into target/polyglot/java. Quick when nothing is to do; exits 3 when it cannot be had.
set -eu

cd "$(dirname "$0")/../.."
out=target/polyglot/java
jars=/usr/share/java
helper=client/polyglot/java/src
agent=tests/polyglot/agents/java
packages="openjdk-17-jdk-headless libgrpc-java libprotobuf-java protobuf-compiler protobuf-compiler-grpc-java-plugin
  libgoogle-common-protos-java libnetty-java libperfmark-java libguava-java libgoogle-gson-java
  libgeronimo-annotation-1.3-spec-java"

cannot() {
  echo "setup-java: $1" >&2
  exit 3
}

missing() {
  command -v dpkg-query >/dev/null || cannot "needs Debian's packages: no dpkg here"
  for package in $packages; do
    # A later JDK will do as well.
    [ "${package#openjdk}" = "$package" ] || ! command -v javac >/dev/null || continue
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || echo "$package"
  done
}

want=$(missing)
if [ -n "$want" ]; then
  root=
  [ "$(id -u)" = 0 ] || root="sudo -n"
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  # shellcheck disable=SC2086 # lists of words
  { $root apt-get update && $root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $want; } >"$log" 2>&1 ||
    cannot "cannot install $(echo "$want" | tr '\n' ' '): $(tail -n 1 "$log")"
fi

# The compiler's output is as new as the newest of what it is made from.
stamp=$out/stamp
if [ -e "$stamp" ] && [ -z "$(find proto $helper $agent "$0" -type f -newer "$stamp")" ]; then
  exit 0
fi

classpath=$out/classes
for jar in grpc-api grpc-context grpc-core grpc-stub grpc-protobuf grpc-protobuf-lite grpc-netty protobuf protobuf-util \
  proto-google-common-protos guava gson perfmark-api netty-buffer netty-codec netty-codec-http netty-codec-http2 \
  netty-codec-socks netty-common netty-handler netty-handler-proxy netty-resolver netty-transport \
  netty-transport-native-unix-common geronimo-annotation-1.3-spec; do
  [ -e "$jars/$jar.jar" ] || cannot "no $jars/$jar.jar, though its package is installed"
  classpath=$classpath:$jars/$jar.jar
done

rm -rf "$out"
mkdir -p "$out/stubs" "$out/classes"
protoc -I proto --java_out="$out/stubs" --plugin=protoc-gen-grpc-java="$(command -v grpc_java_plugin)" \
  --grpc-java_out="$out/stubs" proto/fencepost/v1/lock_service.proto
# The distribution's google.rpc may be from before ErrorInfo.
if ! jar tf "$jars/proto-google-common-protos.jar" com/google/rpc/ErrorInfo.class | grep -q .; then
  protoc -I "$agent" --java_out="$out/stubs" error_info.proto
fi
find "$out/stubs" $helper $agent -name '*.java' >"$out/sources"
javac -nowarn -d "$out/classes" -cp "$classpath" "@$out/sources"
echo "$classpath" >"$out/classpath"
touch "$stamp"
