"""What the service needs of the process that it runs in. The daemon and the simulator each have one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvoffd.system.mappings import MappedSegment


class Host(Protocol):
    """Time, threads and memory. The service calls it in its own thread."""

    def now(self) -> float:
        """Seconds of a clock that never goes back."""

    def post(self, call: Callable[[], None]) -> None:
        """Have the service's thread call something soon. May be called in any thread."""

    def map_memfd(self, fd: int, size_bytes: int) -> MappedSegment:
        """Map a client's memfd. Raises KvoffdError where it is not safe to use."""

    def unmap(self, segments: Sequence[MappedSegment], then: Callable[[], None]) -> None:
        """Unmap segments, which takes long, and call ``then``, both in any thread."""

    def random(self, count: int) -> bytes:
        """Random bytes that nobody can guess."""
