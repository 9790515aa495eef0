"""What every eviction policy must do, whichever it is."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from kvoffd.cache import policies
from kvoffd.cache.namespace import Block, Namespace
from kvoffd.cache.policies import (
    DECLINED,
    POLICY_NAMES,
    Chain,
    EvictionPolicy,
    PolicyState,
    keeps_record,
    make_policy,
    remembers_keys,
)
from kvoffd.cache.policies.arc import Policy as ArcPolicy
from kvoffd.cache.policies.gate import REMEMBERED_POOLS
from kvoffd.errors import KvoffdError
from kvoffd_proto.admin import KeyWorth
from kvoffd_proto.messages import ABSENT, BENCH_LABEL, READY
from tests.kit.cache_harness import CacheHarness, begin_store, keys_of
from tests.kit.invariants import check_invariants


def blocks_of(count: int, first: int = 0) -> list[Block]:
    namespace = NAMESPACE
    return [Block(namespace, 0, number.to_bytes(8, "big")) for number in range(first, first + count)]


NAMESPACE = CacheHarness().open()


@pytest.fixture(params=POLICY_NAMES)
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    return make_policy(request.param, 1 << 20)


def fill(policy: EvictionPolicy, blocks: list[Block]) -> None:
    policy.insert(blocks)


def touch(policy: EvictionPolicy, blocks: list[Block]) -> None:
    policy.requested([Chain(NAMESPACE, 0, b"".join(block.key for block in blocks), blocks)])


def test_candidates_are_exactly_the_inserted_blocks(policy: EvictionPolicy) -> None:
    blocks = blocks_of(10)
    fill(policy, blocks)
    touch(policy, blocks[3:6])
    candidates = list(policy.candidates())
    assert len(candidates) == len(policy) == 10
    assert set(candidates) == set(blocks)


def test_untouched_blocks_go_in_the_order_they_came(policy: EvictionPolicy) -> None:
    blocks = blocks_of(5)
    fill(policy, blocks)
    assert list(policy.candidates()) == blocks


def test_older_blocks_go_before_all_others_in_their_order(policy: EvictionPolicy) -> None:
    blocks = blocks_of(12)
    fill(policy, blocks[6:8])
    policy.insert(blocks[4:6], older=True)
    fill(policy, blocks[8:10])
    policy.insert(blocks[1:4], older=True)
    policy.insert(blocks[:1], older=True)
    fill(policy, blocks[10:])
    assert list(policy.candidates()) == blocks
    assert len(policy) == 12
    with pytest.raises(AssertionError):
        policy.insert(blocks[:1], older=True)


def test_older_blocks_go_before_what_was_used_since(policy: EvictionPolicy) -> None:
    blocks = blocks_of(9)
    fill(policy, blocks[3:6])
    touch(policy, blocks[4:6])
    policy.insert(blocks[:3], older=True)
    fill(policy, blocks[6:])
    assert list(policy.candidates())[:3] == blocks[:3]
    touch(policy, [blocks[0]])
    assert list(policy.candidates())[:2] == blocks[1:3]


@pytest.mark.parametrize("evicted", [True, False])
def test_a_key_that_went_may_come_again_as_an_older_block(policy: EvictionPolicy, evicted: bool) -> None:
    blocks, (again,) = blocks_of(3), blocks_of(1)
    fill(policy, blocks)
    policy.remove(blocks[:1], evicted)
    policy.insert([again], older=True)
    assert list(policy.candidates()) == [again, *blocks[1:]]
    assert policy.ghosts == 0 or not isinstance(policy, ArcPolicy)


def test_a_touched_block_goes_after_the_untouched(policy: EvictionPolicy) -> None:
    blocks = blocks_of(5)
    fill(policy, blocks)
    touch(policy, [blocks[0]])
    assert list(policy.candidates()) == [*blocks[1:], blocks[0]]


def test_a_touched_chain_goes_tail_first(policy: EvictionPolicy) -> None:
    chain = blocks_of(4)
    fill(policy, chain)
    touch(policy, chain)
    assert list(policy.candidates()) == chain[::-1]


@pytest.mark.parametrize("name", ["lru", "arc", "gate"])
def test_of_a_chain_that_was_touched_in_part_the_rest_goes_first(name: str) -> None:
    policy, chain = make_policy(name, 1 << 20), blocks_of(4)
    fill(policy, chain)
    touch(policy, chain)
    touch(policy, chain[:2])
    assert list(policy.candidates()) == [chain[3], chain[2], chain[1], chain[0]]


@pytest.mark.parametrize("evicted", [True, False])
def test_a_removed_block_is_no_candidate(policy: EvictionPolicy, evicted: bool) -> None:
    blocks = blocks_of(4)
    fill(policy, blocks)
    touch(policy, blocks[2:])
    policy.remove([blocks[0]], evicted)
    policy.remove([blocks[3]], evicted)
    assert list(policy.candidates()) == blocks[1:3]
    assert len(policy) == 2


@pytest.mark.parametrize("evicted", [True, False])
def test_a_key_that_went_may_come_again(policy: EvictionPolicy, evicted: bool) -> None:
    first, again = blocks_of(1)[0], blocks_of(1)[0]
    policy.insert([first])
    policy.remove([first], evicted)
    policy.insert([again])
    assert list(policy.candidates()) == [again]


def test_inserting_a_block_twice_is_caught(policy: EvictionPolicy) -> None:
    block = blocks_of(1)[0]
    policy.insert([block])
    with pytest.raises(AssertionError):
        policy.insert([block])


def test_an_empty_policy_has_no_candidates(policy: EvictionPolicy) -> None:
    assert list(policy.candidates()) == []
    assert len(policy) == 0


def test_touching_nothing_changes_nothing(policy: EvictionPolicy) -> None:
    blocks = blocks_of(3)
    fill(policy, blocks)
    touch(policy, [])
    assert list(policy.candidates()) == blocks


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_what_else_is_asked_of_it_has_an_answer(name: str) -> None:
    policy, blocks = make_policy(name, 1 << 20), blocks_of(4)
    fill(policy, blocks[:3])
    touch(policy, blocks[:1])
    policy.remove(blocks[1:3], evicted=True)
    absent = [block.key for block in blocks[1:]]
    offers = policy.offers(NAMESPACE, 0, absent, [0, 2])
    assert sum(offer.keys for offer in offers) == 3
    if any(offer.worth == DECLINED for offer in offers):
        policy.declined(NAMESPACE, 0, absent)
    assert 0 <= policy.return_chance(blocks[0], 1 << 20) <= 1
    assert isinstance(policy.describe(), PolicyState)
    assert isinstance(policy.worth_of(NAMESPACE, 0, blocks[0].key), KeyWorth | None)
    assert remembers_keys(name) or policy.ghosts == policy.nbytes == 0
    if record := b"".join(policy.record()):
        assert keeps_record(name)
        make_policy(name, 1 << 20).go_on(record)


def test_an_unknown_policy_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match="learned, arc, gate, lru"):
        make_policy("fifo", 1 << 20)


def _raises(pool_bytes: int) -> object:
    raise RuntimeError("no licence")


def _lacks(pool_bytes: int) -> object:
    return object()


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("no_such_module:x", "No module named"),
        (f"{__name__}:missing", "has no attribute 'missing'"),
        (f"{__name__}:_raises", "RuntimeError: no licence"),
        (f"{__name__}:_lacks", "it has no requested, insert,"),
    ],
)
def test_a_policy_of_another_package_that_fails_is_named(place: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "_OTHERS", {"mine": EntryPoint("mine", place, policies.ENTRY_POINTS)})
    monkeypatch.setattr(policies, "POLICY_NAMES", (*policies.POLICY_NAMES, "mine"))
    with pytest.raises(KvoffdError, match=f"eviction policy mine, {place}, cannot be made: .*{why}"):
        make_policy("mine", 1 << 20)


def evict_oldest(policy: EvictionPolicy) -> Block:
    victim = next(policy.candidates())
    policy.remove([victim], evicted=True)
    return victim


def test_arc_keeps_reused_blocks_through_a_scan() -> None:
    policy = ArcPolicy(1 << 20)
    reused = blocks_of(5)
    fill(policy, reused)
    touch(policy, reused)
    fill(policy, blocks_of(5, first=100))
    for scanned in blocks_of(200, first=200):
        evict_oldest(policy)
        policy.insert([scanned])
    assert set(reused) <= set(policy.candidates())


def test_arc_gives_once_seen_blocks_more_room_when_their_ghosts_come_back() -> None:
    policy = ArcPolicy(1 << 20)
    reused = blocks_of(4)
    fill(policy, reused)
    touch(policy, reused)
    fill(policy, blocks_of(4, first=100))
    # Twice the victim comes back at once: it should not have gone, so next a reused block has to give.
    for number in range(2):
        came_back = blocks_of(1, first=100 + number)[0]
        assert evict_oldest(policy).key == came_back.key
        policy.insert([came_back])
    assert evict_oldest(policy) in reused


def test_arc_remembers_no_more_than_about_what_the_pool_holds() -> None:
    policy = ArcPolicy(1 << 20)
    fill(policy, blocks_of(50))
    for number, block in enumerate(blocks_of(2000, first=100)):
        evict_oldest(policy)
        policy.insert([block])
        if number % 3 == 0:
            touch(policy, [block])
    assert 0 < policy.ghosts <= 100
    assert len(policy) == 50


def test_of_small_blocks_arc_remembers_a_fiftieth_of_the_pool_s_bytes_at_most() -> None:
    policy = ArcPolicy(1 << 20)
    fill(policy, blocks := blocks_of(1000))
    touch(policy, blocks[:500])
    for block in blocks_of(500, first=2000):
        evict_oldest(policy)
        policy.insert([block])
    assert 0.9 < policy.nbytes / (2**20 / 50) <= 1


def test_arc_forgets_blocks_that_were_dropped_and_not_evicted() -> None:
    policy = ArcPolicy(1 << 20)
    blocks = blocks_of(10)
    fill(policy, blocks)
    for block in blocks[:5]:
        policy.remove([block], evicted=False)
    assert policy.ghosts == 0


def ask(rig: CacheHarness, namespace: Namespace, keys: bytes, again: bool = False) -> bytes:
    """A request's lookup, all that follows its reply included."""
    answer = rig.cache.lookup(namespace, 7, 1, [(0, keys)], again=again)
    rig.cache.touch(7)
    rig.cache.release(1, [7])
    return answer.states[0]


