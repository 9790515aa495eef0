"""Namespaces share the pool as operators say: minimum, maximum and weight."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from kvoffd.cache import shares
from kvoffd.cache.namespace import Namespace
from kvoffd.cache.policies import POLICY_NAMES
from kvoffd.errors import KvoffdError
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import NamespaceLimits
from tests.kit.cache_harness import SLOT_UNIT, CacheHarness, keys_of, made
from tests.kit.invariants import check_invariants
from tests.kit.share_oracle import ShareOracle, held

UNIT = SLOT_UNIT
BLOCK = 256 * UNIT
"""Policies remember as much of keys without blocks as is little beside the pool."""


def set_limits(rig: CacheHarness, namespace: Namespace, least: int = 0, most: int | None = None, **more: float) -> None:
    limits = NamespaceLimits(least * UNIT, None if most is None else most * UNIT, more.get("weight"))
    rig.cache.blocks.shares.set(namespace.fingerprint, limits)


class Traffic:
    """A polite namespace asks for the same prompts again and again; a flooding one for new ones, each twice."""

    def __init__(self, policy: str, prompts: int = 12, prompt_blocks: int = 4) -> None:
        self.rig = CacheHarness(regions=16, region_bytes=8 * BLOCK, policy=policy)
        self.oracle = ShareOracle(self.rig.cache)
        self.polite, self.flooding = (self.rig.open(name, shard_bytes=(BLOCK,)) for name in ("polite", "flooding"))
        self.prompts = [keys_of(*range(n * prompt_blocks, (n + 1) * prompt_blocks)) for n in range(prompts)]
        self._numbers, self._leases = itertools.count(10_000), itertools.count(1)
        self._random = random.Random(1)

    def ask(self, namespace: Namespace, keys: bytes) -> float:
        """A request: look up, then store what is missing. Returns the part that was there."""
        lease = next(self._leases)
        answer = self.rig.cache.lookup(namespace, lease, 1, [(0, keys)])
        self.rig.cache.touch(lease)
        self.rig.cache.release(1, [lease])
        self.rig.put(namespace, keys)
        self.rig.clock.now += 0.1
        return answer.pinned / (len(keys) // 8)

    def run(self, rounds: int) -> tuple[float, float]:
        """Hit ratios of the polite and the flooding one."""
        polite, flooding = [], []
        for _ in range(rounds):
            polite.append(self.ask(self.polite, self._random.choice(self.prompts)))
            for _ in range(3):
                text = [next(self._numbers) for _ in range(12)]
                flooding += [self.ask(self.flooding, keys_of(*text)), self.ask(self.flooding, keys_of(*text))]
        return sum(polite) / len(polite), sum(flooding) / len(flooding)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_namespace_that_floods_takes_from_itself_first(policy: str) -> None:
    traffic = Traffic(policy)
    traffic.run(25)
    before = traffic.run(40)
    results = [("no limits", before)]
    for name, limit in (
        ("polite --min, 3/8 of the pool", lambda: set_limits(traffic.rig, traffic.polite, least=48 * 256)),
        ("flooding --max, 1/2 of the pool", lambda: set_limits(traffic.rig, traffic.flooding, most=64 * 256)),
        (
            "both --weight 1",
            lambda: [set_limits(traffic.rig, one, weight=1) for one in (traffic.polite, traffic.flooding)],
        ),
    ):
        for one in (traffic.polite, traffic.flooding):
            set_limits(traffic.rig, one)
        limit()
        traffic.run(40)
        results.append((name, traffic.run(40)))
    for name, (polite, flooding) in results:
        print(f"{policy:8} {name:32} polite {polite:6.1%}  flooding {flooding:6.1%}")
    for _, (polite, flooding) in results[1:]:
        assert polite > 0.85, "all prompts of the polite one fit what it keeps"
        assert flooding > before[1] - 0.1, "the flooding one needs little of the pool"
    if policy == "lru":
        assert before[0] < 0.6
    check_invariants(traffic.rig.cache)


def test_a_minimum_is_not_passed_and_a_maximum_neither() -> None:
    rig = CacheHarness(regions=4, region_bytes=4 * UNIT)
    oracle = ShareOracle(rig.cache)
    first, second = rig.open("a"), rig.open("b")
    set_limits(rig, first, least=5)
    set_limits(rig, second, most=13)
    rig.put(first, keys_of(*range(8)))
    rig.put(second, keys_of(*range(100, 140)))
    assert (held(first), held(second)) == (5 * UNIT, 11 * UNIT)
    assert oracle.lost_to_others
    set_limits(rig, second, most=3)
    rig.put(second, keys_of(200))
    assert (held(first), held(second)) == (5 * UNIT, 3 * UNIT)
    assert rig.put(second, keys_of(*range(300, 310))) == 7
    assert second.counters.dropped_keys == 29 + 7
    rig.put(first, keys_of(*range(20, 40)))
    assert held(first) == 16 * UNIT, "the other one has no minimum"
    check_invariants(rig.cache)


def test_what_is_kept_for_a_namespace_is_taken_from_those_that_have_more_of_other_sizes_too() -> None:
    rig = CacheHarness(regions=4, region_bytes=4 * UNIT)
    large, small = rig.open("large", shard_bytes=(2 * UNIT,)), rig.open("small")
    rig.put(large, keys_of(*range(8)))
    set_limits(rig, small, least=4)
    assert rig.put(small, keys_of(*range(3))) == 0
    assert held(small) == 3 * UNIT
    rig.put(large, keys_of(*range(50, 70)))
    assert held(small) == 3 * UNIT
    check_invariants(rig.cache)


def test_whole_regions_that_one_store_takes_do_not_pass_a_minimum_together() -> None:
    rig = CacheHarness(regions=4, region_bytes=4 * UNIT)
    small, large = rig.open("small"), rig.open("large", shard_bytes=(2 * UNIT,))
    set_limits(rig, small, least=8)
    rig.put(small, keys_of(*range(16)))
    assert rig.put(large, keys_of(*range(100, 108))) == 4
    assert (held(small), held(large)) == (8 * UNIT, 8 * UNIT)
    check_invariants(rig.cache)


def test_an_idle_namespace_has_no_share_but_its_minimum() -> None:
    rig = CacheHarness(regions=4, region_bytes=4 * UNIT)
    idle, busy = rig.open("idle"), rig.open("busy")
    set_limits(rig, idle, least=2, weight=3)
    rig.put(idle, keys_of(*range(12)))
    rig.put(busy, keys_of(*range(100, 130)))
    assert held(idle) == 12 * UNIT, "12.5 slots are kept for it"
    rig.clock.now += shares.IDLE_AFTER_S
    rig.put(busy, keys_of(*range(200, 230)))
    assert held(idle) == 2 * UNIT


def test_other_ranks_may_complete_what_the_first_one_began() -> None:
    rig = CacheHarness(regions=4, region_bytes=4 * UNIT)
    namespace = rig.open(world_size=2)
    set_limits(rig, namespace, most=8)
    for start in range(0, 40, 4):
        assert rig.put(namespace, keys_of(*range(start, start + 4))) == 0
        assert namespace.ready_blocks == 4
    assert held(namespace) == 8 * UNIT
    check_invariants(rig.cache)


def test_limits_that_cannot_be_kept_are_refused_and_change_nothing() -> None:
    rig = CacheHarness(regions=4, region_bytes=4 * UNIT)
    shared = rig.cache.blocks.shares
    set_limits(rig, rig.open("a"), least=8, most=10)
    before = dict(shared)
    other = rig.open("b")
    for least, most, weight, sentence in (
        (17, None, None, "three quarters of the pool"),
        (5, None, None, "for other namespaces"),
        (2, 1, None, "is more than the maximum"),
        (0, None, 0.0, "A weight is more than 0"),
        (0, None, float("nan"), "A weight is more than 0"),
        (0, None, 1e9, "A weight is more than 0"),
    ):
        limits = NamespaceLimits(least * UNIT, None if most is None else most * UNIT, weight)
        with pytest.raises(KvoffdError, match=sentence) as caught:
            shared.set(other.fingerprint, limits)
        assert caught.value.code is ErrorCode.BAD_ARGUMENT
        assert dict(shared) == before
    for number in range(shares.MAX_LIMITED - 1):
        shared.set(number.to_bytes(32, "big"), NamespaceLimits(weight=1.0))
    with pytest.raises(KvoffdError, match="have limits"):
        set_limits(rig, other, weight=1)
    set_limits(rig, rig.cache.namespaces[0])
    assert len(dict(shared)) == shares.MAX_LIMITED - 1


def test_a_namespace_that_may_take_from_itself_alone_does_not_look_through_all_others() -> None:
    """Behind MAX_PASSED blocks that may not go its own least recently used goes."""
    rig = CacheHarness(regions=8, region_bytes=1000 * UNIT)
    first, second = rig.open("a"), rig.open("b")
    set_limits(rig, first, least=6000)
    rig.put(first, keys_of(*range(6000)))
    rig.put(second, keys_of(*range(10_000, 12_000)))
    rig.cache.lookup(second, 1, 1, [(0, keys_of(10_000, 10_001))])
    rig.cache.touch(1)
    rig.cache.release(1, [1])
    began = time.process_time()
    for number in range(50):
        assert rig.put(second, keys_of(20_000 + number)) == 0
    assert time.process_time() - began < 1.0
    assert held(first) == 6000 * UNIT
    assert rig.states(second, keys_of(10_000, 10_001)) == [2, 2], "they were used last"
    assert second.counters.evicted_blocks == 50
    check_invariants(rig.cache)


def test_the_least_recently_used_come_first_where_there_are_limits() -> None:
    rig = CacheHarness(regions=4, region_bytes=8 * SLOT_UNIT)
    space, known = rig.open(), rig.cache.blocks.shares

    def order() -> list[int]:
        return [int.from_bytes(block.key, "big") for block in known.by_use(space)]

    rig.put(space, keys_of(*range(10)))
    set_limits(rig, space, most=30)
    assert sorted(order()) == list(range(10)), "which of them were used last is not known"
    for number in (3, 7):
        rig.cache.lookup(space, number, 1, [(0, keys_of(number))])
        rig.cache.touch(number)
    rig.put(space, keys_of(20))
    assert order()[-3:] == [3, 7, 20]
    rig.cache.release(1, [3, 7])
    made(rig.cache.invalidate(space, [(0, keys_of(0, 1, 7))]))
    assert order()[-2:] == [3, 20]
    assert sorted(order()) == [2, 3, 4, 5, 6, 8, 9, 20]
    for lease in range(30, 40):  # what is passed over is not passed over for ever
        rig.cache.lookup(space, lease, 1, [(0, keys_of(2, 4, 5, 6, 8))])
        rig.cache.touch(lease)
        assert order() == [9, 3, 20, 8, 6, 5, 4, 2]
    assert known.nbytes == 8 * 1 + shares.USE_BYTES * 7
    set_limits(rig, space)
    assert known.nbytes == 0
    check_invariants(rig.cache)
