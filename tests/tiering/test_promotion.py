"""Blocks come up from a tier: asked for, pending, ready; and what goes wrong on the way leaves nothing behind."""

from __future__ import annotations

import pytest

from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.tiering import TieringSettings, WriteMode
from kvoffd.tiering.tiering import BEGUN_PER_END, MAX_BEGUN
from kvoffd.tiers.tier import Result
from kvoffd_proto.messages import ABSENT, PENDING, READY
from tests.kit.slot_cache import UNIT, check_invariants, keys_of
from tests.kit.tiering_harness import TieringHarness

QUIET = TieringSettings(mode=WriteMode.NEVER)


@pytest.fixture
def rig() -> TieringHarness:
    return TieringHarness(settings=QUIET)


@pytest.mark.parametrize("fault", [None, Result.FAILED])
def test_what_is_not_read_in_time_is_absent_and_its_key_is_free(rig: TieringHarness, fault: Result | None) -> None:
    space = rig.open()
    rig.put_in_tier(space, keys_of(1))
    rig.states(space, keys_of(1))
    rig.tiering.pump()
    rig.clock.now += 6.0
    rig.tiering.tick()
    assert rig.tiering.disks.failures["overdue"] == 1
    assert +space.counters.misses == {MissReason.TIER_LATE: 1}
    assert rig.index(space) == {}
    check_invariants(rig.cache)
    rig.put(space, keys_of(1))
    assert rig.states(space, keys_of(1)) == [READY]
    rig.tier.end_all(fault=fault)  # the tier was slow, and writes into its own slots only
    assert rig.cache.usage.writing == 0
    assert rig.tiering.disks.failures == {"overdue": 1}
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
    assert rig.tiering.disks.failures == {fault.value: 1}
    assert +space.counters.misses == {miss: 1}
    assert rig.index(space) == {}
    assert rig.slots.free_bytes == free
    rig.check()


def test_pinned_blocks_are_never_evicted_for_what_comes_up(rig: TieringHarness) -> None:
    space = rig.open(sizes=(4 * UNIT,))
    rig.put_in_tier(space, keys_of(1))
    rig.put(space, keys_of(11, 12, 13, 14))
    pinned = rig.blocks(space, keys_of(11, 12, 13, 14))
    rig.cache.blocks.pin(pinned)
    rig.states(space, keys_of(1))
    rig.finish_promotions()
    assert rig.tiering.disks.failures["no_space"] == 1
    ((states,), _) = rig.cache.lookup(space, 1, 1, [(0, keys_of(1))], again=True)
    assert list(states) == [ABSENT], "who asks again computes it"
    assert rig.states(space, keys_of(1)) == [PENDING], "another request may have more luck"
    rig.cache.unpin(pinned)
    rig.finish_promotions()
    assert rig.states(space, keys_of(1)) == [READY]
    rig.check()


def test_who_wants_much_leaves_room_to_who_wants_little() -> None:
    rig = TieringHarness(settings=QUIET, regions=8)
    greedy, polite = rig.open("greedy"), rig.open("polite")
    for key in range(24):
        rig.put_in_tier(greedy, keys_of(key))
    rig.put_in_tier(polite, keys_of(1, 2))

    def states(session: int, namespace: Namespace, *keys: int) -> list[int]:
        ((states,), _) = rig.cache.lookup(namespace, session, session, [(0, keys_of(*keys))])
        rig.cache.release(session, [session])
        return list(states)

    states(1, greedy, *range(24))
    rig.tiering.pump()
    states(1, greedy, *range(24))
    assert states(2, polite, 1, 2) == [PENDING] * 2
    for job in list(rig.tier.jobs):
        rig.tier.end(job)
    rig.finish_promotions()
    assert states(2, polite, 1, 2) == [READY] * 2
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


def test_a_namespace_without_workers_gets_nothing_from_a_tier(rig: TieringHarness) -> None:
    space = rig.open(world_size=2)
    rig.put_in_tier(space, keys_of(1))
    successor = rig.successor(QUIET)
    again = successor.join("a", 2)
    assert successor.states(again, keys_of(1)) == [ABSENT]
    successor.cache.register_rank(again, 0, [UNIT], None)
    assert successor.states(again, keys_of(1)) == [ABSENT]
    successor.cache.register_rank(again, 1, [UNIT], None)
    assert successor.states(again, keys_of(1)) == [PENDING]
    successor.finish_promotions()
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


def test_the_wait_is_told_by_the_speed_measured(rig: TieringHarness) -> None:
    space = rig.open()
    rig.put_in_tier(space, keys_of(1, 2))
    assert rig.tiering.disks.wait_s == 0.0
    rig.states(space, keys_of(1))
    rig.tiering.pump()
    rig.clock.now += 0.5
    rig.tier.end_all()
    assert rig.tiering.disks.bytes_per_second == pytest.approx(2 * UNIT)
    rig.states(space, keys_of(1, 2))
    assert rig.tiering.disks.wait_s == pytest.approx(0.5)


def test_reads_that_hang_do_not_keep_others_from_coming_up() -> None:
    rig = TieringHarness(settings=QUIET, regions=8)
    space = rig.open()
    for key in range(16):
        rig.put_in_tier(space, keys_of(key))
    rig.states(space, keys_of(*range(4)))
    rig.tiering.pump()
    stuck = list(rig.tier.jobs)
    assert rig.tiering.disks.under_way_bytes == rig.slots.pool_bytes // 8 == 4 * UNIT
    rig.clock.now += QUIET.deadline_s
    rig.tiering.tick()
    assert rig.states(space, keys_of(*range(4, 12))) == [PENDING] * 8
    for _ in range(2):
        rig.tiering.pump()
        begun = [job for job in rig.tier.jobs if job not in stuck]
        assert len(begun) == 4
        for job in begun:
            rig.tier.end(job)
        assert rig.tiering.disks.under_way_bytes <= 8 * UNIT
        rig.check()
    assert rig.states(space, keys_of(*range(4, 12))) == [READY] * 8
    assert rig.tiering.disks.wait_s == 0.0
    # However often reads are given up, they hold no more than as much again.
    rig.states(space, keys_of(12, 13, 14, 15))
    rig.tiering.pump()
    rig.clock.now += QUIET.deadline_s
    rig.tiering.tick()
    rig.states(space, keys_of(*range(4)))
    rig.tiering.pump()
    assert rig.tiering.disks.under_way_bytes == 8 * UNIT
