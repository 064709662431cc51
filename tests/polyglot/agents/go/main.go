// The agent of tests/polyglot/README.md over the Go package.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/fencepost/fencepost-go"
	pb "github.com/fencepost/fencepost-go/fencepostv1"
)

type command struct {
	Do        string          `json:"do"`
	As        string          `json:"as"`
	Endpoints []string        `json:"endpoints"`
	Resource  string          `json:"resource"`
	Owner     string          `json:"owner"`
	RequestID string          `json:"request_id"`
	TTL       int64           `json:"ttl_ms"`
	Wait      int64           `json:"wait_ms"`
	Within    int64           `json:"within_ms"`
	Count     int             `json:"count"`
	RPC       string          `json:"rpc"`
	Request   json.RawMessage `json:"request"`
}

type answer map[string]interface{}

// work goes on until its context is done.
type work struct {
	stop  context.CancelFunc
	ended chan struct{} // closed when the work has ended, and the lock has been released
	state string        // from then on
}

type agent struct {
	client *fencepost.Client
	leases map[string]*fencepost.Lease
	many   map[string][]*fencepost.Lease
	works  map[string]*work
}

func main() {
	a := &agent{leases: map[string]*fencepost.Lease{}, many: map[string][]*fencepost.Lease{}, works: map[string]*work{}}
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(nil, 1<<20)
	out := json.NewEncoder(os.Stdout)
	for in.Scan() {
		var c command
		if err := json.Unmarshal(in.Bytes(), &c); err != nil {
			log.Fatal(err)
		}
		if err := out.Encode(a.do(context.Background(), c)); err != nil {
			log.Fatal(err)
		}
	}
}

func (a *agent) do(ctx context.Context, c command) answer {
	within := time.After(time.Duration(c.Within) * time.Millisecond)
	options := fencepost.Options{
		TTL:       time.Duration(c.TTL) * time.Millisecond,
		Wait:      time.Duration(c.Wait) * time.Millisecond,
		Owner:     c.Owner,
		RequestID: c.RequestID,
	}
	switch c.Do {
	case "connect":
		if a.client != nil {
			a.client.Close()
		}
		var err error
		if a.client, err = fencepost.Dial(c.Endpoints); err != nil {
			return failure(err)
		}
		return answer{}
	case "acquire":
		lease, err := a.client.Acquire(ctx, c.Resource, options)
		if err != nil {
			return failure(err)
		}
		a.leases[c.As] = lease
		return answer{"outcome": "acquired", "token": lease.FencingToken, "owner": lease.Owner}
	case "acquire_many":
		leases := each(c.Count, func(i int) *fencepost.Lease {
			lease, err := a.client.Acquire(ctx, fmt.Sprintf("%s-%d", c.Resource, i), options)
			if err != nil {
				log.Print(err)
			}
			return lease
		})
		a.many[c.As] = leases
		return answer{"acquired": count(leases, func(l *fencepost.Lease) bool { return l != nil })}
	case "check":
		lease := a.leases[c.As]
		if err := lease.Err(); err != nil {
			return answer{"held": false, "remaining_ms": 0, "reason": reason(err)}
		}
		return answer{"held": true, "remaining_ms": lease.Remaining().Milliseconds()}
	case "check_many":
		return answer{"held": count(a.many[c.As], func(l *fencepost.Lease) bool { return l != nil && l.Err() == nil })}
	case "wait_lost":
		lease := a.leases[c.As]
		select {
		case <-lease.Context().Done():
			return answer{"lost": true, "reason": reason(lease.Err())}
		case <-within:
			return answer{"lost": false}
		}
	case "release":
		if err := a.leases[c.As].Release(ctx); err != nil {
			return failure(err)
		}
		return answer{"outcome": "released"}
	case "release_many":
		leases := a.many[c.As]
		released := each(len(leases), func(i int) bool { return leases[i] != nil && leases[i].Release(ctx) == nil })
		return answer{"released": count(released, func(ok bool) bool { return ok })}
	case "work":
		return a.work(ctx, c, options)
	case "work_state":
		w := a.works[c.As]
		select {
		case <-w.ended:
			return answer{"state": w.state}
		case <-within:
			return answer{"state": "running"}
		}
	case "stop_work":
		w := a.works[c.As]
		w.stop()
		<-w.ended
		return answer{"state": w.state}
	case "call":
		return a.call(ctx, c)
	}
	return answer{"error": "unknown: " + c.Do}
}

