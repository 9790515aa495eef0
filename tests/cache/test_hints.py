"""Hints: what is retained goes last until its time is over, what is released goes first, and no hint pins."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from kvoffd.cache import retentions
from kvoffd.cache.awaited_keys import MAX_AWAITED
from kvoffd.cache.namespace import Namespace
from kvoffd.cache.prefetches import ASKED_AT_ONCE
from kvoffd.cache.retentions import AWAITED_S, RETAINED_SHARE
from kvoffd.cache.tickets import StorePart
from kvoffd_proto.messages import HintAction
from tests.kit.amount import TIMES
from tests.kit.lines import lines_of
from tests.kit.slot_cache import CacheRig, check_invariants, keys_of

BLOCKS = 64
MAX_RETAINED = int(RETAINED_SHARE * BLOCKS)
POLICIES = "lru", "learned", "arc"


class Hinted(CacheRig):
    """A pool of 64 blocks, or more, with one namespace."""

    def __init__(self, policy: str = "lru", blocks: int = BLOCKS) -> None:
        super().__init__(blocks, BLOCKS, policy)
        self.namespace = self.open()

    def hint(
        self, action: str, *numbers: int, ttl_s: float = 60.0, priority: int = 50, giver: int = 1, session: int = 1
    ) -> int:
        groups = [(0, keys_of(*numbers))]
        return self.cache.hint(
            self.namespace, HintAction(action), groups, priority, ttl_s, session=session, giver=giver
        )

    def put(self, *numbers: int, giver: int = 1) -> None:
        self.ask(self.namespace, keys_of(*numbers), giver=giver)
        check_invariants(self.cache)

    @property
    def retained(self) -> int:
        return self.cache.order.retentions.retained_bytes // self.unit

    @property
    def aside(self) -> int:
        """Number of retained blocks that are set aside."""
        outside = self.cache.order._outside
        return sum(len(outside.get(number, ())) for number in self.cache.order.retentions.live)

    def there(self, *numbers: int) -> list[int]:
        states = self.states(self.namespace, keys_of(*numbers))
        return [number for number, state in zip(numbers, states, strict=True) if state == 2]

    def fill(self, start: int, blocks: int = BLOCKS) -> None:
        """So many other blocks, stored one request after the other."""
        for number in range(start, start + blocks, 4):
            self.put(*range(number, number + 4), giver=number + 1000)


def released(rig: Hinted) -> list[int]:
    """Numbers of blocks that each release has released, and that are still so."""
    return [len(rig.cache.order._outside[number]) for number in rig.cache.order._released]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_retained_outlives_what_was_used_later(policy: str) -> None:
    rig = Hinted(policy)
    rig.put(1, 2, 3, 4)
    assert rig.hint("retain", 1, 2, 3, 4) == 4
    rig.fill(100, 2 * BLOCKS)
    assert rig.there(1, 2, 3, 4) == [1, 2, 3, 4]
    assert rig.look(rig.namespace, keys_of(1, 2, 3, 4)) == b"\2" * 4
    counters = rig.namespace.counters
    assert (counters.retained_blocks, counters.retained_found_keys, counters.unretained_blocks) == (4, 4, 0)
    assert rig.cache.order.retentions.retained_bytes == 4 * rig.unit


@pytest.mark.parametrize("policy", POLICIES)
def test_a_retained_block_does_not_outlive_its_time(policy: str) -> None:
    rig = Hinted(policy)
    rig.put(1, 2, 3, 4)
    rig.hint("retain", 1, 2, 3, 4, ttl_s=10)
    rig.fill(100)
    assert rig.there(1, 2, 3, 4) == [1, 2, 3, 4]
    rig.clock.now += 11
    rig.put(300)
    assert len(rig.there(1, 2, 3, 4)) == 3, "it was kept for the hint alone, so it goes first"
    rig.cache.tick()
    assert rig.cache.order.retentions.retained_bytes == 0
    rig.fill(400, 2 * BLOCKS)
    assert rig.there(1, 2, 3, 4) == []


def test_what_is_next_to_go_is_set_aside_a_few_at_a_time_and_not_in_one_eviction() -> None:
    rig = Hinted()
    rig.put(1, 2, 3, 4)
    rig.hint("retain", 1, 2, 3, 4)
    for number in range(1, 6):
        assert rig.cache.background() == (number < 5)
        assert rig.aside == min(4, number)
    rig.fill(100, 2 * BLOCKS)
    assert rig.there(1, 2, 3, 4) == [1, 2, 3, 4]


def test_blocks_of_one_retention_are_set_aside_together() -> None:
    """A store in a full pool may have to set 2,048 aside, which took 2 ms of the loop one by one."""
    rig = Hinted(blocks=1 << 16)
    for number in range(0, 1 << 16, 1024):
        rig.store(rig.namespace, keys_of(*range(number, number + 1024)))
    assert rig.hint("retain", *range(1024)) == 1024
    found = rig.cache.order._policy.first(1024)
    assert lines_of(lambda: rig.cache.order._set_aside(found)) < 200
    assert rig.aside == 1024


def test_many_retentions_lapse_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next store ended up to 1,024 of them at once, in some 4 ms of the loop."""
    monkeypatch.setattr("kvoffd.cache.retentions.LAPSED_AT_ONCE", 3)
    rig = Hinted()
    rig.fill(0)
    rig.hint("retain", *range(8), ttl_s=10)
    rig.hint("retain", *range(8, 16), ttl_s=20)
    rig.clock.now += 11
    left = []
    while rig.retained > 8:
        left.append(rig.retained)
        rig.cache.background()
    assert left == [16, 13, 10]
    check_invariants(rig.cache)
    rig.clock.now += 10
    for number in range(300, 300 + 2 * BLOCKS):
        rig.put(number)
    assert (rig.there(*range(16)), rig.retained) == ([], 0)


