"""The agent of tests/polyglot/README.md, over the Python package."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fencepost
import grpc
from fencepost.v1 import lock_service_pb2 as pb
from fencepost.v1 import lock_service_pb2_grpc as rpc
from google.protobuf import json_format
from google.rpc import error_details_pb2, status_pb2


def failure(error: fencepost.FencepostError) -> dict[str, Any]:
    if isinstance(error, fencepost.Refused):
        return {"outcome": "refused", "holder": error.holder, "remaining_ms": round(error.remaining * 1000)}
    if isinstance(error, fencepost.Lost):
        return {"outcome": "lost", "reason": error.reason}
    if isinstance(error, fencepost.Spent):
        return {"outcome": "spent"}
    if isinstance(error, fencepost.Invalid):
        return {"outcome": "invalid", "fields": list(error.fields)}
    return {"outcome": "unavailable"}


class Work:
    """Work that goes on until its owner stops it, or the lease is lost."""

    def __init__(self, client: fencepost.Client, resource: str, ttl: float) -> None:
        self.begun = threading.Event()
        self.stop = threading.Event()
        self.token = 0
        self.lost = False
        self.thread = threading.Thread(target=self.run, args=(client, resource, ttl), daemon=True)
        self.thread.start()

    def run(self, client: fencepost.Client, resource: str, ttl: float) -> None:
        try:
            with client.lock(resource, ttl=ttl, on_lost=self.tell) as lease:
                self.token = lease.fencing_token
                self.begun.set()
                self.stop.wait()
        except fencepost.Lost as lost:
            print("the work has stopped:", lost, file=sys.stderr)
        finally:
            self.begun.set()

    def tell(self, lease: fencepost.Lease) -> None:
        self.lost = True
        self.stop.set()

    def state(self) -> str:
        if self.thread.is_alive():
            return "running"
        return "stopped" if self.lost else "ended"


class Agent:
    def __init__(self) -> None:
        self.client: fencepost.Client | None = None
        self.leases: dict[str, fencepost.Lease] = {}
        self.many: dict[str, list[fencepost.Lease]] = {}
        self.works: dict[str, Work] = {}

    def connect(self, endpoints: list[str]) -> dict[str, Any]:
        if self.client is not None:
            self.client.close()
            self.channel.close()
        self.client = fencepost.Client(*endpoints)
        self.channel = grpc.insecure_channel(endpoints[0])
        return {}

    def take(self, resource: str, ttl_ms: int, **options: Any) -> fencepost.Lease:
        assert self.client is not None
        return self.client.lock(resource, ttl=ttl_ms / 1000, **options)

    def acquire(self, resource: str, ttl_ms: int, wait_ms: int = 0, **options: Any) -> dict[str, Any]:
        name = options.pop("as")
        lease = self.leases[name] = self.take(resource, ttl_ms, wait=wait_ms / 1000, **options)
        return {"outcome": "acquired", "token": lease.fencing_token, "owner": lease.owner}

    def acquire_many(self, resource: str, count: int, ttl_ms: int, **name: str) -> dict[str, Any]:
        with ThreadPoolExecutor(count) as threads:
            taken = threads.map(lambda n: self.take(f"{resource}-{n}", ttl_ms), range(count))
            self.many[name["as"]] = list(taken)
        return {"acquired": count}

    def check(self, **name: str) -> dict[str, Any]:
        lease = self.leases[name["as"]]
        remaining = round(lease.remaining * 1000)
        if lease.reason is None:
            return {"held": True, "remaining_ms": remaining}
        return {"held": False, "remaining_ms": 0, "reason": lease.reason}

    def check_many(self, **name: str) -> dict[str, Any]:
        return {"held": sum(lease.reason is None for lease in self.many[name["as"]])}

    def wait_lost(self, within_ms: int, **name: str) -> dict[str, Any]:
        lease = self.leases[name["as"]]
        return {"lost": True, "reason": lease.reason} if lease.wait(within_ms / 1000) else {"lost": False}

    def release(self, **name: str) -> dict[str, Any]:
        self.leases.pop(name["as"]).release()
        return {"outcome": "released"}

    def release_many(self, **name: str) -> dict[str, Any]:
        def released(lease: fencepost.Lease) -> bool:
            try:
                lease.release()
                return True
            except fencepost.FencepostError as error:
                print(lease.resource, error, file=sys.stderr)
                return False

        leases = self.many.pop(name["as"])
        with ThreadPoolExecutor(len(leases)) as threads:
            return {"released": sum(threads.map(released, leases))}

    def work(self, resource: str, ttl_ms: int, **name: str) -> dict[str, Any]:
        assert self.client is not None
        work = self.works[name["as"]] = Work(self.client, resource, ttl_ms / 1000)
        work.begun.wait()
        return {"token": work.token}

    def work_state(self, within_ms: int, **name: str) -> dict[str, Any]:
        work = self.works[name["as"]]
        work.thread.join(within_ms / 1000)
        return {"state": work.state()}

    def stop_work(self, **name: str) -> dict[str, Any]:
        work = self.works[name["as"]]
        work.stop.set()
        work.thread.join()
        return {"state": work.state()}

    def call(self, rpc_name: str, request: dict[str, Any]) -> dict[str, Any]:
        method = getattr(rpc.LockServiceStub(self.channel), rpc_name)
        message = json_format.ParseDict(request, getattr(pb, f"{rpc_name}Request")())
        try:
            answer = method(message, timeout=10, wait_for_ready=True)
            return {"code": "OK", "response": json_format.MessageToDict(answer, preserving_proto_field_name=True)}
        except grpc.RpcError as error:
            info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
            for key, value in error.trailing_metadata() or ():
                if key == "grpc-status-details-bin":
                    for detail in status_pb2.Status.FromString(value).details:
                        _ = detail.Unpack(info) or detail.Unpack(bad)
            return {
                "code": error.code().name,
                "reason": info.reason if info.domain == "fencepost" else None,
                "fields": [violation.field for violation in bad.field_violations],
            }

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        do = command.pop("do")
        if "rpc" in command:
            command["rpc_name"] = command.pop("rpc")
        try:
            answer: dict[str, Any] = getattr(self, do)(**command)
            return answer
        except fencepost.FencepostError as error:
            return failure(error)


def main() -> None:
    agent = Agent()
    # Not by iterating over it, which reads ahead.
    for line in iter(sys.stdin.readline, ""):
        print(json.dumps(agent.answer(json.loads(line))), flush=True)
    if agent.client is not None:
        agent.client.close()


main()
