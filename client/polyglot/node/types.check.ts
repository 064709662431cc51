// What a caller in TypeScript may write. It is compiled by `npm run check`, and never run.
import { credentials } from "@grpc/grpc-js";
import { Client, LostError, RefusedError, type Lease, type LostReason } from "fencepost-client";

export async function nightly(client: Client, stop: AbortSignal): Promise<string> {
  await using lease = await client.acquire("nightly", { ttl: 30_000, wait: 5_000, labels: { build: "7" }, signal: stop });
  const token: bigint = lease.fencingToken;
  await fetch("http://reports.internal", { signal: lease.signal, headers: { "x-fencing-token": token.toString() } });
  const rows: number = await client.withLock("rows", async (inner: Lease) => (inner.held ? 1 : 0));
  await client.withLock("rows", { ttl: 500 }, ({ remaining }) => remaining);
  return `${token} ${rows}`;
}

export const secure = new Client("fencepost.internal:443", { timeout: 2_000, credentials: credentials.createSsl() });

export function meaning(error: unknown): LostReason | string | undefined {
  if (error instanceof LostError) return error.reason;
  if (error instanceof RefusedError) return error.holder.owner;
  // @ts-expect-error a token is never a number
  const token: number = (null as unknown as Lease).fencingToken;
  return `${token}`;
}