def test_released_blocks_go_in_the_order_of_the_releases_each_of_which_has_a_table_of_its_own() -> None:
    """A table of 100,000 blocks took 6 ms of the loop to grow."""
    rig = Hinted()
    rig.fill(0)
    for number in (16, 4, 40):
        rig.put(*range(number + 1000, number + 1004))
    for number in (16, 4, 40):
        rig.hint("release", *range(number + 1000, number + 1004))
    assert released(rig) == [4, 4, 4]
    rig.hint("release", 1005, 1041)
    assert released(rig) == [4, 3, 3, 2]
    expected = [[number + 1003 - at for at in range(4)] for number in (16, 4, 40)]
    left = [key for part in expected for key in part if key not in (1005, 1041)] + [1041, 1005]
    for number in range(len(left)):
        assert set(rig.there(*left)) == {*left[number:]}
        rig.put(2000 + number)
    assert not rig.cache.order._released


def test_what_one_turn_cannot_set_aside_is_evicted_as_if_it_had_no_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffd.cache.hints.SET_ASIDE_AT_ONCE", 4)
    rig = Hinted()
    rig.fill(0)
    rig.hint("retain", *range(16))
    rig.put(*range(100, 108))
    assert (rig.aside, len(rig.there(*range(16)))) == (4, 8)
    while rig.cache.background():
        pass
    rig.fill(200, 2 * BLOCKS)
    assert len(rig.there(*range(16))) == 8


