"""Blocks come up from a tier: asked for, pending, ready; and what goes wrong on the way leaves nothing behind."""

from __future__ import annotations

import pytest

from kvoffd.cache import POLICY_NAMES
from kvoffd.cache.asked_keys import PromptUse
from kvoffd.cache.block_table import BlockIds
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.tiering import TieringSettings, WriteMode, promotion_source, promotions
from kvoffd.tiering.promotion_source import (
    BEGUN_PER_END,
    ENDED_AT_ONCE,
    MAX_BEGUN,
    MAX_WITHOUT_SPACE,
)
from kvoffd.tiers.tier import PRESENT, Result
from kvoffd_proto.messages import ABSENT, PENDING, READY, SHARED, HintAction
from tests.kit.fake_tier import FakeTier
from tests.kit.slot_cache import UNIT, check_invariants, keys_of
from tests.kit.tiering_harness import TieringHarness

QUIET = TieringSettings(mode=WriteMode.NEVER)


@pytest.fixture
def rig() -> TieringHarness:
    return TieringHarness(settings=QUIET)


def pin_others(rig: TieringHarness, space: Namespace, *numbers: int) -> BlockIds:
    """Store blocks of these keys, and pin them."""
    rig.put(space, keys_of(*numbers))
    pinned = rig.blocks(space, keys_of(*numbers))
    rig.cache.blocks.pin(pinned)
    return pinned


@pytest.mark.parametrize("fault", [None, Result.FAILED])
def test_what_is_not_read_in_time_is_absent_and_its_key_is_free(rig: TieringHarness, fault: Result | None) -> None:
    space = rig.open()
    rig.put_in_tier(space, keys_of(1))
    rig.states(space, keys_of(1))
    rig.tiering.pump()
    rig.clock.now += 6.0
    rig.tiering.tick()
    assert rig.source.failures["overdue"] == 1
    assert +space.counters.misses == {MissReason.TIER_LATE: 1}
    assert rig.index(space) == {}
    check_invariants(rig.cache)
    rig.put(space, keys_of(1))
    assert rig.states(space, keys_of(1)) == [READY]
    rig.tier.end_all(fault=fault)  # the tier was slow, and writes into its own slots only
    assert rig.cache.life.usage.writing == 0
    assert rig.source.failures == {"overdue": 1}
    rig.check()


@pytest.mark.parametrize(
    ("fault", "miss"),
    [
        (Result.FAILED, MissReason.TIER_FAILED),
        (Result.CORRUPT, MissReason.CORRUPT),
        (Result.GONE, MissReason.EVICTED),
        (Result.DEADLINE, MissReason.TIER_LATE),
    ],
)
def test_what_fails_is_absent(rig: TieringHarness, fault: Result, miss: MissReason) -> None:
    space = rig.open(world_size=2)
    rig.put_in_tier(space, keys_of(1))
    free = rig.slots.free_bytes
    rig.states(space, keys_of(1))
    rig.tiering.pump()
    rig.tier.end_all(fault=fault)
    assert rig.source.failures == {fault.value: 1}
    assert +space.counters.misses == {miss: 1}
    assert rig.index(space) == {}
    assert rig.slots.free_bytes == free
    rig.check()


def test_what_comes_up_waits_for_space_and_evicts_nothing_that_is_pinned(rig: TieringHarness) -> None:
    space = rig.open(sizes=(4 * UNIT,))
    rig.put_in_tier(space, keys_of(1, 2))
    pinned = pin_others(rig, space, 11, 12, 13, 14)
    assert rig.states(space, keys_of(1, 2)) == [PENDING] * 2
    for _ in range(2):
        rig.tiering.tick()
        assert rig.states(space, keys_of(1, 2), again=True) == [PENDING] * 2
        rig.clock.now += 0.9 * QUIET.deadline_s
    assert not rig.tier.jobs
    rig.tiering.tick()
    assert rig.source.failures["no_space"] == 2, "all that the lookup waits for"
    assert rig.states(space, keys_of(1), again=True) == [ABSENT], "a repeated lookup does not begin to wait for space"
    assert rig.states(space, keys_of(1)) == [PENDING], "another request may have more luck"
    rig.cache.life.unpin(pinned)
    rig.finish_promotions()
    assert rig.states(space, keys_of(1)) == [READY]
    assert rig.states(space, keys_of(2), again=True) == [PENDING]
    rig.stop_waiting()
    rig.check()


def test_a_session_that_wants_very_much_leaves_a_part_of_the_queue_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotions, "MAX_QUEUED", 64)
    rig = TieringHarness(settings=QUIET, regions=64)
    space = rig.open()
    rig.put_in_tier(space, keys_of(*range(64 + 8)))
    ((states,), _) = rig.cache.lookup(space, 1, 1, [(0, keys_of(*range(64)))])
    assert states.count(ABSENT) == pytest.approx(64 / 4, abs=2)
    assert states.count(PENDING) + states.count(ABSENT) == 64
    assert +space.counters.misses == {MissReason.TIER_LATE: states.count(ABSENT)}
    ((states,), _) = rig.cache.lookup(space, 2, 2, [(0, keys_of(*range(64, 64 + 8)))])
    assert states.count(PENDING) == 8


# --- who waits, and what it holds ------------------------------------------------------------------


def look_up(rig: TieringHarness, space: Namespace, lease: int, keys: bytes, session: int = 1) -> bytes:
    ((states,), _) = rig.cache.lookup(space, session, lease, [(0, keys)])
    return states


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_what_comes_up_is_held_for_those_that_wait_until_they_look_again(policy: str) -> None:
    """Three prompts, each of a quarter of the pool: as many reads as blocks, whatever the policy thinks of them."""
    rig = TieringHarness(settings=QUIET, regions=4, policy=policy)
    space, prompts = rig.open(), [range(4), range(10, 14), range(20, 24)]
    for prompt in prompts:
        rig.put_in_tier(space, keys_of(*prompt))
    rig.put(space, keys_of(*range(100, 116)))
    for lease, prompt in enumerate(prompts):
        assert look_up(rig, space, lease, keys_of(*prompt)) == bytes([PENDING] * 4)
    while rig.source.unended_blocks:
        rig.tiering.pump()
        rig.tier.end(next(iter(rig.tier.jobs)))
    assert rig.source.promoted_blocks == 12
    for key in range(200, 216):  # more than the pool holds, in the place of what is not held
        rig.put(space, keys_of(key))
    for lease, prompt in enumerate(prompts):
        assert look_up(rig, space, 10 + lease, keys_of(*prompt)) == bytes([READY] * 4)
        rig.cache.leases.end(1, [lease])
    assert len(rig.cache.leases.by_id[10].blocks) == 4
    rig.cache.end_session(1)
    rig.check()


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize(("root", "ends"), [(0, -1), (0, 0), (3, 0)])
def test_of_a_prompt_that_came_up_the_tail_is_evicted_first(policy: str, root: int, ends: int) -> None:
    """Whatever of its root the pool had before, and whether the first or the last of the reads that run ends first."""
    rig = TieringHarness(settings=QUIET, regions=4, policy=policy)
    space, keys = rig.open(), keys_of(*range(8))
    rig.put_in_tier(space, keys)
    if root:
        rig.put(space, keys_of(*range(root)))
    rig.use(space, keys)
    while rig.source.unended_blocks:
        rig.tiering.pump()
        rig.tier.end(list(rig.tier.jobs)[ends])
    assert rig.states(space, keys, again=True) == [READY] * 8
    rig.cache.leases.end(1, [1])
    for key in range(100, 112):  # four more than are free
        rig.put(space, keys_of(key))
    assert [len(rig.blocks(space, keys_of(key))) for key in range(8)] == [1] * 4 + [0] * 4
    rig.check()


