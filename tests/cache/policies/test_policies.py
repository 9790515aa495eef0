"""What every eviction policy must do, whichever it is."""

from __future__ import annotations

import random
from itertools import count

import numpy as np
import pytest

from kvoffd.cache import POLICY_NAMES
from kvoffd.cache.learned import Learned
from kvoffd.cache.namespace import Group, Namespace
from kvoffd.cache.policies import make_policy
from kvoffd.cache.policy import REJECTED, Chain
from kvoffd_proto.messages import BENCH_LABEL, GroupSpec
from kvoffd_proto.stats import LearnedStats
from tests.kit.slot_cache import CacheRig, keys_of

SLOTS, BLOCK_BYTES, POOL_BYTES = 4096, 4096, 1 << 20


class Order:
    """A policy over slots, each of which has its number as key."""

    def __init__(self, name: str, pool_bytes: int = POOL_BYTES) -> None:
        namespace = Namespace(bytes(32), name, 1, 8, [GroupSpec("full", 512)], "{}")
        self.group = Group(1, namespace, 0)
        self.group.set_sizes([BLOCK_BYTES], [BLOCK_BYTES])
        self.policy = make_policy(name, pool_bytes, SLOTS)

    def insert(self, *blocks: int) -> None:
        self.policy.insert(self.group, np.array(blocks, np.uint32), keys_of(*blocks))

    def insert_at(self, block: int, key: int) -> None:
        self.policy.insert(self.group, np.array([block], np.uint32), keys_of(key))

    def remove(self, *blocks: int) -> None:
        self.policy.remove(self.group, np.array(blocks, np.uint32), keys_of(*blocks))

    def touch(self, *blocks: int) -> None:
        self.policy.requested([Chain(self.group, keys_of(*blocks), np.array(blocks, np.uint32), len(blocks))])

    def evict_oldest(self) -> None:
        self.remove(*self.policy.first(1).tolist())

    @property
    def candidates(self) -> list[int]:
        return self.policy.first(SLOTS).tolist()


@pytest.fixture(params=POLICY_NAMES)
def order(request: pytest.FixtureRequest) -> Order:
    return Order(request.param)


@pytest.mark.parametrize("count", [5, 1000])
def test_untouched_blocks_go_in_the_order_they_came(order: Order, count: int) -> None:
    order.insert(*range(count))
    order.insert(*range(count, count + 5))
    assert order.candidates == list(range(count + 5))


@pytest.mark.parametrize(
    ("touched", "removed", "left"),
    [([0], [], [1, 2, 3, 0]), ([0, 1, 2, 3], [], [3, 2, 1, 0]), ([2, 3], [0, 3], [1, 2])],
    ids=["after the untouched", "a chain's tail first", "what was removed is no candidate"],
)
def test_touched_blocks_go_later(order: Order, touched: list[int], removed: list[int], left: list[int]) -> None:
    order.insert(0, 1, 2, 3)
    order.touch(*touched)
    for block in removed:
        order.remove(block)
    assert order.candidates == left


@pytest.mark.parametrize("seed", range(3))
def test_as_an_lru_learned_has_its_order(seed: int) -> None:
    """Of conversations of many classes, whose blocks are of all ages."""
    learned, lru, rng, blocks = Order("learned", 8 * POOL_BYTES), Order("lru"), random.Random(seed), count()
    conversations: list[list[int]] = [[] for _ in range(40)]
    for _ in range(400):
        conversation = rng.choice(conversations)
        new = [next(blocks) for _ in range(rng.choice((0, 1, 1, 2, 5)))]
        conversation += new
        learned.touch(*conversation)
        learned.insert(*reversed(new))
        lru.insert(*reversed(new))
        lru.touch(*conversation)
    assert isinstance(learned.policy, Learned)
    assert len(learned.policy.describe().classes) > 10
    learned.policy.known.as_lru = 1
    assert learned.candidates == lru.candidates
    for most in (1, 7, 100):
        assert learned.policy.first(most).tolist() == lru.candidates[:most]


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_of_a_chain_that_was_touched_in_part_the_rest_goes_first(name: str) -> None:
    order = Order(name)
    order.insert(0, 1, 2, 3)
    order.touch(0, 1, 2, 3)
    order.touch(0, 1)
    assert order.candidates == [3, 2, 1, 0]


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_what_follows_a_block_goes_before_it(name: str) -> None:
    order = Order(name)
    order.insert(1, 0)
    order.insert(9, 8, 3, 2)
    order.policy.follow(1, np.array([2, 3], np.uint32))
    assert order.candidates == [3, 2, 1, 0, 9, 8]
    order.policy.follow(8, np.array([0], np.uint32))
    assert order.candidates == [3, 2, 1, 9, 0, 8]
    order.policy.follow(8, np.array([0], np.uint32))
    assert order.candidates == [3, 2, 1, 9, 0, 8]


