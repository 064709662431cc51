"""Takes locks at several servers, once or until a time is over."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any, Callable

import grpc

from .errors import FencepostError, Invalid, Refused, Unavailable, decode
from .lease import Lease, aside, now, pause
from .v1 import lock_service_pb2 as pb
from .v1 import lock_service_pb2_grpc as rpc

_log = logging.getLogger("fencepost")

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
        if not 0 < timeout <= 86400:  # gRPC cannot wait for much longer, and fails at once.
            raise ValueError(f"a timeout of {timeout} seconds: between 0 and a day")
        self.timeout, self._credentials, self._pid = timeout, credentials, os.getpid()
        self._targets = [endpoint.removeprefix("http://") for endpoint in endpoints]
        self._mutex, self._closing = threading.RLock(), threading.Event()  # A signal's handler may close it.
        self._channels: list[grpc.Channel] = []  # Not before the first use: until then the process may fork.
        self._at = self._stream_at = 0  # Which server is asked next.
        self._leases: set[Lease] = set()  # What has to be given back, if only to find out.
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
        host = "".join(char for char in socket.gethostname() if char.isprintable())[:50] or "host"
        request = pb.AcquireRequest(resource=resource, labels=labels or {})
        request.owner = f"{host}-{os.getpid()}-{uuid.uuid4().hex[:12]}" if owner is None else owner
        request.request_id = str(uuid.uuid4()) if request_id is None else request_id
        try:
            request.ttl.FromNanoseconds(round(ttl * 1e9))
        except (OverflowError, ValueError):
            raise Invalid({"ttl": f"{ttl} is no number of seconds that can be sent"}) from None
        self._connect()
        lease = Lease(self, request, request_id is None, owner is None, on_lost)
        try:
            with lease._asking:
                self._leases.add(lease)
                self._repeat(lease._acquire, wait if wait > 0 else self.timeout, wait > 0)
                lease._keeper.start()
                return lease
        except BaseException:  # Ctrl-C, too: what may have been granted is wanted no longer.
            aside(lease._give_back, 2.0)
            raise

    def close(self) -> None:
        """Gives back what is still held, and disconnects. Done when the interpreter exits, too.

        Leases that are held are lost by it, before anybody else can have the lock.
        """
        atexit.unregister(self.close)
        if self._channels and self._pid != os.getpid():
            return  # A forked copy has nothing to give back.
        with self._mutex:
            self._closing.set()
        leases, over = list(self._leases), time.monotonic() + self.timeout
        for lease in leases:
            lease._end("CLOSED")  # First of all: whoever still works has to know before the lock is free.
        if any(lease._asking._is_owned() for lease in leases):  # type: ignore[attr-defined]
            # A signal came in the middle of a call of this thread. It may hold locks of gRPC's, on which all
            # other threads wait until this returns: what is held comes first, then what others still ask for.
            for lease in sorted(leases, key=lambda lease: not lease.fencing_token):
                lease._give_back(over - time.monotonic())
            aside(self._disconnect)
        else:
            for thread in [aside(lease._give_back, over - time.monotonic()) for lease in leases]:
                if thread is not None:
                    thread.join(max(0.0, over - time.monotonic()))
            self._disconnect()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _disconnect(self) -> None:
        for channel in self._channels:
            channel.close()

    def _connect(self) -> None:
        with self._mutex:
            self._check_open()
            if not self._channels:
                self._pid = os.getpid()
                # Streams apart: many calls that are cancelled at once may end the connection they are on.
                for target in self._targets * 2:
                    if self._credentials is None:
                        self._channels.append(grpc.insecure_channel(target, _OPTIONS))
                    else:
                        self._channels.append(grpc.secure_channel(target, self._credentials, _OPTIONS))
                stubs, count = [rpc.LockServiceStub(channel) for channel in self._channels], len(self._targets)
                self._calls, self._streams = stubs[:count], stubs[count:]
            if self._pid != os.getpid():
                raise RuntimeError("neither a client nor gRPC survives a fork: spawn the process instead")

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise RuntimeError("this client is closed")

    def _call(self, method: str, request: Any, limit: float) -> tuple[Any, float]:
        """Asks the server whose turn it is. When that fails, it is the next one's."""
        at, sent = self._at, now()
        # A server that hangs does not use up the others' time.
        share = max(0.0, min(limit, self.timeout)) / len(self._calls)
        try:
            answer = getattr(self._calls[at], method)(request, timeout=share)
            if answer is not None and (method == "Release" or answer.ByteSize()):
                return answer, sent
            error: FencepostError = Unavailable("OK, but without an answer")
        except grpc.RpcError as failed:
            error = decode(failed)
        except ValueError:  # Of a channel that was closed as the call began.
            if not self._closing.is_set():
                raise
            error = Unavailable("the client is closed")
        if isinstance(error, Unavailable) and self._at == at:
            self._at = (at + 1) % len(self._calls)
        raise error

    def _repeat(self, ask: Callable[[float], None], budget: float, wait: bool = False) -> None:
        """Asks until there is an answer or the budget is used up; where it is to `wait`, Refused is none.

        What no server can do is not repeated. But what says so may be no Fencepost, while the others are.
        """
        over, servers = time.monotonic() + budget, len(self._calls)
        failures, pointless, holder = 0, 0, ""
        refusal: Refused | None = None
        while True:
            failures += 1
            error: FencepostError
            time_left = over - time.monotonic()
            try:
                return ask(time_left)
            except Refused as refused:
                if not wait:
                    raise
                refusal = refused
                if refused.holder != holder:  # Where it goes round, nobody sleeps for long.
                    failures, holder = 1, refused.holder
                error, sleep = refusal, pause(failures, longest=refused.remaining)
            except Unavailable as failed:
                if time_left > 1.0:
                    refusal = None
                # Who had it a moment ago says more than a last try that had no time left.
                error, sleep = refusal or failed, 0.0 if failures % servers else pause(failures, failed._delay)
                pointless = 0 if failed.transient else pointless + 1
                again = wait and not self._closing.is_set()
                if again and failures == servers > pointless:  # Once, for it may be that nobody is there.
                    _log.warning("no server answers, and it is tried again: %s", failed)
            left = over - time.monotonic()
            last = left <= sleep + 0.05  # In less no server could answer.
            if pointless < servers and (wait or not last):
                (self._closing.wait if wait else time.sleep)(max(0.0, left if last else sleep))
            if pointless == servers or last:
                raise error
