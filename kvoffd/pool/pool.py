"""The pool: memory, slots and their table as one thing. It is the cache's SlotStore."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvoffd.pool.limits import MemoryLimit, check_fits, memory_limit
from kvoffd.pool.memory import PoolMemory
from kvoffd.pool.slots import SlotAllocator
from kvoffd.pool.table import SlotTable, table_bytes

if TYPE_CHECKING:
    from kvoffd.cache.slots import SlotOwner


class Pool:
    """Owns the pool's memory and its slot table. All but ``touch`` belongs to the event loop's thread.

    Args:
        size_bytes: of the pool; the table comes on top, at most 2 % of it.
        region_bytes: see SlotAllocator.
        limit: what can be had; found out when None.

    Raises:
        PoolTooLarge: the machine or a cgroup cannot give that much.
        BadGeometry: the pool is too small to hold a slot.
    """

    def __init__(self, size_bytes: int, *, region_bytes: int | None = None, limit: MemoryLimit | None = None) -> None:
        limit = memory_limit() if limit is None else limit
        check_fits(size_bytes, limit)  # before the books of an absurd pool are drawn up
        self._slots = SlotAllocator(size_bytes, region_bytes)
        self.table_bytes = table_bytes(size_bytes, self._slots.region_bytes)
        check_fits(size_bytes + self.table_bytes, limit)
        self._memory = PoolMemory.create(size_bytes, "kvoffd-pool")
        try:
            self._table = SlotTable(size_bytes, self._slots.region_bytes)
        except BaseException:
            self._memory.close()
            raise

    @property
    def pool_bytes(self) -> int:
        """Size of the pool."""
        return self._slots.pool_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes in no slot that is handed out."""
        return self._slots.free_bytes

    @property
    def address(self) -> int:
        """Address of offset 0."""
        return self._memory.address

    @property
    def memory_fds(self) -> tuple[int, int]:
        """Descriptors of the pool and of its table, for whoever keeps them for the daemon's successor."""
        return self._memory.fd, self._table.fd

    def touch(
        self,
        threads: int,
        on_progress: Callable[[int], None],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> int:
        """Makes all pages of the pool resident: see PoolMemory.touch."""
        return self._memory.touch(threads, on_progress, should_stop)

    def slot_bytes(self, nbytes: int) -> int:
        """Size of the slot that holds a shard of ``nbytes``. Raises ShardTooLarge where no region could."""
        return self._slots.slot_bytes(nbytes)

    def take(self, slot_bytes: int, count: int) -> list[int]:
        """Hands out up to ``count`` free slots of a size, in runs where possible: their offsets, ascending."""
        offsets = self._slots.take(slot_bytes, count)
        for region in {offset // self._slots.region_bytes for offset in offsets}:
            self._table.set_region(region, slot_bytes)
        return offsets

    def neighbours(self, offset: int) -> list[int]:
        """Offsets of all slots in use in the region of this one, itself among them."""
        return self._slots.neighbours(offset)

    def mark_writing(self, offset: int, owner: SlotOwner) -> None:
        """Notes that a shard will be written there now; what was there is not to be trusted from here on."""
        self._table.mark_writing(offset, *owner)

    def mark_ready(self, offset: int, first_block: int, length: int) -> None:
        """Notes that the shard of ``length`` bytes is written, but for its first ``first_block`` engine blocks."""
        self._table.mark_ready(offset, first_block, length)

    def free(self, offset: int) -> None:
        """Takes a slot back, whatever its record says."""
        self._slots.give_back(offset)
        self._table.free(offset)

    def close(self) -> None:
        """Lets all memory go; a second call does nothing. No copy may be using it."""
        self._table.close()
        self._memory.close()
