package fencepost;

import static java.util.concurrent.TimeUnit.MILLISECONDS;
import static java.util.concurrent.TimeUnit.SECONDS;

import com.google.protobuf.Any;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import fencepost.LockClient.Kind;
import fencepost.LockClient.Lease;
import fencepost.LockClient.LockException;
import fencepost.LockClient.Options;
import fencepost.v1.*;
import io.grpc.BindableService;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.MethodDescriptor.MethodType;
import io.grpc.ServerCall;
import io.grpc.ServerServiceDefinition;
import io.grpc.Status;
import io.grpc.inprocess.InProcessChannelBuilder;
import io.grpc.inprocess.InProcessServerBuilder;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.StreamObserver;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.time.Duration;
import java.util.Arrays;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicInteger;

/** What no real server does on demand: servers made up for it. The rest is tested by tests/polyglot. Each {@code test} method is one. */
public final class LockClientTest {
    /** Grants, takes back, and keeps a stream without a word. */
    private static class Healthy extends LockServiceGrpc.LockServiceImplBase {
        final AtomicInteger acquires = new AtomicInteger();
        final CountDownLatch streamed = new CountDownLatch(1), released = new CountDownLatch(1);
        @Override public void acquire(AcquireRequest request, StreamObserver<AcquireResponse> out) {
            acquire(request, out, acquires.incrementAndGet());
        }
        void acquire(AcquireRequest request, StreamObserver<AcquireResponse> out, int nth) {
            var lock = Lock.newBuilder().setResource(request.getResource()).setOwner(request.getOwner()).setFencingToken(7)
                    .setRemaining(request.getTtl()).setTtl(request.getTtl());
            answer(out, AcquireResponse.newBuilder().setAcquired(true).setLock(lock).build());
        }
        @Override public void release(ReleaseRequest request, StreamObserver<ReleaseResponse> out) {
            released.countDown();
            answer(out, ReleaseResponse.getDefaultInstance());
        }
        @Override public void keepAlive(KeepAliveRequest request, StreamObserver<KeepAliveResponse> out) { streamed.countDown(); }
        static <A> void answer(StreamObserver<A> out, A answer) {
            out.onNext(answer);
            out.onCompleted();
        }
    }

    /** Another service, such as a proxy's default backend: UNIMPLEMENTED. */
    private static final class Foreign extends LockServiceGrpc.LockServiceImplBase {}

    /** Says that all went well, and nothing else. */
    private static final class Silent implements BindableService {
        @Override public ServerServiceDefinition bindService() {
            var service = ServerServiceDefinition.builder(LockServiceGrpc.SERVICE_NAME);
            add(service, LockServiceGrpc.getAcquireMethod());
            add(service, LockServiceGrpc.getReleaseMethod());
            return service.build();
        }
        private static <Q, A> void add(ServerServiceDefinition.Builder service, MethodDescriptor<Q, A> method) {
            // As a stream, which may have no message.
            service.addMethod(method.toBuilder().setType(MethodType.SERVER_STREAMING).build(), (call, headers) -> {
                call.close(Status.OK, new Metadata());
                return new ServerCall.Listener<>() {};
            });
        }
    }

    private static final AtomicInteger NAMES = new AtomicInteger();

    private static LockClient client(BindableService... services) throws Exception {
        String[] names = new String[services.length];
        for (int i = 0; i < names.length; i++) {
            names[i] = "server-" + NAMES.incrementAndGet();
            InProcessServerBuilder.forName(names[i]).addService(services[i]).build().start();
        }
        return new LockClient(InProcessChannelBuilder::forName, names);
    }

    private static Options ttl(long millis, long wait) {
        return Options.ttl(Duration.ofMillis(millis)).waitUpTo(Duration.ofMillis(wait));
    }

    /** With an owner of its own, an acquisition that fails is not given back. */
    private static Options owned(long wait) {
        return new Options(Duration.ofSeconds(30), Duration.ofMillis(wait), "o", null, Map.of());
    }

    private interface Work { void run() throws Exception; }

    private static void fails(Kind kind, long withinMillis, Work work) throws Exception {
        long start = System.nanoTime();
        try {
            work.run();
        } catch (LockException failed) {
            check(failed.kind == kind, "failed as " + failed);
            long took = (System.nanoTime() - start) / 1_000_000;
            check(took < withinMillis, "took " + took + " ms");
            return;
        }
        throw new AssertionError("did not fail");
    }

