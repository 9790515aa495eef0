"""The allocator of slots by number: its books, what it hands out first, and how sizes share the pool."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvoffd.errors import BadGeometry
from kvoffd.pool.allocator import SlotAllocator
from kvoffd.system.numa import Locality
from kvoffd_proto.units import parse_size
from tests.kit.amount import TIMES

MIB = 1 << 20


def ids(*slots: int) -> np.ndarray:
    return np.array(slots, np.uint32)


class AllocatorMachine(RuleBasedStateMachine):
    """Takes and frees at random; the model is a dict of what is out, by slot: its offset and size."""

    @initialize(
        pages=st.integers(2, 300), region_pages=st.integers(2, 60), tail=st.integers(0, 4095), nodes=st.integers(0, 3)
    )
    def start(self, pages: int, region_pages: int, tail: int, nodes: int) -> None:
        self.pool_bytes, self.region_bytes = pages * 4096 + tail, min(region_pages, pages) * 4096
        self.localities = [Locality(node, frozenset()) for node in range(nodes)]
        self.slots = SlotAllocator(self.pool_bytes, self.region_bytes, self.localities)
        self.out: dict[int, tuple[int, int]] = {}

    def node_of(self, offset: int) -> int | None:
        return next((one.locality.node for one in self.slots.segments if one.begin <= offset < one.end), None)

    @rule(nbytes=st.integers(1, 40 * 4096), count=st.integers(0, 40), node=st.sampled_from([None, 0, 1, 2]))
    def take(self, nbytes: int, count: int, node: int | None) -> None:
        if nbytes > self.region_bytes:
            with pytest.raises(BadGeometry):
                self.slots.slot_size(nbytes)
            return
        size = self.slots.slot_size(nbytes)
        assert size >= max(nbytes, 8192)
        assert size % 4096 == 0
        before = self.slots.slots_on_other_nodes
        taken = self.slots.take(size, count, node)
        offsets = self.slots.offsets(taken).tolist()
        spilled = [offset for offset in offsets if self.node_of(offset) != node]
        known = any(one.locality.node == node for one in self.slots.segments)
        assert self.slots.slots_on_other_nodes - before == (len(spilled) if known else 0)
        assert len(taken) <= count
        for slot, offset in zip(taken.tolist(), offsets, strict=True):
            assert slot not in self.out
            self.out[slot] = offset, size
        if len(taken) < count:
            self.nothing_fits(size, None)
        if known and spilled:
            self.nothing_fits(size, node)

    def nothing_fits(self, size: int, node: int | None) -> None:
        """Every region, of the node if one is given, is full of this size, of another size, or too short."""
        for base in range(0, self.pool_bytes, self.region_bytes):
            if node is not None and self.node_of(base) != node:
                continue
            nbytes = min(self.region_bytes, self.pool_bytes - base)
            inside = [each for offset, each in self.out.values() if base <= offset < base + nbytes]
            if not inside:
                assert nbytes < size
            elif set(inside) == {size}:
                assert len(inside) == nbytes // size

    @rule(data=st.data(), count=st.integers(1, 12))
    def free(self, data: st.DataObject, count: int) -> None:
        if not self.out:
            return
        slots = data.draw(st.lists(st.sampled_from(sorted(self.out)), min_size=1, max_size=count, unique=True))
        with pytest.raises(ValueError, match="freed twice"):
            self.slots.free(ids(*slots, slots[0]))
        self.slots.free(ids(*slots))
        for slot in slots:
            del self.out[slot]
            with pytest.raises(ValueError, match="not allocated"):
                self.slots.free(ids(*self.out, slot))

    @rule()
    def free_all(self) -> None:
        self.slots.free(ids(*self.out))
        self.out.clear()
        full = self.pool_bytes // self.region_bytes  # every region is free again, so the largest slot fits each
        taken = self.slots.take(self.slots.slot_size(self.region_bytes), full + 1)
        assert len(taken) == full
        self.slots.free(taken)

    @rule()
    def restart(self) -> None:
        """A successor that knows the slots in use goes on as this one would."""
        successor = SlotAllocator(self.pool_bytes, self.region_bytes, self.localities)
        successor.restore(ids(*self.out), self.slots.slot_bytes.copy())
        self.slots = successor

    @invariant()
    def slots_never_overlap_and_stay_in_their_region(self) -> None:
        end = 0
        for offset, size in sorted(self.out.values()):
            assert offset >= end
            end = offset + size
            assert offset // self.region_bytes == (end - 1) // self.region_bytes
        assert end <= self.pool_bytes

    @invariant()
    def a_region_has_one_slot_size(self) -> None:
        for slot, (offset, size) in self.out.items():
            region = offset // self.region_bytes
            assert self.slots.slot_bytes[region] == size
            assert slot // self.slots.slots_per_region == region

    @invariant()
    def free_and_used_are_the_pool(self) -> None:
        assert self.slots.used_bytes == sum(size for _, size in self.out.values())
        assert self.slots.free_bytes + self.slots.used_bytes == self.pool_bytes
        assert set(np.flatnonzero(self.slots.in_use).tolist()) == set(self.out)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=10 * TIMES**2, stateful_step_count=30)


def test_the_fullest_region_gives_first() -> None:
    slots = SlotAllocator(12 * MIB, MIB)
    first, second = slots.take(65536, 16), slots.take(65536, 16)
    slots.free(np.concatenate([first[:2], second[:15]]))
    assert set(slots.take(65536, 2).tolist()) == set(first[:2].tolist())
    slots.free(second[15:])
    assert slots.slot_bytes[1] == 0


@given(
    free=st.lists(st.integers(0, 16), min_size=2, max_size=12).filter(lambda free: len(free) % 2 == 0),
    count=st.integers(0, 120),
)
def test_slots_are_those_of_the_fullest_regions_of_the_node_then_of_others(free: list[int], count: int) -> None:
    """As one slot after the other would be taken, however many are."""
    slots = SlotAllocator(len(free) * MIB, MIB, [Locality(node, frozenset()) for node in range(2)])
    taken = slots.take(65536, 16 * len(free), 0)
    left = dict(enumerate(free))
    for region, spare in left.items():
        slots.free(taken[taken // slots.slots_per_region == region][:spare])
    left = {region: spare or 16 * (slots.slot_bytes[region] == 0) for region, spare in left.items()}
    expected = []
    for _ in range(min(count, sum(left.values()))):
        # By node, then a region in use before a free one, then the fullest, then the first.
        region = min(
            (one for one in left if left[one]),
            key=lambda one: (2 * one >= len(free), slots.slot_bytes[one] == 0, left[one] % 16 or left[one], one),
        )
        expected.append(region)
        left[region] -= 1
    found = slots.take(65536, count, 0) // slots.slots_per_region
    assert found.tolist() == expected


def test_pools_and_regions_that_fit_nothing_are_refused() -> None:
    for pool_bytes, region_bytes in ((4096, None), (MIB, 4097), (MIB, 4096), (MIB, 2 * MIB)):
        with pytest.raises(BadGeometry):
            SlotAllocator(pool_bytes, region_bytes)
    with pytest.raises(BadGeometry, match="set pool_size to 12MiB or more"):
        SlotAllocator(4 * MIB).slot_size(MIB)


@given(
    pool_mib=st.one_of(st.integers(12, 512), st.sampled_from([1 << 10, 3000, 16 << 10, 1 << 20])),
    shares=st.lists(st.integers(1, 256), min_size=1, max_size=6, unique=True),
    data=st.data(),
)
@settings(max_examples=25 * TIMES**2)
@pytest.mark.nightly
def test_hardly_anything_is_free_at_the_first_eviction(pool_mib: int, shares: list[int], data: st.DataObject) -> None:
    """Of ``n`` slot sizes, ``n - 1`` leave a region free, and the pool's last region may be too short for any."""
    slots = SlotAllocator(pool_mib * MIB)
    sizes = [slots.slot_size(slots.region_bytes // share) for share in shares]
    lacking = 0
    while not lacking:
        size = data.draw(st.sampled_from(sizes))
        count = data.draw(st.sampled_from([1, 3 * slots.region_bytes // size, slots.pool_bytes // size // 4]))
        lacking = count - len(slots.take(size, count))
    behind_slots = max(slots.region_bytes % size for size in sizes)  # a slot of more than half a region wastes the rest
    regions = slots.pool_bytes // slots.region_bytes
    assert slots.free_bytes <= len(sizes) * slots.region_bytes + regions * behind_slots


@pytest.mark.parametrize("slot_bytes", [8192, 12288, MIB, MIB + 4096, 4 * MIB, 4 * MIB + 4096, 256 * MIB])
def test_a_shard_too_large_says_how_large_a_pool_it_needs(slot_bytes: int) -> None:
    with pytest.raises(BadGeometry) as refused:
        SlotAllocator(8192).slot_size(max(slot_bytes, 12288))
    enough = re.search(r"pool_size to (\w+) or more", str(refused.value))[1]  # type: ignore[index]
    assert SlotAllocator(parse_size(enough)).slot_size(slot_bytes) == slot_bytes


def test_regions_are_a_64th_of_the_pool_within_bounds() -> None:
    assert SlotAllocator(48 * MIB).region_bytes == 4 * MIB
    assert SlotAllocator(12 * MIB).region_bytes == MIB
    assert SlotAllocator(64 << 30).region_bytes == 256 * MIB
    assert SlotAllocator(8 << 30).region_bytes == 128 * MIB
    assert SlotAllocator(64 * MIB).region_bytes == 4 * MIB
    assert SlotAllocator(10_000).region_bytes == 8192
    assert SlotAllocator(1_000_000_000).region_bytes % 4096 == 0
