"""The real pool, with checks of who owns each slot and that its bytes are what its record says."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvoffd.pool.pool import Pool
from kvoffd.pool.table_format import read_geometry
from kvoffd.tiers.tier import OnDone, TierResult
from tests.kit.slot_table import SlotOwner, mark_ready, mark_writing, records_of
from tests.sim.clock import Broken
from tests.sim.content import Bytes, Content

PAGE = 4096


@dataclass
class Slot:
    """A slot in use."""

    offset: int
    size: int
    state: str = "taken"
    owner: SlotOwner | None = None
    first_block: int = 0
    transfers: int = 0
    """Unfinished transfers that use the slot."""
    revoked: bool = False
    """The slot is ready for those who hold it, but its record is no longer in the slot table."""


class WatchedPool:
    """Passes every call on to the real pool and checks it."""

    def __init__(self, inner: Pool, data: Bytes, contents: dict[bytes, Content]) -> None:
        self._inner = inner
        self.data = data
        self._contents = contents
        self.slots: dict[int, Slot] = {}
        self._slot_of_page: dict[int, Slot] = {}
        self.commits = 0
        self.before_write: Callable[[], None] = lambda: None
        """Called before each change of the pool's records."""
        table_fd = inner.memory_fds[1]
        for record in records_of(table_fd, read_geometry(table_fd), inner.recovered.slots):
            self._enter(Slot(record.offset, record.slot_bytes, "ready", SlotOwner(*record[2:7]), record.first_block))
            self.verify(SlotOwner(*record[2:7]), record.offset, record.first_block, record.length)

    def _enter(self, slot: Slot) -> None:
        for page in range(slot.offset // PAGE, (slot.offset + slot.size) // PAGE):
            if page in self._slot_of_page:
                raise Broken(f"a slot in use was handed out again at {slot.offset}")
            self._slot_of_page[page] = slot
        if slot.offset + slot.size > self.pool_bytes:
            raise Broken("a slot reaches beyond the pool")
        self.slots[slot.offset] = slot

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # what the cache asks of the pool besides is not watched

    @property
    def pool_bytes(self) -> int:
        return self._inner.pool_bytes

    @property
    def free_bytes(self) -> int:
        return self._inner.free_bytes

    def take(self, slot_bytes: int, count: int, node: int | None = None) -> list[int]:
        offsets = self._inner.take(slot_bytes, count)
        if len(offsets) > count:
            raise Broken("more slots than were asked for")
        for offset in offsets:
            self._enter(Slot(offset, slot_bytes))
        return offsets

    def revoke_record(self, offset: int) -> None:
        self.before_write()
        self._inner.revoke_record(offset)
        self.slots[offset].revoked = True

    def mark_all_writing(
        self,
        offsets: Sequence[int],
        fingerprint: bytes,
        group: int,
        keys: Sequence[bytes],
        rank: int,
        world_size: int,
    ) -> None:
        for offset, key in zip(offsets, keys, strict=True):
            self._mark_writing(offset, SlotOwner(fingerprint, group, key, rank, world_size))

    def mark_all_ready(
        self, offsets: Sequence[int], first_blocks: Sequence[int], length: int, checksums: Sequence[int]
    ) -> None:
        for offset, first_block, checksum in zip(offsets, first_blocks, checksums, strict=True):
            self._mark_ready(offset, first_block, length, checksum)

    def _mark_writing(self, offset: int, owner: SlotOwner) -> None:
        slot = self.slots[offset]
        if slot.transfers:
            raise Broken("a slot is written anew while a transfer uses it")
        self.before_write()
        mark_writing(self._inner, offset, *owner)
        slot.state, slot.owner, slot.revoked = "writing", SlotOwner(*owner), False

    def _mark_ready(self, offset: int, first_block: int, length: int, checksum: int) -> None:
        slot = self.slots[offset]
        if slot.state != "writing" or slot.owner is None:
            raise Broken("a slot became ready that nobody wrote")
        if slot.transfers:
            raise Broken("a slot became ready while its bytes still move")
        self.before_write()
        if length and [checksum] != self._inner.digests([(offset, length)]):
            raise Broken("a slot became ready with another checksum than its bytes have")
        mark_ready(self._inner, offset, first_block, length, checksum)
        slot.state, slot.first_block = "ready", first_block
        self.commits += 1
        self.verify(slot.owner, offset, first_block, length)

    def free(self, offsets: Collection[int]) -> None:
        for offset in offsets:
            slot = self.slots.pop(offset)
            if slot.transfers:
                raise Broken("a slot was let go while a transfer uses it")
            self.before_write()
            for page in range(offset // PAGE, (offset + slot.size) // PAGE):
                del self._slot_of_page[page]
            self._inner.free([offset])

    # --- for the tiers ---------------------------------------------------------------------------

    def lend(
        self, offsets: Sequence[int], state: str, who: str, begin: Callable[[OnDone], bool], on_done: OnDone
    ) -> bool:
        """Have a tier begin a read or write of slots in this state, which nobody may change until it ends."""

        def ended(result: TierResult) -> None:
            for slot in slots:
                slot.transfers -= 1
            on_done(result)

        slots = [self.slots[offset] for offset in offsets]
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
        ready = [slot for slot in self.slots.values() if slot.state == "ready"]
        for slot in ready:
            assert slot.owner is not None
            content = self._contents.get(slot.owner.fingerprint)
            if content is not None:
                length = content.shard_bytes(slot.owner.rank, slot.owner.group)
                self.verify(slot.owner, slot.offset, slot.first_block, length)
        return len(ready)


def as_bytes(address: int, size: int) -> Bytes:
    """The bytes at a real address as an array. The memory must stay mapped."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B"), dtype=np.uint8)
