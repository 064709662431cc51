"""A lock that is held: for how long it may be trusted, and how it is kept.

A lease is judged by the clock on every look, so that a process that was frozen knows at once. It is renewed
by streams that overlap, and by calls when no word came from those for 0.4 of its time to live.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import threading
import time
from typing import TYPE_CHECKING, Any, Callable

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration

from .errors import FencepostError, Lost, Refused, Unavailable, decode
from .v1 import lock_service_pb2 as pb

if TYPE_CHECKING:
    from .client import Client

# Counts while the machine sleeps: BOOTTIME on Linux, MONOTONIC on macOS, time.monotonic on Windows.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
_log = logging.getLogger("fencepost")


def now() -> float:
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


def seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def trusted(lock: pb.Lock, sent: float) -> float:
    """Until when: a margin before the end, counted from just before it was asked for."""
    ttl = seconds(lock.ttl)
    return sent + seconds(lock.remaining) - max(min(ttl / 10, 0.5), ttl / 2000)  # One in 2000: clocks drift apart.


def pause(tries: int, error: FencepostError) -> float:
    """Random below a bound that doubles ("full jitter"), or what the server asks for, where that is longer.

    Not beyond the holder's lease; long if pointless.
    """
    if not error.transient and not isinstance(error, Refused):
        return 30.0
    longest = min(0.01 * 2 ** min(tries, 10), 1.0, getattr(error, "remaining", 1.0))
    return max(0.002, random.uniform(0, longest), error._delay)


class _LostEvent(threading.Event):
    """Set for whoever looks at it after the deadline, and not only once that was noticed."""

    def __init__(self, lease: Lease) -> None:
        super().__init__()
        self._lease = lease

    def is_set(self) -> bool:
        return self._lease.reason is not None

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(timeout) or self.is_set()


class Lease:
    """A lock that is held, and renewed until it is released: `with client.lock("nightly") as lease:`.

    Hand `fencing_token` to the protected resource with every write, and have it refuse an older one: nothing
    else is safe. `lost` is set once the lease is over, because it was lost or released.
    """

    def __init__(self, client: Client, lock: pb.Lock, sent: float, on_lost: Callable[[Lease], object] | None) -> None:
        self.resource: str = lock.resource
        self.owner: str = lock.owner
        self.fencing_token: int = lock.fencing_token
        self.lost: threading.Event = _LostEvent(self)
        self._key = {"resource": lock.resource, "owner": lock.owner, "fencing_token": lock.fencing_token}
        self._client, self._on_lost, self._pid, self._mutex = client, on_lost, os.getpid(), threading.RLock()
        self._reason: str | None = None
        self._released = False
        self._until = self._overdue = -math.inf
        self._trust(lock, sent, sent)
        self._keeping = client._spawn(self._keep())
        client._leases.add(self)

    @property
    def reason(self) -> str | None:
        """Why the lease is over, or None while it may be trusted. Asks the clock and nobody else."""
        if os.getpid() != self._pid:
            return "UNCONFIRMED"  # A forked copy is not the holder.
        if self._reason is None and now() >= self._until:
            self._end("UNCONFIRMED")
        return self._reason

    @property
    def remaining(self) -> float:
        """For how many seconds the lease may be trusted if nothing renews it; 0 once it is over."""
        return 0.0 if self.reason is not None else max(0.0, self._until - now())

    def check(self) -> None:
        """Raises Lost once the lease is over. Call it before each step of the work."""
        reason = self.reason
        if reason is not None:
            raise Lost(reason)

    def release(self) -> None:
        """Gives the lock back, once the work is done.

        Raises Lost when the lease was over before, so that the work may have overlapped with the next
        holder's; so does the end of the client. After Unavailable the lock is free when the lease runs out.
        """
        if self._pid != os.getpid() or self._released:
            return
        try:
            future = self._client._submit(self._release)
        except RuntimeError:  # The client was closed, and gave it back while the work went on.
            self._released = True
            raise Lost(self._reason or "UNCONFIRMED") from None
        future.result()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            self.release()
        except FencepostError as failed:
            if kind is None and isinstance(failed, Lost):
                raise
            _log.warning("%s was not given back: %s", self.resource, failed)

    def _end(self, reason: str) -> None:
        with self._mutex:
            if self._reason is not None:
                return
            self._reason = reason
        self.lost.set()
        if self._on_lost is not None and not self._released:
            # In a thread of its own: whatever it does must not delay other leases.
            with contextlib.suppress(RuntimeError):  # The interpreter shuts down.
                threading.Thread(target=self._on_lost, args=(self,), daemon=True).start()

    def _trust(self, lock: pb.Lock, granted: float, seen: float) -> None:
        with self._mutex:
            if self._until == -math.inf or self.reason is None:  # Once over, it is over for good.
                self._until = max(self._until, trusted(lock, granted))
                # A little later than streams renew.
                self._overdue = max(self._overdue, seen + min(seconds(lock.ttl) * 0.4, 30.0))

    async def _release(self) -> None:
        if not self._released:
            self._released = True
            await self._give_back()

    async def _give_back(self) -> None:
        task, reason = asyncio.current_task(), self.reason
        assert task is not None
        self._client._tasks.add(task)  # A client that is closed meanwhile waits for it.
        task.add_done_callback(self._client._tasks.discard)
        self._end("LOCK_NOT_FOUND")  # For whoever still works.
        self._keeping.cancel()
        self._client._leases.discard(self)
        try:
            if reason in (None, "UNCONFIRMED"):  # Else there is nothing to give back.
                budget = self._client.timeout if now() < self._until else 1.0
                await self._client._call("Release", self._key, budget)
        finally:
            if reason is not None:
                raise Lost(reason)

    async def _keep(self) -> None:
        """Ends with the lease. Renews by calls while the streams do not."""
        streams, failures = self._client._spawn(self._streams()), 0
        try:
            while self.reason is None:
                late, left = self._overdue - now(), self.remaining
                if late > 0:
                    failures = 0
                    # Not for long: while the machine sleeps, the event loop's clock stands still.
                    await asyncio.sleep(min(late, left, 1.0))
                    continue
                try:  # With a quarter of what is left for each try, there are others.
                    answer, sent = await self._client._call("Renew", self._key, min(self._client.timeout, left / 4))
                    self._trust(answer.lock, sent, sent)
                except Lost as lost:
                    self._end(lost.reason)
                except FencepostError as error:
                    failures += 1
                    await asyncio.sleep(max(0.005, min(pause(failures, error), left / 4)))
        finally:
            streams.cancel()
            self._end("UNCONFIRMED")  # Nobody renews from here on, whatever the cause.

    async def _streams(self) -> None:
        """Opens the next stream before this one's time is over, and drops this one once that has spoken."""
        current: asyncio.Future[Any] | None = None
        stream: asyncio.Future[Any] | None = None
        failures = 0
        try:
            while self.reason is None:
                spoken = asyncio.get_running_loop().create_future()
                stream = asyncio.ensure_future(self._stream(spoken))
                await asyncio.wait({stream, spoken}, return_when=asyncio.FIRST_COMPLETED)
                if spoken.done():
                    if current is not None:
                        current.cancel()
                    current, began = stream, now()
                    interval, lasts = spoken.result()
                    # At random, so that those which were opened together are not replaced together.
                    lead = min(interval * random.uniform(2, 2.5), lasts / 2)
                    await asyncio.wait({stream}, timeout=max(0.05, lasts - lead))
                    failures = 0 if now() - began > interval else failures
                if stream.done():
                    failures, error = failures + 1, stream.result()
                    if failures % len(self._client._streams):
                        error = Unavailable("the next is another server")
                    await asyncio.sleep(pause(failures, error))
        finally:
            for each in (current, stream):
                if each is not None:
                    each.cancel()

    async def _stream(self, spoken: asyncio.Future[tuple[float, float]]) -> FencepostError:
        """One stream, until it ends, or says nothing for two intervals."""
        client, first, sent = self._client, None, now()
        at, patience = client._stream_at, min(client.timeout, self.remaining / 2)
        error: FencepostError = Unavailable("the stream says nothing")
        call = client._streams[at].KeepAlive(pb.KeepAliveRequest(**self._key))  # type: ignore[arg-type]
        try:
            while self.reason is None:
                message = await asyncio.wait_for(call.read(), patience)
                if message is grpc.aio.EOF:
                    break
                lock, arrived = message.lock, now()
                left, ends = seconds(lock.remaining), lock.expires_at.ToNanoseconds()
                # A message may have been under way for any time: the later ones count from the first.
                first = first or (sent + left, ends)
                until = min(first[0] + max(0, ends - first[1]) / 1e9, arrived + left)
                self._trust(lock, until - left, arrived)
                interval = min(seconds(lock.ttl) / 3, 20.0)
                patience = 2 * interval
                if not spoken.done():
                    spoken.set_result((interval, min(seconds(message.stream_remaining), 86400.0)))
        except asyncio.TimeoutError:
            pass
        except grpc.RpcError as failed:
            error = decode(failed)
            if isinstance(error, Lost):
                self._end(error.reason)
        finally:
            call.cancel()
        if self.reason is None and client._stream_at == at:  # Unless another stream has said so before.
            client._stream_at = (at + 1) % len(client._streams)
        return error
