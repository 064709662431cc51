package fencepost

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	pb "github.com/fencepost/fencepost-go/fencepostv1"
)

// Lease is one holding of a lock, renewed until it is released or lost. Once lost it stays lost.
type Lease struct {
	Resource     string // the name that is locked
	Owner        string // this holder and no other
	FencingToken int64  // larger than that of every earlier lease: hand it to the resource with every write

	client        *Client
	request       *pb.AcquireRequest
	own, ownID    bool            // its owner and its request id, or only this, were made up here
	work, keeping context.Context // of the holder's work, and of what renews
	stop          func()          // ends both

	asking   sync.Mutex // held by what acquires it or gives it back
	unheard  bool       // whether a try may have done it without an answer
	returned bool
	outcome  error // of the release

	mu      sync.Mutex
	until   time.Duration // its deadline on our clock, from the safe side; 0 before it is granted
	overdue time.Duration // with no other confirmation by then something is wrong
	err     error         // why it is over
}

// Context is done when the lease is lost or released, or the context of the acquisition is done: work under it.
func (l *Lease) Context() context.Context { return l.work }

// Remaining is how long the lease may be trusted if nothing renews it: by the clock alone, 0 when it is over.
func (l *Lease) Remaining() (left time.Duration) {
	l.judge(func(t time.Duration) { left = l.until - t })
	return left
}

// Err is nil while the lease is held, by the clock alone, and then *[Lost] or [ErrReleased].
func (l *Lease) Err() error { return l.judge(func(time.Duration) {}) }

// judge looks at the clock, and lets do something about a lease that is not over. It says why one was over before.
func (l *Lease) judge(held func(t time.Duration)) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := now()
	if l.err == nil && l.until > 0 && t >= l.until {
		l.err = &Lost{Unconfirmed}
		l.stop()
	}
	if l.err != nil {
		return l.err
	}
	held(t)
	return nil
}

// end says why the lease was over before, if it was.
func (l *Lease) end(why error) error {
	return l.judge(func(time.Duration) { l.err = why; l.stop() })
}

func (l *Lease) endIfLost(err error) bool {
	lost, is := err.(*Lost)
	if is {
		l.end(lost)
	}
	return is
}

// confirm takes a renewal that was asked for, or read, at seen. It never shortens the lease.
func (l *Lease) confirm(lock *pb.Lock, seen, until time.Duration) {
	ttl := lock.GetTtl().AsDuration()
	until -= longer(shorter(ttl/10, 500*time.Millisecond), ttl/2000) // clocks drift, and to stop takes time
	l.judge(func(t time.Duration) {
		if until > t {
			l.until = longer(l.until, until)
			l.overdue = longer(l.overdue, seen+shorter(ttl*2/5, 30*time.Second))
		}
	})
}

// acquire tries once.
func (l *Lease) acquire(ctx context.Context, limit time.Duration) error {
	answer, sent, err := call(ctx, l.client, limit, pb.LockServiceClient.Acquire, l.request)
	switch {
	case err == ErrSpent && l.ownID: // granted by a try whose answer was lost, or late
		l.request.RequestId, l.unheard = fmt.Sprintf("%x", random(16)), false
		return &Unavailable{Cause: err}
	case err != nil:
		l.unheard = err != ErrSpent && l.unheard || isUnavailable(err)
		return err
	case !answer.Acquired:
		l.unheard = false
		return &Refused{answer.GetHolder()}
	}
	if l.confirm(answer.Lock, sent, sent+answer.Lock.GetRemaining().AsDuration()); l.until == 0 {
		l.unheard = true
		return &Unavailable{Cause: errors.New("the answer took as long as the lease")}
	}
	l.FencingToken, l.unheard = answer.Lock.GetFencingToken(), false
	return nil
}

// Release ends the renewals and gives the lock back, once the work has stopped: also when the context is done. The
// error is *[Lost] when the lease was over before, and comes at once; what a server may not know of it, it is told
// behind. Called again it says the same.
func (l *Lease) Release(ctx context.Context) error {
	over := l.end(ErrReleased)
	if lost, is := over.(*Lost); is {
		go l.giveBack(context.Background(), lost)
		return lost
	}
	return l.giveBack(ctx, over)
}

