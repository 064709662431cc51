package fencepost;

import static java.util.concurrent.TimeUnit.*;

import com.google.rpc.*;
import fencepost.v1.*;
import io.grpc.*;
import io.grpc.stub.*;
import java.io.IOException;
import java.nio.file.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.AtomicLong;

/** Takes locks. All leases of a client share one thread, and two connections to a server. */
public final class LockClient implements AutoCloseable {
    /**
     * How a lock is taken. {@code ttl}: how long the lease lasts without a renewal. {@code waitUpTo}: for how long to try; zero: once.
     * {@code owner} names ONE holder, never a host or a service; {@code requestId} one acquisition; null: new ones, as is best.
     * {@code labels} are for people to read: host, pid, build, trace id.
     */
    public record Options(Duration ttl, Duration waitUpTo, String owner, String requestId, Map<String, String> labels) {
        public Options { labels = labels == null ? Map.of() : Map.copyOf(labels); }
        public static Options ttl(Duration ttl) { return new Options(ttl, Duration.ZERO, null, null, Map.of()); }
        public Options waitUpTo(Duration time) { return new Options(ttl, time, owner, requestId, labels); }
        public Options labels(Map<String, String> labels) { return new Options(ttl, waitUpTo, owner, requestId, labels); }
    }
    /** Work under a lock. */
    public interface Work<T> { T run(Lease lease) throws Exception; }
    /** REFUSED: another has the lock. UNAVAILABLE: it may have happened. INVALID: no repetition helps. SPENT: use a new request id. */
    public enum Kind { REFUSED, LOST, UNAVAILABLE, INVALID, SPENT }
    /** Why there is no lock. {@code holder}, when REFUSED: who has it. {@code fields}, when INVALID: which, where the server said so. */
    public static class LockException extends RuntimeException {
        public final Kind kind;
        public final transient Holder holder;
        public final List<String> fields;
        LockException(Kind kind, String message, Throwable cause, Holder holder, List<String> fields) {
            super(kind + ": " + message, cause);
            this.kind = kind; this.holder = holder; this.fields = fields;
        }
    }
    /** The lease is over: stop. {@code reason} is the contract's, or UNCONFIRMED: no renewal was confirmed in time,
     * or CLOSED: the client was closed. */
    public static final class LostException extends LockException {
        public final String reason;
        LostException(String reason, Throwable cause) { super(Kind.LOST, reason, cause, null, List.of()); this.reason = reason; }
    }
    private static final long SECOND = 1_000_000_000, CALL = 5 * SECOND; // for one call, at all servers
    private static final Set<String> LOST = Set.of("LOCK_NOT_FOUND", "LOCK_EXPIRED", "NOT_OWNER", "TOKEN_SUPERSEDED", "TOKEN_UNKNOWN");
    private static final Set<String> NEVER = Set.of("INVALID_ARGUMENT", "UNIMPLEMENTED", "UNAUTHENTICATED"); // codes no repetition mends
    private static final Metadata.Key<byte[]> DETAILS = Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);
    private static final AtomicLong SLEPT = new AtomicLong(uptime() - System.nanoTime());
    private final ScheduledThreadPoolExecutor loop = new ScheduledThreadPoolExecutor(1, LockClient::daemon);
    private final Set<Lease> leases = ConcurrentHashMap.newKeySet();
    private final Set<CompletableFuture<?>> pending = ConcurrentHashMap.newKeySet(); // what close() waits for
    private final List<ManagedChannel> calls = new ArrayList<>(), streams = new ArrayList<>(); // apart: cancelled calls may cost a connection
    private final CountDownLatch closed = new CountDownLatch(1);
    private volatile int preferred; // the server to ask next
    /** For the replicas of one Fencepost, as {@code host:port}, without TLS. Connects nothing before the first call. */
    public LockClient(String... endpoints) {
        this(endpoint -> ManagedChannelBuilder.forTarget(endpoint.replaceFirst("^http://", "")).usePlaintext(), endpoints);
    }
    /** The same with channels of your own making, such as with TLS. */
    public LockClient(java.util.function.Function<String, ManagedChannelBuilder<?>> channel, String... endpoints) {
        if (endpoints.length == 0) throw new IllegalArgumentException("no endpoint");
        loop.setRemoveOnCancelPolicy(true);
        for (var channels : List.of(calls, streams)) for (String endpoint : endpoints)
            channels.add(channel.apply(endpoint).executor(loop).keepAliveTime(10, SECONDS).keepAliveTimeout(5, SECONDS).build());
    }

    /** Takes the lock and keeps it until the lease is closed. Interrupted, it gives back what it may have got. */
    public Lease acquire(String resource, Options options) throws InterruptedException {
        boolean once = options.waitUpTo.isZero(), ours = options.owner == null && options.requestId == null, unheard = false;
        long end = now() + (once ? CALL : nanos(options.waitUpTo));
        var request = AcquireRequest.newBuilder().setResource(resource).setOwner(options.owner == null ? uniqueOwner() : options.owner)
                .setRequestId(options.requestId == null ? newId() : options.requestId).putAllLabels(options.labels)
                .setTtl(com.google.protobuf.Duration.newBuilder().setSeconds(options.ttl.getSeconds()).setNanos(options.ttl.getNano()));
        var going = track(new CompletableFuture<>()); // known before the look at closed: close() waits for it
        try {
            for (int tries = 1; ; tries++) {
                if (isClosed()) throw new IllegalStateException("the client is closed");
                boolean before = unheard;
                long sent = now(), pause = jitter(tries);
                LockException error;
                try {
                    unheard = true; // until an answer says otherwise: also when this thread is interrupted
                    var answer = call(LockServiceGrpc.getAcquireMethod(), request.build(), end - sent).get();
                    unheard = false;
                    if (answer.getAcquired()) {
                        Lease lease = new Lease(answer.getLock(), sent);
                        if (lease.isHeld() && lease.keep()) return lease;
                        lease.end();
                        if (isClosed()) throw new IllegalStateException("the client is closed");
                        throw new LockException(Kind.UNAVAILABLE, "the answer came too late", null, null, List.of());
                    }
                    error = new LockException(Kind.REFUSED, "held by " + answer.getHolder().getOwner(), null, answer.getHolder(), List.of());
                    if (once) throw error;
                    pause = Math.min(pause, nanos(error.holder.getRemaining()) + jitter(1)); // not all at the same time
                } catch (ExecutionException failed) {
                    error = (LockException) failed.getCause();
                    unheard = error.kind == Kind.UNAVAILABLE || before && error.kind != Kind.SPENT;
                    if (error.kind == Kind.SPENT && options.requestId == null) request.setRequestId(newId());
                    else if (error.kind != Kind.UNAVAILABLE) throw error;
                    else if (tries % calls.size() > 0) pause = 0; // another server may do it
                }
                long left = end - now();
                boolean over = left < pause + SECOND / 20; // no time for another answer
                closed.await(over ? left : pause, NANOSECONDS);
                if (over) throw error;
            }
        } finally {
            if (unheard && ours) track(call(LockServiceGrpc.getAcquireMethod(), request.build(), CALL).thenCompose(found -> // by the same
                    found.getAcquired() ? new Lease(found.getLock(), now()).end() : CompletableFuture.completedFuture(null))); // id: ours
            going.complete(null);
        }
    }
    /** Runs {@code work} under the lock in this thread, which is interrupted when the lease is lost; gives back afterwards. */
    public <T> T withLock(String resource, Options options, Work<T> work) throws Exception {
        Thread worker = Thread.currentThread();
        boolean[] over = {false}, interrupted = {false};
        try (Lease lease = acquire(resource, options)) {
            lease.lost.thenAccept(reason -> {
                synchronized (over) { if (!over[0]) { interrupted[0] = true; worker.interrupt(); } }
            });
            try {
                lease.check();
                T outcome = work.run(lease);
                lease.check();
                return outcome;
            } catch (Exception failed) {
                throw lease.lost.isDone() ? new LostException(lease.lost.join(), failed) : failed;
            } finally {
                synchronized (over) { over[0] = true; if (interrupted[0]) Thread.interrupted(); } // ours alone
            }
        }
    }
    private boolean isClosed() { return closed.getCount() == 0; }
    private <F extends CompletableFuture<?>> F track(F going) {
        pending.add(going);
        going.whenComplete((done, failed) -> pending.remove(going));
        return going;
    }
    /** Ends what is still held: each lease is lost (CLOSED), then given back. Ends the connections. */
    @Override public synchronized void close() {
        if (isClosed()) return;
        closed.countDown();
        var held = List.copyOf(leases);
        held.forEach(lease -> lease.lose("CLOSED"));
        held.stream().map(Lease::end).toList().forEach(ended -> ended.exceptionally(failed -> null).join());
        for (long end = now() + 2 * SECOND, left; !pending.isEmpty() && (left = end - now()) > 0; )
            CompletableFuture.allOf(pending.toArray(CompletableFuture[]::new)).exceptionally(failed -> null)
                    .completeOnTimeout(null, left, NANOSECONDS).join();
        for (var channels : List.of(calls, streams)) channels.forEach(ManagedChannel::shutdownNow);
        loop.schedule(loop::shutdownNow, 1, SECONDS); // the channels end on it
    }
    /** Asks the preferred server, for its share of the time: when that fails, the next try is another one's. */
    private <Q, A> CompletableFuture<A> call(MethodDescriptor<Q, A> method, Q request, long time) {
        var result = new CompletableFuture<A>();
        int server = preferred;
        var limit = CallOptions.DEFAULT.withDeadlineAfter(Math.min(CALL, time) / calls.size(), NANOSECONDS);
        try {
            ClientCalls.asyncUnaryCall(calls.get(server).newCall(method, limit), request, new StreamObserver<A>() {
                @Override public void onNext(A answer) { result.complete(answer); }
                @Override public void onCompleted() {}
                @Override public void onError(Throwable thrown) { result.completeExceptionally(failure(calls, server, thrown)); }
            });
        } catch (RuntimeException | Error broken) { // later, as any answer
            loop.execute(() -> result.completeExceptionally(failure(calls, server, broken)));
        }
        return result;
    }
    /** By the reason of our own ErrorInfo; of all codes only those that no repetition mends. A proxy's NOT_FOUND ends no lease. */
    private LockException failure(List<ManagedChannel> channels, int server, Throwable thrown) {
        String reason = "", code = io.grpc.Status.fromThrowable(thrown).getCode().name();
        List<String> fields = new ArrayList<>();
        Metadata trailers = io.grpc.Status.trailersFromThrowable(thrown);
        byte[] details = trailers == null ? null : trailers.get(DETAILS);
        try {
            if (details != null) for (var any : com.google.rpc.Status.parseFrom(details).getDetailsList()) {
                ErrorInfo info = any.is(ErrorInfo.class) ? any.unpack(ErrorInfo.class) : ErrorInfo.getDefaultInstance();
                if (info.getDomain().equals("fencepost")) reason = info.getReason();
                if (any.is(BadRequest.class)) any.unpack(BadRequest.class).getFieldViolationsList().forEach(bad -> fields.add(bad.getField()));
            }
        } catch (IOException garbled) { reason = ""; }
        if (LOST.contains(reason)) return new LostException(reason, thrown);
        boolean never = NEVER.contains(code) || reason.equals("INTERNAL");
        Kind kind = reason.equals("REQUEST_SPENT") ? Kind.SPENT : never ? Kind.INVALID : Kind.UNAVAILABLE;
        if (kind == Kind.UNAVAILABLE && preferred == server) preferred = (server + 1) % calls.size();
        channels.get(server).resetConnectBackoff(); // grpc's own grows to two minutes
        return new LockException(kind, thrown.getMessage(), thrown, null, fields);
    }
    /** nanoTime stands still while the machine sleeps. On Linux /proc/uptime does not, and tells for how long that was. */
    private static long now() {
        long up = uptime(), nano = System.nanoTime();
        return nano + SLEPT.accumulateAndGet(up - nano, Math::max);
    }
    private static long uptime() {
        try { return (long) (Double.parseDouble(Files.readString(Path.of("/proc/uptime")).split(" ")[0]) * SECOND); }
        catch (IOException | RuntimeException elsewhere) { return System.nanoTime(); }
    }
    private static long nanos(Duration time) { return Math.min(time.getSeconds(), 1L << 32) * SECOND + time.getNano(); }
    private static long nanos(com.google.protobuf.Duration time) { return nanos(Duration.ofSeconds(time.getSeconds(), time.getNanos())); }
    /** At random up to a bound that doubles from 20 ms to 1 s ("full jitter"). */
    private static long jitter(int tries) {
        return SECOND / 500 + ThreadLocalRandom.current().nextLong(Math.min(SECOND, SECOND / 50 << Math.min(tries - 1, 9)));
    }
    private static String newId() { return UUID.randomUUID().toString(); }
    private static String uniqueOwner() {
        String host = "host"; // for people only
        try { host = java.net.InetAddress.getLocalHost().getHostName(); } catch (IOException unnamed) {}
        return host + "-" + ProcessHandle.current().pid() + "-" + newId().substring(24);
    }
    private static Thread daemon(Runnable work) { Thread thread = new Thread(work, "fencepost"); thread.setDaemon(true); return thread; }

    /** A lock that is held, and renewed until it is closed or lost. Hand its token to what you write to; stop when {@link #check} throws. */
    public final class Lease implements AutoCloseable {
        private final Lock lock;
        private final CompletableFuture<String> lost = new CompletableFuture<>();
        private CompletableFuture<Object> ended; // since it is given back
        private volatile long until; // not 0 for 'unset', nor any other time here: nanoTime may be negative
        private final List<Stream> open = new ArrayList<>(); // from here on for the client's thread alone
        private long openAt, renewAt;
        private int failures;
        private Future<?> timer;
        private Lease(Lock granted, long sent) {
            lock = granted;
            openAt = sent;
            until = deadline(sent + nanos(granted.getRemaining()), granted);
            renewAt = renewal(sent, granted);
        }
        /** What is locked: for the fence. */
        public String resource() { return lock.getResource(); }
        /** Who holds the lock: this lease and no other. */
        public String owner() { return lock.getOwner(); }
        /** Above 0, below 2^53, and larger than that of every earlier holder. */
        public long fencingToken() { return lock.getFencingToken(); }
        /** For how long it may be trusted if nothing renews it; zero once it is over. By the clock, without a word to the network. */
        public Duration remaining() { return isHeld() ? Duration.ofNanos(Math.max(0, until - now())) : Duration.ZERO; }
        /** Whether it may be trusted now. It may be over right after: fence your writes. */
        public synchronized boolean isHeld() {
            if (now() >= until) lose("UNCONFIRMED");
            return ended == null && !lost.isDone();
        }
        /** The same for the steps of the work: throws {@link LostException} once the lease is over. */
        public void check() { if (!isHeld()) throw new LostException(lost.getNow("LOCK_NOT_FOUND"), null); }
        /** Completed with the reason when the lease is lost before it is closed; what follows on it never runs on the client's thread. */
        public CompletionStage<String> lost() { return lost.thenApplyAsync(reason -> reason); }
        /** Gives the lock back; where no server can be told, it runs out. Throws {@link LostException} when it was lost before. */
        @Override public void close() {
            var back = end();
            try { if (!lost.isDone()) back.join(); }
            catch (CompletionException failed) { if (failed.getCause() instanceof LostException over) throw over; }
            if (lost.isDone()) throw new LostException(lost.join(), null);
        }
        private synchronized void lose(String reason) { if (ended == null) lost.complete(reason); }
        private boolean keep() {
            leases.add(this); // and then the look: close() sees the lease, or this sees close()
            if (isClosed()) return false;
            loop.execute(this::tick);
            return true;
        }
        private synchronized CompletableFuture<Object> end() {
            if (ended != null) return ended;
            String reason = isHeld() ? "" : lost.join();
            ended = track(new CompletableFuture<>());
            if (Set.of("", "UNCONFIRMED", "CLOSED").contains(reason)) giveBack(1, now() + CALL); // alive for all that the server knows
            else ended.complete(null);
            leases.remove(this);
            loop.execute(this::tick);
            return ended;
        }
        private void giveBack(int tries, long end) {
            call(LockServiceGrpc.getReleaseMethod(), ReleaseRequest.newBuilder().setResource(lock.getResource()).setOwner(owner())
                    .setFencingToken(fencingToken()).build(), end - now()).whenComplete((answer, error) -> {
                boolean before = tries > 1 && error instanceof LostException over && over.reason.equals("LOCK_NOT_FOUND");
                if (error == null || before) ended.complete(answer);
                else if (((LockException) error).kind != Kind.UNAVAILABLE || end - now() < SECOND / 20) ended.completeExceptionally(error);
                else loop.schedule(() -> giveBack(tries + 1, end), jitter(tries), NANOSECONDS);
            });
        }
        /** Prolongs the lease, never shortens it, and not once it is over. */
        private synchronized void confirm(long seen, long end, Lock renewed) {
            if (isHeld()) until = Math.max(until, deadline(end, renewed));
            renewAt = renewal(seen, renewed);
        }
        /** The margin is for clocks that drift, and to stop in. */
        private static long deadline(long end, Lock renewed) {
            long ttl = nanos(renewed.getTtl());
            return end - Math.max(Math.min(ttl / 10, SECOND / 2), ttl / 2000);
        }
        /** Later than streams do, which is after a third. */
        private static long renewal(long seen, Lock renewed) { return seen + Math.min(nanos(renewed.getTtl()) / 5 * 2, 30 * SECOND); }
        /** A failure is not a loss, unless a server says so. Returns when to try again. */
        private long failed(Throwable error) {
            if (error instanceof LostException over) lose(over.reason);
            return now() + (((LockException) error).kind == Kind.UNAVAILABLE ? Math.min(jitter(++failures), (until - now()) / 4) : 30 * SECOND);
        }
        /** Does what is due and comes back for the rest; each second at least, since timers stand still while a machine sleeps. */
        private void tick() {
            if (timer != null) timer.cancel(false);
            if (!isHeld()) { open.forEach(stream -> stream.call.cancel("over", null)); open.clear(); return; }
            long now = now();
            try {
                for (Stream stream : List.copyOf(open)) if (now >= stream.patience) stream.onError(new TimeoutException("no word in time"));
                if (now >= openAt) open();
                if (now >= renewAt) renew(now);
            } finally { // an exception must not end the keeping
                long next = Math.min(Math.min(now + SECOND, until), Math.min(openAt, renewAt));
                for (Stream stream : open) next = Math.min(next, stream.patience);
                if (timer != null) timer.cancel(false); // set meanwhile
                timer = loop.schedule(this::tick, Math.max(SECOND / 1000, next - now), NANOSECONDS);
            }
        }
        private void open() {
            int server = preferred;
            try {
                open.add(new Stream(server));
                openAt = Long.MAX_VALUE; // until that one has spoken, or failed
            } catch (RuntimeException | Error broken) { openAt = failed(failure(streams, server, broken)); }
        }
        /** By a call, when the streams are late. Each try has a quarter of what is left, so that there are others. */
        private void renew(long now) {
            renewAt = Long.MAX_VALUE;
            call(LockServiceGrpc.getRenewMethod(), RenewRequest.newBuilder().setResource(lock.getResource()).setOwner(owner())
                    .setFencingToken(fencingToken()).build(), (until - now) / 4).whenComplete((answer, error) -> {
                if (error == null) confirm(now, now + nanos(answer.getLock().getRemaining()), answer.getLock());
                else renewAt = failed(error);
                tick();
            });
        }
        /** The server renews while it is open. The next one is opened before its time is over, and takes over once it has spoken. */
        private final class Stream implements StreamObserver<KeepAliveResponse> {
            final int server;
            final ClientCall<KeepAliveRequest, KeepAliveResponse> call;
            final long asked = now();
            long patience = asked + Math.min(CALL, (until - asked) / 2), base; // base: what expires_at of zero is on our clock
            boolean spoken;
            Stream(int server) {
                this.server = server;
                call = streams.get(server).newCall(LockServiceGrpc.getKeepAliveMethod(), CallOptions.DEFAULT);
                ClientCalls.asyncServerStreamingCall(call, KeepAliveRequest.newBuilder().setResource(lock.getResource()).setOwner(owner())
                        .setFencingToken(fencingToken()).build(), this);
            }
            @Override public void onNext(KeepAliveResponse word) {
                if (!open.contains(this)) return;
                Lock renewed = word.getLock();
                long arrived = now(), remaining = nanos(renewed.getRemaining()), interval = Math.min(nanos(renewed.getTtl()) / 3, 20 * SECOND);
                long expires = renewed.getExpiresAt().getSeconds() * SECOND + renewed.getExpiresAt().getNanos();
                if (!spoken) { // the first word: the one before ends here
                    spoken = true;
                    base = asked + remaining - expires;
                    for (Stream older : List.copyOf(open)) if (older != this) { open.remove(older); older.call.cancel("followed", null); }
                    long time = nanos(word.getStreamRemaining()), lead = (long) (interval * ThreadLocalRandom.current().nextDouble(2, 2.5));
                    openAt = arrived + Math.max(time - Math.min(lead, time / 2), SECOND / 20);
                } else failures = 0;
                // It may have been under way for any time: counted from the first, which is counted from the asking.
                confirm(arrived, Math.min(base + expires, arrived + remaining), renewed);
                patience = arrived + 2 * interval;
                tick();
            }
            @Override public void onError(Throwable thrown) {
                if (!open.remove(this)) return; // cancelled by us
                call.cancel("silent", null);
                openAt = Math.min(openAt, failed(failure(streams, server, thrown)));
                tick();
            }
            @Override public void onCompleted() { onError(new IOException("the stream ended without a word")); }
        }
    }
}
