/// <reference lib="esnext.disposable" />
import type { ChannelCredentials } from "@grpc/grpc-js";

/** Talks to the servers. One for a process: all its leases share two connections to each server. */
export class Client {
  /**
   * Connects nothing yet.
   * @param endpoints `["fencepost-a:50051", "fencepost-b:50051"]`, or one string with commas. `http://` may stand before each.
   */
  constructor(endpoints: string | string[], options?: ClientOptions);

  /**
   * Takes the lock, and keeps it until it is released or lost. A process does not end by itself while it holds one.
   *
   * After every error but {@link RefusedError}, what a try may have got without an answer is given back in the background,
   * unless `owner` or `requestId` is yours.
   * @throws RefusedError somebody else has it (still, when `wait` is over)
   * @throws UnavailableError no server could say, or none in time
   * @throws InvalidError @throws SpentError
   */
  acquire(resource: string, options?: AcquireOptions): Promise<Lease>;

  /**
   * Does `work` while the lock is held, and gives it back when the work ends, however it ends.
   *
   * The work is told to stop by `lease.signal`. It is waited for in any case, since nobody else can end it.
   * @throws LostError the lease was over before the work was: it may have overlapped with the next holder's. What the work
   *   threw itself is its `cause`
   * @throws what {@link acquire} throws, and what the work throws
   */
  withLock<T>(resource: string, work: (lease: Lease) => T | PromiseLike<T>): Promise<T>;
  withLock<T>(resource: string, options: AcquireOptions, work: (lease: Lease) => T | PromiseLike<T>): Promise<T>;

  /**
   * Ends what is held: each lease is lost first, for the reason `CLOSED`, and then given back. An `acquire`
   * that is under way or comes later throws an {@link UnavailableError}, and what it got is given back. Waits for all of it,
   * and closes the connections.
   */
  close(): Promise<void>;
}

export interface ClientOptions {
  /** Milliseconds for one call, with all its tries at all servers: up to 24 h. Default 5000. */
  timeout?: number;
  /** For all servers. Default `credentials.createInsecure()`. From the same copy of `@grpc/grpc-js` that this package uses. */
  credentials?: ChannelCredentials;
}

export interface AcquireOptions {
  /** Milliseconds that the lease lasts without a renewal: 500 to 24 h. Default 30000. It is renewed by itself. */
  ttl?: number;
  /** Milliseconds to go on trying while somebody else has it or no server answers. Default 0: once. `Infinity`: no limit. */
  wait?: number;
  /** Names ONE holder, never a host or a service. Default `<host>-<pid>-<random>`. */
  owner?: string;
  /** One acquisition, however many tries. Default: random, and a new one when it is spent, up to three times. */
  requestId?: string;
  /** Shown to whoever is refused. */
  labels?: Record<string, string>;
  /** Ends the waiting; rejects with its reason. */
  signal?: AbortSignal;
}

/** A lock that is held. Once lost it stays lost: acquiring again makes a new one, with a new token. */
export class Lease implements AsyncDisposable {
  private constructor();
  readonly resource: string;
  readonly owner: string;
  /** Larger than that of every earlier holder. Hand it to what you write to, with every write, and have it compared there. */
  readonly fencingToken: bigint;
  /** Whether the lease may be trusted now: by the clock, without a word to the network. */
  readonly held: boolean;
  /** For how many milliseconds it may be trusted if nothing renews it. 0 once it is lost or released. */
  readonly remaining: number;
  /**
   * Aborted when the lease is lost, with a {@link LostError} as its reason; a release does not abort it. After work that
   * blocked the event loop, read it from the lease again: that looks at the clock first.
   */
  readonly signal: AbortSignal;
  /** Why it was lost; undefined while it is held and after a release. */
  readonly reason: LostReason | undefined;
  /**
   * Gives the lock back, once the work is done. The second call is the first one's promise.
   * @throws LostError it was over before: the work may have overlapped with the next holder's. At once; where a server may
   *   not know of it yet, it is told in the background
   * @throws UnavailableError nobody could be told: the lock is free when the lease runs out
   */
  release(): Promise<void>;
  /** As {@link release}, but an UnavailableError is no error: the lease runs out. */
  [Symbol.asyncDispose](): Promise<void>;
}

/**
 * Why a lease is over. `UNCONFIRMED`: no renewal was confirmed before the holder's own deadline. `CLOSED`: the client was
 * closed while the lease was held. The others are a server's words.
 */
export type LostReason =
  | "LOCK_NOT_FOUND" | "LOCK_EXPIRED" | "NOT_OWNER" | "TOKEN_SUPERSEDED" | "TOKEN_UNKNOWN" | "UNCONFIRMED"
  | "CLOSED";

/** Who has a lock. It has no token, so that it cannot be taken for a lease of one's own. */
export interface Holder {
  owner: string;
  acquiredAt: Date;
  /** Milliseconds until the lock is free, unless it is renewed or released. */
  remaining: number;
  labels: Record<string, string>;
}

/** What all errors of this library are. */
export class FencepostError extends Error {}
/** Somebody else has the lock. */
export class RefusedError extends FencepostError { readonly holder: Holder; }
/** The lease is over: stop working. */
export class LostError extends FencepostError { readonly reason: LostReason; }
/** The `requestId` was used before, and its lease is gone. A caller that still wants the lock uses another one. */
export class SpentError extends FencepostError {}
/** The request was malformed or out of range. */
export class InvalidError extends FencepostError {
  /** By their names in the contract, such as `ttl`, or in {@link AcquireOptions}. */
  readonly fields: string[];
}
/** No server could do it now. A lease that is held stands until its own deadline. */
export class UnavailableError extends FencepostError {
  /** Whether the same call may succeed later. */
  readonly retryable: boolean;
  /** Whether it may have had its effect all the same. */
  readonly maybeDone: boolean;
  /** For how many milliseconds the server asks to be left alone. `acquire` with a `wait` heeds it by itself. */
  readonly retryDelay?: number;
}