func (a *agent) work(ctx context.Context, c command, options fencepost.Options) answer {
	ctx, stop := context.WithCancel(ctx)
	w := &work{stop: stop, ended: make(chan struct{}), state: "ended"}
	a.works[c.As] = w
	begun := make(chan answer, 1)
	go func() {
		defer close(w.ended)
		err := a.client.With(ctx, c.Resource, options, func(ctx context.Context, lease *fencepost.Lease) error {
			begun <- answer{"token": lease.FencingToken}
			<-ctx.Done()
			if lost := (*fencepost.Lost)(nil); errors.As(lease.Err(), &lost) {
				w.state = "stopped"
			}
			return ctx.Err()
		})
		select {
		case begun <- failure(err):
		default:
		}
	}()
	return <-begun
}

// call makes a bare call, one that a server may refuse.
func (a *agent) call(ctx context.Context, c command) answer {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var request, response proto.Message
	var send func() error
	stub := a.client.Calls()[0]
	switch c.RPC {
	case "Acquire":
		r := &pb.AcquireRequest{}
		request, send = r, func() (err error) { response, err = stub.Acquire(ctx, r); return }
	case "Renew":
		r := &pb.RenewRequest{}
		request, send = r, func() (err error) { response, err = stub.Renew(ctx, r); return }
	case "Release":
		r := &pb.ReleaseRequest{}
		request, send = r, func() (err error) { response, err = stub.Release(ctx, r); return }
	case "Get":
		r := &pb.GetRequest{}
		request, send = r, func() (err error) { response, err = stub.Get(ctx, r); return }
	}
	if err := protojson.Unmarshal(c.Request, request); err != nil {
		return answer{"error": err.Error()}
	}
	if err := send(); err != nil {
		return refusal(status.Convert(err))
	}
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(response)
	if err != nil {
		return answer{"error": err.Error()}
	}
	return answer{"code": "OK", "response": json.RawMessage(text)}
}

// refusal tells the code by its name in the specification, which Go's own names are not.
func refusal(s *status.Status) answer {
	names := map[codes.Code]string{
		codes.Canceled: "CANCELLED", codes.Unknown: "UNKNOWN", codes.InvalidArgument: "INVALID_ARGUMENT",
		codes.DeadlineExceeded: "DEADLINE_EXCEEDED", codes.NotFound: "NOT_FOUND", codes.AlreadyExists: "ALREADY_EXISTS",
		codes.PermissionDenied: "PERMISSION_DENIED", codes.ResourceExhausted: "RESOURCE_EXHAUSTED",
		codes.FailedPrecondition: "FAILED_PRECONDITION", codes.Aborted: "ABORTED", codes.OutOfRange: "OUT_OF_RANGE",
		codes.Unimplemented: "UNIMPLEMENTED", codes.Internal: "INTERNAL", codes.Unavailable: "UNAVAILABLE",
		codes.DataLoss: "DATA_LOSS", codes.Unauthenticated: "UNAUTHENTICATED",
	}
	a := answer{"code": names[s.Code()], "reason": nil, "fields": []string{}}
	for _, detail := range s.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.Domain == "fencepost" {
				a["reason"] = detail.Reason
			}
		case *errdetails.BadRequest:
			fields := []string{}
			for _, violation := range detail.FieldViolations {
				fields = append(fields, violation.Field)
			}
			a["fields"] = fields
		}
	}
	return a
}

func failure(err error) answer {
	var refused *fencepost.Refused
	var lost *fencepost.Lost
	var invalid *fencepost.Invalid
	switch {
	case errors.As(err, &refused):
		remaining := refused.Holder.GetRemaining().AsDuration().Milliseconds()
		return answer{"outcome": "refused", "holder": refused.Holder.GetOwner(), "remaining_ms": remaining}
	case errors.As(err, &lost):
		return answer{"outcome": "lost", "reason": lost.Reason}
	case errors.As(err, &invalid):
		return answer{"outcome": "invalid", "fields": invalid.Fields}
	case errors.Is(err, fencepost.ErrSpent):
		return answer{"outcome": "spent"}
	}
	log.Print(err)
	return answer{"outcome": "unavailable"}
}

func reason(err error) string {
	var lost *fencepost.Lost
	if errors.As(err, &lost) {
		return lost.Reason
	}
	return fmt.Sprint(err)
}

// each does n things at once.
func each[T any](n int, do func(int) T) []T {
	results := make([]T, n)
	var all sync.WaitGroup
	for i := range results {
		all.Add(1)
		go func(i int) {
			defer all.Done()
			results[i] = do(i)
		}(i)
	}
	all.Wait()
	return results
}

func count[T any](all []T, is func(T) bool) (n int) {
	for _, one := range all {
		if is(one) {
			n++
		}
	}
	return n
}
