// Package fencepost takes locks of a Fencepost server, keeps them, and stops the work when one is lost.
//
// A lock is a lease: it can be lost at any time. Only a resource that compares the fencing token with every write is
// safe from a holder that does not know yet; the README has such a write.
package fencepost

//go:generate ./generate.sh

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/fencepost/fencepost-go/fencepostv1"
)

const callTime = 5 * time.Second // for a call, with all its tries

// Client talks to the replicas of one Fencepost. Many goroutines may use it at once.
type Client struct {
	conns                []*grpc.ClientConn
	calls, streams       []pb.LockServiceClient // cancelled calls disturb no stream: connections of their own
	nextCall, nextStream atomic.Int32           // whose turn it is
	mu                   sync.Mutex
	leases               map[*Lease]struct{} // also those being acquired, or given back; nil once closed
}

// Options of an acquisition.
type Options struct {
	TTL       time.Duration     // how long the lease lasts without a renewal; required
	Wait      time.Duration     // for how long to try, in all; 0 or less: once
	Owner     string            // names ONE holder; "": <host>-<pid>-<random>
	RequestID string            // of this acquisition; "": a random one
	Labels    map[string]string // shown to those who are refused
}

// Dial makes a client for the endpoints ("host:port" or "http://host:port") of one Fencepost, and connects in the
// background. Without options there is no TLS; for a server with TLS, and with any other options, pass
// grpc.WithTransportCredentials as well.
func Dial(endpoints []string, opts ...grpc.DialOption) (*Client, error) {
	if len(endpoints) == 0 {
		return nil, errors.New("fencepost: no endpoints")
	}
	if len(opts) == 0 {
		opts = append(opts, grpc.WithInsecure()) //nolint:staticcheck // old releases have no insecure.NewCredentials
	}
	opts = append([]grpc.DialOption{
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 3 * time.Second}),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: 2 * time.Second, Backoff: backoff.Config{
			BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.5, MaxDelay: time.Second}}),
	}, opts...)
	c := &Client{leases: map[*Lease]struct{}{}}
	for _, stubs := range []*[]pb.LockServiceClient{&c.calls, &c.streams} {
		for _, endpoint := range endpoints {
			conn, err := grpc.Dial(strings.TrimPrefix(endpoint, "http://"), opts...) //nolint:staticcheck // old releases have no NewClient
			if err != nil {
				c.Close()
				return nil, fmt.Errorf("fencepost: %s: %w", endpoint, err)
			}
			c.conns, *stubs = append(c.conns, conn), append(*stubs, pb.NewLockServiceClient(conn))
		}
	}
	return c, nil
}

// Calls are the contract's own calls, at each endpoint.
func (c *Client) Calls() []pb.LockServiceClient { return c.calls }

// Close disconnects, and waits some seconds at most for what is being given back. Release the leases first: those that
// are left are lost ([Closed]), and given back though their work may not have stopped. Acquisitions end with [ErrClosed].
func (c *Client) Close() {
	c.mu.Lock()
	leases := c.leases
	c.leases = nil
	c.mu.Unlock()
	for lease := range leases {
		lease.end(&Lost{Closed}) // whoever still works has to know before the lock is free
	}
	var returning sync.WaitGroup
	for lease := range leases {
		returning.Add(1)
		go func(lease *Lease) {
			defer returning.Done()
			lease.giveBack(context.Background(), lease.Err())
		}(lease)
	}
	returning.Wait()
	for _, conn := range c.conns {
		conn.Close()
	}
}

// Acquire takes the lock and keeps it until [Lease.Release]. When the context is done the acquisition ends, and later
// the work (see [Lease.Context]); the lease does not, for the work may not have stopped yet.
//
// The error is *[Refused], *[Invalid], *[Unavailable], [ErrSpent], [ErrClosed] or the context's.
func (c *Client) Acquire(ctx context.Context, resource string, o Options) (*Lease, error) {
	if err := ctx.Err(); err != nil {
		return nil, err // else what was never asked for would have to be given back
	}
	l := &Lease{Resource: resource, Owner: o.Owner, client: c, ownID: o.RequestID == "", own: o.Owner == "" && o.RequestID == ""}
	if o.Owner == "" {
		host, _ := os.Hostname()
		l.Owner = fmt.Sprintf("%.50s-%d-%x", host, os.Getpid(), random(6))
	}
	l.request = &pb.AcquireRequest{
		Resource: resource, Owner: l.Owner, Ttl: durationpb.New(o.TTL), Labels: o.Labels, RequestId: o.RequestID}
	if l.ownID {
		l.request.RequestId = fmt.Sprintf("%x", random(16))
	}
	for _, text := range [][2]string{{"resource", resource}, {"owner", o.Owner}, {"request_id", o.RequestID}} {
		if !utf8.ValidString(text[1]) { // gRPC takes that for a failure that may pass
			return nil, &Invalid{text[:1]}
		}
	}
	work, stopWork := context.WithCancel(ctx)
	keeping, stopKeeping := context.WithCancel(context.Background())
	l.work, l.keeping, l.stop = work, keeping, func() { stopKeeping(); stopWork() }
	l.asking.Lock() // whoever wants to give it back waits
	defer l.asking.Unlock()
	c.mu.Lock()
	open := c.leases != nil
	if open {
		c.leases[l] = struct{}{}
	}
	c.mu.Unlock()
	if !open {
		l.stop()
		return nil, ErrClosed
	}

	budget := o.Wait
	if o.Wait <= 0 {
		budget = callTime
	}
	err := c.repeat(work, budget, o.Wait > 0, l.acquire)
	if lost, is := l.Err().(*Lost); is && lost.Reason == Closed {
		err = ErrClosed
	} else if err != nil && ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil {
		go l.Release(context.Background()) // also what may have been granted without an answer
		return nil, err
	}
	go l.renew()
	go l.stream(0, func() {})
	return l, nil
}