// giveBack does so once, and says how that went to whoever asks later.
func (l *Lease) giveBack(ctx context.Context, over error) error {
	l.asking.Lock()
	defer l.asking.Unlock()
	if l.returned {
		return l.outcome
	}
	l.returned = true
	lost, is := over.(*Lost)
	if is {
		l.outcome = lost
	}
	if ctx.Err() != nil {
		ctx = context.Background()
	}
	end := now() + callTime
	if l.unheard && l.own { // else the caller may hold it by another acquisition
		l.client.repeat(ctx, callTime*2/5, false, l.find)
	}
	if l.FencingToken > 0 && (!is || lost.Reason == Unconfirmed || lost.Reason == Closed) { // else a server has said it
		err := l.client.repeat(ctx, end-now(), false, l.release)
		if isUnavailable(err) && ctx.Err() != nil { // only by now
			err = l.client.repeat(context.Background(), end-now(), false, l.release)
		}
		if !is {
			l.outcome = err
		}
	}
	l.client.mu.Lock()
	defer l.client.mu.Unlock()
	delete(l.client.leases, l)
	return l.outcome
}

// find asks what became of a try that nobody heard of.
func (l *Lease) find(ctx context.Context, limit time.Duration) error {
	answer, _, err := call(ctx, l.client, limit, pb.LockServiceClient.Acquire, l.request)
	if err == nil {
		l.FencingToken, l.unheard = answer.GetLock().GetFencingToken(), false
	}
	return err
}

func (l *Lease) release(ctx context.Context, limit time.Duration) error {
	req := &pb.ReleaseRequest{Resource: l.Resource, Owner: l.Owner, FencingToken: l.FencingToken}
	_, _, err := call(ctx, l.client, limit, pb.LockServiceClient.Release, req)
	if lost, is := err.(*Lost); is && l.unheard && lost.Reason == "LOCK_NOT_FOUND" {
		return nil // by the try before, whose answer was lost
	}
	l.unheard = isUnavailable(err)
	return err
}

// renew calls Renew while the streams do not renew, with a quarter of the time left for each try, and ends the lease at
// its deadline. Go's timers stand still while the machine sleeps, so it looks once a second.
func (l *Lease) renew() {
	req := &pb.RenewRequest{Resource: l.Resource, Owner: l.Owner, FencingToken: l.FencingToken}
	var left, early time.Duration
	for tries := 1; l.judge(func(t time.Duration) { left, early = l.until-t, l.overdue-t }) == nil; tries++ {
		if early > 0 {
			tries = 0
			sleep(l.keeping, shorter(shorter(early, left), time.Second))
			continue
		}
		answer, sent, err := call(l.keeping, l.client, left/4, pb.LockServiceClient.Renew, req)
		if err == nil {
			l.confirm(answer.Lock, sent, sent+answer.Lock.GetRemaining().AsDuration())
		}
		l.endIfLost(err)
		sleep(l.keeping, 5*time.Millisecond+shorter(pause(tries, err), left/4)) // a lease cannot wait for long
	}
}

// stream renews over one stream. Before the stream's time is over it begins the next one, which drops it once it has
// spoken. If it fails before that, the next one begins at another endpoint.
func (l *Lease) stream(failures int, dropLast func()) {
	ctx, drop := context.WithCancel(l.keeping)
	defer drop()
	turn, n := l.client.nextStream.Load(), len(l.client.streams)
	quiet := time.AfterFunc(shorter(callTime, l.Remaining()/2), drop) // a server may hang
	defer quiet.Stop()
	var next *time.Timer
	var base time.Duration // the first word's deadline, from just before it was asked for
	var ends time.Time     // the same by the database's clock
	asked := now()
	words, err := l.client.streams[turn].KeepAlive(ctx,
		&pb.KeepAliveRequest{Resource: l.Resource, Owner: l.Owner, FencingToken: l.FencingToken})
	for err == nil {
		var word *pb.KeepAliveResponse
		if word, err = words.Recv(); err != nil {
			break
		}
		arrived, lock := now(), word.GetLock()
		left, expires := lock.GetRemaining().AsDuration(), lock.GetExpiresAt().AsTime()
		interval := shorter(lock.GetTtl().AsDuration()/3, 20*time.Second)
		quiet.Reset(2 * interval)
		if next == nil {
			dropLast()
			base, ends = asked+left, expires
			open := word.GetStreamRemaining().AsDuration()
			open -= shorter(2*interval+part(interval/2), open/2)
			next = time.AfterFunc(open+50*time.Millisecond, func() { l.stream(0, drop) })
		} else {
			failures = 0
		}
		l.confirm(lock, arrived, shorter(base+expires.Sub(ends), arrived+left))
	}
	handedOver := next != nil && !next.Stop()
	if err = meaning(err); l.endIfLost(err) || handedOver || l.keeping.Err() != nil {
		return
	}
	l.client.nextStream.CompareAndSwap(turn, (turn+1)%int32(n))
	if failures++; failures%n > 0 {
		err = nil // of a server that is not asked next
	}
	if sleep(l.keeping, shorter(pause(failures, err), l.Remaining()/4)) {
		go l.stream(failures, dropLast)
	}
}
