#!/bin/sh
# Makes fencepostv1/ from the contract, with protoc, protoc-gen-go and protoc-gen-go-grpc. What old ones make compiles with
# new runtimes, and not the other way round.
set -eu
cd "$(dirname "$0")"

module=github.com/fencepost/fencepost-go
contract=fencepost/v1/lock_service.proto
exec protoc -I ../../../proto \
    --go_out=. --go_opt=module=$module,M$contract=$module/fencepostv1 \
    --go-grpc_out=. --go-grpc_opt=module=$module,M$contract=$module/fencepostv1 \
    $contract
