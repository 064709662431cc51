"""Distributed locks with a fencing token: the client of a Fencepost server."""

from .client import Client
from .errors import FencepostError, Invalid, Lost, Refused, Spent, Unavailable
from .lease import Lease

__all__ = ["Client", "FencepostError", "Invalid", "Lease", "Lost", "Refused", "Spent", "Unavailable"]
