package fencepost

import (
	"context"
	"errors"
	"fmt"
	"net"
	"reflect"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	pb "github.com/fencepost/fencepost-go/fencepostv1"
)

// server grants everything, and remembers what it was asked for.
type server struct {
	pb.UnimplementedLockServiceServer
	mu          sync.Mutex
	asked       []string
	taken       bool          // by another one each time
	acquireTime time.Duration // of the first one
	releaseTime time.Duration // of the first one
	streamTime  time.Duration // 0: streams do not work
	away        int           // so many acquisitions after the first one fail
	hung        bool          // Renew and Release
}

func (s *server) hear(call string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, call)
}

func (s *server) heard() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string{}, s.asked...)
}

func (s *server) count(call string) (n int) {
	for _, asked := range s.heard() {
		if asked == call {
			n++
		}
	}
	return n
}

func lock(ttl time.Duration) *pb.Lock {
	return &pb.Lock{FencingToken: 7, Ttl: durationpb.New(ttl), Remaining: durationpb.New(ttl), ExpiresAt: timestamppb.New(time.Now().Add(ttl))}
}

func (s *server) Acquire(ctx context.Context, r *pb.AcquireRequest) (*pb.AcquireResponse, error) {
	s.hear("Acquire")
	if n := s.count("Acquire"); s.taken {
		holder := &pb.Holder{Owner: fmt.Sprint("no ", n), Remaining: durationpb.New(2 * time.Second)}
		return &pb.AcquireResponse{Holder: holder}, nil
	} else if n == 1 {
		time.Sleep(s.acquireTime)
	} else if n <= 1+s.away {
		return nil, status.Error(codes.Unavailable, "away")
	}
	return &pb.AcquireResponse{Acquired: true, Lock: lock(r.Ttl.AsDuration())}, nil
}

func (s *server) Renew(context.Context, *pb.RenewRequest) (*pb.RenewResponse, error) {
	s.hear("Renew")
	if s.hung {
		time.Sleep(2 * time.Second)
	}
	return &pb.RenewResponse{Lock: lock(600 * time.Millisecond)}, nil
}

func (s *server) Release(context.Context, *pb.ReleaseRequest) (*pb.ReleaseResponse, error) {
	s.hear("Release")
	if s.count("Release") == 1 {
		time.Sleep(s.releaseTime)
	}
	if s.hung {
		time.Sleep(2 * time.Second)
	}
	return &pb.ReleaseResponse{}, nil
}

