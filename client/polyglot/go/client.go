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

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/fencepost/fencepost-go/fencepostv1"
)

const callTime = 5 * time.Second // for a call, with all its tries

// Client talks to the replicas of one Fencepost. Many goroutines may use it at once.
type Client struct {
	conns                  []*grpc.ClientConn
	calls, streams         []pb.LockServiceClient // cancelled calls disturb no stream: connections of their own
	firstCall, firstStream atomic.Int32           // which endpoint to ask first
	closing                context.Context        // done once Close has begun: nothing new then
	close                  func()
	closed                 atomic.Bool    // the connections are
	busy                   sync.WaitGroup // acquisitions, and what is being given back
	mu                     sync.Mutex     // closing is judged, and made, under it
	leases                 map[*Lease]struct{}
}

// Options of an acquisition.
type Options struct {
	TTL       time.Duration     // how long the lease lasts without a renewal; required
	Wait      time.Duration     // for how long to try, in all; 0: once
	Owner     string            // names ONE holder; "": <host>-<pid>-<random>
	RequestID string            // of this acquisition; "": a random one
	Labels    map[string]string // shown to those who are refused
}

// Dial makes a client for the endpoints ("host:port" or "http://host:port") of one Fencepost, and connects in the
// background. The servers have no TLS: unless a proxy has, pass grpc.WithTransportCredentials(insecure.NewCredentials()).
func Dial(endpoints []string, opts ...grpc.DialOption) (*Client, error) {
	if len(endpoints) == 0 {
		return nil, errors.New("fencepost: no endpoints")
	}
	opts = append([]grpc.DialOption{
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 3 * time.Second}),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: 2 * time.Second, Backoff: backoff.Config{
			BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.5, MaxDelay: time.Second}}),
	}, opts...)
	c := &Client{leases: map[*Lease]struct{}{}}
	c.closing, c.close = context.WithCancel(context.Background())
	var stubs []pb.LockServiceClient
	for _, endpoint := range append(endpoints[:len(endpoints):len(endpoints)], endpoints...) {
		conn, err := grpc.Dial(strings.TrimPrefix(endpoint, "http://"), opts...) //nolint:staticcheck // old releases have no NewClient
		if err != nil {
			c.Close()
			return nil, fmt.Errorf("fencepost: %s: %w", endpoint, err)
		}
		c.conns, stubs = append(c.conns, conn), append(stubs, pb.NewLockServiceClient(conn))
	}
	c.calls, c.streams = stubs[:len(endpoints)], stubs[len(endpoints):]
	return c, nil
}

// Calls are the contract's own calls, at each endpoint.
func (c *Client) Calls() []pb.LockServiceClient { return c.calls }

// Close disconnects, and waits some seconds at most for what is being given back. Release the leases first: those that
// are left are lost ([Closed]), and given back though their work may not have stopped. Acquisitions end with [ErrClosed].
func (c *Client) Close() {
	c.mu.Lock()
	c.close()
	left := c.leases
	c.leases = nil
	c.busy.Add(len(left))
	c.mu.Unlock()
	for lease := range left {
		lease.end(&Lost{Closed})
	}
	for lease := range left {
		go c.letGo(lease)
	}
	c.busy.Wait()
	c.closed.Store(true)
	for _, conn := range c.conns {
		conn.Close()
	}
}

// unlessClosed does something that Close will see.
func (c *Client) unlessClosed(do func()) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing.Err() != nil {
		return ErrClosed
	}
	do()
	return nil
}

// letGo gives back what nobody holds any more; busy counts it.
func (c *Client) letGo(lease *Lease) {
	defer c.busy.Done()
	lease.Release(context.Background())
}

