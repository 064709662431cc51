"""The client against servers that do what a real one, or a proxy before it, does only at bad moments."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import socket
import threading
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import grpc

from fencepost import Client, Invalid, Lease, Lost, Refused, Unavailable
from fencepost.v1 import lock_service_pb2 as pb
from fencepost.v1 import lock_service_pb2_grpc as rpc


def seconds(value: float) -> Any:
    ttl = pb.Lock().ttl
    ttl.FromNanoseconds(round(value * 1e9))
    return ttl


class Server(rpc.LockServiceServicer):
    """Grants everything, and counts what it is asked for. Keeps nothing alive unless told to."""

    def __init__(self, streams: bool = False) -> None:
        self.asked: list[str] = []
        self.taken = False  # By another one each time.
        self.streams, self.stream_time, self.acquire_time, self.release_time = streams, 60.0, 0.0, 0.0
        self.away = False  # For what is held.
        self.empty = False
        self.acquires_away = 0  # For so many after the first.

    def lock(self, request: Any) -> Any:
        ttl = request.ttl if request.ttl.ToNanoseconds() else seconds(2)
        lock = pb.Lock(resource=request.resource, owner=request.owner, fencing_token=7, ttl=ttl, remaining=ttl)
        lock.expires_at.FromNanoseconds(time.time_ns() + ttl.ToNanoseconds())
        return lock

    def Acquire(self, request: Any, context: Any) -> Any:
        self.asked.append("Acquire")
        if self.taken or request.resource == "taken":
            return pb.AcquireResponse(holder=pb.Holder(owner=f"no {len(self.asked)}", remaining=seconds(2)))
        if self.empty:
            return pb.AcquireResponse()
        if self.acquires_away and len(self.asked) > 1:
            self.acquires_away -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        pause, self.acquire_time = self.acquire_time, 0.0
        time.sleep(pause)
        return pb.AcquireResponse(acquired=True, lock=self.lock(request))

    def Renew(self, request: Any, context: Any) -> Any:
        self.asked.append("Renew")
        self.may_fail(context)
        if self.empty:
            return pb.RenewResponse()
        return pb.RenewResponse(lock=self.lock(request))

    def Release(self, request: Any, context: Any) -> Any:
        self.asked.append("Release")
        self.may_fail(context)
        time.sleep(self.release_time)
        return pb.ReleaseResponse()

    def may_fail(self, context: Any) -> None:
        if self.away:
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")

    def KeepAlive(self, request: Any, context: Any) -> Any:
        self.asked.append("KeepAlive")
        if not self.streams:
            context.abort(grpc.StatusCode.UNAVAILABLE, "no streams")
        ends = time.monotonic() + self.stream_time
        while context.is_active() and time.monotonic() < ends:
            yield pb.KeepAliveResponse(lock=self.lock(request), stream_remaining=seconds(ends - time.monotonic()))
            time.sleep(0.1)


class Nothing(grpc.GenericRpcHandler):
    """Answers OK without a message, as a broken proxy does."""

    def service(self, call: Any) -> Any:
        return grpc.unary_stream_rpc_method_handler(lambda request, context: iter(()))


class Told(list):  # type: ignore[type-arg]
    """Goes to another process, too."""

    def __init__(self, pipe: Any) -> None:
        super().__init__()
        self.pipe = pipe

    def append(self, what: Any) -> None:
        super().append(what)
        self.pipe.send(what)


def serve_alone(pipe: Any) -> None:
    """In a process of its own, since those who call and those who serve in one share locks of gRPC's."""
    server, servicer = grpc.server(ThreadPoolExecutor(16)), Server(streams=True)
    servicer.asked = Told(pipe)
    rpc.add_LockServiceServicer_to_server(servicer, server)
    pipe.send(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    server.stop(None).wait()


class ClientTest(unittest.TestCase):
    def serve_alone(self) -> tuple[str, Any]:
        """Where it serves, and a pipe on which it tells each call."""
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=serve_alone, args=(there,))
        process.start()
        there.close()
        self.addCleanup(process.join)
        self.addCleanup(here.close)
        return here.recv(), here

    def asked(self, server: Any) -> list[str]:
        asked = []
        while server.poll():
            asked.append(server.recv())
        return asked

    def serve(self, servicer: Server | None = None, *handlers: Any) -> str:
        server = grpc.server(ThreadPoolExecutor(16), handlers=handlers)
        if servicer is not None:
            rpc.add_LockServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        self.addCleanup(lambda: server.stop(None).wait())
        return f"127.0.0.1:{port}"

    def client(self, *endpoints: str, timeout: float = 2.0) -> Client:
        client = Client(*endpoints, timeout=timeout)
        self.addCleanup(client.close)
        return client

    def test_an_answer_without_a_message_is_a_failure_of_that_server(self) -> None:
        broken, good = self.serve(None, Nothing()), Server()
        with self.assertRaises(Unavailable) as raised:
            self.client(broken, timeout=0.3).lock("a", ttl=2)
        self.assertTrue(raised.exception.transient)
        with self.client(broken, self.serve(good)).lock("a", ttl=2) as lease:
            self.assertEqual(lease.fencing_token, 7)

    def test_an_empty_message_is_no_answer_either(self) -> None:
        empty, good = Server(), Server(streams=True)
        empty.empty = True
        self.client(self.serve(empty), self.serve(good)).lock("a", ttl=2).release()
        lease = self.client(self.serve(good := Server())).lock("a", ttl=1)
        good.empty = True
        self.assertTrue(lease.wait(2))
        self.assertLess(good.asked.count("Renew"), 100)

    def test_a_timeout_that_is_no_time_is_refused(self) -> None:
        for timeout in (0.0, -1.0, math.nan, math.inf):
            with self.subTest(timeout=timeout), self.assertRaises(ValueError):
                Client("127.0.0.1:1", timeout=timeout)

    def test_a_ttl_that_is_no_time_is_named(self) -> None:
        client = self.client(self.serve(Server()))
        for ttl in (math.inf, -math.inf, math.nan, 1e300):
            with self.subTest(ttl=ttl), self.assertRaises(Invalid) as raised:
                client.lock("a", ttl=ttl)
            self.assertEqual(list(raised.exception.fields), ["ttl"])

    def test_what_is_no_fencepost_does_not_hide_one_that_is(self) -> None:
        other, good = self.serve(), Server(streams=True)
        with self.client(other, self.serve(good)).lock("a", ttl=2) as lease:
            time.sleep(0.5)
            lease.check()
        # The stream went on to the next endpoint too, before a Renew was due.
        self.assertEqual(good.asked, ["Acquire", "KeepAlive", "Release"])

    def test_where_no_endpoint_is_a_fencepost_nobody_waits(self) -> None:
        client, began = self.client(self.serve(), self.serve(), timeout=5), time.monotonic()
        with self.assertRaises(Unavailable) as raised:
            client.lock("a", ttl=2, wait=60)
        self.assertFalse(raised.exception.transient)
        self.assertLess(time.monotonic() - began, 2)

    def test_one_that_is_away_may_be_a_fencepost(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        client, began = self.client(self.serve(), f"127.0.0.1:{port}"), time.monotonic()
        with self.assertLogs("fencepost", "WARNING") as logs, self.assertRaises(Unavailable):
            client.lock("a", ttl=2, wait=0.6)
        self.assertEqual(len(logs.output), 1)
        self.assertGreater(time.monotonic() - began, 0.5)

    def test_nobody_sleeps_for_long_where_a_lock_goes_round(self) -> None:
        server = Server()
        server.taken = True
        with self.assertRaises(Refused):
            self.client(self.serve(server)).lock("a", ttl=2, wait=1)
        self.assertGreater(len(server.asked), 20)

    def test_what_was_granted_without_an_answer_is_given_back(self) -> None:
        server = Server()
        server.acquire_time = 0.5
        with self.assertRaises(Unavailable):
            self.client(self.serve(server), timeout=0.2).lock("a", ttl=2)
        time.sleep(1)
        self.assertEqual(server.asked[-1], "Release")

    def test_what_was_granted_is_given_back_once_the_server_is_back(self) -> None:
        server = Server()
        server.acquire_time, server.acquires_away = 0.5, 3
        with self.assertRaises(Unavailable):
            self.client(self.serve(server), timeout=0.2).lock("a", ttl=2)
        time.sleep(1.5)
        self.assertEqual(server.asked[-1], "Release")

    def test_many_leases_are_given_back_together(self) -> None:
        server = Server()
        client = self.client(self.serve(server))
        for number in range(10):
            client.lock(f"a-{number}", ttl=30)
        server.release_time, began = 0.4, time.monotonic()
        client.close()
        self.assertLess(time.monotonic() - began, 2)
        self.assertEqual(server.asked.count("Release"), 10)

    def test_who_lost_a_lease_hears_it_at_once_and_it_is_given_back_behind(self) -> None:
        server = Server()
        lease = self.client(self.serve(server)).lock("a", ttl=0.5)
        server.empty, server.release_time = True, 1.0
        self.assertTrue(lease.wait(2))
        began = time.monotonic()
        with self.assertRaises(Lost):
            lease.release()
        self.assertLess(time.monotonic() - began, 0.5)
        time.sleep(0.2)
        self.assertEqual(server.asked[-1], "Release")

    def test_calls_renew_where_streams_do_not_work(self) -> None:
        server = Server()
        with self.client(self.serve(server)).lock("a", ttl=1) as lease:
            time.sleep(1.5)
            lease.check()
        self.assertIn("Renew", server.asked)

    def test_the_next_stream_is_opened_before_one_is_over(self) -> None:
        server = Server(streams=True)
        server.stream_time = 0.8
        with self.client(self.serve(server)).lock("a", ttl=0.6) as lease:
            time.sleep(2)
            lease.check()
        self.assertNotIn("Renew", server.asked)
        self.assertGreater(server.asked.count("KeepAlive"), 2)

    def test_closing_the_client_ends_a_lease_and_gives_it_back(self) -> None:
        server = Server()
        client = self.client(self.serve(server))
        lease = client.lock("a", ttl=2)
        client.close()
        self.assertIn("Release", server.asked)
        with self.assertRaises(Lost):
            lease.release()

    def test_calls_that_fail_are_repeated_less_and_less_often(self) -> None:
        server = Server()
        server.away = True
        lease = self.client(self.serve(server)).lock("a", ttl=4)
        self.assertFalse(lease.wait(2.6))  # The first is due after 1.6 seconds.
        self.assertIn(server.asked.count("Renew"), range(2, 15))
        server.away = False

    def test_a_release_that_failed_says_so_again(self) -> None:
        server = Server()
        server.away = True
        lease = self.client(self.serve(server), timeout=0.3).lock("a", ttl=5)
        for _ in range(2):
            with self.assertRaises(Unavailable):
                lease.release()

    def test_a_signal_handler_may_close_the_client(self) -> None:
        endpoint, server = self.serve_alone()
        client = self.client(endpoint)
        lease = client.lock("a", ttl=5)
        handlers = iter([lambda: client.close(), lambda: self.fail("it hangs")])
        signal.signal(signal.SIGALRM, lambda *_: next(handlers)())
        self.addCleanup(signal.setitimer, signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0.5, 3)
        with self.assertRaises(RuntimeError):
            client.lock("taken", ttl=5, wait=60)
        self.assertEqual(lease.reason, "CLOSED")
        self.assertIn("Release", self.asked(server))

    def test_a_signal_handler_may_close_the_client_while_grpc_holds_its_locks(self) -> None:
        endpoint, server = self.serve_alone()
        client = self.client(endpoint)
        held = [client.lock(name, ttl=5) for name in "abc"]
        observability, main, signals = grpc._observability, threading.get_ident(), [signal.SIGALRM]

        @contextlib.contextmanager
        def interrupted() -> Any:  # A call is being started, under locks of the channel and of the process.
            with plugin() as found:
                if threading.get_ident() == main and signals:
                    signal.raise_signal(signals.pop())
                yield found

        signal.signal(signal.SIGALRM, lambda *_: client.close())
        plugin = observability.get_plugin
        with mock.patch.object(observability, "get_plugin", interrupted), self.assertRaises(RuntimeError):
            client.lock("taken", ttl=5, wait=60)
        self.assertEqual(signals, [])
        self.assertEqual([lease.reason for lease in held], ["CLOSED"] * 3)
        self.assertEqual(self.asked(server).count("Release"), 3)

    def test_a_call_that_begins_as_the_client_is_closed(self) -> None:
        server = Server(streams=True)
        client = self.client(self.serve(server))
        held = client.lock("a", ttl=5)
        calls, begun = client._calls[0], []
        acquire = calls.Acquire

        def closed_first(*args: Any, **limits: Any) -> Any:
            begun.append(args)
            if len(begun) == 1:
                client.close()
                client._disconnect()  # Now, and not when its thread comes to it.
            return acquire(*args, **limits)

        with mock.patch.object(calls, "Acquire", closed_first), self.assertRaisesRegex(RuntimeError, "closed"):
            client.lock("b", ttl=5, wait=60)
        self.assertEqual(held.reason, "CLOSED")
        held._keeper.join(5)
        self.assertFalse(held._keeper.is_alive())

    @unittest.skipUnless(hasattr(os, "fork"), "only where processes fork")
    def test_a_forked_copy_is_over_at_once(self) -> None:
        server = Server(streams=True)
        client = self.client(self.serve(server))
        lease, began = client.lock("a", ttl=2), time.monotonic()
        child = os.fork()
        if child == 0:
            over = lease.wait(5) and time.monotonic() - began < 2
            client.close()
            os._exit(0 if over else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        lease.check()
        self.assertNotIn("Release", server.asked)

    def test_a_loss_is_told_where_no_thread_can_be_started(self) -> None:
        told: list[str | None] = []

        def on_lost(lease: Lease) -> None:
            told.append(lease.reason)
            raise ValueError("what is wrong here keeps no lock from being given back")

        server = Server()
        client = self.client(self.serve(server))
        client.lock("a", ttl=5, on_lost=on_lost)
        with self.no_thread_for("on_lost", "_give_back"), self.assertLogs("fencepost", "ERROR"):
            client.close()  # As when the interpreter exits, from Python 3.12 on.
        self.assertEqual(told, ["CLOSED"])
        self.assertIn("Release", server.asked)

    def test_what_no_thread_can_keep_is_given_back(self) -> None:
        server = Server()
        client = self.client(self.serve(server))
        with self.no_thread_for("_keep", "_give_back"), self.assertRaises(RuntimeError):
            client.lock("a", ttl=5)
        self.assertEqual(server.asked, ["Acquire", "Release"])

    def test_calls_renew_where_no_thread_can_listen(self) -> None:
        server = Server(streams=True)
        with self.no_thread_for("_listen"), self.client(self.serve(server)).lock("a", ttl=1) as lease:
            time.sleep(1.5)
            lease.check()
        self.assertIn("Renew", server.asked)

    def no_thread_for(self, *names: str) -> Any:
        start = threading.Thread.start

        def may_start(thread: threading.Thread) -> None:
            if getattr(getattr(thread, "_target", None), "__name__", "") in names:
                raise RuntimeError("can't start new thread")
            start(thread)

        return mock.patch("threading.Thread.start", may_start)


if __name__ == "__main__":
    unittest.main()
