// Locks of a Fencepost server. index.d.ts says what each part promises; the comments here say why it is done so.
import { randomBytes, randomUUID } from "node:crypto";
import { hostname, uptime } from "node:os";
import { setTimeout as sleep } from "node:timers/promises";
import grpc from "@grpc/grpc-js";
import { LostError, RefusedError, SpentError, UnavailableError, decode, invalid, lost, ms, protos } from "./errors.js";
export { FencepostError, InvalidError, LostError, RefusedError, SpentError, UnavailableError } from "./errors.js";
const { LockService } = grpc.loadPackageDefinition(protos).fencepost.v1;

// Milliseconds on a clock that counts a machine's sleep. On Linux the monotonic clock does not, and uptime does, in
// steps of 10 ms: the one that has run further counts.
let ahead = -Infinity;
function now() {
  const awake = performance.now();
  ahead = Math.max(ahead, process.platform === "linux" ? uptime() * 1000 - awake : 0);
  return awake + ahead;
}
const backoff = (tries, longest = 1000) => Math.max(2, Math.random() * Math.min(longest, 10 * 2 ** tries)); // full jitter
const usable = (lock) => lock?.fencing_token > 0 && lock.remaining && lock.ttl && lock.expires_at;

class Servers {
  callsAt = 0; streamsAt = 0; ends = new Map(); // who answered last, who gets the next stream, how to end what is held
  pending = new Set(); closed = undefined; // what close() waits for, and what is thrown from then on

  constructor(endpoints, timeout, credentials) {
    const options = {
      "grpc.use_local_subchannel_pool": 1, // else calls and streams would share one connection
      "grpc.initial_reconnect_backoff_ms": 100, "grpc.max_reconnect_backoff_ms": 1000,
      "grpc.keepalive_time_ms": 3000, "grpc.keepalive_timeout_ms": 5000, // finds a dead peer within a usual lease, not a slow one
    };
    const stub = (at) => new LockService(at.trim().replace("http://", ""), credentials, options);
    Object.assign(this, { timeout, calls: endpoints.map(stub), streams: endpoints.map(stub) });
  }
  track(work) {
    const done = work.finally(() => this.pending.delete(done));
    this.pending.add(done);
    return done;
  }
  // Asks the servers in turn until one answers or the time is over. One that hangs leaves the others their share of it;
  // one that is no Fencepost (a proxy's default backend) does not hide them, and only when all are none is that the answer.
  // A signal ends the try under way; stop lets it end, and is for what must know its answer.
  async call(rpc, request, budget, signal, stop) {
    const end = now() + budget, first = this.callsAt, count = this.calls.length;
    for (let tries = 0, rejections = 0, maybeDone = false, known; ; ) {
      const at = (first + tries) % count, untried = count - (tries % count), sent = now();
      const deadline = Date.now() + (end - sent) / untried;
      try {
        const answer = await new Promise((resolve, reject) => {
          let message;
          const cancel = () => call.cancel();
          const call = this.calls[at][rpc](request, { deadline }, (_, answer) => (message = answer));
          // Not the callback: it calls an OK without a message UNIMPLEMENTED, and so not done.
          call.on("status", (status) => {
            signal?.removeEventListener("abort", cancel);
            message ? resolve(message) : reject(decode(status));
          });
          signal?.addEventListener("abort", cancel);
        });
        const sound = rpc === "Release" || answer.holder || usable(answer.lock);
        if (!sound) throw new UnavailableError("an answer of nonsense", { retryable: true, maybeDone: true });
        this.callsAt = at;
        return { answer, sent };
      } catch (error) {
        maybeDone ||= error.maybeDone ?? false;
        rejections = error.rejected ? rejections + 1 : 0;
        if (!known || rejections % count === 0) known = error; // who rejects knows nothing of the others
        known.maybeDone = maybeDone; // by this try or by one before it
        const another = rejections > 0 ? rejections < count : error.retryable;
        const pause = ++tries % count ? 0 : backoff(2 + tries / count) + (error.retryDelay ?? 0);
        if (!another || now() + pause + budget / 20 >= end) throw known; // no time for another one
        await sleep(pause, undefined, { signal: stop }).catch(() => { throw known; });
      }
    }
  }
  async release({ resource, owner, fencing_token }) {
    await this.call("Release", { resource, owner, fencing_token }, this.timeout).catch((error) => {
      if (!(error.maybeDone && error.reason === "LOCK_NOT_FOUND")) throw error; // else a lost try did it
    });
  }
}

