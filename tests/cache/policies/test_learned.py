"""The policy that learns what comes back: its books under any order of requests, and what it makes of made-up loads."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable
from itertools import count, cycle, islice
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffd.cache.namespace import Block, Namespace
from kvoffd.cache.policies import Chain, learned, make_policy
from kvoffd.cache.policies.learned import BadRecord, Policy
from kvoffd.simulate.replay import replay
from kvoffd.simulate.trace import KEY_BYTES, Trace
from kvoffd_proto.messages import READY
from tests.kit.cache_harness import CacheHarness, FoldedEvents, adopt_all, begin_store, keys_of, made
from tests.kit.invariants import check_invariants
from tests.kit.learned_check import check_learned, policy_of
from tests.kit.made_up_loads import LOADS, Traffic, chat_among_single_requests

CLASSES, BINS, EPOCHS_KEPT, REMEMBERED_POOLS = 77, 17, 320, 16
"""As in learned.h and spans.c."""
GHOST_BYTES = 100


def bytes_of(policy: Policy) -> int:
    """Memory of what it knows of keys."""
    empty = make_policy("learned", 1 << 20)
    assert isinstance(empty, Policy)
    return int(policy.known.nbytes - empty.known.nbytes)


def check(rig: CacheHarness) -> None:
    check_learned(policy_of(rig))


def ask(rig: CacheHarness, namespace: Namespace, chain: list[int], group: int = 0) -> bytes:
    answer = rig.cache.lookup(namespace, 7, 1, [(group, keys_of(*chain))])
    rig.cache.touch(7)
    rig.cache.release(1, [7])
    return answer.states[0]


chains = st.lists(st.integers(0, 40), max_size=12)
prefixes = st.builds(lambda first, length: list(range(first, first + length)), st.integers(0, 30), st.integers(0, 20))
steps = st.one_of(
    st.tuples(st.just("ask"), st.one_of(chains, prefixes), st.integers(0, 1)),
    st.tuples(st.just("store"), st.one_of(chains, prefixes).map(lambda c: list(dict.fromkeys(c))), st.integers(0, 1)),
    st.tuples(st.just("drop"), chains, st.integers(0, 1)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(steps, max_size=60))
def test_its_books_are_right_whatever_is_asked_for_stored_and_dropped(order: list[tuple[str, list[int], int]]) -> None:
    rig = CacheHarness(regions=3, region_bytes=4096 * 4, policy="learned")
    namespace = rig.open(shard_bytes=(4096, 8192))
    for what, chain, group in order:
        if what == "ask":
            ask(rig, namespace, chain, group)
        elif what == "store":
            rig.put(namespace, keys_of(*chain), group)
        else:
            made(rig.cache.invalidate(namespace, [(group, keys_of(*chain))]))
        check(rig)
    check_invariants(rig.cache)


orders = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.one_of(chains, prefixes)),
        st.tuples(st.sampled_from(["insert", "older", "remove"]), st.integers(1, 12)),
    ),
    max_size=50,
)


@settings(max_examples=150, deadline=None)
@given(orders, st.randoms(use_true_random=False))
def test_its_books_are_right_whatever_is_taken_over_meanwhile(
    order: list[tuple[str, list[int] | int]], rng: random.Random
) -> None:
    """With a record of what was asked for: keys that it knows are as old as it says."""
    rig = CacheHarness(regions=3, region_bytes=4096 * 4, policy="learned")
    namespace, policy = rig.open(), policy_of(rig)
    inside: dict[int, Block] = {}
    for what, chain in order:
        if isinstance(chain, list):
            keys = keys_of(*chain)
            policy.requested([Chain(namespace, 0, keys, [inside[key] for key in chain if key in inside])])
        elif what == "remove":
            if gone := rng.sample(sorted(inside), min(chain, len(inside))):
                policy.remove([inside.pop(key) for key in gone], evicted=rng.random() < 0.5)
        elif fresh := [key for key in rng.sample(range(60), chain) if key not in inside]:
            inside.update((key, Block(namespace, 0, keys_of(key))) for key in fresh)
            policy.insert([inside[key] for key in fresh], older=what == "older")
        check(rig)


def test_newest_first_or_oldest_first_blocks_are_taken_over_into_one_order() -> None:
    """A prefix that all share was stored first and used last."""
    rig = CacheHarness(regions=40, region_bytes=4096 * 16, policy="learned")
    namespace = rig.open()
    chains = [[*range(8), *range(100 * number, 100 * number + 4)] for number in range(1, 100)]
    for chain in chains:
        ask(rig, namespace, chain)
        rig.put(namespace, keys_of(*chain))
    newest_first, at_once = (make_policy("learned", rig.slots.pool_bytes) for _ in range(2))
    stored = [*range(8), *(key for chain in chains for key in chain[8:])]
    blocks = {key: Block(namespace, 0, keys_of(key)) for key in stored}
    for heir in (newest_first, at_once):
        heir.go_on(b"".join(policy_of(rig).record()))
    for start in range(len(stored), 0, -16):
        newest_first.insert([blocks[key] for key in stored[max(0, start - 16) : start]], older=True)
    at_once.insert([blocks[key] for key in stored])
    assert isinstance(newest_first, Policy)
    check_learned(newest_first)
    assert list(newest_first.candidates()) == list(at_once.candidates())
    assert {int.from_bytes(block.key, "big") for block in list(at_once.candidates())[-8:]} == set(range(8))


def trace_of(requests: list[list[int]], tokens: int = 512) -> Trace:
    return Trace("made", tokens, [b"".join(key.to_bytes(KEY_BYTES, "big") for key in keys) for keys in requests])


def documents(count: int, blocks: int, requests: int) -> list[list[int]]:
    """Requests for some documents, one after the other, again and again."""
    every = [list(range(number * blocks, (number + 1) * blocks)) for number in range(count)]
    return list(islice(cycle(every), requests))


def test_a_cycle_of_documents_twice_the_pool_hits_nearly_as_often_as_it_can() -> None:
    """The optimum keeps as many documents as the pool holds, from the first time on."""
    trace = trace_of(documents(100, 20, 3000))
    best = 100 * (1 - 100 / 3000) / 2
    assert replay(trace, "lru", 1000).hits == 0
    assert replay(trace, "learned", 1000).hit_percent > 0.95 * best


def test_what_is_asked_for_once_does_not_drive_out_what_comes_back() -> None:
    shared = documents(30, 20, 1200)
    once = [list(range(10**6 + number * 30, 10**6 + number * 30 + 30)) for number in range(1200)]
    trace = trace_of([request for pair in zip(shared, once, strict=True) for request in pair])
    lru, learned = (replay(trace, policy, 800) for policy in ("lru", "learned"))
    assert learned.hit_percent > lru.hit_percent + 20
    assert learned.written_percent < lru.written_percent / 2


def conversations(rng: random.Random, tokens: int) -> list[list[int]]:
    """Prompts of growing conversations, in blocks of so many tokens; the same text whatever the tokens."""
    open_, requests, fresh = {}, [], 0
    for _ in range(1500):
        name = rng.randrange(60)
        grown = 1024 * rng.randint(1, 4)
        text = open_.get(name, [])
        if rng.random() < 0.2:
            text = []
        text = [*text, *range(fresh, fresh + grown // 1024)]
        fresh += grown // 1024
        open_[name] = text
        per = 1024 // tokens
        requests.append([unit * per + part for unit in text for part in range(per)])
    return requests


@pytest.mark.parametrize("blocks", [100, 400])
def test_where_nothing_can_be_learned_it_does_as_an_lru_does(blocks: int) -> None:
    """Which conversation goes on is chance: no class says more of when keys come back than their age."""
    trace = trace_of(conversations(random.Random(5), 1024))
    lru, learned = (replay(trace, policy, blocks) for policy in ("lru", "learned"))
    print(lru, learned)
    assert learned.hit_percent > lru.hit_percent - 0.3


@pytest.mark.parametrize("blocks", [1500, 2500, 3500])
def test_what_an_lru_led_by_when_the_pool_became_full_is_no_reason_to_do_as_it_does(blocks: int) -> None:
    """Just then what is known becomes old soonest."""
    trace = trace_of(chat_among_single_requests(1, 5000))
    lru, learned = (replay(trace, policy, blocks) for policy in ("lru", "learned"))
    print(lru, learned)
    assert learned.hit_percent > lru.hit_percent + 4


@pytest.mark.parametrize("load", ["chat", "a scan of 3,000 requests, then 400 documents"])
def test_what_nobody_was_watched_at_is_not_taken_for_a_return(load: str) -> None:
    """In a pool of a third of all blocks an LRU loses nothing; of its oldest ones there is no evidence at first."""
    requests = list(islice(LOADS[load](Traffic(1)), 6000))
    blocks = len({key for chain in requests for key in chain}) // 3
    lru, learned = (replay(trace_of(requests), policy, blocks) for policy in ("lru", "learned"))
    print(lru, learned)
    assert learned.hit_percent > lru.hit_percent - 0.3


@pytest.mark.parametrize("lifetimes", [1.5, 2, 3, 10])
def test_without_any_evidence_the_oldest_go_first(lifetimes: float) -> None:
    """Requests of which none comes back, until there is evidence that none does and they are declined."""
    rig = CacheHarness(regions=2, region_bytes=16 << 20, policy="learned")
    namespace = rig.open(shard_bytes=(1 << 20,))
    requests = [list(range(first, first + 8)) for first in range(0, int(lifetimes * 32), 8)]
    for request in requests:
        ask(rig, namespace, request)
        rig.put(namespace, keys_of(*request))
    kept = [rig.states(namespace, keys_of(*request)).count(READY) for request in requests]
    assert kept == [0] * (len(requests) - 4) + [8] * 4


def nights(days: int) -> list[list[int]]:
    """Conversations by day, that go on soon or never, and the same hundred documents every night."""
    rng, numbers, requests = random.Random(3), count(10**6), []
    for _ in range(days):
        going: list[list[int]] = [[] for _ in range(30)]
        for _ in range(250):
            at = rng.randrange(30)
            going[at] = [] if len(going[at]) > 8 else going[at]
            going[at] = going[at] + list(islice(numbers, rng.randint(1, 3)))
            requests.append(going[at])
        requests += [list(range(10 * document, 10 * document + 6)) for document in range(100)]
    return requests


def test_what_is_asked_for_once_a_day_is_not_taken_for_dead_at_noon() -> None:
    lru, learned = (replay(trace_of(nights(10)), policy, 1100) for policy in ("lru", "learned"))
    print(lru, learned)
    assert learned.hit_percent > lru.hit_percent + 8


def test_the_chance_of_a_block_to_come_back_is_told_by_its_kind_and_the_time_that_is_left() -> None:
    rig = CacheHarness(regions=10, region_bytes=2**22, policy="learned")  # 40 blocks
    namespace, other = (rig.open(name, shard_bytes=(2**20,)) for name in "ab")
    for number in range(400):
        first = 8 * (number // 2 % 5) if number % 2 else 1000 + 8 * number  # five documents, or what never returns
        ask(rig, namespace, chain := list(range(first, first + 2)))
        rig.put(namespace, keys_of(*chain))
    rig.put(other, keys_of(1))
    document, once, unknown = (
        next(iter(space.index[0].find(keys_of(key))))
        for space, key in ((namespace, first), (namespace, 1000 + 8 * 398), (other, 1))
    )
    assert document is not None
    assert unknown is not None
    pool = rig.slots.pool_bytes
    chances = [rig.cache.policy.return_chance(document, part * pool // 4) for part in (0, 1, 2, 8)]
    assert chances == sorted(chances)
    assert chances[0] < 0.01
    assert chances[-1] > 0.9
    assert once is None or rig.cache.policy.return_chance(once, 2 * pool) < 0.3
    assert rig.cache.policy.return_chance(unknown, pool) == 1


def test_a_model_that_begins_in_a_full_pool_is_not_declined_for_what_another_one_asks_for() -> None:
    rig = CacheHarness(regions=10, region_bytes=4096 * 4, policy="learned")  # 40 blocks
    old, new = rig.open("old", shard_bytes=(4096,)), rig.open("new", shard_bytes=(4096,))

    def request(namespace: Namespace, chain: list[int]) -> int:
        found = ask(rig, namespace, chain).count(READY)
        rig.put(namespace, keys_of(*chain))
        return found

    kept = [[100 * number + key for key in range(5)] for number in range(8)]
    for number in range(600):
        request(old, kept[number % 8])
        request(old, [100_000 + 5 * number + key for key in range(5)])  # never asked for again
    assert old.counters.declined_keys > 2000
    assert sum(request(new, [100 * number + key for key in range(5)]) for number in range(7)) == 0
    assert new.counters.declined_keys == 0
    request(new, [900, 901, 902, 903, 904])
    request(new, [1000, 1001, 1002, 1003, 1004])
    assert new.counters.declined_keys > 0, "it has asked for as much as the pool holds"
    check(rig)


@pytest.mark.parametrize(("shortest", "longest", "wrong"), [(1, 8, 0.03), (20, 30, 0.1), (42, 60, 0.03)])
def test_the_hits_of_an_lru_are_counted_beside(shortest: int, longest: int, wrong: float) -> None:
    """It keeps the beginnings of the latest chains, also where these are longer than the pool."""
    rig = CacheHarness(regions=10, region_bytes=2**22, policy="learned")  # 40 blocks
    lru = CacheHarness(regions=10, region_bytes=2**22)
    hits, rng = 0, random.Random(7)
    namespace, other = rig.open(shard_bytes=(2**20,)), lru.open(shard_bytes=(2**20,))
    for _ in range(300):
        first = 100 * rng.randrange(12 if longest < 10 else 3)
        chain = list(range(first, first + rng.randint(shortest, longest)))
        ask(rig, namespace, chain)
        rig.put(namespace, keys_of(*chain))
        states = ask(lru, other, chain)
        hits += len(states) - len(states.lstrip(bytes([READY])))
        lru.put(other, keys_of(*chain))
        check(rig)
    known = policy_of(rig).known
    assert known.hit_bytes == namespace.counters.prefix_keys_ready << 20
    assert known.lru_hit_bytes >> 20 == pytest.approx(hits, rel=wrong)


def test_an_lru_has_no_hits_before_the_blocks_are_stored_either() -> None:
    rig = CacheHarness(regions=10, region_bytes=4 << 20, policy="learned")
    namespace, known = rig.open(shard_bytes=(1 << 20,)), policy_of(rig).known
    for last in (4, 5, 6, 4):  # requests that come at once and begin alike
        ask(rig, namespace, [1, 2, 3, last])
    assert (known.hit_bytes, known.lru_hit_bytes) == (0, 0)
    rig.put(namespace, keys_of(1, 2, 3, 4))
    ask(rig, namespace, [1, 2, 3, 4])
    ask(rig, namespace, [1, 2, 3, 6])
    assert (known.hit_bytes, known.lru_hit_bytes) == (7 << 20, 7 << 20)


def test_the_size_of_blocks_makes_no_difference() -> None:
    seeds, gaps = (1, 3, 5), []
    for seed in seeds:
        large, small = (trace_of(conversations(random.Random(seed), tokens), tokens) for tokens in (1024, 16))
        first, second = replay(large, "learned", 300), replay(small, "learned", 300 * 1024 // 16)
        gaps.append((second.hit_percent - first.hit_percent, second.written_percent - first.written_percent))
    print(gaps)
    for gap in zip(*gaps, strict=True):
        assert sum(map(abs, gap)) / len(seeds) < 0.2


def test_ranks_groups_and_repeated_lookups_count_a_request_once() -> None:
    rig = CacheHarness(regions=20, policy="learned")
    namespace = rig.open(world_size=2, shard_bytes=(4096, 4096))
    groups = [(0, keys_of(1, 2, 3)), (1, keys_of(1, 2, 3))]
    for again in (False, True, True):
        rig.cache.lookup(namespace, 7, 1, groups, again=again)
        rig.cache.touch(7)
        rig.cache.release(1, [7])
    for rank in range(2):
        for group in range(2):
            ticket = begin_store(rig.cache, namespace, rank, group, keys_of(1, 2, 3, 4))  # 4 is what the engine wrote
            assert ticket.copy == [0, 1, 2, 3]
            rig.cache.commit_store(ticket)
    known = policy_of(rig).known
    assert (known.requests, known.keys) == (1, 6)
    assert ask(rig, namespace, [1, 2, 3, 4]) == bytes([2] * 4)
    assert known.requests == 2
    check(rig)


def test_what_one_rank_was_declined_the_others_are_declined_too() -> None:
    rig = CacheHarness(regions=2, policy="learned")  # 4 blocks of two shards
    namespace = rig.open(world_size=2)
    for _ in range(40):
        for chain in ([1, 2], [3, 4]):
            ask(rig, namespace, chain)
            rig.put(namespace, keys_of(*chain))
    ask(rig, namespace, [50, 51])
    first = begin_store(rig.cache, namespace, 0, 0, keys_of(50, 51))
    assert first.declined == [0, 1]
    made(rig.cache.clear(namespace))  # there is room now
    second = begin_store(rig.cache, namespace, 1, 0, keys_of(50, 51))
    assert second.declined == [0, 1]
    assert namespace.counters.declined_keys >= 4


def test_what_it_remembers_is_bounded() -> None:
    rig = CacheHarness(regions=100, region_bytes=4 * 2**20, policy="learned")  # 400 blocks
    namespace = rig.open(shard_bytes=(2**20,))
    for first in range(0, 60_000, 60):
        ask(rig, namespace, list(range(first, first + 60)))
    policy = policy_of(rig)
    assert 300 * REMEMBERED_POOLS < policy.ghosts <= 400 * (REMEMBERED_POOLS + 1)
    check(rig)
    assert bytes_of(policy) / policy.known.known_keys <= GHOST_BYTES


@pytest.mark.parametrize(("keys", "most"), [(1, 170), (16, 120)])
def test_a_block_takes_little_memory(keys: int, most: int) -> None:
    rig = CacheHarness(regions=16, region_bytes=512 * 4096, policy="learned")  # 8,192 blocks
    namespace, empty = rig.open(), policy_of(rig).nbytes
    for first in range(0, 8000, keys):
        ask(rig, namespace, list(range(first, first + keys)))
        rig.put(namespace, keys_of(*range(first, first + keys)))
    policy = policy_of(rig)
    assert (len(policy), policy.ghosts) == (8000, 0)
    assert policy.nbytes - empty <= 8000 * most
    check(rig)


@pytest.mark.parametrize("keys", [1, 2, 3, 16])
def test_a_key_without_a_block_takes_a_hundred_bytes_at_most(keys: int) -> None:
    rig = CacheHarness(regions=64, region_bytes=512 * 4096, policy="learned")
    namespace, empty = rig.open(), policy_of(rig).nbytes
    for first in range(0, 9600, keys):
        ask(rig, namespace, list(range(first, first + keys)))
    policy = policy_of(rig)
    assert policy.ghosts == 9600
    assert policy.nbytes - empty <= 9600 * 100


def test_what_would_go_before_a_block_is_told_without_counting_all_of_it() -> None:
    rig = CacheHarness(regions=16, region_bytes=512 * 4096, policy="learned")
    namespace = rig.open()
    for key in range(4000):
        ask(rig, namespace, [key])
        rig.put(namespace, keys_of(key))
    policy = policy_of(rig)
    order = [block.key for block in policy.candidates()]
    for at in range(0, 4000, 250):
        worth = policy.worth_of(namespace, 0, order[at])
        assert worth.bytes_before == pytest.approx(4096 * at, abs=4096 * 20)
    assert sum(one.kept_bytes for one in policy.describe().classes) == 4096 * 4000


def test_small_blocks_are_remembered_for_a_shorter_time() -> None:
    rig = CacheHarness(regions=100, policy="learned")  # 400 blocks of 4 KiB
    namespace = rig.open()
    for first in range(0, 6_000, 60):
        ask(rig, namespace, list(range(first, first + 60)))
    assert 300 < policy_of(rig).ghosts < 1000
    assert bytes_of(policy_of(rig)) <= rig.slots.pool_bytes // 50


def record_of(rig: CacheHarness) -> bytes:
    return b"".join(policy_of(rig).record())


def heir_of(rig: CacheHarness, record: bytes) -> CacheHarness:
    """A cache over the same slots whose policy goes on with a record."""
    heir = CacheHarness(policy="learned")
    records = rig.slots.ready_records()
    heir.slots, heir.events = rig.slots.successor(records), FoldedEvents()
    policy = make_policy("learned", heir.slots.pool_bytes)
    policy.go_on(record)
    heir.cache = BlockCache(heir.slots, policy, heir.events, heir.clock)
    adopt_all(heir.cache, heir.slots)
    return heir


def trained() -> tuple[CacheHarness, Namespace]:
    rig = CacheHarness(regions=10, region_bytes=2**22, policy="learned")  # 40 blocks
    namespace, rng = rig.open(shard_bytes=(2**20,)), random.Random(3)
    for _ in range(300):
        first = 20 * rng.randrange(12)
        chain = list(range(first, first + rng.randint(1, 8)))
        states = ask(rig, namespace, chain)
        rig.put(namespace, keys_of(*[key for key, state in zip(chain, states, strict=True) if state != 2]))
    return rig, namespace


def test_the_next_daemon_decides_as_this_one_would_have() -> None:
    rig, namespace = trained()
    heir = heir_of(rig, record_of(rig))
    check(heir)
    check_invariants(heir.cache)
    assert policy_of(heir).ghosts == policy_of(rig).ghosts > 0
    (adopted,) = heir.cache.namespaces
    rng, ready = random.Random(4), [0, 0]
    for _ in range(200):
        first = 20 * rng.randrange(12)
        chain = list(range(first, first + rng.randint(1, 8)))
        for number, (one, space) in enumerate(((rig, namespace), (heir, adopted))):
            ready[number] += ask(one, space, chain).count(READY)
            one.put(space, keys_of(*chain))
        check(heir)
    assert ready[0] == pytest.approx(ready[1], rel=0.1)


def test_of_a_namespace_that_the_record_is_of_it_is_known_at_once_what_to_decline() -> None:
    rig = CacheHarness(regions=10, region_bytes=2**22, policy="learned")  # 40 blocks
    spaces = [rig.open(name, shard_bytes=(2**20,)) for name in "ab"]
    once = count(1000, 4)

    def declined(one: CacheHarness, namespace: Namespace, requests: int) -> int:
        before = namespace.counters.declined_keys
        for _ in range(requests):
            ask(one, namespace, chain := [next(once) + key for key in range(4)])
            one.put(namespace, keys_of(*chain))
        return namespace.counters.declined_keys - before

    for number in range(400):
        ask(rig, spaces[0], chain := list(range(number % 8 * 4, number % 8 * 4 + 4)))
        rig.put(spaces[0], keys_of(*chain))
        declined(rig, spaces[0], 1)
    assert declined(rig, spaces[0], 5) == 20
    assert declined(rig, spaces[1], 5) == 0, "it is new"
    record = record_of(rig)
    heir = heir_of(rig, record)
    adopted = {namespace.label: namespace for namespace in heir.cache.namespaces}
    assert declined(heir, adopted["a"], 5) == 20
    assert declined(heir, adopted["b"], 5) == 0
    assert record_of(heir)[-END:-8] == record[-END:-8]


def test_without_a_record_the_oldest_blocks_of_an_adopted_pool_go_first() -> None:
    rig, _ = trained()
    records = sorted(rig.slots.ready_records(), key=lambda record: record.generation)
    heir = CacheHarness(policy="learned")
    heir.slots = rig.slots.successor(records)
    heir.cache = BlockCache(heir.slots, make_policy("learned", heir.slots.pool_bytes), heir.events, heir.clock)
    adopt_all(heir.cache, heir.slots)
    assert [block.key for block in heir.cache.policy.candidates()] == [record.key for record in records]


def test_what_was_adopted_at_once_is_not_cut_in_parts_as_a_whole() -> None:
    rig = CacheHarness(regions=16, region_bytes=512 * 4096)  # 8,192 blocks
    rig.put(rig.open(), keys_of(*range(8000)))
    heir = CacheHarness(policy="learned")
    heir.slots = rig.slots.successor(rig.slots.ready_records())
    heir.cache = BlockCache(heir.slots, make_policy("learned", heir.slots.pool_bytes), heir.events, heir.clock)
    adopt_all(heir.cache, heir.slots)
    policy = policy_of(heir)
    assert len(policy) == 8000
    assert policy.known.spans >= 7, "a request for some of a span's keys takes as long as it has keys"
    assert ask(heir, heir.cache.namespaces[0], list(range(3000, 3100))).count(READY) == 100
    check(heir)


COUNTS = 16 + 8 * 8 + 8 * CLASSES * (2 * BINS + EPOCHS_KEPT + 1)
END = 8 + 8 + 8
"""Bytes of a record's counts, and of what is behind them where it is of one namespace. A span is at its beginning."""