def test_the_gate_stores_what_is_asked_for_again_and_says_what_it_declines() -> None:
    rig = CacheHarness(policy="gate")
    namespace = rig.open(world_size=2)
    for again in (False, True, True):  # one request, which waits
        ask(rig, namespace, keys_of(1, 2, 3), again)
    for rank in range(2):
        ticket = begin_store(rig.cache, namespace, rank, 0, keys_of(1, 2, 3))
        assert (ticket.copy, ticket.declined, ticket.dropped) == ([], [0, 1, 2], [])
        rig.cache.commit_store(ticket)
    ask(rig, namespace, keys_of(1, 2, 4))
    for rank in range(2):
        ticket = begin_store(rig.cache, namespace, rank, 0, keys_of(1, 2, 4))
        assert (ticket.copy, ticket.declined, ticket.dropped) == ([0, 1], [2], [])
        rig.cache.commit_store(ticket)
    assert ask(rig, namespace, keys_of(1, 2, 4)) == bytes([READY, READY, ABSENT])
    assert (namespace.counters.declined_keys, namespace.counters.dropped_keys) == (8, 0)
    check_invariants(rig.cache)


def test_the_gate_remembers_what_only_a_store_brought() -> None:
    rig = CacheHarness(policy="gate")
    namespace = rig.open()
    assert rig.put(namespace, keys_of(5)) == 0
    assert ask(rig, namespace, keys_of(5)) == bytes([ABSENT])
    rig.put(namespace, keys_of(5))
    assert ask(rig, namespace, keys_of(5)) == bytes([READY])