def test_what_a_hint_retains_of_a_prompt_that_came_up_stays_where_it_is() -> None:
    rig = TieringHarness(settings=QUIET, regions=4)
    space, keys = rig.open(), keys_of(*range(4))
    rig.put_in_tier(space, keys)
    rig.use(space, keys)
    while rig.source.unended_blocks:
        rig.bring_up()
    rig.cache.hint(space, HintAction.RETAIN, [(0, keys_of(1, 2))], ttl_s=60.0)
    rig.cache.order._set_aside(rig.blocks(space, keys_of(1, 2)))
    rig.cache.leases.end(1, [1])
    for key in range(100, 114):
        rig.put(space, keys_of(key))
    assert [len(rig.blocks(space, keys_of(key))) for key in range(4)] == [0, 1, 1, 0]
    rig.check()


def test_blocks_behind_one_that_has_left_the_tier_are_read_at_once(rig: TieringHarness) -> None:
    space, keys = rig.open(), keys_of(1, 2, 3)
    rig.put_in_tier(space, keys)
    look_up(rig, space, 1, keys)
    del rig.tier.blocks[rig.group(space).tag, keys_of(1)]
    rig.tiering.pump()
    assert [job.key for job in rig.tier.jobs] == [keys_of(2), keys_of(3)]
    assert rig.source.failures == {Result.GONE.value: 1}
    rig.tier.end_all()
    rig.cache.end_session(1)


def test_prompts_that_do_not_fit_the_pool_together_come_up_one_after_another() -> None:
    rig = TieringHarness(settings=QUIET, regions=4)
    space, prompts = rig.open(), [range(8), range(10, 18), range(20, 28)]
    for prompt in prompts:
        rig.put_in_tier(space, keys_of(*prompt))
    for lease, prompt in enumerate(prompts):
        assert look_up(rig, space, lease, keys_of(*prompt)) == bytes([PENDING] * 8)
    for lease, prompt in enumerate(prompts):
        rig.bring_up()
        assert look_up(rig, space, lease, keys_of(*prompt)) == bytes([READY] * 8)
        rig.cache.leases.end(1, [lease])
    assert rig.source.promoted_blocks == 24
    rig.check()


def test_what_nobody_waits_for_any_more_is_not_read(rig: TieringHarness) -> None:
    space = rig.open()
    rig.put_in_tier(space, keys_of(*range(8)))
    look_up(rig, space, 1, keys_of(*range(8)))
    look_up(rig, space, 2, keys_of(0, 1, 2))
    rig.tiering.pump()
    assert len(rig.tier.jobs) == 2, "an eighth of the pool"
    rig.cache.leases.end(1, [1])
    assert rig.source.read_order.blocks == 1, "of what this one asked for another lookup wants the first three"
    rig.cache.leases.end(1, [2])
    assert rig.source.unended_blocks == 2, "what was begun ends by itself"
    assert rig.states(space, keys_of(7)) == [PENDING]
    rig.finish_promotions()
    assert rig.source.promoted_blocks == 3
    assert not rig.cache.life.usage.pinned
    rig.check()


def test_a_read_whose_turn_comes_after_its_prompt_was_given_up_is_none(rig: TieringHarness) -> None:
    space, keys = rig.open(), keys_of(1, 2)
    rig.put_in_tier(space, keys)
    look_up(rig, space, 1, keys)
    rig.tiering.pump()
    assert len(rig.tier.jobs) == 2
    assert all(job.is_awaited() for job in rig.tier.jobs)
    rig.cache.leases.end(1, [1])
    assert not any(job.is_awaited() for job in rig.tier.jobs)
    rig.tier.end_all(fault=Result.UNWANTED)
    assert (rig.source.promoted_blocks, rig.source.failures, +space.counters.misses) == (0, {}, {})
    assert rig.source.idle
    rig.check()
    look_up(rig, space, 2, keys)
    rig.bring_up()
    assert look_up(rig, space, 2, keys) == bytes([READY] * 2), "nothing is wrong with them"
    rig.cache.end_session(1)
    rig.check()


def test_who_joins_a_read_that_ends_as_unwanted_gets_the_block_all_the_same(rig: TieringHarness) -> None:
    space, keys = rig.open(), keys_of(1, 2, 3)
    rig.put_in_tier(space, keys)
    look_up(rig, space, 1, keys)
    rig.tiering.pump()
    rig.cache.leases.end(1, [1])
    jobs = list(rig.tier.jobs)
    for job in jobs:  # the tier asked before the next lookup, and its answer comes behind that
        job.is_awaited = lambda: False
    assert look_up(rig, space, 2, keys) == bytes([PENDING] * 3)
    for job in jobs:
        rig.tier.end(job, fault=Result.UNWANTED)
    rig.check()
    assert rig.cache.leases.by_id[2].coming == 3
    rig.bring_up()
    assert look_up(rig, space, 2, keys) == bytes([READY] * 3)
    assert rig.source.promoted_blocks == 3
    rig.cache.end_session(1)
    rig.check()


