"""What can go wrong, by what it means for the caller."""

from __future__ import annotations

from collections.abc import Mapping

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

_TERMINAL = {"LOCK_NOT_FOUND", "LOCK_EXPIRED", "NOT_OWNER", "TOKEN_SUPERSEDED", "TOKEN_UNKNOWN"}
_POINTLESS = {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT}


class FencepostError(Exception):
    """Why a call did not succeed. A lease is over only when it is Lost. Repeat what is `transient`."""

    transient = False
    _delay = 0.0  # For how long the server wants to be left alone.


class Refused(FencepostError):
    """Another owner, `holder`, has the lock, for `remaining` seconds unless it renews or releases."""

    def __init__(self, holder: str, remaining: float, labels: Mapping[str, str]) -> None:
        super().__init__(f"{holder} has the lock, for another {remaining:.3f} s unless it renews or releases")
        self.holder, self.remaining, self.labels = holder, remaining, dict(labels)


class Lost(FencepostError):
    """The lease is over, by `reason` (the contract's, or UNCONFIRMED): stop working."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the lease is over ({reason})")
        self.reason = reason


class Spent(FencepostError):
    """The lease of this request_id was renewed, released or has expired: use a new id."""


class Invalid(FencepostError):
    """The server refused the request; `fields` says what is wrong with which of them."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        super().__init__("invalid request: " + "; ".join(f"{name}: {why}" for name, why in fields.items()))
        self.fields = dict(fields)


class Unavailable(FencepostError):
    """No server did it now; it may have happened all the same."""

    def __init__(self, detail: str, transient: bool = True) -> None:
        super().__init__(detail)
        self.transient = transient


def decode(error: grpc.RpcError) -> FencepostError:
    """The reason decides where it is the server's own; a proxy's PERMISSION_DENIED ends no lease."""
    info, bad, retry = ErrorInfo(), BadRequest(), RetryInfo()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            try:
                for detail in Status.FromString(value).details:
                    _ = detail.Unpack(info) or detail.Unpack(bad) or detail.Unpack(retry)
            except DecodeError:
                pass  # Not ours.
    reason = info.reason if info.domain == "fencepost" else ""
    if reason in _TERMINAL:
        return Lost(reason)
    if reason == "REQUEST_SPENT":
        return Spent("this request_id was used before, and its lease is over: use a new one")
    if reason == "INVALID_REQUEST":
        return Invalid({violation.field: violation.description for violation in bad.field_violations})
    text = f"{error.code().name}: {error.details()}"
    failed = Unavailable(text, transient=reason != "INTERNAL" and error.code() not in _POINTLESS)
    failed._delay = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return failed
