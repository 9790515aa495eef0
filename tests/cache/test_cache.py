"""What the cache promises, one sentence at a time. The model test looks for what nobody thought of."""

from __future__ import annotations

import pytest

from kvoffd.cache.block_table import FREE, READY, WRITING
from kvoffd.cache.namespace import MissReason, Namespace, NamespaceSnapshot
from kvoffd.cache.tickets import StoreTicket
from kvoffd.errors import BadGeometry, BadKeys, KvoffdError, NamespaceMismatch, NotReady, ShardTooLarge
from kvoffd_proto.messages import GroupSpec
from tests.kit.slot_cache import UNIT, CacheRig, Part, check_invariants, keys_of

A, W, R = FREE, WRITING, READY
SESSION, LEASE = 5, 77


def full_rig(blocks: int = 8, region_units: int = 4) -> CacheRig:
    """A pool of so many slots in regions of four."""
    return CacheRig(blocks, region_units, leased_share=1.0)


def states(rig: CacheRig, namespace: Namespace, keys: bytes, group: int = 0) -> list[int]:
    """As a lookup finds them that leaves no trace."""
    (found,), _ = rig.cache.lookup(namespace, 9, 2**62, [(group, keys)], again=True)
    rig.cache.release(9, [2**62])
    return list(found)


def hold(rig: CacheRig, namespace: Namespace, keys: bytes, lease_id: int = LEASE) -> None:
    """Pin what is READY of these keys."""
    rig.cache.lookup(namespace, SESSION, lease_id, [(0, keys)])


def misses(namespace: Namespace) -> dict[str, int]:
    return {reason.name: count for reason, count in namespace.counters.misses.items() if count}


# --- stores -------------------------------------------------------------------------------------


def test_a_key_in_two_parts_of_one_group_is_written_once_and_both_hear_of_it() -> None:
    """As when one job of a message tells tokens and another does not."""
    rig = full_rig()
    namespace = rig.open("a", world_size=2)
    rig.commit(rig.begin(namespace, 1, 0, keys_of(1)))
    ticket = rig.cache.begin_store(namespace, 0, [Part(0, keys_of(1, 2)), Part(0, keys_of(3, 2, 1))])
    assert [(part.copy, part.again) for part in ticket.parts] == [([0, 1], []), ([0], [1, 2])]
    check_invariants(rig.cache)
    assert rig.commit(ticket) == 1
    check_invariants(rig.cache)


def test_a_narrow_block_in_two_parts_of_one_group_stays_for_the_part_that_has_it() -> None:
    rig = full_rig()
    namespace = rig.open("a")
    rig.commit(rig.begin(namespace, 0, 0, keys_of(1), {0: 2}))
    rig.commit(rig.cache.begin_store(namespace, 0, [Part(0, keys_of(1), {0: 2}), Part(0, keys_of(1))]))
    assert states(rig, namespace, keys_of(1)) == [R]
    check_invariants(rig.cache)


def test_a_store_that_fails_inside_leaves_nothing() -> None:
    rig = full_rig(4)
    namespace = rig.open("a", sizes=(UNIT, UNIT))

    def fail(*given: object) -> bool:
        raise ZeroDivisionError

    rig.cache._make_space = fail  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        rig.cache.begin_store(namespace, 0, [Part(0, keys_of(1)), Part(1, keys_of(*range(9)))])
    assert rig.cache.usage.free == rig.slots.pool_bytes
    check_invariants(rig.cache)


def test_a_partial_block_is_dropped_after_its_time_but_not_while_somebody_writes_it() -> None:
    rig = full_rig()
    namespace = rig.open("a", world_size=2)
    rig.commit(rig.begin(namespace, 0, 0, keys_of(1)))
    running = rig.begin(namespace, 1, 0, keys_of(1))
    rig.clock.now += 1000
    assert rig.cache.tick() == 0
    rig.cache.abort_store(running)
    rig.clock.now += 59.9
    assert rig.cache.tick() == 0, "its time begins with the end of the last write"
    rig.clock.now += 0.2
    assert rig.cache.tick() == 1
    assert states(rig, namespace, keys_of(1)) == [A]
    assert namespace.counters.partial_blocks == 1
    check_invariants(rig.cache)


def test_a_block_that_one_rank_has_stored_is_not_partial_while_another_still_writes_it() -> None:
    rig = full_rig()
    namespace = rig.open("a", world_size=2)
    first, second = (rig.begin(namespace, rank, 0, keys_of(1)) for rank in (0, 1))
    rig.commit(first)
    check_invariants(rig.cache)
    rig.clock.now += 1000
    assert rig.cache.tick() == 0
    rig.commit(second)
    assert states(rig, namespace, keys_of(1)) == [R]


