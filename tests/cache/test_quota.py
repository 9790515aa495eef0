"""A namespace has no more of the pool than its quota."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from kvoffd.cache.namespace import Namespace
from tests.kit.slot_cache import UNIT, CacheRig, check_invariants, keys_of

BLOCK = 256 * UNIT
"""Policies remember as much of keys without blocks as is little beside the pool."""


def set_quota(rig: CacheRig, namespace: Namespace, units: int | None) -> None:
    rig.cache.quotas.set(namespace.fingerprint, None if units is None else units * UNIT)


class Traffic:
    """A polite namespace asks for the same prompts again and again; a flooding one for new ones, each twice."""

    def __init__(self, policy: str, prompts: int = 12, prompt_blocks: int = 4) -> None:
        self.rig = CacheRig(units=16 * 8 * 256, region_units=8 * 256, policy=policy)
        self.polite, self.flooding = (self.rig.open(name, sizes=(BLOCK,)) for name in ("polite", "flooding"))
        self.prompts = [keys_of(*range(n * prompt_blocks, (n + 1) * prompt_blocks)) for n in range(prompts)]
        self._numbers, self._random = itertools.count(10_000), random.Random(1)

    def ask(self, namespace: Namespace, keys: bytes) -> float:
        """A request: look up, then store what is missing. Returns the part that was there."""
        states, _ = self.rig.cache.lookup(namespace, 1, 1, [(0, keys)])
        self.rig.cache.note_requests()
        self.rig.cache.release(1, [1])
        self.rig.put(namespace, keys)
        self.rig.clock.now += 0.1
        return states[0].count(2) / len(states[0])

    def run(self, rounds: int) -> tuple[float, float]:
        """Hit ratios of the polite and the flooding one."""
        polite, flooding = [], []
        for _ in range(rounds):
            polite.append(self.ask(self.polite, self._random.choice(self.prompts)))
            for _ in range(3):
                text = keys_of(*(next(self._numbers) for _ in range(12)))
                flooding += [self.ask(self.flooding, text), self.ask(self.flooding, text)]
        return sum(polite) / len(polite), sum(flooding) / len(flooding)


@pytest.mark.parametrize("policy", ["lru", "arc", "learned"])
def test_a_namespace_with_its_quota_takes_from_itself(policy: str) -> None:
    traffic = Traffic(policy)
    traffic.run(25)
    before = traffic.run(40)
    set_quota(traffic.rig, traffic.flooding, 64 * 256)
    traffic.run(40)
    polite, flooding = traffic.run(40)
    assert polite > 0.85, "all prompts of the polite one fit what is left"
    assert flooding > before[1] - 0.1, "the flooding one needs little of the pool"
    if policy == "lru":
        assert before[0] < 0.6
    check_invariants(traffic.rig.cache)


def test_a_quota_that_is_far_below_what_is_there_is_reached_in_several_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffd.cache.cache.MAX_OVER_QUOTA", 4)
    rig = CacheRig(units=32, region_units=4)
    namespace = rig.open("a")
    rig.put(namespace, keys_of(*range(30)))
    set_quota(rig, namespace, 10)
    held = [(rig.put(namespace, keys_of(100 + n)), namespace.ready_blocks) for n in range(6)]
    assert held == [(1, 25), (1, 20), (1, 15), (1, 10), (0, 10), (0, 10)]
    check_invariants(rig.cache)


def test_a_namespace_with_its_quota_does_not_look_through_all_others() -> None:
    """Behind many blocks of others its own that were stored first go."""
    rig = CacheRig(units=8000, region_units=1000)
    first, second = rig.open("a"), rig.open("b")
    set_quota(rig, second, 2000)
    rig.put(first, keys_of(*range(6000)))
    for number in range(10_000, 12_000, 500):
        rig.put(second, keys_of(*range(number, number + 500)))
    rig.cache.lookup(second, 1, 1, [(0, keys_of(10_499))])
    began = time.process_time()
    for number in range(50):
        assert rig.put(second, keys_of(20_000 + number)) == 0
    assert time.process_time() - began < 1.0
    assert first.held_bytes == 6000 * UNIT
    assert second.held_bytes == 2000 * UNIT
    assert second.counters.evicted_blocks == 50
    there = rig.states(second, keys_of(*range(10_000, 10_500)))
    assert there == [2] * 449 + [0] * 50 + [2], "tails of chains first, and none that is leased"
    check_invariants(rig.cache)