    private static void check(boolean good, String otherwise) {
        if (!good) throw new AssertionError(otherwise);
    }

    public void testAnAnswerWithoutAMessageIsNone() throws Exception {
        try (LockClient client = client(new Silent(), new Healthy())) {
            client.acquire("r", ttl(30_000, 0)).close();
        }
        try (LockClient client = client(new Silent())) {
            fails(Kind.UNAVAILABLE, 1000, () -> client.acquire("r", owned(300)));
        }
    }

    public void testAnEmptyMessageIsNoAnswerEither() throws Exception {
        Healthy empty = new Healthy() {
            @Override void acquire(AcquireRequest request, StreamObserver<AcquireResponse> out, int nth) {
                answer(out, AcquireResponse.getDefaultInstance());
            }
        };
        try (LockClient client = client(empty, new Healthy())) {
            client.acquire("r", ttl(30_000, 0)).close();
        }
    }

    public void testWhatIsNoFencepostHidesNone() throws Exception {
        Healthy healthy = new Healthy();
        try (LockClient client = client(new Foreign(), healthy); Lease lease = client.acquire("r", ttl(3000, 0))) {
            check(healthy.streamed.await(2, SECONDS) && lease.isHeld(), "no stream there");
        }
        try (LockClient client = client(new Foreign(), new Foreign())) {
            fails(Kind.REJECTED, 1000, () -> client.acquire("r", ttl(30_000, 5000)));
        }
        try (LockClient client = client(new Silent(), new Foreign())) { // the one there is may come back
            fails(Kind.UNAVAILABLE, 1000, () -> client.acquire("r", owned(300)));
        }
    }

    public void testAProxyThatKnowsNoFencepostForAWhileCostsNoLease() throws Exception {
        long start = System.nanoTime();
        Healthy proxied = new Healthy() {
            @Override public void renew(RenewRequest request, StreamObserver<RenewResponse> out) {
                if (System.nanoTime() - start < 1_400_000_000) { out.onError(Status.UNIMPLEMENTED.asException()); return; }
                var ttl = com.google.protobuf.Duration.newBuilder().setSeconds(2);
                answer(out, RenewResponse.newBuilder().setLock(Lock.newBuilder().setFencingToken(7).setRemaining(ttl).setTtl(ttl)).build());
            }
            @Override public void keepAlive(KeepAliveRequest request, StreamObserver<KeepAliveResponse> out) {
                out.onError(Status.UNIMPLEMENTED.asException());
            }
        };
        try (LockClient client = client(proxied)) {
            Lease[] leases = new Lease[12];
            for (int i = 0; i < leases.length; i++) leases[i] = client.acquire("r" + i, ttl(2000, 0));
            Thread.sleep(2500);
            check(Arrays.stream(leases).allMatch(Lease::isHeld), "lost " + Arrays.stream(leases).filter(lease -> !lease.isHeld()).count());
        }
    }

    public void testNobodySleepsForLongWhereALockGoesRound() throws Exception {
        Healthy taken = new Healthy() {
            @Override void acquire(AcquireRequest request, StreamObserver<AcquireResponse> out, int nth) {
                var holder = Holder.newBuilder().setOwner("no " + nth).setRemaining(com.google.protobuf.Duration.newBuilder().setSeconds(2));
                answer(out, AcquireResponse.newBuilder().setHolder(holder).build());
            }
        };
        try (LockClient client = client(taken)) {
            fails(Kind.REFUSED, 2000, () -> client.acquire("r", ttl(2000, 1000)));
        }
        check(taken.acquires.get() > 20, taken.acquires + " tries");
    }

    public void testATimeThatIsOverIsForOneTry() throws Exception {
        try (LockClient client = client(new Healthy())) {
            client.acquire("r", ttl(30_000, -1000)).close();
        }
    }

    public void testAServerThatWantsToBeLeftAloneIs() throws Exception {
        Healthy drained = new Healthy() {
            @Override void acquire(AcquireRequest request, StreamObserver<AcquireResponse> out, int nth) {
                var wish = com.google.protobuf.Duration.newBuilder().setNanos(500_000_000);
                var status = com.google.rpc.Status.newBuilder().setCode(Status.Code.UNAVAILABLE.value())
                        .addDetails(Any.pack(ErrorInfo.newBuilder().setDomain("fencepost").setReason("DRAINING").build()))
                        .addDetails(Any.pack(RetryInfo.newBuilder().setRetryDelay(wish).build()));
                out.onError(StatusProto.toStatusRuntimeException(status.build()));
            }
        };
        try (LockClient client = client(drained)) {
            fails(Kind.UNAVAILABLE, 1500, () -> client.acquire("r", owned(900)));
        }
        check(drained.acquires.get() <= 2, drained.acquires + " tries");
    }

