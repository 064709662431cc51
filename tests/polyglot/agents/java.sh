#!/bin/sh
# The Java agent; tests/polyglot/setup-java.sh has compiled it.
exec java -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -cp "$(cat target/polyglot/java/classpath)" fencepost.polyglot.Agent
