"""What follows when a slot's bytes are, or are not, those that were stored."""

from __future__ import annotations

import pytest

from kvoffd.cache.integrity import ChecksumCheck
from kvoffd.cache.namespace import Namespace
from kvoffd.cache.policies import make_policy
from kvoffd.errors import NotReady
from kvoffd.server.scrubber import Scrubber
from tests.kit.cache_harness import (
    SLOT_UNIT,
    CacheHarness,
    Clock,
    FoldedEvents,
    adopt_all,
    begin_store,
    keys_of,
    made,
)
from tests.kit.invariants import check_invariants


def store(rig: CacheHarness, namespace: Namespace, keys: bytes) -> None:
    """All ranks' shards, with checksums as the copy thread takes them."""
    for rank in range(namespace.world_size):
        ticket = begin_store(rig.cache, namespace, rank, 0, keys)
        ticket.checksums = rig.slots.digests([(offset, SLOT_UNIT) for offset in ticket.offsets])
        rig.cache.commit_store(ticket)


def looks(rig: CacheHarness) -> dict[tuple[bytes, int], ChecksumCheck]:
    """What a scrub would read, by key and rank."""
    found = rig.cache.integrity.checks_at(rig.cache.integrity.slots())
    return {(look.block.key, look.rank): look for look in found}


def heir_of(rig: CacheHarness) -> CacheHarness:
    """A cache that took over what this one left."""
    heir = CacheHarness()
    records = rig.slots.ready_records()
    heir.slots, heir.events = rig.slots.successor(records), FoldedEvents()
    heir.cache = BlockCache(heir.slots, make_policy("lru", heir.slots.pool_bytes), heir.events, Clock())
    adopt_all(heir.cache, heir.slots)
    return heir


def test_right_bytes_change_nothing_but_the_count() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    store(rig, namespace, keys_of(1, 2))
    for look in looks(rig).values():
        assert [look.checksum] == rig.slots.digests([(look.offset, look.length)])
        assert rig.cache.integrity.apply(look, look.checksum)
    assert rig.states(namespace, keys_of(1, 2)) == [2, 2]
    integrity = rig.cache.integrity
    assert (integrity.checked_slots, integrity.checked_bytes, integrity.mismatches) == (2, 2 * SLOT_UNIT, 0)
    check_invariants(rig.cache)


def test_wrong_bytes_drop_the_block_with_an_event_and_quarantine_their_slot_only() -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2)
    store(rig, namespace, keys_of(1, 2))
    look = looks(rig)[keys_of(1), 1]
    assert not rig.cache.integrity.apply(look, look.checksum + 1)
    check_invariants(rig.cache)
    assert rig.states(namespace, keys_of(1, 2)) == [0, 2]
    assert rig.events.log[-1] == ("removed", 0, [keys_of(1)])
    usage = rig.cache.pool_usage()
    assert (usage.quarantined_bytes, usage.ready_bytes, usage.leaving_bytes) == (SLOT_UNIT, 2 * SLOT_UNIT, 0)
    assert rig.cache.integrity.mismatches == rig.cache.integrity.quarantined_slots == 1
    assert look.offset not in {record.offset for record in rig.slots.ready_records()}


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_quarantined_slot_is_never_handed_out_again(policy: str) -> None:
    rig = CacheHarness(regions=3, policy=policy)
    small, large = rig.open("small"), rig.open("large", shard_bytes=(2 * SLOT_UNIT,))
    store(rig, small, keys_of(*range(12)))
    bad = looks(rig)[keys_of(5), 0]
    rig.cache.integrity.apply(bad, 0)
    for number in range(100, 160):
        rig.put(large if number % 3 else small, keys_of(number))
        check_invariants(rig.cache)
    made(rig.cache.clear_all())
    usage = rig.cache.pool_usage()
    assert usage.free_bytes == rig.slots.pool_bytes - SLOT_UNIT
    assert usage.quarantined_bytes == SLOT_UNIT
    taken = rig.slots.take(SLOT_UNIT, 1000)
    assert bad.offset not in taken
    assert len(taken) == 11


def test_a_key_can_be_stored_anew_after_its_slot_was_lost() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    store(rig, namespace, keys_of(1))
    rig.cache.integrity.apply(looks(rig)[keys_of(1), 0], 0)
    store(rig, namespace, keys_of(1))
    assert rig.states(namespace, keys_of(1)) == [2]
    check_invariants(rig.cache)


