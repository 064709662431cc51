package fencepost.polyglot;

import com.google.gson.Gson;
import com.google.gson.JsonArray;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.protobuf.Any;
import com.google.protobuf.Message;
import com.google.protobuf.util.JsonFormat;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import fencepost.LockClient;
import fencepost.LockClient.Kind;
import fencepost.LockClient.Lease;
import fencepost.LockClient.LockException;
import fencepost.LockClient.LostException;
import fencepost.LockClient.Options;
import fencepost.v1.AcquireRequest;
import fencepost.v1.GetRequest;
import fencepost.v1.LockServiceGrpc;
import fencepost.v1.ReleaseRequest;
import fencepost.v1.RenewRequest;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.function.Function;

/** Does what tests/polyglot/README.md says, by the helper in client/polyglot/java. */
public final class Agent {
    /** Work under a lock, in a thread of its own. */
    private record Job(Future<?> done, CountDownLatch stop, AtomicBoolean lost) {}

    private final ExecutorService pool = Executors.newCachedThreadPool(work -> {
        Thread thread = new Thread(work);
        thread.setDaemon(true);
        return thread;
    });
    private final Map<String, Lease> leases = new HashMap<>();
    private final Map<String, List<Lease>> many = new HashMap<>();
    private final Map<String, Job> jobs = new HashMap<>();
    private LockClient client;
    private List<ManagedChannel> bare = List.of();

