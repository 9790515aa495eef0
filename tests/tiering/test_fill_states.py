"""Whatever happens to a block in whatever state on its way up: it is counted once, and nothing of it is left."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvoffd.cache.namespace import Namespace
from kvoffd.tiering import TieringSettings, WriteMode
from kvoffd.tiering.promotions import Fill, FillState
from kvoffd.tiers.tier import Result
from kvoffd_proto.messages import ABSENT, READY
from tests.kit.slot_cache import keys_of
from tests.kit.tiering_harness import TieringHarness

SETTINGS = TieringSettings(mode=WriteMode.NEVER)
KEYS = keys_of(1, 2)
LEASES = 1, 2


def lookup(rig: TieringHarness, space: Namespace, lease: int) -> list[int]:
    ((states,), _) = rig.cache.lookup(space, lease, lease, [(0, KEYS)])
    rig.cache.prompts.report()
    return list(states)


def is_queued(rig: TieringHarness) -> None:
    """What a lookup requests is queued."""


def is_read(rig: TieringHarness) -> None:
    rig.tiering.pump()


def is_given_up(rig: TieringHarness) -> None:
    rig.tiering.pump()
    rig.clock.now += SETTINGS.deadline_s
    rig.tiering.tick()


def is_queued_again(rig: TieringHarness) -> None:
    """Nobody waited for it in its turn, and then somebody did."""
    rig.tiering.pump()
    jobs = [*rig.tier.jobs]
    for job in jobs:
        job.is_awaited = lambda: False
    rig.tiering.stop()  # else the end of the first begins it again
    for job in jobs:
        rig.tier.end(job, fault=Result.UNWANTED)
    for source in rig.tiering.sources:
        source._stopped = False


def nothing(rig: TieringHarness, space: Namespace) -> None: ...


def one_lookup_is_aborted(rig: TieringHarness, space: Namespace) -> None:
    rig.cache.leases.end(LEASES[0], [LEASES[0]])


def both_are_aborted(rig: TieringHarness, space: Namespace) -> None:
    for lease in LEASES:
        rig.cache.leases.end(lease, [lease])


def its_sessions_end(rig: TieringHarness, space: Namespace) -> None:
    for lease in LEASES:
        rig.cache.end_session(lease)


def its_keys_are_invalidated(rig: TieringHarness, space: Namespace) -> None:
    rig.cache.invalidate(space, [(0, KEYS)])


def it_is_reset(rig: TieringHarness, space: Namespace) -> None:
    rig.tiering.remove_all(space.fingerprint)
    rig.tier_events.index.clear()  # the cache's event says so
    rig.cache.reset(space, generation=1)


def it_is_forgotten(rig: TieringHarness, space: Namespace) -> None:
    it_is_reset(rig, space)
    rig.cache.namespaces.forget(space)
    rig.tiering.namespace_forgotten(space)


def its_source_hangs(rig: TieringHarness, space: Namespace) -> None:
    rig.tier.hangs = True
    rig.tiering.pump()
    rig.clock.now += SETTINGS.deadline_s
    rig.tiering.tick()
    rig.tier.hangs = False


def the_pool_is_pinned(rig: TieringHarness, space: Namespace) -> None:
    other = rig.open("other")
    keys = keys_of(*range(100, 100 + len(rig.slots.in_use)))
    rig.put(other, keys)
    pinned = rig.blocks(other, keys)
    rig.cache.blocks.pin(pinned)
    for _ in range(2):
        rig.tiering.tick()
        rig.clock.now += SETTINGS.deadline_s
    rig.tiering.tick()
    rig.cache.life.unpin(pinned)


STATES = {
    is_queued: {FillState.QUEUED},
    is_read: {FillState.READING},
    is_given_up: {FillState.ABANDONED},
    is_queued_again: {FillState.QUEUED},
}
EVENTS = (
    *(nothing, one_lookup_is_aborted, both_are_aborted, its_sessions_end, its_keys_are_invalidated, it_is_reset),
    *(it_is_forgotten, its_source_hangs, the_pool_is_pinned),
)
ENDS = Result.DONE, Result.FAILED, Result.CORRUPT, Result.GONE, Result.DEADLINE, Result.CANCELLED, Result.UNWANTED


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("come", STATES)
def test_nothing_is_left_of_a_block_that_was_to_come_up(
    come: Callable[[TieringHarness], None], event: Callable[[TieringHarness, Namespace], None], end: Result
) -> None:
    rig = TieringHarness(settings=SETTINGS)
    space = rig.open()
    rig.put_in_tier(space, KEYS)
    for lease in LEASES:
        lookup(rig, space, lease)
    fills: list[Fill] = [fill for of_tag in rig.tiering.promotions.unsettled.values() for fill in of_tag.values()]
    come(rig)
    assert {fill.state for fill in fills} == STATES[come]
    event(rig, space)
    rig.check()
    rig.tier.end_all(fault=None if end is Result.DONE else end)
    rig.check()
    rig.tiering.pump()
    rig.tier.end_all()
    assert {fill.state for fill in fills} == {FillState.ENDED}
    assert all(fill.ticket is None for fill in fills)
    assert not rig.tiering.promotions.unsettled
    assert rig.source.idle
    assert (rig.cache.leases.withheld_bytes, rig.source.read_order.reserved_bytes) == (0, 0)
    assert all(lease.coming == 0 for lease in rig.cache.leases.by_id.values())
    for lease in LEASES:
        rig.cache.end_session(lease)
    rig.clock.now += 1000.0
    rig.cache.tick()
    rig.tiering.tick()
    while rig.cache.background():
        pass
    usage = rig.cache.life.usage
    assert (usage.writing, usage.dropped, usage.pinned) == (0, 0, 0)
    if event is not it_is_forgotten:
        counters = space.counters
        found = counters.keys_ready + counters.found_disk
        assert counters.keys_asked == found + counters.misses.total() == 4, "each key is counted once for each lookup"
        assert set(lookup(rig, space, 9)) <= {ABSENT, READY} or rig.in_tier(space, KEYS), "its keys are free"
        rig.cache.end_session(9)
        rig.put(space, KEYS)
        assert lookup(rig, space, 10) == [READY] * 2
        rig.cache.end_session(10)
    rig.check()