def test_slots_of_reads_that_were_given_up_are_promised_to_nobody() -> None:
    """A disk hangs with a quarter of the pool. A prompt is told only of blocks for which there is space besides."""
    rig = TieringHarness(settings=QUIET, regions=8)
    space, store = rig.open(), rig.share(QUIET)
    rig.put_in_tier(space, keys_of(*range(60)))
    move(rig, space, store, *range(20, 60))
    for number in range(2):
        look_up(rig, space, 1 + number, keys_of(*range(4 * number, 4 * number + 4)), session=2)
        rig.tiering.pump()
        rig.clock.now += QUIET.deadline_s
        rig.tiering.tick()
    rig.cache.end_session(2)
    assert len(rig.source.reads.given_up) == 8
    fits = rig.cache.leases.most_bytes // UNIT - 8
    assert rig.cache.leases.leasable_bytes == fits * UNIT
    for _ in range(2):
        states = look_up(rig, space, 3, keys_of(*range(20, 60)))
        store.answer()
    assert states == bytes([SHARED] * fits + [ABSENT] * (40 - fits))
    for _ in range(8):
        rig.tiering.pump()
        store.end_all()
    rig.clock.now += QUIET.deadline_s
    rig.tiering.tick()
    assert look_up(rig, space, 3, keys_of(*range(20, 60)))[:fits] == bytes([READY] * fits)
    assert not rig.tiering.sources[1].failures, "all that were promised have come"
    rig.tier.end_all()
    rig.cache.end_session(1)
    assert rig.cache.leases.leasable_bytes == rig.cache.leases.most_bytes
    check_invariants(rig.cache)


def test_what_was_promoted_for_nothing_is_counted(rig: TieringHarness) -> None:
    space = rig.open()
    rig.put_in_tier(space, keys_of(1, 2))
    look_up(rig, space, 1, keys_of(1, 2))
    rig.bring_up()
    look_up(rig, space, 2, keys_of(1))
    ticket = rig.cache.begin_load(space, 0, 2, 0, keys_of(1))
    rig.cache.end_load([ticket], is_success=True)
    rig.cache.end_session(1)
    rig.evict(space, keys_of(1, 2))
    assert rig.source.unused_blocks == 1
    rig.check()


def test_a_part_is_begun_at_once_and_more_with_each_end() -> None:
    most = 3 * MAX_BEGUN
    rig = TieringHarness(settings=QUIET, regions=4 * most)
    space = rig.open()
    rig.put_in_tier(space, keys_of(*range(most)))
    assert rig.states(space, keys_of(*range(most))) == [PENDING] * most
    rig.tiering.pump()
    assert len(rig.tier.jobs) == MAX_BEGUN
    rig.tier.end(next(iter(rig.tier.jobs)))
    assert len(rig.tier.jobs) == MAX_BEGUN - 1 + BEGUN_PER_END
    rig.tier.end_all()
    assert rig.states(space, keys_of(*range(most))) == [READY] * most


def test_reads_of_small_blocks_keep_no_large_one_from_beginning_more() -> None:
    """It begins others while half of the bytes are free, however many blocks the other half is."""
    rig = TieringHarness(settings=QUIET, regions=64)
    small, large = rig.open("small"), rig.open("large", sizes=[4 * UNIT])
    rig.put_in_tier(small, keys_of(*range(12)))
    rig.put_in_tier(large, keys_of(0))
    look_up(rig, large, 1, keys_of(0))
    look_up(rig, small, 2, keys_of(*range(10)))
    rig.tiering.pump()
    assert (rig.source.reads.under_way_bytes, rig.source.reads.most_bytes) == (14 * UNIT, 32 * UNIT)
    look_up(rig, small, 3, keys_of(10, 11))
    rig.tier.end(next(iter(rig.tier.jobs)))
    assert len(rig.tier.jobs) == 12
    rig.tier.end_all()
    rig.cache.end_session(1)
    rig.check()


def test_a_namespace_without_workers_gets_nothing_from_a_tier(rig: TieringHarness) -> None:
    space = rig.open(world_size=2)
    rig.put_in_tier(space, keys_of(1))
    successor = rig.successor(QUIET)
    again = successor.join("a", 2)
    assert successor.states(again, keys_of(1)) == [ABSENT]
    successor.cache.namespaces.register_rank(again, 0, [UNIT], None)
    assert successor.states(again, keys_of(1)) == [ABSENT]
    successor.cache.namespaces.register_rank(again, 1, [UNIT], None)
    assert successor.states(again, keys_of(1)) == [PENDING]
    successor.bring_up()
    assert successor.cache.blocks.pinned_blocks == 1, "it is held for who waits, not each of its ranks"
    successor.stop_waiting()
    assert successor.states(again, keys_of(1)) == [READY]
    successor.check()


def test_events_tell_of_what_is_written_and_of_all_that_goes(rig: TieringHarness) -> None:
    """Not of what a disk had when it was opened; its end is reported, as nobody knows who heard of it."""
    space = rig.open()
    rig.put_in_tier(space, keys_of(1, 2, 3))
    rig.cache.invalidate(space, [(0, keys_of(2))])
    rig.check()
    successor = rig.successor(QUIET)
    again = successor.open()
    successor.put_in_tier(again, keys_of(4))
    successor.check()
    successor.tier_events.index |= successor.found
    successor.cache.invalidate(again, [(0, keys_of(3))])
    successor.tier.settle()
    assert successor.tier_events.index == {(again.fingerprint, 0, keys_of(1)), (again.fingerprint, 0, keys_of(4))}


# --- what does not end, and how long all takes -------------------------------------------------------


def test_a_reads_time_runs_from_its_turn(rig: TieringHarness) -> None:
    """A slow tier brings up all in the end; each block has its time once those before it are up."""
    space = rig.open()
    rig.put_in_tier(space, keys_of(*range(8)))
    look_up(rig, space, 1, keys_of(*range(8)))
    for _ in range(8):
        rig.tiering.pump()
        rig.clock.now += 0.9 * QUIET.deadline_s
        rig.tiering.tick()
        rig.tier.end(next(iter(rig.tier.jobs)))
    assert look_up(rig, space, 1, keys_of(*range(8))) == bytes([READY] * 8)
    assert not rig.source.failures


def test_one_read_that_hangs_is_given_up_alone_if_others_end(rig: TieringHarness) -> None:
    space = rig.open(sizes=(UNIT,))
    rig.put_in_tier(space, keys_of(*range(4)))
    look_up(rig, space, 1, keys_of(*range(4)))
    rig.tiering.pump()
    stuck = next(iter(rig.tier.jobs))
    for _ in range(3):
        rig.clock.now += 0.4 * QUIET.deadline_s
        rig.tiering.tick()
        rig.tier.end(list(rig.tier.jobs)[-1])
    assert rig.source.failures == {"overdue": 1}
    assert look_up(rig, space, 1, keys_of(*range(4))) == bytes([PENDING] + [READY] * 3), "it is tried again"
    rig.tier.end(stuck)
    rig.bring_up()
    assert look_up(rig, space, 1, keys_of(*range(4))) == bytes([READY] * 4)
    rig.cache.end_session(1)
    rig.check()


