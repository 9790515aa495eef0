"""What users say of their blocks bends the order in which they go, and never keeps others out."""

from __future__ import annotations

from itertools import count

import pytest

from kvoffd.cache import hints
from kvoffd.cache.namespace import Namespace
from kvoffd.cache.policies import POLICY_NAMES
from kvoffd_proto.messages import READY, NamespaceLimits
from tests.kit.cache_harness import SLOT_UNIT, CacheHarness, keys_of
from tests.kit.invariants import check_invariants

UNIT = SLOT_UNIT


def mark(rig: CacheHarness, namespace: Namespace, keys: bytes, priority: int, retain_s: float = 60.0) -> None:
    rig.cache.blocks.hints.set(namespace, 0, namespace.split(0, keys), priority, retain_s)


def request(rig: CacheHarness, namespace: Namespace, first: int) -> int:
    """Ask for four blocks and store what is missing; returns how many were there."""
    keys = [keys_of(number) for number in range(first, first + 4)]
    answer = rig.cache.lookup(namespace, 1, 1, [(0, b"".join(keys))])
    rig.cache.touch(1)
    rig.cache.release(1, [1])
    lacking = [key for key, state in zip(keys, answer.states[0], strict=True) if state != READY]
    rig.cache.commit_store(rig.cache.begin_stores(namespace, 0, 0, lacking, {}, starts=[0]))
    return 4 - len(lacking)


def there(rig: CacheHarness, namespace: Namespace, count: int = 64) -> list[int]:
    index = namespace.index[0]
    return [number for number in range(count) if keys_of(number) in index]


@pytest.fixture
def rig() -> CacheHarness:
    return CacheHarness(regions=4, region_bytes=4 * UNIT)


@pytest.mark.parametrize("policy", ["lru", "arc", "learned"])
def test_a_conversation_that_is_over_goes_first_and_its_end_before_its_beginning(policy: str) -> None:
    rig = CacheHarness(regions=4, region_bytes=4 * UNIT, policy=policy)
    namespace = rig.open()
    rig.put(namespace, keys_of(*range(12)))
    mark(rig, namespace, keys_of(8, 9, 10, 11, 12), -10)
    rig.put(namespace, keys_of(12, 13, 14, 15))  # stored after it was said
    rig.put(namespace, keys_of(20))
    assert there(rig, namespace) == [*range(12), 13, 14, 15, 20]
    rig.put(namespace, keys_of(21, 22))
    assert there(rig, namespace) == [*range(10), 13, 14, 15, 20, 21, 22]
    rig.cache.lookup(namespace, 1, 1, [(0, keys_of(8))])
    rig.cache.touch(1)
    rig.cache.release(1, [1])
    rig.put(namespace, keys_of(23))
    assert {8, 23} < set(there(rig, namespace)), "somebody asked for it again"
    check_invariants(rig.cache)


def test_what_is_to_stay_is_passed_over_for_its_time_while_others_can_go(rig: CacheHarness) -> None:
    namespace = rig.open()
    rig.put(namespace, keys_of(*range(16)))
    mark(rig, namespace, keys_of(15), 1, 60.0)
    mark(rig, namespace, keys_of(14), 5, 60.0)
    rig.put(namespace, keys_of(*range(20, 34)))
    assert there(rig, namespace) == [14, 15, *range(20, 34)], "an LRU has the end of a chain go first"
    rig.cache.lookup(namespace, 1, 1, [(0, keys_of(*range(20, 34)))])
    assert rig.put(namespace, keys_of(40)) == 0, "nothing else can go"
    assert there(rig, namespace) == [14, *range(20, 34), 40], "the lower priority first"
    rig.cache.release(1, [1])
    rig.clock.now += 61.0
    rig.put(namespace, keys_of(41))
    assert 14 not in there(rig, namespace)
    check_invariants(rig.cache)


