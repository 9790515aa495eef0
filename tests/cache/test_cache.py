"""What the cache promises, one sentence at a time. The model test looks for what nobody thought of."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvoffd.cache import POLICY_NAMES
from kvoffd.cache.asked_keys import TAKEN_AT_ONCE
from kvoffd.cache.block_life import ABANDONED_S
from kvoffd.cache.leases import CLAIM_S
from kvoffd.cache.namespace import MissReason, Namespace, NamespaceRecord, NamespaceSnapshot
from kvoffd.cache.open_namespaces import KNOWN_RESETS
from kvoffd.cache.policy import Admission, Chain
from kvoffd.cache.prompts import MAX_UNREPORTED, Offered
from kvoffd.cache.states import DROPPED, FREE, READY
from kvoffd.cache.tickets import StorePart, StoreTicket
from kvoffd.errors import BadGeometry, NotReady, UnknownLease
from kvoffd_proto.messages import GroupSpec, HintAction
from tests.kit.lines import lines_of
from tests.kit.slot_cache import UNIT, CacheRig, check_invariants, keys_of

A, R = FREE, READY
SESSION, LEASE = 5, 77


def full_rig(blocks: int = 8, region_units: int = 4) -> CacheRig:
    """A pool of so many slots in regions of four."""
    return CacheRig(blocks, region_units, leased_share=1.0)


def hold(rig: CacheRig, namespace: Namespace, keys: bytes, lease_id: int = LEASE) -> None:
    """Pin what is READY of these keys."""
    rig.cache.lookup(namespace, SESSION, lease_id, [(0, keys)])


def leased(rig: CacheRig, namespace: Namespace, session: int, lease_id: int, *numbers: int) -> int:
    """Look keys up. Returns how many blocks the lease has then."""
    lease = rig.cache.lookup(namespace, session, lease_id, [(0, keys_of(*numbers))]).lease
    return len(lease.blocks) if lease is not None else 0


def misses(namespace: Namespace) -> dict[str, int]:
    return {reason.name: count for reason, count in namespace.counters.misses.items() if count}


# --- stores -------------------------------------------------------------------------------------


def test_a_store_that_fails_inside_leaves_nothing() -> None:
    rig = full_rig(4)
    namespace = rig.open("a", sizes=(UNIT, UNIT))

    def fail(*given: object) -> bool:
        raise ZeroDivisionError

    rig.cache.space.victims.choose = fail  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        rig.cache.stores.begin(namespace, 0, [StorePart(0, keys_of(1)), StorePart(1, keys_of(*range(9)))])
    assert rig.cache.life.usage.free == rig.slots.pool_bytes
    check_invariants(rig.cache)


def test_a_store_that_fails_once_it_has_its_slots_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = full_rig(4)
    namespace = rig.open("a")

    def fail(*given: object) -> None:
        raise MemoryError

    monkeypatch.setattr(rig.cache.space, "no_space_cause", fail)
    with pytest.raises(MemoryError):
        rig.cache.stores.begin(namespace, 0, [StorePart(0, keys_of(*range(9)))])
    assert rig.cache.life.usage.free == rig.slots.pool_bytes
    check_invariants(rig.cache)


@pytest.mark.parametrize("fails", ["life.reasons_with_resets", "order.record_askers"])
def test_a_lookup_that_fails_inside_pins_nothing(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = full_rig(4)
    namespace = rig.open("a", sizes=(UNIT, UNIT))
    for group in range(2):
        rig.store(namespace, keys_of(1, 2), group=group)

    def fail(*given: object) -> None:
        raise MemoryError

    rig.cache.reset(namespace)  # else no key has to be known from before one
    for group in range(2):
        rig.store(namespace, keys_of(1, 2), group=group)
    part, name = fails.split(".")
    monkeypatch.setattr(getattr(rig.cache, part), name, fail)
    with pytest.raises(MemoryError):
        rig.cache.lookup(namespace, SESSION, LEASE, [(0, keys_of(1, 2)), (1, keys_of(1, 2))])
    assert (rig.cache.life.usage.pinned, rig.cache.leases.by_id) == (0, {})
    check_invariants(rig.cache)


def test_partial_blocks_go_before_ready_ones() -> None:
    rig = full_rig(4)
    namespace = rig.open("a", world_size=2)
    rig.store(namespace, keys_of(1))
    rig.commit(rig.begin(namespace, 0, 0, keys_of(2)))
    rig.clock.now += 5
    rig.store(namespace, keys_of(3))
    assert rig.states(namespace, keys_of(1, 2, 3)) == [R, A, R]


def begin_sole(rig: CacheRig, namespace: Namespace, rank: int, keys: bytes, sole: int) -> StoreTicket:
    parts = [StorePart(0, keys, {}, range(len(keys) // 8))]
    (ticket,) = rig.cache.stores.begin(namespace, rank, parts, sole)
    return ticket


def test_a_block_that_one_store_alone_began_and_left_is_stored_by_another_one() -> None:
    rig = full_rig(4)
    namespace = rig.open("a", world_size=2)
    rig.commit([begin_sole(rig, namespace, 0, keys_of(1), 5)])
    assert begin_sole(rig, namespace, 1, keys_of(1), 0).copy == [], "no block has shards of two"
    rig.clock.now += ABANDONED_S
    assert rig.store(namespace, keys_of(1)) == 1
    assert namespace.counters.partial_blocks == 1
    rig.commit([begin_sole(rig, namespace, 0, keys_of(2), 5)])
    running = begin_sole(rig, namespace, 1, keys_of(2), 5)
    rig.clock.now += ABANDONED_S
    assert begin_sole(rig, namespace, 1, keys_of(2), 0).copy == [], "it is being written"
    assert rig.commit([running]) == 1
    check_invariants(rig.cache)


def test_a_repeated_key_of_another_store_s_block_is_lost_no_more_than_the_first() -> None:
    rig = full_rig(4)
    namespace = rig.open("a", world_size=2)
    rig.commit([begin_sole(rig, namespace, 0, keys_of(1), 5)])
    ticket = begin_sole(rig, namespace, 1, keys_of(1, 2, 1, 2), 0)
    assert (ticket.copy, ticket.duplicates) == ([1], [3])
    rig.cache.stores.abort([ticket])
    rig.clock.now += ABANDONED_S
    ticket = begin_sole(rig, namespace, 0, keys_of(1, 2, 1, 2), 0)
    assert (ticket.copy, ticket.duplicates) == ([0, 1], [2, 3])
    rig.cache.stores.abort([ticket])
    check_invariants(rig.cache)


def test_a_rank_that_never_stores_does_not_cost_the_pool() -> None:
    rig = full_rig(64)
    namespace, other = rig.open("a", world_size=2), rig.open("b")
    rig.store(other, keys_of(*range(64)))
    for begin in range(0, 400, 4):
        rig.commit(rig.begin(namespace, 0, 0, keys_of(*range(begin, begin + 4))))
    assert other.ready_blocks >= 40
    check_invariants(rig.cache)


@pytest.mark.parametrize("needed", [False, True])
def test_partial_blocks_of_a_reset_are_freed_by_parts_or_when_space_is_needed(needed: bool) -> None:
    rig = full_rig(64)
    namespace, other = rig.open("a", world_size=2, sizes=(UNIT, UNIT)), rig.open("b")
    for group in range(2):
        rig.commit(rig.begin(namespace, 0, group, keys_of(*range(16))))
    rig.cache.swept_at_once = 4
    rig.cache.reset(namespace)
    assert len(rig.cache.life.partial) == 32
    check_invariants(rig.cache)
    rig.clock.now += 100
    if needed:
        assert rig.store(other, keys_of(*range(64))) == 64
    else:
        rig.cache.tick()
    check_invariants(rig.cache)
    while rig.cache.background():
        check_invariants(rig.cache)
    assert (namespace.counters.partial_blocks, namespace.counters.invalidated_blocks) == (0, 32)
    assert (len(rig.cache.life.partial), namespace.held_bytes) == (0, 0)


def test_what_a_store_itself_pins_is_no_cause_of_its_lack_of_space() -> None:
    rig = full_rig(4)
    namespace = rig.open("a", world_size=2)
    for rank in range(2):
        (stored,) = rig.begin(namespace, rank, 0, keys_of(*range(6)))
        assert len(stored.no_space) == 4
    assert namespace.counters.no_space == {"writing": 8}


# --- namespaces ---------------------------------------------------------------------------------


def test_the_first_registration_fixes_a_ranks_shards() -> None:
    rig = full_rig()
    namespace = rig.open("a", sizes=(100, 0))
    rig.cache.namespaces.register_rank(namespace, 0, [100, 0], None)
    with pytest.raises(BadGeometry):
        rig.cache.namespaces.register_rank(namespace, 0, [100, 1], None)
    with pytest.raises(BadGeometry, match="pool_size"):
        rig.open("b", sizes=(5 * UNIT,))
    assert rig.cache.namespaces.open(Namespace(namespace.fingerprint, "b", 1, 8, namespace.specs, "{}"))[0] is namespace


# --- lookups and leases -------------------------------------------------------------------------


def test_a_lease_that_may_not_grow_keeps_what_it_has() -> None:
    rig = CacheRig(16, 4, leased_share=0.25)
    namespace = rig.open("a")
    rig.store(namespace, keys_of(*range(8)))
    first = rig.cache.lookup(namespace, SESSION, LEASE, [(0, keys_of(2, 3, 4, 5))])
    again = rig.cache.lookup(namespace, SESSION, LEASE, [(0, keys_of(1, 2, 3, 4, 5))])
    assert (first.states, again.states) == ([bytes([R] * 4)], [bytes([A] + [R] * 4)])
    assert first.lease is not None
    assert first.lease is again.lease
    assert len(first.lease.blocks) == 4


# --- loads and space -----------------------------------------------------------------------------


def extend(
    rig: CacheRig, namespace: Namespace, numbers: range, begin: int, ranks: Sequence[int] = (0,)
) -> list[StoreTicket]:
    """Store a part of a prompt, whose first number is ``begin``, in its first group."""
    before = {0: keys_of(numbers[0] - 1)} if numbers[0] > begin else {}
    stored = []
    for rank in ranks:
        part = StorePart(0, keys_of(*numbers), before=before)
        stored += rig.cache.stores.begin(namespace, rank, [part])
        rig.commit(stored[-1:])
    return stored


@pytest.mark.parametrize("looked_up", [False, True])
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_prompt_larger_than_the_pool_keeps_its_beginning(policy: str, looked_up: bool) -> None:
    """However it is cut into stores, of several ranks. What is older goes first."""
    rig = CacheRig(64, 8, policy, leased_share=1.0)
    namespace = rig.open("a", world_size=2)
    for begin in range(1000, 1400, 20):  # so that the policy has learned something
        rig.ask(namespace, keys_of(*range(begin, begin + 20)))
    if looked_up:
        rig.look(namespace, keys_of(*range(100)))
    for begin in range(0, 90, 9):
        extend(rig, namespace, range(begin, begin + 9), 0, (begin // 9 % 2, 1 - begin // 9 % 2))
        check_invariants(rig.cache)
    found = rig.states(namespace, keys_of(*range(90)))
    assert (found, sum(namespace.counters.no_space.values())) == ([R] * 32 + [A] * 58, 2 * 58)
    assert namespace.counters.no_space == {"prompt": 2 * 58}
    assert leased(rig, namespace, 1, 1, *range(90)) == 32
    rig.cache.leases.end(1, [1])
    for _ in range(3):  # so that each policy wants it
        rig.look(namespace, keys_of(500))
    assert rig.begin(namespace, 0, 0, keys_of(500))[0].copy == [0], "a newer prompt's"


def test_a_prompt_larger_than_its_quota_keeps_its_beginning() -> None:
    rig = full_rig(64, 8)
    namespace, other = rig.open("a"), rig.open("b")
    rig.cache.quotas[namespace.fingerprint] = 16 * UNIT
    rig.store(other, keys_of(*range(48)))
    rig.store(namespace, keys_of(*range(100, 116)))
    for begin in range(0, 32, 8):
        extend(rig, namespace, range(begin, begin + 8), 0)
    assert rig.states(namespace, keys_of(*range(32))) == [R] * 16 + [A] * 16
    assert (namespace.counters.no_space, other.ready_blocks) == ({"quota": 16}, 48)
    check_invariants(rig.cache)


def test_prompts_grow_at_the_cost_of_older_ones_alone() -> None:
    """Also those that are in one message."""
    rig = full_rig(32, 8)
    namespace = rig.open("a")
    for begin in (100, 200):
        extend(rig, namespace, range(begin, begin + 16), begin)
    assert extend(rig, namespace, range(116, 124), 100)[0].no_space == [*range(8)], "its own beginning is the oldest"
    assert extend(rig, namespace, range(216, 224), 200)[0].copy == [*range(8)]
    assert rig.states(namespace, keys_of(*range(100, 116))) == [R] * 8 + [A] * 8
    both = StorePart(0, keys_of(124, 125, 224, 225), {}, (0, 2), {0: keys_of(107), 2: keys_of(223)})
    (stored,) = rig.cache.stores.begin(namespace, 0, [both])
    assert (stored.copy, stored.no_space) == ([2, 3], [0, 1])
    rig.commit([stored])
    check_invariants(rig.cache)
    rig.look(namespace, keys_of(*range(100, 106)))
    assert extend(rig, namespace, range(106, 116), 100)[0].copy == [*range(10)], "it was asked for again"
    assert rig.states(namespace, keys_of(*range(100, 116))) == [R] * 16


def test_a_block_that_an_older_prompt_has_too_counts_for_the_newer_one() -> None:
    rig = full_rig(32, 8)
    namespace = rig.open("a")
    extend(rig, namespace, range(100, 108), 100)
    rig.store(namespace, keys_of(50))
    rig.commit(rig.cache.stores.begin(namespace, 0, [StorePart(0, keys_of(50, 50), {}, (0, 1), {1: keys_of(107)})]))
    (block,) = rig.blocks(namespace, keys_of(50))
    assert rig.cache.blocks.prompt[block] == rig.cache.blocks.last_prompt
    check_invariants(rig.cache)


@pytest.mark.parametrize("listed", [(0, 1), (1, 0)])
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_prompts_that_are_stored_in_steps_lose_their_tails_first(policy: str, listed: tuple[int, ...]) -> None:
    """As if each was stored at once, whichever the client names first."""
    rig = CacheRig(20, 20, policy)
    namespace = rig.open()
    numbers = [range(100, 108), range(200, 208)]
    for prompt in numbers:
        rig.look(namespace, keys_of(*prompt))
    for step in (slice(0, 4), slice(4, 8)):
        steps = [numbers[at][step] for at in listed]
        before = {4 * at: keys_of(one[0] - 1) for at, one in enumerate(steps) if step.start}
        part = StorePart(0, keys_of(*steps[0], *steps[1]), {}, (0, 4), before, listed)
        rig.commit(rig.cache.stores.begin(namespace, 0, [part]))
    check_invariants(rig.cache)
    rig.ask(namespace, keys_of(*range(300, 314)))
    left = [rig.states(namespace, keys_of(*prompt)) for prompt in numbers]
    assert sum(states.count(R) for states in left) == 6
    assert all(states == sorted(states, reverse=True) for states in left), "a tail is left without its root"


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_chain_that_names_a_key_of_its_own_as_the_one_before_it_is_stored(policy: str) -> None:
    rig = CacheRig(16, 16, policy)
    namespace = rig.open()
    for named in range(3):
        first = 10 * named
        part = StorePart(0, keys_of(*range(first, first + 3)), before={0: keys_of(first + named)})
        assert rig.commit(rig.cache.stores.begin(namespace, 0, [part])) == 3
        check_invariants(rig.cache)
    rig.ask(namespace, keys_of(*range(100, 116)))
    check_invariants(rig.cache)


def test_rejected_keys_of_several_prompts_are_named_in_order_and_are_those_that_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The newest prompt looks for space first; of its message a client is told by ascending numbers."""
    rig, begins = full_rig(32, 8), (200, 300, 100)
    namespace = rig.open("a")
    for begin in sorted(begins):
        extend(rig, namespace, range(begin, begin + 8), begin)
    rig.store(namespace, keys_of(*range(50, 58)))
    every = rig.policy.first
    monkeypatch.setattr(rig.policy, "first", lambda count, below=inf: every(count if below == inf else 0))
    monkeypatch.setattr(rig.policy, "admit", lambda group, keys, starts: Admission([(len(keys) // 8, 1.0)], -inf))
    monkeypatch.setattr(rig.policy, "rejected", lambda group, keys: None)
    before = {0: keys_of(207), 1: keys_of(307), 3: keys_of(107)}
    part = StorePart(0, keys_of(208, 308, 50, 108), {}, (0, 1, 2, 3), before)
    (stored,) = rig.cache.stores.begin(namespace, 0, [part])
    assert stored.rejected == [0, 1, 3]
    reasons = rig.cache.blocks.miss_reasons(namespace.group(0), keys_of(208, 308, 108))
    assert reasons == bytes([MissReason.REJECTED]) * 3


def test_a_key_whose_score_is_too_low_is_rejected_though_a_later_one_takes_the_last_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = CacheRig(4, 4)
    namespace = rig.open("a")
    for number in range(4):
        rig.store(namespace, keys_of(number))
    rig.cache.blocks.pin(rig.blocks(namespace, keys_of(1, 2, 3)))
    every = rig.policy.first
    monkeypatch.setattr(rig.policy, "first", lambda count, below=inf: every(count if below > 2.0 else 0))
    monkeypatch.setattr(rig.policy, "admit", lambda group, keys, starts: Admission([(1, 1.0), (1, 3.0)], 2.0))
    monkeypatch.setattr(rig.policy, "rejected", lambda group, keys: None)
    (stored,) = rig.begin(namespace, 0, 0, keys_of(8, 9))
    assert (stored.copy, stored.rejected, stored.no_space) == ([1], [0], [])


def test_where_nothing_may_go_two_prompts_of_a_store_look_for_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest for all of them, then the newest, which may evict all that others may."""
    rig, begins = full_rig(32, 8), range(100, 500, 100)
    namespace = rig.open("a")
    for begin in begins:
        extend(rig, namespace, range(begin, begin + 8), begin)
    rig.cache.blocks.pin(rig.blocks(namespace, keys_of(*(begin + at for begin in begins for at in range(8)))))
    looked, take = [], rig.cache.space.take
    monkeypatch.setattr(rig.cache.space, "take", lambda *wanted: looked.append(wanted) or take(*wanted))
    before = {at: keys_of(begin + 7) for at, begin in enumerate(begins)}
    each = StorePart(0, keys_of(*(begin + 8 for begin in begins)), {}, range(4), before)
    (stored,) = rig.cache.stores.begin(namespace, 0, [each])
    assert (stored.copy, stored.no_space) == ([], [*range(4)])
    assert len(looked) == 2


def test_a_prompt_goes_on_in_all_groups_and_behind_refused_keys_takes_nothing() -> None:
    rig = full_rig(16, 8)
    namespace = rig.open("a", sizes=(UNIT, UNIT))
    extend(rig, namespace, range(16), 0)
    window = StorePart(1, keys_of(17), before={0: keys_of(16)})
    full = StorePart(0, keys_of(16, 17), before={0: keys_of(15)})
    one, other = rig.cache.stores.begin(namespace, 0, [window, full])
    assert (one.no_space, other.no_space) == ([0], [0, 1]), "the group that has no block of it evicts none either"
    assert extend(rig, namespace, range(18, 20), 0)[0].no_space == [0, 1]
    assert rig.states(namespace, keys_of(*range(16))) == [R] * 16
    rig.cache.invalidate(namespace, [(0, keys_of(14, 15))])
    two = StorePart(0, keys_of(70, 20, 21, 71), {}, (0, 1, 3), {1: keys_of(19)})
    (stored,) = rig.cache.stores.begin(namespace, 0, [two])
    assert (stored.copy, stored.no_space) == ([0, 3], [1, 2]), "free space is for what can be found"
    rig.commit([stored])
    assert extend(rig, namespace, range(50, 52), 0)[0].copy == [0, 1], "what is before it is not known"
    (stored,) = rig.cache.stores.begin(namespace, 0, [StorePart(0, keys_of(60, 61), {}, (0, 1), {1: keys_of(60)})])
    assert stored.copy == [0, 1]


def test_blocks_of_another_size_do_not_take_a_region_from_their_own_prompt() -> None:
    rig = full_rig(8, 4)
    namespace = rig.open("a", sizes=(UNIT, 2 * UNIT))
    rig.store(namespace, keys_of(100, 101))
    extend(rig, namespace, range(6), 0)
    full, large = (StorePart(group, keys_of(6), before={0: keys_of(5)}) for group in (0, 1))
    stores = rig.cache.stores.begin(namespace, 0, [large, full])
    assert [one.no_space for one in stores] == [[0], []]
    assert rig.states(namespace, keys_of(*range(6))) == [R] * 6
    rig.commit(stores)
    check_invariants(rig.cache)
    assert rig.store(namespace, keys_of(50), group=1) == 1, "a newer prompt's"


def test_a_load_needs_an_active_lease_and_blocks_that_are_ready() -> None:
    """Whether the lease has them does not matter, as the refusal says."""
    rig = full_rig()
    namespace = rig.open("a")
    rig.store(namespace, keys_of(1, 2))
    hold(rig, namespace, keys_of(1))
    rig.cache.end_load([rig.cache.begin_load(namespace, 0, LEASE, 0, keys_of(1, 2))])
    with pytest.raises(NotReady, match="1 keys of group 0 are not in the pool") as refused:
        rig.cache.begin_load(namespace, 0, LEASE, 0, keys_of(1, 3, 2))
    assert refused.value.missing == [1]


def test_as_many_blocks_go_as_are_needed_a_tail_first() -> None:
    rig = full_rig()
    namespace = rig.open("a")
    rig.store(namespace, keys_of(*range(8)))
    rig.store(namespace, keys_of(10, 11))
    assert rig.states(namespace, keys_of(*range(8))) == [R] * 6 + [A] * 2
    assert namespace.counters.evicted_blocks == 2
    rig.look(namespace, keys_of(4, 5))
    rig.store(namespace, keys_of(12, 13, 14, 15))
    assert rig.states(namespace, keys_of(*range(6))) == [A] * 4 + [R] * 2


def test_a_new_size_takes_over_the_coldest_region() -> None:
    rig = full_rig()
    small, large = rig.open("small"), rig.open("large", sizes=(2 * UNIT,))
    for number in range(8):
        rig.store(small, keys_of(number))
    assert rig.store(large, keys_of(1)) == 1
    assert rig.states(small, keys_of(*range(8))) == [A] * 4 + [R] * 4
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
    assert rig.states(small, keys_of(*range(8))) == [R] * 4 + [A] * 4
    hold(rig, large, keys_of(1), LEASE + 1)
    assert rig.store(large, keys_of(2)) == 0
    assert rig.states(small, keys_of(*range(4))) == [R] * 4, "nothing is evicted needlessly"
    check_invariants(rig.cache)


def test_a_store_without_space_does_not_look_at_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of one size whose regions have a pinned block each, of which a store needs another size."""
    monkeypatch.setattr("kvoffd.cache.victims.MAX_CONSIDERED", 128)
    rig = full_rig(2048)
    small, large = rig.open("small"), rig.open("large", sizes=(2 * UNIT,))
    rig.store(small, keys_of(*range(2048)))
    hold(rig, small, keys_of(*range(0, 2048, 4)))
    seen, first = list[int](), rig.policy.first
    monkeypatch.setattr(rig.policy, "first", lambda count, below=inf: seen.append(count) or first(count, below))
    assert rig.store(large, keys_of(1)) == 0
    assert large.counters.no_space == {"sizes": 1}
    assert max(seen) <= 4 * 128
    check_invariants(rig.cache)


def test_one_old_block_does_not_cost_a_region_in_use() -> None:
    rig = full_rig(16)
    small, large = rig.open("small"), rig.open("large", sizes=(2 * UNIT,))
    rig.store(small, keys_of(0))
    for number in range(6):
        rig.store(large, keys_of(number))
    for number in range(1, 4):
        rig.store(small, keys_of(number))
    rig.store(large, keys_of(10))
    assert rig.states(small, keys_of(1, 2, 3)) == [R] * 3


# --- what is dropped ----------------------------------------------------------------------------


def test_a_block_that_was_reset_and_is_found_corrupt_is_counted_once() -> None:
    rig = full_rig()
    namespace = rig.open("a")
    rig.store(namespace, keys_of(1, 2, 3))
    (check, _, _) = rig.cache.integrity.checks(rig.blocks(namespace, keys_of(1, 2, 3)))
    assert rig.cache.reset(namespace) == 3
    assert not rig.cache.integrity.check(check.slot, check.sequence, 1)
    assert namespace.counters.invalidated_blocks == 3
    check_invariants(rig.cache)
    while rig.cache.background():
        pass
    assert (namespace.counters.invalidated_blocks, rig.cache.life.quarantined_slots) == (3, 1)
    assert rig.cache.life.reasons_of(namespace.group(0), keys_of(1, 2)) == bytes([MissReason.INVALIDATED] * 2)


def test_a_successor_does_not_find_what_was_reset_and_not_freed_yet() -> None:
    """After a kill directly behind the reset's answer."""
    rig = CacheRig(8, 4)
    space = rig.open()
    rig.store(space, keys_of(1, 2, 3))
    assert len(rig.successor()[1].blocks) == 3
    rig.cache.reset(space)
    assert not len(rig.successor()[1].blocks)


def test_many_resets_are_written_down_once_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = CacheRig(64, 8)
    spaces, saves = [rig.open(str(number)) for number in range(5)], list[object]()
    save = rig.table.save_namespaces
    monkeypatch.setattr(rig.table, "save_namespaces", lambda *given: saves.append(given) or save(*given))
    rig.cache.reset()
    assert not saves, "nothing has changed"
    rig.cache.reset(*spaces, generation=3)
    assert len(saves) == 1
    snapshot = rig.successor()[0].cache.table.load_namespaces(NamespaceSnapshot)
    assert [(one.number, one.generation) for one in snapshot.namespaces] == [(space.number, 3) for space in spaces]


# --- why keys are not there ---------------------------------------------------------------------


def test_what_was_reset_is_missed_for_that_before_it_is_swept_out() -> None:
    rig = full_rig(8)
    space, other = rig.open("a", sizes=(UNIT, UNIT)), rig.open("b", sizes=(UNIT, UNIT))
    for number in (1, 2):
        rig.store(space, keys_of(number))
        rig.cache.reset(space)
    for number in (1, 2):
        assert rig.cache.life.reasons_of(space.group(0), keys_of(number)) == bytes([MissReason.INVALIDATED])
    rig.cache.lookup(space, 8, 1, [(0, keys_of(1, 2, 3))])
    rig.cache.lookup(other, 8, 2, [(0, keys_of(1))])
    rig.cache.lookup(space, 8, 3, [(1, keys_of(1))])
    assert misses(space) == {"INVALIDATED": 2, "UNKNOWN": 2}
    assert misses(other) == {"UNKNOWN": 1}
    while rig.cache.background():
        pass
    assert rig.cache.life.reasons_of(space.group(0), keys_of(2)) == bytes([MissReason.INVALIDATED])
    rig.cache.reset(space)
    assert not space.group(0).unswept_before


@pytest.mark.parametrize("is_swept", [False, True])
def test_what_left_after_a_reset_is_missed_for_that(is_swept: bool) -> None:
    rig = full_rig(8)
    space = rig.open()
    rig.store(space, keys_of(1, 2, 3))
    rig.cache.reset(space)
    rig.store(space, keys_of(1))
    rig.cache.life.evict(rig.blocks(space, keys_of(1)))
    rig.cache.blocks.record_misses(space.group(0), keys_of(2), MissReason.REJECTED)
    while is_swept and rig.cache.background():
        pass
    rig.cache.lookup(space, 8, 1, [(0, keys_of(1, 2, 3))])
    assert misses(space) == {"EVICTED": 1, "REJECTED": 1, "INVALIDATED": 1}


def test_every_way_out_has_its_reason() -> None:
    rig = full_rig(4)
    namespace = rig.open("a")
    rig.store(namespace, keys_of(1, 2, 3, 4))
    rig.cache.invalidate(namespace, [(0, keys_of(1))])
    rig.store(namespace, keys_of(5, 6))
    hold(rig, namespace, keys_of(2, 3, 5, 6))
    rig.store(namespace, keys_of(7))
    corrupt = rig.cache.blocks.find(namespace.groups[0], keys_of(2))[1]
    (check,) = rig.cache.integrity.checks(corrupt)
    rig.cache.integrity.check(check.slot, check.sequence, 1)
    namespace.counters.misses.clear()
    rig.cache.lookup(namespace, 8, 1, [(0, keys_of(1, 2, 4, 7, 99))])
    assert misses(namespace) == {"INVALIDATED": 1, "CORRUPT": 1, "EVICTED": 1, "NO_SPACE": 1, "UNKNOWN": 1}
    assert rig.cache.life.reasons_of(namespace.group(0), keys_of(4)) == bytes([MissReason.EVICTED])
    rig.store(namespace, keys_of(1))
    assert rig.cache.life.reasons_of(namespace.group(0), keys_of(4)) == bytes([MissReason.EVICTED])


def test_what_was_known_before_a_reset_was_dropped_by_it() -> None:
    """Also what had been evicted by then, and might have been on a disk."""
    rig = CacheRig(8, 4)
    space = rig.open()
    rig.cache.blocks.record_misses(space.group(0), keys_of(1), MissReason.EVICTED)
    for _ in range(KNOWN_RESETS):
        rig.cache.reset(space)
        while rig.cache.background():
            pass
        assert rig.cache.life.reasons_of(space.group(0), keys_of(1, 9)) == bytes(
            [MissReason.INVALIDATED, MissReason.UNKNOWN]
        )
    rig.cache.lookup(space, 8, 1, [(0, keys_of(1, 9))])
    assert misses(space) == {"INVALIDATED": 1, "UNKNOWN": 1}
    rig.cache.blocks.record_misses(space.group(0), keys_of(1), MissReason.EVICTED)
    assert rig.cache.life.reasons_of(space.group(0), keys_of(1)) == bytes([MissReason.EVICTED]), "it was stored since"
    rig.cache.reset(space)
    assert len(space.groups[0].predecessors) == KNOWN_RESETS


def test_prompts_that_wait_for_a_report_are_bounded_and_counted_in_steps() -> None:
    rig = full_rig(8)
    namespace = rig.open("a")
    for lease_id in range(1000):
        rig.cache.lookup(namespace, 1, 1 + lease_id, [], reported=True)
    assert not rig.cache.prompts.uncounted._by_lease, "there is nothing to count"
    for lease_id in range(200):
        rig.cache.lookup(namespace, 1, 1 + lease_id, [(0, keys_of(lease_id))], reported=True)
    assert misses(namespace) == {}
    rig.cache.end_session(1)
    counted = []
    while rig.cache.background():
        counted.append(sum(misses(namespace).values()))
    assert counted == [TAKEN_AT_ONCE, 2 * TAKEN_AT_ONCE, 3 * TAKEN_AT_ONCE]
    assert misses(namespace) == {"UNKNOWN": 200}


# --- what others hear ----------------------------------------------------------------------------


def test_slots_are_taken_on_the_node_of_their_rank() -> None:
    rig = CacheRig(16, 4, nodes=2)
    namespace = rig.join("a", world_size=2)
    for rank in (0, 1):
        rig.cache.namespaces.register_rank(namespace, rank, [UNIT], 1 - rank)
    rig.store(namespace, keys_of(1))
    slots = rig.cache.blocks.slots(rig.blocks(namespace, keys_of(1)), 2)
    assert (rig.slots.offsets(slots[0]) // (8 * UNIT)).tolist() == [1, 0]
    assert rig.slots.slots_on_other_nodes == 0


def test_beyond_the_first_half_each_session_leases_an_equal_part() -> None:
    rig = CacheRig(units=80, region_units=8, leased_share=0.5)
    namespace = rig.open("a")
    rig.store(namespace, keys_of(*range(80)))

    def leased_by(session: int, *numbers: int) -> int:
        return leased(rig, namespace, session, 100 * session + numbers[0], *numbers)

    assert leased_by(1, *range(35)) == 35, "alone it may have all that leases may"
    assert leased_by(2, *range(40, 60)) == 5, "what is left of 40"
    assert namespace.counters.misses[MissReason.LEASE_LIMIT] == 15
    assert leased_by(2, *range(35)) == 35, "what others hold takes nothing from anybody"
    assert leased_by(3, *range(60, 80)) == 0
    check_invariants(rig.cache)
    rig.cache.leases.end(1, [100])
    rig.cache.end_session(2)
    assert leased_by(1, *range(30)) == 20, "half of it anybody may have; the third was refused and has a claim"
    assert leased_by(3, *range(60, 80)) == 20, "an equal part"
    check_invariants(rig.cache)
    assert leased_by(2, *range(40, 60)) == 0
    rig.cache.leases.end(1, [100])
    assert leased_by(3, *range(50, 60)) == 0, "it has more than a third"
    assert leased_by(2, *range(40, 60)) == 13
    assert leased_by(1, *range(20)) == 7, "what is left"
    check_invariants(rig.cache)


def test_a_session_that_was_refused_gets_what_others_give_back() -> None:
    """However fast they would take it again: until it has its part, or has not asked for a while."""
    rig = CacheRig(units=80, region_units=8, leased_share=0.5)
    namespace = rig.open("a")
    rig.store(namespace, keys_of(*range(80)))

    leased_by = partial(leased, rig, namespace)
    assert [leased_by(1, 1 + number, *range(8 * number, 8 * number + 8)) for number in range(5)] == [8] * 5
    assert leased_by(2, 10, *range(40, 60)) == 0
    for number in range(3):
        rig.cache.leases.end(1, [1 + number])
        assert leased_by(1, 1 + number, *range(60, 68)) == (0, 0, 4)[number]
    assert leased_by(2, 10, *range(40, 60)) == 20
    assert rig.cache.blocks.leased_bytes == 40 * UNIT
    rig.cache.end_session(2)
    assert leased_by(1, 20, *range(40, 60)) == 20, "nobody else is there"
    assert leased_by(3, 30, *range(70, 80)) == 0
    rig.cache.leases.end(1, [20])
    assert leased_by(1, 20, *range(40, 60)) == 0
    rig.clock.now += CLAIM_S
    assert leased_by(1, 20, *range(40, 60)) == 20
    check_invariants(rig.cache)


def test_blocks_that_a_copy_alone_pins_take_space_from_leases() -> None:
    """Else leases and copies together would pin the whole pool, or leases more than they may."""
    rig = CacheRig(units=16, region_units=8, leased_share=0.5)
    namespace = rig.open("a")
    rig.store(namespace, keys_of(*range(16)))
    copied = rig.blocks(namespace, keys_of(*range(6)))
    rig.cache.blocks.pin(copied)
    assert leased(rig, namespace, 1, 1, 8, 9, 10) == 2
    assert leased(rig, namespace, 1, 2, 0, 1, 2) == 3, "it is pinned anyway"
    rig.cache.blocks.pin(rig.blocks(namespace, keys_of(12, 13, 14, 15)))
    assert leased(rig, namespace, 1, 3, 3, 4, 5, 12, 13) == 3, "leases pin no more than eight"
    check_invariants(rig.cache)


def test_a_lookup_of_several_groups_is_cut_to_the_same_part_of_each() -> None:
    """By bytes that it pins anew, wherever among its keys they are."""
    rig = CacheRig(units=64, region_units=8, leased_share=0.25)
    namespace = rig.open("a", sizes=(UNIT, 2 * UNIT))
    rig.store(namespace, keys_of(*range(16)))
    rig.store(namespace, keys_of(*range(8)), group=1)
    rig.cache.lookup(namespace, 1, 1, [(0, keys_of(*range(8, 12)))])
    (first, second), lease = rig.cache.lookup(namespace, 2, 2, [(0, keys_of(*range(16))), (1, keys_of(*range(8)))])
    assert lease is not None
    assert len(lease.blocks) == first.count(R) + second.count(R)
    assert (first.rstrip(bytes([A])), second.rstrip(bytes([A]))) == (bytes([R] * 4), bytes([R] * 2))
    check_invariants(rig.cache)


def test_a_watcher_that_removes_itself_keeps_no_other_from_a_report() -> None:
    rig, noted = CacheRig(16, 4), list[str]()
    watchers = rig.cache.prompts.watchers

    def once(chains: Sequence[Chain]) -> None:
        noted.append("once")
        watchers.remove(once)

    watchers += [once, lambda chains: noted.append("always")]
    for lease_id in (1, 2):
        rig.cache.lookup(rig.open("a"), 1, lease_id, [(0, keys_of(1))])
        rig.cache.prompts.report()
    assert noted == ["once", "always", "always"]


@pytest.mark.parametrize("how", ["reset", "forgotten"])
def test_what_was_offered_is_not_told_of_a_namespace_that_is_gone(how: str) -> None:
    """Those who learn from it have been told that it is gone: they would keep what they then learn for ever."""
    rig = CacheRig(16, 4)
    namespace, told = rig.open("a"), list[bytes]()
    points: Any = SimpleNamespace(offered=lambda namespace, keys, parents, tokens: told.extend(keys))
    rig.cache.prompts.branch_points = points
    for is_gone in (False, True):
        groups = [(namespace.groups[0], keys_of(1))]
        rig.cache.prompts.offered(Offered(namespace, groups, [keys_of(1)], bytes(32), bytes(64)))
        if is_gone:
            rig.cache.reset(namespace) if how == "reset" else rig.cache.namespaces.forget(namespace)
        rig.cache.prompts.report()
    assert told == [keys_of(1)]


def test_requests_are_reported_once_and_a_benchs_never() -> None:
    rig = CacheRig(16, 4)
    noted: list[list[bytes]] = []
    rig.cache.prompts.watchers.append(lambda chains: noted.append([chain.keys for chain in chains]))
    namespace, bench = rig.open("a"), rig.open("bench 1")
    assert bench.of_bench
    for asked in (namespace, bench):
        rig.cache.lookup(asked, 1, 5, [(0, keys_of(1))])
        rig.cache.lookup(asked, 1, 5, [(0, keys_of(1))], again=True)
    assert noted == []
    rig.cache.prompts.report()
    rig.cache.prompts.report()
    assert noted == [[keys_of(1)]]
    for number in range(100):
        rig.cache.lookup(namespace, 1, 5, [(0, keys_of(number))])
    assert len(noted) == 101 - MAX_UNREPORTED
    rig.cache.prompts.report()
    assert noted[1:] == [[keys_of(number)] for number in range(100)], "none is lost, however many come at once"


def test_what_was_not_compared_is_found_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffd.cache.integrity.LOOKED_AT_ONCE", 5)
    rig = CacheRig(16, 4)
    namespace = rig.open("a")
    rig.store(namespace, keys_of(*range(7)))
    rig.commit(rig.begin(namespace, 0, 0, keys_of(7, 8, 9)), checksum=0)
    rig.store(namespace, keys_of(10, 11))
    expected = set(rig.blocks(namespace, keys_of(7, 8, 9)).tolist())
    for _ in range(2):
        found: list[int] = []
        while len(found) < 3:
            found += rig.cache.integrity.next_unverified(2).tolist()
        assert set(found) == expected
    rig.cache.reset(namespace)
    while rig.cache.background():
        pass
    assert (rig.cache.blocks.unverified_slots, rig.cache.integrity.next_unverified(9).size) == (0, 0)


def test_one_step_looks_at_few_slots_for_those_that_were_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large pool has very many, and the daemon does nothing else while it looks."""
    monkeypatch.setattr("kvoffd.cache.integrity.LOOKED_AT_ONCE", 2)
    monkeypatch.setattr("kvoffd.cache.integrity.LOOKS", 3)
    rig = CacheRig(16, 16)
    namespace = rig.open("a")
    rig.store(namespace, keys_of(*range(15)))
    rig.commit(rig.begin(namespace, 0, 0, keys_of(15)), checksum=0)
    (last,) = rig.blocks(namespace, keys_of(15)).tolist()
    assert last == 15
    steps = [rig.cache.integrity.next_unverified(9).tolist() for _ in range(6)]
    assert steps == [[], [], [15], [], [], [15]]


def test_recovered_blocks_are_announced_unless_they_went(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffd.cache.block_life.RECOVERED_AT_ONCE", 2)
    rig = CacheRig(16, 4)
    namespace, other = rig.open("a"), rig.open("b")
    rig.store(namespace, keys_of(1, 2, 3, 4, 5))
    rig.store(other, keys_of(1))
    blocks = np.concatenate([rig.blocks(namespace, keys_of(5, 4, 3, 2, 1)), rig.blocks(other, keys_of(1))])
    rig.cache.life.unannounced[blocks], rig.cache.life._to_announce = True, blocks  # as ``enter_recovered`` leaves them
    rig.events.index.clear()
    rig.cache.invalidate(namespace, [(0, keys_of(2))])
    rig.store(namespace, keys_of(2))
    rig.cache.reset(other)
    assert rig.cache.life.announce_recovered()
    rig.cache.invalidate(namespace, [(0, keys_of(1))])
    while rig.cache.life.announce_recovered():
        pass
    assert rig.events.index == {(namespace.fingerprint, 0, keys_of(number)) for number in (2, 3, 4, 5)}


# --- what is done by parts --------------------------------------------------------------------------


def test_a_store_sweeps_only_as_much_of_a_reset_as_it_needs() -> None:
    rig = full_rig(512)
    reset, other = rig.open("a"), rig.open("b")
    rig.store(reset, keys_of(*range(400)))
    rig.store(other, keys_of(*range(112)))
    rig.cache.reset(reset)
    assert rig.store(other, keys_of(200, 201)) == 2
    assert (other.ready_blocks, reset.by_state.blocks[DROPPED]) == (114, 398), "nobody else went"
    check_invariants(rig.cache)
    rig.cache.swept_at_once = 100
    for left in (298, 198, 98, 0):
        assert rig.cache.background() == (left > 0)
        assert reset.by_state.blocks[DROPPED] == left
    check_invariants(rig.cache)


def test_others_go_where_a_reset_leaves_blocks_of_another_size() -> None:
    rig = full_rig(512, region_units=64)
    large, small = rig.open("large", sizes=(4 * UNIT,)), rig.open("small")
    for begin in range(0, 448, 7):  # in each region
        rig.store(small, keys_of(*range(begin, begin + 7)))
    rig.store(large, keys_of(*range(16)))
    rig.cache.reset(small)
    assert rig.store(large, keys_of(100)) == 1
    assert small.by_state.blocks[DROPPED] == 384, "one region went, not all of the reset"
    check_invariants(rig.cache)


def test_a_namespace_at_its_quota_that_was_reset_gets_its_own_space() -> None:
    rig = full_rig(64, region_units=8)
    namespace, other = rig.open("a"), rig.open("b")
    rig.cache.quotas[namespace.fingerprint] = 32 * UNIT
    rig.store(other, keys_of(*range(32)))
    rig.store(namespace, keys_of(*range(32)))
    rig.cache.reset(namespace)
    assert rig.store(namespace, keys_of(40, 41)) == 2
    assert (namespace.by_state.blocks[DROPPED], other.ready_blocks) == (30, 32)


def test_leased_blocks_are_not_looked_at_for_each_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a namespace at its quota, whose own blocks come behind those of others."""
    monkeypatch.setattr("kvoffd.cache.block_table.MAX_SEEN", 8)
    monkeypatch.setattr("kvoffd.cache.victims.MAX_PASSED", 4)
    rig = full_rig(256, region_units=16)
    namespace, other = rig.open("a"), rig.open("b")
    rig.cache.quotas[namespace.fingerprint] = 32 * UNIT
    rig.store(other, keys_of(*range(200)))
    rig.store(namespace, keys_of(*range(32)))
    hold(rig, namespace, keys_of(*range(30)))
    stored = [rig.store(namespace, keys_of(100 + number)) for number in range(6)]
    assert stored == [0, 0, 0, 1, 1, 0], "eight are looked at each time, and pinned ones become the newest"
    assert rig.states(namespace, keys_of(*range(30))) == [R] * 30
    check_invariants(rig.cache)


def with_five_leases() -> tuple[CacheRig, Namespace]:
    """Leases on a block each, of which two end at once."""
    rig = full_rig(8)
    namespace = rig.open("a")
    rig.store(namespace, keys_of(*range(5)))
    for number in range(5):
        hold(rig, namespace, keys_of(number), lease_id=number)
    rig.cache.leases.ended_at_once = 2
    return rig, namespace


def test_the_leases_of_a_session_end_at_once_and_their_pins_by_parts() -> None:
    rig, namespace = with_five_leases()
    assert rig.cache.end_session(SESSION) == 5
    assert rig.cache.leases.count == 0
    assert not rig.cache.leases.by_session, "they do not count in the session's limits any more"
    assert rig.cache.blocks.pinned_blocks == 5
    with pytest.raises(UnknownLease):
        rig.cache.begin_load(namespace, 0, 4, 0, keys_of(4))
    check_invariants(rig.cache)
    assert rig.cache.end_session(SESSION) == 0
    for left in (3, 1):
        assert rig.cache.background()
        assert rig.cache.blocks.pinned_blocks == left
    hold(rig, namespace, keys_of(4), lease_id=4)
    assert not rig.cache.background()
    assert (len(rig.cache.leases.by_id), rig.cache.blocks.pinned_blocks) == (1, 1)
    check_invariants(rig.cache)


def test_the_leases_of_many_namespaces_or_sessions_that_end_together_are_unpinned_by_parts() -> None:
    rig = full_rig(16)
    spaces = [rig.open(name) for name in "abcd"]
    for number, namespace in enumerate(spaces):
        rig.store(namespace, keys_of(0, 1))
        hold(rig, namespace, keys_of(0), lease_id=number)
    rig.cache.leases.ended_at_once = 2
    assert rig.cache.end_session(SESSION) == 4
    pinned = [rig.cache.blocks.pinned_blocks]
    while rig.cache.background():
        pinned.append(rig.cache.blocks.pinned_blocks)
    for session in range(1, 5):
        assert leased(rig, spaces[0], session, 10 + session, 0, 1) == 2
    rig.cache.reset(spaces[0])
    assert (pinned, len(rig.cache.leases.by_id)) == ([4, 2], 4), "none of them in the turn in which all end"
    check_invariants(rig.cache)
    while rig.cache.background():
        pass
    for number, namespace in enumerate(spaces[1:]):
        hold(rig, namespace, keys_of(0), lease_id=number)
    rig.cache.reset(*spaces)
    assert len(rig.cache.leases.by_id) == 3
    check_invariants(rig.cache)


def test_many_leases_on_what_was_reset_are_void_at_once_and_end_by_parts() -> None:
    rig, namespace = with_five_leases()
    assert rig.cache.reset(namespace) == 5
    with pytest.raises(UnknownLease):
        rig.cache.begin_load(namespace, 0, 4, 0, keys_of(4))
    assert rig.cache.leases.end(SESSION, [3]) == rig.cache.end_session(SESSION) == rig.cache.tick() == 0
    rig.store(namespace, keys_of(7))
    hold(rig, namespace, keys_of(7), lease_id=4)
    for left in (4, 2, 1):
        assert rig.cache.background()
        assert rig.cache.blocks.pinned_blocks == left
    while rig.cache.background():
        pass
    assert list(rig.cache.leases.by_id) == [4]
    assert rig.cache.leases.of(SESSION).keys == 1
    check_invariants(rig.cache)


def test_the_end_of_very_many_leases_takes_few_steps_at_once() -> None:
    """The loop serves nobody else meanwhile: 16,000 leases of a session took 8 ms of it, 64,000 of a namespace 22."""
    rig = full_rig(8)
    namespace, other = rig.open("a"), rig.open("b")
    rig.store(namespace, keys_of(0))
    rig.store(other, keys_of(1))
    for number in range(4000):
        hold(rig, namespace, keys_of(0), lease_id=number)
        hold(rig, other, keys_of(1), lease_id=1_000_000 + number)
    assert rig.cache.leases.of(SESSION) == (8000, 8000, 2 * rig.unit)
    of_session = rig.cache.leases.by_session[SESSION][namespace].leases
    assert lines_of(lambda: rig.cache.reset(namespace)) < 1000
    assert rig.cache.leases._to_unpin[0] is of_session, "no lease is copied: its memory would be read"
    assert rig.cache.leases.of(SESSION) == (4000, 4000, rig.unit)
    assert lines_of(lambda: rig.cache.end_session(SESSION)) < 1000
    assert rig.cache.leases.of(SESSION) == (0, 0, 0)
    check_invariants(rig.cache)
    while rig.cache.background():
        pass
    assert not rig.cache.leases.by_id
    check_invariants(rig.cache)


def test_a_step_ends_overdue_leases_or_drops_partial_blocks_and_the_next_steps_do_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tick did both at once, 1,024 of each: 5 to 15 ms."""
    monkeypatch.setattr("kvoffd.cache.cache.DROPPED_AT_ONCE", 3)
    rig = full_rig(32)
    namespace, half = rig.open("a"), rig.open("b", world_size=2)
    rig.store(namespace, keys_of(*range(5)))
    rig.commit(rig.begin(half, 0, 0, keys_of(*range(5))))
    for number in range(5):
        hold(rig, namespace, keys_of(number), lease_id=number)
    rig.cache.leases.ended_at_once = 2
    rig.clock.now += 61
    counts = [(rig.cache.leases.count, len(rig.cache.life.partial))]
    assert rig.cache.tick() == 2
    more = True
    while more:
        counts.append((rig.cache.leases.count, len(rig.cache.life.partial)))
        more = rig.cache.background()
    assert counts == [(5, 5), (3, 5), (1, 5), (0, 5), (0, 2), (0, 0)]
    assert (rig.cache.blocks.pinned_blocks, half.counters.partial_blocks, rig.cache.tick()) == (0, 5, 0)
    check_invariants(rig.cache)


def test_overdue_leases_behind_ended_ones_wait_for_no_other_tick() -> None:
    """A tick saw only the ended ones, whose blocks are still to be unpinned, and left the others to the next one."""
    rig = full_rig(32)
    namespace = rig.open("a")
    rig.store(namespace, keys_of(*range(5)))
    for number in range(4):
        hold(rig, namespace, keys_of(number), lease_id=number)
    assert leased(rig, namespace, SESSION + 1, 4, 4) == 1
    rig.cache.leases.ended_at_once = 2
    rig.clock.now += 61
    assert rig.cache.end_session(SESSION) == 4
    rig.cache.tick()
    while rig.cache.background():
        pass
    assert (rig.cache.leases.count, rig.cache.blocks.pinned_blocks) == (0, 0)
    check_invariants(rig.cache)


def test_a_step_stops_unpinning_after_some_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended 1,024 leases, of 8,192 blocks each if need be."""
    monkeypatch.setattr("kvoffd.cache.leases.UNPINNED_AT_ONCE", 4)
    rig = full_rig(16)
    namespace = rig.open("a")
    rig.store(namespace, keys_of(*range(12)))
    for number in range(4):
        hold(rig, namespace, keys_of(*range(3 * number, 3 * number + 3)), lease_id=number)
    assert rig.cache.end_session(SESSION) == 4
    pinned = [rig.cache.blocks.pinned_blocks]
    while rig.cache.background():
        pinned.append(rig.cache.blocks.pinned_blocks)
    assert (pinned, rig.cache.blocks.pinned_blocks) == ([6], 0)
    check_invariants(rig.cache)


def test_a_lookup_gets_what_many_ended_leases_still_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all the steps that this takes: it cannot wait for them, and the engine would compute what it does not get."""
    monkeypatch.setattr("kvoffd.cache.leases.UNPINNED_AT_ONCE", 4)
    rig = CacheRig(48, 4, leased_share=0.5)
    namespace = rig.open("a")
    rig.store(namespace, keys_of(*range(48)))
    for number in range(8):
        assert leased(rig, namespace, 1, 1 + number, *range(3 * number, 3 * number + 3)) == 3
    rig.cache.end_session(1)
    assert rig.cache.blocks.pinned_blocks == 18
    assert leased(rig, namespace, 2, 10, *range(24, 48)) == 24
    check_invariants(rig.cache)


def test_a_lookup_unpins_no_more_than_its_own_size_and_some_if_that_makes_no_space(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It unpinned all ended leases, in one turn of the loop, where an active one pins their blocks too."""
    monkeypatch.setattr("kvoffd.cache.leases.UNPINNED_FOR_LOOKUP", 12)
    rig = CacheRig(48, 4, leased_share=0.5)
    namespace = rig.open("a")
    rig.store(namespace, keys_of(*range(48)))
    assert leased(rig, namespace, 1, 1, *range(18)) == 18
    for number in range(100):
        assert leased(rig, namespace, 2, 2 + number, 0) == 1
    rig.cache.leases.ended_at_once = 2
    rig.cache.end_session(2)
    assert leased(rig, namespace, 3, 1000, *range(24, 40)) < 16
    ended = 101 + 1 - len(rig.cache.leases.by_id)
    assert 2 * ended in range(12 + 2 * 16, 12 + 2 * 16 + 4), "a lease and a block each, and the rest of the last step"
    while rig.cache.background():
        pass
    check_invariants(rig.cache)


def test_a_save_of_many_namespaces_compresses_none_that_have_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them took 6 ms, at each opening and each reset. Those that did not change are not encoded again either."""
    rig, encoded, levels = CacheRig(64 << 10, 64), list[object](), list[int]()
    spaces = [rig.open(str(number)) for number in range(64)]
    encode, compress = msgspec.msgpack.encode, zlib.compress
    monkeypatch.setattr(msgspec.msgpack, "encode", lambda record: encoded.append(record) or encode(record))
    monkeypatch.setattr(zlib, "compress", lambda content, level: levels.append(level) or compress(content, level))
    rig.cache.reset(spaces[5])
    rig.cache.reset(spaces[6], spaces[7], generation=3)
    assert sum(isinstance(one, NamespaceRecord) for one in encoded) == 3
    assert levels == [0, 0]
    rig.cache.namespaces.forget(spaces[8])
    rig.cache.namespaces.save()
    snapshot = rig.successor()[0].cache.table.load_namespaces(NamespaceSnapshot)
    known = [(one.number, one.label, one.generation) for one in rig.cache.namespaces.values()]
    assert [(one.number, one.label, one.generation) for one in snapshot.namespaces] == known
    assert len(known) == 63


def test_namespaces_that_do_not_fit_are_those_with_the_fewest_blocks(caplog: pytest.LogCaptureFixture) -> None:
    rig = CacheRig(256, 16)
    rig.store(rig.open("most"), keys_of(1, 2, 3))
    for _ in range(100):
        namespace = Namespace(os.urandom(32), os.urandom(100).hex(), 1, 8, [GroupSpec("full", 16)], "{}")
        rig.cache.namespaces.open(namespace)
        rig.cache.namespaces.register_rank(namespace, 0, [UNIT], None)
    rig.cache.reset(namespace)
    known = {one.fingerprint: one.number for one in rig.cache.namespaces.values()}
    snapshot = rig.successor()[0].cache.table.load_namespaces(NamespaceSnapshot)
    assert 10 < len(snapshot.namespaces) < 60
    assert snapshot.namespaces[0].label == "most"
    assert all(one.number == known[one.fingerprint] for one in snapshot.namespaces), "stale blocks would come back"
    assert "Too many namespaces" in caplog.text


# --- making space in odd cases --------------------------------------------------------------------


def order(rig: CacheRig) -> list[int]:
    """Keys of 8 bytes in the order in which they would go."""
    every = np.concatenate([np.empty(0, np.uint32), *rig.cache.order.candidates()])
    keys = [key for _, alike in rig.cache.blocks.by_group(every) for key in rig.cache.blocks.split_keys(alike, 8)]
    return [int.from_bytes(key, "big") for key in keys]


def with_pinned_first(policy: str, pinned: int, others: int) -> tuple[CacheRig, Namespace]:
    """A full pool, and its namespace. The blocks that are next to be evicted are pinned, by a lookup of which the
    policy does not hear: the prompt was counted before."""
    rig = CacheRig(pinned + others, pinned + others, policy)
    namespace = rig.open("a")
    rig.store(namespace, keys_of(*range(pinned)))
    rig.store(namespace, keys_of(*range(pinned, pinned + others)))
    rig.cache.lookup(namespace, 1, 5, [(0, keys_of(*range(pinned)))], again=True)
    assert {*order(rig)[:pinned]} == {*range(pinned)}
    return rig, namespace


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_pinned_blocks_are_not_passed_over_for_each_eviction(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``learned`` put them where they were. Once they are unpinned, they can be evicted again."""
    monkeypatch.setattr("kvoffd.cache.victims.MAX_SKIPPED_PINNED", 2)
    rig, namespace = with_pinned_first(policy, 4, 4)
    rig.store(namespace, keys_of(8))
    assert not {*order(rig)} & {*range(4)}, "each eviction would look at them"
    rig.store(namespace, keys_of(9))
    assert rig.states(namespace, keys_of(*range(4), 8, 9)) == [R] * 6
    check_invariants(rig.cache)
    rig.cache.leases.end(1, [5])
    assert len(order(rig)) == 8
    for number in range(10, 18):
        rig.store(namespace, keys_of(number))
    assert rig.states(namespace, keys_of(*range(4), *range(10, 18))) == [A] * 4 + [R] * 8
    check_invariants(rig.cache)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_stores_reach_what_lies_behind_any_number_of_pinned_blocks(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They got no space at all while more blocks were pinned, and next to go, than one eviction considers."""
    monkeypatch.setattr("kvoffd.cache.victims.BATCH", 4)
    monkeypatch.setattr("kvoffd.cache.victims.MAX_CONSIDERED", 8)
    monkeypatch.setattr("kvoffd.cache.victims.MAX_SKIPPED_PINNED", 2)
    rig, namespace = with_pinned_first(policy, 40, 8)
    stored = [rig.store(namespace, keys_of(number)) for number in range(100, 110)]
    assert stored[-1] == 1, f"{stored}"
    check_invariants(rig.cache)


def test_an_eviction_passes_over_some_pinned_blocks_and_steps_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvoffd.cache.victims.MAX_SKIPPED_PINNED", 2)
    monkeypatch.setattr("kvoffd.cache.hints.PASSED_AT_ONCE", 3)
    rig, namespace = with_pinned_first("lru", 8, 8)
    left = []
    rig.store(namespace, keys_of(100))
    while True:
        left.append(len({*range(8)} & {*order(rig)}))
        if not rig.cache.background():
            break
    assert left == [5, 2, 0], "the next eviction looks at none of them"
    check_invariants(rig.cache)


def test_dropped_blocks_that_are_pinned_do_not_hide_why_there_is_no_space() -> None:
    """A region is pinned whole, and dropped; of another one a single block is. The others of it could go, but no region
    becomes free for the other size."""
    rig = CacheRig(8, 4)
    small, large = rig.open("small"), rig.open("large", sizes=(2 * UNIT,))
    keys = [keys_of(number) for number in range(8)]
    rig.store(small, b"".join(keys))
    regions = [int(rig.blocks(small, key)[0]) // rig.slots.slots_per_region for key in keys]
    first = b"".join(key for key, region in zip(keys, regions, strict=True) if region == 0)
    rig.cache.lookup(small, 1, 5, [(0, first)])
    rig.cache.lookup(small, 1, 6, [(0, keys[regions.index(1)])])
    rig.cache.invalidate(small, [(0, first)])
    usage = rig.cache.life.usage
    assert (usage.ready, usage.dropped, usage.pinned) == (4 * UNIT, 4 * UNIT, 5 * UNIT)
    rig.begin(large, 0, 0, keys_of(100))
    assert large.counters.no_space == {"sizes": 1}
    rig.cache.leases.end(1, [5])
    check_invariants(rig.cache)


def test_ranks_with_slots_of_different_sizes_evict_whole_blocks() -> None:
    rig = CacheRig(units=16, region_units=4)
    namespace = rig.open_uneven("u", [UNIT, 2 * UNIT])
    for number in range(40):
        assert rig.store(namespace, keys_of(number)) == 1
        check_invariants(rig.cache)
    assert namespace.ready_blocks >= 4


def sizes(rig: CacheRig, large: int) -> tuple[Namespace, Namespace]:
    return rig.open("small"), rig.open("large", sizes=(large * UNIT,))


def test_the_region_with_more_old_blocks_is_taken_over() -> None:
    rig = CacheRig(8, 4)
    small, large = sizes(rig, 4)
    for number in (*range(8), 1, 2, 3, 7):
        rig.store(small, keys_of(number))
        rig.look(small, keys_of(number))
    # The oldest is 0, alone in its region; then come three of the other.
    assert rig.store(large, keys_of(1)) == 1
    assert rig.states(small, keys_of(*range(8))) == [R] * 4 + [A] * 4


def test_a_region_too_short_does_not_end_the_search() -> None:
    rig = CacheRig(units=6, region_units=4)
    small, large = sizes(rig, 4)
    rig.store(small, keys_of(*range(6)))
    in_full_region = [number for number in range(6) if rig.blocks(small, keys_of(number))[0] < 4]
    rig.look(small, keys_of(*in_full_region))
    assert rig.store(large, keys_of(1)) == 1
    assert rig.states(large, keys_of(1)) == [R]
    check_invariants(rig.cache)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_region_with_a_retained_block_goes_after_the_others(policy: str) -> None:
    rig = CacheRig(16, 4, policy)
    small, large = sizes(rig, 4)
    for number in range(16):
        rig.store(small, keys_of(number))
    rig.cache.hint(small, HintAction.RETAIN, [(0, keys_of(1))], 50, 60.0)
    for number in range(3):
        assert rig.store(large, keys_of(number)) == 1
    assert rig.states(small, keys_of(1)) == [R]
    check_invariants(rig.cache)
    for number in range(3):
        hold(rig, large, keys_of(number), LEASE + number)
    assert rig.store(large, keys_of(4)) == 1, "there is nothing else"
    assert rig.states(small, keys_of(1)) == [A]
    check_invariants(rig.cache)


def test_a_store_of_a_low_score_takes_no_region_with_blocks_of_a_higher_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = CacheRig(8, 4)
    small, large = sizes(rig, 4)
    for number in range(8):
        rig.store(small, keys_of(number))
    low, every = rig.blocks(small, keys_of(4, 5, 6)), rig.policy.first
    monkeypatch.setattr(rig.policy, "first", lambda count, below=inf: every(count) if below == inf else low[:count])
    monkeypatch.setattr(rig.policy, "admit", lambda group, keys, starts: Admission([(len(keys) // 8, 1.0)], -inf))
    monkeypatch.setattr(rig.policy, "rejected", lambda group, keys: None)
    (refused,) = rig.begin(large, 0, 0, keys_of(1))
    assert (refused.copy, refused.rejected) == ([], [0])
    assert rig.states(small, keys_of(*range(8))) == [R] * 8
    low = rig.blocks(small, keys_of(4, 5, 6, 7))
    assert rig.store(large, keys_of(1)) == 1
    assert rig.states(small, keys_of(*range(8))) == [R] * 4 + [A] * 4


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_busy_namespace_grows_at_the_cost_of_an_idle_one(policy: str) -> None:
    rig = CacheRig(units=64, region_units=8, policy=policy)
    idle, busy = sizes(rig, 2)
    rig.store(idle, keys_of(*range(64)))
    for number in range(200):
        assert rig.store(busy, keys_of(number)) == 1
    check_invariants(rig.cache)
    assert busy.ready_blocks >= 28


# --- traffic under a quota ------------------------------------------------------------------------


def set_quota(rig: CacheRig, namespace: Namespace, units: int) -> None:
    rig.cache.quotas[namespace.fingerprint] = units * UNIT


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_namespace_with_its_quota_takes_from_itself(policy: str) -> None:
    rig = CacheRig(units=64, region_units=8, policy=policy)
    polite, flooding = rig.open("polite"), rig.open("flooding")
    set_quota(rig, flooding, 16)
    rig.store(polite, keys_of(*range(40)))
    for first in range(0, 400, 4):
        for _ in range(2):
            rig.ask(flooding, keys_of(*range(first, first + 4)))
        assert flooding.held_bytes <= 16 * UNIT
    assert rig.states(polite, keys_of(*range(40))) == [R] * 40
    assert flooding.ready_blocks > 8
    check_invariants(rig.cache)


@pytest.mark.parametrize("most", [2, 512])
def test_a_namespace_over_its_quota_keeps_what_a_hint_retains(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others' blocks come before its own in the order, so it gives what it stored first, however few may go at once."""
    monkeypatch.setattr("kvoffd.cache.space.MAX_OVER_QUOTA", most)
    monkeypatch.setattr("kvoffd.cache.victims.MAX_PASSED", 2)
    monkeypatch.setattr("kvoffd.cache.hints.BATCH", 2)
    rig = CacheRig(units=32, region_units=4)
    other, limited = rig.open("other"), rig.open("limited")
    rig.store(other, keys_of(*range(8)))
    for number in range(8):
        rig.store(limited, keys_of(number))
    set_quota(rig, limited, 8)
    rig.cache.hint(limited, HintAction.RETAIN, [(0, keys_of(0, 1))], 50, 60.0)
    assert rig.store(limited, keys_of(10, 11)) == 2
    assert rig.states(limited, keys_of(*range(5), 10, 11)) == [R, R, A, A, R, R, R]
    hold(rig, limited, keys_of(*range(4, 8), 10, 11))
    assert rig.store(limited, keys_of(12, 13)) == 2, "there is nothing else"
    assert rig.states(limited, keys_of(0, 1)) == [A, A]
    check_invariants(rig.cache)


def test_a_quota_far_below_is_reached_in_several_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffd.cache.space.MAX_OVER_QUOTA", 4)
    rig = CacheRig(units=32, region_units=4)
    namespace = rig.open("a")
    rig.store(namespace, keys_of(*range(30)))
    set_quota(rig, namespace, 10)
    held = [(rig.store(namespace, keys_of(100 + n)), namespace.ready_blocks) for n in range(7)]
    assert held == [(0, 26), (0, 22), (0, 18), (0, 14), (0, 10), (1, 10), (1, 10)]
    set_quota(rig, namespace, 2)
    assert rig.store(namespace, keys_of(*range(200, 206))) == 0
    assert namespace.ready_blocks == 4, "a large store evicts as many as it has blocks"
    check_invariants(rig.cache)