def test_reads_that_hang_do_not_keep_others_from_coming_up() -> None:
    rig = TieringHarness(settings=QUIET, regions=8)
    space, source = rig.open(), rig.source
    rig.put_in_tier(space, keys_of(*range(16)))
    rig.states(space, keys_of(*range(4)))
    rig.tiering.pump()
    stuck = list(rig.tier.jobs)
    assert source.reads.under_way_bytes == rig.slots.pool_bytes // 8 == 4 * UNIT
    rig.clock.now += QUIET.deadline_s
    rig.tiering.tick()
    assert rig.states(space, keys_of(*range(4, 12))) == [PENDING] * 8
    for _ in range(2):
        rig.tiering.pump()
        begun = [job for job in rig.tier.jobs if job not in stuck]
        assert len(begun) == 4
        for job in begun:
            rig.tier.end(job)
    assert rig.states(space, keys_of(*range(4, 12))) == [READY] * 8
    rig.check()
    # However often reads are given up, they hold no more than as much again.
    rig.states(space, keys_of(12, 13, 14, 15))
    rig.tiering.pump()
    rig.clock.now += QUIET.deadline_s
    rig.tiering.tick()
    rig.states(space, keys_of(*range(4)))
    rig.tiering.pump()
    assert source.reads.under_way_bytes == 0
    assert len(source.reads.given_up) == 8
    for _ in range(2):  # nor does anybody wait for what they leave no space for
        assert source.unended_blocks == 4
        rig.tiering.tick()
        rig.tiering.pump()
        rig.clock.now += QUIET.deadline_s
    rig.tiering.pump()
    assert source.unended_blocks == 0


def test_a_lookup_is_told_how_long_what_it_waits_for_takes() -> None:
    """By the measured speed, for what comes before it and its own; what comes behind is no matter."""
    rig = TieringHarness(settings=QUIET, regions=100)
    space, source = rig.open(), rig.source
    rig.put_in_tier(space, keys_of(*range(200)))
    look_up(rig, space, 1, keys_of(*range(100)))
    assert rig.cache.leases.by_id[1].wait_s == 0.0, "nothing was read yet"
    rig.tiering.pump()
    for _ in range(60):
        rig.clock.now += 0.01
        rig.tier.end(next(iter(rig.tier.jobs)))
    assert source.reads.speed.measured == pytest.approx(100 * UNIT, rel=0.01)
    look_up(rig, space, 2, keys_of(*range(100, 150)))
    look_up(rig, space, 3, keys_of(*range(150, 200)))
    look_up(rig, space, 1, keys_of(*range(100)))
    waits = [rig.cache.leases.by_id[lease].wait_s for lease in (1, 2, 3)]
    assert waits == pytest.approx([0.4, 0.9, 1.4], rel=0.02)
    rig.cache.leases.end(1, [2])
    look_up(rig, space, 3, keys_of(*range(150, 200)))
    assert rig.cache.leases.by_id[3].wait_s == pytest.approx(0.9, rel=0.02)
    for _ in range(30):  # some of the third lookup's are being read by now, which the first does not wait for
        rig.tiering.pump()
        rig.tier.end(next(iter(rig.tier.jobs)))
    look_up(rig, space, 1, keys_of(*range(100)))
    assert 0 < 2 * rig.cache.leases.by_id[1].wait_s < rig.source.reads.under_way_bytes / source.reads.speed.current


def test_what_had_no_space_and_is_not_awaited_any_more_makes_no_lookup_wait(rig: TieringHarness) -> None:
    space = rig.open()
    rig.put_in_tier(space, keys_of(1, 2))
    rig.begin(space, 0, 0, keys_of(*range(100, 99 + len(rig.slots.in_use))))
    look_up(rig, space, 2, keys_of(1, 2))
    look_up(rig, space, 1, keys_of(1))
    rig.tiering.pump()
    assert len(rig.tier.jobs) == 1, "the other one has no slot"
    rig.cache.leases.end(1, [2])
    rig.clock.now += 0.4  # not yet as if the tier were silent
    rig.source.reads.speed.measured = 100.0 * UNIT
    look_up(rig, space, 1, keys_of(1))
    assert rig.cache.leases.by_id[1].wait_s < 0.1


def test_a_lookup_for_which_nothing_comes_up_leaves_nothing_behind(rig: TieringHarness) -> None:
    space = rig.open()
    rig.put_in_tier(space, keys_of(1))
    space.counters.prefill_tokens_per_second = 1e9
    rig.source.reads.speed.measured = 1.0
    rig.states(space, keys_of(1))  # one is tried
    rig.stop_waiting()
    assert look_up(rig, space, 1, keys_of(1)) == bytes([ABSENT])
    assert not rig.cache.leases.by_id
    assert not rig.tiering.promotions.fills_of_lease


def test_who_shares_the_beginning_of_a_prompt_waits_for_its_own_blocks_only() -> None:
    rig = TieringHarness(settings=QUIET, regions=100)
    space, source = rig.open(), rig.source
    rig.put_in_tier(space, keys_of(*range(200)))
    source.reads.speed.measured = 10.0 * UNIT
    look_up(rig, space, 1, keys_of(*range(200)))
    look_up(rig, space, 2, keys_of(*range(4)), session=2)
    assert rig.cache.leases.by_id[1].wait_s == pytest.approx(20.0)
    assert rig.cache.leases.by_id[2].wait_s == pytest.approx(0.4)
    rig.tiering.pump()
    begun = len(rig.tier.jobs)
    rig.cache.leases.end(1, [1])
    assert source.unended_blocks == begun, "the rest is read for nobody"
    rig.tier.end_all()
    assert (len(rig.cache.leases.by_id[2].blocks), rig.cache.leases.by_id[2].coming) == (4, 0)
    rig.cache.end_session(2)
    rig.check()


def test_several_requests_of_one_lookup_ask_for_no_more_than_leases_may_pin() -> None:
    rig = TieringHarness(settings=QUIET, regions=8)
    space = rig.open()
    rig.put_in_tier(space, keys_of(*range(60)))
    leasable = rig.cache.leases.most_bytes // UNIT
    for part in (range(20), range(20, 60)):
        look_up(rig, space, 1, keys_of(*part))
    assert rig.cache.leases.by_id[1].coming == leasable == rig.source.read_order.blocks
    while rig.source.unended_blocks:
        rig.bring_up()
    assert len(rig.cache.leases.by_id[1].blocks) == leasable
    rig.cache.end_session(1)
    rig.check()


def test_what_fails_is_not_late_too(rig: TieringHarness) -> None:
    space = rig.open()
    rig.put_in_tier(space, keys_of(1, 2))
    rig.cache.lookup(space, 1, 1, [(0, keys_of(1, 2))], reported=True)
    rig.tiering.pump()
    rig.tier.end_all(fault=Result.FAILED)
    rig.cache.prompts.count(1, 1, PromptUse([0], [0], MissReason.LATE))
    assert +space.counters.misses == {MissReason.TIER_FAILED: 2}


