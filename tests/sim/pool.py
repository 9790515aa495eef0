"""The real pool, with checks of who owns each slot and that its bytes are what its record says."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvoffd.cache.block_table import BlockIds, ChainStart, EndedSlots
from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Group, MissReason
from kvoffd.cache.states import CORRUPT, READY
from kvoffd.pool.allocator import SlotAllocator, SlotIds
from kvoffd.pool.pool import Pool
from tests.sim.clock import Broken
from tests.sim.content import Bytes, Content

PAGE = 4096


class BlockName(NamedTuple):
    """A block below the pool, of whatever generation."""

    fingerprint: bytes
    group: int
    key: bytes


class SlotOwner(NamedTuple):
    """The shard whose bytes a slot holds."""

    fingerprint: bytes
    group: int
    key: bytes
    rank: int
    world_size: int


@dataclass
class Slot:
    """A slot in use."""

    offset: int
    size: int
    state: str = "taken"
    """Then ``writing``, and ``ready``; ``bad`` where wrong bytes were found in it."""
    owner: SlotOwner | None = None
    first_block: int = 0
    transfers: int = 0
    """Unfinished transfers that use the slot."""


class WatchedPool:
    """Stands before the real pool: what changes its slots and their records is checked on its way there.

    Attributes:
        mapping: of the pool, as transfers see it.
    """

    def __init__(self, inner: Pool, data: Bytes, contents: dict[bytes, Content]) -> None:
        self._inner = inner
        self.data = data
        self.mapping: Any = None
        self._contents = contents
        self.used: dict[int, Slot] = {}
        """By offset."""
        self._slot_of_page: dict[int, Slot] = {}
        self.commits = 0
        self.before_write: Callable[[], None] = lambda: None
        """Called before each change of the pool's records."""
        self.before_drop: Callable[..., None] = lambda blocks, *, evicted: None
        """Called with blocks that are dropped, and whether they are evicted."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # what the daemon asks of the pool besides is not watched

    def watch(self, cache: Cache) -> None:
        """Stand before the parts of a cache, which has taken over what there was."""
        self._cache = cache
        slots, table, blocks = cache.slots, cache.table, cache.blocks
        self._free, self._make, self._publish = slots.free, blocks.make, blocks.publish
        self._drop, self._end_dropped, self._replace = blocks.drop, blocks.end_dropped, blocks.replace
        watched = *((blocks, name) for name in ("make", "publish", "drop", "end_dropped", "replace")), (slots, "free")
        for owner, name in watched:
            setattr(owner, name, lambda *given, _name=name: getattr(self, _name)(*given))
        for written, name in ((table, "save_namespaces"), (blocks, "set_checksum"), (blocks, "set_corrupt")):
            setattr(written, name, self._written(getattr(written, name)))
        for offset, owner, first_block, length in records_of(cache):
            slot = Slot(offset, _size_of(cache, offset), "ready", owner, first_block)
            self._enter(slot)
            self.verify(owner, offset, first_block, length)
        bad = np.flatnonzero(blocks.shard == CORRUPT).astype(np.uint32)
        for offset in slots.offsets(bad).tolist():
            self._enter(Slot(offset, _size_of(cache, offset), "bad"))

    def _written(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def written(*given: Any) -> Any:
            self.before_write()
            return inner(*given)

        return written

    def _enter(self, slot: Slot) -> None:
        for page in range(slot.offset // PAGE, (slot.offset + slot.size) // PAGE):
            if page in self._slot_of_page:
                raise Broken(f"a slot in use was handed out again at {slot.offset}")
            self._slot_of_page[page] = slot
        if slot.offset + slot.size > self.pool_bytes:
            raise Broken("a slot reaches beyond the pool")
        self.used[slot.offset] = slot

    def _at(self, slots: SlotIds) -> list[Slot]:
        return [self.used[offset] for offset in self._cache.slots.offsets(slots).tolist()]

    # --- in the place of the allocator's and the block table's methods ----------------------------

    def make(self, allocator: SlotAllocator, group: Group, keys: bytes, count: int) -> Any:
        self.before_write()
        slots = self._make(allocator, group, keys, count)
        if len(slots) > count:
            raise Broken("more blocks than were asked for")
        for size, column in zip(group.sizes, slots.T, strict=True):
            for offset in allocator.offsets(column).tolist():
                self._enter(Slot(offset, size))
        self._own(slots, group, keys)
        return slots

    def free(self, slots: SlotIds) -> None:
        for slot in self._at(slots):
            if slot.transfers:
                raise Broken("a slot was freed while a transfer uses it")
            del self.used[slot.offset]
            for page in range(slot.offset // PAGE, (slot.offset + slot.size) // PAGE):
                del self._slot_of_page[page]
        self._free(slots)

    def replace(self, group: Group, blocks: BlockIds, keys: bytes, reason: int) -> tuple[Any, bytes]:
        self.before_write()
        self.before_drop(blocks, evicted=True)
        slots, names = self._replace(group, blocks, keys, reason)
        self._released(slots.ravel())
        self._own(slots, group, keys)
        return slots, names

    def _own(self, slots: Any, group: Group, keys: bytes) -> None:
        """Slots have got the first of these keys."""
        space, world_size = group.namespace, len(group.sizes)
        for key, ranks in zip(space.split(group.index, keys), slots, strict=False):
            for rank, slot in enumerate(self._at(ranks)):
                if slot.transfers or slot.state != "taken":
                    raise Broken("a slot gets a block while a transfer uses it, or has one")
                slot.state, slot.owner = "writing", SlotOwner(space.fingerprint, group.index, key, rank, world_size)

    def publish(
        self,
        group: Group,
        blocks: BlockIds,
        slots: SlotIds,
        firsts: Sequence[int] | None,
        checksums: array[int],
        chains: Sequence[ChainStart],
    ) -> tuple[BlockIds, bytes]:
        """One after the other, so that the process can die between two."""
        ready, names = [np.empty(0, np.uint32)], b""
        before = {at: before for at, before in enumerate(blocks.tolist()[:-1], 1) if chains} | dict(chains)
        firsts = [0] * len(blocks) if firsts is None else firsts
        for at in reversed(range(len(blocks))):
            one = slice(at, at + 1)
            (slot,) = self._at(slots[one])
            if slot.state != "writing" or slot.owner is None:
                raise Broken("a slot became ready that nobody wrote")
            if slot.transfers:
                raise Broken("a slot became ready while its bytes still move")
            length = group.lengths[slot.owner.rank]
            if length and [int(checksums[at])] != self._inner.digests([(slot.offset, length)]):
                raise Broken("a slot became ready with another checksum than its bytes have")
            self.before_write()
            published = self._publish(
                *(group, blocks[one], slots[one], firsts[one], checksums[one]),
                [ChainStart(0, before[at])] if at in before else (),
            )
            ready.append(published[0])
            names += published[1]
            slot.state, slot.first_block = "ready", int(firsts[at])
            self.commits += 1
            self.verify(slot.owner, slot.offset, slot.first_block, length)
        return np.concatenate(ready), names

    def drop(self, group: Group, blocks: BlockIds, reason: int = 0) -> tuple[bytes, EndedSlots]:
        self.before_write()
        self.before_drop(blocks, evicted=reason in (MissReason.EVICTED, MissReason.QUOTA))
        names, ended = self._drop(group, blocks, reason)
        self._released(ended.slots)
        return names, ended

    def end_dropped(self, group: Group, blocks: BlockIds) -> EndedSlots:
        self.before_write()
        ended = self._end_dropped(group, blocks)
        self._released(ended.slots)
        return ended

    def _released(self, slots: SlotIds) -> None:
        for slot, shard in zip(self._at(slots), self._cache.blocks.shard[slots].tolist(), strict=True):
            if slot.transfers:
                raise Broken("a block lost its slots while a transfer uses them")
            slot.state = "bad" if shard & CORRUPT else "taken"

    # --- for the tiers ---------------------------------------------------------------------------

    def lend(
        self,
        offsets: Sequence[int],
        state: str,
        who: str,
        begin: Callable[[Callable[..., None]], bool],
        on_end: Callable[..., None],
    ) -> bool:
        """Have a tier begin a read or write of slots in this state, which nobody may change until it ends."""

        def ended(*how: Any) -> None:
            for slot in slots:
                slot.transfers -= 1
            on_end(*how)

        slots = [self.used[offset] for offset in offsets]
        if not begin(ended):
            return False
        for slot in slots:
            if slot.state != state:
                raise Broken(f"{who}, and its slot is not {state}")
            slot.transfers += 1
        return True

    # --- for the copies --------------------------------------------------------------------------

    def slots_at(self, offset: int, size: int) -> list[Slot]:
        """The slots in use that this range lies in: one, or several that touch and are full."""
        slots: list[Slot] = []
        end = offset + size
        while offset < end:
            slot = self._slot_of_page.get(offset // PAGE)
            if slot is None:
                raise Broken(f"a copy touches pool bytes {offset} to {end} that are no part of a slot")
            slots.append(slot)
            offset = slot.offset + slot.size
        return slots

    def verify(self, owner: SlotOwner, offset: int, first_block: int, length: int) -> None:
        """Raise Broken unless the shard there is what its record says."""
        content = self._contents.get(owner.fingerprint)
        if content is None:  # a hostile client's own
            return
        if length != content.shard_bytes(owner.rank, owner.group) or owner.world_size != content.world_size:
            raise Broken("a slot's record does not fit its namespace")
        found = self.data[offset : offset + length]
        wrong = content.wrong_at(owner.rank, owner.group, owner.key, found, first_block)
        if wrong is not None:
            raise Broken(
                f"rank {owner.rank} of key {owner.key.hex()[:8]} (group {owner.group}) is ready with a wrong byte "
                f"at {wrong} of {length}"
            )

    def verify_ready(self) -> int:
        """Check the bytes of every ready slot; returns how many there are."""
        ready = [slot for slot in self.used.values() if slot.state == "ready"]
        for slot in ready:
            content = self._contents.get(slot.owner.fingerprint)
            if content is not None:
                length = content.shard_bytes(slot.owner.rank, slot.owner.group)
                self.verify(slot.owner, slot.offset, slot.first_block, length)
        return len(ready)


def records_of(cache: Cache) -> list[tuple[int, SlotOwner, int, int]]:
    """Offset, owner, first block and length in bytes of each slot of the blocks that are READY in a cache."""
    found, heads = [], np.flatnonzero(cache.blocks.state == READY).astype(np.uint32)
    for group, alike in cache.blocks.by_group(heads):
        if group.retired:
            continue
        space, world_size = group.namespace, len(group.sizes)
        keys = space.split(group.index, cache.blocks.keys(alike, group.key_bytes))
        for key, slots in zip(keys, cache.blocks.slots(alike, world_size), strict=True):
            rows = cache.table.records[slots]
            for rank, offset in enumerate(cache.slots.offsets(slots).tolist()):
                owner = SlotOwner(space.fingerprint, group.index, key, rank, world_size)
                found.append((offset, owner, int(rows["first_block"][rank]), int(rows["length"][rank])))
    return found


def _size_of(cache: Cache, offset: int) -> int:
    return int(cache.slots.slot_bytes[offset // cache.slots.region_bytes])


def as_bytes(address: int, size: int) -> Bytes:
    """The bytes at a real address as an array. The memory must stay mapped."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B"), dtype=np.uint8)
