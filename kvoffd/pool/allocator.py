"""Allocator of pool slots: which slot numbers are free, and the size of each slot.

The pool is divided into regions. All slots of a region have one size. Once they are all free, the region can take
another size, so that namespaces of different block sizes share the memory.

Slot ``region * slots_per_region + index`` begins at ``region * region_bytes + index * slot_bytes[region]``: numbers are
dense within a region, so that tables indexed by slot number touch few pages for large slots.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffd.errors import BadGeometry
from kvoffd.system.native import COUNT, INT, ITEMS, NUMBER, VOID_P, Structure, declare, native
from kvoffd.system.numa import Locality
from kvoffd.system.structures import SLOTS
from kvoffd_proto.units import exact_size, format_size

declare(
    slots_take=(COUNT, VOID_P, NUMBER, NUMBER, NUMBER, VOID_P, NUMBER),
    slots_free=(INT, VOID_P, *ITEMS),
)

PAGE_BYTES = 4096
MIN_SLOT_BYTES = 8192
_REGIONS = 64
"""Regions of a pool, unless a limit of their size makes them fewer or more."""
_MIN_REGIONS = 12
"""Regions of a small pool, at least, for as many sizes of slots."""
_MIN_REGION_BYTES = 4 << 20
_MAX_REGION_BYTES = 256 << 20
"""Limited because a region changes its slot size as a whole: all its blocks are evicted at once."""
NO_NODE = -1
"""NUMA node number of memory whose node is unknown, as in slots.h."""
SlotIds: TypeAlias = npt.NDArray[np.uint32]


def page_up(nbytes: int) -> int:
    """Round ``nbytes`` up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def default_region_bytes(pool_bytes: int) -> int:
    """Return a 64th of the pool, at most 256 MiB and at least 4 MiB (in pools below 48 MiB: a 12th, rounded down to a
    power of two).

    Small, because each slot size may occupy a region with a single slot. With ``n`` slot sizes, blocks of one may be
    evicted while ``n - 1`` regions of the others are almost free: ``n - 1`` twelfths of the smallest pool.
    """
    twelfth = pool_bytes // _MIN_REGIONS
    least = min(_MIN_REGION_BYTES, 1 << (twelfth.bit_length() - 1))
    wanted = min(_MAX_REGION_BYTES, pool_bytes // _REGIONS)
    return max(MIN_SLOT_BYTES, page_up(max(least, wanted)))


def pool_bytes_for(slot_bytes: int) -> int:
    """Return a pool size at which ``default_region_bytes`` is enough for a slot of this size."""
    if slot_bytes > _MIN_REGION_BYTES:
        return _REGIONS * slot_bytes
    return _MIN_REGIONS << (slot_bytes - 1).bit_length()


class PoolSegment(NamedTuple):
    """Bytes [begin, end) of the pool, or of the file that it lies in, all on one NUMA node."""

    begin: int
    end: int
    locality: Locality


def cut_pool(pool_bytes: int, region_bytes: int, nodes: Sequence[Locality]) -> list[PoolSegment]:
    """Split the pool into one segment per node, of whole regions and about equal size; fewer if regions are fewer."""
    regions = -(-pool_bytes // region_bytes)
    bounds = [number * regions // len(nodes) * region_bytes for number in range(len(nodes))] + [pool_bytes]
    return [
        PoolSegment(begin, end, node)
        for node, begin, end in zip(nodes, bounds, bounds[1:], strict=False)
        if begin < end
    ]


class SlotAllocator(Structure):
    """Allocates slots. Not thread-safe. It is the ``struct slots`` of slots.h, whose counters C changes.

    Args:
        pool_bytes: at least ``MIN_SLOT_BYTES``. Bytes behind the last whole slot of a region are not used.
        region_bytes: a multiple of ``PAGE_BYTES``; ``default_region_bytes`` when None. The last region may be shorter.
        nodes: NUMA nodes over which to spread the regions; if empty, the kernel decides.

    Raises:
        BadGeometry: the pool holds no slot, or is smaller than a region.
    """

    _fields_ = SLOTS
    pool_bytes: int
    region_bytes: int
    slots_per_region: int
    regions: int
    free_bytes: int
    """Bytes outside allocated slots, including remainders that are too small for a slot."""
    slots_on_other_nodes: int
    """Slots requested on one NUMA node and allocated on another since the start, even if they were returned at once."""

    def __init__(self, pool_bytes: int, region_bytes: int | None = None, nodes: Sequence[Locality] = ()) -> None:
        if pool_bytes < MIN_SLOT_BYTES:
            raise BadGeometry(f"A pool of {pool_bytes} bytes holds no slot; it needs at least {MIN_SLOT_BYTES} bytes.")
        if region_bytes is None:
            region_bytes = default_region_bytes(pool_bytes)
        if region_bytes % PAGE_BYTES or not MIN_SLOT_BYTES <= region_bytes <= pool_bytes:
            raise BadGeometry(
                f"Regions of {region_bytes} bytes do not fit a pool of {pool_bytes} bytes; they must be a multiple of "
                f"{PAGE_BYTES}, at least {MIN_SLOT_BYTES} and at most the pool."
            )
        self.pool_bytes, self.region_bytes, self.free_bytes = pool_bytes, region_bytes, pool_bytes
        self.slots_per_region, self.regions = region_bytes // MIN_SLOT_BYTES, -(-pool_bytes // region_bytes)
        self.segments = cut_pool(pool_bytes, region_bytes, nodes)
        self.slot_bytes = np.zeros(self.regions, np.int64)
        """[regions] bytes of the region's slots; 0 if the region is free."""
        self.in_use = np.zeros(self.regions * self.slots_per_region, np.bool_)
        """[slots] whether the slot is allocated."""
        self._node = np.full(self.regions, NO_NODE, np.int32)
        """[regions] NUMA node."""
        for begin, end, near in self.segments:
            if near.node is not None:
                self._node[begin // region_bytes : -(-end // region_bytes)] = near.node
        self._stack = np.zeros(self.regions * self.slots_per_region, np.uint32)
        """[slots] each region's stack of free slot numbers, from its first slot; the top is allocated next."""
        self._free = np.zeros(self.regions, np.uint32)
        """[regions] length of the region's stack."""
        self._native, self.address = native(), ctypes.addressof(self)  # type: ignore[arg-type]
        self.at_slot_bytes, self.at_in_use, self.at_stack, self.at_free, self.at_node = (
            one.ctypes.data for one in (self.slot_bytes, self.in_use, self._stack, self._free, self._node)
        )

    def save_sizes_in(self, sizes: npt.NDArray[np.uint64]) -> None:
        """Save each region's slot size in ``sizes`` [regions] from now on, for the next daemon."""
        self._saved, self.at_saved = sizes, sizes.ctypes.data  # keeps the array, of which C has the address

    @property
    def used_bytes(self) -> int:
        return self.pool_bytes - self.free_bytes

    @property
    def used_slots(self) -> int:
        """Number of allocated slots, by what each region has: no slot is looked at."""
        used = np.flatnonzero(self.slot_bytes)
        begin = used * self.region_bytes
        fitting = (np.minimum(begin + self.region_bytes, self.pool_bytes) - begin) // self.slot_bytes[used]
        return int(fitting.sum()) - int(self._free[used].sum())

    @property
    def used_end(self) -> int:
        """The number behind the last allocated slot; 0 if there is none."""
        if not (used := np.flatnonzero(self.slot_bytes)).size:
            return 0
        first = int(used[-1]) * self.slots_per_region
        return first + int(np.flatnonzero(self.in_use[first : first + self.slots_per_region])[-1]) + 1

    def slot_size(self, nbytes: int) -> int:
        """Return the size of the slot that holds ``nbytes``: whole pages, at least ``MIN_SLOT_BYTES``.

        Raises BadGeometry if no region can hold it.
        """
        size = max(MIN_SLOT_BYTES, page_up(nbytes))
        if size > self.region_bytes:
            larger = f"set pool_size to {exact_size(pool_bytes_for(size))} or more, or "
            shard, region = format_size(nbytes), format_size(self.region_bytes)
            raise BadGeometry(
                f"A shard of {shard} is larger than the pool's regions, {region}: "
                f"{larger if size <= _MAX_REGION_BYTES else ''}make blocks smaller."
            )
        return size

    def take(self, slot_bytes: int, count: int, node: int | None = None) -> SlotIds:
        """Allocate up to ``count`` slots of a size, preferably on NUMA node ``node``.

        The fullest regions of the size come first, so that others become entirely free.
        """
        taken = np.empty(count, np.uint32)
        number, stride = NO_NODE if node is None else node, 1  # one slot behind the other in ``taken``
        return taken[: self._native.slots_take(self.address, slot_bytes, count, number, taken.ctypes.data, stride)]

    def slots_in(self, region: int, slot_bytes: int) -> int:
        """Return how many slots of a size fit the region."""
        begin = region * self.region_bytes
        return (min(begin + self.region_bytes, self.pool_bytes) - begin) // slot_bytes

    def free(self, slots: SlotIds) -> None:
        """Free slots. Raises ValueError, and frees none, if one is not allocated or occurs twice."""
        assert slots.dtype == np.uint32
        if self._native.slots_free(self.address, slots.tobytes(), len(slots)):
            raise ValueError("A slot to free is not allocated, or is freed twice.")

    def restore(self, slots: SlotIds, slot_bytes: npt.NDArray[np.int64]) -> None:
        """Allocate the slots that an earlier daemon used. For a new allocator. ``slot_bytes``: [regions]."""
        self.in_use[slots] = True
        in_use = self.in_use.reshape(self.regions, self.slots_per_region)
        assert np.count_nonzero(in_use) == len(slots), "a slot occurs twice"
        for region in np.flatnonzero(in_use.any(axis=1)).tolist():
            size, first = int(slot_bytes[region]), region * self.slots_per_region
            count = self.slots_in(region, size)
            assert not in_use[region, count:].any(), "a slot lies outside its region"
            free = np.flatnonzero(~in_use[region, :count])[::-1] + first
            self.slot_bytes[region], self._free[region] = size, len(free)
            self._stack[first : first + len(free)] = free
            self.free_bytes -= size * (count - len(free))

    def offsets(self, slots: SlotIds) -> npt.NDArray[np.int64]:
        """Return the pool offset in bytes of each slot; the slots must be allocated."""
        regions, index = np.divmod(slots.astype(np.int64), self.slots_per_region)
        offsets: npt.NDArray[np.int64] = regions * self.region_bytes + index * self.slot_bytes[regions]
        return offsets