def test_a_tier_that_raises_leaves_no_lease_behind(rig: TieringHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    space = rig.open()
    rig.put_in_tier(space, keys_of(1))

    def breaks(awaited: object) -> float:
        raise RuntimeError

    monkeypatch.setattr(rig.tiering.promotions, "wait_s", breaks)
    with pytest.raises(RuntimeError):
        look_up(rig, space, 1, keys_of(1))
    assert not rig.cache.leases.by_id
    assert not rig.source.unended_blocks
    rig.check()


def test_prompts_that_have_a_part_each_do_not_keep_each_other_from_the_rest() -> None:
    """The pool holds one of them. The other waits whole, and what the first lacks comes up before."""
    rig = TieringHarness(settings=QUIET, regions=4)
    space, first, second = rig.open(), keys_of(*range(12)), keys_of(*range(20, 32))
    rig.put_in_tier(space, keys_of(*range(12), *range(20, 32)))
    look_up(rig, space, 1, first)
    rig.bring_up()
    rig.cache.leases.end(1, [1])
    rig.evict(space, keys_of(10, 11))
    look_up(rig, space, 2, second)
    assert look_up(rig, space, 3, first) == bytes([READY] * 10 + [PENDING] * 2)
    rig.bring_up()
    assert look_up(rig, space, 4, first) == bytes([READY] * 12)
    rig.cache.leases.end(1, [3, 4])
    rig.bring_up()
    assert look_up(rig, space, 5, second) == bytes([READY] * 12)
    assert not rig.source.failures
    rig.cache.end_session(1)
    rig.check()


def move(rig: TieringHarness, space: Namespace, to: FakeTier, *numbers: int) -> None:
    """Have another tier hold blocks of the first disk."""
    for number in numbers:
        name = rig.group(space).tag, keys_of(number)
        to.blocks[name] = rig.tier.blocks.pop(name)


def test_prompts_with_parts_in_a_disk_and_in_a_store_do_not_wait_for_each_other() -> None:
    """Each fits the pool alone. A store's part is requested by a repeated lookup, under a new lease."""
    rig = TieringHarness(settings=QUIET, regions=4)
    space, store, prompts = rig.open(), rig.share(QUIET), {1: range(14), 2: range(20, 34)}
    rig.put_in_tier(space, keys_of(*prompts[1], *prompts[2]))
    move(rig, space, store, *prompts[1][2:], *prompts[2][2:])
    for number, prompt in prompts.items():
        look_up(rig, space, number, keys_of(*prompt), session=number)
    rig.bring_up()
    store.answer()
    for number, prompt in prompts.items():
        rig.cache.lookup(space, number, 10 + number, [(0, keys_of(*prompt))], again=True)
        rig.cache.leases.end(number, [number])
    for number, prompt in prompts.items():
        rig.tiering.tick()
        rig.bring_up()
        store.end_all()
        ((states,), _) = rig.cache.lookup(space, number, 20 + number, [(0, keys_of(*prompt))], again=True)
        assert states == bytes([READY] * 14)
        rig.cache.end_session(number)
    assert not any(source.failures for source in rig.tiering.sources)
    check_invariants(rig.cache)


def test_prompts_get_space_for_all_of_their_parts_after_one_that_joined_them_was_aborted() -> None:
    """Each of two fits the pool alone. A third began as each of them does, and is gone before there was space."""
    rig = TieringHarness(settings=QUIET, regions=4)
    space, store, prompts = rig.open(), rig.share(QUIET), {1: range(14), 2: range(20, 34)}
    rig.put_in_tier(space, keys_of(*prompts[1], *prompts[2]))
    move(rig, space, store, *prompts[1][7:], *prompts[2][7:])
    pinned = pin_others(rig, space, *range(100, 108))
    for _ in range(2):
        for number, prompt in prompts.items():
            look_up(rig, space, number, keys_of(*prompt), session=number)
        store.answer()
    for number, prompt in prompts.items():
        assert look_up(rig, space, 30 + number, keys_of(*prompt[:3]), session=9) == bytes([PENDING] * 3)
    rig.tiering.tick()
    assert not [*rig.tier.jobs, *store.jobs]
    rig.cache.leases.end(9, [31, 32])
    rig.cache.life.unpin(pinned)
    for number, prompt in prompts.items():
        rig.tiering.tick()
        rig.bring_up()
        store.end_all()
        assert look_up(rig, space, number, keys_of(*prompt), session=number) == bytes([READY] * 14)
        rig.cache.end_session(number)
    assert not any(source.failures for source in rig.tiering.sources)
    check_invariants(rig.cache)


def test_what_a_disk_has_of_a_prompt_does_not_wait_with_what_a_store_had_that_went_away(rig: TieringHarness) -> None:
    """There is space for the one without the other."""
    space, store, keys = rig.open(), rig.share(QUIET), keys_of(*range(8))
    rig.put_in_tier(space, keys)
    move(rig, space, store, *range(4, 8))
    pinned = pin_others(rig, space, *range(100, 110))
    for _ in range(2):
        look_up(rig, space, 1, keys)
        store.answer()
    rig.tiering.tick()
    assert not [*rig.tier.jobs, *store.jobs]
    store.hangs = True
    for _ in range(2):
        rig.clock.now += 0.25
        rig.tiering.tick()
    rig.tier.end_all()
    assert look_up(rig, space, 1, keys) == bytes([READY] * 4 + [ABSENT] * 4)
    assert [source.failures for source in rig.tiering.sources] == [{}, {"deadline": 4}]
    rig.cache.end_session(1)
    rig.cache.life.unpin(pinned)
    check_invariants(rig.cache)


def test_what_has_no_space_at_one_source_makes_no_other_one_later() -> None:
    """A lookup joins what a store is reading, and waits for blocks of a disk, which have no space."""
    rig = TieringHarness(settings=QUIET, regions=100)
    space, store = rig.open(), rig.share(QUIET)
    rig.put_in_tier(space, keys_of(*range(110)))
    move(rig, space, store, *range(100))
    pin_others(rig, space, *range(200, 450))
    for _ in range(2):
        look_up(rig, space, 1, keys_of(*range(100)))
        store.answer()
    rig.tiering.pump()
    look_up(rig, space, 2, keys_of(*range(110)))
    rig.tiering.tick()
    assert not rig.tier.jobs
    for _ in range(60):
        rig.clock.now += 0.01
        store.end(next(iter(store.jobs)))
    look_up(rig, space, 2, keys_of(*range(110)))
    assert rig.cache.leases.by_id[2].wait_s == pytest.approx(0.4, rel=0.02)


def test_space_for_what_a_store_is_asked_for_is_waited_for_no_longer_than_the_patience(rig: TieringHarness) -> None:
    """The engine may never look the prompt up again."""
    space, store = rig.open(), rig.share(QUIET)
    rig.put_in_tier(space, keys_of(*range(8)))
    pinned = pin_others(rig, space, *range(100, 110))
    look_up(rig, space, 1, keys_of(*range(12)))
    assert store.questions
    rig.tiering.tick()
    assert not rig.tier.jobs, "four blocks have space, and eight may come from the store"
    rig.cache.life.unpin(pinned[:4])
    rig.clock.now += QUIET.deadline_s
    rig.tiering.tick()
    rig.bring_up()
    assert rig.source.promoted_blocks == 8
    assert not rig.source.failures
    rig.cache.end_session(1)


def test_a_prompt_without_space_does_not_wait_a_second_time(rig: TieringHarness) -> None:
    """A repeated lookup asks for what fits then."""
    space = rig.open()
    rig.put_in_tier(space, keys_of(*range(8)))
    pinned = pin_others(rig, space, *range(100, 108))
    look_up(rig, space, 1, keys_of(*range(8)))
    for _ in range(2):
        rig.tiering.tick()
        rig.clock.now += QUIET.deadline_s
    rig.tiering.tick()
    ((states,), _) = rig.cache.lookup(space, 1, 1, [(0, keys_of(*range(8)))], again=True)
    assert states == bytes([PENDING] * 6 + [ABSENT] * 2)
    rig.cache.life.unpin(pinned)
    rig.cache.end_session(1)


def test_a_slow_store_lends_the_space_that_it_does_not_fill_in_time() -> None:
    """A large prompt of it has most of the pool reserved for longer than a disk's prompt waits."""
    rig = TieringHarness(settings=QUIET, regions=8)
    store, space, step = rig.share(QUIET), rig.open(), 0.125 * QUIET.deadline_s
    rig.put_in_tier(space, keys_of(*range(40)))
    move(rig, space, store, *range(20))
    for _ in range(2):
        look_up(rig, space, 1, keys_of(*range(20)), session=1)
        store.answer()
    rig.tiering.pump()
    look_up(rig, space, 2, keys_of(*range(30, 40)), session=2)
    began = rig.clock.now
    while len(rig.cache.leases.by_id[2].blocks) < 10:
        assert rig.clock.now < began + QUIET.deadline_s
        store.end(next(iter(store.jobs)))
        rig.bring_up()
        rig.tiering.tick()
        rig.clock.now += step
    rig.cache.end_session(2)
    while store.jobs:
        store.end(next(iter(store.jobs)))
        rig.clock.now += step
        rig.tiering.tick()
    assert len(rig.cache.leases.by_id[1].blocks) == 20, "it gets back what it lent"
    assert not any(source.failures for source in rig.tiering.sources)
    rig.cache.end_session(1)
    check_invariants(rig.cache)


def test_a_disk_that_hangs_costs_its_own_blocks_only() -> None:
    rig = TieringHarness(settings=QUIET, regions=16)
    space, good = rig.open(), rig.add_disk()
    rig.put_in_tier(space, keys_of(*range(60)))
    move(rig, space, good, *range(30, 60))
    for lease in range(6):
        look_up(rig, space, 100 + lease, keys_of(*range(5 * lease, 5 * lease + 5)), session=2)
    for lease in range(3):
        keys = keys_of(*range(30 + 10 * lease, 40 + 10 * lease))
        look_up(rig, space, lease, keys)
        rig.tiering.tick()
        good.end_all()
        assert look_up(rig, space, lease, keys) == bytes([READY] * 10)
        rig.cache.leases.end(1, [lease])
        rig.clock.now += QUIET.deadline_s
        rig.tiering.tick()
    hanging, other = rig.tiering.disks
    assert hanging.failures["overdue"]
    assert not other.failures
    assert hanging.reads.most_bytes + other.reads.most_bytes == rig.slots.pool_bytes // 8, "as much as one would have"
    rig.cache.end_session(2)
    rig.check()


def test_reads_that_hang_are_given_up_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion_source, "ENDED_AT_ONCE", 3)
    rig = TieringHarness(settings=QUIET, regions=16)
    space = rig.open()
    rig.put_in_tier(space, keys_of(*range(8)))
    look_up(rig, space, 1, keys_of(*range(8)))
    rig.tiering.pump()
    rig.clock.now += QUIET.deadline_s
    rig.tiering.tick()
    given_up = [len(rig.source.reads.given_up)]
    while rig.tiering.background():
        given_up.append(len(rig.source.reads.given_up))
    assert [*given_up, len(rig.source.reads.given_up)] == [3, 6, 8]
    rig.cache.end_session(1)
    rig.check()