func (s *server) KeepAlive(_ *pb.KeepAliveRequest, words pb.LockService_KeepAliveServer) error {
	s.hear("KeepAlive")
	ends := time.Now().Add(s.streamTime)
	for time.Now().Before(ends) {
		word := &pb.KeepAliveResponse{Lock: lock(600 * time.Millisecond), StreamRemaining: durationpb.New(time.Until(ends))}
		if err := words.Send(word); err != nil {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
	return status.Error(codes.Unavailable, "the stream is over")
}

// serve starts a server; without an implementation it is no Fencepost.
func serve(t *testing.T, implementation *server, options ...grpc.ServerOption) string {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(options...)
	if implementation != nil {
		pb.RegisterLockServiceServer(s, implementation)
	}
	go s.Serve(listener)
	t.Cleanup(s.Stop)
	return listener.Addr().String()
}

func dial(t *testing.T, endpoints ...string) *Client {
	c, err := Dial(endpoints)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// hold works for so long under a lease.
func hold(t *testing.T, c *Client, work time.Duration) {
	t.Helper()
	err := c.With(context.Background(), "a", Options{TTL: 600 * time.Millisecond}, func(ctx context.Context, _ *Lease) error {
		sleep(ctx, work)
		return ctx.Err()
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestAnAnswerWithoutAMessageIsAFailureOfThatServer(t *testing.T) {
	nothing := grpc.UnknownServiceHandler(func(interface{}, grpc.ServerStream) error { return nil })
	broken, good := serve(t, nil, nothing), &server{streamTime: time.Minute}
	_, err := dial(t, broken).Acquire(context.Background(), "a", Options{TTL: time.Second, Wait: 300 * time.Millisecond})
	if unavailable := (*Unavailable)(nil); !errors.As(err, &unavailable) {
		t.Fatal(err)
	}
	hold(t, dial(t, broken, serve(t, good)), 0)
}

func TestWhatIsNoFencepostDoesNotHideOneThatIs(t *testing.T) {
	good := &server{streamTime: time.Minute}
	hold(t, dial(t, serve(t, nil), serve(t, good)), 500*time.Millisecond)
	// The stream went on to the next endpoint as well, before a Renew was due.
	if heard := good.heard(); !reflect.DeepEqual(heard, []string{"Acquire", "KeepAlive", "Release"}) {
		t.Fatal(heard)
	}
}

func TestWhereNoEndpointIsAFencepostNobodyWaits(t *testing.T) {
	begun := time.Now()
	_, err := dial(t, serve(t, nil), serve(t, nil)).Acquire(context.Background(), "a", Options{TTL: time.Second, Wait: time.Minute})
	if unavailable, is := err.(*Unavailable); !is || !unavailable.Final || time.Since(begun) > 2*time.Second {
		t.Fatal(err, time.Since(begun))
	}
}

func TestOneThatIsAwayMayBeAFencepost(t *testing.T) {
	away, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	away.Close()
	begun := time.Now()
	_, err = dial(t, serve(t, nil), away.Addr().String()).Acquire(context.Background(), "a", Options{TTL: time.Second, Wait: 600 * time.Millisecond})
	if err == nil || time.Since(begun) < 500*time.Millisecond {
		t.Fatal(err, time.Since(begun))
	}
}

func TestNobodySleepsForLongWhereALockGoesRound(t *testing.T) {
	s := &server{taken: true}
	_, err := dial(t, serve(t, s)).Acquire(context.Background(), "a", Options{TTL: time.Second, Wait: time.Second})
	if _, refused := err.(*Refused); !refused || s.count("Acquire") < 20 {
		t.Fatal(err, s.count("Acquire"))
	}
}

func TestWhatWasGrantedWithoutAnAnswerIsGivenBack(t *testing.T) {
	s := &server{acquireTime: 400 * time.Millisecond}
	c := dial(t, serve(t, s))
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	if _, err := c.Acquire(ctx, "a", Options{TTL: time.Second}); err != context.DeadlineExceeded {
		t.Fatal(err)
	}
	c.Close() // waits for it
	if heard := s.heard(); !reflect.DeepEqual(heard, []string{"Acquire", "Acquire", "Release"}) {
		t.Fatal(heard)
	}
}

func TestCallsRenewWhereStreamsDoNotWork(t *testing.T) {
	s := &server{}
	hold(t, dial(t, serve(t, s)), 1200*time.Millisecond)
	if s.count("Renew") == 0 {
		t.Fatal(s.heard())
	}
}

func TestTheNextStreamIsOpenedBeforeOneIsOver(t *testing.T) {
	s := &server{streamTime: 800 * time.Millisecond}
	hold(t, dial(t, serve(t, s)), 2*time.Second)
	if s.count("KeepAlive") < 3 || s.count("Renew") > 0 {
		t.Fatal(s.heard())
	}
}

func TestCloseEndsALeaseAndGivesItBack(t *testing.T) {
	s := &server{streamTime: time.Minute}
	c := dial(t, serve(t, s))
	lease, err := c.Acquire(context.Background(), "a", Options{TTL: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	<-lease.Context().Done()
	var lost *Lost
	if !errors.As(lease.Release(context.Background()), &lost) || lost.Reason != Closed || s.count("Release") != 1 {
		t.Fatal(lost, s.heard())
	}
	if _, err := c.Acquire(context.Background(), "a", Options{TTL: time.Second}); err != ErrClosed {
		t.Fatal(err)
	}
}

func TestADoneContextAsksNobody(t *testing.T) {
	s := &server{}
	c := dial(t, serve(t, s))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := c.Acquire(ctx, "a", Options{TTL: time.Second}); err != context.Canceled {
		t.Fatal(err)
	}
	c.Close() // waits for what is given back
	if heard := s.heard(); len(heard) > 0 {
		t.Fatal(heard)
	}
}

func TestAReleaseOutlivesItsContext(t *testing.T) {
	s := &server{releaseTime: 400 * time.Millisecond, streamTime: time.Minute}
	lease, err := dial(t, serve(t, s)).Acquire(context.Background(), "a", Options{TTL: 2 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	if err := lease.Release(ctx); err != nil || s.count("Release") != 2 {
		t.Fatal(err, s.heard())
	}
}

func TestWhatWasGrantedIsGivenBackOnceTheServerIsBack(t *testing.T) {
	s := &server{acquireTime: 400 * time.Millisecond, away: 3}
	c := dial(t, serve(t, s))
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	if _, err := c.Acquire(ctx, "a", Options{TTL: time.Second}); err != context.DeadlineExceeded {
		t.Fatal(err)
	}
	c.Close() // waits for it
	if s.count("Release") != 1 {
		t.Fatal(s.heard())
	}
}

func TestWhoLostALeaseHearsItAtOnceAndItIsGivenBackBehind(t *testing.T) {
	s := &server{hung: true}
	c := dial(t, serve(t, s))
	lease, err := c.Acquire(context.Background(), "a", Options{TTL: 500 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	<-lease.Context().Done()
	begun, lost := time.Now(), (*Lost)(nil)
	for i := 0; i < 2; i++ {
		if err := lease.Release(context.Background()); !errors.As(err, &lost) || time.Since(begun) > time.Second {
			t.Fatal(err, time.Since(begun))
		}
	}
	c.Close()
	if s.count("Release") != 1 || time.Since(begun) < time.Second {
		t.Fatal(s.heard(), time.Since(begun))
	}
}

func TestAnEmptyMessageIsNoAnswerEither(t *testing.T) {
	empty := grpc.UnknownServiceHandler(func(_ interface{}, s grpc.ServerStream) error { return s.SendMsg(&pb.AcquireResponse{}) })
	hold(t, dial(t, serve(t, nil, empty), serve(t, &server{streamTime: time.Minute})), 0)
}

func TestATimeThatIsOverIsForOneTry(t *testing.T) {
	lease, err := dial(t, serve(t, &server{})).Acquire(context.Background(), "a", Options{TTL: time.Second, Wait: -time.Second})
	if err != nil {
		t.Fatal(err)
	}
	lease.Release(context.Background())
}

func TestWhatIsNoTextIsInvalidAtOnce(t *testing.T) {
	begun := time.Now()
	_, err := dial(t, serve(t, &server{})).Acquire(context.Background(), "\xff", Options{TTL: time.Second})
	if invalid, is := err.(*Invalid); !is || !reflect.DeepEqual(invalid.Fields, []string{"resource"}) || time.Since(begun) > time.Second {
		t.Fatal(err, time.Since(begun))
	}
}
