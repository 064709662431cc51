// Does over the Node.js client what it is told: tests/polyglot/README.md says how.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { Client, InvalidError, LostError, RefusedError, SpentError } from "../../../../client/polyglot/node/index.js";
import { protos } from "../../../../client/polyglot/node/errors.js";

const home = new URL("../../../../client/polyglot/node/", import.meta.url);
const grpc = createRequire(home)("@grpc/grpc-js");
const { LockService } = grpc.loadPackageDefinition(protos).fencepost.v1;

let client, stub;
const leases = new Map();
const works = new Map();

const all = (name) => [...leases].filter(([key]) => key.startsWith(`${name}/`)).map(([, lease]) => lease);
const options = ({ ttl_ms: ttl, wait_ms: wait, owner, request_id: requestId }) => ({ ttl, wait, owner, requestId });

function failure(error) {
  if (error instanceof RefusedError) {
    return { outcome: "refused", holder: error.holder.owner, remaining_ms: Math.floor(error.holder.remaining) };
  }
  if (error instanceof LostError) return { outcome: "lost", reason: error.reason };
  if (error instanceof SpentError) return { outcome: "spent" };
  if (error instanceof InvalidError) return { outcome: "invalid", fields: error.fields };
  console.error(error);
  return { outcome: "unavailable" };
}

const commands = {
  connect({ endpoints }) {
    client?.close();
    stub?.close();
    client = new Client(endpoints);
    stub = new LockService(endpoints[0], grpc.credentials.createInsecure());
    return {};
  },
  async acquire(command) {
    const lease = await client.acquire(command.resource, options(command));
    leases.set(command.as, lease);
    return { outcome: "acquired", token: Number(lease.fencingToken), owner: lease.owner };
  },
  async acquire_many({ as, resource, count, ttl_ms: ttl }) {
    const take = async (_, i) => leases.set(`${as}/${i}`, await client.acquire(`${resource}-${i}`, { ttl }));
    const taken = await Promise.allSettled(Array.from({ length: count }, take));
    return { acquired: taken.filter(({ status }) => status === "fulfilled").length };
  },
  check({ as }) {
    const { held, remaining, reason } = leases.get(as);
    return { held, remaining_ms: Math.floor(remaining), reason };
  },
  check_many: ({ as }) => ({ held: all(as).filter(({ held }) => held).length }),
  async wait_lost({ as, within_ms: within }) {
    const lease = leases.get(as);
    await sleep(within, undefined, { signal: lease.signal }).catch(() => {});
    return lease.reason ? { lost: true, reason: lease.reason } : { lost: false };
  },
  async release({ as }) {
    await leases.get(as).release();
    return { outcome: "released" };
  },
  async release_many({ as }) {
    const released = await Promise.allSettled(all(as).map((lease) => lease.release()));
    return { released: released.filter(({ status }) => status === "fulfilled").length };
  },
  // Answers once the work has begun; the lock is held for as long as it goes on.
  work(command) {
    return new Promise((resolve, reject) => {
      const stop = new AbortController();
      let state = "ended";
      const ended = client.withLock(command.resource, options(command), async (lease) => {
        resolve({ token: Number(lease.fencingToken) });
        const signal = AbortSignal.any([lease.signal, stop.signal]);
        await sleep(2 ** 31 - 1, undefined, { signal }).catch(() => {});
        if (lease.signal.aborted) state = "stopped";
      }).catch(reject).then(() => ({ state })); // which rejects nothing once the work has begun
      works.set(command.as, { stop, ended });
    });
  },
  async work_state({ as, within_ms: within }) {
    const running = sleep(within, { state: "running" }, { ref: false });
    return Promise.race([works.get(as).ended, running]);
  },
  async stop_work({ as }) {
    const { stop, ended } = works.get(as);
    stop.abort();
    return ended;
  },
  call: ({ rpc, request }) => new Promise((resolve) => {
    stub[rpc](fromJson(request), { deadline: Date.now() + 6000 }, (error, response) => {
      if (!error) return resolve({ code: "OK", response: toJson(response) });
      const info = details(error, "google.rpc.ErrorInfo"), bad = details(error, "google.rpc.BadRequest");
      const reason = info?.domain === "fencepost" ? info.reason : null;
      resolve({ code: grpc.status[error.code], reason, fields: bad?.field_violations.map(({ field }) => field) ?? [] });
    });
  }),
};

function details({ metadata }, type) {
  const bytes = metadata.get("grpc-status-details-bin")[0];
  const any = bytes && protos["google.rpc.Status"].deserialize(bytes).details.find((d) => d.type_url.endsWith(type));
  return any && protos[type].deserialize(any.value);
}

// Protobuf's JSON, as far as the contract needs it: a duration is "60s", a time RFC 3339, an int64 a string.
function fromJson(request) {
  if (typeof request.ttl !== "string") return request;
  const [, seconds, fraction = ""] = /^(\d+)(?:\.(\d+))?s$/.exec(request.ttl);
  return { ...request, ttl: { seconds, nanos: Number(fraction.padEnd(9, "0")) } };
}
function toJson(value) {
  if (value === null || typeof value !== "object") return value;
  if (!("nanos" in value)) {
    const fields = Object.entries(value).map(([name, field]) => [name, name.endsWith("_at") ? time(field) : toJson(field)]);
    return Object.fromEntries(fields.filter(([, field]) => field && !isEmpty(field)));
  }
  return `${value.seconds}${fraction(value.nanos)}s`;
}
const isEmpty = (field) => typeof field === "object" && Object.keys(field).length === 0;
const time = (value) => value && new Date(Number(value.seconds) * 1000).toISOString().replace(".000", fraction(value.nanos));
const fraction = (nanos) => nanos ? `.${String(nanos).padStart(9, "0").replace(/(000){1,2}$/, "")}` : "";

for await (const line of createInterface({ input: process.stdin })) {
  const command = JSON.parse(line);
  const answer = await (async () => commands[command.do](command))().catch(failure);
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
process.exit(0);
