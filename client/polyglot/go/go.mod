module github.com/fencepost/fencepost-go

go 1.25.0

require (
	golang.org/x/sys v0.45.0
	google.golang.org/genproto/googleapis/rpc v0.0.0-20260526163538-3dc84a4a5aaa
	google.golang.org/grpc v1.83.1
	google.golang.org/protobuf v1.36.11
)