def test_what_a_quota_keeps_out_fails_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion_source, "ENDED_AT_ONCE", 3)
    rig = TieringHarness(settings=QUIET, regions=16)
    space, failures = rig.open(), rig.source.failures
    rig.put_in_tier(space, keys_of(*range(8)))
    look_up(rig, space, 1, keys_of(*range(8)))
    rig.cache.quotas[space.fingerprint] = 0
    rig.tiering.pump()
    failed = [failures["quota"]]
    while rig.tiering.background():
        failed.append(failures["quota"])
    assert [*failed, failures["quota"]] == [0, 3, 6, 8]
    assert +space.counters.misses == {MissReason.QUOTA: 8}
    rig.cache.end_session(1)
    rig.check()


def test_a_prompt_that_fits_is_read_while_a_larger_one_waits(rig: TieringHarness) -> None:
    """Each prompt has its own patience, and only the one that has no space in it fails."""
    space = rig.open()
    rig.put_in_tier(space, keys_of(*range(20)))
    pinned = pin_others(rig, space, *range(100, 108))
    large, half = keys_of(*range(8)), 0.5 * QUIET.deadline_s
    look_up(rig, space, 1, large)
    for number in range(8, 20):
        look_up(rig, space, number, keys_of(number))
        rig.bring_up()
        assert look_up(rig, space, 100 + number, keys_of(number)) == bytes([READY])
        rig.cache.leases.end(1, [number, 100 + number])
    rig.clock.now += half
    look_up(rig, space, 2, keys_of(*range(10, 17)), session=2)
    rig.tiering.tick()
    assert not rig.source.failures
    assert rig.cache.leases.by_id[1].coming == 8
    rig.clock.now += half
    rig.tiering.tick()
    assert rig.source.failures == {"no_space": 8}
    rig.cache.life.unpin(pinned)
    rig.cache.end_session(2)
    assert look_up(rig, space, 3, large) == bytes([PENDING] * 8)
    rig.bring_up()
    assert look_up(rig, space, 3, large) == bytes([READY] * 8)
    rig.cache.end_session(1)
    rig.check()


