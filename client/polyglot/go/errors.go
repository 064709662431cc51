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

// Unconfirmed is the reason of a loss that no server told: nothing was confirmed before the holder's own deadline.
const Unconfirmed = "UNCONFIRMED"

// Closed is the reason of a loss that [Client.Close] made.
const Closed = "CLOSED"

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

// Unavailable says that no server could do it now. It may have happened all the same.
type Unavailable struct{ Cause error }

func (e *Refused) Error() string     { return "fencepost: held by " + e.Holder.GetOwner() }
func (e *Lost) Error() string        { return "fencepost: the lease is lost: " + e.Reason }
func (e *Invalid) Error() string     { return "fencepost: invalid: " + strings.Join(e.Fields, ", ") }
func (e *Unavailable) Error() string { return "fencepost: not available: " + e.Cause.Error() }

// lostWork is the error of work that lost its lease. [errors.Is] and [errors.As] find the loss first, and then the work's.
type lostWork struct{ lost, work error }

func (e *lostWork) Error() string              { return e.lost.Error() + " (the work: " + e.work.Error() + ")" }
func (e *lostWork) Is(target error) bool       { return errors.Is(e.lost, target) }
func (e *lostWork) As(target interface{}) bool { return errors.As(e.lost, target) }
func (e *lostWork) Unwrap() error              { return e.work }

// Unwrap gives the gRPC status.
func (e *Unavailable) Unwrap() error { return e.Cause }

// meaning of a call's error: one of the above, or what is not worth repeating (a bug of the server, or no Fencepost).
// Only a reason of our domain ends a lease, for a proxy may make up any code.
func meaning(err error) error {
	var reason string
	var fields []string
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
		}
	}
	switch reason {
	case "LOCK_NOT_FOUND", "LOCK_EXPIRED", "NOT_OWNER", "TOKEN_SUPERSEDED", "TOKEN_UNKNOWN":
		return &Lost{reason}
	case "REQUEST_SPENT":
		return ErrSpent
	case "INVALID_REQUEST":
		return &Invalid{fields}
	case "INTERNAL":
		return err
	}
	switch status.Code(err) {
	case codes.OK, codes.InvalidArgument, codes.Unimplemented, codes.Unauthenticated:
		return err
	}
	return &Unavailable{err}
}

// retryDelay is how long the server asks to wait.
func retryDelay(err error) (delay time.Duration) {
	if unavailable, is := err.(*Unavailable); is {
		for _, detail := range status.Convert(unavailable.Cause).Details() {
			if info, is := detail.(*errdetails.RetryInfo); is {
				delay = longer(delay, info.GetRetryDelay().AsDuration())
			}
		}
	}
	return delay
}

// isStrange tells a status that no repetition mends, though another server may.
func isStrange(err error) bool {
	_, is := status.FromError(err)
	return is && err != nil
}

func isUnavailable(err error) bool {
	_, is := err.(*Unavailable)
	return is
}
