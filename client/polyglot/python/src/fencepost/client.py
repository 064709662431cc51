"""Takes locks, keeps their leases alive, says when one is lost, gives them back.

All leases of a client are kept by one daemon thread with an event loop, over two connections to a
server: one for calls, one for streams, since calls that are cancelled may end the one they are on.
A lease is judged by the clock on every look, so that a process that was frozen knows at once.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import itertools
import logging
import math
import os
import random
import socket
import threading
import time
import uuid
import weakref
from typing import Any, Callable, Coroutine, Mapping

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration

from .errors import FencepostError, Invalid, Lost, Refused, Spent, Unavailable, decode
from .v1 import lock_service_pb2 as pb
from .v1 import lock_service_pb2_grpc as rpc

_CHANNEL = {  # A dead peer is noticed well within a lease, and tried again soon.
    "grpc.use_local_subchannel_pool": 1, "grpc.keepalive_time_ms": 2000, "grpc.keepalive_timeout_ms": 2000,
    "grpc.http2.max_pings_without_data": 0, "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.min_reconnect_backoff_ms": 1000, "grpc.max_reconnect_backoff_ms": 1000, "grpc.enable_retries": 0,
}  # fmt: skip
# Counts while the machine sleeps: BOOTTIME on Linux, MONOTONIC on macOS, time.monotonic on Windows.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
_log = logging.getLogger("fencepost")


class _LostEvent(threading.Event):
    """Set as soon as anybody looks at it after the deadline, and not only once it was noticed."""

    def __init__(self, lease: Lease) -> None:
        super().__init__()
        self._lease = lease

    def is_set(self) -> bool:
        return self._lease.reason is not None

    def wait(self, timeout: float | None = None) -> bool:
        super().wait(timeout)
        return self.is_set()


class Lease:
    """A lock that is held, and renewed until it is released, best by the `with` statement."""

    def __init__(self, client: Client, lock: pb.Lock, sent: float, on_lost: Callable[[Lease], object] | None):
        self.resource: str = lock.resource
        self.owner: str = lock.owner
        self.fencing_token: int = lock.fencing_token
        """Hand it to whatever you write to with every write, and have it refuse an older one."""
        self.lost: threading.Event = _LostEvent(self)
        """Set once the lease is over: lost, or released."""
        self._client, self._on_lost, self._pid = client, on_lost, os.getpid()
        self._key = {"resource": lock.resource, "owner": lock.owner, "fencing_token": lock.fencing_token}
        self._mutex, self._reason, self._released = threading.RLock(), None, False
        self._until, self._overdue = _trusted(lock, sent), _overdue(lock, sent)
        self._keeping = client._spawn(self._keep())
        client._leases.add(self)

    @property
    def reason(self) -> str | None:
        """Why the lease is over, or None while it may be trusted: by the clock, without asking anybody."""
        if os.getpid() != self._pid:
            return "UNCONFIRMED"  # A forked copy is not the holder.
        if self._reason is None and _now() >= self._until:
            self._end("UNCONFIRMED")
        return self._reason

    @property
    def remaining(self) -> float:
        """For how many seconds the lease may be trusted if nothing renews it; 0 once it is over."""
        return max(0.0, self._until - _now()) if self.reason is None else 0.0

    def check(self) -> None:
        """Raises Lost once the lease is over. Call it before each step of the work."""
        reason = self.reason
        if reason is not None:
            raise Lost(reason)

    def release(self) -> None:
        """Gives the lock back. Raises Lost when the lease was over before, so that the work may have
        overlapped with the next holder's; after Unavailable the lease runs out."""
        if self._pid == os.getpid() and not self._released:
            self._client._submit(self._release).result()

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
            if self._reason is None:
                self._reason = reason
                self.lost.set()
                if self._on_lost is not None and not self._released:
                    # Not on the client's thread: whatever it does must not delay other leases.
                    with contextlib.suppress(RuntimeError):  # The interpreter is shutting down.
                        threading.Thread(target=self._on_lost, args=(self,), daemon=True).start()

    def _confirm(self, lock: pb.Lock, granted: float, seen: float) -> None:
        with self._mutex:
            if self.reason is None:  # Once over, it is over for good.
                self._until = max(self._until, _trusted(lock, granted))
                self._overdue = max(self._overdue, _overdue(lock, seen))

    async def _release(self) -> None:
        if not self._released:
            reason = self.reason
            self._released = True
            self._end("LOCK_NOT_FOUND")
            self._keeping.cancel()
            self._client._leases.discard(self)
            if reason in (None, "UNCONFIRMED"):  # Else there is nothing to give back.
                with contextlib.suppress(*(() if reason is None else (FencepostError,))):
                    budget = self._client.timeout if reason is None else 1.0
                    await self._client._call("Release", pb.ReleaseRequest(**self._key), budget)
            if reason is not None:
                raise Lost(reason)

    async def _keep(self) -> None:
        """Each part ends when the lease is over, and none before."""
        parts = [asyncio.ensure_future(part) for part in (self._deadline(), self._streams(), self._calls())]
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in parts:
                part.cancel()
            self._end("UNCONFIRMED")  # Nobody renews from here on, whatever the cause.

    async def _deadline(self) -> None:
        while self.reason is None:
            # The loop's clock stops while the machine sleeps, so it is looked at often.
            await asyncio.sleep(min(self.remaining, 1.0))

    async def _calls(self) -> None:
        """Renews by calls while the streams do not."""
        failures = 0
        while self.reason is None:
            late, left = self._overdue - _now(), self.remaining
            if late > 0:
                failures = 0
                await asyncio.sleep(late)
                continue
            try:  # With a quarter of what is left for each try, there are others.
                budget = min(self._client.timeout, left / 4)
                answer, sent = await self._client._call("Renew", pb.RenewRequest(**self._key), budget)
                self._confirm(answer.lock, sent, sent)
            except Lost as lost:
                self._end(lost.reason)
            except FencepostError as error:
                failures += 1
                await asyncio.sleep(max(0.005, min(_pause(failures, error), left / 4)))

    async def _streams(self) -> None:
        """Opens the next stream before this one's time is over, and drops this one once that has spoken."""
        current = opening = None
        failures = 0
        try:
            while self.reason is None:
                spoken = asyncio.get_running_loop().create_future()
                opening = asyncio.ensure_future(self._stream(spoken))
                await asyncio.wait({opening, spoken}, return_when=asyncio.FIRST_COMPLETED)
                if spoken.done():
                    if current is not None:
                        current.cancel()
                    current, opened = opening, _now()
                    # At random, so that those which were opened together are not replaced together.
                    interval, lasts = spoken.result()
                    lead = min(interval * random.uniform(2, 2.5), lasts / 2)
                    await asyncio.wait({current}, timeout=max(0.05, lasts - lead))
                    if not current.done() or _now() - opened > interval:
                        failures = 0
                if opening.done():
                    failures += 1
                    await asyncio.sleep(_pause(failures, opening.result()))
        finally:
            for stream in (current, opening):
                if stream is not None:
                    stream.cancel()

    async def _stream(self, spoken: asyncio.Future[tuple[float, float]]) -> FencepostError:
        """One stream, until it ends or says nothing for too long."""
        at, patience = self._client._stream_at, min(self._client.timeout, self.remaining / 2)
        first: tuple[float, int] | None = None
        sent = _now()
        call = self._client._streams[at].KeepAlive(pb.KeepAliveRequest(**self._key))
        error: FencepostError = Unavailable("the stream says nothing")
        try:
            while self.reason is None:
                message = await asyncio.wait_for(call.read(), patience)
                if message is grpc.aio.EOF:
                    break
                lock, arrived = message.lock, _now()
                left, ends = _seconds(lock.remaining), lock.expires_at.ToNanoseconds()
                # A message may have been under way for any time: the later ones count from the first.
                first = first or (sent + left, ends)
                until = min(first[0] + max(0, ends - first[1]) / 1e9, arrived + left)
                self._confirm(lock, until - left, arrived)
                interval = min(_seconds(lock.ttl) / 3, 20.0)
                patience = 2 * interval
                if not spoken.done():
                    spoken.set_result((interval, min(_seconds(message.stream_remaining), 86400.0)))
        except grpc.RpcError as failed:
            error = decode(failed)
            if isinstance(error, Lost):
                self._end(error.reason)
        except asyncio.TimeoutError:
            pass
        finally:
            call.cancel()
        if self._client._stream_at == at:  # Unless another stream has said so before.
            self._client._stream_at = (at + 1) % len(self._client._streams)
        return error