export class Lease {
  #servers; #key; #timer; #stream; #opening; #released; #failures = 0; #renewing = false;
  #until = -Infinity; #renewAt = -Infinity; #openAt = -Infinity; #over = false; #lost = new AbortController();
  constructor(servers, lock, sent) {
    const { resource, owner, fencing_token } = lock;
    Object.assign(this, { resource, owner, fencingToken: BigInt(fencing_token) });
    this.#servers = servers;
    this.#key = { resource, owner, fencing_token };
    // The work has to hear of it before anybody else may have the lock.
    servers.ends.set(this, () => { this.#lose("CLOSED"); this.release().catch(() => {}); });
    this.#confirm(sent, sent + ms(lock.remaining), lock);
  }
  // Every look is by the clock, so that a process that was frozen knows on its first one; and once over, it is over.
  get held() {
    if (!this.#over && now() >= this.#until) this.#lose("UNCONFIRMED");
    return !this.#over;
  }
  get remaining() { return this.held ? Math.max(0, this.#until - now()) : 0; }
  get signal() { return this.held, this.#lost.signal; }
  get reason() { return this.signal.reason?.reason; }
  release() { return (this.#released ??= this.#servers.track(this.#release())); }
  async [Symbol.asyncDispose]() { await this.release().catch((error) => { if (error.reason) throw error; }); }

  async #release() {
    const { held, reason } = this;
    this.#end();
    const servers = this.#servers;
    if (held) {
      await servers.release(this.#key).catch((error) => {
        if (error.reason) this.#lost.abort(error);
        throw error;
      });
    // What we gave up ourselves a server may still know. Whoever hears that it is lost need not wait for that.
    } else if (reason === "UNCONFIRMED" || reason === "CLOSED") servers.track(servers.release(this.#key)).catch(() => {});
    this.#lost.signal.throwIfAborted();
  }
  #lose(reason) {
    if (this.#over) return;
    this.#end();
    this.#lost.abort(lost(reason));
  }
  #end() {
    this.#over = true;
    this.#opening?.cancel();
    this.#stream?.cancel();
    clearTimeout(this.#timer);
    this.#servers.ends.delete(this);
  }
  #confirm(seen, until, { ttl }) {
    this.#until = Math.max(this.#until, until - Math.max(Math.min(ms(ttl) / 10, 500), ms(ttl) / 2000));
    this.#renewAt = Math.max(this.#renewAt, seen + Math.min(0.4 * ms(ttl), 30_000));
    this.#tick();
  }
  // Does what is due, and watches the deadline. Looks every second, since timers stand still while the machine sleeps.
  #tick() {
    clearTimeout(this.#timer);
    if (!this.held) return;
    const time = now();
    if (time >= this.#openAt) this.#open();
    if (time >= this.#renewAt && !this.#renewing) this.#renew(); // the streams are late
    const next = Math.min(this.#until, this.#openAt, this.#renewing ? Infinity : this.#renewAt, time + 1000);
    this.#timer = setTimeout(() => this.#tick(), Math.max(1, next - time));
  }
  async #renew() {
    const left = this.remaining;
    this.#renewing = true;
    try {
      const { answer, sent } = await this.#servers.call("Renew", this.#key, Math.min(this.#servers.timeout, left / 4));
      if (this.held) this.#confirm(sent, sent + ms(answer.lock.remaining), answer.lock);
    } catch (error) {
      if (error.reason) this.#lose(error.reason);
      // Also where one says that it is no Fencepost: a proxy does for a while, and this is all that keeps the lease then.
      this.#renewAt = now() + Math.max(5, Math.min(backoff(this.#failures, error.retryable ? 1000 : 30_000), left / 4));
    }
    this.#renewing = false;
    this.#tick();
  }
  // A stream takes over from the one before it once it has spoken, so that the renewals do not pause.
  #open() {
    const servers = this.#servers, at = servers.streamsAt, asked = now();
    const call = (this.#opening = servers.streams[at].KeepAlive(this.#key));
    let first, silence;
    const expectWordIn = (time) => { clearTimeout(silence); silence = setTimeout(() => call.cancel(), time).unref(); };
    this.#openAt = Infinity;
    expectWordIn(Math.min(servers.timeout, this.remaining / (servers.streams.length + 1)));
    call.on("error", () => {}); // the status says it too
    call.on("status", (status) => {
      clearTimeout(silence);
      if (this.#over) return;
      if (call === this.#opening) this.#opening = undefined;
      else if (call === this.#stream) this.#stream = undefined;
      else return; // another one took over
      const { reason, retryable } = decode(status), longest = retryable ? 1000 : 30_000;
      if (reason) return this.#lose(reason);
      if (servers.streamsAt === at) servers.streamsAt = (at + 1) % servers.streams.length; // unless another has said so
      if (!this.#opening) this.#openAt = now() + backoff(++this.#failures, longest);
      this.#tick();
    });
    call.on("data", ({ lock, stream_remaining }) => {
      if (!this.held || (call !== this.#opening && call !== this.#stream)) return;
      if (!usable(lock)) return call.cancel();
      // A message may have been under way for any time: the first counts from before the stream was asked for, a later
      // one by how much its expires_at is later, and none for longer than if it had been sent just now.
      const seen = now(), left = ms(lock.remaining), interval = Math.min(ms(lock.ttl) / 3, 20_000);
      first ??= { until: asked + left, expires: ms(lock.expires_at) };
      const until = Math.min(first.until + Math.max(0, ms(lock.expires_at) - first.expires), seen + left);
      expectWordIn(2 * interval);
      if (call === this.#opening) {
        const before = this.#stream, time = stream_remaining ? ms(stream_remaining) : 0;
        [this.#stream, this.#opening] = [call, undefined];
        before?.cancel();
        this.#openAt = seen + Math.max(50, time - Math.min((2 + Math.random() / 2) * interval, time / 2));
      } else this.#failures = 0;
      this.#confirm(seen, until, lock);
    });
  }
}

export class Client {
  #servers;
  constructor(endpoints, { timeout = 5000, credentials = grpc.credentials.createInsecure() } = {}) {
    const each = [endpoints].flat().flatMap((list) => list.split(","));
    if (!each.length) throw invalid([{ field: "endpoints", description: "there are none" }]);
    // gRPC fails a call at once whose end is very far away, and not to where anybody hears it.
    const sane = typeof timeout === "number" && timeout > 0 && timeout <= 86_400_000;
    if (!sane) throw invalid([{ field: "timeout", description: "not a number of milliseconds, up to a day" }]);
    this.#servers = new Servers(each, timeout, credentials);
  }
  async acquire(resource, options) { return this.#servers.track(this.#acquire(resource, options)); }
  async #acquire(resource, { ttl = 30_000, wait = 0, owner, requestId, labels, signal } = {}) {
    for (const [field, time] of Object.entries({ ttl, wait })) {
      if (!(typeof time === "number" && time >= 0)) throw invalid([{ field, description: "not a number of milliseconds" }]);
    }
    const servers = this.#servers, until = now() + wait, left = () => Math.max(0, until - now());
    const request = {
      resource, labels, ttl: { seconds: Math.floor(ttl / 1000), nanos: Math.floor((ttl % 1000) * 1e6) },
      owner: owner ?? `${hostname().slice(0, 50) || "host"}-${process.pid}-${randomBytes(6).toString("hex")}`,
      request_id: requestId ?? randomUUID(), // one for all tries, so that a grant whose answer was lost is found again
    };
    // Not AbortSignal.any: one that lives long would keep a little of each acquisition.
    const stopping = new AbortController(), stop = stopping.signal;
    const end = () => stopping.abort(servers.closed ?? signal.reason);
    servers.ends.set(stopping, end);
    signal?.addEventListener("abort", end);
    if (servers.closed || signal?.aborted) end();
    let spent = 0, seen, refusal, unheard = false; // who had it last, and how that was said; whether a try may have been granted without an answer
    try {
      for (let tries = 1; ; tries++) {
        stop.throwIfAborted();
        const budget = Math.min(servers.timeout, wait ? left() : Infinity);
        const outcome = await this.#try(request, budget, signal, stop).catch((error) => error);
        const { holder, retryable, maybeDone, retryDelay = 0 } = outcome; // none of them in a lease
        // Who had it a moment ago says more than a last try that had no time left.
        if (holder || budget > 1000) refusal = holder && outcome;
        unheard = maybeDone || (unheard && retryable === true);
        if (outcome instanceof Lease) return outcome;
        stop.throwIfAborted();
        if (outcome instanceof SpentError && requestId === undefined && ++spent <= 3) {
          request.request_id = randomUUID();
          await sleep(backoff(spent), undefined, { signal: stop }).catch(() => stop.throwIfAborted());
          continue;
        }
        if (!wait || !(holder || retryable)) throw outcome;
        if (holder && holder.owner !== seen) [tries, seen] = [1, holder.owner]; // where it goes round, nobody sleeps for long
        // A little after the holder's lease has run out the lock is free.
        const pause = retryDelay + Math.min(backoff(tries), holder ? holder.remaining + backoff(1) : Infinity);
        const last = left() <= pause + 50; // too little for another try
        await sleep(last ? left() : pause, undefined, { signal: stop }).catch(() => stop.throwIfAborted());
        if (last) throw refusal ?? outcome;
      }
    } finally {
      servers.ends.delete(stopping);
      signal?.removeEventListener("abort", end);
      // Not where the owner or the id is the caller's: a later acquisition of theirs may hold the lock by then.
      if (unheard && owner === undefined && requestId === undefined) {
        const undo = ({ answer: { lock } }) => lock && servers.release(lock);
        servers.track(servers.call("Acquire", request, 2000).then(undo).catch(() => {}));
      }
    }
  }
  async #try(request, budget, signal, stop) {
    const servers = this.#servers, { answer, sent } = await servers.call("Acquire", request, budget, signal, stop);
    if (!answer.acquired) {
      const { owner, labels, remaining, acquired_at } = answer.holder;
      const holder = { owner, labels, remaining: ms(remaining), acquiredAt: new Date(ms(acquired_at)) };
      throw new RefusedError(`${owner} has the lock`, { holder });
    }
    if (servers.closed) {
      await servers.release(answer.lock).catch(() => {}); // else it runs out
      throw servers.closed;
    }
    const lease = new Lease(servers, answer.lock, sent);
    if (lease.held) return lease;
    throw new UnavailableError("the answer came too late", { retryable: true, maybeDone: true });
  }
  async withLock(resource, options, work = options) {
    const lease = await this.acquire(resource, work === options ? {} : options);
    try {
      const result = await work(lease);
      await lease[Symbol.asyncDispose]();
      return result;
    } catch (error) {
      await lease.release().catch(() => {}); // what the work has to say matters more
      if (lease.reason && error !== lease.signal.reason) throw Object.assign(lost(lease.reason), { cause: error });
      throw error;
    }
  }
  async close() {
    const { ends, pending, calls, streams } = this.#servers;
    this.#servers.closed ??= new UnavailableError("the client is closed", { retryable: false, maybeDone: false });
    for (const end of [...ends.values()]) end();
    while (pending.size) await Promise.allSettled(pending); // one may begin another: to give back what it got
    for (const stub of [...calls, ...streams]) stub.close();
  }
}
