"""Where the memory of a bench's engines lies: in the host, or (``bench.gpu``) on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvoffd_client.bench.memcpy import Memcpy
from kvoffd_client.shared_memory import Memory, SharedMemory

STORE, LOAD, BOTH = "store", "load", "store and load at once"
WAYS = (STORE, LOAD, BOTH)


class EngineMemory(Protocol):
    """An engine's KV memory."""

    @property
    def registered(self) -> Memory:
        """What the daemon is told of."""
        ...

    @property
    def offset_bytes(self) -> int:
        """Where in it the engine's memory begins."""
        ...

    def close(self) -> None:
        """Free it. The daemon must have let it go."""
        ...


class Place(Protocol):
    """A kind of memory: how to get some, and how fast this machine copies between it and the pool's at best."""

    @property
    def floor(self) -> str:
        """What ``speed`` measures, in a sentence without its full stop."""
        ...

    @property
    def curves(self) -> Sequence[tuple[str, str]]:
        """Floors for the plot: which of WAYS, and how the line is called."""
        ...

    def allocate(self, size_bytes: int) -> EngineMemory:
        """Memory for an engine, which closes it."""
        ...

    def speed(self, way: str) -> float:
        """Copy, in one of WAYS; return bytes per second, of both directions together."""
        ...


class HostMemory:
    """Touched memory of the host."""

    offset_bytes = 0

    def __init__(self, size_bytes: int) -> None:
        self.registered = SharedMemory(size_bytes, "kvoffd-bench")
        self.registered.view.fill(0x5A)

    def close(self) -> None:
        """Free it."""
        self.registered.close()


class HostPlace:
    """The host: memcpy is the floor. ``threads`` threads for each direction."""

    curves = ((STORE, "memcpy, one direction"), (BOTH, "memcpy, at once"))

    def __init__(self, memcpy: Memcpy, size_bytes: int, threads: int) -> None:
        self._memcpy = memcpy
        self._size_bytes = size_bytes
        self._threads = threads
        by_whom = f"{threads} threads' memcpy" if threads > 1 else "one thread's memcpy"
        self.floor = f"{by_whom} of as many bytes in large pieces between two memfds; at once: by twice as many threads"

    def allocate(self, size_bytes: int) -> HostMemory:
        """See Place."""
        return HostMemory(size_bytes)

    def speed(self, way: str) -> float:
        """See Place."""
        return self._memcpy.speed(self._size_bytes, self._threads * (2 if way == BOTH else 1))
