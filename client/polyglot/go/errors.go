package fencepost

import (
	"errors"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/fencepost/fencepost-go/fencepostv1"
)

// Reasons of a loss that no server told.
const (
	Unconfirmed = "UNCONFIRMED" // nothing was confirmed before the holder's own deadline
	Closed      = "CLOSED"      // by [Client.Close]
)

var (
	// ErrSpent says that the caller's RequestID was used before, and what it got was renewed or is over.
	ErrSpent = errors.New("fencepost: this request id is spent: use a new one")
	// ErrClosed says that the client is closed.
	ErrClosed = errors.New("fencepost: the client is closed")
	// ErrReleased is what [Lease.Err] says of a lease that was released.
	ErrReleased = errors.New("fencepost: the lease was released")
)

// Refused says who has the lock.
type Refused struct{ Holder *pb.Holder }

// Lost says that the lease is over: stop. Reason is the contract's, such as LOCK_EXPIRED, or [Unconfirmed], or [Closed].
type Lost struct{ Reason string }

// Invalid names the fields that the server does not take.
type Invalid struct{ Fields []string }

// Unavailable says that no server could do it now; it may have happened all the same. Final ones are not worth
// repeating: a bug of the server, or no Fencepost server.
type Unavailable struct {
	Cause error
	Final bool
	delay time.Duration // for how long the server wants to be left alone
}

func (e *Refused) Error() string     { return "fencepost: held by " + e.Holder.GetOwner() }
func (e *Lost) Error() string        { return "fencepost: the lease is lost: " + e.Reason }
func (e *Invalid) Error() string     { return "fencepost: invalid: " + strings.Join(e.Fields, ", ") }
func (e *Unavailable) Error() string { return "fencepost: not available: " + e.Cause.Error() }

// Unwrap gives the gRPC status.
func (e *Unavailable) Unwrap() error { return e.Cause }

// meaning of a call's error: nil, or one of the above. Only a reason of our domain ends a lease, for a proxy may make up
// any code.
func meaning(err error) error {
	if err == nil {
		return nil
	}
	var reason string
	var fields []string
	unavailable := &Unavailable{Cause: err}
	for _, detail := range status.Convert(err).Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.Domain == "fencepost" {
				reason = detail.Reason
			}
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				fields = append(fields, violation.Field)
			}
		case *errdetails.RetryInfo:
			unavailable.delay = detail.RetryDelay.AsDuration()
		}
	}
	switch reason {
	case "LOCK_NOT_FOUND", "LOCK_EXPIRED", "NOT_OWNER", "TOKEN_SUPERSEDED", "TOKEN_UNKNOWN":
		return &Lost{reason}
	case "REQUEST_SPENT":
		return ErrSpent
	case "INVALID_REQUEST":
		return &Invalid{fields}
	}
	switch status.Code(err) {
	case codes.InvalidArgument, codes.Unimplemented, codes.Unauthenticated:
		unavailable.Final = true
	}
	unavailable.Final = unavailable.Final || reason == "INTERNAL"
	return unavailable
}

func isUnavailable(err error) bool {
	_, is := err.(*Unavailable)
	return is
}
