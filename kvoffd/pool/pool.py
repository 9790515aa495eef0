"""The pool: its memory, its slots and the table that describes them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

from kvoffd.pool.allocator import SlotAllocator
from kvoffd.pool.backing import FileBacking, NewBacking, PoolBacking
from kvoffd.pool.checksums import digests
from kvoffd.pool.slot_table import BadTable, SlotTable, TableGeometry
from kvoffd.system.files import OnError, held_bytes
from kvoffd.system.limits import MemoryLimit, check_fits, machine_huge_bytes
from kvoffd.system.mappings import huge_page_bytes
from kvoffd.system.numa import Locality

HUGE_SHARE = 0.9
"""Least share of a pool in huge pages at which ``measure_pages`` need not measure what small ones cost."""


class MemoryKind(StrEnum):
    """Kinds of a pool's memory."""

    PRIVATE = "private"
    """No other process can map it, and the kernel gives it huge pages."""
    SHARED = "shared"
    """Others may map it, or keep it; the kernel gives it huge pages only by a setting of its own."""
    RESERVED = "reserved"
    """Shared, and in huge pages that the administrator had reserved."""


class PoolPages(NamedTuple):
    """Pages of a pool.

    Attributes:
        huge_bytes: bytes in huge pages; of a large pool an estimate.
        slowdown: how many times as long reading it takes as reading memory in huge pages; 0 if it was not measured.
    """

    huge_bytes: int = 0
    slowdown: float = 0.0


class Pool:
    """Owns the pool's memory and its slot table.

    Only ``touch``, ``map_pages``, ``measure_pages`` and ``digests`` may run while another thread uses the pool.

    The pool reuses memory that an earlier daemon left in ``backing``, with the slot table in it; ``cache/recovery``
    finds the blocks.

    Args:
        size_bytes: size of the pool without the table, which adds at most 2 %.
        region_bytes: see SlotAllocator.
        limit: the memory available, including what ``backing`` holds already; found out when None.
        backing: source of the memory; new memory when None.
        nodes: NUMA nodes to spread the pool over; if empty, the kernel decides. A reused pool stays where it is, which
            is the same place if the nodes are the same.

    Raises:
        PoolTooLarge: the machine, a cgroup or the file system cannot provide that much.
        BadGeometry: the pool is too small to hold a slot.
    """

    def __init__(
        self,
        size_bytes: int,
        *,
        region_bytes: int | None = None,
        limit: MemoryLimit | None = None,
        backing: PoolBacking | None = None,
        nodes: Sequence[Locality] = (),
    ) -> None:
        backing = NewBacking() if backing is None else backing
        limit = backing.limit(size_bytes) if limit is None else limit
        check_fits(size_bytes, limit)  # before the allocator lists the regions of an absurdly large pool
        self.slots = SlotAllocator(size_bytes, region_bytes, nodes)
        self.pool_bytes = size_bytes
        geometry = TableGeometry(size_bytes, self.slots.region_bytes)
        self.table_bytes = geometry.size_bytes
        check_fits(size_bytes + self.table_bytes, limit)
        self.cold_reason = ""
        """Reason that an earlier daemon's pool was not reused; empty if it was, or if there was none."""
        try:
            found = backing.find(geometry)
        except BadTable as error:
            found, self.cold_reason = None, error.message
        self.recovered = found is not None
        """Whether an earlier daemon's pool was reused, even an empty one."""
        self._memory, self._table_memory = found or backing.make(geometry, self.slots.segments)
        self.mapping = self._memory.mapping
        """All bytes of the pool, mapped until ``close``."""
        self.kept = ""
        """Keeper of the memory when this process ends, as the end of a sentence: ``by systemd``, ``in /dev/shm/pool``;
        empty for none. The caller sets it."""
        self._bytes = self._memory.buffer
        """Released by ``close``, so that a later ``digests`` raises and does not read unmapped memory."""
        with OnError(self.close):
            self.table = SlotTable(self._table_memory.buffer, geometry, new=not self.recovered)
        self._is_file = isinstance(backing, FileBacking)
        self.pages = PoolPages()
        """Results of ``measure_pages``."""

    @property
    def at_the_end(self) -> str:
        """Fate of the memory when this process ends, as the end of a sentence."""
        return f"is kept {self.kept}" if self.kept and not self.removed else "ends with this process"

    @property
    def buffer(self) -> memoryview:
        """All bytes of the pool, readable and writable until ``close``. Nothing checks whose slots they are."""
        return self._memory.buffer[: self.pool_bytes]

    @property
    def memory_fds(self) -> tuple[int, int]:
        """Descriptors of a shared pool and its table, which systemd stores for the next daemon."""
        assert self._memory.fd >= 0, "private memory has none"
        return self._memory.fd, self._table_memory.fd

    @property
    def place(self) -> tuple[int, int, int]:
        """(descriptor, offset, size in bytes) of a shared pool's memory, for another process that maps it."""
        assert self._memory.fd >= 0, "private memory has none"
        return self._memory.fd, self._table_memory.size_bytes if self._is_file else 0, self._memory.size_bytes

    @property
    def kind(self) -> MemoryKind:
        """Kind of the pool's memory."""
        if self._memory.reserved:
            return MemoryKind.RESERVED
        return MemoryKind.SHARED if self._memory.fd >= 0 else MemoryKind.PRIVATE

    @property
    def resident(self) -> bool:
        """Whether every page is in memory already, as in a reused pool, which need not be touched."""
        return self.recovered and held_bytes(os.fstat(self._memory.fd)) >= self.pool_bytes

    @property
    def removed(self) -> bool:
        """Whether the pool file was unlinked, so that the next daemon cannot find it. Memfds never have a name."""
        return self._is_file and not os.fstat(self._memory.fd).st_nlink

    def touch(
        self, threads: int, on_progress: Callable[[int], None], should_stop: Callable[[], bool] = lambda: False
    ) -> int:
        """Make all pages of the pool resident: see PoolMemory.touch."""
        return self._memory.touch(threads, on_progress, should_stop, segments=self.slots.segments)

    def map_pages(self, should_stop: Callable[[], bool], is_busy: Callable[[], bool]) -> None:
        """Fill the page tables of a resident pool while it is in use: see PoolMemory.map_pages."""
        self._memory.map_pages(should_stop, is_busy)

    def measure_pages(self) -> None:
        """Set ``pages``. The pool's pages must be mapped. Takes up to a second: see PoolMemory.slowdown.

        Before Linux 6.7 it counts the huge pages of the machine, some of which other processes may have.
        """
        size_bytes, kind = self.mapping.size_bytes, self.kind
        found = size_bytes if kind is MemoryKind.RESERVED else huge_page_bytes(self.mapping)
        are_huge = found is not None and found >= HUGE_SHARE * size_bytes
        if found is None:
            found = min(size_bytes, machine_huge_bytes(shared=kind is MemoryKind.SHARED))
        self.pages = PoolPages(found, 0.0 if are_huge else self._memory.slowdown())

    def digests(self, places: Sequence[tuple[int, int]]) -> list[int]:
        """Compute the checksums of byte ranges (offset, length): never 0. For any thread, until ``close``."""
        return digests(self._bytes, places)

    def close(self) -> None:
        """Unmap all memory; a second call does nothing. No copy may be using it."""
        self._table_memory.close()
        self._bytes.release()
        self._memory.close()
