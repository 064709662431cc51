package fencepost

import (
	"context"
	"errors"
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
	lock          *pb.Lock        // as it was granted
	work, keeping context.Context // of the holder's work, and of what renews
	stop          func()          // ends both
	once          sync.Once
	outcome       error // of the release

	mu      sync.Mutex
	until   time.Duration // its deadline on our clock, from the safe side
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

// Release ends the renewals and gives the lock back, once the work has stopped: also when the context is done. The
// error is *[Lost] when the lease was over before. Called again it says the same.
func (l *Lease) Release(ctx context.Context) error {
	l.once.Do(func() {
		before := l.end(ErrReleased)
		defer l.forget()
		reason := Unconfirmed
		if before != nil {
			reason = before.(*Lost).Reason
		}
		if reason == Unconfirmed || reason == Closed { // else there is nothing to give back
			if ctx.Err() != nil {
				ctx = context.Background()
			}
			l.outcome = l.client.release(ctx, l.lock)
		}
		if before != nil {
			l.outcome = before
		}
	})
	return l.outcome
}

// With works while it holds the lock, and releases on the way out, also from a panic. The work's context is done when
// the lease is lost: return then. The error is that of [Client.Acquire], *[Lost] (and
// the work's within), or the work's own.
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
				released = &lostWork{released, err}
			}
			err = released
		}
	}()
	return work(lease.Context(), lease)
}

func (l *Lease) forget() {
	l.client.mu.Lock()
	defer l.client.mu.Unlock()
	delete(l.client.leases, l)
}

// hold keeps what was granted to a request of that time, unless it is over by now, or the client is closed.
func (c *Client) hold(ctx context.Context, lock *pb.Lock, sent time.Duration) (*Lease, error) {
	l := &Lease{client: c, lock: lock}
	l.Resource, l.Owner, l.FencingToken = lock.GetResource(), lock.GetOwner(), lock.GetFencingToken()
	work, stopWork := context.WithCancel(ctx)
	keeping, stopKeeping := context.WithCancel(context.Background())
	l.work, l.keeping, l.stop = work, keeping, func() { stopKeeping(); stopWork() }
	l.extend(lock, sent, sent+lock.GetRemaining().AsDuration())
	if l.Err() != nil {
		return nil, &Unavailable{errors.New("the answer took as long as the lease")}
	}
	if err := c.unlessClosed(func() { c.leases[l] = struct{}{} }); err != nil {
		c.busy.Add(1) // the acquisition is counted still
		go c.letGo(l)
		return nil, err
	}
	go l.watch()
	go l.renew()
	go l.stream(0, func() {})
	return l, nil
}

// judge looks at the clock, and lets do something about a lease that is held then. It says why one was over before.
func (l *Lease) judge(held func(t time.Duration)) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := now()
	if l.err == nil && t >= l.until {
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

// confirm takes a renewal that was asked for, or read, at seen.
func (l *Lease) confirm(lock *pb.Lock, seen, until time.Duration) {
	l.judge(func(time.Duration) { l.extend(lock, seen, until) })
}

// extend moves the deadlines, and never to an earlier time. The margin is for clocks that drift, and to stop in.
func (l *Lease) extend(lock *pb.Lock, seen, until time.Duration) {
	ttl := lock.GetTtl().AsDuration()
	if until -= longer(shorter(ttl/10, 500*time.Millisecond), ttl/2000); until > l.until {
		l.until = until
	}
	if overdue := seen + shorter(ttl*2/5, 30*time.Second); overdue > l.overdue {
		l.overdue = overdue
	}
}

// watch ends the lease at its deadline. Go's timers stand still while the machine sleeps, so it looks once a second.
func (l *Lease) watch() {
	for left := l.Remaining(); left > 0; left = l.Remaining() {
		sleep(l.keeping, shorter(left, time.Second))
	}
	if l.Err() != ErrReleased { // else once it is given back
		l.forget()
	}
}

// renew calls Renew while the streams do not renew, with a quarter of the time left for each try.
func (l *Lease) renew() {
	req := &pb.RenewRequest{Resource: l.Resource, Owner: l.Owner, FencingToken: l.FencingToken}
	for tries := 1; l.keeping.Err() == nil; tries++ {
		var left, early time.Duration
		l.judge(func(t time.Duration) { left, early = l.until-t, l.overdue-t })
		if early > 0 {
			tries = 0
			sleep(l.keeping, shorter(early, time.Second))
			continue
		}
		answer, sent, _, err := call(l.keeping, l.client, shorter(callTime, left/4), pb.LockServiceClient.Renew, req)
		if err == nil {
			l.confirm(answer.Lock, sent, sent+answer.Lock.GetRemaining().AsDuration())
		}
		l.endIfLost(err)
		sleep(l.keeping, 5*time.Millisecond+shorter(longer(backOff(tries), retryDelay(err)), left/4)) // a lease cannot wait for long
	}
}

// stream renews over one stream. Before the stream's time is over it begins the next one, which drops it once it has
// spoken. If it fails before that, the next one begins at another endpoint.
func (l *Lease) stream(failures int, dropLast func()) {
	ctx, drop := context.WithCancel(l.keeping)
	defer drop()
	first := l.client.firstStream.Load()
	quiet := time.AfterFunc(shorter(callTime, l.Remaining()/2), drop) // a server may hang
	defer quiet.Stop()
	var next *time.Timer
	var base time.Duration // the first word's deadline, from just before it was asked for
	var ends time.Time     // the same by the database's clock
	asked := now()
	words, err := l.client.streams[first].KeepAlive(ctx,
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
	l.client.firstStream.CompareAndSwap(first, (first+1)%int32(len(l.client.streams)))
	pause := backOff(failures + 1)
	if (failures+1)%len(l.client.streams) == 0 { // each has failed
		if pause = longer(pause, retryDelay(err)); isStrange(err) {
			pause = 30 * time.Second // repeating does not help
		}
	}
	if sleep(l.keeping, pause) {
		go l.stream(failures+1, dropLast)
	}
}

func (l *Lease) endIfLost(err error) bool {
	lost, is := err.(*Lost)
	if is {
		l.end(lost)
	}
	return is
}