def test_marks_are_bounded_per_namespace_and_go_with_it(rig: CacheHarness) -> None:
    """An eighth of the pool of 16 blocks."""
    namespace, other = rig.open("a"), rig.open("b")
    marks = rig.cache.blocks.hints
    mark(rig, namespace, keys_of(*range(1000)), 10)
    assert [len(found) for found in marks._late.values()] == [2]
    mark(rig, other, keys_of(5), 10)
    steps = marks.set_in_steps(namespace, 0, keys_of(*range(2 * hints.MAX_MARKS)), -1, 0.0)
    assert sum(steps) == 2 * hints.MAX_MARKS
    assert next(iter(marks._first[namespace]))[2] == keys_of(hints.MAX_MARKS - 1), "the ends of prompts go first"
    assert [len(found) for found in marks._first.values()] == [hints.MAX_MARKS]
    assert list(marks._late) == [other], "the last word counts"
    mark(rig, other, keys_of(5), 0)
    assert not marks._late
    rig.cache.forget_namespace(namespace)
    assert not marks
    for number in range(2 * hints.MAX_MARKS_IN_ALL // hints.MAX_MARKS):
        mark(rig, rig.open(f"n{number}"), keys_of(*range(hints.MAX_MARKS)), -1)
    assert sum(map(len, marks._first.values())) == hints.MAX_MARKS_IN_ALL


def test_marks_of_all_namespaces_together_are_bounded(rig: CacheHarness) -> None:
    """A quarter of the pool of 16 blocks."""
    several = [rig.open(name) for name in "abc"]
    for namespace in several:
        mark(rig, namespace, keys_of(1, 2), 10)
    marks = rig.cache.blocks.hints
    assert [len(found) for found in marks._late.values()] == [2, 2]
    mark(rig, several[0], keys_of(3), 10)
    assert {one.label: [key for _, _, key in found] for one, found in marks._late.items()} == {
        "a": [keys_of(3)],
        "b": [keys_of(2)],
        "c": [keys_of(1), keys_of(2)],
    }, "whoever has most loses the oldest"


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("bounded", [True, False])
def test_users_of_eight_namespaces_do_not_keep_a_ninth_out(
    policy: str, bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the eight marks an eighth of the pool, for longer than this lasts."""
    if not bounded:
        monkeypatch.setattr(hints, "RETAINED_IN_ALL_PART", 1)
    rig = CacheHarness(regions=4, region_bytes=16 * UNIT, policy=policy)
    *others, last = several = [rig.open(str(number)) for number in range(9)]
    once = count(1000, 4)
    for number in range(400):
        request(rig, several[number % 9], number // 9 % 4 * 4)
        request(rig, several[number % 9], next(once))
    for namespace in others:
        keys = keys_of(*range(100, 108))
        ticket = rig.cache.begin_stores(namespace, 0, 0, namespace.split(0, keys), {}, starts=None)
        rig.cache.commit_store(ticket)
        mark(rig, namespace, keys, 10, 86_400.0)
    stored = last.counters.stored_blocks
    found = [request(rig, last, number % 4 * 4) for number in range(100)]
    assert last.counters.stored_blocks > stored
    assert sum(found[-40:]) == 4 * 40 or not bounded
    check_invariants(rig.cache)


def test_marks_of_blocks_that_never_came_are_forgotten(rig: CacheHarness) -> None:
    namespace = rig.open()
    mark(rig, namespace, keys_of(*range(100, 110)), -1)
    rig.put(namespace, keys_of(*range(16)))
    rig.clock.now += hints.STORED_WITHIN_S
    rig.put(namespace, keys_of(16))
    assert not rig.cache.blocks.hints


def test_a_minimum_holds_whatever_its_users_say(rig: CacheHarness) -> None:
    namespace, other = rig.open("a"), rig.open("b")
    rig.put(namespace, keys_of(*range(8)))
    rig.cache.blocks.shares.set(namespace.fingerprint, NamespaceLimits(8 * UNIT))
    mark(rig, namespace, keys_of(*range(8)), -10)
    rig.put(other, keys_of(*range(30, 60)))
    assert there(rig, namespace) == [*range(8)]
    rig.put(namespace, keys_of(9))
    assert there(rig, namespace) == [*range(7), 9]
    check_invariants(rig.cache)
