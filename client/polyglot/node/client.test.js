// What no real server does on demand: servers made up for it. The rest is tested by tests/polyglot.
import assert from "node:assert/strict";
import http2 from "node:http2";
import { after, before, test } from "node:test";
import grpc from "@grpc/grpc-js";
import { Client, InvalidError, LostError } from "./index.js";
import { protos } from "./errors.js";

const { LockService } = grpc.loadPackageDefinition(protos).fencepost.v1;
const lockOf = ({ resource, owner }) => {
  const time = { seconds: 1, nanos: 0 };
  return { resource, owner, fencing_token: "9007199254740991", acquired_at: time, expires_at: time, remaining: time, ttl: time };
};
const grants = ({ request }, answer) => answer(null, { acquired: true, lock: lockOf(request) });
const hangs = () => {};

const ends = [];
after(() => ends.forEach((end) => end()));
const listen = (server) => new Promise((resolve) => {
  server.listen(0, "127.0.0.1", () => resolve(`127.0.0.1:${server.address().port}`));
});
// A server with these handlers; the calls that it got are in `calls`.
async function stub(handlers) {
  const server = new grpc.Server(), calls = [];
  const counted = (rpc, handler) => (call, answer) => { calls.push(rpc); handler(call, answer); };
  server.addService(LockService.service, Object.fromEntries(Object.entries(handlers).map(([rpc, h]) => [rpc, counted(rpc, h)])));
  const port = await new Promise((resolve, reject) => {
    server.bindAsync("127.0.0.1:0", grpc.ServerCredentials.createInsecure(), (error, at) => error ? reject(error) : resolve(at));
  });
  ends.push(() => server.forceShutdown());
  return { endpoint: `127.0.0.1:${port}`, calls };
}
// Says that all went well, and nothing else.
async function silent() {
  const server = http2.createServer();
  server.on("stream", (stream) => {
    stream.respond({ ":status": 200, "content-type": "application/grpc", "grpc-status": "0" }, { endStream: true });
  });
  ends.push(() => server.close());
  return listen(server);
}
function open(t, ...options) {
  const client = new Client(...options);
  t.after(() => client.close());
  return client;
}
async function took(work) {
  const from = performance.now();
  await work;
  return performance.now() - from;
}

let healthy, foreign;
before(async () => {
  healthy = await stub({ Acquire: grants, Release: (_, answer) => answer(null, {}), KeepAlive: hangs });
  foreign = await stub({}); // another service's: UNIMPLEMENTED
});

test("release of a lost lease answers at once, and gives it back behind", async (t) => {
  const server = await stub({ Acquire: grants, Release: hangs, Renew: hangs, KeepAlive: hangs });
  const client = open(t, server.endpoint, { timeout: 1000 });
  const lease = await client.acquire("r");
  await new Promise((resolve) => lease.signal.addEventListener("abort", resolve));
  assert.equal(lease.reason, "UNCONFIRMED");
  assert(await took(assert.rejects(lease.release(), LostError)) < 500);
  await client.close();
  assert(server.calls.includes("Release"));
});

test("a server that is no Fencepost does not hide one", async (t) => {
  const client = open(t, [foreign.endpoint, healthy.endpoint]);
  await (await client.acquire("r")).release();

  const nowhere = open(t, [foreign.endpoint, foreign.endpoint]);
  const refused = assert.rejects(nowhere.acquire("r", { wait: 5000 }), { name: "UnavailableError", retryable: false });
  assert(await took(refused) < 1000);

  const away = open(t, [await silent(), foreign.endpoint], { timeout: 300 }); // the one there is may come back
  await assert.rejects(away.acquire("r", { owner: "o" }), { name: "UnavailableError", retryable: true, maybeDone: true });
});

test("a stream that one server does not know is opened at the next", async (t) => {
  const server = await stub({ Acquire: grants, Release: (_, answer) => answer(null, {}), KeepAlive: hangs });
  const client = open(t, [foreign.endpoint, server.endpoint]);
  const lease = await client.acquire("r");
  while (lease.held && !server.calls.includes("KeepAlive")) await new Promise((resolve) => setTimeout(resolve, 5));
  assert(lease.held);
  await lease.release();
});

test("an answer without a message may have happened, and is asked for again", async (t) => {
  const endpoint = await silent();
  const client = open(t, [endpoint, healthy.endpoint]);
  await (await client.acquire("r")).release();

  const alone = open(t, endpoint, { timeout: 300 });
  await assert.rejects(alone.acquire("r", { owner: "o" }), { name: "UnavailableError", retryable: true, maybeDone: true });
});

test("an empty message is no answer either", async (t) => {
  const empty = await stub({ Acquire: (_, answer) => answer(null, {}) });
  await (await open(t, [empty.endpoint, healthy.endpoint]).acquire("r")).release();
});

test("times that are none name their field", async (t) => {
  const client = open(t, healthy.endpoint);
  for (const ttl of [15_000n, "15s", Number.NaN, null, {}]) {
    await assert.rejects(client.acquire("r", { ttl }), (error) => error instanceof InvalidError && error.fields[0] === "ttl");
  }
  for (const wait of [1n, "1s", Number.NaN]) {
    await assert.rejects(client.acquire("r", { wait }), (error) => error instanceof InvalidError && error.fields[0] === "wait");
  }
});

test("a timeout that is none, and no endpoint, are named at once", () => {
  for (const timeout of [Infinity, Number.NaN, 0, -1, "5", null]) {
    assert.throws(() => new Client(healthy.endpoint, { timeout }), (error) => error.fields[0] === "timeout");
  }
  assert.throws(() => new Client([]), (error) => error.fields[0] === "endpoints");
});

test("a proxy that knows no Fencepost for a while costs no lease", async (t) => {
  let renewals = 0;
  const Renew = ({ request }, answer) =>
    ++renewals === 1 ? answer({ code: grpc.status.UNIMPLEMENTED }) : answer(null, { lock: lockOf(request) });
  const server = await stub({ Acquire: grants, Release: (_, answer) => answer(null, {}), Renew });
  const lease = await open(t, server.endpoint).acquire("r", { ttl: 1000 });
  await new Promise((resolve) => setTimeout(resolve, 1500));
  assert(lease.held);
  await lease.release();
});

test("nobody sleeps for long where a lock goes round", async (t) => {
  let asked = 0;
  const Acquire = (_, answer) => answer(null, { holder: { owner: `no ${++asked}`, remaining: { seconds: 2 }, acquired_at: { seconds: 1 } } });
  const server = await stub({ Acquire });
  await assert.rejects(open(t, server.endpoint).acquire("r", { wait: 1000 }), { name: "RefusedError" });
  assert(asked > 20, `asked ${asked} times`);
});
