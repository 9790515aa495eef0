"""A namespace has no more of the pool than its quota."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from kvoffd.cache import quota
from kvoffd.cache.namespace import Namespace
from kvoffd.cache.policies import POLICY_NAMES
from kvoffd.errors import KvoffdError
from kvoffd_proto.errors import ErrorCode
from tests.kit.cache_harness import SLOT_UNIT, CacheHarness, keys_of, made
from tests.kit.invariants import check_invariants
from tests.kit.quota_oracle import QuotaOracle, held

UNIT = SLOT_UNIT
BLOCK = 256 * UNIT
"""Policies remember as much of keys without blocks as is little beside the pool."""


def set_quota(rig: CacheHarness, namespace: Namespace, units: int | None) -> None:
    rig.cache.blocks.quotas.set(namespace.fingerprint, None if units is None else units * UNIT)


class Traffic:
    """A polite namespace asks for the same prompts again and again; a flooding one for new ones, each twice."""

    def __init__(self, policy: str, prompts: int = 12, prompt_blocks: int = 4) -> None:
        self.rig = CacheHarness(regions=16, region_bytes=8 * BLOCK, policy=policy)
        QuotaOracle(self.rig.cache)
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
def test_a_namespace_with_its_quota_takes_from_itself(policy: str) -> None:
    traffic = Traffic(policy)
    traffic.run(25)
    before = traffic.run(40)
    set_quota(traffic.rig, traffic.flooding, 64 * 256)
    traffic.run(40)
    polite, flooding = traffic.run(40)
    print(f"{policy:8} polite {before[0]:6.1%} {polite:6.1%}  flooding {before[1]:6.1%} {flooding:6.1%}")
    assert polite > 0.85, "all prompts of the polite one fit what is left"
    assert flooding > before[1] - 0.1, "the flooding one needs little of the pool"
    if policy == "lru":
        assert before[0] < 0.6
    check_invariants(traffic.rig.cache)


def test_a_quota_is_not_passed_and_one_that_is_lowered_is_reached_with_the_next_store() -> None:
    rig = CacheHarness(regions=4, region_bytes=4 * UNIT)
    QuotaOracle(rig.cache)
    first, second = rig.open("a"), rig.open("b")
    set_quota(rig, second, 13)
    rig.put(first, keys_of(*range(8)))
    rig.put(second, keys_of(*range(100, 140)))
    assert (held(first), held(second)) == (3 * UNIT, 13 * UNIT)
    set_quota(rig, second, 3)
    rig.put(second, keys_of(200))
    assert (held(first), held(second)) == (3 * UNIT, 3 * UNIT)
    assert rig.put(second, keys_of(*range(300, 310))) == 7
    assert second.counters.dropped_keys == 27 + 7
    rig.put(first, keys_of(*range(20, 40)))
    assert held(first) == 16 * UNIT, "nothing is kept for a namespace"
    check_invariants(rig.cache)


def test_a_quota_below_one_block_has_room_for_none() -> None:
    rig = CacheHarness(regions=4, region_bytes=4 * UNIT)
    namespace = rig.open(shard_bytes=(2 * UNIT,))
    for units in (0, 1):
        set_quota(rig, namespace, units)
        assert rig.put(namespace, keys_of(1, 2)) == 2
        assert held(namespace) == 0
    check_invariants(rig.cache)


def test_other_ranks_may_complete_what_the_first_one_began() -> None:
    rig = CacheHarness(regions=4, region_bytes=4 * UNIT)
    namespace = rig.open(world_size=2)
    set_quota(rig, namespace, 8)
    for start in range(0, 40, 4):
        assert rig.put(namespace, keys_of(*range(start, start + 4))) == 0
        assert namespace.ready_blocks == 4
    assert held(namespace) == 8 * UNIT
    check_invariants(rig.cache)


def test_one_quota_too_many_is_refused_and_changes_nothing() -> None:
    quotas = quota.Quotas()
    for number in range(quota.MAX_QUOTAS):
        quotas.set(number.to_bytes(32, "big"), number)
    before = dict(quotas)
    with pytest.raises(KvoffdError, match="have a quota") as caught:
        quotas.set(b"b" * 32, 1)
    assert caught.value.code is ErrorCode.BAD_ARGUMENT
    assert dict(quotas) == before
    quotas.set(bytes(32), 5)
    quotas.set(bytes(31) + b"\1", None)
    quotas.set(b"b" * 32, 1)
    assert (quotas.of(bytes(32)), quotas.of(b"b" * 32), len(dict(quotas))) == (5, 1, quota.MAX_QUOTAS)


def test_a_namespace_with_its_quota_does_not_look_through_all_others() -> None:
    """Behind MAX_PASSED blocks that may not go its own least recently used goes."""
    rig = CacheHarness(regions=8, region_bytes=1000 * UNIT)
    first, second = rig.open("a"), rig.open("b")
    set_quota(rig, second, 2000)
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


def test_the_least_recently_used_come_first_where_there_is_a_quota() -> None:
    rig = CacheHarness(regions=4, region_bytes=8 * SLOT_UNIT)
    space, known = rig.open(), rig.cache.blocks.quotas

    def order() -> list[int]:
        return [int.from_bytes(block.key, "big") for block in known.by_use(space)]

    rig.put(space, keys_of(*range(10)))
    set_quota(rig, space, 30)
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
    assert known.nbytes == 8 * 1 + quota.USE_BYTES * 7
    set_quota(rig, space, None)
    assert known.nbytes == 0
    check_invariants(rig.cache)
