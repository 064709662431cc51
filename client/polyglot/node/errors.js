// What can go wrong, by what it means for the caller; and the contract, in which the servers say so.
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const includeDirs = [fileURLToPath(new URL("proto", import.meta.url))];
const files = ["fencepost/v1/lock_service.proto", "google/rpc/errors.proto"];
export const protos = loadSync(files, { includeDirs, keepCase: true, longs: String, defaults: true });

export class FencepostError extends Error {
  constructor(message, details) { super(message); Object.assign(this, { name: new.target.name }, details); }
}
export class RefusedError extends FencepostError {}
export class LostError extends FencepostError {}
export class SpentError extends FencepostError {}
export class InvalidError extends FencepostError {}
export class UnavailableError extends FencepostError {}

export const ms = (time) => Number(time.seconds) * 1000 + time.nanos / 1e6; // of a Duration or a Timestamp
export const lost = (reason) => new LostError(`the lease is over: ${reason}`, { reason });
export function invalid(violations) {
  const text = violations.map(({ field, description }) => `${field}: ${description}`).join("; ");
  return new InvalidError(`invalid request: ${text}`, { fields: violations.map(({ field }) => field) });
}
const TERMINAL = ["LOCK_NOT_FOUND", "LOCK_EXPIRED", "NOT_OWNER", "TOKEN_SUPERSEDED", "TOKEN_UNKNOWN"];
const REJECTED = [grpc.status.UNIMPLEMENTED, grpc.status.UNAUTHENTICATED, grpc.status.INVALID_ARGUMENT];

// What a failed call means. A reason of ours decides; a bare code may be a proxy's, and ends no lease.
export function decode({ code, details: text, metadata }) {
  const unpack = (type) => {
    try {
      const { details } = protos["google.rpc.Status"].deserialize(metadata.get("grpc-status-details-bin")[0]);
      return protos[type].deserialize(details.find((any) => any.type_url.endsWith(`/${type}`)).value);
    } catch { return undefined; } // not there, or not readable
  };
  const info = unpack("google.rpc.ErrorInfo"), reason = info?.domain === "fencepost" ? info.reason : undefined;
  const message = `${reason ?? grpc.status[code]}: ${text}`;
  if (TERMINAL.includes(reason)) return lost(reason);
  if (reason === "REQUEST_SPENT") return new SpentError(message);
  if (reason === "INVALID_REQUEST") return invalid(unpack("google.rpc.BadRequest")?.field_violations ?? []);
  const rejected = REJECTED.includes(code), retryable = !rejected && reason !== "INTERNAL";
  const wish = unpack("google.rpc.RetryInfo")?.retry_delay, retryDelay = wish ? ms(wish) : undefined;
  return new UnavailableError(message, { rejected, retryable, maybeDone: !rejected && reason !== "OVERLOADED", retryDelay });
}
