"""Why keys were not there: each reason is counted, none twice, and all together are the misses."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from kvoffd.cache import misses as module
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.cache.pins import LeaseBounds
from kvoffd.cache.policies import make_policy
from kvoffd_proto.messages import GroupSpec
from tests.kit.cache_harness import SLOT_UNIT, CacheHarness, begin_store, keys_of


def missed(rig: CacheHarness, namespace: Namespace, *numbers: int, group: int = 0) -> dict[str, int]:
    """What one lookup of these keys adds to the misses."""
    rig.cache.count_misses()
    counters = namespace.counters
    before = counters.misses.copy()
    absent = counters.keys_asked - counters.keys_ready
    rig.cache.lookup(namespace, 0xFFFF, 77, [(group, keys_of(*numbers))])
    rig.cache.release(77, [0xFFFF])
    rig.cache.count_misses()
    found = counters.misses - before
    assert found.total() == counters.keys_asked - counters.keys_ready - absent
    return {reason.name.lower(): count for reason, count in found.items()}


def test_every_way_out_has_its_reason() -> None:
    rig = CacheHarness()
    namespace = rig.open(shard_bytes=(SLOT_UNIT, SLOT_UNIT))
    rig.put(namespace, keys_of(1, 2, 3))
    assert missed(rig, namespace, 1, 2, 3) == {}
    assert missed(rig, namespace, 1, 4, 5) == {"unknown": 2}
    for _ in rig.cache.invalidate(namespace, [(0, keys_of(1))]):
        pass
    begin_store(rig.cache, namespace, 0, 0, keys_of(6))
    block = namespace.index[0][keys_of(2)]
    rig.cache.blocks.quarantine(block, 0)
    assert missed(rig, namespace, 1, 2, 3, 4, 6) == {
        "invalidated": 1,
        "corrupt": 1,
        "unknown": 1,
        "partial": 1,
    }
    assert missed(rig, namespace, 1, 2, group=1) == {"unknown": 2}, "equal keys of two groups are different"
    rig.put(namespace, keys_of(1))
    assert missed(rig, namespace, 1) == {}


def test_what_was_evicted_and_what_found_no_room() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    slots = rig.cache.slots.pool_bytes // SLOT_UNIT
    rig.put(namespace, keys_of(*range(slots)))
    rig.put(namespace, keys_of(slots + 1))
    (evicted,) = (n for n in range(slots) if keys_of(n) not in namespace.index[0])
    assert missed(rig, namespace, evicted, slots + 1, slots + 2) == {"evicted": 1, "unknown": 1}
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(*range(slots + 2)))])
    ticket = begin_store(rig.cache, namespace, 0, 0, keys_of(slots + 3))
    assert ticket.dropped
    assert missed(rig, namespace, slots + 3) == {"no_space": 1}


def test_half_stored_blocks_and_limits_of_leases() -> None:
    rig = CacheHarness()
    bounds = LeaseBounds(2, 2**40)
    rig.cache = BlockCache(
        rig.slots, make_policy("lru", rig.slots.pool_bytes), rig.events, rig.clock, lease_bounds=bounds
    )
    namespace = rig.open(world_size=2)
    ticket = begin_store(rig.cache, namespace, 0, 0, keys_of(1))
    rig.cache.commit_store(ticket)
    assert missed(rig, namespace, 1) == {"partial": 1}
    rig.clock.now += 1000
    rig.cache.expire()
    assert missed(rig, namespace, 1) == {"partial": 1}
    other = rig.open("other")
    rig.put(other, keys_of(1, 2, 3))
    assert missed(rig, other, 1, 2, 3, 4) == {"lease_limit": 1, "unknown": 1}


def test_the_table_is_bounded_and_a_wrong_reason_is_hardly_ever_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENTRIES", 2**10)
    rig = CacheHarness()
    namespace = rig.open(key_bytes=32)
    keys = [n.to_bytes(32, "big") for n in range(200_000)]
    misses = module.Misses()
    misses.note(namespace, 0, keys[:100_000], MissReason.EVICTED)
    absent = bytes(100_000)
    misses.asked(namespace, [(0, b"".join(keys[100_000:]))], [absent], [absent])
    misses.count()
    assert namespace.counters.misses == {MissReason.UNKNOWN: 100_000}, "other keys fall on the same places"
    misses.asked(namespace, [(0, b"".join(keys[:100_000]))], [absent], [absent])
    misses.count()
    assert 0.9 * 2**10 < namespace.counters.misses[MissReason.EVICTED] <= 2**10, "one entry for each place"
    assert misses._entries.nbytes == 2**10 * np.dtype(np.uint64).itemsize


def test_a_forgotten_namespace_leaves_nothing() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    missed(rig, namespace, 1)
    states = weakref.ref(namespace.index[0])
    rig.cache.forget_namespace(namespace)
    del namespace
    assert states() is None


def test_a_lookup_before_the_first_worker_is_an_ordinary_miss() -> None:
    rig = CacheHarness(policy="gate")
    namespace, _ = rig.cache.open_namespace(b"a".ljust(32), "a", 1, 8, [GroupSpec("full", 16)], "{}")
    assert namespace.block_bytes(0) == 0
    assert missed(rig, namespace, 1, 2) == {"unknown": 2}
    rig.cache.touch(0xFFFF)


def test_what_the_policy_declined_is_told_apart() -> None:
    rig = CacheHarness(policy="gate")
    namespace = rig.open()
    assert missed(rig, namespace, 1, 2) == {"unknown": 2}
    rig.put(namespace, keys_of(1, 2))
    assert missed(rig, namespace, 1, 2, 3) == {"rejected": 2, "unknown": 1}
