#!/bin/sh
# The Java client against servers made up for it. Run from anywhere, after setup-java.sh.
set -eu
cd "$(dirname "$0")/../.."
exec java -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -cp "$(cat target/polyglot/java/classpath)" fencepost.LockClientTest