def test_a_block_that_was_used_once_follows_none_that_was_used_again() -> None:
    order = Order("arc")
    order.insert(3, 2, 1, 0)
    order.touch(0)
    before = order.candidates
    order.policy.follow(0, np.array([1, 2], np.uint32))
    assert order.candidates == before


def test_a_key_that_went_may_come_again_in_another_slot(order: Order) -> None:
    order.insert(1)
    order.remove(1)
    order.insert_at(2, 1)
    assert order.candidates == [2]


def test_what_else_is_asked_of_it_has_an_answer(order: Order) -> None:
    order.insert(0, 1, 2)
    order.touch(0)
    order.remove(1, 2)
    policy, absent = order.policy, keys_of(1, 2, 3)
    runs = policy.admit(order.group, absent, [0, 2]).runs
    assert sum(length for length, _ in runs) == 3
    if any(score == REJECTED for _, score in runs):
        policy.rejected(order.group, absent)
    chances = policy.chance(order.group, keys_of(0, 1), POOL_BYTES)
    assert ((chances >= 0) & (chances <= 1)).all()
    assert isinstance(policy.describe(), LearnedStats)
    assert policy.nbytes > 0
    assert policy.ghosts <= 3
    make_policy(order.group.namespace.label, POOL_BYTES, 1).restore(policy.state())


def test_arc_keeps_reused_blocks_through_a_scan() -> None:
    order = Order("arc")
    order.insert(*range(5))
    order.touch(*range(5))
    order.insert(*range(100, 105))
    for scanned in range(200, 400):
        order.evict_oldest()
        order.insert(scanned)
    assert set(range(5)) <= set(order.candidates)


def test_arc_gives_space_to_the_blocks_whose_ghosts_come_back() -> None:
    order = Order("arc")
    order.insert(*range(10))
    order.touch(*range(5))
    for key in range(100, 105):  # keys 5 to 9 go
        order.evict_oldest()
        order.insert(key)
    for key in range(5, 8):  # from the ghosts of blocks that were used once
        order.evict_oldest()
        order.insert_at(key + 1000, key)
    assert order.candidates == [4, 3, 103, 104, 2, 1, 0, 1005, 1006, 1007]


def test_arc_learns_nothing_from_a_block_that_left_only_the_order() -> None:
    order = Order("arc")
    order.insert(0, 1, 2, 3)
    order.touch(2, 3)
    order.remove(0, 3)
    order.insert(0, 3)
    assert order.candidates == [1, 0, 2, 3]


def test_arc_remembers_no_more_than_about_what_the_pool_holds() -> None:
    order = Order("arc")
    order.insert(*range(50))
    for number in range(100, 2100):
        order.evict_oldest()
        order.insert(number)
        if number % 3 == 0:
            order.touch(number)
    assert 0 < order.policy.ghosts <= 100
    assert len(order.candidates) == 50


def test_arc_remembers_small_blocks_in_a_fiftieth_of_the_pool() -> None:
    order = Order("arc")
    order.insert(*range(1000))
    without = order.policy.nbytes
    order.touch(*range(500))
    for number in range(2000, 2500):
        order.evict_oldest()
        order.insert(number)
    assert 0.9 < (order.policy.nbytes - without) / (POOL_BYTES / 50) <= 1


def test_requests_of_benches_teach_nothing_and_leave_nothing() -> None:
    rig = CacheRig(16, 4, "learned")
    bench = rig.open(f"{BENCH_LABEL}lookup")
    for first in range(0, 400, 4):
        rig.ask(bench, keys_of(*range(first, first + 4)))
    assert bench.counters.rejected_keys == 0
    assert rig.policy.describe().requests == 0
    assert rig.policy.ghosts == 0