def test_where_no_prompt_fits_each_is_waited_for_as_long(rig: TieringHarness) -> None:
    space = rig.open()
    rig.put_in_tier(space, keys_of(*range(8)))
    pinned = pin_others(rig, space, *range(100, 114))
    look_up(rig, space, 1, keys_of(*range(4)))
    rig.tiering.tick()
    rig.clock.now += 0.5 * QUIET.deadline_s
    look_up(rig, space, 2, keys_of(*range(4, 8)))
    for _ in range(2):
        rig.tiering.tick()
        waits = rig.cache.leases.by_id[1].wait_s
        rig.clock.now += 0.25 * QUIET.deadline_s
        look_up(rig, space, 1, keys_of(*range(4)))
        assert rig.cache.leases.by_id[1].wait_s >= waits
    rig.tiering.tick()
    assert (rig.cache.leases.by_id[1].coming, rig.cache.leases.by_id[2].coming) == (0, 4)
    rig.cache.life.unpin(pinned)
    rig.bring_up()
    assert look_up(rig, space, 2, keys_of(*range(4, 8))) == bytes([READY] * 4)
    assert rig.source.failures == {"no_space": 4}
    rig.cache.end_session(1)
    rig.check()


def test_invalidated_keys_leave_a_long_queue_at_once(rig: TieringHarness) -> None:
    """Last first: each is found without a search."""
    rig = TieringHarness(settings=QUIET, regions=1024)
    space, count = rig.open(), 2048
    rig.put_in_tier(space, keys_of(*range(count)))
    look_up(rig, space, 1, keys_of(*range(count)))
    queued = next(iter(rig.source.read_order.queues())).fills
    assert len(queued) == count
    rig.cache.invalidate(space, [(0, keys_of(*reversed(range(count))))])
    assert not queued
    assert not rig.cache.leases.withheld_bytes
    rig.cache.end_session(1)
    rig.check()


def test_a_request_that_has_space_again_waits_for_its_turn_only(rig: TieringHarness) -> None:
    """However long that takes: the one before it is read slowly."""
    rig = TieringHarness(settings=QUIET, regions=8)
    space = rig.open()
    rig.put_in_tier(space, keys_of(*range(24)))
    pinned = pin_others(rig, space, *range(100, 128))
    for lease, first in ((1, 0), (2, 12)):
        look_up(rig, space, lease, keys_of(*range(first, first + 12)), session=lease)
    rig.tiering.tick()
    rig.cache.life.unpin(pinned)
    for _ in range(24):
        rig.tiering.tick()
        rig.clock.now += 0.5 * QUIET.deadline_s
        rig.tier.end(next(iter(rig.tier.jobs)))
    assert not rig.source.failures
    assert look_up(rig, space, 3, keys_of(*range(24))) == bytes([READY] * 24)


def test_a_prefetch_of_a_slow_store_keeps_no_space_from_a_prompt() -> None:
    rig = TieringHarness(settings=QUIET, regions=8)
    store, space = rig.share(QUIET), rig.open()
    for number in range(28):
        store.known[rig.group(space).tag, keys_of(number)] = PRESENT
    rig.put_in_tier(space, keys_of(*range(100, 110)))
    rig.cache.hint(space, HintAction.PREFETCH, [(0, keys_of(*range(28)))])
    rig.tiering.pump()
    look_up(rig, space, 1, keys_of(*range(100, 110)))
    rig.bring_up()
    assert look_up(rig, space, 1, keys_of(*range(100, 110))) == bytes([READY] * 10)


def test_a_session_does_not_wait_for_all_that_another_one_waits_for() -> None:
    rig = TieringHarness(settings=QUIET, regions=64, most_jobs=4)
    space = rig.open()
    rig.put_in_tier(space, keys_of(*range(104)))
    for lease in range(1, 11):
        look_up(rig, space, lease, keys_of(*range(10 * lease - 10, 10 * lease)))
    rig.tiering.pump()
    look_up(rig, space, 11, keys_of(*range(100, 104)), session=2)
    reads = 0
    while rig.cache.leases.by_id[11].coming:
        rig.tiering.tick()
        rig.tier.end(next(iter(rig.tier.jobs)))
        reads += 1
    assert reads == 4 + 2 * 4, "what was under way, its own, and as much of the other"
    assert rig.cache.leases.by_id[1].coming < rig.cache.leases.by_id[2].coming == 10, "each session's are read in order"
    while rig.source.unended_blocks:
        rig.bring_up()
    assert look_up(rig, space, 12, keys_of(*range(104))) == bytes([READY] * 104)
    rig.cache.end_session(1)
    rig.cache.end_session(2)
    rig.check()


def test_sessions_expect_to_share_a_source() -> None:
    """Each waits for its own blocks up to its last one, and for as many of others as are there."""
    rig = TieringHarness(settings=QUIET, regions=100)
    space = rig.open()
    rig.put_in_tier(space, keys_of(*range(150)))
    rig.source.reads.speed.measured = 100.0 * UNIT
    for session, first, end in ((1, 0, 100), (2, 100, 110), (3, 110, 130)):
        for lease in (session, session + 10):
            look_up(rig, space, lease, keys_of(*range(first, end)), session=session)
    waits = [rig.cache.leases.by_id[lease].wait_s for lease in (11, 12, 13)]
    assert waits == pytest.approx([1.0, 0.2, 0.5])
    look_up(rig, space, 1, keys_of(*range(100)), session=1)
    assert rig.cache.leases.by_id[1].wait_s == pytest.approx(1.3)


def test_prompts_without_space_of_one_session_fail_none_of_another() -> None:
    """Only so many may wait for space, first those of the sessions that have few."""
    rig = TieringHarness(settings=QUIET, regions=8)
    space, count = rig.open(), 2 * MAX_WITHOUT_SPACE
    rig.put_in_tier(space, keys_of(*range(4 * count + 4)))
    pin_others(rig, space, *range(10**6, 10**6 + 26))
    for number in range(count + 1):
        session = 1 if number < count else 2
        look_up(rig, space, number + 1, keys_of(*range(4 * number, 4 * number + 4)), session=session)
    for _ in range(2):
        rig.tiering.tick()
    while rig.tiering.background():
        pass
    assert rig.cache.leases.by_id[count + 1].coming == 4
    waiting = rig.source.read_order.blocks
    assert waiting == 4 * MAX_WITHOUT_SPACE