// With works while it holds the lock, and releases on the way out, also from a panic. The work's context is done when
// the lease is lost: return then. The error is that of [Client.Acquire], *[Lost] (which names the work's), or the work's.
func (c *Client) With(ctx context.Context, resource string, o Options, work func(context.Context, *Lease) error) (
	err error) {
	lease, err := c.Acquire(ctx, resource, o)
	if err != nil {
		return err
	}
	defer func() {
		var lost *Lost
		if released := lease.Release(ctx); errors.As(released, &lost) { // other failures leave the lease to its deadline
			if err != nil {
				released = fmt.Errorf("%w (the work: %v)", lost, err)
			}
			err = released
		}
	}()
	return work(lease.Context(), lease)
}

// call asks the server whose turn it is. When that fails, it is the next one's. It tells when the request was sent.
func call[Q, A any](ctx context.Context, c *Client, limit time.Duration,
	rpc func(pb.LockServiceClient, context.Context, Q, ...grpc.CallOption) (A, error), request Q,
) (answer A, sent time.Duration, err error) {
	turn, n := c.nextCall.Load(), len(c.calls)
	// A server that hangs does not use up the others' time.
	ctx, cancel := context.WithTimeout(ctx, shorter(limit, callTime)/time.Duration(n))
	defer cancel()
	sent = now()
	answer, err = rpc(c.calls[turn], ctx, request)
	if _, release := any(answer).(*pb.ReleaseResponse); err == nil && !release && proto.Size(any(answer).(proto.Message)) == 0 {
		err = errors.New("an answer that says nothing")
	}
	if err = meaning(err); isUnavailable(err) {
		c.nextCall.CompareAndSwap(turn, (turn+1)%int32(n))
	}
	return answer, sent, err
}

// repeat asks until there is an answer, or the time is over. Refused is an answer unless it is to wait. What is final is
// not repeated once all servers have said so: one may be no Fencepost at all, such as a proxy's default.
func (c *Client) repeat(ctx context.Context, budget time.Duration, wait bool, ask func(context.Context, time.Duration) error) error {
	end, n, final, holder := now()+budget, len(c.calls), 0, ""
	var refusal error
	for tries := 1; ; tries++ {
		left := end - now()
		err := ask(ctx, left)
		var rest time.Duration
		switch why := err.(type) {
		case *Refused:
			if !wait {
				return err
			}
			if owner := why.Holder.GetOwner(); owner != holder {
				tries, holder = 1, owner // where it goes round, nobody sleeps for long
			}
			refusal = err
			// Then it is free, or was renewed.
			rest = shorter(pause(tries, err), why.Holder.GetRemaining().AsDuration()+part(20*time.Millisecond))
		case *Unavailable:
			if tries%n == 0 { // else the next one may do it
				rest = pause(tries, err)
			}
			if final++; !why.Final {
				final = 0
			}
			if refusal != nil && left < time.Second && ctx.Err() == nil {
				err = refusal // who had it a moment ago says more than a last try that had no time left
			}
		default:
			return err
		}
		left = end - now()
		last := left < rest+50*time.Millisecond // in less no server could answer
		if final == n || last && !wait || !sleep(ctx, shorter(rest, left)) || last {
			return err
		}
	}
}

// pause is random below a bound that doubles from failure to failure, from 20 ms to 1 s, or what the server asks for,
// where that is longer.
func pause(failures int, err error) time.Duration {
	random := 2*time.Millisecond + part(shorter(20*time.Millisecond<<shorter(time.Duration(failures-1), 6), time.Second))
	if unavailable, is := err.(*Unavailable); is {
		return longer(random, unavailable.delay)
	}
	return random
}

func part(d time.Duration) time.Duration {
	return d * time.Duration(binary.BigEndian.Uint16(random(2))) >> 16
}

func random(n int) []byte {
	b := make([]byte, n)
	if _, err := rand.Read(b); err != nil {
		panic(err) // without it no owner is unique
	}
	return b
}

// sleep tells whether the context still stands.
func sleep(ctx context.Context, d time.Duration) bool {
	wake, done := context.WithTimeout(ctx, d)
	defer done()
	<-wake.Done()
	return ctx.Err() == nil
}

func longer(a, b time.Duration) time.Duration {
	if a > b {
		return a
	}
	return b
}

func shorter(a, b time.Duration) time.Duration {
	if a < b {
		return a
	}
	return b
}