    public void testAGrantWhoseAnswerIsLostIsGivenBack() throws Exception {
        Healthy away = new Healthy() { // first without an answer, then not there, then back
            @Override void acquire(AcquireRequest request, StreamObserver<AcquireResponse> out, int nth) {
                if (nth == 2) out.onError(Status.UNAVAILABLE.asException());
                if (nth > 2) super.acquire(request, out, nth);
            }
        };
        try (LockClient client = client(away)) {
            fails(Kind.UNAVAILABLE, 2000, () -> client.acquire("r", ttl(30_000, 700)));
            check(away.released.await(2, SECONDS), "not given back");
        }
    }

    public void testCloseGivesBackWhatIsBeingAcquired() throws Exception {
        Healthy slow = new Healthy() {
            @Override void acquire(AcquireRequest request, StreamObserver<AcquireResponse> out, int nth) {
                CompletableFuture.delayedExecutor(200, MILLISECONDS).execute(() -> super.acquire(request, out, nth));
            }
        };
        closeWhileAcquiring(slow, slow, client(slow));
    }

    public void testCloseGivesBackWhatAHungServerMayHaveGranted() throws Exception {
        Healthy hung = new Healthy() {
            @Override void acquire(AcquireRequest request, StreamObserver<AcquireResponse> out, int nth) {}
        };
        Healthy healthy = new Healthy();
        closeWhileAcquiring(hung, healthy, client(hung, healthy));
    }

    private static void closeWhileAcquiring(Healthy asked, Healthy released, LockClient client) throws Exception {
        CompletableFuture<Object> acquired = new CompletableFuture<>();
        new Thread(() -> {
            try {
                acquired.complete(client.acquire("r", ttl(30_000, 0)));
            } catch (Exception failed) {
                acquired.complete(failed);
            }
        }).start();
        while (asked.acquires.get() == 0) Thread.sleep(5);
        client.close();
        check(released.released.getCount() == 0, "not given back");
        check(acquired.get(1, SECONDS) instanceof IllegalStateException, "acquired " + acquired.join());
    }

    public void testAReleaseThatNobodyHeardOfIsNone() throws Exception {
        Healthy hung = new Healthy() {
            @Override public void release(ReleaseRequest request, StreamObserver<ReleaseResponse> out) {}
        };
        try (LockClient client = client(hung)) {
            fails(Kind.UNAVAILABLE, 2000, client.acquire("r", ttl(1000, 0))::release);
            client.acquire("r", ttl(1000, 0)).close(); // runs out, which is no error at the end of a block
        }
    }

    /** All at once: they mostly wait. Surefire takes the class as it is, too. */
    public static void main(String[] none) throws Exception {
        try (LockClient client = client(new Healthy())) {
            client.acquire("r", ttl(30_000, 0)).close(); // loads the classes, which may take longer than a test waits
        }
        int failures = 0;
        var tests = Arrays.stream(LockClientTest.class.getMethods()).filter(method -> method.getName().startsWith("test")).toList();
        var running = tests.stream().map(test -> CompletableFuture.runAsync(() -> run(test), work -> {
            Thread thread = new Thread(work);
            thread.setDaemon(true);
            thread.start();
        })).toList();
        for (int i = 0; i < tests.size(); i++) {
            try {
                running.get(i).get(10, SECONDS);
            } catch (Exception failed) {
                failures++;
                System.err.println(tests.get(i).getName() + ": " + (failed.getCause() == null ? failed : failed.getCause().getCause()));
            }
        }
        System.out.println("LockClientTest: " + (tests.size() - failures) + " passed, " + failures + " failed");
        System.exit(failures == 0 ? 0 : 1);
    }

    private static void run(Method test) {
        try {
            test.invoke(new LockClientTest());
        } catch (InvocationTargetException failed) {
            throw new IllegalStateException(failed.getCause());
        } catch (IllegalAccessException impossible) {
            throw new IllegalStateException(impossible);
        }
    }
}