// untilClosed is a context that Close ends as well.
func (c *Client) untilClosed(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		select {
		case <-c.closing.Done():
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

// Acquire takes the lock and keeps it until [Lease.Release]. When the context is done the acquisition ends, and later
// the work (see [Lease.Context]); the lease does not, for the work may not have stopped yet.
//
// The error is *[Refused], *[Invalid], *[Unavailable], [ErrSpent], [ErrClosed] or the context's.
func (c *Client) Acquire(ctx context.Context, resource string, o Options) (*Lease, error) {
	if err := c.unlessClosed(func() { c.busy.Add(1) }); err != nil {
		return nil, err
	}
	defer c.busy.Done()
	trying, stop := c.untilClosed(ctx)
	defer stop()
	stopped := func() error {
		if err := ctx.Err(); err != nil {
			return err
		}
		return ErrClosed
	}
	req := &pb.AcquireRequest{
		Resource: resource, Owner: o.Owner, Ttl: durationpb.New(o.TTL), Labels: o.Labels, RequestId: o.RequestID}
	if o.Owner == "" {
		host, _ := os.Hostname()
		req.Owner = fmt.Sprintf("%.50s-%d-%x", host, os.Getpid(), random(6))
	}
	if o.RequestID == "" {
		req.RequestId = fmt.Sprintf("%x", random(16))
	}
	end, unheard := now()+o.Wait, false
	defer func() {
		if unheard && o.Owner == "" && o.RequestID == "" { // else a later acquisition of the same may hold it by now
			c.busy.Add(1)
			go c.giveBack(req)
		}
	}()
	for tries, spent := 1, 0; ; tries++ {
		limit := callTime
		if o.Wait > 0 {
			limit = shorter(limit, end-now())
		}
		answer, sent, _, err := call(trying, c, limit, pb.LockServiceClient.Acquire, req)
		if err == nil && answer.Acquired {
			var lease *Lease
			if lease, err = c.hold(ctx, answer.Lock, sent); !isUnavailable(err) {
				unheard = false
				return lease, err
			}
		} else if err == ErrSpent && o.RequestID == "" && spent < 3 {
			spent++
			req.RequestId, unheard = fmt.Sprintf("%x", random(16)), false // granted by a try whose answer was lost, and over
			if !sleep(trying, backOff(spent)) {
				return nil, stopped()
			}
			continue
		}
		pause := longer(backOff(tries), retryDelay(err))
		if err == nil {
			holder := answer.GetHolder()
			pause = shorter(pause, holder.GetRemaining().AsDuration()+backOff(1)) // then it is free, or was renewed
			err, unheard = &Refused{holder}, false
		} else if unheard = isUnavailable(err); !unheard {
			return nil, err
		}
		if left := end - now(); left < pause+50*time.Millisecond { // too little for another try
			pause, o.Wait = left, 0
		}
		if !sleep(trying, pause) {
			return nil, stopped()
		}
		if o.Wait == 0 {
			return nil, err
		}
	}
}

// giveBack asks what became of a try nobody heard of, and undoes it.
func (c *Client) giveBack(req *pb.AcquireRequest) {
	defer c.busy.Done()
	answer, _, _, err := call(context.Background(), c, 2*time.Second, pb.LockServiceClient.Acquire, req)
	if err == nil && answer.Acquired {
		c.release(context.Background(), answer.Lock)
	}
}

func (c *Client) release(ctx context.Context, lock *pb.Lock) error {
	req := &pb.ReleaseRequest{Resource: lock.GetResource(), Owner: lock.GetOwner(), FencingToken: lock.GetFencingToken()}
	_, _, repeated, err := call(ctx, c, callTime, pb.LockServiceClient.Release, req)
	var lost *Lost
	if repeated && errors.As(err, &lost) && lost.Reason == "LOCK_NOT_FOUND" {
		return nil // by the try before, whose answer was lost
	}
	return err
}

// call asks one endpoint after the other until one answers, each with its share of the time. It tells when the last try
// was sent, and whether another may have happened before it.
func call[Q, A any](ctx context.Context, c *Client, limit time.Duration,
	rpc func(pb.LockServiceClient, context.Context, Q, ...grpc.CallOption) (A, error), request Q,
) (answer A, sent time.Duration, repeated bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	end, _ := ctx.Deadline()
	n, first := len(c.calls), int(c.firstCall.Load())
	asked := time.Duration(0) // by the servers of this round
	strange := 0              // how many in a row may be no Fencepost at all, such as a proxy's default
	for try := 0; ; try++ {
		i := (first + try) % n
		share, done := context.WithTimeout(ctx, time.Until(end)/time.Duration(n-try%n))
		sent = now()
		answer, err = rpc(c.calls[i], share, request)
		done()
		if err = meaning(err); isStrange(err) {
			strange++
		} else {
			strange = 0
		}
		if (strange == 0 || strange == n) && !isUnavailable(err) {
			c.firstCall.Store(int32(i))
			return
		} else if c.closed.Load() {
			err = ErrClosed
			return
		}
		asked = longer(asked, retryDelay(err))
		pause := time.Duration(0)
		if try%n == n-1 { // each has failed
			pause, asked = longer(asked, 50*time.Millisecond+backOff(try/n+2)), 0
		}
		if time.Until(end) <= pause || !sleep(ctx, pause) {
			return
		}
		repeated = true
	}
}

// backOff is a random pause below a bound that doubles from failure to failure, from 20 ms to 1 s.
func backOff(failures int) time.Duration {
	bound := shorter(20*time.Millisecond<<shorter(time.Duration(failures-1), 6), time.Second)
	return 2*time.Millisecond + part(bound)
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