    public static void main(String[] args) throws Exception {
        Agent agent = new Agent();
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            JsonObject answer;
            try {
                answer = agent.obey(JsonParser.parseString(line).getAsJsonObject());
            } catch (LockException failed) {
                answer = failure(failed);
            }
            System.out.println(new Gson().newBuilder().serializeNulls().create().toJson(answer));
            System.out.flush();
        }
        if (agent.client != null) agent.client.close();
    }

    private JsonObject obey(JsonObject command) throws Exception {
        String as = command.has("as") ? command.get("as").getAsString() : "";
        JsonObject answer = new JsonObject();
        switch (command.get("do").getAsString()) {
            case "connect" -> connect(new Gson().fromJson(command.get("endpoints"), String[].class));
            case "acquire" -> {
                Lease lease = client.acquire(command.get("resource").getAsString(), options(command));
                leases.put(as, lease);
                answer.addProperty("outcome", "acquired");
                answer.addProperty("token", lease.fencingToken());
                answer.addProperty("owner", lease.owner());
            }
            case "acquire_many" -> {
                String resource = command.get("resource").getAsString();
                List<Future<Lease>> asked = new ArrayList<>();
                for (int i = 0; i < command.get("count").getAsInt(); i++) {
                    String name = resource + "-" + i;
                    asked.add(pool.submit(() -> client.acquire(name, options(command))));
                }
                many.put(as, finished(asked));
                answer.addProperty("acquired", many.get(as).size());
            }
            case "check" -> {
                Lease lease = leases.get(as);
                long remaining = lease.remaining().toMillis();
                String reason = reason(lease);
                answer.addProperty("held", reason == null);
                answer.addProperty("remaining_ms", reason == null ? remaining : 0);
                if (reason != null) answer.addProperty("reason", reason);
            }
            case "check_many" -> answer.addProperty("held", many.get(as).stream().filter(Lease::isHeld).count());
            case "wait_lost" -> {
                try {
                    String reason = leases.get(as).lost().toCompletableFuture().get(command.get("within_ms").getAsLong(), TimeUnit.MILLISECONDS);
                    answer.addProperty("lost", true);
                    answer.addProperty("reason", reason);
                } catch (TimeoutException over) {
                    answer.addProperty("lost", false);
                }
            }
            case "release" -> {
                leases.remove(as).release();
                answer.addProperty("outcome", "released");
            }
            case "release_many" -> {
                List<Future<Lease>> asked = new ArrayList<>();
                for (Lease lease : many.remove(as)) asked.add(pool.submit(lease::release, lease));
                answer.addProperty("released", finished(asked).size());
            }
            case "work" -> answer.addProperty("token", work(as, command));
            case "work_state" -> answer.addProperty("state", state(as, command.get("within_ms").getAsLong()));
            case "stop_work" -> {
                jobs.get(as).stop.countDown();
                answer.addProperty("state", state(as, 10_000));
            }
            case "call" -> call(command, answer);
            default -> throw new IllegalArgumentException("unknown: " + command);
        }
        return answer;
    }

    private void connect(String[] endpoints) {
        if (client != null) client.close();
        bare.forEach(ManagedChannel::shutdownNow);
        client = new LockClient(endpoints);
        bare = List.of(endpoints).stream().map(endpoint -> ManagedChannelBuilder.forTarget(endpoint).usePlaintext().build()).toList();
    }

    private static Options options(JsonObject command) {
        return new Options(
                Duration.ofMillis(command.get("ttl_ms").getAsLong()),
                Duration.ofMillis(command.has("wait_ms") ? command.get("wait_ms").getAsLong() : 0),
                command.has("owner") ? command.get("owner").getAsString() : null,
                command.has("request_id") ? command.get("request_id").getAsString() : null,
                Map.of());
    }

    private static String reason(Lease lease) {
        try {
            lease.check();
            return null;
        } catch (LostException lost) {
            return lost.reason;
        }
    }

    /** Those that went well. */
    private static List<Lease> finished(List<Future<Lease>> asked) throws InterruptedException {
        List<Lease> done = new ArrayList<>();
        for (Future<Lease> one : asked) {
            try {
                done.add(one.get());
            } catch (ExecutionException failed) {
                System.err.println(failed.getCause());
            }
        }
        return done;
    }

    private long work(String as, JsonObject command) throws Exception {
        CompletableFuture<Long> token = new CompletableFuture<>();
        CountDownLatch stop = new CountDownLatch(1);
        AtomicBoolean lost = new AtomicBoolean();
        Future<?> done = pool.submit(() -> {
            try {
                return client.withLock(command.get("resource").getAsString(), options(command), lease -> {
                    token.complete(lease.fencingToken());
                    try {
                        stop.await();
                    } catch (InterruptedException told) {
                        lost.set(true);
                    }
                    return null;
                });
            } catch (Exception failed) {
                token.completeExceptionally(failed);
                throw failed;
            }
        });
        jobs.put(as, new Job(done, stop, lost));
        try {
            return token.get();
        } catch (ExecutionException failed) {
            throw (LockException) failed.getCause();
        }
    }

    private String state(String as, long withinMillis) throws InterruptedException {
        try {
            jobs.get(as).done.get(withinMillis, TimeUnit.MILLISECONDS);
        } catch (ExecutionException failed) {
            System.err.println(failed.getCause());
        } catch (TimeoutException running) {
            return "running";
        }
        return jobs.get(as).lost.get() ? "stopped" : "ended";
    }

    private void call(JsonObject command, JsonObject answer) throws IOException {
        StatusRuntimeException failed = null;
        for (ManagedChannel channel : bare) {
            var stub = LockServiceGrpc.newBlockingStub(channel).withDeadlineAfter(5, TimeUnit.SECONDS);
            try {
                Message response = switch (command.get("rpc").getAsString()) {
                    case "Acquire" -> send(command, AcquireRequest.newBuilder(), request -> stub.acquire(request.build()));
                    case "Renew" -> send(command, RenewRequest.newBuilder(), request -> stub.renew(request.build()));
                    case "Release" -> send(command, ReleaseRequest.newBuilder(), request -> stub.release(request.build()));
                    case "Get" -> send(command, GetRequest.newBuilder(), request -> stub.get(request.build()));
                    default -> throw new IllegalArgumentException("unknown: " + command);
                };
                answer.addProperty("code", "OK");
                answer.add("response", JsonParser.parseString(JsonFormat.printer().preservingProtoFieldNames().print(response)));
                return;
            } catch (StatusRuntimeException status) {
                failed = status;
                if (status.getStatus().getCode() != io.grpc.Status.Code.UNAVAILABLE) break;
            }
        }
        answer.addProperty("code", failed.getStatus().getCode().name());
        answer.add("reason", null);
        JsonArray fields = new JsonArray();
        for (Any detail : StatusProto.fromThrowable(failed).getDetailsList()) {
            if (detail.is(ErrorInfo.class) && detail.unpack(ErrorInfo.class).getDomain().equals("fencepost")) {
                answer.addProperty("reason", detail.unpack(ErrorInfo.class).getReason());
            } else if (detail.is(BadRequest.class)) {
                detail.unpack(BadRequest.class).getFieldViolationsList().forEach(bad -> fields.add(bad.getField()));
            }
        }
        answer.add("fields", fields);
    }

    private static <B extends Message.Builder> Message send(JsonObject command, B request, Function<B, Message> call) throws IOException {
        JsonFormat.parser().merge(command.get("request").toString(), request);
        return call.apply(request);
    }

    private static JsonObject failure(LockException failed) {
        JsonObject answer = new JsonObject();
        answer.addProperty("outcome", (failed.kind == Kind.REJECTED ? Kind.UNAVAILABLE : failed.kind).name().toLowerCase());
        switch (failed.kind) {
            case REFUSED -> {
                answer.addProperty("holder", failed.holder.getOwner());
                var remaining = failed.holder.getRemaining();
                answer.addProperty("remaining_ms", remaining.getSeconds() * 1000 + remaining.getNanos() / 1_000_000);
            }
            case LOST -> answer.addProperty("reason", ((LostException) failed).reason);
            case INVALID -> answer.add("fields", new Gson().toJsonTree(failed.fields));
            default -> System.err.println(failed.getMessage());
        }
        return answer;
    }
}
