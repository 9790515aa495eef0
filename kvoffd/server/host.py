"""Interface of the process that the service runs in: a real daemon, or the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from kvoffd.system.mappings import HostMapping

Post: TypeAlias = Callable[[Callable[[], None]], None]
"""Schedules a call in the service's thread. For any thread."""


class Host(Protocol):
    """Clock, threads and memory of the daemon, or of the simulator. Called in the service's thread."""

    def now(self) -> float:
        """Return the seconds of a monotonic clock."""

    def post(self, call: Callable[[], None]) -> None:
        """Schedule a call in the service's thread. For any thread."""

    def map_memfd(self, fd: int, size_bytes: int) -> HostMapping:
        """Map a client's memfd. Raises KvoffdError if it is not safe to use."""

    def unmap(self, segments: Sequence[HostMapping], then: Callable[[], None]) -> None:
        """Unmap segments, which is slow, then call ``then``, both in any thread."""

    def random(self, count: int) -> bytes:
        """Return cryptographically random bytes."""
