"""Where the pool and its table live, and what an earlier daemon left there."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvoffd.errors import UnsafeSegment
from kvoffd.pool.format import BadTable, Geometry, check_geometry
from kvoffd.pool.memory import PoolMemory
from kvoffd.system.limits import MemoryLimit, memory_limit


class PoolMappings(NamedTuple):
    """The pool's memory and its table's."""

    pool: PoolMemory
    table: PoolMemory

    def close(self) -> None:
        """Lets both go."""
        self.pool.close()
        self.table.close()


class PoolBacking(Protocol):
    """Memory for a pool, old or new. One pool at a time."""

    def limit(self) -> MemoryLimit:
        """What can be had, and what is held already."""

    def find(self, geometry: Geometry) -> PoolMappings | None:
        """What an earlier daemon left; None where it left nothing. Raises BadTable when it is not of this geometry."""

    def make(self, geometry: Geometry) -> PoolMappings:
        """New memory, all zeros; what is left of the old is let go before. Raises PoolTooLarge."""


class MemfdHome:
    """Sealed memfds: new ones, or those of an earlier daemon that somebody kept.

    Args:
        kept: the earlier daemon's pool and table; owned from here on.
        on_discard: called when they are of no use, after they are closed and before new ones are made.
    """

    def __init__(self, kept: tuple[int, int] | None = None, on_discard: Callable[[], None] | None = None) -> None:
        self._kept = kept
        self._on_discard = on_discard

    def limit(self) -> MemoryLimit:
        """What the machine and its cgroups give, and what the kept memory has taken already."""
        held = sum(map(held_bytes, self._kept)) if self._kept else 0
        limit = memory_limit()
        return MemoryLimit(limit.bytes + held, limit.source)

    def find(self, geometry: Geometry) -> PoolMappings | None:
        if self._kept is None:
            return None
        pool_fd, table_fd = self._kept
        check_geometry(table_fd, geometry)
        if (size := os.fstat(pool_fd).st_size) != geometry.pool_bytes:
            raise BadTable(f"The memory beside the slot table has {size} bytes, and the table names another size.")
        try:
            pool = PoolMemory.of_memfd(pool_fd, geometry.pool_bytes)
            try:
                return PoolMappings(pool, PoolMemory.of_memfd(table_fd, geometry.size_bytes))
            except BaseException:
                pool.close()
                raise
        except UnsafeSegment as error:
            raise BadTable(f"What was kept is no memory of kvoffd's: {error.message}") from error

    def make(self, geometry: Geometry) -> PoolMappings:
        if self._kept is not None:
            self.close()
            if self._on_discard is not None:
                self._on_discard()
        pool = PoolMemory.create(geometry.pool_bytes, "kvoffd-pool")
        try:
            return PoolMappings(pool, PoolMemory.create(geometry.size_bytes, "kvoffd-slot-table"))
        except BaseException:
            pool.close()
            raise

    def close(self) -> None:
        """Lets the kept descriptors go; what ``find`` made of them has its own."""
        for fd in self._kept or ():
            os.close(fd)
        self._kept = None


def held_bytes(fd: int) -> int:
    """Memory that a file on tmpfs or hugetlbfs has taken; 0 for what is no file."""
    return os.fstat(fd).st_blocks * 512


def try_lock(fd: int) -> bool:
    """Locks the file against a second owner; False when there is one. The lock goes with the last descriptor."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
