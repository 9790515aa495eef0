"""What goes down to a tier: by use, ahead of eviction, within a budget; and never in anybody's way."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffd.cache.namespace import Group, Namespace
from kvoffd.cache.tickets import StorePart
from kvoffd.tiering import TieringSettings, WriteMode, writer
from kvoffd.tiering.selection import STAYS, Selection
from kvoffd.tiering.write_budget import DAY_S, WriteBudget
from kvoffd.tiering.writer import BUDGET, LATE, MAX_LOOKED_AT, UNLIKELY
from kvoffd.tiers.tier import Result
from kvoffd_proto.messages import BENCH_LABEL, READY
from tests.kit.clock import Clock
from tests.kit.slot_cache import UNIT, keys_of
from tests.kit.tiering_harness import TieringHarness


def rig_of(mode: WriteMode, **settings: int) -> TieringHarness:
    return TieringHarness(settings=TieringSettings(mode=mode, **settings), regions=8)


def test_what_waits_to_be_written_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_WAITING", 3)
    rig = rig_of(WriteMode.ALWAYS)
    rig.tier.hangs = True
    space = rig.open()
    rig.put(space, keys_of(*range(15)))
    rig.use(space, keys_of(*range(15)))
    rig.tiering.tick()
    assert len(rig.writer.waiting) == 3
    rig.tier.hangs = False
    for _ in range(8):
        go_on(rig)
        rig.use(space, keys_of(*range(15)))
    assert rig.in_tier(space, keys_of(*range(15))) == 15


def go_on(rig: TieringHarness) -> None:
    rig.tiering.tick()
    rig.tier.end_all()


@pytest.mark.parametrize("mode", [WriteMode.ALWAYS, WriteMode.AUTO])
def test_disks_are_not_worn_by_what_benches_store(mode: WriteMode) -> None:
    rig = rig_of(mode)
    space, bench = rig.open("model"), rig.open(f"{BENCH_LABEL}copy")
    for lease, mine in enumerate((space, bench)):
        rig.put(mine, keys_of(*range(15)))
        rig.use(mine, keys_of(1), lease)
    go_on(rig)
    rig.evict(bench, keys_of(*range(2, 15)))
    go_on(rig)
    assert rig.in_tier(bench, keys_of(*range(15))) == 0
    assert rig.in_tier(space, keys_of(*range(15))) == 15
    assert not rig.writer.not_written


@pytest.mark.parametrize(("mode", "written"), [("auto", 2), ("always", 2), ("never", 0)])
def test_modes_write_blocks_that_are_stored(mode: str, written: int) -> None:
    rig = rig_of(WriteMode(mode))
    space = rig.open(world_size=2)
    rig.put(space, keys_of(1, 2))
    go_on(rig)
    assert rig.in_tier(space, keys_of(1, 2)) == written
    assert rig.writer.written_bytes == 2 * UNIT * written
    rig.check()


def test_what_was_lost_in_the_tier_is_written_again_when_it_is_used_or_cold() -> None:
    rig = rig_of(WriteMode.AUTO)
    space = rig.open()
    rig.put(space, keys_of(*range(30)))
    go_on(rig)
    rig.tier.remove(rig.group(space), [keys_of(number) for number in range(30)])
    rig.use(space, keys_of(5))
    rig.bring_up()
    assert rig.in_tier(space, keys_of(*range(30))) == 1, "it is used"
    go_on(rig)
    assert rig.in_tier(space, keys_of(29, 28, 27, 26)) == 4, "the tail is next to be evicted"
    assert rig.in_tier(space, keys_of(*range(30))) == 5


def test_an_empty_tier_takes_prompts_of_a_third_of_the_pool() -> None:
    """A chain of blocks that are evicted at once is in the tier from its root on, as far as that had time."""
    rig = rig_of(WriteMode.AUTO)
    space = rig.open()
    for first in range(0, 60, 10):
        rig.put(space, keys_of(*range(first, first + 10)))
        go_on(rig)
    assert rig.in_tier(space, keys_of(*range(60))) == 60
    for first in range(60, 120, 10):
        rig.put(space, keys_of(*range(first, first + 10)))
        rig.tiering.tick()
        rig.tier.end(next(iter(rig.tier.jobs)))
    for first in range(60, 120, 10):
        there = [rig.in_tier(space, keys_of(number)) for number in range(first, first + 10)]
        assert there == sorted(there, reverse=True), "no holes"


def test_what_is_written_goes_before_what_waits() -> None:
    rig = rig_of(WriteMode.AUTO)
    space = rig.open()
    for first in (0, 16):
        rig.put(space, keys_of(*range(first, first + 16)))
    rig.tier.remove(rig.group(space), [])
    rig.tiering.tick()
    for _ in range(4):  # the roots of the first chain
        rig.tier.end(next(iter(rig.tier.jobs)))
    assert rig.in_tier(space, keys_of(*range(4))) == 4
    rig.put(space, keys_of(*range(40, 44)))
    assert rig.states(space, keys_of(4)) == [READY]
    assert sum(len(rig.blocks(space, keys_of(number))) for number in range(4)) == 0
    assert not rig.writer.not_written


def test_what_a_tier_has_of_a_prompt_leaves_a_region_to_the_rest_of_it() -> None:
    rig = TieringHarness(regions=2)
    space = rig.open(sizes=(UNIT, 4 * UNIT))
    rig.put(space, keys_of(*range(8)))
    parts = [StorePart(0, keys_of(8), before={0: keys_of(7)}), StorePart(1, keys_of(8))]
    assert [one.no_space for one in rig.cache.stores.begin(space, 0, parts)] == [[0], [0]], "it has nothing yet"
    go_on(rig)
    assert rig.in_tier(space, keys_of(*range(8))) == 8
    stores = rig.cache.stores.begin(space, 0, parts[::-1])
    assert [one.no_space for one in stores] == [[], []]
    rig.cache.stores.abort(stores)
    rig.check()


def test_what_was_read_goes_before_what_waits() -> None:
    """Prompts that come up one after the other, block by block, while nothing can be written."""
    rig = rig_of(WriteMode.AUTO, trickle_bytes=0)
    space = rig.open()
    rig.put_in_tier(space, keys_of(*range(100, 140)))
    waiting = keys_of(*range(16))
    rig.engines_busy = True
    rig.put(space, waiting)
    for number in range(100, 140):
        rig.states(space, keys_of(number))
        rig.bring_up()
        assert rig.states(space, keys_of(number), again=True) == [READY]
    assert rig.states(space, waiting) == [READY] * 16
    assert not rig.writer.not_written


def test_while_others_read_only_a_trickle_is_written() -> None:
    rig = rig_of(WriteMode.AUTO, trickle_bytes=2 * UNIT)
    space = rig.open()
    rig.put_in_tier(space, keys_of(99))
    rig.put(space, keys_of(*range(20)))
    rig.states(space, keys_of(99))
    rig.tiering.pump()
    rig.tiering.tick()
    rig.tiering.pump()
    assert sum(job.block is not None for job in rig.tier.jobs) == 2


def full_rig(
    monkeypatch: pytest.MonkeyPatch, mode: WriteMode, chances: dict[int, float], least: float, per_day_bytes: int = 0
) -> tuple[TieringHarness, Namespace]:
    """Over a full tier of four blocks. The policy knows some chances to come back soon, and 0.11 of all others.
    ``least``: the least chance that is worth a write."""
    rig = TieringHarness(settings=TieringSettings(mode, per_day_bytes), regions=8, tier_blocks=4)
    space = rig.open()
    rig.put_in_tier(space, keys_of(*range(100, 105)))
    assert rig.tier.lifetime_bytes == 4 * UNIT
    rig.tiering.tick()
    rig.writer.not_written.clear()
    monkeypatch.setattr(Selection, "deciding", lambda _, chances: (chances[:, 0], least))
    known = {keys_of(number): chance for number, chance in chances.items()}

    def chance(group: Group, keys: bytes, within_bytes: int) -> np.ndarray:
        assert within_bytes >= rig.tier.lifetime_bytes
        return np.array([known.get(key, 0.11) for key in group.namespace.split(group.index, keys)])

    if chances:
        monkeypatch.setattr(rig.cache.policy, "chance", chance)
    return rig, space


def test_a_full_tier_gets_nothing_that_hardly_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, space = full_rig(monkeypatch, WriteMode.AUTO, {29: 0.09}, least=0.1)
    rig.put(space, keys_of(*range(30)))
    for _ in range(3):
        go_on(rig)
    assert rig.in_tier(space, keys_of(28)) == 1
    assert rig.in_tier(space, keys_of(29)) == 0
    rig.put(space, keys_of(*range(30, 34)))
    rig.tiering.tick()
    assert rig.writer.not_written == {UNLIKELY: 1}
    rig.check()


@pytest.mark.parametrize(
    ("mode", "chances"), [(WriteMode.ALWAYS, {1: 0.0, 2: 0.0}), (WriteMode.AUTO, {})], ids=["all is wanted", "unknown"]
)
def test_what_is_not_judged_is_written(
    mode: WriteMode, chances: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, space = full_rig(monkeypatch, mode, chances, least=0.5)
    rig.put(space, keys_of(*range(10, 38), 1, 2))
    go_on(rig)
    assert rig.in_tier(space, keys_of(1, 2)) == 2


def choose(*kinds: tuple[int, float, float], reliable: int = len(STAYS)) -> tuple[Selection, list[bool]]:
    """The choice from kinds of blocks, and which of them it takes: their number, their chance to come back while they
    would stay if all were written, and by how much it grows in each time as long."""
    chosen = Selection()
    every = [[chance + more * (stay - 1) for stay in STAYS] for _, chance, more in kinds]
    rows = [row for (count, *_), row in zip(kinds, every, strict=True) for _ in range(count)]
    chosen.record(np.array(rows), UNIT, reliable)
    deciding, least = chosen.deciding(np.array(every))
    return chosen, (deciding >= least).tolist()


def test_the_likeliest_are_chosen_as_far_as_others_do_not_pay() -> None:
    assert choose((90, 0.01, 0.0), (10, 0.2, 0.1))[1] == [False, True], "it comes back if it stays long"
    assert choose((50, 0.3, 0.0), (50, 0.29, 0.0))[1] == [True, False], "all are more than half"
    assert choose((40, 0.3, 0.0), (10, 0.2, 0.0), (50, 0.1, 0.0))[1] == [True, True, False]
    assert choose((100, 0.08, 0.08))[1] == choose((100, 1.0, 0.0))[1] == [True], "alike"


def test_what_was_not_watched_for_long_is_not_believed() -> None:
    assert choose((20, 0.3, 0.0), (80, 0.1, 0.19))[1] == [False, True]
    assert choose((20, 0.3, 0.0), (80, 0.1, 0.19), reliable=1)[1] == [True, False]


def test_a_block_stays_longer_the_less_is_offered() -> None:
    chosen, tier_bytes = Selection(), 64 * UNIT
    chosen.record(np.zeros((64, len(STAYS))), UNIT, 1)
    chosen.record_traffic(tier_bytes, tier_bytes)
    assert chosen.lifetimes(tier_bytes)[0] == STAYS[0] * tier_bytes
    chosen.record_traffic(tier_bytes, tier_bytes)
    assert chosen.lifetimes(tier_bytes)[:2] == [2 * stay * tier_bytes for stay in STAYS[:2]]


def test_a_block_that_another_node_wrote_is_no_write() -> None:
    chosen, tier_bytes = Selection(), 64 * UNIT
    chosen.record(np.zeros((128, len(STAYS))), UNIT, 1)
    chosen.record_traffic(2 * tier_bytes, tier_bytes)
    for _ in range(64):
        chosen.record_present(UNIT)
    assert chosen.lifetimes(tier_bytes)[0] == 2 * STAYS[0] * tier_bytes


def test_blocks_without_a_checksum_are_not_written() -> None:
    rig = rig_of(WriteMode.ALWAYS, per_day_bytes=800 * UNIT)
    space = rig.open()
    budget = rig.writer.budget.left_bytes
    ticket = rig.begin(space, 0, 0, keys_of(1))
    rig.fill(ticket)
    rig.commit(ticket, checksum=0)
    go_on(rig)
    assert not rig.tier.blocks
    assert rig.writer.budget.left_bytes == budget


def test_beyond_the_days_bytes_nothing_is_written() -> None:
    rig = rig_of(WriteMode.ALWAYS, per_day_bytes=32 * UNIT)
    space = rig.open()
    rig.put(space, keys_of(*range(16)))
    go_on(rig)
    assert len(rig.tier.blocks) == 4
    assert rig.writer.budget.left_bytes == 0
    rig.evict(space, keys_of(*range(16)))
    rig.tiering.tick()
    assert rig.writer.not_written == {BUDGET: 12}
    rig.clock.now += DAY_S / 28 + 1
    rig.put(space, keys_of(99))
    go_on(rig)
    assert rig.in_tier(space, keys_of(99)) == 1


def test_a_full_tier_is_written_only_the_likeliest_when_little_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, space = full_rig(monkeypatch, WriteMode.AUTO, {29: 0.9, 28: 0.4}, least=0.1, per_day_bytes=32 * UNIT)
    rig.writer.budget.take(2 * UNIT)
    rig.put(space, keys_of(*range(30)))
    go_on(rig)
    assert rig.in_tier(space, keys_of(29)) == 1
    assert rig.in_tier(space, keys_of(28)) == 0
    rig.put(space, keys_of(*range(30, 34)))
    rig.tiering.tick()
    assert rig.writer.not_written == {BUDGET: 1}


def test_while_engines_copy_a_little_is_written_each_tick() -> None:
    rig = rig_of(WriteMode.ALWAYS, trickle_bytes=2 * UNIT)
    space = rig.open()
    rig.engines_busy = True
    rig.put(space, keys_of(*range(16)))
    for ticks in range(1, 4):
        go_on(rig)
        rig.bring_up()
        assert len(rig.tier.blocks) == 2 * ticks
    rig.engines_busy = False
    go_on(rig)
    assert len(rig.tier.blocks) == 16


def test_what_leaves_the_pool_does_not_wait_for_a_tier() -> None:
    rig = rig_of(WriteMode.ALWAYS)
    space = rig.open()
    longest = 0
    for start in range(0, 6400, 16):
        rig.put(space, keys_of(*range(start, start + 16)))
        rig.tiering.tick()  # what it began is never done
        longest = max(longest, len(rig.writer.waiting))
    assert longest <= space.ready_blocks
    assert len(rig.tier.jobs) == 2
    assert rig.writer.not_written == {LATE: 6400 - space.ready_blocks}, "all that was evicted"
    rig.tier.end_all()
    assert rig.in_tier(space, keys_of(*range(6384, 6400))) == 16
    rig.check()


def test_the_tiers_order_goes_on_where_the_pools_ends() -> None:
    rig = rig_of(WriteMode.NEVER)
    space = rig.open()
    rig.put_in_tier(space, keys_of(1))
    rig.put_in_tier(space, keys_of(2))
    rig.states(space, keys_of(1))
    rig.finish_promotions()
    rig.put_in_tier(space, keys_of(3))
    assert [key for _, key in rig.tier.blocks] == [keys_of(2), keys_of(1), keys_of(3)], "it came up"
    rig.evict(space, keys_of(1))
    rig.tiering.tick()
    assert [key for _, key in rig.tier.blocks] == [keys_of(2), keys_of(3), keys_of(1)]


@pytest.mark.parametrize("step_s", [1.0, 60.0, 7000.0])
def test_no_24_hours_see_more_than_the_days_bytes(step_s: float) -> None:
    now = 0.0
    budget = WriteBudget(1_000_000, lambda: now)
    written: list[tuple[float, int]] = []
    while now < 2 * DAY_S:
        while budget.take(5_000):
            written.append((now, 5_000))
        now += step_s
    total = sum(nbytes for _, nbytes in written)
    assert total > 1_700_000
    starts = [at for at, _ in written][::10]
    assert max(sum(nbytes for at, nbytes in written if start <= at < start + DAY_S) for start in starts) <= 1_000_000


@pytest.mark.parametrize(("lives", "least"), [(1, 980_000), (8, 850_000), (1000, 125_000)])
def test_killed_daemons_spend_no_more_than_one_that_lives(lives: int, least: int) -> None:
    """However often: what is noted for the next one is ahead of what is spent."""
    clock, left, written = Clock(), (0.0, 0.0), 0
    for _ in range(lives):
        budget = WriteBudget(1_000_000, clock)
        budget.restore(left[0], clock() - left[1])
        until = clock() + DAY_S / lives
        while clock() < until:
            while budget.take(2_000):
                written += 2_000
                if (spent := budget.amount_to_persist()) is not None:
                    left = spent, clock()
            clock.now += DAY_S / 2000
    assert least < written <= 1_000_000


def test_what_was_spent_under_a_larger_limit_is_paid_off_within_a_day() -> None:
    clock = Clock()
    budget = WriteBudget(1_000_000, clock)
    budget.restore(100_000_000, 0.0)
    assert not budget.take(1)
    clock.now += DAY_S + 60
    assert budget.take(1)


def test_a_block_larger_than_what_may_be_saved_is_paid_off() -> None:
    now = 0.0
    budget = WriteBudget(8_000, lambda: now)
    assert budget.take(4_000)
    assert not budget.take(1)
    now = DAY_S * 3_000 / 7_000 + 30
    assert budget.take(1)


def test_of_very_many_that_wait_only_some_are_looked_at_at_once() -> None:
    rig = TieringHarness(settings=TieringSettings(mode=WriteMode.ALWAYS), regions=2 * MAX_LOOKED_AT)
    space = rig.open()
    rig.engines_busy = True
    rig.put(space, keys_of(*range(3 * MAX_LOOKED_AT)))
    rig.cache.reset(space)
    rig.put(space, keys_of(9999))
    rig.engines_busy = False
    for left in (2 * MAX_LOOKED_AT + 1, MAX_LOOKED_AT + 1, 1, 0):
        assert not rig.tier.jobs
        rig.tiering.pump()
        assert len(rig.writer.waiting) == left
    rig.tier.end_all()
    assert rig.in_tier(space, keys_of(9999)) == 1


def test_what_the_tier_does_not_take_yet_stays_the_next() -> None:
    """Behind all that waits it would be a hole in its chain, once the pool is short."""
    rig = TieringHarness(settings=TieringSettings(), regions=64, most_jobs=4)
    space = rig.open()
    rig.put(space, keys_of(*range(40)))
    written: list[bytes] = []
    while rig.tiering.disk_writer.waiting or rig.tier.jobs:
        rig.tiering.tick()
        written += [job.key for job in rig.tier.jobs]
        for job in list(rig.tier.jobs):
            rig.tier.end(job)
    assert list(dict.fromkeys(written)) == [keys_of(number) for number in range(40)]
    rig.check()


def test_what_a_tier_refuses_waits_and_is_written_once_it_takes_writes() -> None:
    rig = rig_of(WriteMode.ALWAYS)
    space = rig.open()
    rig.tier.refuses = True
    rig.put(space, keys_of(*range(15)))
    for _ in range(30):
        rig.tiering.pump()
    go_on(rig)
    assert len(rig.writer.waiting) == 15
    rig.tier.refuses = False
    go_on(rig)
    assert rig.in_tier(space, keys_of(*range(15))) == 15
    assert not rig.writer.waiting


def test_a_tier_that_refuses_writes_has_nothing_of_a_prompt() -> None:
    """Its failed writes are in no tier, so the prompt keeps its beginning."""
    rig = TieringHarness(regions=2)
    space = rig.open()
    rig.put(space, keys_of(*range(8)))
    rig.tiering.tick()
    rig.tier.refuses = True
    rig.tier.end_all(fault=Result.FAILED)
    for _ in range(10):
        rig.tiering.pump()
        rig.tiering.tick()
    (stored,) = rig.cache.stores.begin(space, 0, [StorePart(0, keys_of(8), before={0: keys_of(7)})])
    assert (stored.copy, stored.no_space) == ([], [0])
    rig.check()


def test_beyond_the_days_bytes_a_prompt_keeps_its_beginning() -> None:
    rig = TieringHarness(TieringSettings(per_day_bytes=16 * UNIT), regions=2)
    space = rig.open()
    rig.put(space, keys_of(*range(8)))
    go_on(rig)
    assert rig.in_tier(space, keys_of(*range(8))) == 2
    (stored,) = rig.cache.stores.begin(space, 0, [StorePart(0, keys_of(8), before={0: keys_of(7)})])
    assert (stored.copy, stored.no_space) == ([], [0])
    rig.clock.now += DAY_S
    rig.use(space, keys_of(*range(8)))
    go_on(rig)
    assert rig.in_tier(space, keys_of(*range(8))) == 4
    rig.check()


def test_a_store_that_refuses_writes_keeps_nothing_from_going_that_a_disk_has() -> None:
    rig = TieringHarness(regions=2)
    store, space = rig.share(TieringSettings(WriteMode.ALWAYS)), rig.open()
    store.refuses = True
    rig.put(space, keys_of(*range(8)))
    go_on(rig)
    assert rig.in_tier(space, keys_of(*range(8))) == 8
    (stored,) = rig.cache.stores.begin(space, 0, [StorePart(0, keys_of(8), before={0: keys_of(7)})])
    assert (stored.copy, stored.no_space) == ([0], [])
    assert sorted(rig.index(space)) == [keys_of(number) for number in (0, 1, 2, 3, 4, 5, 6, 8)], (
        "the next in the order went"
    )
    rig.cache.stores.abort([stored])
    rig.check()


def test_what_waits_is_kept_while_a_tier_has_no_slot() -> None:
    """As a disk that frees a region of blocks of another size."""
    rig = rig_of(WriteMode.ALWAYS)
    space = rig.open()
    rig.tier.most_jobs = 0
    rig.put(space, keys_of(*range(15)))
    for _ in range(3):
        rig.tiering.pump()
        go_on(rig)
    assert len(rig.writer.waiting) == 15
    rig.tier.most_jobs = 100
    go_on(rig)
    assert rig.in_tier(space, keys_of(*range(15))) == 15


def test_a_block_that_no_tier_takes_is_passed_over() -> None:
    rig = rig_of(WriteMode.ALWAYS)
    large, small = rig.open("large", sizes=(2 * UNIT,)), rig.open("small")
    rig.tier.most_bytes = UNIT
    rig.put(large, keys_of(1, 2, 3))
    rig.put(small, keys_of(1, 2))
    go_on(rig)
    assert rig.in_tier(small, keys_of(1, 2)) == 2


def test_the_rest_of_the_first_filling_is_no_budget() -> None:
    rig = TieringHarness(settings=TieringSettings(per_day_bytes=8 * 4 * UNIT), regions=64)
    budget = rig.tiering.disk_writer.budget
    budget.first_filling_bytes = 2 * UNIT + UNIT // 2
    for _ in range(3):
        assert budget.take(UNIT)
    assert budget.first_filling_bytes == 0
    assert budget.left_share == 1.0
    for _ in range(4):
        assert budget.take(UNIT)
    assert (budget.left_share, budget.left_bytes, budget.take(UNIT)) == (0.0, 0, None)


def test_without_disks_nothing_waits_for_them() -> None:
    rig = TieringHarness(settings=TieringSettings(), regions=8)
    rig.tiering.sources.clear()
    rig.tiering._disk_tiers.clear()
    space = rig.open()
    rig.put(space, keys_of(1, 2))
    assert not rig.tiering.disk_writer.waiting


def test_what_was_not_written_goes_back_to_where_it_came_from() -> None:
    budget = WriteBudget(8_000, lambda: 0.0)
    day = budget.take(1_000)
    assert day is not None
    budget.first_filling_bytes = 10
    spent = budget.take(60)
    assert spent is not None
    assert (budget.first_filling_bytes, budget.left_bytes) == (0, 0)
    budget.refund(spent)
    assert (budget.first_filling_bytes, budget.left_bytes) == (10, 10), "no more than was there"
    budget.first_filling_bytes = 0
    budget.refund(day)
    assert budget.left_bytes == 1_000, "the day's bytes"