def test_an_eviction_and_the_step_behind_it_set_aside_what_one_step_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are one turn of the loop. What is left is for the next step."""
    monkeypatch.setattr("kvoffd.cache.hints.SET_ASIDE_AT_ONCE", 8)
    rig = Hinted(blocks=256)
    rig.fill(0, 256)
    rig.hint("retain", *range(4), *range(8, 40))
    rig.ask(rig.namespace, keys_of(5000))
    assert (rig.aside, rig.there(*range(8))) == (4, [0, 1, 2, 3, 4, 5, 6]), "one that is not retained went"
    assert rig.cache.background()
    assert 4 <= rig.aside <= 8
    while rig.cache.background():
        pass
    assert rig.aside == 36


class NeverAnswering:
    """A store that is asked for keys, which are ``asked``, and has not answered."""

    def __init__(self, asked: list[bytes]) -> None:
        self._asked = asked

    def find(self, lease: Any, groups: Any, states: list[bytes], asked_keys: None) -> list[bytes]:
        self._asked.append(groups[0][1])
        lease.coming = lease.asking = 1
        return states

    def lease_ended(self, lease: Any) -> None: ...


def test_a_tick_asks_again_for_some_prefetches_and_for_all_in_turns() -> None:
    rig, asked = Hinted(), list[bytes]()
    rig.cache.life.tiers = NeverAnswering(asked)  # type: ignore[assignment]
    for number in range(3 * ASKED_AT_ONCE):
        rig.hint("prefetch", number)
    first = list(asked)
    for tick in range(1, 4):
        rig.cache.tick()
        assert len(asked) == len(first) + tick * ASKED_AT_ONCE
    assert asked == first + first


def test_prefetches_of_one_session_leave_others_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffd.cache.prefetches.MAX_PREFETCHES", 6)
    rig, asked = Hinted(), list[bytes]()
    rig.cache.life.tiers = NeverAnswering(asked)  # type: ignore[assignment]
    for session, prefetches in ((1, 8), (2, 5), (3, 1), (1, 1)):
        for number in range(prefetches):
            rig.hint("prefetch", 100 * session + number, session=session)
    waiting = [keys for ((_, keys),) in rig.cache._prefetches._groups.values()]
    assert waiting == [keys_of(number) for number in (100, 101, 200, 201, 202, 300)], "the first of each"
    assert len(asked) == 6 + 3 + 1


def test_blocks_that_are_stored_after_the_hint_are_retained_too() -> None:
    rig = Hinted()
    rig.hint("retain", 1, 2, 3, 4)
    rig.put(1, 2, 3, 4)
    rig.fill(100, 2 * BLOCKS)
    assert rig.there(1, 2, 3, 4) == [1, 2, 3, 4]
    rig.hint("retain", 5, ttl_s=1000)
    rig.clock.now += AWAITED_S + 1
    rig.cache.tick()
    rig.put(5)
    assert rig.namespace.counters.retained_blocks == 4, "the engine stores soon or never"


def test_only_a_part_of_the_pool_and_of_a_quota_is_retained_and_the_root_first() -> None:
    rig = Hinted()
    rig.fill(0)
    rig.hint("retain", *range(BLOCKS))
    assert rig.cache.order.retentions.retained_bytes == MAX_RETAINED * rig.unit
    assert rig.namespace.counters.unretained_blocks == BLOCKS - MAX_RETAINED
    rig.fill(100)
    assert rig.there(*range(BLOCKS)) == list(range(MAX_RETAINED))
    other = Hinted()
    other.cache.quotas[other.namespace.fingerprint] = 16 * other.unit
    other.put(*range(8))
    other.hint("retain", *range(8))
    assert other.cache.order.retentions.retained_bytes == int(RETAINED_SHARE * 16) * other.unit


def test_nothing_is_pinned() -> None:
    """Where nothing else can go, retained blocks go, the lowest priority first."""
    rig = Hinted()
    rig.fill(0)
    rig.hint("retain", *range(8), priority=60)
    rig.hint("retain", *range(8, 16), priority=40)
    namespace = rig.namespace
    rig.cache.lookup(namespace, 1, 2**40, [(0, keys_of(*range(16, BLOCKS)))])  # all others are in use
    rig.store(namespace, keys_of(*range(200, 208)))
    assert rig.there(*range(16)) == list(range(8))
    check_invariants(rig.cache)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_released_goes_first_unless_it_is_found_before(policy: str) -> None:
    rig = Hinted(policy)
    rig.fill(0, BLOCKS - 4)
    rig.put(100, 101, 102, 103)
    rig.hint("retain", 100)
    rig.hint("release", 100, 101, 102, 103)
    assert rig.cache.order.retentions.retained_bytes == 0, "the last hint counts"
    rig.look(rig.namespace, keys_of(100, 101))
    check_invariants(rig.cache)
    rig.put(200, 201)
    assert rig.there(100, 101, 102, 103) == [100, 101]
    assert rig.namespace.counters.released_blocks == 4


def test_of_several_hints_the_one_that_lasts_longest_counts() -> None:
    rig = Hinted()
    rig.put(1, 2)
    rig.hint("retain", 1, 2, ttl_s=100)
    rig.hint("retain", 1, ttl_s=10)
    rig.hint("retain", 2, ttl_s=1000)
    assert rig.namespace.counters.retained_blocks == 2
    for seconds, retained in ((50, 2), (100, 1), (1000, 0)):
        rig.clock.now += seconds
        rig.cache.tick()
        assert rig.cache.order.retentions.retained_bytes == retained * rig.unit


def test_a_key_that_is_retained_is_admitted() -> None:
    """``learned`` would store none of these keys, which it saw and rejected."""
    rig = Hinted("learned")
    rig.fill(0)
    group = rig.namespace.group(0)
    rig.policy.admit(group, keys_of(500), (0,))
    rig.policy.rejected(group, keys_of(500))
    rig.store(rig.namespace, keys_of(500))
    assert rig.there(500) == []
    rig.hint("retain", 500)
    rig.store(rig.namespace, keys_of(500))
    assert rig.there(500) == [500]


@pytest.mark.parametrize("named", [(502,), (500, 502)])
def test_what_comes_before_a_key_that_is_retained_is_admitted_too(named: tuple[int, ...]) -> None:
    """No lookup finds the one without the others. What comes behind it, and another chain, is up to the policy."""
    rig = Hinted("learned")
    rig.fill(0)
    group, keys = rig.namespace.group(0), keys_of(*range(600, 602), *range(500, 504))
    rig.policy.admit(group, keys, (0, 2))
    rig.policy.rejected(group, keys)
    rig.hint("retain", *named)
    (stored,) = rig.begin(rig.namespace, 0, 0, keys, starts=(0, 2))
    assert (stored.copy, stored.rejected) == ([2, 3, 4], [0, 1, 5])
    rig.commit([stored])
    assert rig.there(*range(500, 504)) == [500, 501, 502]
    assert rig.retained == len(named), "the others are not the hint's"
    check_invariants(rig.cache)


def test_hints_of_keys_that_never_come_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Hinted()
    monkeypatch.setattr("kvoffd.cache.awaited_keys.MAX_AWAITED", 100)
    rig.hint("retain", *range(5000, 6000), giver=2)
    assert len(rig.cache.order.retentions.awaited) == MAX_RETAINED, "more could not be retained"
    for start in range(0, 1000, 10):
        rig.hint("retain", *range(start, start + 10), giver=start + 3)
    assert len(rig.cache.order.retentions.awaited) == 100 < MAX_AWAITED
    rig.clock.now += AWAITED_S + 1
    rig.cache.tick()
    assert not rig.cache.order.retentions.awaited
    assert not rig.cache.order.retentions.live
    assert not rig.cache.order._outside


def test_the_numbers_of_retentions_never_end() -> None:
    """They are of 32 bits. What is retained stays so, and what was retained is no later retention's."""
    rig = Hinted()
    rig.put(1, 2, 3, 4, 5, 6)
    rig.hint("retain", 1, 2, ttl_s=10)
    rig.hint("retain", 3, 4)
    rig.clock.now += 11
    rig.cache.tick()
    rig.cache.order.retentions._last_number = 2**32 - 1
    rig.hint("retain", 5, 6)
    check_invariants(rig.cache)
    assert rig.retained == 4
    rig.fill(100, 2 * BLOCKS)
    assert rig.there(1, 2, 3, 4, 5, 6) == [3, 4, 5, 6]
    rig.clock.now += 61
    rig.cache.tick()
    assert rig.retained == 0