def test_nobody_loads_what_was_found_wrong_under_a_lease_he_has() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    store(rig, namespace, keys_of(1, 2))
    rig.cache.lookup(namespace, 1, 1, [(0, keys_of(1, 2))])
    rig.cache.integrity.apply(looks(rig)[keys_of(2), 0], 0)
    check_invariants(rig.cache)
    assert rig.cache.pool_usage().leaving_bytes == SLOT_UNIT
    with pytest.raises(NotReady) as refusal:
        rig.cache.begin_load(namespace, 0, 1, 0, keys_of(1, 2))
    assert refusal.value.missing == [1]
    rig.cache.release(1, [1])
    check_invariants(rig.cache)
    assert rig.cache.pool_usage().quarantined_bytes == SLOT_UNIT


def test_a_slot_that_was_given_to_others_meanwhile_is_not_judged() -> None:
    rig = CacheHarness(regions=1)
    namespace = rig.open()
    store(rig, namespace, keys_of(1, 2, 3, 4))
    old = looks(rig)[keys_of(1), 0]
    store(rig, namespace, keys_of(5, 6, 7, 8))
    assert rig.cache.integrity.apply(old, 0)
    assert rig.states(namespace, keys_of(5, 6, 7, 8)) == [2, 2, 2, 2]
    assert rig.cache.integrity.checked_slots == rig.cache.integrity.mismatches == 0


def test_a_shard_that_is_being_written_anew_is_not_judged() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1), first_block=2)
    old = looks_unchecked(rig)
    ticket = begin_store(rig.cache, namespace, 0, 0, keys_of(1))
    assert ticket.copy == [0]
    assert rig.cache.integrity.apply(old, old.checksum + 1)
    ticket.checksums = [77]
    rig.cache.commit_store(ticket)
    assert rig.cache.integrity.apply(old, old.checksum + 1)
    assert rig.states(namespace, keys_of(1)) == [2]


def looks_unchecked(rig: CacheHarness) -> ChecksumCheck:
    """A look at the only shard, which has no checksum."""
    ((_, block),) = rig.cache.namespaces[0].index[0].items()
    shard = block.shards[0]
    return ChecksumCheck(block, 0, shard.offset, SLOT_UNIT, shard.checksum)


def test_adopted_slots_are_looked_at_before_a_load_and_only_until_then() -> None:
    rig = CacheHarness()
    store(rig, rig.open(), keys_of(1, 2))
    heir = heir_of(rig)
    (namespace,) = heir.cache.namespaces
    integrity = heir.cache.integrity
    assert integrity.unverified_slots == 2
    heir.cache.lookup(namespace, 1, 1, [(0, keys_of(1, 2))])
    for expected in (1, 0):
        ticket = heir.cache.begin_load(namespace, 0, 1, 0, keys_of(1))
        wanted = integrity.checks_of_load(ticket, every=False)
        assert len(wanted) == expected
        assert len(integrity.checks_of_load(ticket, every=True)) == 1
        for look in wanted:
            heir.cache.integrity.apply(look, look.checksum)
        heir.cache.end_load([ticket], ok=False)
        check_invariants(heir.cache)
    assert [look.block.key for look in integrity.unverified(1)] == [keys_of(2)]


def store_without_checksums(rig: CacheHarness, namespace: Namespace, keys: bytes, first_block: int = 0) -> None:
    """As where the threads that take checksums are behind."""
    ticket = begin_store(rig.cache, namespace, 0, 0, keys, first_block)
    ticket.checksums = [0] * len(ticket.offsets)
    rig.cache.commit_store(ticket)


def test_a_checksum_that_comes_later_is_the_slots_from_then_on() -> None:
    rig = CacheHarness()
    namespace, integrity = rig.open(), rig.cache.integrity
    store_without_checksums(rig, namespace, keys_of(1, 2))
    check_invariants(rig.cache)
    assert integrity.unverified_slots == 2
    rig.cache.lookup(namespace, 1, 1, [(0, keys_of(1, 2))])
    ticket = rig.cache.begin_load(namespace, 0, 1, 0, keys_of(1, 2))
    assert integrity.checks_of_load(ticket, every=False) == integrity.checks_of_load(ticket, every=True) == []
    assert integrity.loaded_unverified_slots == 4, "it is served, and counted each time"
    for look in integrity.unverified(SLOT_UNIT * 10):
        assert look.checksum == 0
        assert integrity.apply(look, 77)
    check_invariants(rig.cache)
    assert (integrity.unverified_slots, integrity.checked_slots, integrity.mismatches) == (0, 0, 0)
    assert [look.checksum for look in integrity.checks_of_load(ticket, every=True)] == [77, 77]
    assert integrity.loaded_unverified_slots == 4
    assert {rig.slots.checksums[offset] for offset in ticket.offsets} == {77}
    look = integrity.checks_of_load(ticket, every=True)[0]
    assert not integrity.apply(look, 78)
    rig.cache.end_load([ticket], ok=False)
    check_invariants(rig.cache)


