"""The table of blocks against a dict, as it grows and empties; and why keys are not there."""

from __future__ import annotations

import os
import random
from array import array
from typing import Any

import numpy as np

from kvoffd.cache.block_table import FOUND, KNOWN_MISSES, BlockTable, StoreVerdict
from kvoffd.cache.namespace import Group, MissReason, Namespace
from kvoffd.cache.states import FREE, NO_BLOCK, READY
from kvoffd.pool.allocator import SlotAllocator
from kvoffd.pool.slot_table import RECORD
from kvoffd_proto.messages import GroupSpec

SHAPES = {1: (8, 1), 2: (32, 3), 70_000: (64, 1)}
"""By number: bytes of a key, and ranks."""


def group_of(number: int) -> Group:
    key_bytes, ranks = SHAPES[number]
    group = Group(number, Namespace(bytes(32), "a", ranks, key_bytes, [GroupSpec("full", 16)], "{}"), 0)
    group.set_sizes([8192] * ranks, [8192] * ranks)
    return group


def key_of(number: int, key_bytes: int) -> bytes:
    return number.to_bytes(8, "big").rjust(key_bytes, b"k")


def ids(blocks: list[int]) -> np.ndarray:
    return np.array(blocks, np.uint32)


def test_the_index_finds_what_a_dict_does() -> None:
    choose, slots = random.Random(3), SlotAllocator(60_000 * 8192)
    records = np.zeros(len(slots.in_use), RECORD)
    table, groups = BlockTable(records), {number: group_of(number) for number in SHAPES}
    known: dict[int, dict[bytes, list[int]]] = {group: {} for group in groups}
    for most in [5000] * 60 + [10] * 60:
        group = choose.choice(list(groups))
        (key_bytes, ranks), there = SHAPES[group], known[group]
        names = [key_of(number, key_bytes) for number in choose.sample(range(20_000), choose.randrange(1, 2000))]
        if len(there) < most:
            names = [name for name in names if name not in there]
            taken = table.make(slots, groups[group], b"".join(names), len(names))
            count = len(names)
            for rank in range(ranks):
                shards, offsets = table.begin_writes(slots, taken[:, 0], rank)
                assert (shards.tolist(), offsets.tolist()) == (taken[:, rank].tolist(), slots.offsets(shards).tolist())
                table.publish(groups[group], taken[:, 0], shards, None, array("Q", [7] * count))
            there.update(zip(names, taken.tolist(), strict=True))
        else:
            names_of = list(there)[: choose.randrange(1, 1 + len(there))]
            gone = [there.pop(name) for name in names_of]
            heads = ids([row[0] for row in gone])
            table.pin(heads[:1])
            names, ended = table.drop(groups[group], heads, 1)
            assert ended.slots.tolist() == [slot for row in gone[1:] for slot in row]
            assert names == b"".join(names_of)
            assert not records["state"][np.array(gone)].any()
            table.unpin(heads[:1])
            assert table.end_dropped(groups[group], heads[:1])[0].tolist() == gone[0]
            slots.free(ids([slot for row in gone for slot in row]))
        listed = table.oldest(groups[group], len(there) + 1)
        assert listed.tolist() == [slots[0] for slots in there.values()], "in the order in which they were stored"
        asked = [key_of(number, key_bytes) for number in range(0, 21_000, 7)]
        states, blocks = table.find(groups[group], b"".join(asked))
        assert blocks.tolist() == [there[name][0] if name in there else NO_BLOCK for name in asked]
        assert states == bytes([READY if name in there else FREE for name in asked])
        found = [name for name in asked if name in there]
        heads = blocks[blocks != NO_BLOCK]
        looked_up = table.lookup(groups[group], b"".join(asked), lease=True)
        assert (looked_up.states, looked_up.ready.tolist()) == (states, heads.tolist())
        assert table.leased_bytes == table.pinned_bytes == 8192 * ranks * len(heads)
        assert looked_up.ready_prefix == [name in there for name in [*asked, b""]].index(False)
        assert [reason == FOUND for reason in looked_up.reasons] == [name in there for name in asked]
        assert table.end_lease(heads).tolist() == heads.tolist()
        assert table.leased_bytes == table.pinned_bytes == 0
        assert table.keys(heads, key_bytes) == b"".join(found)
        assert table.slots(heads, ranks).tolist() == [there[name] for name in found]


def test_a_miss_is_reported_with_the_reason_that_was_noted_last() -> None:
    table = BlockTable(np.zeros(10, RECORD))
    group, keys = group_of(2), [key_of(number, 32) for number in range(100)]
    table.record_misses(group, b"".join(keys[:40]), 5)
    table.record_misses(group, b"".join(keys[30:50]), 15)
    assert table.miss_reasons(group, b"".join(keys[:50])) == bytes([5] * 30 + [15] * 20)
    never, forgotten = MissReason.UNKNOWN, MissReason.FORGOTTEN
    assert table.miss_reasons(group, b"".join(keys[50:])).count(never) >= 48, "a place may be another key's"
    assert table.lookup(group, b"".join(keys), lease=False).reasons == table.miss_reasons(group, b"".join(keys))
    assert table.miss_reasons(Group(4, group.namespace, 0), b"".join(keys)).count(never) >= 98, "another group's keys"
    table.record_misses(group, os.urandom(32 * 4 * KNOWN_MISSES), 5)
    assert table.miss_reasons(group, b"".join(keys[50:])).count(forgotten) >= 40, "nobody knows if they were stored"


def test_no_call_writes_beyond_its_buffers() -> None:
    """Each replaces buffers that are too small for its results: C does not look at their size."""
    count, group, slots = 100, group_of(2), SlotAllocator(1000 * 8192)
    keys, others = (b"".join(key_of(number + base, 32) for number in range(count)) for base in (0, 1000))
    table = BlockTable(np.zeros(len(slots.in_use), RECORD))

    def call(name: str, *given: object, **named: object) -> Any:
        table._grow(1)
        result = getattr(table, name)(*given, **named)
        assert len(table._numbers) >= count <= len(table._offsets), name
        return result

    assert set(call("judge", group, keys, 0, {})[0]) == {StoreVerdict.ABSENT}
    taken = call("make", slots, group, keys, count)
    for rank in range(3):
        shards, _ = call("begin_writes", slots, taken[:, 0], rank)
        ready, named = call("publish", group, taken[:, 0], shards, None, array("Q", [7] * count))
    blocks = ready[::-1]
    assert (blocks.tolist(), len(named)) == (taken[:, 0].tolist(), len(keys))
    assert call("find", group, keys)[1].tolist() == blocks.tolist()
    assert call("lookup", group, keys, lease=True).ready.tolist() == blocks.tolist()
    assert call("end_lease", blocks).tolist() == blocks.tolist()
    assert call("begin_load", slots, group, keys, 1, 0).slots.tolist() == taken[:, 1].tolist()
    assert call("unpin", blocks).tolist() == blocks.tolist()
    assert call("keys", blocks, 32) == keys
    assert call("oldest", group, count).tolist() == call("oldest_unpinned", group, count).tolist()
    unhinted, none = np.zeros(len(slots.in_use), np.uint32), ids([])
    victims, _ = call("choose_victims", slots, group, count, blocks, 2**64 - 1, unhinted, none, last=True)
    assert set(victims.tolist()) <= set(blocks.tolist())
    assert call("replace", group, blocks, others, 1)[1] == keys
    assert call("miss_reasons", group, keys) == bytes([1] * count)
    table.pin(blocks)
    assert call("drop", group, blocks)[0] == others
    table.unpin(blocks)
    assert len(call("end_dropped", group, blocks).slots) == 3 * count
