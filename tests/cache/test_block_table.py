"""The table of blocks against dicts: the index, pins, rings, and why keys are not there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvoffd.cache.block_table import DROPPED, FREE, NO_BLOCK, NOT_FIRST, READY, WRITING, BlockTable
from kvoffd.pool.slot_table import RECORD

SLOTS = 5000
BLOCK_BYTES = 1 << 20
GROUPS = {1: (8, 1), 2: (32, 3), 7: (20, 2), 70_000: (64, 1)}
"""By number: bytes of a key, and ranks."""


def key_of(number: int, key_bytes: int) -> bytes:
    return number.to_bytes(8, "big").rjust(key_bytes, b"k")


def ids(blocks: list[int]) -> np.ndarray:
    return np.array(blocks, np.uint32)


class Known(NamedTuple):
    group: int
    key: bytes
    slots: list[int]


class TableMachine(RuleBasedStateMachine):
    """Blocks come, are pinned, dropped and released; the model is what is known of each."""

    @initialize()
    def start(self) -> None:
        self.records = np.zeros(SLOTS, RECORD)
        self.table = BlockTable(self.records)
        self.unused = list(range(SLOTS))
        self.known: dict[tuple[int, bytes], Known] = {}
        self.dropped: dict[int, Known] = {}
        self.pins: dict[int, int] = {}

    @rule(group=st.sampled_from(sorted(GROUPS)), numbers=st.sets(st.integers(0, 400), min_size=1, max_size=120))
    def add(self, group: int, numbers: set[int]) -> None:
        key_bytes, ranks = GROUPS[group]
        keys = [key for number in sorted(numbers) if (group, key := key_of(number, key_bytes)) not in self.known]
        if not keys or len(self.unused) < len(keys) * ranks:
            return
        slots = ids([self.unused.pop() for _ in range(len(keys) * ranks)]).reshape(len(keys), ranks)
        for key, row in zip(keys, slots, strict=True):
            self.known[group, key] = Known(group, key, row.tolist())
        blocks = self.table.enter(slots, group, b"".join(keys), key_bytes, 5, 0, BLOCK_BYTES)
        assert blocks.tolist() == slots[:, 0].tolist()
        with pytest.raises(AssertionError, match="is there"):  # twice
            self.table.enter(slots[:1], group, keys[0], key_bytes, 5, 0, BLOCK_BYTES)
        for rank in range(ranks):
            ready = self.table.publish(blocks, slots[:, rank], [0] * len(keys), 8192, [7] * len(keys))
            assert ready.tolist() == (blocks[::-1].tolist() if rank == ranks - 1 else [])

    @rule(data=st.data(), times=st.integers(1, 3))
    def pin(self, data: st.DataObject, times: int) -> None:
        if not self.known:
            return
        some = data.draw(st.lists(st.sampled_from(sorted(self.known)), max_size=20)) * times
        blocks = [self.known[one].slots[0] for one in some]
        fresh = {block for block in blocks if not self.pins.get(block)}
        sizes = len(blocks) * BLOCK_BYTES, len(fresh) * BLOCK_BYTES
        assert self.table.pin(ids(blocks)) == (*sizes, len(fresh))
        for block in blocks:
            self.pins[block] = self.pins.get(block, 0) + 1

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        every = [block for block, count in self.pins.items() for _ in range(count)]
        if not every:
            return
        chosen = data.draw(st.lists(st.integers(0, len(every) - 1), unique=True, max_size=20))
        blocks = [every[number] for number in chosen]
        for block in blocks:
            self.pins[block] -= 1
        loose = {block for block in blocks if not self.pins[block]}
        found, nbytes = self.table.unpin(ids(blocks))
        assert (set(found.tolist()), nbytes) == (loose, len(loose) * BLOCK_BYTES)

    @rule(data=st.data(), count=st.integers(1, 200))
    def drop(self, data: st.DataObject, count: int) -> None:
        by_group: dict[int, list[Known]] = {}
        for one in sorted(self.known)[:count] if data.draw(st.booleans()) else sorted(self.known)[-count:]:
            by_group.setdefault(one[0], []).append(self.known.pop(one))
        for gone in by_group.values():
            self.table.drop(ids([one.slots[0] for one in gone]))
            with pytest.raises(AssertionError, match="not in the index"):
                self.table.drop(ids([gone[0].slots[0]]))
            assert not self.records["state"][[slot for one in gone for slot in one.slots]].any()
            self.dropped.update({one.slots[0]: one for one in gone})

    @rule()
    def release(self) -> None:
        for block, one in list(self.dropped.items()):
            slots, unverified, corrupt = self.table.release(ids([block]), len(one.slots))
            assert not unverified + corrupt
            if self.pins.get(block):
                assert not slots.size
                continue
            assert slots.tolist() == one.slots
            self.unused = [*one.slots, *self.unused]
            del self.dropped[block]

    @invariant()
    def every_key_is_found_and_no_other(self) -> None:
        for group, (key_bytes, ranks) in GROUPS.items():
            keys = [key_of(number, key_bytes) for number in range(0, 500, 7)]
            states, blocks = self.table.find(group, b"".join(keys), key_bytes)
            there = [self.known.get((group, key)) for key in keys]
            assert blocks.tolist() == [one.slots[0] if one else NO_BLOCK for one in there]
            assert states == bytes([READY if one else FREE for one in there])
            found = [one for one in there if one]
            heads = ids([one.slots[0] for one in found])
            assert self.table.slots(heads, ranks).tolist() == [one.slots for one in found]
            for rank in range(ranks):
                assert self.table.slots_of_rank(heads, rank).tolist() == [one.slots[rank] for one in found]
            assert self.table.keys(heads, key_bytes) == b"".join(one.key for one in found)

    @invariant()
    def each_slot_has_the_state_of_its_block(self) -> None:
        heads = {one.slots[0] for one in self.known.values()}
        others = {slot for one in [*self.known.values(), *self.dropped.values()] for slot in one.slots[1:]}
        for state, slots in ((READY, heads), (NOT_FIRST, others), (DROPPED, set(self.dropped)), (WRITING, set())):
            assert set(np.flatnonzero(self.table.state == state).tolist()) == slots


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_a_miss_is_told_with_the_reason_that_was_noted_last() -> None:
    table = BlockTable(np.zeros(10, RECORD))
    keys = [key_of(number, 32) for number in range(100)]
    table.note_misses(3, b"".join(keys[:40]), 32, 5)
    table.note_misses(3, b"".join(keys[30:50]), 32, 15)
    states = bytes([FREE] * 90 + [READY] * 10)
    assert table.count_misses(3, b"".join(keys), 32, states) == [40, 0, 0, 0, 0, 30, *[0] * 9, 20]
    assert table.count_misses(4, b"".join(keys), 32, states)[0] == 90  # another group's keys


def test_a_million_blocks_are_found_fast_and_take_little() -> None:
    count = 1_000_000
    records = np.zeros(count, RECORD)
    table = BlockTable(records)
    names = np.arange(count, dtype=np.uint64).tobytes()
    table.enter(np.arange(count, dtype=np.uint32).reshape(count, 1), 1, names, 8, 5, 0, 8192)
    keys = records["key"][::7, :8].tobytes()
    _, blocks = table.find(1, keys, 8)
    assert (blocks == np.arange(0, count, 7)).all()
    assert table.nbytes / count <= 60
