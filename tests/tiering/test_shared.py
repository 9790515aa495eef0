"""What is asked of a shared tier and what comes up from it, by what a lookup finds in pool, tier below and there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import pytest

from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.server.traffic import pending_keys
from kvoffd.tiering import TieringSettings, WriteMode
from kvoffd.tiering.shared import ANSWER_S, DUE_S, MOST_KEYS, READ_AGAIN_S
from kvoffd.tiers.tier import Answer, AskedTier, OnDone, TierBlock, TierKey, Result, TierShard
from kvoffd_proto.messages import ABSENT, PENDING, READY, SHARED, GroupSpec
from tests.kit.slot_cache import UNIT, keys_of
from tests.kit.tiering_harness import TieringHarness

QUIET = TieringSettings(mode=WriteMode.NEVER)
ASK_S = 1.0


class FakeAskedTier(AskedTier):
    """Answers when it is told to; its blocks have the bytes that the harness expects."""

    name = "redis://fake"
    ask_deadline_s = ASK_S
    most_window_keys = 8192
    reachable = True

    def __init__(self, rig: TieringHarness) -> None:
        self.rig = rig
        self.there: set[tuple[int, bytes]] = set()
        self.known: dict[tuple[int, bytes], Answer] = {}
        self.asked: list[bytes] = []
        self.fingerprint = b""
        self.lengths: Sequence[int] = ()
        self.reads: list[tuple[TierKey, Sequence[int], OnDone]] = []
        self.ended: list[TierKey] = []
        self.written: list[TierBlock] = []
        self.removed: list[TierKey] = []
        self.forgotten: list[TierKey] = []
        self._block: TierBlock | None = None

    def ask(
        self, owner: int, fingerprint: bytes, group: int, lengths: Sequence[int], keys: Sequence[bytes], *, prefix: bool
    ) -> int:
        self.fingerprint, self.lengths = fingerprint, lengths
        self.asked += keys
        self.known.update(((group, key), Answer.ASKED) for key in keys)
        return len(keys)

    def answer(self) -> None:
        for (group, key), answer in self.known.items():
            if answer is Answer.ASKED:
                there = (group, key) in self.there
                self.known[group, key] = Answer.YES if there else Answer.NO
                self.rig.tiering.tier_answered(self, self.fingerprint, group, [key], [there])

    def answers(self, fingerprint: bytes, group: int, keys: Sequence[bytes]) -> list[Answer]:
        return [self.known.get((group, key), Answer.UNKNOWN) for key in keys]

    def poll(self, fingerprint: bytes) -> None: ...

    def take_voided(self) -> Collection[bytes]:
        return ()

    def groups(self) -> Collection[tuple[bytes, int]]:
        return ()

    def index(self, fingerprint: bytes, group: int) -> Mapping[bytes, TierBlock]:
        shards = tuple(TierShard(length, 0, 0) for length in self.lengths)
        return {
            key: TierBlock(TierKey(fingerprint, group, key), shards)
            for (at, key), answer in self.known.items()
            if at == group and answer is Answer.YES
        }

    def write(self, block: TierBlock, offsets: Sequence[int], on_done: OnDone) -> bool:
        self.written.append(block)
        return False

    def read(self, block_id: TierKey, offsets: Sequence[int], deadline: float, on_done: OnDone) -> bool:
        self.reads.append((block_id, offsets, on_done))
        return True

    def end_reads(self, space: Namespace, result: Result = Result.DONE) -> None:
        """End all reads, also those that begin meanwhile."""
        while self.reads:
            block_id, offsets, on_done = self.reads.pop(0)
            shards = []
            for rank, offset in enumerate(offsets):
                data = self.rig.content(space, block_id.group, block_id.key, rank)
                self.rig.memory.poke(offset, data)
                shards.append(TierShard(len(data), 2, self.rig.memory.sum_of(offset, len(data))))
            self._block = TierBlock(block_id, tuple(shards))
            self.ended.append(block_id)
            on_done(result)

    def contents(self, block: TierBlock) -> TierBlock:
        assert self._block is not None
        return self._block

    def touch(self, block_ids: Iterable[TierKey]) -> None: ...

    def remove(self, block_ids: Iterable[TierKey]) -> int:
        self.removed += block_ids
        return 0

    def forget(self, block_ids: Iterable[TierKey]) -> None:
        self.forgotten += block_ids

    def remove_namespace(self, fingerprint: bytes) -> int:
        self.known.clear()
        return 0

    def tick(self) -> None: ...


@pytest.fixture
def rig() -> TieringHarness:
    return TieringHarness(settings=QUIET)


@pytest.fixture
def shared(rig: TieringHarness) -> FakeAskedTier:
    tier = FakeAskedTier(rig)
    rig.tiering.share(tier, QUIET)
    return tier


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + 8] for at in range(0, len(keys), 8)]


def test_what_is_asked_is_pending_then_comes_up_with_what_its_object_says(
    rig: TieringHarness, shared: FakeAskedTier
) -> None:
    space = rig.open(world_size=2, sizes=(UNIT,))
    keys = keys_of(1, 2, 3)
    shared.there = {(0, key) for key in split(keys_of(1, 2))}
    assert rig.states(space, keys) == [SHARED] * 3
    assert rig.tiering.wait_s == pytest.approx(ANSWER_S), "no engine would wait for the deadline"
    assert shared.asked == split(keys)
    assert rig.states(space, keys) == [SHARED] * 3, "asked once"
    assert shared.asked == split(keys)
    shared.answer()
    assert rig.states(space, keys) == [SHARED, SHARED, ABSENT]
    rig.tiering.pump()
    assert shared.reads
    assert rig.states(space, keys) == [SHARED, SHARED, ABSENT], "also while they are being read"
    shared.end_reads(space)
    assert rig.states(space, keys) == [READY, READY, ABSENT]
    records = rig.records(space, keys_of(1))
    assert records["first_block"].tolist() == [2, 2]
    offsets = rig.slots.offsets(rig.cache.blocks.slots(rig.blocks_of(space, keys_of(1)), 2)[0])
    assert records["checksum"].tolist() == [rig.memory.sum_of(offset, UNIT) for offset in offsets.tolist()]
    rig.check()


def test_what_is_asked_for_is_a_hit_or_a_miss_once_it_is_answered(rig: TieringHarness, shared: FakeAskedTier) -> None:
    space = rig.open()
    counters = space.counters
    shared.there = {(0, key) for key in split(keys_of(1, 2))}
    rig.states(space, keys_of(1, 2, 3, 4))
    assert (counters.keys_asked, counters.found_shared) == (4, 0)
    shared.answer()
    assert (counters.found_shared, +counters.misses) == (0, {MissReason.UNKNOWN: 2}), "two are still to be read"
    rig.states(space, keys_of(1, 2, 3, 4))
    assert (counters.keys_asked, +counters.misses) == (8, {MissReason.UNKNOWN: 4}), "the answers are known"
    assert pending_keys(space) == 4
    rig.tiering.pump()
    shared.end_reads(space)
    assert (counters.found_shared, pending_keys(space)) == (4, 0)


def test_what_is_found_and_never_asked_for_again_is_counted_as_found(
    rig: TieringHarness, shared: FakeAskedTier
) -> None:
    space = rig.open()
    shared.there = {(0, key) for key in split(keys_of(1))}
    rig.states(space, keys_of(1))
    shared.answer()
    for _ in range(3):
        assert space.counters.found_shared == 0
        rig.clock.now += DUE_S
        rig.tiering.tick()
        if space.counters.found_shared:
            break
    assert (space.counters.found_shared, pending_keys(space)) == (1, 0)


@pytest.mark.parametrize("result", [Result.FAILED, Result.DEADLINE])
def test_what_does_not_come_up_is_a_miss_for_each_that_asked(
    rig: TieringHarness, shared: FakeAskedTier, result: Result
) -> None:
    space = rig.open()
    shared.there = {(0, key) for key in split(keys_of(1))}
    rig.states(space, keys_of(1))
    rig.states(space, keys_of(1))
    shared.answer()
    rig.cache.lookup(space, 999, 1, [(0, keys_of(1))], again=True)
    rig.tiering.pump()
    shared.end_reads(space, result)
    reason = {Result.FAILED: MissReason.TIER_FAILED, Result.DEADLINE: MissReason.TIER_LATE}[result]
    assert (space.counters.found_shared, +space.counters.misses, pending_keys(space)) == (0, {reason: 2}, 0)


def test_what_a_lookup_asks_for_that_comes_again_is_not_counted(rig: TieringHarness, shared: FakeAskedTier) -> None:
    space = rig.open()
    rig.states(space, keys_of(1))
    shared.answer()
    shared.known.clear()  # as a NO is after a second
    rig.cache.lookup(space, 999, 1, [(0, keys_of(1))], again=True)
    shared.answer()
    assert +space.counters.misses == {MissReason.UNKNOWN: 1}
    assert space.counters.found_shared == 0


def test_an_answer_for_keys_of_an_earlier_geometry_is_not_counted(rig: TieringHarness, shared: FakeAskedTier) -> None:
    space = rig.open()
    rig.states(space, keys_of(*range(1000)))
    rig.cache.forget_namespace(space)
    rig.tiering.namespace_forgotten(space)
    other = rig.open(key_bytes=64)
    shared.answer()
    assert +other.counters.misses == {}, "the keys were read beyond their end"


def test_nothing_is_asked_that_pool_or_disks_have(rig: TieringHarness, shared: FakeAskedTier) -> None:
    space = rig.open()
    rig.put_in_tier(space, keys_of(2))
    rig.put(space, keys_of(1))
    assert rig.states(space, keys_of(1, 2)) == [READY, PENDING]
    assert not shared.asked
    assert rig.states(space, keys_of(1, 2, 3)) == [READY, PENDING, SHARED]
    assert shared.asked == split(keys_of(3))


def test_what_takes_longer_than_computing_it_is_not_read_but_for_a_try_now_and_then(
    rig: TieringHarness, shared: FakeAskedTier
) -> None:
    space = rig.open()
    tokens = space.groups[0].tokens_per_block
    shared.there = {(0, key) for key in split(keys_of(*range(1, 9)))}
    promoter = rig.tiering.shared[0].promoter

    def asked(*numbers: int) -> list[int]:
        rig.states(space, keys_of(*numbers))
        shared.answer()
        return rig.states(space, keys_of(*numbers))

    space.counters.prefill_tokens_per_second = 10.0 * tokens  # a block in a tenth of a second
    promoter.bytes_per_second = 5.0 * UNIT
    assert asked(1) == [SHARED], "nothing was read lately"
    assert asked(2, 3) == [ABSENT, ABSENT]
    assert promoter.failures == {"slower": 2}
    rig.clock.now += READ_AGAIN_S
    assert asked(4) == [SHARED]
    assert asked(5) == [ABSENT]
    rig.tiering.pump()
    shared.end_reads(space)
    promoter.bytes_per_second = 20.0 * UNIT
    assert asked(6) == [SHARED]
    assert asked(7, 8) == [SHARED, SHARED], "it waits for the one before, and both are quicker read than computed"
    rig.check()


@pytest.mark.parametrize("result", [Result.DEADLINE, Result.FAILED])
def test_what_does_not_come_in_time_is_slow_until_the_store_was_away_and_is_back(
    rig: TieringHarness, shared: FakeAskedTier, result: Result
) -> None:
    space = rig.open()
    shared.there = {(0, key) for key in split(keys_of(*range(1, 9)))}
    space.counters.prefill_tokens_per_second = 10.0 * space.groups[0].tokens_per_block
    promoter = rig.tiering.shared[0].promoter
    promoter.bytes_per_second = 1e12

    def asked(*numbers: int) -> list[int]:
        rig.states(space, keys_of(*numbers))
        shared.answer()
        found = rig.states(space, keys_of(*numbers))
        rig.tiering.pump()
        return found

    assert asked(1, 2) == [SHARED, SHARED]
    rig.clock.now += 2.0
    shared.end_reads(space, result)
    assert promoter.bytes_per_second == pytest.approx(UNIT / 2)
    assert asked(3) == [ABSENT]
    assert promoter.failures == {result.value: 2, "slower": 1}
    shared.reachable = False
    rig.tiering.tick()
    shared.reachable = True
    assert asked(4) == [SHARED]
    assert asked(5) == [ABSENT]
    shared.end_reads(space)
    assert asked(6) == [SHARED], "it is as fast again as before"


def test_where_nobody_says_how_many_tokens_a_block_has_nothing_is_slower(
    rig: TieringHarness, shared: FakeAskedTier
) -> None:
    space = rig.new_namespace("w", groups=[GroupSpec("full_attention", 0)])
    rig.cache.register_rank(space, 0, [UNIT], None)
    space.counters.prefill_tokens_per_second = 1e6
    rig.tiering.shared[0].promoter.bytes_per_second = 1.0
    shared.there = {(0, key) for key in split(keys_of(1, 2, 3))}
    for number in (1, 2, 3):
        rig.states(space, keys_of(number))
        shared.answer()
        assert rig.states(space, keys_of(number)) == [SHARED]


def test_a_lookup_of_many_groups_asks_for_no_more_keys_than_one_of_one_group(
    rig: TieringHarness, shared: FakeAskedTier
) -> None:
    space = rig.open(sizes=(UNIT,) * 4)
    keys = keys_of(*range(MOST_KEYS))
    states, _ = rig.cache.lookup(space, 1, 1, [(group, keys) for group in range(4)])
    each = MOST_KEYS // 4
    assert [list(one) for one in states] == [[SHARED] * each + [ABSENT] * (MOST_KEYS - each)] * 4
    assert len(shared.asked) == MOST_KEYS


def test_behind_a_key_that_nobody_has_nothing_comes_up(rig: TieringHarness, shared: FakeAskedTier) -> None:
    space = rig.open()
    shared.there = {(0, key) for key in split(keys_of(1, 3))}
    rig.states(space, keys_of(1, 2, 3))
    shared.answer()
    assert rig.states(space, keys_of(1, 2, 3)) == [SHARED, ABSENT, ABSENT]
    rig.tiering.pump()
    assert len(shared.reads) == 1


@pytest.mark.parametrize("result", [Result.GONE, Result.CORRUPT, Result.FAILED, Result.DEADLINE])
def test_what_does_not_come_is_absent(rig: TieringHarness, shared: FakeAskedTier, result: Result) -> None:
    space = rig.open()
    shared.there = {(0, keys_of(1))}
    rig.states(space, keys_of(1))
    shared.answer()
    rig.states(space, keys_of(1))
    rig.tiering.pump()
    shared.known[0, keys_of(1)] = Answer.NO
    shared.end_reads(space, result)
    assert rig.states(space, keys_of(1)) == [ABSENT]
    assert rig.tiering.shared[0].promoter.failures == {result.value: 1}
    rig.check()


def test_a_read_that_says_no_checksum_is_not_ready(rig: TieringHarness, shared: FakeAskedTier) -> None:
    space = rig.open()
    shared.there = {(0, keys_of(1))}
    rig.states(space, keys_of(1))
    shared.answer()
    rig.states(space, keys_of(1))
    rig.tiering.pump()
    shared.contents = lambda block: block  # type: ignore[method-assign]
    shared.end_reads(space)
    assert rig.index(space) == {}
    rig.check()


def test_a_window_waits_for_what_the_others_have_and_only_its_last_comes_up(
    rig: TieringHarness, shared: FakeAskedTier
) -> None:
    groups = [GroupSpec("full_attention", 16), GroupSpec("sliding_window", 16, 32)]
    space = rig.new_namespace("w", groups=groups)
    rig.cache.register_rank(space, 0, [UNIT, UNIT], None)
    keys = keys_of(1, 2, 3, 4, 5)
    shared.there = {(0, key) for key in split(keys_of(1, 2, 3, 4))} | {(1, key) for key in split(keys)}

    def states() -> list[list[int]]:
        return [list(one) for one in rig.cache.lookup(space, 1, 1, [(0, keys), (1, keys)])[0]]

    assert states() == [[SHARED] * 5, [SHARED] * 5]
    shared.answer()
    assert states() == [[SHARED] * 4 + [ABSENT], [ABSENT, ABSENT, SHARED, SHARED, ABSENT]]
    rig.tiering.pump()
    shared.end_reads(space)
    assert [one.group for one in shared.ended] == [0] * 4 + [1] * 2
    assert states() == [[READY] * 4 + [ABSENT], [ABSENT, ABSENT, READY, READY, ABSENT]]


def test_what_cannot_be_reached_and_what_an_engine_reset_is_not_asked(
    rig: TieringHarness, shared: FakeAskedTier
) -> None:
    space = rig.open()
    shared.reachable = False
    assert rig.states(space, keys_of(1)) == [ABSENT]
    shared.reachable = True
    rig.tiering.namespace_reset(space.fingerprint, everywhere=False)
    assert rig.states(space, keys_of(1)) == [ABSENT]
    assert not shared.asked


def test_what_is_remembered_of_namespaces_and_servers_that_come_and_go_is_bounded(
    rig: TieringHarness, shared: FakeAskedTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvoffd.tiering.shared.MOST_UNSHARED", 100)
    monkeypatch.setattr("kvoffd.tiering.manager.MOST_LOGGED", 100)
    space = rig.open()
    rig.tiering.namespace_reset(space.fingerprint, everywhere=False)
    for number in range(1000):
        rig.tiering.namespace_reset(number.to_bytes(32, "big"), everywhere=False)
        rig.tiering.tier_error(shared, f"timeout 10.0.{number}.1:6379", "It does not answer.")
    others = [number.to_bytes(32, "big") for number in range(901, 1000)]
    assert list(rig.tiering.shared[0].unshared) == [space.fingerprint, *others]
    assert len(rig.tiering._logged_errors) == 100
    logged = len(caplog.records)
    rig.tiering.tier_error(shared, "timeout 10.0.999.1:6379", "It does not answer.")
    assert len(caplog.records) == logged


def test_a_namespace_that_was_reset_is_not_written(rig: TieringHarness) -> None:
    tier = FakeAskedTier(rig)
    rig.tiering.share(tier, TieringSettings(mode=WriteMode.ALWAYS))
    space = rig.open()
    rig.put(space, keys_of(1))
    rig.tiering.pump()
    assert [block.id.key for block in tier.written] == split(keys_of(1))
    rig.tiering.namespace_reset(space.fingerprint, everywhere=False)
    rig.put(space, keys_of(2))
    rig.tiering.tick()
    assert len(tier.written) == 1


def test_what_others_use_stays_there_whatever_this_node_drops(rig: TieringHarness, shared: FakeAskedTier) -> None:
    space = rig.open()
    rig.put(space, keys_of(1, 2))
    rig.cache.invalidate(space, [(0, keys_of(1))])
    assert [one.key for one in shared.forgotten] == split(keys_of(1)), "it must not come straight back"
    (check,) = rig.cache.checks(rig.blocks_of(space, keys_of(2)))
    assert not rig.cache.check(check.slot, check.generation, check.checksum + 1)
    assert len(shared.forgotten) == 1, "a whole one may come from there"
    rig.cache.reset(space)
    assert not shared.removed


def test_what_has_less_of_a_block_than_the_pool_now_is_removed_there(
    rig: TieringHarness, shared: FakeAskedTier
) -> None:
    space = rig.open()
    rig.put(space, keys_of(1), first_block=1)
    rig.put(space, keys_of(1))
    assert [one.key for one in shared.removed] == split(keys_of(1))


def test_a_block_dropped_while_it_is_written_stays_there(rig: TieringHarness) -> None:
    tier = FakeAskedTier(rig)
    rig.tiering.share(tier, TieringSettings(mode=WriteMode.ALWAYS))
    ends: list[OnDone] = []
    tier.write = lambda block, offsets, on_done: ends.append(on_done) or True  # type: ignore[method-assign, func-returns-value]
    space = rig.open()
    rig.put(space, keys_of(1))
    rig.tiering.pump()
    rig.cache.reset(space)
    ends[0](Result.DONE)
    assert [one.key for one in tier.forgotten] == split(keys_of(1))
    assert not tier.removed


def test_what_is_used_is_offered_again_and_what_was_there_takes_nothing_of_the_budget(rig: TieringHarness) -> None:
    tier = FakeAskedTier(rig)
    rig.tiering.share(tier, TieringSettings(mode=WriteMode.ALWAYS, per_day_bytes=28 * 4 * UNIT))
    budget = rig.tiering.shared[0].demoter.budget
    ends: list[OnDone] = []
    tier.write = lambda block, offsets, on_done: ends.append(on_done) or True  # type: ignore[method-assign, func-returns-value]
    space = rig.open()
    rig.put(space, keys_of(1))
    for lease, result in enumerate((Result.DONE, Result.PRESENT)):
        rig.tiering.tick()
        ends.pop()(result)
        taken = budget.take(3 * UNIT)
        assert taken
        budget.give_back(3 * UNIT)
        rig.use(space, keys_of(1), lease)
    rig.tiering.tick()
    assert len(ends) == 1
