"""The pool: its memory, its slots and the table that describes them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from kvoffd.pool.allocator import SlotAllocator
from kvoffd.pool.backing import FileBacking, MemfdBacking, PoolBacking
from kvoffd.pool.checksums import digests
from kvoffd.pool.slot_table import BadTable, SlotTable, TableGeometry
from kvoffd.system.files import OnError, held_bytes
from kvoffd.system.limits import MemoryLimit, check_fits
from kvoffd.system.numa import Locality


class Pool:
    """Owns the pool's memory and its slot table. All but ``touch`` and ``digests`` belongs to the event loop's thread.

    The memory that an earlier daemon left in ``backing`` is taken over, with its slot table as that left it;
    ``cache/recovery`` finds the blocks in it.

    Args:
        size_bytes: of the pool; the table comes on top, at most 2 % of it.
        region_bytes: see SlotAllocator.
        limit: the memory that can be had, with what ``backing`` holds already; found out when None.
        backing: where the memory comes from; new memfds when None.
        nodes: NUMA nodes to spread the pool over; none leaves it to the kernel. A pool that is taken over stays where
            it is, which is the same place as long as these are the same nodes.

    Raises:
        PoolTooLarge: the machine, a cgroup or the file system cannot give that much.
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
        backing = MemfdBacking() if backing is None else backing
        limit = backing.limit() if limit is None else limit
        check_fits(size_bytes, limit)  # before the regions of an absurdly large pool are listed
        self.slots = SlotAllocator(size_bytes, region_bytes, nodes)
        self.pool_bytes = size_bytes
        geometry = TableGeometry(size_bytes, self.slots.region_bytes)
        self.table_bytes = geometry.size_bytes
        check_fits(size_bytes + self.table_bytes, limit)
        self.cold_reason = ""
        """Why an earlier daemon's pool was not taken over; empty where it was, or where there was none."""
        try:
            found = backing.find(geometry)
        except BadTable as error:
            found, self.cold_reason = None, error.message
        self.recovered = found is not None
        """Whether an earlier daemon's pool was taken over, be it empty."""
        self._memory, self._table_memory = found or backing.make(geometry)
        self.mapping = self._memory.segment
        """All bytes of the pool, mapped until ``close``."""
        self._bytes = self._memory.buffer
        with OnError(self.close):
            self.table = SlotTable(self._table_memory.buffer, geometry, new=not self.recovered)
        self._is_file = isinstance(backing, FileBacking)

    @property
    def buffer(self) -> memoryview:
        """All bytes of the pool, to be read and written, until ``close``. It does not check whose slots they are."""
        return self._memory.buffer[: self.pool_bytes]

    @property
    def memory_fds(self) -> tuple[int, int]:
        """Descriptors of the pool and of its table, which systemd keeps for the next daemon."""
        return self._memory.fd, self._table_memory.fd

    @property
    def resident(self) -> bool:
        """Whether every page is in memory already, as in a pool that was taken over: then it need not be touched."""
        return self.recovered and held_bytes(os.fstat(self._memory.fd)) >= self.pool_bytes

    @property
    def removed(self) -> bool:
        """Whether the pool file has no name any more, so that no successor can find it. Memfds never have one."""
        return self._is_file and not os.fstat(self._memory.fd).st_nlink

    def touch(
        self, threads: int, on_progress: Callable[[int], None], should_stop: Callable[[], bool] = lambda: False
    ) -> int:
        """Makes all pages of the pool resident: see PoolMemory.touch."""
        return self._memory.touch(threads, on_progress, should_stop, segments=self.slots.segments)

    def map_pages(self, should_stop: Callable[[], bool], is_busy: Callable[[], bool]) -> None:
        """Fills the page tables of a resident pool while it is in use: see PoolMemory.map_pages."""
        self._memory.map_pages(should_stop, is_busy)

    def digests(self, places: Sequence[tuple[int, int]]) -> list[int]:
        """The checksums of places, given by offset and length in bytes: never 0. For any thread, until ``close``."""
        return digests(self._bytes, places)

    def close(self) -> None:
        """Unmaps all memory; a second call does nothing. No copy may be using it."""
        self._table_memory.close()
        self._bytes.release()
        self._memory.close()