def test_the_gate_remembers_a_bounded_number_of_keys() -> None:
    rig = CacheHarness(regions=100, policy="gate")  # 400 blocks
    namespace = rig.open()
    for first in range(0, 20_000, 10):
        ask(rig, namespace, keys_of(*range(first, first + 10)))
    assert 0 < rig.cache.policy.ghosts <= 2 * REMEMBERED_POOLS * 400
    assert 48 + 16 < rig.cache.policy.nbytes / rig.cache.policy.ghosts < 48 + 16 * 7


def test_what_a_bench_stores_is_not_declined() -> None:
    rig = CacheHarness(policy="gate")
    namespace = rig.open(f"{BENCH_LABEL}lookup")
    assert rig.put(namespace, keys_of(1, 2)) == 0
    assert ask(rig, namespace, keys_of(1, 2)) == bytes([READY, READY])


def test_an_operator_stores_what_a_policy_would_decline() -> None:
    rig = CacheHarness(policy="gate")
    namespace = rig.open()
    ticket = rig.cache.begin_stores(namespace, 0, 0, [keys_of(1), keys_of(2)], {}, starts=None)
    assert (ticket.copy, ticket.declined) == ([0, 1], [])
    rig.cache.commit_store(ticket)
    assert namespace.ready_blocks == 2