def with_end(body: bytes, version: int = 4, names: int = 0) -> bytes:
    content = body + struct.pack("=QI", names, version)
    return content + struct.pack("=I", zlib.crc32(content))


def with_field(record: bytes, at: int, form: str, *values: object) -> bytes:
    """The record with another value somewhere, and its checksum."""
    changed = bytearray(record[:-END])
    struct.pack_into(form, changed, at, *values)
    return with_end(bytes(changed))


def with_count(record: bytes, at: int, form: str, value: float) -> bytes:
    return with_field(record, len(record) - END - COUNTS + at, form, value)


def with_a_key_twice(record: bytes) -> bytes:
    """In one span, the first one that has several."""
    at = 0
    while (keys := struct.unpack_from("=I", record, at + 16)[0]) < 2:
        at += 40 + 8 * keys
    return with_field(record, at + 48, "=8s", record[at + 40 : at + 48])


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "empty": ("it is cut off", lambda record: b""),
    "cut": ("its checksum is wrong", lambda record: record[:-3]),
    "bit": ("its checksum is wrong", lambda record: record[:50] + bytes([record[50] ^ 1]) + record[51:]),
    "format": ("its format is 9, not 4", lambda record: with_end(record[:-END], 9)),
    "counts cut": ("it is cut off", lambda record: with_end(record[-500:-END])),
    "odd": ("it is cut off", lambda record: with_end(record[3:-END])),
    "no namespaces": ("it is cut off", lambda record: with_end(b"")),
    "namespaces cut": ("it is cut off", lambda record: with_end(record[-100:-END], names=20)),
    "more namespaces": ("its layout is another", lambda record: with_end(record[:-END], names=1)),
    "most namespaces": ("it is cut off", lambda record: with_end(record[:-END], names=2**64 - 1)),
    "no spans": ("it is cut off", lambda record: with_end(record[-END - COUNTS : -END])),
    "keys cut": ("it is cut off", lambda record: with_field(record, 16, "=I", 2**29)),
    "more": ("it is cut off", lambda record: with_count(record, 48, "=Q", 1)),
    "more spans": ("it is cut off", lambda record: with_count(record, 48, "=Q", 2**29)),
    "most spans": ("its counts are none", lambda record: with_count(record, 48, "=Q", 2**63)),
    "classes": ("its layout is another", lambda record: with_count(record, 0, "=I", CLASSES + 1)),
    "pool": ("it is of a pool of another size", lambda record: with_count(record, 16, "=Q", 5)),
    "time": ("its counts are none", lambda record: with_count(record, 24, "=Q", 2**63)),
    "past": ("its counts are none", lambda record: with_count(record, 72, "=d", nan)),
    "nan": ("its counts are none", lambda record: with_count(record, 80, "=d", nan)),
    "huge": ("its counts are none", lambda record: with_count(record, 80, "=d", 1e300)),
    "inf": ("its counts are none", lambda record: with_count(record, COUNTS - 8, "=d", inf)),
    "negative": ("its counts are none", lambda record: with_count(record, 80, "=d", -1.0)),
    "future": ("it has a span that is none", lambda record: with_field(record, 0, "=Q", 2**59)),
    "weightless": ("it has a span that is none", lambda record: with_field(record, 8, "=Q", 0)),
    "heavy": ("it has a span that is none", lambda record: with_field(record, 8, "=Q", 2**50)),
    "no keys": ("it has a span that is none", lambda record: with_field(record, 16, "=I", 0)),
    "many keys": ("it is cut off", lambda record: with_field(record, 16, "=I", 2**32 - 1)),
    "long": ("it has a span that is none", lambda record: with_field(record, 28, "=I", 2**30)),
    "child": ("it has a span that is none", lambda record: with_field(record, 34, "=B", 1)),
    "class": ("it has a span that is none", lambda record: with_field(record, 32, "=B", CLASSES)),
    "no hash": ("its keys are none", lambda record: with_field(record, 40, "=Q", 0)),
    "twice": ("its keys are none", with_a_key_twice),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_refused_and_changes_nothing(damage: str) -> None:
    rig, _ = trained()
    record, lifetime = record_of(rig), rig.slots.pool_bytes
    sentence, damaged = DAMAGE[damage]
    policy = make_policy("learned", lifetime)
    assert isinstance(policy, Policy)
    with pytest.raises(BadRecord, match=sentence):
        policy.go_on(damaged(record))
    assert (policy.ghosts, policy.known.requests) == (0, 0)
    check_learned(policy)
    policy.go_on(record)
    assert b"".join(policy.record()) == record
    check_learned(policy)


@pytest.mark.parametrize("seed", range(4))
def test_a_record_is_made_while_others_are_served(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "PIECE_BYTES", 300)
    rig, namespace = trained()
    policy, rng, pieces = policy_of(rig), random.Random(seed), []
    for piece in policy.record():
        pieces.append(piece)
        first = 20 * rng.randrange(12)
        chain = list(range(first, first + rng.randint(1, 8)))
        if rng.random() < 0.2:
            chain = [*chain[:2], *chain[4:]]  # what is behind a gap is taken out of its span
        ask(rig, namespace, chain)
        rig.put(namespace, keys_of(*chain))
        check(rig)
    assert len(pieces) > 10
    heir = heir_of(rig, b"".join(pieces))
    check(heir)
    assert policy_of(heir).known.known_keys == pytest.approx(policy.known.known_keys, rel=0.1)
    (adopted,) = heir.cache.namespaces
    for _ in range(20):
        ask(heir, adopted, list(range(20 * rng.randrange(12), 240)))
        check(heir)