def test_partial_blocks_go_before_ready_ones() -> None:
    rig = full_rig(4)
    namespace = rig.open("a", world_size=2)
    rig.store(namespace, keys_of(1))
    rig.commit(rig.begin(namespace, 0, 0, keys_of(2)))
    rig.clock.now += 5
    rig.store(namespace, keys_of(3))
    assert states(rig, namespace, keys_of(1, 2, 3)) == [R, A, R]


def test_a_rank_that_never_stores_does_not_cost_the_pool() -> None:
    rig = full_rig(64)
    namespace, other = rig.open("a", world_size=2), rig.open("b")
    rig.store(other, keys_of(*range(64)))
    for begin in range(0, 400, 4):
        rig.commit(rig.begin(namespace, 0, 0, keys_of(*range(begin, begin + 4))))
    assert other.ready_blocks >= 40
    check_invariants(rig.cache)


def test_an_overdue_store_frees_its_keys_and_keeps_its_slots_until_it_ends() -> None:
    rig = full_rig(4)
    namespace = rig.open("a")
    overdue = rig.begin(namespace, 0, 0, keys_of(1, 2))
    rig.cache.drop_unfinished(overdue)
    assert states(rig, namespace, keys_of(1)) == [A]
    assert rig.store(namespace, keys_of(1, 2, 3)) == 2, "two of four slots are still held"
    rig.cache.abort_store(overdue)
    assert rig.store(namespace, keys_of(3)) == 1
    check_invariants(rig.cache)


def test_a_wider_shard_replaces_a_narrow_one_that_nobody_reads() -> None:
    rig = full_rig()
    namespace = rig.open("a", world_size=2)
    for rank in range(2):
        rig.commit(rig.begin(namespace, rank, 0, keys_of(1), {0: 2}))
    hold(rig, namespace, keys_of(1))
    assert rig.begin(namespace, 0, 0, keys_of(1)).parts[0].copy == [], "somebody reads it"
    rig.cache.release(SESSION, [LEASE])
    assert rig.begin(namespace, 0, 0, keys_of(1), {0: 3}).parts[0].copy == [], "it holds more than is offered"
    wide = rig.begin(namespace, 0, 0, keys_of(1))
    assert wide.parts[0].copy == [0]
    rig.commit(wide)
    assert states(rig, namespace, keys_of(1)) == [W], "the other rank's is too narrow as well"
    rig.commit(rig.begin(namespace, 1, 0, keys_of(1)))
    assert states(rig, namespace, keys_of(1)) == [R]
    check_invariants(rig.cache)


def test_nothing_is_stored_before_all_ranks_have_registered() -> None:
    rig = full_rig()
    groups = [GroupSpec("full", 16)]
    namespace, _ = rig.cache.open_namespace(Namespace(bytes(32), "a", 2, 8, groups, "{}"))
    with pytest.raises(BadGeometry, match="rank 0"):
        rig.begin(namespace, 0, 0, keys_of(1))
    rig.cache.register_rank(namespace, 0, [UNIT], None)
    assert rig.begin(namespace, 0, 0, keys_of(1)).parts[0].no_space == [0]
    assert rig.cache.lookup(namespace, SESSION, LEASE, [(0, keys_of(1))])[0] == [bytes([A])]
    assert misses(namespace) == {"NO_SPACE": 1}


def test_bad_stores_are_refused_and_change_nothing() -> None:
    rig = full_rig()
    namespace = rig.open("a")
    before = rig.cache.usage
    for rank, group, keys, error in (
        *((0, 0, b"1234567", BadKeys), (0, 1, keys_of(1), BadGeometry), (1, 0, keys_of(1), BadGeometry)),
        (-1, 0, keys_of(1), BadGeometry),
    ):
        with pytest.raises(error):
            rig.cache.begin_store(namespace, rank, [Part(0, keys_of(9)), Part(group, keys)])
    assert rig.cache.usage == before
    check_invariants(rig.cache)


# --- namespaces ---------------------------------------------------------------------------------


def test_the_first_registration_fixes_a_ranks_shards() -> None:
    rig = full_rig()
    namespace = rig.open("a", sizes=(100, 0))
    rig.cache.register_rank(namespace, 0, [100, 0], None)
    with pytest.raises(BadGeometry):
        rig.cache.register_rank(namespace, 0, [100, 1], None)
    with pytest.raises(ShardTooLarge, match="pool_size"):
        rig.open("b", sizes=(5 * UNIT,))
    with pytest.raises(NamespaceMismatch):
        rig.cache.open_namespace(Namespace(namespace.fingerprint, "a", 2, 8, namespace.groups, "{}"))
    assert rig.cache.open_namespace(Namespace(namespace.fingerprint, "b", 1, 8, namespace.groups, "{}"))[0] is namespace


