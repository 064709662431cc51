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
import java.util.function.*;

/** Takes locks. All leases of a client share one thread, and two connections to a server. */
public final class LockClient implements AutoCloseable {
    /**
     * How a lock is taken. {@code ttl}: how long the lease lasts without a renewal. {@code waitUpTo}: for how long to try; zero or less: once.
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
    /**
     * REFUSED: another has the lock. UNAVAILABLE: it may have happened. INVALID: no repetition helps. SPENT: use a new request id.
     * REJECTED: no server takes such calls, at least not from you; is it Fencepost?
     */
    public enum Kind { REFUSED, LOST, UNAVAILABLE, INVALID, SPENT, REJECTED }
    /** Why there is no lock. {@code holder}, when REFUSED: who has it. {@code fields}, when INVALID: which, where the server said so. */
    public static class LockException extends RuntimeException {
        public final Kind kind;
        public final transient Holder holder;
        public final List<String> fields;
        private long retryDelay; // for how long the server wants to be left alone
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
    private static final Set<String> REJECTED = Set.of("INVALID_ARGUMENT", "UNIMPLEMENTED", "UNAUTHENTICATED");
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
    public LockClient(Function<String, ManagedChannelBuilder<?>> channel, String... endpoints) {
        if (endpoints.length == 0) throw new IllegalArgumentException("no endpoint");
        loop.setRemoveOnCancelPolicy(true);
        for (var channels : List.of(calls, streams)) for (String endpoint : endpoints)
            channels.add(channel.apply(endpoint).executor(loop).keepAliveTime(10, SECONDS).keepAliveTimeout(5, SECONDS).build());
    }