def test_a_checksum_of_bytes_that_were_overwritten_is_not_taken() -> None:
    rig = CacheHarness()
    namespace, integrity = rig.open(), rig.cache.integrity
    store_without_checksums(rig, namespace, keys_of(1))
    (stale,) = integrity.unverified(SLOT_UNIT)
    made(rig.cache.clear_all())
    assert integrity.apply(stale, 77)
    store_without_checksums(rig, namespace, keys_of(1), first_block=1)
    assert integrity.apply(stale, 77)
    (look,) = integrity.unverified(SLOT_UNIT)
    assert look.checksum == 0
    store_without_checksums(rig, namespace, keys_of(1))
    assert integrity.apply(look, 77)
    (again,) = integrity.unverified(SLOT_UNIT)
    assert (again.block, again.offset, again.checksum) == (look.block, look.offset, 0)
    assert integrity.apply(again, 78)
    assert look.block.shard(0).checksum == 78
    check_invariants(rig.cache)


def test_an_adopted_slot_that_goes_unread_is_forgotten() -> None:
    rig = CacheHarness()
    store(rig, rig.open(), keys_of(1, 2))
    heir = heir_of(rig)
    made(heir.cache.clear_all())
    assert heir.cache.integrity.unverified_slots == 0
    check_invariants(heir.cache)


def test_offsets_of_slots_that_have_another_size_by_now_are_none() -> None:
    """The last of ten slots of a page begins where a fourth of three pages would, which the region has no room for."""
    rig = CacheHarness(regions=1, region_bytes=10 * SLOT_UNIT)
    small, large = rig.open("small"), rig.open("large", shard_bytes=(3 * SLOT_UNIT,))
    store(rig, small, keys_of(*range(10)))
    offsets = rig.cache.integrity.slots()
    made(rig.cache.clear(small))
    assert rig.put(large, keys_of(1, 2, 3)) == 0
    assert len(rig.cache.integrity.checks_at(offsets)) == 0
    assert rig.cache.integrity.slots().tolist() == [0, 3 * SLOT_UNIT, 6 * SLOT_UNIT]


def test_adopted_slots_that_need_no_check_any_more_are_passed_over_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvoffd.cache.integrity.LOOKED_AT_ONCE", 8)
    rig = CacheHarness(regions=5)
    store(rig, rig.open(world_size=2), keys_of(*range(10)))
    heir = heir_of(rig)
    (namespace,) = heir.cache.namespaces
    made(heir.cache.invalidate(namespace, [(0, keys_of(*range(1, 9)))]))
    store(heir, namespace, keys_of(*range(21, 29)))
    check_invariants(heir.cache)
    scrubber, steps = Scrubber(heir.cache, Clock()), []
    while scrubber.has_work:
        checks = scrubber.next_step()
        steps.append(sorted(check.block.key for check in checks))
        scrubber.finish_step(checks, [check.checksum for check in checks])
        check_invariants(heir.cache)
    assert steps == [[keys_of(9)] * 2, [], [keys_of(0)] * 2, []]
    assert heir.cache.integrity.checked_slots == 4


def test_a_slot_without_a_checksum_is_not_adopted() -> None:
    rig = CacheHarness()
    store(rig, rig.open(), keys_of(1, 2))
    records = [
        record._replace(checksum=0) if record.key == keys_of(1) else record for record in rig.slots.ready_records()
    ]
    heir = CacheHarness()
    heir.slots = rig.slots.successor(records)
    heir.cache = BlockCache(heir.slots, make_policy("lru", heir.slots.pool_bytes), heir.events, Clock())
    adoption = adopt_all(heir.cache, heir.slots)
    assert (adoption.blocks, adoption.refused_slots) == (1, 1)
    check_invariants(heir.cache)