def test_a_hint_whose_retention_has_ended_takes_no_other_for_it_that_has_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retentions, "LEAST_RETENTIONS", 1)  # one may have several blocks
    rig = Hinted()
    rig.put(1, 5, 6)
    rig.hint("retain", 1, 9)  # one of the two is still to be stored
    rig.hint("release", 1)
    rig.cache.order.retentions._last_number = 2**32 - 1
    rig.hint("retain", 5)
    rig.hint("retain", 6)
    rig.put(9)
    assert rig.retained == 3
    assert sorted(one.nbytes // rig.unit for one in rig.cache.order.retentions.live.values()) == [1, 1, 1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("seed", "numbers"), [(0, retentions.MAX_NUMBER), (2, 100), (3, 100)])
def test_all_accounts_agree_whatever_is_done(
    policy: str, seed: int, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks in all places, with hints that lapse, are found, pinned, evicted, invalidated and reset."""
    monkeypatch.setattr(retentions, "MAX_NUMBER", numbers)
    monkeypatch.setattr("kvoffd.cache.victims.MAX_SKIPPED_PINNED", 2)
    monkeypatch.setattr("kvoffd.cache.hints.PASSED_AT_ONCE", 5)
    rig, chance, held = Hinted(policy), Random(seed), 0
    spaces = [rig.namespace, rig.open("b")]
    rig.cache.quotas[spaces[1].fingerprint] = 24 * rig.unit

    def some() -> bytes:
        start = chance.randrange(100)
        return keys_of(*range(start, start + chance.randrange(1, 9)))

    def act(space: Namespace) -> Any:
        nonlocal held
        actions = "ask", "ask", "ask", "look", "hold", "hold", "let go", "retain", "retain", "release", "drop", "reset"
        what, keys = chance.choice(actions), some()
        if what == "hold":
            held += 1
            rig.cache.lookup(space, 2, held, [(0, keys)], again=chance.random() < 0.5)
        elif what == "let go":
            rig.cache.leases.end(2, [held - chance.randrange(10)])
        elif what == "ask":
            rig.ask(space, keys, giver=chance.randrange(4))
        elif what == "look":
            rig.look(space, keys, giver=chance.randrange(4))
        elif what == "drop":
            rig.cache.invalidate(space, [(0, keys)])
        elif what == "reset":
            if chance.random() < 0.1:
                rig.cache.reset(space)
        else:
            rig.cache.hint(
                *(space, HintAction(what), [(0, keys + keys[:8])], chance.randrange(101), chance.uniform(1, 60)),
                session=chance.randrange(1, 4),
                giver=chance.randrange(4),
            )

    passed = 0
    for step in range(400):
        act(chance.choice(spaces))
        rig.clock.now += chance.uniform(0, 2)
        rig.cache.tick()
        if step % 4 == 0:  # which takes most of the time
            check_invariants(rig.cache)
        assert rig.cache.order.retentions.retained_bytes <= MAX_RETAINED * rig.unit
        assert rig.cache.order.retentions._last_number <= numbers
        assert rig.cache.order.retentions.numbers.tolist() == sorted(rig.cache.order.retentions.live)
        first = rig.cache.order.first(8)
        if policy != "arc":  # whose order follows its queues' sizes, which setting blocks aside changes
            assert np.array_equal(first, rig.cache.order.first(64)[: len(first)])
        every = [block for batch in rig.cache.order.candidates() for block in batch.tolist()]
        assert len({*every}) == len(every)
        passed += bool(rig.cache.order.passed_over)
    assert passed


# --- hints of several givers ------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_release_does_not_end_what_another_giver_retains(policy: str) -> None:
    rig = Hinted(policy)
    rig.put(1, 2, 3, 4)
    rig.hint("retain", 1, 2, 3, 4, priority=100, ttl_s=3600)
    rig.put(1, 2, 3, 4, giver=2)
    for giver in (2, 0):
        rig.hint("release", 1, 2, 3, 4, giver=giver)
    rig.fill(100, 2 * BLOCKS)
    assert rig.there(1, 2, 3, 4) == [1, 2, 3, 4]
    rig.hint("release", 1, 2, 3, 4)
    assert rig.retained == 0
    assert rig.namespace.counters.released_blocks == 0, "another has found them"


def test_blocks_that_two_retain_are_ended_by_neither_and_lose_nothing() -> None:
    for order in ((1, 2), (2, 1)):
        rig = Hinted()
        rig.put(1, 2)
        for giver in order:
            rig.hint("retain", 1, 2, giver=giver, priority=100 * (giver == 1), ttl_s=10 * giver)
        for giver in (1, 2):
            rig.hint("release", 1, 2, giver=giver)
        rig.hint("retain", *range(10, 40), priority=99, giver=3)
        rig.fill(10)
        rig.clock.now += 15
        rig.cache.tick()
        assert rig.there(1, 2) == [1, 2]
        check_invariants(rig.cache)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("first", [1, 2])
def test_what_another_giver_asked_for_is_not_released(policy: str, first: int) -> None:
    """One prompt finds what the other has stored, or both compute it at a time."""
    rig = Hinted(policy)
    rig.fill(100, BLOCKS - 8)
    rig.look(rig.namespace, keys_of(1, 2, 3, 4), giver=first)
    rig.put(1, 2, 3, 4, giver=3 - first)
    rig.put(5, 6, 7, 8, giver=2)
    rig.hint("release", *range(1, 9), giver=2)
    rig.put(*range(200, 208))
    assert rig.there(*range(1, 9)) == [1, 2, 3, 4]


def test_a_released_block_is_found_by_another_prompt_though_it_asks_again() -> None:
    """A prompt's second lookup does not tell the policy."""
    rig = Hinted()
    rig.fill(100, BLOCKS - 4)
    rig.put(1, 2, 3, 4)
    rig.hint("release", 1, 2, 3, 4)
    rig.cache.lookup(rig.namespace, 9, 2**62, [(0, keys_of(1, 2, 3, 4))], again=True, giver=2)
    rig.cache.leases.end(9, [2**62])
    rig.put(200, 201, 202, 203)
    assert rig.there(1, 2, 3, 4) == [1, 2, 3, 4]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_not_there_is_not_released_ahead(policy: str) -> None:
    rig = Hinted(policy)
    rig.fill(100, BLOCKS - 4)
    rig.hint("release", 1, 2, 3, 4)
    rig.put(1, 2, 3, 4)
    rig.put(200, 201, 202, 203)
    assert rig.there(1, 2, 3, 4) == [1, 2, 3, 4]


@pytest.mark.parametrize(("retained_by", "released_by", "is_retained"), [(1, 1, 0), (2, 1, 1), (0, 0, 1)])
def test_a_release_ends_what_its_giver_retained_ahead(retained_by: int, released_by: int, is_retained: int) -> None:
    rig = Hinted()
    rig.hint("retain", 1, giver=retained_by)
    rig.hint("release", 1, giver=released_by)
    rig.put(1, giver=retained_by)
    assert rig.retained == is_retained


def test_a_release_leaves_what_another_giver_retained_ahead_too() -> None:
    rig = Hinted()
    for giver in (1, 2):
        rig.hint("retain", 1, giver=giver)
    rig.hint("release", 1, giver=1)
    rig.put(1)
    assert rig.retained == 1


def test_what_was_recovered_or_came_from_a_tier_is_nobodys_to_release() -> None:
    rig = Hinted()
    rig.look(rig.namespace, keys_of(1), giver=1)
    (ticket,) = rig.cache.stores.begin_fills(rig.namespace.group(0), [keys_of(1)])
    assert rig.cache.stores.commit_fill(ticket, [0], [1])
    rig.hint("release", 1)
    assert rig.namespace.counters.released_blocks == 0


@pytest.mark.parametrize("stored_first", [False, True])
def test_a_higher_priority_displaces_a_lower_one(stored_first: bool) -> None:
    rig = Hinted()
    if stored_first:
        rig.put(*range(100, 132))
        rig.put(1, 2, 3, 4)
    rig.hint("retain", *range(100, 132), priority=0, ttl_s=86400, giver=2)
    rig.hint("retain", 1, 2, 3, 4, priority=100)
    if not stored_first:
        rig.put(*range(100, 132))
        rig.put(1, 2, 3, 4)
    rig.hint("retain", *range(100, 132), priority=100, ttl_s=86400, giver=2)
    assert rig.retained == MAX_RETAINED
    rig.fill(200, 2 * BLOCKS)
    assert rig.there(1, 2, 3, 4) == [1, 2, 3, 4]


def test_each_session_has_its_share_whatever_the_priority() -> None:
    rig = Hinted()
    rig.put(*range(100, 116))
    rig.put(*range(12))
    rig.hint("retain", *range(100, 116), priority=100, giver=2, session=2)
    rig.hint("retain", *range(12), priority=0)
    by_session = rig.cache.order.retentions._bytes_of
    assert by_session[1] == by_session[2] == MAX_RETAINED // 2 * rig.unit
    rig.hint("retain", *range(100, 116), priority=100, giver=2, session=2)
    assert by_session[1] == by_session[2]
    check_invariants(rig.cache)
    rig.fill(200, 2 * BLOCKS)
    assert rig.there(*range(12)) == [*range(8)], "the root first"


@pytest.mark.parametrize("of_quota", [False, True])
def test_a_session_takes_nothing_of_another_beyond_its_share(of_quota: bool) -> None:
    """What nobody retains counts as its own: it needs no more of what others retain than its share lacks then."""
    rig = Hinted()
    rig.put(*range(100, 109))
    rig.put(*range(200, 202))
    rig.put(*range(8))
    if of_quota:
        rig.cache.quotas[rig.namespace.fingerprint] = BLOCKS * rig.unit
    for session, first, blocks in ((2, 100, 9), (3, 200, 2)):
        rig.hint("retain", *range(first, first + blocks), priority=100, giver=session, session=session)
    rig.hint("retain", *range(8), priority=0)
    by_session = rig.cache.order.retentions._bytes_of
    assert by_session == {1: 5 * rig.unit, 2: 9 * rig.unit, 3: 2 * rig.unit}
    check_invariants(rig.cache)


@pytest.mark.parametrize("session", [1, 2])
def test_awaited_keys_of_one_giver_do_not_push_out_another_s(session: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffd.cache.awaited_keys.MAX_AWAITED", 64)
    rig = Hinted()
    rig.hint("retain", 1, 2, 3, 4)
    for giver in range(8):
        rig.hint("retain", *range(100 * giver + 100, 100 * giver + 132), giver=10 + giver, session=session)
    assert len(rig.cache.order.retentions.awaited) == 64
    rig.put(1, 2, 3, 4)
    assert rig.retained == 4


@pytest.mark.parametrize("seed", range(5 * TIMES**2))
def test_no_block_of_another_prompt_goes_earlier_for_a_release(seed: int) -> None:
    """The same prompts, of one block each, with and without one giver's releases, some at a time with one of another
    giver: what others asked for is there as long."""
    chance, rigs, of_others, harmful = Random(seed), [Hinted(), Hinted()], set[int](), 1
    for _ in range(800):
        key, givers = chance.randrange(96), [chance.randrange(4) for _ in range(chance.choice((1, 1, 2)))]
        released = range(key - key % 8, key + 1) if chance.random() < 0.2 else ()
        for rig, with_releases in zip(rigs, (False, True), strict=True):
            for giver in givers:
                rig.look(rig.namespace, keys_of(key), giver=giver)
            rig.store(rig.namespace, keys_of(key))
            if with_releases and released:
                rig.hint("release", *released, giver=harmful)
        if {*givers} != {harmful}:
            of_others.add(key)
        of_others, there = ({*rig.there(*of_others)} for rig in rigs)
        assert of_others <= there, f"{givers} {key} {released}"
    assert rigs[1].namespace.counters.released_blocks


@pytest.mark.parametrize("seed", range(5 * TIMES**2))
def test_what_is_retained_stays_whatever_hints_of_a_lower_priority_follow(seed: int) -> None:
    """Two givers behind one engine, and traffic: what one retains at the highest priority, within the quarter."""
    chance, rig, retained = Random(seed), Hinted(), set[int]()
    for _ in range(120):
        first, what = 8 * chance.randrange(12), chance.choice(("own", "retain", "release", "ask", "ask"))
        numbers = range(first, first + chance.randint(1, 8))
        if what == "own":
            if len(retained | {*numbers}) <= MAX_RETAINED:
                rig.ask(rig.namespace, keys_of(*numbers), giver=1)
                rig.hint("retain", *numbers, priority=100, ttl_s=3600)
                retained |= {*numbers}
        elif what == "ask":
            rig.ask(rig.namespace, keys_of(*numbers), giver=2)
        else:
            rig.hint(what, *numbers, priority=chance.randrange(100), ttl_s=chance.choice((1, 9999)), giver=2)
        rig.clock.now += 1
        assert {*rig.there(*retained)} == retained, f"{what} {[*numbers]}"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_released_block_whose_key_a_lookup_names_twice_is_in_the_order_once(policy: str) -> None:
    rig = Hinted(policy)
    rig.put(1, 2, 3)
    rig.hint("release", 1, 2)
    rig.look(rig.namespace, keys_of(1, 1, 2))
    order = np.concatenate([*rig.cache.order.candidates()]).tolist()
    assert sorted(order) == sorted(rig.blocks(rig.namespace, keys_of(1, 2, 3)).tolist())
    rig.cache.invalidate(rig.namespace, [(0, keys_of(1))])
    check_invariants(rig.cache)


@pytest.mark.parametrize("policy", POLICIES)
def test_pinned_blocks_that_are_passed_over_keep_their_hints(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffd.cache.victims.MAX_SKIPPED_PINNED", 2)
    rig = Hinted(policy)
    rig.put(1, 2, 3, 4)
    rig.hint("retain", 1, 2)
    rig.cache.tick()  # sets one of them aside
    rig.cache.lookup(rig.namespace, 1, 5, [(0, keys_of(1, 2, 3, 4))])
    rig.fill(100, 2 * BLOCKS)
    assert rig.cache.order.retentions.retained_bytes == 2 * rig.unit
    check_invariants(rig.cache)
    rig.cache.leases.end(1, [5])
    assert rig.cache.order.retentions.retained_bytes == 2 * rig.unit
    order = np.concatenate([*rig.cache.order.candidates()]).tolist()
    assert len(order) == len(set(order)) == BLOCKS


@pytest.mark.parametrize("policy", POLICIES)
def test_pinned_blocks_that_are_passed_over_stay_those_of_all_who_asked_for_them(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another prompt found them in the pool; the first asked for them before they were there."""
    monkeypatch.setattr("kvoffd.cache.victims.MAX_SKIPPED_PINNED", 2)
    rig = Hinted(policy)
    rig.put(1, 2, 3, 4)
    rig.look(rig.namespace, keys_of(1, 2, 3, 4), giver=2)
    rig.cache.lookup(rig.namespace, 1, 5, [(0, keys_of(1, 2, 3, 4))], giver=2)
    rig.fill(100, 2 * BLOCKS)
    rig.cache.leases.end(1, [5])
    rig.hint("release", 1, 2, 3, 4)
    assert rig.namespace.counters.released_blocks == 0


def test_a_session_gets_its_share_though_it_displaces_some_of_its_own() -> None:
    rig = Hinted()
    rig.put(*range(100, 112))
    rig.put(*range(4))
    rig.hint("retain", *range(100, 112), priority=100, giver=2, session=2)
    rig.hint("retain", *range(4), priority=0)
    rig.put(*range(10, 22))
    rig.hint("retain", *range(10, 22), priority=50)
    assert rig.cache.order.retentions._bytes_of == dict.fromkeys((1, 2), MAX_RETAINED // 2 * rig.unit)
    check_invariants(rig.cache)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("what", ["set aside", "lapsed", "released"])
def test_a_prompt_goes_on_behind_a_block_that_is_not_in_the_policy_s_order(policy: str, what: str) -> None:
    rig = Hinted(policy)
    rig.put(1, 2, 3, 4)
    rig.hint("release" if what == "released" else "retain", 1, 2, 3, 4, ttl_s=10)
    while rig.cache.background():
        pass
    if what != "released":
        assert rig.aside == 4
    rig.clock.now += 11 * (what == "lapsed")
    rig.cache.tick()
    (stored,) = rig.cache.stores.begin(rig.namespace, 0, [StorePart(0, keys_of(5, 6), before={0: keys_of(4)})])
    assert rig.commit([stored]) == 2
    check_invariants(rig.cache)
    rig.fill(100, 2 * BLOCKS)
    assert rig.there(1, 2, 3, 4, 5, 6) == ([1, 2, 3, 4] if what == "set aside" else [])
    check_invariants(rig.cache)