    /** Takes the lock and keeps it until the lease is closed. Interrupted, it gives back what it may have got. */
    public Lease acquire(String resource, Options options) throws InterruptedException {
        boolean once = options.waitUpTo.compareTo(Duration.ZERO) <= 0, ours = options.owner == null && options.requestId == null, unheard = false;
        String owner = options.owner == null ? uniqueOwner() : options.owner;
        long end = now() + (once ? CALL : nanos(options.waitUpTo));
        var request = AcquireRequest.newBuilder().setResource(resource).setOwner(owner)
                .setRequestId(options.requestId == null ? newId() : options.requestId).putAllLabels(options.labels)
                .setTtl(com.google.protobuf.Duration.newBuilder().setSeconds(options.ttl.getSeconds()).setNanos(options.ttl.getNano()));
        String seen = null; // who had it last
        LockException refusal = null;
        var going = track(new CompletableFuture<>()); // known before the look at closed: close() waits for it
        try {
            for (int tries = 1; ; tries++) {
                if (isClosed()) throw new IllegalStateException("the client is closed");
                var call = new Call<>(LockServiceGrpc.getAcquireMethod(), request.build(), end, () -> isClosed() || going.isDone());
                long pause = jitter(tries, SECOND), began = now();
                LockException error;
                try {
                    unheard = true; // until an answer says otherwise: also when this thread is interrupted
                    var answer = call.get();
                    unheard = false;
                    if (answer.getAcquired()) {
                        Lease lease = new Lease(answer.getLock(), call.sent);
                        if (lease.isHeld() && lease.keep()) return lease;
                        lease.end();
                        if (isClosed()) throw new IllegalStateException("the client is closed");
                        throw new LockException(Kind.UNAVAILABLE, "the answer came too late", null, null, List.of());
                    }
                    error = refusal = new LockException(Kind.REFUSED, "held by " + answer.getHolder().getOwner(), null, answer.getHolder(), List.of());
                    if (once) throw error;
                    String holder = answer.getHolder().getOwner();
                    if (!holder.equals(seen)) { seen = holder; pause = jitter(tries = 1, SECOND); } // it goes round: nobody sleeps for long
                    pause = Math.min(pause, nanos(error.holder.getRemaining()) + jitter(1, SECOND)); // not all at the same time
                } catch (ExecutionException failed) {
                    error = (LockException) failed.getCause();
                    unheard = call.unheard && error.kind != Kind.SPENT;
                    if (isClosed()) continue; // to say so
                    // Who had it a moment ago says more than a last try that had no time left.
                    if (error.kind == Kind.UNAVAILABLE && refusal != null && end - began < SECOND) throw refusal;
                    if (error.kind != Kind.SPENT || options.requestId != null) throw error;
                    request.setRequestId(newId());
                }
                long left = end - now();
                boolean over = left < pause + SECOND / 20; // no time for another answer
                closed.await(over ? left : pause, NANOSECONDS);
                if (over) throw error;
            }
        } finally {
            if (unheard && ours) undo(request.build());
            going.complete(null);
        }
    }
    /** Asks what became of a try that nobody heard of, and gives back what it got: by the same id it is ours. */
    private void undo(AcquireRequest request) {
        long end = now() + CALL;
        track(new Call<>(LockServiceGrpc.getAcquireMethod(), request, end, () -> false).thenCompose(found ->
                found.getAcquired() ? giveBack(found.getLock(), end) : CompletableFuture.completedFuture(null)));
    }
    private CompletableFuture<ReleaseResponse> giveBack(Lock lock, long end) {
        return new Call<>(LockServiceGrpc.getReleaseMethod(), ReleaseRequest.newBuilder().setResource(lock.getResource())
                .setOwner(lock.getOwner()).setFencingToken(lock.getFencingToken()).build(), end, () -> false);
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
        held.forEach(lease -> lease.lose("CLOSED")); // all of them before the first is free
        held.forEach(Lease::end);
        for (long end = now() + CALL, left; !pending.isEmpty() && (left = end - now()) > 0; ) // one may begin another
            CompletableFuture.allOf(pending.toArray(CompletableFuture[]::new)).exceptionally(failed -> null)
                    .completeOnTimeout(null, left, NANOSECONDS).join();
        for (var channels : List.of(calls, streams)) channels.forEach(ManagedChannel::shutdownNow);
        loop.schedule(loop::shutdownNow, 1, SECONDS); // the channels end on it
    }
    /**
     * One call, at one server after the other until one answers or the time is over. A server that hangs leaves the others their share
     * of it; one that is no Fencepost (a proxy's default backend) does not hide them. After the start, on the client's thread alone.
     */
    private final class Call<Q, A extends com.google.protobuf.MessageLite> extends CompletableFuture<A> implements StreamObserver<A> {
        final MethodDescriptor<Q, A> method;
        final Q request;
        final long end;
        final BooleanSupplier stopped;
        int server = preferred, tries, rejections;
        long sent;
        boolean unheard; // whether a try may have had its effect
        LockException known;
        Call(MethodDescriptor<Q, A> method, Q request, long end, BooleanSupplier stopped) {
            this.method = method; this.request = request; this.end = end; this.stopped = stopped;
            loop.execute(this::send);
        }
        void send() {
            sent = now();
            int untried = calls.size() - tries++ % calls.size();
            var limit = CallOptions.DEFAULT.withDeadlineAfter(Math.min(CALL, end - sent) / untried, NANOSECONDS);
            try { ClientCalls.asyncUnaryCall(calls.get(server).newCall(method, limit), request, this); }
            catch (RuntimeException | Error broken) { unheard = true; completeExceptionally(failure(calls, server, broken)); }
        }
        @Override public void onNext(A answer) { if (answer.getSerializedSize() > 0 || request instanceof ReleaseRequest) complete(answer); }
        @Override public void onCompleted() { onError(new IOException("an answer without a message")); }
        @Override public void onError(Throwable thrown) {
            if (isDone()) return;
            LockException error = failure(calls, server, thrown);
            boolean done = unheard && request instanceof ReleaseRequest && error instanceof LostException over
                    && over.reason.equals("LOCK_NOT_FOUND"); // by a try before
            unheard |= error.kind == Kind.UNAVAILABLE;
            rejections = error.kind == Kind.REJECTED ? rejections + 1 : 0;
            if (known == null || rejections % calls.size() == 0) known = error; // who rejects knows nothing of the others
            server = (server + 1) % calls.size();
            long pause = tries % calls.size() > 0 ? 0 : error.retryDelay + jitter(tries / calls.size(), SECOND);
            boolean another = rejections > 0 ? rejections < calls.size() : error.kind == Kind.UNAVAILABLE;
            if (done) complete(null);
            else if (!another || stopped.getAsBoolean() || end - now() < pause + SECOND / 20) completeExceptionally(known);
            else loop.schedule(this::send, pause, NANOSECONDS);
        }
    }
    /** By the reason of our own ErrorInfo; of bare codes only those that no repetition mends. A proxy's NOT_FOUND ends no lease. */
    private LockException failure(List<ManagedChannel> channels, int server, Throwable thrown) {
        String reason = "", code = io.grpc.Status.fromThrowable(thrown).getCode().name();
        List<String> fields = new ArrayList<>();
        long retryDelay = 0;
        Metadata trailers = io.grpc.Status.trailersFromThrowable(thrown);
        byte[] details = trailers == null ? null : trailers.get(DETAILS);
        try {
            if (details != null) for (var any : com.google.rpc.Status.parseFrom(details).getDetailsList()) {
                ErrorInfo info = any.is(ErrorInfo.class) ? any.unpack(ErrorInfo.class) : ErrorInfo.getDefaultInstance();
                if (info.getDomain().equals("fencepost")) reason = info.getReason();
                if (any.is(RetryInfo.class)) retryDelay = nanos(any.unpack(RetryInfo.class).getRetryDelay());
                if (any.is(BadRequest.class)) any.unpack(BadRequest.class).getFieldViolationsList().forEach(bad -> fields.add(bad.getField()));
            }
        } catch (IOException garbled) { reason = ""; }
        if (LOST.contains(reason)) return new LostException(reason, thrown);
        Kind kind = switch (reason) {
            case "REQUEST_SPENT" -> Kind.SPENT;
            case "INVALID_REQUEST", "INTERNAL" -> Kind.INVALID;
            default -> REJECTED.contains(code) ? Kind.REJECTED : Kind.UNAVAILABLE;
        };
        if ((kind == Kind.UNAVAILABLE || kind == Kind.REJECTED) && preferred == server) preferred = (server + 1) % calls.size();
        channels.get(server).resetConnectBackoff(); // grpc's own grows to two minutes
        LockException error = new LockException(kind, thrown.getMessage(), thrown, null, fields);
        error.retryDelay = retryDelay;
        return error;
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
    /** At random up to a bound that doubles from 20 ms ("full jitter"). */
    private static long jitter(int tries, long most) {
        return SECOND / 500 + ThreadLocalRandom.current().nextLong(Math.min(most, SECOND / 50 << Math.min(tries - 1, 11)));
    }
    private static String newId() { return UUID.randomUUID().toString(); }
    private static final class Host { // asked for once, since that may wait for a name server
        static final String NAME = name();
        static String name() {
            try { String name = java.net.InetAddress.getLocalHost().getHostName(); return name.substring(0, Math.min(name.length(), 50)); }
            catch (IOException unnamed) { return "host"; }
        }
    }
    private static String uniqueOwner() { return Host.NAME + "-" + ProcessHandle.current().pid() + "-" + newId().substring(24); }
    private static Thread daemon(Runnable work) { Thread thread = new Thread(work, "fencepost"); thread.setDaemon(true); return thread; }

    /** A lock that is held, and renewed until it is closed or lost. Hand its token to what you write to; stop when {@link #check} throws. */
    public final class Lease implements AutoCloseable {
        private final Lock lock;
        private final CompletableFuture<String> lost = new CompletableFuture<>();
        private CompletableFuture<ReleaseResponse> ended; // since it is given back
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
        /** Gives the lock back. Throws {@link LostException} when it was lost before; UNAVAILABLE when no server could be told: it runs out. */
        public void release() {
            var back = end();
            try { if (!lost.isDone()) back.join(); }
            catch (CompletionException failed) { throw (LockException) failed.getCause(); }
            if (lost.isDone()) throw new LostException(lost.join(), null);
        }
        /** The same at the end of a block: a loss is thrown there as well, but not that a lock has to run out. */
        @Override public void close() {
            try { release(); } catch (LockException failed) { if (failed.kind == Kind.LOST) throw failed; }
        }
        private synchronized void lose(String reason) { if (ended == null) lost.complete(reason); }
        private boolean keep() {
            leases.add(this); // and then the look: close() sees the lease, or this sees close()
            if (isClosed()) return false;
            loop.execute(this::tick);
            return true;
        }
        private synchronized CompletableFuture<ReleaseResponse> end() {
            if (ended != null) return ended;
            long limit = now() + CALL; // for one that is held no later than it runs out
            if (isHeld()) ended = track(giveBack(lock, Math.min(limit, until)));
            else if (Set.of("UNCONFIRMED", "CLOSED").contains(lost.join())) ended = track(giveBack(lock, limit)); // a server may know it yet
            else ended = CompletableFuture.completedFuture(null);
            leases.remove(this);
            loop.execute(this::tick);
            return ended;
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
        /** A failure is not a loss, unless a server says so. Returns when to try again: the less often, the less use it is. */
        private long failed(LockException error) {
            if (error instanceof LostException over) lose(over.reason);
            failures++;
            if (error.kind != Kind.UNAVAILABLE) return now() + jitter(failures, 30 * SECOND);
            return now() + Math.min(jitter(failures, SECOND), (until - now()) / 4);
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
        /** By a call, when the streams are late. It has a quarter of what is left, so that there are others. */
        private void renew(long now) {
            renewAt = Long.MAX_VALUE;
            var call = new Call<>(LockServiceGrpc.getRenewMethod(), RenewRequest.newBuilder().setResource(lock.getResource()).setOwner(owner())
                    .setFencingToken(fencingToken()).build(), now + (until - now) / 4, () -> !isHeld());
            call.whenComplete((answer, error) -> {
                if (error == null) confirm(call.sent, call.sent + nanos(answer.getLock().getRemaining()), answer.getLock());
                // Also where one says that it is no Fencepost: a proxy does for a while, and this is all that keeps the lease then.
                else renewAt = Math.min(failed((LockException) error), now() + Math.max((until - now()) / 4, SECOND / 500));
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
