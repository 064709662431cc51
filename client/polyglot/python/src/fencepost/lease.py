"""A lock that is held: for how long it may be trusted, and how it is kept.

A lease is judged by the clock on every look, so that a process that was frozen knows at once. It is renewed
by streams that overlap, and by calls when no word came from those for 0.4 of its time to live.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import random
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any, Callable

import grpc
from google.protobuf.duration_pb2 import Duration

from .errors import FencepostError, Lost, Refused, Spent, Unavailable, decode
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


def pause(tries: int, delay: float = 0.0, longest: float = 1.0) -> float:
    """Random below a bound that doubles ("full jitter"), or what the server asks for, where that is longer."""
    return max(0.002, random.uniform(0, min(0.01 * 2 ** min(tries, 10), 1.0, longest)), delay)


def aside(work: Callable[..., object], *args: Any) -> threading.Thread | None:
    """In a thread of its own, or here where there can be none: at a limit, or when the interpreter ends."""
    thread = threading.Thread(target=work, args=args, daemon=True)
    try:
        thread.start()
        return thread
    except RuntimeError:
        try:
            work(*args)
        except Exception:
            _log.exception("%s failed", work)
        return None


class Lease:
    """A lock that is held, and renewed until it is released: `with client.lock("nightly") as lease:`.

    Hand `fencing_token` to the protected resource with every write, and have it refuse an older one: nothing
    else is safe.
    """

    def __init__(
        self, client: Client, request: pb.AcquireRequest, own_id: bool, own_owner: bool,
        on_lost: Callable[[Lease], object] | None,
    ) -> None:  # fmt: skip
        self.resource: str = request.resource
        self.owner: str = request.owner
        self.fencing_token = 0  # Until it is granted.
        self._client, self._request, self._on_lost = client, request, on_lost
        self._own_id, self._own_owner = own_id, own_owner
        self._unheard = False  # Whether an earlier try may have done it without an answer.
        self._reason: str | None = None
        self._failure: FencepostError | None = None  # Of giving it back.
        self._over, self._mutex = threading.Event(), threading.RLock()
        self._until = self._overdue = -math.inf
        self._heard: queue.SimpleQueue[Any] = queue.SimpleQueue()  # What the streams say to the keeper.
        self._keeper = threading.Thread(target=self._keep, name="fencepost", daemon=True)
        # Held by who takes it or gives it back. A signal's handler may close the client in the middle of either.
        self._asking = threading.RLock()

    @property
    def reason(self) -> str | None:
        """Why the lease is over, or None while it may be trusted. Asks the clock and nobody else."""
        if os.getpid() != self._client._pid:
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

    def wait(self, timeout: float | None = None) -> bool:
        """Sleeps for so many seconds, or until the lease is over, and tells whether it is."""
        return self.reason is not None or self._over.wait(timeout) or self.reason is not None

    def release(self) -> None:
        """Gives the lock back, once the work is done.

        Raises Lost when the lease was over before, so that the work may have overlapped with the next
        holder's; so does the end of the client. After Unavailable the lock is free when the lease runs out.
        Called again it says the same.
        """
        before = self.reason
        if before in ("UNCONFIRMED", "CLOSED"):  # A server may not know of it, but nobody needs to wait for that.
            aside(self._give_back, self._client.timeout)
        else:
            self._give_back(self._client.timeout)
        if before is not None and before != "RELEASED":
            raise Lost(before)
        if self._failure is not None:
            raise self._failure

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
        self._over.set()
        self._heard.put((None, None))  # The keeper wakes up.
        if self._on_lost is not None and self.fencing_token and reason != "RELEASED":
            aside(self._on_lost, self)  # For it may wait, or give the lease back.

    def _trust(self, lock: pb.Lock, granted: float, seen: float) -> None:
        """Until a margin before the end, which counts from before it was asked for. Never for less than before."""
        ttl = seconds(lock.ttl)
        margin = max(min(ttl / 10, 0.5), ttl / 2000)  # One in 2000: clocks drift apart.
        with self._mutex:
            if not self.fencing_token or self.reason is None:  # Once over, it is over for good.
                self._until = max(self._until, granted + seconds(lock.remaining) - margin)
                self._overdue = max(self._overdue, seen + min(ttl * 0.4, 30.0))  # A little later than streams renew.

    def _acquire(self, limit: float) -> None:
        self._client._check_open()
        before, self._unheard = self._unheard, True  # Also when Ctrl-C comes.
        try:
            answer, sent = self._client._call("Acquire", self._request, limit)
        except Spent:  # By a try whose answer was lost, or late.
            self._unheard = False
            if not self._own_id:
                raise
            self._request.request_id = str(uuid.uuid4())
            raise Unavailable("what was granted is over") from None
        except FencepostError as error:
            self._unheard = before or isinstance(error, Unavailable)
            raise
        if not answer.acquired:
            self._unheard, holder = False, answer.holder
            raise Refused(holder.owner, seconds(holder.remaining), holder.labels)
        self._trust(answer.lock, sent, sent)
        if now() >= self._until:
            raise Unavailable("the answer took most of the lease's time")
        self.fencing_token, self._unheard = answer.lock.fencing_token, False
        self._client._check_open()

    def _key(self) -> dict[str, Any]:
        return {"resource": self.resource, "owner": self.owner, "fencing_token": self.fencing_token}

    def _give_back(self, budget: float) -> None:
        """Only once, and not in a forked copy: that is not the holder, and what it waits for may never come."""
        client, reason = self._client, self.reason if self.fencing_token else None
        if client._pid != os.getpid():
            return
        over = time.monotonic() + budget
        self._end("RELEASED")
        if not self._asking.acquire(timeout=max(0.0, budget)):
            self._failure = Unavailable("another thread is still asking for it")
            return
        try:
            if self not in client._leases:
                return
            try:
                # Who chose the owner or the id may have the lock by another acquisition.
                if not self.fencing_token and self._unheard and self._own_id and self._own_owner:
                    client._repeat(self._find, over - time.monotonic())
                # Else a server has said it. It was RELEASED before if Ctrl-C came in the middle.
                if self.fencing_token and reason in (None, "UNCONFIRMED", "CLOSED", "RELEASED"):
                    client._repeat(self._release, over - time.monotonic())
            except FencepostError as error:
                self._failure = error  # Then it runs out.
            client._leases.discard(self)
        finally:
            self._asking.release()

    def _find(self, limit: float) -> None:
        """What became of a try that nobody heard of: by the same id it is the same lease."""
        answer, _ = self._client._call("Acquire", self._request, limit)
        self.fencing_token, self._unheard = answer.lock.fencing_token, False

    def _release(self, limit: float) -> None:
        before, self._unheard = self._unheard, True
        try:
            self._client._call("Release", pb.ReleaseRequest(**self._key()), limit)
        except Lost as lost:
            if not (before and lost.reason == "LOCK_NOT_FOUND"):  # A try whose answer was lost has done it.
                raise

    def _keep(self) -> None:
        """By streams, each opened before the last one's time is over, and by calls while those do not renew."""
        client, streams, at, failures, misses = self._client, [], 0, 0, 0
        open_at, silent_at, renew_at = -math.inf, math.inf, -math.inf
        try:
            while self.reason is None:
                began, left = now(), self.remaining
                if began >= open_at:
                    at, open_at, silent_at = client._stream_at, math.inf, began + min(client.timeout, left / 2)
                    try:
                        streams.append(self._open(client._streams[at], began))
                    except (RuntimeError, ValueError):  # No thread for it: calls renew until there is. Or closed.
                        open_at, silent_at = began + 1.0, math.inf
                if began >= silent_at:
                    silent_at = math.inf
                    streams[-1].cancel()  # Its listener says the rest.
                if began >= max(self._overdue, renew_at):
                    try:  # With a quarter of what is left for each try, there are others.
                        answer, sent = client._call("Renew", pb.RenewRequest(**self._key()), left / 4)
                        self._trust(answer.lock, sent, sent)
                        misses = 0
                    except FencepostError as error:
                        self._heed(error)
                        misses += 1
                        renew_at = now() + min(pause(misses, error._delay), left / 4)
                due = min(open_at, silent_at, max(self._overdue, renew_at), self._until)
                try:  # Not for long: while the machine sleeps, the clock of this stands still.
                    stream, word = self._heard.get(timeout=max(0.0, min(due - now(), 1.0)))
                except queue.Empty:
                    continue
                if not streams or stream is not streams[-1]:
                    continue  # It was followed, and may end as it likes.
                if isinstance(word, FencepostError):  # The next one is at another server, if there is another.
                    streams.pop()
                    failures, silent_at = failures + 1, math.inf
                    client._stream_at = (at + 1) % len(client._streams)
                    delay = 0.0 if failures % len(client._streams) else word._delay
                    open_at = min(open_at, now() + min(pause(failures, delay), left / 4))
                    continue
                interval = min(seconds(word.lock.ttl) / 3, 20.0)
                silent_at = now() + 2 * interval
                if open_at < math.inf:
                    failures = 0
                    continue
                for older in streams[:-1]:
                    older.cancel()
                del streams[:-1]
                # At random, so that those which were opened together are not replaced together.
                lasts = min(seconds(word.stream_remaining), 86400.0)
                open_at = now() + max(0.05, lasts - min(interval * random.uniform(2, 2.5), lasts / 2))
        finally:
            self._end("UNCONFIRMED")  # Nobody renews from here on, whatever the cause.
            for stream in streams:
                stream.cancel()

    def _open(self, stub: Any, sent: float) -> Any:
        stream = stub.KeepAlive(pb.KeepAliveRequest(**self._key()))
        try:
            threading.Thread(target=self._listen, args=(stream, sent), daemon=True).start()
        except RuntimeError:
            stream.cancel()
            raise
        return stream

    def _listen(self, stream: Any, sent: float) -> None:
        """Reads one stream to its end."""
        first: tuple[float, int] | None = None
        error: FencepostError = Unavailable("the stream has ended without a status")
        try:
            for word in stream:
                arrived, left, ends = now(), seconds(word.lock.remaining), word.lock.expires_at.ToNanoseconds()
                # A message may have been under way for any time: the later ones count from the first.
                first = first or (sent + left, ends)
                until = min(first[0] + max(0, ends - first[1]) / 1e9, arrived + left)
                self._trust(word.lock, until - left, arrived)
                self._heard.put((stream, word))
        except grpc.RpcError as failed:
            error = decode(failed)
        self._heed(error)
        self._heard.put((stream, error))

    def _heed(self, error: FencepostError) -> None:
        if isinstance(error, Lost):
            self._end(error.reason)