# --- lookups and leases -------------------------------------------------------------------------


def test_leases_leave_others_space_and_what_they_may_not_hold_is_a_miss() -> None:
    rig = CacheRig(16, 4, leased_share=0.5)
    namespace = rig.open("a")
    rig.store(namespace, keys_of(*range(16)))
    states, held = rig.cache.lookup(namespace, SESSION, LEASE, [(0, keys_of(*range(16)))])
    assert (states[0].count(R), held) == (8, 8)
    assert states[0] == bytes([R] * 8 + [A] * 8), "the first are kept: a prefix is of use"
    assert misses(namespace) == {"LEASE_LIMIT": 8}
    assert rig.cache.shortened_lookups == 1


def test_a_lease_that_may_not_grow_keeps_what_it_has() -> None:
    rig = CacheRig(16, 4, leased_share=0.25)
    namespace = rig.open("a")
    rig.store(namespace, keys_of(*range(8)))
    assert rig.cache.lookup(namespace, SESSION, LEASE, [(0, keys_of(2, 3, 4, 5))]) == ([bytes([R] * 4)], 4)
    assert rig.cache.lookup(namespace, SESSION, LEASE, [(0, keys_of(1, 2, 3, 4, 5))]) == ([bytes([A] + [R] * 4)], 4)


# --- loads and space -----------------------------------------------------------------------------


def test_a_lease_ends_with_the_last_rank_that_loaded_well() -> None:
    rig = full_rig()
    namespace = rig.open("a", world_size=2)
    rig.store(namespace, keys_of(1))
    hold(rig, namespace, keys_of(1))
    for rank, ok, alive in ((0, True, 1), (0, True, 1), (1, False, 1), (1, True, 0)):
        rig.cache.end_load([rig.cache.begin_load(namespace, rank, LEASE, 0, keys_of(1))], ok=ok)
        assert len(rig.cache.leases) == alive
    rig.cache.end_load([], ok=True)


def test_a_load_of_what_is_not_there_or_too_narrow_is_refused_by_name() -> None:
    rig = full_rig()
    namespace = rig.open("a")
    rig.store(namespace, keys_of(1, 2))
    rig.commit(rig.begin(namespace, 0, 0, keys_of(3), {0: 2}))
    hold(rig, namespace, keys_of(1, 2, 3))
    for keys, first, missing in ((keys_of(1, 9, 2), 0, [1]), (keys_of(3), 1, [0]), (keys_of(1, 3), 0, [1])):
        with pytest.raises(NotReady) as refused:
            rig.cache.begin_load(namespace, 0, LEASE, 0, keys, first)
        assert refused.value.missing == missing
    rig.cache.end_load([rig.cache.begin_load(namespace, 0, LEASE, 0, keys_of(3), 2)], ok=True)
    check_invariants(rig.cache)


def test_what_several_ranks_load_counts_once() -> None:
    rig = full_rig()
    namespace = rig.open("a", world_size=2)
    namespace.counters.prefill_tokens_per_second = 16.0
    rig.store(namespace, keys_of(1, 2))
    hold(rig, namespace, keys_of(1, 2))
    for rank in range(2):
        load = rig.cache.begin_load(namespace, rank, LEASE, 0, keys_of(1, 2))
        load.tokens = 32
        rig.cache.count_load([load])
        rig.cache.end_load([load], ok=True)
    counters = namespace.counters
    assert (counters.loaded_keys, counters.loaded_tokens, counters.saved_seconds) == (2, 32, 2.0)


def test_only_as_many_blocks_go_as_are_needed_a_chains_tail_first() -> None:
    rig = full_rig()
    namespace = rig.open("a")
    rig.store(namespace, keys_of(*range(8)))
    rig.store(namespace, keys_of(10, 11))
    assert states(rig, namespace, keys_of(*range(8))) == [R] * 6 + [A] * 2
    assert namespace.counters.evicted_blocks == 2
    rig.look(namespace, keys_of(4, 5))
    rig.store(namespace, keys_of(12, 13, 14, 15))
    assert states(rig, namespace, keys_of(*range(6))) == [A] * 4 + [R] * 2


