"""Why keys of prompts were missed, by what tiers did and what the engine reports: decided once, when it does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvoffd.cache.asked_keys import PromptUse
from kvoffd.cache.namespace import MissReason
from kvoffd.tiering import TieringSettings, WriteMode
from kvoffd.tiering.read_speed import MIN_BLOCKS
from kvoffd.tiers.tier import Result
from kvoffd_proto.messages import ABSENT, PENDING
from tests.kit.fake_tier import FakeTier
from tests.kit.slot_cache import UNIT, keys_of
from tests.kit.tiering_harness import TieringHarness
from tests.tiering.test_shared import give

QUIET = TieringSettings(mode=WriteMode.NEVER)
KEYS = keys_of(1, 2, 3)


class Rig(TieringHarness):
    """Of prompts of the keys 1 to 3, a store and a disk."""

    def __init__(self) -> None:
        super().__init__(settings=QUIET)
        self.shared, self.space = self.share(QUIET), self.open()

    def ask(self, lease: int, *, again: bool = False, keys: bytes = KEYS) -> None:
        self.cache.lookup(self.space, 1, lease, [(0, keys)], again=again, reported=True)
        self.cache.prompts.report()

    def count(self, lease: int, covered: int = 0, **outcome: object) -> list[MissReason]:
        """Count a prompt; return the reasons of the keys behind the covered ones, which are counted and kept."""
        before = self.space.counters.misses.copy()
        fields = {"own": [0], "covered": [covered], "unloaded": None, **outcome}
        (part,) = self.cache.prompts.count(1, lease, PromptUse(**fields))  # type: ignore[arg-type]
        kept = [MissReason(one) for one in part.reasons[covered:]]
        assert self.space.counters.misses - before == {one: kept.count(one) for one in kept}
        assert [part.reason_of(keys_of(number)) for number in (1, 2, 3)[covered:]] == kept
        return kept


@pytest.fixture
def rig() -> Rig:
    return Rig()


late = {"coming": [3], "not_awaited": MissReason.TIER_LATE}
unanswered = {"coming": [3], "not_awaited": MissReason.UNANSWERED}
excluded = {"coming": [3], "not_awaited": MissReason.EXCLUDED}


def none_there(rig: Rig, store: FakeTier) -> None:
    store.answer()


def all_there(rig: Rig, store: FakeTier) -> None:
    give(rig, store, rig.space, 1, 2, 3)
    store.answer()


def answer_fails(rig: Rig, store: FakeTier) -> None:
    store.hangs = True
    store.answer()


def read_fails(rig: Rig, store: FakeTier, result: Result = Result.FAILED) -> None:
    """A later lookup of the prompt has it read."""
    all_there(rig, store)
    rig.ask(2, again=True)
    rig.tiering.pump()
    while store.jobs:
        store.end(next(iter(store.jobs)), fault=result)


def read_is_wrong(rig: Rig, store: FakeTier) -> None:
    read_fails(rig, store, Result.CORRUPT)


def read_runs(rig: Rig, store: FakeTier) -> None:
    all_there(rig, store)
    rig.ask(2, again=True)
    rig.tiering.pump()


@pytest.mark.parametrize(
    ("happens", "outcome", "reason"),
    [
        (none_there, {}, MissReason.UNKNOWN),
        (none_there, unanswered, MissReason.UNKNOWN),
        (none_there, excluded, MissReason.UNKNOWN),
        (None, unanswered, MissReason.UNANSWERED),
        (None, {}, MissReason.UNANSWERED),
        (None, excluded, MissReason.EXCLUDED),
        (None, {"unloaded": MissReason.LATE}, MissReason.LATE),
        (all_there, unanswered, MissReason.TIER_LATE),
        (all_there, late, MissReason.TIER_LATE),
        (all_there, excluded, MissReason.EXCLUDED),
        (all_there, {"unloaded": MissReason.SKIPPED}, MissReason.SKIPPED),
        (answer_fails, {}, MissReason.TIER_DOWN),
        (answer_fails, unanswered, MissReason.TIER_DOWN),
        (read_runs, late, MissReason.TIER_LATE),
        (read_fails, {}, MissReason.TIER_FAILED),
        (read_is_wrong, {}, MissReason.CORRUPT),
    ],
)
def test_what_a_store_does_is_the_reason(
    rig: Rig, happens: Callable[[Rig, FakeTier], None] | None, outcome: dict[str, object], reason: MissReason
) -> None:
    rig.ask(1)
    if happens is not None:
        happens(rig, rig.shared)
    assert rig.count(1, **outcome) == [reason] * 3


@pytest.mark.parametrize("outcome", [{}, late])
def test_what_comes_too_late_is_late_and_what_is_behind_it_in_the_pool_is_not(
    rig: Rig, outcome: dict[str, object]
) -> None:
    rig.put(rig.space, keys_of(2))
    rig.put_in_tier(rig.space, keys_of(1, 3))
    rig.ask(1)
    assert rig.cache.prompts.uncounted._by_lease[1, 1][0].sources == (rig.tier.name,)
    if outcome:
        rig.finish_promotions()
    assert rig.count(1, **outcome) == [MissReason.TIER_LATE, MissReason.AFTER_GAP, MissReason.TIER_LATE]


def test_what_a_store_has_behind_a_read_that_failed_is_behind_a_gap(rig: Rig) -> None:
    rig.ask(1)
    all_there(rig, rig.shared)
    rig.ask(2, again=True)
    rig.tiering.pump()
    rig.shared.end(next(iter(rig.shared.jobs)), fault=Result.FAILED)
    assert rig.count(1) == [MissReason.TIER_FAILED, MissReason.AFTER_GAP, MissReason.AFTER_GAP]


def test_a_later_lookup_of_the_prompt_may_have_found_more(rig: Rig) -> None:
    """As in a second store, which is asked once the first one has answered."""
    rig.ask(1)
    rig.shared.answer()
    assert rig.count(1, coming=[2], not_awaited=MissReason.TIER_LATE) == [
        MissReason.TIER_LATE,
        MissReason.TIER_LATE,
        MissReason.UNKNOWN,
    ]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("reported", [True, False])
def test_a_tier_that_is_down_is_the_reason_of_what_is_not_there(rig: Rig, reported: bool, shared: bool) -> None:
    """Of what was evicted too: it may be in the tier."""
    rig.cache.blocks.record_misses(rig.space.group(0), keys_of(1), MissReason.EVICTED)
    rig.cache.blocks.record_misses(rig.space.group(0), keys_of(2), MissReason.CORRUPT)
    tier = rig.shared if shared else rig.tier
    tier.hangs = True
    expected = [MissReason.TIER_DOWN, MissReason.CORRUPT, MissReason.TIER_DOWN]
    if reported:
        rig.ask(1)
        rig.shared.answer()
        assert rig.cache.prompts.uncounted._by_lease[1, 1][0].down == (tier.name,)
        assert rig.count(1) == expected
        rig.ask(2)
        rig.shared.answer()
        computing = [MissReason.COMPUTING, MissReason.CORRUPT, MissReason.COMPUTING]
        assert rig.count(2) == computing, "the first prompt computes them, whatever the store has"
    else:
        rig.states(rig.space, KEYS)
        rig.shared.answer()
        assert +rig.space.counters.misses == {MissReason.TIER_DOWN: 2, MissReason.CORRUPT: 1}


def test_a_place_that_has_no_peer_is_no_tier_that_is_down(rig: Rig) -> None:
    """Of a peers' network it has no name, and a prompt that names no peer has none either."""
    rig.shared.only_named, rig.shared.name, rig.shared.hangs = True, "", True
    rig.ask(1)
    assert rig.cache.prompts.uncounted._by_lease[1, 1][0].down == ()
    assert rig.count(1) == [MissReason.UNKNOWN] * 3


