"""The pool: its memory, its slots and the table that describes them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Sequence

from kvoffd.errors import PoolTooLarge
from kvoffd.pool.backing import MemfdBacking, PoolBacking, PoolMappings
from kvoffd.pool.records import NamespaceRecord
from kvoffd.pool.slots import SlotAllocator
from kvoffd.pool.table import NOTHING_RECOVERED, RecoveredSlots, SlotTable
from kvoffd.pool.table_format import BadTable, Geometry, digests
from kvoffd.system.files import OnError, held_bytes
from kvoffd.system.limits import MemoryLimit, check_fits
from kvoffd.system.numa import Locality

logger = logging.getLogger(__name__)

# While engines are served, the pool is touched in short steps: nothing is mapped or unmapped meanwhile.
_SHORT_TOUCH_BYTES = 4 << 20


class Pool:
    """Owns the pool's memory and its slot table. All but ``touch`` belongs to the event loop's thread.

    The pool that an earlier daemon left in ``backing`` is taken over. Every slot in ``recovered`` is then handed out,
    and must be used or freed like any other.

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
        self._slots = SlotAllocator(size_bytes, region_bytes, nodes)
        self.segments = self._slots.segments
        self.pool_bytes = size_bytes
        self.region_bytes = self._slots.region_bytes
        self.touched_bytes = 0
        """Bytes whose pages this process has in memory and in its page tables; set from the touching threads."""
        geometry = Geometry.of(size_bytes, self._slots.region_bytes)
        self.table_bytes = geometry.size_bytes
        check_fits(size_bytes + self.table_bytes, limit)
        self.recovered = NOTHING_RECOVERED
        """The slots that an earlier daemon left; empty in a new pool."""
        self.cold_reason = ""
        """Why an earlier daemon's pool was not taken over; empty where it was, or where there was none."""
        self.adopted = False
        """Whether an earlier daemon's pool was taken over, be it empty."""
        self._namespace_dropped = False
        mappings = self._adopt(backing, geometry)
        if mappings is None:
            mappings = backing.make(geometry)
            with OnError(mappings.close):
                self._table = SlotTable(mappings.table, geometry)
        self._memory = mappings.pool
        self._bytes = mappings.pool.buffer
        # Stores call these for many slots at a time: no call of ours stands between.
        self.slot_bytes = self._slots.slot_bytes
        self.neighbours = self._slots.neighbours
        self.mark_all_writing = self._table.mark_all_writing
        self.mark_all_ready = self._table.mark_all_ready
        self.rows = self._table.rows
        self.set_checksum = self._table.set_checksum
        self.forget_namespace = self._table.namespace_log.forget

    def _adopt(self, backing: PoolBacking, geometry: Geometry) -> PoolMappings | None:
        try:
            mappings = backing.find(geometry)
            if mappings is None:
                return None
            with OnError(mappings.close):
                self._table, self.recovered = SlotTable.adopt(mappings.table, geometry)
                self._slots.restore(self.recovered.slots)
        except BadTable as error:
            self.cold_reason = error.message
            return None
        self.adopted = True
        return mappings

    @property
    def free_bytes(self) -> int:
        return self._slots.free_bytes

    @property
    def address(self) -> int:
        return self._memory.address

    @property
    def buffer(self) -> memoryview:
        """All bytes of the pool, to be read and written, until ``close``. It does not check whose slots they are."""
        return self._memory.buffer[: self.pool_bytes]

    @property
    def memory_fds(self) -> tuple[int, int]:
        """Descriptors of the pool and of its table, for whoever keeps them for the daemon's successor."""
        return self._memory.fd, self._table.fd

    def take_recovered(self) -> RecoveredSlots:
        """Hands ``recovered`` over, once: it may be large."""
        taken, self.recovered = self.recovered, NOTHING_RECOVERED
        return taken

    @property
    def resident(self) -> bool:
        """Whether every page is in memory already, as in a pool that was taken over: then it need not be touched."""
        return self.adopted and held_bytes(os.fstat(self._memory.fd)) >= self.pool_bytes

    def touch(
        self, threads: int, on_progress: Callable[[int], None], should_stop: Callable[[], bool] = lambda: False
    ) -> int:
        """Makes all pages of the pool resident: see PoolMemory.touch."""

        def on_touched(touched_bytes: int) -> None:
            self._note_touched(touched_bytes)
            on_progress(touched_bytes)

        return self._memory.touch(threads, on_touched, should_stop, segments=self.segments)

    def map_pages(self, should_stop: Callable[[], bool]) -> None:
        """Fills the page tables of a resident pool while it is in use, by one thread, so that copies do not fault."""
        try:
            self._memory.touch(1, self._note_touched, should_stop, _SHORT_TOUCH_BYTES)
        except PoolTooLarge as error:
            logger.warning("%s", error.message)

    def _note_touched(self, touched_bytes: int) -> None:
        self.touched_bytes = touched_bytes

    @property
    def spilled_slots(self) -> int:
        """Slots that were asked for on one NUMA node and handed out on another, since the start."""
        return self._slots.spilled_slots

    def take(self, slot_bytes: int, count: int, node: int | None = None) -> list[int]:
        """Hands out up to ``count`` free slots of a size, in runs where possible: their offsets, ascending.

        Those on NUMA node ``node`` come first.
        """
        offsets = self._slots.take(slot_bytes, count, node)
        for region in {offset // self._slots.region_bytes for offset in offsets}:
            self._table.set_region(region, slot_bytes)
        return offsets

    def note_namespace(self, record: NamespaceRecord) -> None:
        """Keeps a namespace's record for a successor. Logs it, once, when there is no room for one."""
        if not self._table.namespace_log.note(record) and not self._namespace_dropped:
            self._namespace_dropped = True
            logger.warning("The namespace %r, and maybe more, will not outlive the daemon: too many.", record.label)

    def revoke_record(self, offset: int) -> None:
        """Strikes out the record of a slot that is ready. It stays handed out, but no successor may serve its bytes."""
        self._table.free([offset])

    def digests(self, slots: Sequence[tuple[int, int]]) -> list[int]:
        """The checksums of slots, given by offset and length in bytes: never 0. For any thread, until ``close``."""
        return digests(self._bytes, slots)

    def free(self, offsets: Collection[int]) -> None:
        """Takes slots back, whatever their records say."""
        self._slots.give_back(offsets)
        self._table.free(offsets)

    def close(self) -> None:
        """Unmaps all memory; a second call does nothing. No copy may be using it."""
        self._table.close()
        self._bytes.release()
        self._memory.close()