def test_a_job_larger_than_the_pool_keeps_its_head_and_evicts_nothing_of_its_own() -> None:
    rig = full_rig()
    namespace = rig.open("a", sizes=(UNIT, UNIT))
    rig.store(namespace, keys_of(1, 2, 3), group=0)
    ticket = rig.cache.begin_store(namespace, 0, [Part(1, keys_of(*range(20))), Part(0, keys_of(1, 2, 3))])
    assert (ticket.parts[0].copy, ticket.parts[0].no_space) == (list(range(5)), list(range(5, 20)))
    assert states(rig, namespace, keys_of(1, 2, 3)) == [R] * 3
    assert namespace.counters.dropped_keys == 15
    check_invariants(rig.cache)


def test_a_new_size_takes_over_the_coldest_region() -> None:
    rig = full_rig()
    small, large = rig.open("small"), rig.open("large", sizes=(2 * UNIT,))
    for number in range(8):
        rig.store(small, keys_of(number))
    assert rig.store(large, keys_of(1)) == 1
    assert states(rig, small, keys_of(*range(8))) == [A] * 4 + [R] * 4
    assert rig.store(large, keys_of(2)) == 1, "the rest of the region"
    assert small.counters.evicted_blocks == 4
    check_invariants(rig.cache)


def test_a_region_with_a_pinned_block_is_not_taken_over() -> None:
    rig = full_rig()
    small, large = rig.open("small"), rig.open("large", sizes=(4 * UNIT,))
    for number in range(8):
        rig.store(small, keys_of(number))
    hold(rig, small, keys_of(1))
    assert rig.store(large, keys_of(1)) == 1
    assert states(rig, small, keys_of(*range(8))) == [R] * 4 + [A] * 4
    hold(rig, large, keys_of(1), LEASE + 1)
    assert rig.store(large, keys_of(2)) == 0
    assert states(rig, small, keys_of(*range(4))) == [R] * 4, "nothing is evicted in vain"
    check_invariants(rig.cache)


def test_one_old_block_of_another_size_does_not_cost_a_region_in_use() -> None:
    rig = full_rig(16)
    small, large = rig.open("small"), rig.open("large", sizes=(2 * UNIT,))
    rig.store(small, keys_of(0))
    for number in range(6):
        rig.store(large, keys_of(number))
    for number in range(1, 4):
        rig.store(small, keys_of(number))
    rig.store(large, keys_of(10))
    assert states(rig, small, keys_of(1, 2, 3)) == [R] * 3


# --- quotas -------------------------------------------------------------------------------------


def test_one_quota_too_many_is_refused() -> None:
    quotas = full_rig().cache.quotas
    for number in range(1024):
        quotas.set(number.to_bytes(32, "big"), number)
    with pytest.raises(KvoffdError, match="1024"):
        quotas.set(bytes([1] * 32), 1)
    quotas.set(bytes(32), 5)
    quotas.set(bytes(32), None)
    assert (quotas.get(bytes(32)), len(dict(quotas))) == (None, 1023)


# --- what is dropped ----------------------------------------------------------------------------


def test_after_a_reset_nothing_is_found_and_the_slots_come_free_by_and_by() -> None:
    rig = full_rig()
    namespace, other = rig.open("a"), rig.open("b")
    rig.store(namespace, keys_of(1, 2, 3))
    rig.store(other, keys_of(1))
    hold(rig, namespace, keys_of(1))
    running, number = rig.begin(namespace, 0, 0, keys_of(4)), namespace.number
    assert rig.cache.reset(namespace, generation=7) == 4
    assert (namespace.number, namespace.generation) != (number, 0)
    assert states(rig, namespace, keys_of(1, 2, 3, 4)) == [A] * 4
    assert not rig.cache.leases, "a load under one would serve what is stale"
    assert rig.commit(running) == 0
    assert rig.store(namespace, keys_of(1)) == 1
    while rig.cache.background():
        pass
    assert rig.cache.usage.dropped == 0
    assert (states(rig, namespace, keys_of(1)), states(rig, other, keys_of(1))) == ([R], [R])
    found, _ = rig.successor()
    assert len(found.index()) == 2, "a successor knows the new number alone"
    check_invariants(rig.cache)


def test_many_resets_are_written_down_once_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = CacheRig(64, 8)
    spaces, saves = [rig.open(str(number)) for number in range(5)], list[NamespaceSnapshot]()
    monkeypatch.setattr(rig.table, "save_namespaces", lambda snapshot: saves.append(snapshot) or True)
    with rig.cache.saving_once():
        for space in spaces:
            rig.cache.reset(space, generation=3)
        assert not saves
    (snapshot,) = saves
    assert [(one.number, one.generation) for one in snapshot.namespaces] == [(space.number, 3) for space in spaces]
    with rig.cache.saving_once():
        pass
    assert len(saves) == 1, "nothing has changed"
    rig.cache.reset(spaces[0])
    assert len(saves) == 2