@pytest.mark.parametrize("joins", [False, True])
def test_what_a_lookup_waits_for_is_read_before_what_others_prefetch(joins: bool) -> None:
    rig = TieringHarness(settings=QUIET, regions=64, most_jobs=4)
    hinting, asking = rig.open("hinting"), rig.open("asking")
    rig.put_in_tier(hinting, keys_of(*range(40)))
    rig.put_in_tier(asking, keys_of(*range(100, 104)))
    rig.cache.hint(hinting, HintAction.PREFETCH, [(0, keys_of(*range(40)))])
    rig.tiering.pump()
    space, keys = (hinting, keys_of(*range(36, 40))) if joins else (asking, keys_of(*range(100, 104)))
    rig.cache.lookup(space, 2, 1, [(0, keys)])
    if joins:  # its queue is read with those of lookups from now on, by turns
        rig.cache.lookup(asking, 3, 2, [(0, keys_of(*range(100, 104)))])
    reads = 0
    while rig.cache.leases.by_id[1].coming:
        rig.tiering.tick()
        rig.tier.end(next(iter(rig.tier.jobs)))
        reads += 1
    assert reads == (40 + 4 if joins else 4 + 4), "what was under way, its own, and as much of another lookup"
    rig.check()


def test_prefetches_of_a_namespace_do_not_wait_for_all_those_of_another() -> None:
    rig = TieringHarness(settings=QUIET, regions=64, most_jobs=4)
    spaces = [rig.open(name) for name in ("many", "few")]
    keys = [keys_of(*range(40)), keys_of(*range(100, 104))]
    for space, its in zip(spaces, keys, strict=True):
        rig.put_in_tier(space, its)
    for space, its in zip(spaces, keys, strict=True):
        rig.cache.hint(space, HintAction.PREFETCH, [(0, its)])
    reads = 0
    while spaces[1].fingerprint in rig.source.read_order.prefetched.by_owner:
        rig.tiering.tick()
        rig.tier.end(next(iter(rig.tier.jobs)))
        reads += 1
    assert reads == 4 + 4, "as many of the other as began together, and its own"
    rig.check()


def test_what_was_blocked_for_long_takes_its_turn_all_the_same(rig: TieringHarness) -> None:
    space, most_bytes = rig.open(), rig.slots.pool_bytes // 8
    rig.put_in_tier(space, keys_of(1, 2, 3))
    stored = rig.begin(space, 0, 0, keys_of(*range(100, 100 + len(rig.slots.in_use))))
    for number in (1, 2, 3):
        look_up(rig, space, number, keys_of(number), session=number)
    rig.tiering.pump()
    assert not rig.tier.jobs, "there are no slots"
    rig.cache.stores.abort(stored)
    rig.clock.now += QUIET.deadline_s - 1.0
    rig.tiering.pump()
    assert rig.source.reads.under_way_bytes == most_bytes == 2 * UNIT
    rig.clock.now += 1.0
    rig.tiering.tick()
    assert rig.source.reads.under_way_bytes == most_bytes, "as many are read at once as may be"
    assert not rig.source.failures
    rig.bring_up()
    rig.bring_up()
    assert look_up(rig, space, 4, keys_of(1, 2, 3)) == bytes([READY] * 3)
    rig.check()


def test_a_large_block_without_slots_is_not_waited_for_longer_while_small_ones_are_read() -> None:
    rig = TieringHarness(settings=QUIET, regions=8)
    large, small, rounds = rig.open("large", sizes=(4 * UNIT,)), rig.open("small"), 3
    rig.put_in_tier(large, keys_of(0))
    rig.put_in_tier(small, keys_of(*range(3 * rounds)))
    stored = rig.begin(small, 0, 0, keys_of(*range(100, 100 + len(rig.slots.in_use) - 3)))
    look_up(rig, large, 1, keys_of(0))
    for number in range(rounds):
        look_up(rig, small, 2, keys_of(*range(3 * number, 3 * number + 3)), session=2)
        rig.tiering.pump()
        rig.clock.now += 0.5 * QUIET.deadline_s
        assert len(rig.source.reads.under_way) == 3, "the source is busy whenever a tick comes"
        assert not rig.source.failures
        rig.tiering.tick()
        rig.tier.end_all()
        rig.cache.end_session(2)
    assert rig.source.failures == {"no_space": 1}
    assert rig.cache.leases.by_id[1].coming == 0
    rig.cache.stores.abort(stored)
    rig.cache.end_session(1)
    rig.check()


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_what_a_prefetch_brings_up_behind_an_old_root_is_not_evicted_next(policy: str) -> None:
    rig = TieringHarness(settings=QUIET, regions=4, policy=policy)
    space, keys = rig.open(), keys_of(*range(4))
    rig.put_in_tier(space, keys_of(2, 3))
    rig.put(space, keys_of(0, 1))
    rig.put(space, keys_of(*range(50, 60)))
    rig.cache.hint(space, HintAction.PREFETCH, [(0, keys + keys)])
    while rig.source.unended_blocks:
        rig.bring_up()
    rig.cache.tick()
    assert not rig.cache._prefetches._groups
    for key in range(100, 108):  # six more than are free
        rig.put(space, keys_of(key))
    assert len(rig.blocks(space, keys)) == 4
    rig.check()


def test_many_requests_without_space_keep_none_that_fits_waiting() -> None:
    """Only so many wait; the others fail at once, some in each tick."""
    rig = TieringHarness(settings=QUIET, regions=8)
    space, count = rig.open(), 3 * MAX_WITHOUT_SPACE
    keys = keys_of(*range(4 * count + 1))
    rig.put_in_tier(space, keys)
    pin_others(rig, space, *range(10**6, 10**6 + 26))
    for number in range(count):
        look_up(rig, space, number + 1, keys_of(*range(4 * number, 4 * number + 4)), session=number + 1)
    look_up(rig, space, count + 1, keys_of(4 * count), session=count + 1)
    rig.tiering.tick()
    rig.tier.end_all()
    assert look_up(rig, space, count + 2, keys_of(4 * count)) == bytes([READY])
    rig.tiering.tick()
    failed = rig.source.failures
    assert failed == {"no_space": ENDED_AT_ONCE}, "what one tick does is bounded"
    while rig.tiering.background():
        assert failed["no_space"] % ENDED_AT_ONCE == 0
    assert failed == {"no_space": 4 * (count - MAX_WITHOUT_SPACE)}
    assert rig.source.read_order.blocks == 4 * MAX_WITHOUT_SPACE


def test_the_beginning_of_a_prompt_comes_though_its_next_request_has_no_space() -> None:
    """It is of use by itself, and what waited with the rest would fail with it."""
    rig = TieringHarness(settings=QUIET, regions=5)
    space = rig.open()
    rig.put_in_tier(space, keys_of(*range(24)))
    pin_others(rig, space, 100)
    count = rig.cache.leases.leasable_bytes // rig.unit * 3 // 4
    for first in (0, count):
        look_up(rig, space, 1, keys_of(*range(first, first + count)))
    rig.bring_up()
    states, _ = rig.cache.blocks.find(space.group(0), keys_of(*range(2 * count)))
    assert list(states) == [READY] * count + [ABSENT] * count