class Client:
    """Takes locks at any of the `endpoints`, such as "fencepost-a:50051". For all threads; close it at the end.

    `timeout`, in seconds, is for a call with all its tries; `credentials` are for TLS.
    """

    def __init__(
        self, *endpoints: str, timeout: float = 5.0, credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        if not endpoints:
            raise ValueError("no endpoints")
        self.timeout = timeout
        self._endpoints, self._credentials, self._pid = endpoints, credentials, os.getpid()
        self._mutex, self._loop, self._closed = threading.Lock(), None, False
        self._calls: list[Any] = []
        self._streams: list[Any] = []
        self._channels: list[grpc.aio.Channel] = []
        self._leases: set[Lease] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._at = self._stream_at = 0  # Which endpoint answered last.
        _clients.add(self)

    def lock(
        self, resource: str, *, ttl: float = 30.0, wait: float = 0.0, owner: str | None = None,
        request_id: str | None = None, labels: Mapping[str, str] | None = None,
        on_lost: Callable[[Lease], object] | None = None,
    ) -> Lease:  # fmt: skip
        """Takes the lock, or raises Refused: at once, or after `wait` seconds (math.inf: never) of trying.

        `ttl`, in seconds, is how long a holder that dies blocks the lock. `owner` names ONE holder, never
        a host or a service; leave it out. `on_lost` is called in a thread of its own when the lease is lost.
        """
        host = "".join(c for c in socket.gethostname() if c.isprintable())[:50] or "host"
        request = pb.AcquireRequest(
            resource=resource, owner=f"{host}-{os.getpid()}-{uuid.uuid4().hex[:12]}" if owner is None else owner,
            ttl=Duration(), labels=labels or {}, request_id=str(uuid.uuid4()) if request_id is None else request_id,
        )  # fmt: skip
        request.ttl.FromNanoseconds(round(ttl * 1e9))
        granted: list[Lease] = []
        work = self._acquire, request, wait, request_id is None, owner is None, on_lost, granted
        future = self._submit(*work)
        try:
            future.result()
            return granted[0]
        except BaseException:  # Ctrl-C, too: what was or will be granted is wanted no longer.
            future.cancel()
            self._submit(self._abandon, granted)
            raise

    def close(self) -> None:
        """Gives back what is still held, and ends the client's thread. Done at the interpreter's exit, too."""
        with self._mutex:
            loop, self._closed = None if self._closed else self._loop, True
        if loop is not None and self._pid == os.getpid():
            try:
                asyncio.run_coroutine_threadsafe(self._finish(), loop).result()
            finally:
                loop.call_soon_threadsafe(loop.stop)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _submit(self, work: Callable[..., Coroutine[Any, Any, Any]], *args: object) -> concurrent.futures.Future[Any]:
        with self._mutex:
            if self._closed:
                raise RuntimeError("this client is closed")
            if self._loop is None:  # Not before the first use: a process may fork until then.
                self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
                self._loop.set_exception_handler(_complain)
                threading.Thread(target=self._loop.run_forever, name="fencepost", daemon=True).start()
            if self._pid != os.getpid():
                raise RuntimeError("gRPC does not survive a fork: use the client first in the child, or spawn it")
            return asyncio.run_coroutine_threadsafe(work(*args), self._loop)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[None]:
        async def quietly() -> None:
            with contextlib.suppress(FencepostError):
                await work

        task = asyncio.ensure_future(quietly())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _connect(self) -> None:
        if not self._calls:
            for stubs, endpoint in itertools.product((self._calls, self._streams), self._endpoints):
                target, options = endpoint.removeprefix("http://"), list(_CHANNEL.items())
                if self._credentials is None:
                    channel = grpc.aio.insecure_channel(target, options)
                else:
                    channel = grpc.aio.secure_channel(target, self._credentials, options)
                self._channels.append(channel)
                stubs.append(rpc.LockServiceStub(channel))

    async def _acquire(
        self, request: pb.AcquireRequest, wait: float, own_id: bool, own_owner: bool,
        on_lost: Callable[[Lease], object] | None, granted: list[Lease],
    ) -> None:  # fmt: skip
        self._connect()
        over = time.monotonic() + wait if wait > 0 else math.inf
        tries, unheard, holder = 0, False, None
        try:
            while True:
                before, unheard = unheard, True  # From here on, whoever is cancelled does not know.
                error: FencepostError
                try:
                    budget = max(0.0, min(self.timeout, over - time.monotonic()))
                    answer, sent = await self._call("Acquire", request, budget)
                    if answer.acquired and _trusted(answer.lock, sent) > _now():
                        unheard = False
                        granted.append(Lease(self, answer.lock, sent, on_lost))
                        return
                    if answer.acquired:
                        raise Unavailable("the answer took most of the lease's time")
                    unheard = False
                    raise Refused(answer.holder.owner, _seconds(answer.holder.remaining), answer.holder.labels)
                except Spent:
                    unheard = False
                    if not own_id:
                        raise
                    request.request_id = str(uuid.uuid4())
                    continue
                except Refused as refused:
                    # Where the lock goes from hand to hand, nobody sleeps for long.
                    now_with = answer.holder.owner, answer.holder.acquired_at.ToNanoseconds()
                    tries, holder = (tries if holder == now_with else min(tries, 2)) + 1, now_with
                    error, pause = refused, _pause(tries, None, refused.remaining)
                except Unavailable as failed:
                    if not failed.transient:
                        raise
                    tries += 1
                    error, pause = failed, _pause(tries, failed)
                except FencepostError:
                    unheard = before
                    raise
                if wait <= 0:
                    raise error
                left = over - time.monotonic()
                if left <= pause + 0.05:  # No server could answer in less.
                    await asyncio.sleep(max(0.0, left))
                    raise error
                await asyncio.sleep(pause)
        except BaseException:
            if unheard and own_id and own_owner:
                self._spawn(self._give_back(request))
            raise

    async def _give_back(self, request: pb.AcquireRequest) -> None:
        """Asks once more what became of a try nobody heard of, and undoes it."""
        answer, _ = await self._call("Acquire", request, 2.0)
        if answer.acquired:
            key = {"resource": request.resource, "owner": request.owner, "fencing_token": answer.lock.fencing_token}
            await self._call("Release", pb.ReleaseRequest(**key), 2.0)

    async def _abandon(self, granted: list[Lease]) -> None:
        for lease in granted:
            self._spawn(lease._release())

    async def _finish(self) -> None:
        await self._abandon(list(self._leases))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.timeout)
        for channel in self._channels:
            await channel.close()

    async def _call(self, method: str, request: Any, budget: float) -> tuple[Any, float]:
        """Asks one server after the other until one answers, or the budget is used up."""
        over, first, servers = time.monotonic() + budget, self._at, len(self._calls)
        for tries in itertools.count():
            at, sent = (first + tries) % servers, _now()
            # A server that hangs does not use up the others' time.
            share = (over - time.monotonic()) / (servers - tries % servers)
            try:
                answer = await getattr(self._calls[at], method)(request, timeout=share)
                self._at = at
                return answer, sent
            except grpc.RpcError as failed:
                error = decode(failed)
            if method == "Release" and tries and isinstance(error, Lost) and error.reason == "LOCK_NOT_FOUND":
                return None, sent  # A try whose answer was lost has done it.
            pause = 0.0 if (tries + 1) % servers else _pause((tries + 1) // servers, error)
            if not getattr(error, "transient", False) or over - time.monotonic() <= pause:
                raise error
            await asyncio.sleep(pause)
        raise AssertionError


def _now() -> float:
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _trusted(lock: pb.Lock, sent: float) -> float:
    """Until when: a margin before the end, counted from just before it was asked for."""
    return sent + _seconds(lock.remaining) - min(_seconds(lock.ttl) / 10, 0.5)


def _overdue(lock: pb.Lock, seen: float) -> float:
    """When another confirmation is late: some time after streams renew."""
    return seen + min(_seconds(lock.ttl) * 0.4, 30.0)


def _pause(tries: int, error: FencepostError | None, longest: float = 1.0) -> float:
    """At random below a bound that doubles ("full jitter"), or long where repeating is pointless."""
    if isinstance(error, Unavailable) and not error.transient:
        return 30.0
    return max(0.002, random.uniform(0, min(0.01 * 2 ** min(tries, 10), 1.0, longest)))


def _complain(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # gRPC wakes all event loops of a process for each event, and finds nothing in all but one.
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)


def _close_all() -> None:
    for client in list(_clients):
        with contextlib.suppress(Exception):
            client.close()


_clients: weakref.WeakSet[Client] = weakref.WeakSet()
atexit.register(_close_all)