# --- why keys are not there ---------------------------------------------------------------------


def test_every_way_out_has_its_reason() -> None:
    rig = full_rig(4)
    namespace = rig.open("a")
    rig.store(namespace, keys_of(1, 2, 3, 4))
    rig.cache.invalidate(namespace, [(0, keys_of(1))])
    rig.store(namespace, keys_of(5, 6))
    hold(rig, namespace, keys_of(2, 3, 5, 6))
    rig.store(namespace, keys_of(7))
    corrupt = rig.cache.blocks.find(rig.cache._current[namespace][0].number, keys_of(2), 8)[1]
    (check,) = rig.cache.checks(corrupt)
    rig.cache.check(check.slot, check.generation, 1)
    namespace.counters.misses.clear()
    rig.cache.lookup(namespace, 8, 1, [(0, keys_of(1, 2, 4, 7, 99))])
    assert misses(namespace) == {"INVALIDATED": 1, "CORRUPT": 1, "EVICTED": 1, "NO_SPACE": 1, "UNKNOWN": 1}
    assert rig.cache.reason_of(namespace, 0, keys_of(4)) is MissReason.EVICTED
    rig.store(namespace, keys_of(1))
    assert rig.cache.reason_of(namespace, 0, keys_of(4)) is MissReason.EVICTED


def test_what_engines_did_not_wait_for_is_a_miss_once() -> None:
    rig = full_rig()
    namespace = rig.open("a")
    rig.store(namespace, keys_of(1, 2))
    hold(rig, namespace, keys_of(1, 2))
    rig.cache.release(SESSION, [LEASE, LEASE], MissReason.LATE)
    assert misses(namespace) == {"LATE": 2}


# --- checksums ----------------------------------------------------------------------------------


def test_wrong_bytes_drop_the_block_and_their_slot_is_never_used_again() -> None:
    rig = full_rig(4)
    namespace = rig.open("a", world_size=2)
    rig.store(namespace, keys_of(1, 2))
    hold(rig, namespace, keys_of(1))
    load = rig.cache.begin_load(namespace, 1, LEASE, 0, keys_of(1))
    (check,) = rig.cache.checks_of_load(load, every=True)
    assert rig.cache.check(check.slot, check.generation, check.checksum)
    assert not rig.cache.check(check.slot, check.generation, check.checksum + 1)
    assert states(rig, namespace, keys_of(1, 2)) == [A, R]
    assert rig.events.log[-1] == ("removed", 0, [keys_of(1)])
    assert rig.cache.corrupt_keys(load) == keys_of(1), "who reads it hears of it"
    assert not rig.cache.check(check.slot, check.generation, check.checksum), "memory that changes is not trusted"
    rig.cache.end_load([load], ok=False)
    rig.cache.release(SESSION, [LEASE])
    assert (rig.cache.quarantined_slots, rig.cache.usage.quarantined) == (1, UNIT)
    assert rig.store(namespace, keys_of(3, 4)) == 1, "one of four slots is lost"
    check_invariants(rig.cache)
    _, recovered = rig.successor()
    assert recovered.quarantined.tolist() == [check.slot], "after a restart neither"


# --- the policy ---------------------------------------------------------------------------------


class Strict:
    """Stands before a policy and refuses keys."""

    def __init__(self, rig: CacheRig, score: float) -> None:
        rig.policy.admit = lambda group, keys, starts: [(len(keys) // group.key_bytes, score)]  # type: ignore[method-assign]
        self.refused: list[bytes] = []
        rig.policy.rejected = lambda group, keys: self.refused.append(keys)  # type: ignore[method-assign]


def rejected(ticket: StoreTicket) -> list[int]:
    return ticket.parts[0].rejected


def test_what_the_policy_refuses_is_rejected_and_not_short_of_space() -> None:
    rig = full_rig(4)
    namespace = rig.open("a")
    strict = Strict(rig, -1.0)
    assert rejected(rig.begin(namespace, 0, 0, keys_of(1, 2))) == [0, 1]
    assert strict.refused == [keys_of(1, 2)]
    assert rejected(rig.begin(namespace, 0, 0, keys_of(1, 2), starts=None)) == [], "where it has no say"
    namespace.counters.misses.clear()
    rig.cache.lookup(namespace, 8, 1, [(0, keys_of(1))])
    assert namespace.counters.declined_keys == 2
