"""The pool: memory, slots and their table as one thing. It is the cache's SlotStore."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from kvoffd.errors import PoolTooLarge
from kvoffd.pool.backing import MemfdHome, PoolBacking, PoolMappings, held_bytes
from kvoffd.pool.checksum import as_buffer, digests
from kvoffd.pool.format import BadTable, Geometry
from kvoffd.pool.nodes import Node, cut_pool
from kvoffd.pool.share import PoolShare, read_only
from kvoffd.pool.slots import SlotAllocator
from kvoffd.pool.table import Inheritance, SlotTable
from kvoffd.system.limits import MemoryLimit, check_fits

if TYPE_CHECKING:
    from kvoffd.pool.records import NamespaceRecord, SlotOwner

logger = logging.getLogger(__name__)

# Behind the serving daemon's back the pool is touched in short steps: nothing is mapped or unmapped meanwhile.
_SHORT_TOUCH_BYTES = 4 << 20


class Pool:
    """Owns the pool's memory and its slot table. All but ``touch`` belongs to the event loop's thread.

    What an earlier daemon left at home is gone on with. Every slot in ``inheritance`` is handed out then, and must be
    taken up or freed like any other.

    Args:
        size_bytes: of the pool; the table comes on top, at most 2 % of it.
        region_bytes: see SlotAllocator.
        limit: what can be had, with what ``home`` has already; found out when None.
        home: where the memory is; new memfds when None.
        nodes: NUMA nodes to spread the pool over; none leaves it to the kernel. What is taken over stays where it is,
            which is the same place as long as these are the same nodes.

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
        home: PoolBacking | None = None,
        nodes: Sequence[Node] = (),
    ) -> None:
        home = MemfdHome() if home is None else home
        limit = home.limit() if limit is None else limit
        check_fits(size_bytes, limit)  # before the books of an absurd pool are drawn up
        self._slots = SlotAllocator(size_bytes, region_bytes)
        self.segments = cut_pool(size_bytes, self._slots.region_bytes, nodes)
        self._slots.place(self.segments)
        geometry = Geometry.of(size_bytes, self._slots.region_bytes)
        self.table_bytes = geometry.size_bytes
        check_fits(size_bytes + self.table_bytes, limit)
        self.inheritance = Inheritance([], [], 0)
        """What an earlier daemon left; nothing in a new pool."""
        self.cold_reason = ""
        """Why what an earlier daemon left was not taken over; empty where it was, or where there was nothing."""
        self.touched_bytes = 0
        """Bytes whose pages this process has in memory and in its page tables; set from the touching threads."""
        self.adopted = False
        """Whether an earlier daemon's pool was taken over, be it empty."""
        self._facts_dropped = False
        rooms = self._adopt(home, geometry)
        if rooms is None:
            rooms = home.make(geometry)
            try:
                self._table = SlotTable(size_bytes, self._slots.region_bytes, memory=rooms.table)
            except BaseException:
                rooms.close()
                raise
        self._memory = rooms.pool
        self._bytes = as_buffer(rooms.pool)

    def _adopt(self, home: PoolBacking, geometry: Geometry) -> PoolMappings | None:
        try:
            rooms = home.find(geometry)
            if rooms is None:
                return None
            try:
                self._table, self.inheritance = SlotTable.adopt(rooms.table, geometry.pool_bytes, geometry.region_bytes)
                self._slots.hold((record.offset, record.slot_bytes) for record in self.inheritance.slots)
            except BaseException:
                rooms.close()
                raise
        except BadTable as error:
            self.cold_reason = error.message
            return None
        self.adopted = True
        return rooms

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
    def buffer(self) -> memoryview:
        """All its bytes, to be read and written, until ``close``: for who checks what slots it has."""
        return memoryview((ctypes.c_uint8 * self.pool_bytes).from_address(self.address)).cast("B")

    @property
    def memory_fds(self) -> tuple[int, int]:
        """Descriptors of the pool and of its table, for whoever keeps them for the daemon's successor."""
        return self._memory.fd, self._table.fd

    def share(self) -> PoolShare:
        """The pool for processes that may read it, and no more. Raises OSError."""
        return PoolShare(read_only(self._memory.fd), self._memory.offset, self.pool_bytes)

    def take_inheritance(self) -> Inheritance:
        """Hands ``inheritance`` over, once: it may be large."""
        taken, self.inheritance = self.inheritance, Inheritance([], [], 0)
        return taken

    @property
    def resident(self) -> bool:
        """Whether every page is in memory already, as in a pool that was taken over: then it need not be touched."""
        return self.adopted and held_bytes(self._memory.fd) >= self.pool_bytes

    def touch(
        self,
        threads: int,
        on_progress: Callable[[int], None],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> int:
        """Makes all pages of the pool resident: see PoolMemory.touch."""

        def on_touched(touched_bytes: int) -> None:
            self._note_touched(touched_bytes)
            on_progress(touched_bytes)

        return self._memory.touch(threads, on_touched, should_stop, segments=self.segments)

    def map_pages(self, should_stop: Callable[[], bool]) -> None:
        """Fills the page tables of a resident pool while it is in use, with one thread; without it, faults would."""
        try:
            self._memory.touch(1, self._note_touched, should_stop, _SHORT_TOUCH_BYTES)
        except PoolTooLarge as error:
            logger.warning("%s", error.message)

    def _note_touched(self, touched_bytes: int) -> None:
        self.touched_bytes = touched_bytes

    def slot_bytes(self, nbytes: int) -> int:
        """Size of the slot that holds a shard of ``nbytes``. Raises ShardTooLarge where no region could."""
        return self._slots.slot_bytes(nbytes)

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

    def neighbours(self, offset: int) -> list[int]:
        """Offsets of all slots in use in the region of this one, itself among them."""
        return self._slots.neighbours(offset)

    def note_namespace(self, facts: NamespaceRecord) -> None:
        """Keeps what is known of a namespace for a successor. Where there is no room for it, that is logged."""
        if not self._table.note_namespace(facts) and not self._facts_dropped:
            self._facts_dropped = True
            logger.warning("The namespace %r, and maybe more, will not outlive the daemon: too many.", facts.label)

    def revoke_record(self, offset: int) -> None:
        """Strikes the record of a slot out, which stays handed out."""
        self._table.free([offset])

    def mark_writing(self, offset: int, owner: SlotOwner) -> None:
        """Notes that a shard will be written there now; what was there is not to be trusted from here on."""
        self._table.mark_writing(offset, *owner)

    def mark_all_writing(
        self,
        offsets: Sequence[int],
        fingerprint: bytes,
        group: int,
        keys: Sequence[bytes],
        rank: int,
        world_size: int,
    ) -> None:
        """As ``mark_writing``, for a slot of each key of a group."""
        self._table.mark_all_writing(offsets, fingerprint, group, keys, rank, world_size)

    def mark_all_ready(
        self, offsets: Sequence[int], first_blocks: Sequence[int], length: int, checksums: Sequence[int]
    ) -> None:
        """As ``mark_ready``, for slots of shards that are all as long."""
        self._table.mark_all_ready(offsets, first_blocks, length, checksums)

    def mark_ready(self, offset: int, first_block: int, length: int, checksum: int = 0) -> None:
        """Notes that the shard of ``length`` bytes is written, but for its first ``first_block`` engine blocks.

        ``checksum`` is the slot's ``digest``; 0 where none was taken.
        """
        self._table.mark_ready(offset, first_block, length, checksum)

    def digests(self, slots: Sequence[tuple[int, int]]) -> list[int]:
        """The checksums of slots, given by offset and length: never 0. For any thread, until ``close``."""
        return digests(self._bytes, slots)

    def free(self, offsets: Collection[int]) -> None:
        """Takes slots back, whatever their records say."""
        self._slots.give_back(offsets)
        self._table.free(offsets)

    def close(self) -> None:
        """Lets all memory go; a second call does nothing. No copy may be using it."""
        self._table.close()
        self._bytes.release()
        self._memory.close()
