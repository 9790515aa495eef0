"""What the cache tells tiers and successors, and the bounds of leases and requests."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from kvoffd.cache.block_table import FREE as A
from kvoffd.cache.block_table import READY as R
from kvoffd.cache.block_table import BlockIds
from kvoffd.cache.hooks import TierHooks
from kvoffd.cache.namespace import MissReason, Namespace, NamespaceSnapshot
from kvoffd_proto.admin import PageSpec, ShardSpec
from kvoffd_proto.messages import GroupSpec
from tests.kit.slot_cache import UNIT, CacheRig, check_invariants, keys_of


def rig_of(units: int = 16, region_units: int = 4, policy: str = "lru") -> CacheRig:
    return CacheRig(units, region_units, policy)


def saved(rig: CacheRig) -> NamespaceSnapshot:
    table = rig.table
    table._snapshot = 0  # as a successor reads it
    snapshot: NamespaceSnapshot = table.load_namespaces(NamespaceSnapshot)
    return snapshot


def test_what_there_is_no_room_for_is_left_out_of_what_a_successor_is_told(caplog: pytest.LogCaptureFixture) -> None:
    rig = rig_of()
    room = rig.geometry.namespace_bytes // 2
    noise = np.random.default_rng(1).integers(33, 126, 4 * room).astype(np.uint8).tobytes().decode()
    shards = [ShardSpec(1, [PageSpec(UNIT)])]
    for name, description in (("short", "{}"), ("long", noise)):
        namespace, _ = rig.cache.open_namespace(
            Namespace(name.encode().ljust(32), name, 1, 8, [GroupSpec("full", 16)], description)
        )
        rig.cache.register_rank(namespace, 0, [UNIT], None, shards)
    assert namespace.shards(0) == tuple(shards)
    assert [(one.label, one.description, one.shards) for one in saved(rig).namespaces] == [
        ("short", "{}", (None,)),
        ("long", "", (None,)),
    ]
    assert not caplog.records
    for number in range(2):
        label = noise[number : number + 4 * room]
        namespace, _ = rig.cache.open_namespace(
            Namespace(bytes([number]) * 32, label, 1, 8, [GroupSpec("full", 16)], "{}")
        )
        rig.cache.register_rank(namespace, 0, [UNIT], None)
    assert len(saved(rig).namespaces) == 2, "the last that there was room for"
    assert [record.message for record in caplog.records] == [
        "Some of the 3 namespaces will not outlive the daemon: they are too many."
    ]


def test_descriptions_of_shards_are_forgotten_where_they_take_too_much() -> None:
    rig = rig_of()
    namespace = rig.join("a")
    rig.cache.max_namespaces_bytes = rig.cache.namespaces_bytes
    rig.cache.register_rank(namespace, 0, [UNIT], None, [ShardSpec(1, [PageSpec(UNIT)])])
    assert namespace.shards(0) is None
    assert namespace.shard_bytes(0) == (UNIT,)


def test_a_namespace_that_is_forgotten_may_be_swept_later() -> None:
    rig = rig_of()
    namespace, other = rig.open("a"), rig.open("b")
    rig.put(namespace, keys_of(1, 2))
    assert rig.cache.reset(namespace) == 2
    rig.cache.forget_namespace(namespace)
    assert namespace.fingerprint not in rig.cache.namespaces
    check_invariants(rig.cache)
    assert rig.put(other, keys_of(*range(16))) == 0, "its slots are freed where they are wanted"
    check_invariants(rig.cache)


def test_slots_are_taken_on_the_node_of_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of()
    namespace = rig.join("a", world_size=2)
    asked: list[int | None] = []
    take = rig.slots.take
    monkeypatch.setattr(rig.slots, "take", lambda size, count, node: (asked.append(node), take(size, count, node))[1])
    for rank in (0, 1):
        rig.cache.register_rank(namespace, rank, [UNIT], 1 - rank)
    rig.put(namespace, keys_of(1))
    assert asked == [1, 0]


def test_beyond_the_first_half_each_session_leases_an_equal_part() -> None:
    rig = CacheRig(units=80, region_units=8, leased_share=0.5)
    namespace = rig.open("a")
    rig.put(namespace, keys_of(*range(80)))

    def leased(session: int, *numbers: int) -> int:
        return rig.cache.lookup(namespace, session, 100 * session + numbers[0], [(0, keys_of(*numbers))])[1]

    assert leased(1, *range(35)) == 35, "alone it may have all that leases may"
    assert leased(2, *range(40, 60)) == 20, "an equal part"
    assert leased(2, *range(35)) == 35, "what others hold takes nothing from anybody"
    assert leased(3, *range(60, 80)) == 13
    assert rig.cache.shortened_lookups == 1
    assert namespace.counters.misses[MissReason.LEASE_LIMIT] == 7
    rig.cache.end_session(2)
    rig.cache.release(1, [100])
    assert leased(1, *range(20)) == 20
    assert leased(2, *range(40, 80)) == 19, "of 27 that nothing pins 13, and of the others as many"
    assert leased(1, *range(20, 40)) == 0, "it has its part"
    check_invariants(rig.cache)


def test_a_session_leases_no_more_keys_than_it_may() -> None:
    rig = rig_of()
    rig.cache._max_leased_keys = 3
    namespace = rig.open("a")
    rig.put(namespace, keys_of(1, 2))
    assert rig.cache.lookup(namespace, 1, 5, [(0, keys_of(1, 2))])[1] == 2
    assert rig.cache.lookup(namespace, 1, 6, [(0, keys_of(1, 2))]) == ([bytes([R, A])], 1)
    assert rig.cache.lookup(namespace, 2, 7, [(0, keys_of(1, 2))])[1] == 2
    assert (rig.cache.leases_of(1).keys, rig.cache.leases_of(1).nbytes) == (3, 3 * UNIT)


def test_what_a_bench_asks_for_teaches_nothing_and_requests_are_told_once() -> None:
    rig = rig_of()
    told: list[list[bytes]] = []
    rig.cache.watchers.append(lambda chains: told.append([chain.keys for chain in chains]))
    namespace, bench = rig.open("a"), rig.open("bench 1")
    assert bench.of_bench
    for asked in (namespace, bench):
        rig.cache.lookup(asked, 1, 5, [(0, keys_of(1))])
        rig.cache.lookup(asked, 1, 5, [(0, keys_of(1))], again=True)
    assert told == [[keys_of(1)]], "when the next comes, or as soon as the reply is out"
    rig.cache.note_requests()
    rig.cache.note_requests()
    assert told == [[keys_of(1)]]
    for number in range(100):
        rig.cache.lookup(namespace, 1, 5, [(0, keys_of(number))])
    rig.cache.note_requests()
    assert told[1:] == [[keys_of(number)] for number in range(100)], "none is lost, however many come at once"


class Tiers:
    """Has some keys and counts on being told."""

    def __init__(self, *numbers: int) -> None:
        self.keys = {keys_of(number) for number in numbers}
        self.told: list[object] = []

    def forget_all(self, namespace: Namespace) -> int:
        count = len(self.keys)
        self.keys.clear()
        return count

    def forget(self, namespace: Namespace, group: int, keys: bytes, why: MissReason) -> None:
        self.told.append((namespace.split(group, keys), why))

    def stored(self, blocks: BlockIds) -> None:
        self.told.append(("stored", len(blocks)))

    def evicted(self, blocks: BlockIds) -> None:
        assert self.rig.cache.blocks.keys(blocks, 8), "they are still readable"
        self.told.append(("evicted", len(blocks)))

    rig: CacheRig


def test_a_reset_counts_what_pool_and_tiers_have() -> None:
    rig = rig_of()
    tiers = Tiers(2, 3, 4)
    namespace = rig.open("a")
    rig.put(namespace, keys_of(1, 2, 3))
    rig.cache.tiers = cast(TierHooks, tiers)
    assert rig.cache.reset(namespace, keep_tiers=True) == 3
    rig.put(namespace, keys_of(1, 2, 3))
    assert rig.cache.reset(namespace) == 6
    assert rig.cache.reset(namespace) == 0


def test_tiers_are_told_what_comes_and_goes() -> None:
    rig, tiers = rig_of(), Tiers()
    tiers.rig, rig.cache.tiers = rig, cast(TierHooks, tiers)
    namespace = rig.open("a")
    rig.put(namespace, keys_of(*range(16)), first_block=1)
    rig.put(namespace, keys_of(20))
    rig.put(namespace, keys_of(0))
    rig.cache.invalidate(namespace, [(0, keys_of(1, 99))])
    (check,) = rig.cache.checks(rig.blocks(namespace, keys_of(2)))
    rig.cache.check(check.slot, check.generation, 99)
    assert tiers.told == [
        ("stored", 16),
        ("evicted", 1),
        ("stored", 1),
        ([keys_of(0)], MissReason.PARTIAL),
        ("stored", 1),
        ([keys_of(1), keys_of(99)], MissReason.INVALIDATED),
        ([keys_of(2)], MissReason.CORRUPT),
    ]


def test_what_was_not_compared_is_found_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffd.cache.cache.SWEPT_AT_ONCE", 5)
    rig = rig_of()
    namespace = rig.open("a")
    rig.put(namespace, keys_of(*range(7)))
    rig.commit(rig.begin(namespace, 0, 0, keys_of(7, 8, 9)), checksum=0)
    rig.put(namespace, keys_of(10, 11))
    expected = set(rig.blocks(namespace, keys_of(7, 8, 9)).tolist())
    for _ in range(2):
        found: list[int] = []
        while len(found) < 3:
            found += rig.cache.next_unverified(2).tolist()
        assert set(found) == expected
    rig.cache.reset(namespace)
    while rig.cache.background():
        pass
    assert (rig.cache.unverified_slots, rig.cache.next_unverified(9).size) == (0, 0)


def test_listeners_hear_of_recovered_blocks_by_and_by_and_never_of_those_that_went(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvoffd.cache.cache.RECOVERED_AT_ONCE", 2)
    rig = rig_of()
    namespace, other = rig.open("a"), rig.open("b")
    rig.put(namespace, keys_of(1, 2, 3, 4, 5))
    rig.put(other, keys_of(1))
    blocks = np.concatenate([rig.blocks(namespace, keys_of(5, 4, 3, 2, 1)), rig.blocks(other, keys_of(1))])
    rig.cache.unannounced[blocks], rig.cache._unannounced = True, blocks  # as ``recovered`` leaves them
    rig.events.index.clear()
    rig.cache.invalidate(namespace, [(0, keys_of(2))])
    rig.put(namespace, keys_of(2))
    rig.cache.reset(other)
    assert rig.cache.announce_recovered()
    rig.cache.invalidate(namespace, [(0, keys_of(1))])
    while rig.cache.announce_recovered():
        pass
    assert rig.events.index == {(namespace.fingerprint, 0, keys_of(number)) for number in (2, 3, 4, 5)}
