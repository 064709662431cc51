"""Distributed locks with a fencing token: the client of a Fencepost server."""

from .client import Client, FencepostError, Invalid, Lease, Lost, Refused, Spent, Unavailable

__all__ = ["Client", "FencepostError", "Invalid", "Lease", "Lost", "Refused", "Spent", "Unavailable"]