def test_a_store_that_has_answered_since_is_not_down(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question before this prompt's had failed."""
    monkeypatch.setattr(rig.shared, "is_down", lambda: True)
    rig.ask(1)
    monkeypatch.setattr(rig.shared, "is_down", lambda: False)
    rig.shared.answer()
    assert rig.cache.prompts.uncounted._by_lease[1, 1][0].down == ()
    assert rig.count(1) == [MissReason.UNKNOWN] * 3


@pytest.mark.parametrize("apart", [True, False])
def test_what_another_prompt_computes_is_known_where_a_store_is_asked_first(rig: Rig, apart: bool) -> None:
    rig.ask(1)
    if apart:
        rig.shared.answer()
    rig.ask(2)
    rig.shared.answer()
    assert rig.count(2) == [MissReason.COMPUTING] * 3
    assert rig.count(1) == [MissReason.UNKNOWN] * 3


def test_what_is_slower_to_read_from_a_disk_than_to_compute_is_skipped(rig: Rig) -> None:
    source, space = rig.tiering.sources[0], rig.space
    space.counters.prefill_tokens_per_second = 10.0 * space.specs[0].tokens_per_block
    source.reads.speed.measured = 5.0 * UNIT
    rig.put_in_tier(space, keys_of(1, 2, 3))
    source.read_again_at = rig.clock() + 1.0  # one is tried now and then
    rig.ask(1)
    assert rig.count(1) == [MissReason.SKIPPED] * 3


def test_a_slow_disk_is_tried_for_all_groups_of_a_prompt_or_for_none(rig: Rig) -> None:
    space = rig.open("b", sizes=(UNIT, UNIT))
    space.counters.prefill_tokens_per_second = 10.0 * space.specs[0].tokens_per_block
    rig.tiering.sources[0].reads.speed.measured = 5.0 * UNIT
    for group in range(2):
        give(rig, rig.tier, space, 1, 2, group=group)
    for number, expected in ((1, PENDING), (2, ABSENT)):  # nothing was read lately; then the first is
        states, _ = rig.cache.lookup(space, 1, 10 + number, [(group, keys_of(number)) for group in range(2)])
        assert [list(one) for one in states] == [[expected]] * 2


def test_blocks_of_any_size_have_a_speed(rig: Rig) -> None:
    source, block_bytes = rig.tiering.sources[0], 64 << 20
    source.reads.most_bytes = 1 << 40
    assert source.reads.free_blocks(block_bytes) > MIN_BLOCKS


def test_prompts_without_a_report_miss_nothing_that_was_coming(rig: Rig) -> None:
    rig.put_in_tier(rig.space, keys_of(1))
    rig.ask(1)
    rig.cache.end_session(1)
    while rig.cache.background():
        pass
    assert (rig.space.counters.covered_keys, rig.space.counters.misses.total()) == (3, 0)
