"""Takes locks at several servers, once or until a time is over.

All leases of a client are kept by one daemon thread with an event loop, over two connections to a server:
one for calls, one for streams, since many calls that are cancelled at once may end the one they are on.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Coroutine, Mapping
from concurrent.futures import CancelledError
from typing import Any, Callable

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration

from .errors import FencepostError, Invalid, Lost, Refused, Spent, Unavailable, decode
from .lease import Lease, now, pause, seconds, trusted
from .v1 import lock_service_pb2 as pb
from .v1 import lock_service_pb2_grpc as rpc

# A dead peer is noticed well within a lease, and tried again soon.
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.max_pings_without_data", 0)]
_OPTIONS += [(f"grpc.keepalive_{what}_ms", 2000) for what in ("time", "timeout")]
_OPTIONS += [(f"grpc.{what}_reconnect_backoff_ms", ms) for what, ms in (("initial", 100), ("min", 1000), ("max", 1000))]


class Client:
    """Takes locks at the first of the `endpoints`, such as "fencepost-a:50051", that answers.

    For all threads of a process. Close it at the end, or use it in a `with` statement. `timeout` is for a call
    with all its tries, in seconds as all times here; `credentials` are for TLS.
    """

    def __init__(
        self, *endpoints: str, timeout: float = 5.0, credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        if not endpoints:
            raise ValueError("no endpoints")
        self.timeout, self._credentials, self._pid = timeout, credentials, os.getpid()
        self._targets = [endpoint.removeprefix("http://") for endpoint in endpoints]
        self._mutex, self._closed = threading.Lock(), False
        # Both not before the first use: until then the process may fork.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._channels: list[grpc.aio.Channel] = []
        self._calls: list[Any] = []
        self._streams: list[Any] = []
        self._at = self._stream_at = 0  # Which endpoint is asked first.
        self._leases: set[Lease] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._acquiring: set[asyncio.Task[Any]] = set()
        atexit.register(self.close)

    def lock(
        self, resource: str, *, ttl: float = 30.0, wait: float = 0.0, owner: str | None = None,
        request_id: str | None = None, labels: Mapping[str, str] | None = None,
        on_lost: Callable[[Lease], object] | None = None,
    ) -> Lease:  # fmt: skip
        """Takes the lock, or raises Refused: at once, or after `wait` seconds of trying (math.inf: never).

        A holder that dies blocks the lock for `ttl`. `owner` names ONE holder, never a host or a service: leave
        it out. `on_lost` is called, in a thread of its own, when the lease is lost.
        """
        own_id, own_owner = request_id is None, owner is None
        host = "".join(char for char in socket.gethostname() if char.isprintable())[:50] or "host"
        request = pb.AcquireRequest(
            resource=resource, owner=f"{host}-{os.getpid()}-{uuid.uuid4().hex[:12]}" if owner is None else owner,
            ttl=Duration(), labels=labels or {}, request_id=str(uuid.uuid4()) if request_id is None else request_id,
        )  # fmt: skip
        try:
            request.ttl.FromNanoseconds(round(ttl * 1e9))
        except (OverflowError, ValueError):
            raise Invalid({"ttl": f"{ttl} is no number of seconds that can be sent"}) from None
        granted: list[Lease] = []
        future = self._submit(self._acquire, request, wait, own_id, own_owner, on_lost, granted)
        try:
            future.result()
            return granted[0]
        except BaseException as failed:  # Ctrl-C, too: what was or will be granted is wanted no longer.
            future.cancel()
            with contextlib.suppress(RuntimeError):  # Closed meanwhile, and so given back.
                self._submit(self._abandon, granted)
            if isinstance(failed, CancelledError):
                raise Unavailable("the client was closed meanwhile", transient=False) from None
            raise

    def close(self) -> None:
        """Gives back what is still held, and ends the client's thread. Done when the interpreter exits, too.

        Leases that are held are lost by it, before anybody else can have the lock.
        """
        atexit.unregister(self.close)
        loop, thread = self._loop, self._thread
        if loop is None or thread is None or self._pid != os.getpid():
            self._closed = True  # A forked copy has nothing to give back.
            return
        with self._mutex:
            closed, self._closed = self._closed, True
        if not closed:
            try:
                asyncio.run_coroutine_threadsafe(self._finish(), loop).result()
            finally:
                loop.call_soon_threadsafe(loop.stop)
                thread.join()
                loop.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _submit(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: object) -> Any:
        if self._loop is not None and self._pid != os.getpid():
            raise RuntimeError("neither a client nor gRPC survives a fork: spawn the process instead")
        with self._mutex:
            if self._closed:
                raise RuntimeError("this client is closed")
            if self._loop is None:
                self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
                self._loop.set_exception_handler(_complain)
                self._thread = threading.Thread(target=self._loop.run_forever, name="fencepost", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work(*arguments), self._loop)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def quietly() -> None:
            with contextlib.suppress(FencepostError):
                await work

        task = asyncio.ensure_future(quietly())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _stub(self, target: str) -> Any:
        if self._credentials is None:
            channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        else:
            channel = grpc.aio.secure_channel(target, self._credentials, options=_OPTIONS)
        self._channels.append(channel)
        return rpc.LockServiceStub(channel)

    async def _acquire(
        self, request: pb.AcquireRequest, wait: float, own_id: bool, own_owner: bool,
        on_lost: Callable[[Lease], object] | None, granted: list[Lease],
    ) -> None:  # fmt: skip
        if not self._calls:
            self._calls, self._streams = ([self._stub(target) for target in self._targets] for _ in "cs")
        over = time.monotonic() + wait if wait > 0 else math.inf
        tries, spent, unheard, holder = 0, 0, False, None
        task = asyncio.current_task()
        assert task is not None
        self._acquiring.add(task)
        try:
            while True:
                before, unheard = unheard, True  # Whoever is cancelled from here on does not know.
                error: FencepostError
                try:
                    answer, sent = await self._call("Acquire", request, min(self.timeout, over - time.monotonic()))
                    error = Unavailable("the answer took most of the lease's time")
                    if not answer.acquired:
                        has, unheard = answer.holder, False
                        error = Refused(has.owner, seconds(has.remaining), has.labels)
                        same, holder = (has.owner, has.acquired_at) == holder, (has.owner, has.acquired_at)
                        tries = tries if same else min(tries, 2)  # Where it goes round, nobody sleeps for long.
                    elif trusted(answer.lock, sent) > now():
                        unheard = False
                        granted.append(Lease(self, answer.lock, sent, on_lost))
                        return
                except Unavailable as failed:
                    error = failed
                except FencepostError as failed:
                    unheard = before and not isinstance(failed, Spent)
                    spent += 1
                    if not own_id or not isinstance(failed, Spent) or spent > 3:  # In a row: somebody else is wrong.
                        raise
                    request.request_id = str(uuid.uuid4())
                    continue
                tries, spent = tries + 1, 0
                sleep, left = pause(tries, error), over - time.monotonic()
                if wait <= 0 or not (error.transient or isinstance(error, Refused)):
                    raise error
                if left <= sleep + 0.05:  # In less no server could answer.
                    await asyncio.sleep(max(0.0, left))
                    raise error
                await asyncio.sleep(sleep)
        except BaseException:
            if unheard and own_id and own_owner:
                self._spawn(self._give_back(request))
            raise
        finally:
            self._acquiring.discard(task)

    async def _give_back(self, request: pb.AcquireRequest) -> None:
        """Asks once more what became of a try that nobody heard of, and undoes it."""
        answer, _ = await self._call("Acquire", request, 2.0)
        if answer.acquired:
            lock = answer.lock
            key = {"resource": lock.resource, "owner": lock.owner, "fencing_token": lock.fencing_token}
            await self._call("Release", key, 2.0)

    async def _abandon(self, leases: list[Lease]) -> None:
        for lease in leases:
            self._spawn(lease._release())

    async def _finish(self) -> None:
        for lease in self._leases:
            lease._end("UNCONFIRMED")  # First of all: whoever still works has to know before the lock is free.
        for task in self._acquiring:
            task.cancel()
        await asyncio.gather(*self._acquiring, return_exceptions=True)  # They may have something to give back, too.
        for lease in self._leases:
            self._spawn(lease._give_back())
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.timeout)
        for channel in self._channels:
            await channel.close()

    async def _call(self, method: str, request: Any, budget: float) -> tuple[Any, float]:
        """Asks one server after the other until one answers, or the budget is used up."""
        if isinstance(request, dict):
            request = getattr(pb, f"{method}Request")(**request)
        over, first, servers = time.monotonic() + budget, self._at, len(self._calls)
        for tries in itertools.count(1):
            at, sent = (first + tries - 1) % servers, now()
            # A server that hangs does not use up the others' time.
            share = (over - time.monotonic()) / (servers - (tries - 1) % servers)
            try:
                answer = await getattr(self._calls[at], method)(request, timeout=max(0.0, share))
                if answer is not None:
                    self._at = at
                    return answer, sent
                error: FencepostError = Unavailable("OK, but without an answer")
            except grpc.RpcError as failed:
                error = decode(failed)
            if method == "Release" and tries > 1 and isinstance(error, Lost) and error.reason == "LOCK_NOT_FOUND":
                break  # A try whose answer was lost has done it.
            wait = 0.0 if tries % servers else pause(tries // servers, error)
            # What answers there may be no Fencepost, such as a proxy's default, while the others are.
            pointless = not error.transient and not (isinstance(error, Unavailable) and tries < servers)
            if pointless or over - time.monotonic() <= wait:
                raise error
            await asyncio.sleep(wait)
        return None, sent


def _complain(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # gRPC wakes all event loops of a process for each event, and all but one find nothing.
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
