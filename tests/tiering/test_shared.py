"""What is asked of a store that nodes share and what comes up from it, by what pool, disks and the store have."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest

from kvoffd.cache.asked_keys import PromptUse
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.tiering import TieringSettings, WriteMode
from kvoffd.tiering.promotion_source import PromotionSource
from kvoffd.tiering.promotions import READ_AGAIN_S
from kvoffd.tiering.tier_lookups import ANSWER_S, PEERS_AT_ONCE, last_window
from kvoffd.tiers.header import Block, BlockGroup
from kvoffd.tiers.tier import Found, Result, TierStats
from kvoffd_proto.messages import ABSENT, PENDING, READY, SHARED, WRITING, GroupSpec
from tests.kit.fake_tier import FakeTier, checksum
from tests.kit.slot_cache import UNIT, keys_of
from tests.kit.tiering_harness import TieringHarness

QUIET = TieringSettings(mode=WriteMode.NEVER)
ALWAYS = TieringSettings(mode=WriteMode.ALWAYS)


@pytest.fixture
def rig() -> TieringHarness:
    return TieringHarness(settings=QUIET)


@pytest.fixture
def shared(rig: TieringHarness) -> FakeTier:
    return rig.share(QUIET)


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + 8] for at in range(0, len(keys), 8)]


def pending_keys(namespace: Namespace) -> int:
    """Keys that lookups asked for and that a tier is still reading, or being asked for."""
    counters, misses = namespace.counters, namespace.counters.misses
    known = counters.keys_ready + counters.found_disk + counters.found_shared + misses.total()
    return counters.keys_asked - known


def give(rig: TieringHarness, tier: FakeTier, space: Namespace, *numbers: int, group: int = 0, first: int = 2) -> None:
    """Another node has stored these, from their engine block ``first`` on."""
    for key in split(keys_of(*numbers)):
        data = [rig.content(space, group, key, rank) for rank in range(space.world_size)]
        firsts, sums = (first,) * space.world_size, tuple(map(checksum, data))
        name = rig.group(space, group)
        tier.blocks[name.tag, key] = Block(name, key, firsts, sums), data
        tier.known.pop((name.tag, key), None)


def test_keys_are_asked_for_then_come_up_as_their_objects_say(rig: TieringHarness, shared: FakeTier) -> None:
    space = rig.open(world_size=2, sizes=(UNIT,))
    keys = keys_of(1, 2, 3)
    give(rig, shared, space, 1, 2)
    counters, unknown = space.counters, MissReason.UNKNOWN
    rig.cache.lookup(space, 1, 1, [(0, keys)], again=True)
    lease = rig.cache.leases.by_id[1]
    assert (lease.coming, lease.asking) == (3, 3)
    assert lease.wait_s == pytest.approx(ANSWER_S), "no engine would wait for the deadline"
    rig.cache.leases.end(1, [1])
    assert rig.states(space, keys) == [SHARED] * 3
    assert rig.states(space, keys) == [SHARED] * 3
    assert shared.asked == split(keys), "once"
    shared.answer()
    assert (counters.found_shared, +counters.misses) == (4, {unknown: 2})
    assert rig.states(space, keys) == [SHARED, SHARED, ABSENT]
    rig.tiering.pump()
    assert shared.jobs
    assert rig.states(space, keys) == [SHARED, SHARED, ABSENT], "also while they are being read"
    assert (pending_keys(space), +counters.misses) == (4, {unknown: 4}), "of two lookups"
    shared.end_all()
    assert (counters.found_shared, pending_keys(space)) == (8, 0)
    assert rig.states(space, keys) == [READY, READY, ABSENT]
    records = rig.records(space, keys_of(1))
    assert records["first_block"].tolist() == [2, 2]
    offsets = rig.slots.offsets(rig.cache.blocks.slots(rig.blocks(space, keys_of(1)), 2)[0])
    assert records["checksum"].tolist() == [rig.memory.sum_of(offset, UNIT) for offset in offsets.tolist()]
    rig.check()


def test_a_store_that_went_away_is_waited_for_by_its_silence(rig: TieringHarness, shared: FakeTier) -> None:
    """What it is reading is on its way still, and nothing of it comes."""
    space, keys = rig.open(), keys_of(1, 2)
    rig.put_in_tier(space, keys_of(1))
    give(rig, shared, space, 2)
    rig.states(space, keys)
    shared.answer()
    rig.cache.lookup(space, 1, 1, [(0, keys)])
    rig.bring_up()
    rig.clock.now += 1.0
    shared.hangs = True
    ((states,), _) = rig.cache.lookup(space, 1, 1, [(0, keys)], again=True)
    assert list(states) == [READY, SHARED]
    assert rig.cache.leases.by_id[1].wait_s == pytest.approx(1.0), "one block a second, as of now"


def test_a_lease_expects_no_answer_for_what_an_engine_stored_since(rig: TieringHarness, shared: FakeTier) -> None:
    space = rig.open()
    rig.cache.lookup(space, 1, 1, [(0, keys_of(1, 2))])
    assert rig.cache.leases.by_id[1].coming == 2
    rig.put(space, keys_of(1, 2))
    ((states,), _) = rig.cache.lookup(space, 1, 1, [(0, keys_of(1, 2))], again=True)
    assert list(states) == [READY, READY]
    assert rig.cache.leases.by_id[1].coming == 0


def test_a_block_that_waited_until_its_answer_was_old_is_asked_for_again(rig: TieringHarness, shared: FakeTier) -> None:
    space, keys = rig.open(), keys_of(*range(8))
    give(rig, shared, space, *range(8))
    rig.states(space, keys)
    shared.answer()
    rig.cache.lookup(space, 1, 1, [(0, keys)])
    shared.known.clear()
    shared.asked.clear()
    for _ in range(2):
        rig.tiering.pump()
    assert not space.counters.misses, "it was not evicted"
    assert b"".join(shared.asked) == keys, "all at once, as each answer takes its time"
    shared.answer()
    rig.tiering.pump()
    shared.end_all()
    assert rig.states(space, keys) == [READY] * 8


# --- what is counted -------------------------------------------------------------------------------


@pytest.mark.parametrize("given_up", ["before the answer", "before it is up", "when it is up"])
def test_what_comes_after_a_request_was_given_up_is_late(rig: TieringHarness, shared: FakeTier, given_up: str) -> None:
    space = rig.open()
    give(rig, shared, space, 1)
    late = PromptUse([0], [0], MissReason.LATE)
    steps = [lambda: rig.cache.leases.end(999, [2]), lambda: rig.cache.prompts.count(999, 1, late)]
    progress = [
        shared.answer,
        lambda: rig.cache.lookup(space, 999, 2, [(0, keys_of(1))], again=True, reported=True),
    ]
    progress += [rig.tiering.pump, shared.end_all]
    before = {"before the answer": 0, "before it is up": 2, "when it is up": 4}[given_up]
    rig.cache.lookup(space, 999, 1, [(0, keys_of(1))], reported=True)
    for step in progress[:before] + steps * 2 + progress[before:]:
        step()
    assert (space.counters.found_shared, +space.counters.misses) == (1, {MissReason.LATE: 1})


def test_keys_that_nobody_awaits_are_late(rig: TieringHarness) -> None:
    space = rig.open()
    rig.put_in_tier(space, keys_of(2))
    rig.put(space, keys_of(1))
    rig.cache.lookup(space, 999, 1, [(0, keys_of(1, 2))], reported=True)
    rig.cache.leases.end(999, [1])
    rig.cache.prompts.count(999, 1, PromptUse([0], [1], MissReason.LATE))
    rig.finish_promotions()
    assert (space.counters.keys_ready, space.counters.found_disk, space.counters.covered_keys) == (1, 1, 1)
    assert +space.counters.misses == {MissReason.LATE: 1}


def test_what_an_engine_had_itself_is_no_miss_whatever_a_store_answers(rig: TieringHarness, shared: FakeTier) -> None:
    """Before the report or after it."""
    space = rig.open()
    for lease_id in (1, 2):
        rig.cache.lookup(space, 999, lease_id, [(0, keys_of(10 * lease_id, 10 * lease_id + 1))], reported=True)
        if lease_id == 1:
            shared.answer()
        rig.cache.prompts.count(999, lease_id, PromptUse([1], [1], None))
        shared.answer()
    assert (space.counters.covered_keys, +space.counters.misses) == (
        2,
        {MissReason.UNKNOWN: 1, MissReason.UNANSWERED: 1},
    )


@pytest.mark.parametrize("key_bytes", [8, 64])
@pytest.mark.parametrize("answered", [False, True])
def test_a_forgotten_namespace_counts_nothing_for_the_next(
    rig: TieringHarness, shared: FakeTier, key_bytes: int, answered: bool
) -> None:
    space = rig.open()
    give(rig, shared, space, 1)
    rig.cache.lookup(space, 999, 1, [(0, keys_of(*range(1000)))])
    if answered:
        shared.answer()
    rig.cache.namespaces.forget(space)
    rig.tiering.namespace_forgotten(space)
    other = rig.open(key_bytes=key_bytes)
    if key_bytes == 8:
        rig.states(other, keys_of(1, 2))
    shared.answer()
    rig.tiering.pump()
    shared.end_all()
    rig.cache.leases.end(999, [1])
    rig.tiering.tick()
    counters = other.counters
    found = counters.found_shared + counters.misses.total() + pending_keys(other)
    assert counters.keys_asked == found == (2 if key_bytes == 8 else 0)


# --- what is asked for -----------------------------------------------------------------------------


def test_gaps_of_the_disks_are_filled_from_stores_in_order(rig: TieringHarness, shared: FakeTier) -> None:
    space, second = rig.open(), rig.share(QUIET, "redis://second")
    rig.put_in_tier(space, keys_of(1, 3))
    give(rig, shared, space, 2, 4)
    give(rig, second, space, 5)
    asked = keys_of(1, 2, 3, 4, 5, 6)
    assert rig.states(space, asked) == [PENDING, SHARED, PENDING, SHARED, SHARED, SHARED]
    assert (shared.asked, second.asked) == (split(keys_of(2, 4, 5, 6)), [])
    shared.answer()
    rig.states(space, asked)
    assert second.asked == split(keys_of(5, 6))
    second.answer()
    assert rig.states(space, asked) == [PENDING, SHARED, PENDING, SHARED, SHARED, ABSENT]
    rig.finish_promotions()
    shared.end_all()
    second.end_all()
    assert rig.states(space, asked) == [READY] * 5 + [ABSENT]
    assert [source.promoted_blocks for source in rig.tiering.sources] == [2, 2, 1]


@pytest.mark.parametrize(("ready", "units"), [(1, 13), (10, 4), (14, 0), (16, 0)])
def test_what_a_store_is_asked_for_takes_no_more_than_leases_may_pin(ready: int, units: int) -> None:
    """Of all groups together."""
    rig = TieringHarness(settings=QUIET, regions=4)
    rig.share(QUIET)
    space = rig.open(sizes=(UNIT, UNIT))
    rig.put(space, keys_of(*range(ready)))
    rig.cache.lookup(space, 1, 1, [(0, keys_of(*range(30))), (1, keys_of(*range(30)))])
    lease = rig.cache.leases.by_id[1]
    assert (lease.asking, lease.asking_bytes) == (60 - ready, units * UNIT)


def test_a_store_does_not_answer_for_another_one(rig: TieringHarness, shared: FakeTier) -> None:
    space, second = rig.open(), rig.share(QUIET, "redis://second")
    give(rig, second, space, 1)
    rig.cache.lookup(space, 1, 1, [(0, keys_of(1, 2))])
    shared.answer()
    rig.cache.lookup(space, 1, 2, [(0, keys_of(1, 2))])
    assert (shared.asked, second.asked) == (split(keys_of(1, 2)), split(keys_of(1, 2)))
    shared.known.clear()  # its answer has grown old
    rig.cache.lookup(space, 1, 3, [(0, keys_of(1, 2))])
    shared.answer()
    assert (space.counters.found_shared, space.counters.misses.total()) == (0, 4), "the second lookup's are open"
    second.answer()
    assert (space.counters.found_shared, space.counters.misses.total()) == (1, 5)


# --- peers, which are asked at once ----------------------------------------------------------------


class Questions:
    """Has a tier tell its questions apart, as ``SharedTier`` does: one for each ``find`` that asks for all its keys."""

    def __init__(self, tier: FakeTier) -> None:
        self.tier, self._find = tier, tier.find
        self.asked: list[tuple[BlockGroup, list[bytes], object]] = []
        tier.find = self.find  # type: ignore[method-assign]

    def find(self, group: BlockGroup, keys: Sequence[bytes], *, prefix: bool) -> Found:
        known = len(self.tier.known)
        states = self._find(group, keys, prefix=prefix).states
        if len(self.tier.known) - known != len(keys):
            return Found(states)
        self.tier.questions.clear()
        self.asked.append((group, list(keys), question := object()))
        return Found(states, question)

    def answer(self) -> None:
        for group, keys, question in self.asked:
            found = [(group.tag, key) in self.tier.blocks for key in keys]
            self.tier.known.update(((group.tag, key), there) for key, there in zip(keys, found, strict=True))
            gap = found.index(False) if False in found else len(found)
            found = [True] * gap + [False] * (len(found) - gap)
            self.tier.listener.answered(self.tier, group, keys, found, question)
        self.asked.clear()


def share_peers(rig: TieringHarness, count: int) -> list[FakeTier]:
    return [rig.share(QUIET, f"peer://node-{number}:7400") for number in range(count)]


@pytest.mark.parametrize("tells", [False, True])
def test_peers_are_asked_at_once_and_the_first_that_has_a_block_gives_it(rig: TieringHarness, tells: bool) -> None:
    space, peers = rig.open(), share_peers(rig, PEERS_AT_ONCE)
    answer = [Questions(peer).answer if tells else peer.answer for peer in peers]
    give(rig, peers[1], space, 1, 2)
    give(rig, peers[2], space, 1, 2, 3)
    rig.cache.lookup(space, 1, 1, [(0, keys_of(1, 2, 3, 4))])
    assert [peer.asked for peer in peers] == [split(keys_of(1, 2, 3, 4))] * len(peers)
    counters = space.counters
    answer[1]()
    assert (counters.found_shared, counters.misses.total()) == (2, 0), "another one may have the others"
    assert rig.states(space, keys_of(1, 2, 3, 4), again=True) == [SHARED] * 4
    rig.tiering.pump()
    assert {job.key for job in peers[1].jobs} == set(split(keys_of(1, 2))), "without waiting for the others"
    peers[1].end_all()
    assert rig.states(space, keys_of(1, 2, 3, 4), again=True) == [READY, READY, SHARED, SHARED]
    answer[2]()
    assert (counters.found_shared, counters.misses.total()) == (3, 0)
    answer[0]()
    answer[3]()
    assert (counters.found_shared, +counters.misses) == (3, {MissReason.UNKNOWN: 1})
    assert rig.states(space, keys_of(1, 2, 3, 4), again=True) == [READY, READY, SHARED, ABSENT]
    rig.tiering.pump()
    peers[2].end_all()
    assert rig.states(space, keys_of(1, 2, 3, 4), again=True) == [READY] * 3 + [ABSENT]
    assert pending_keys(space) == 0
    rig.check()


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("tells", [False, True])
def test_each_key_is_counted_once_in_whatever_order_peers_answer(
    rig: TieringHarness, order: Sequence[int], tells: bool
) -> None:
    space, peers = rig.open(), share_peers(rig, 3)
    answer = [Questions(peer).answer if tells else peer.answer for peer in peers]
    give(rig, peers[0], space, 1)
    give(rig, peers[1], space, 1, 2)
    rig.cache.lookup(space, 999, 1, [(0, keys_of(1, 2, 3))], reported=True)
    rig.cache.prompts.count(999, 1, PromptUse([0], [0], None))
    for number in order:
        answer[number]()
    counted = space.counters.covered_keys + space.counters.misses.total()
    assert (space.counters.found_shared, counted, space.counters.misses[MissReason.UNANSWERED]) == (2, 3, 3)


def test_some_peers_are_asked_at_a_time_first_those_that_had_something_last(rig: TieringHarness) -> None:
    space, peers = rig.open(), share_peers(rig, 2 * PEERS_AT_ONCE + 1)
    last = peers[-1]
    last.found_at = 2.0
    peers[-2].found_at = 1.0
    give(rig, last, space, 1)
    rig.states(space, keys_of(1))
    first = [last, *peers[-2:-1], *peers[: PEERS_AT_ONCE - 2]]
    assert [peer for peer in peers if peer.asked] == sorted(first, key=peers.index)
    for peer in first:
        peer.answer()
    assert rig.states(space, keys_of(1)) == [SHARED]
    assert [peer for peer in peers if peer.asked] == sorted(first, key=peers.index), "one of these has it"
    rig.states(space, keys_of(2))
    for step in range(3):
        asked = [peer for peer in peers if split(keys_of(2))[0] in peer.asked]
        assert len(asked) == min(len(peers), (1 + step) * PEERS_AT_ONCE)
        for peer in asked:
            peer.answer()
        answered = rig.states(space, keys_of(2))
        assert answered == [SHARED if step < 2 else ABSENT]


def test_behind_what_an_engine_is_storing_nothing_is_asked_for(rig: TieringHarness, shared: FakeTier) -> None:
    space = rig.open()
    rig.begin(space, 0, 0, keys_of(1))
    assert rig.states(space, keys_of(1, 2)) == [WRITING, ABSENT]
    assert not shared.asked


# --- windows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "tokens", "window", "found"),
    [
        ([1, 1, 1, 1, 1], 16, 32, range(3, 5)),
        ([1, 1, 1, 0, 1], 16, 32, range(1, 3)),
        ([1, 0, 1, 0, 1], 16, 32, range(1)),
        ([0, 0, 1, 0, 1], 16, 32, range(0)),
        ([0, 1, 1, 0, 0], 16, 0, range(2, 3)),
        ([1, 1, 1, 1, 1], 0, 32, range(5)),
        ([], 16, 32, range(0)),
    ],
)
def test_the_last_whole_window(there: Sequence[int], tokens: int, window: int, found: range) -> None:
    assert last_window(list(map(bool, there)), GroupSpec("sliding_window", tokens, window)) == found


def windows(rig: TieringHarness) -> Namespace:
    space = rig.join("w", groups=[GroupSpec("full_attention", 16), GroupSpec("sliding_window", 16, 32)])
    rig.cache.namespaces.register_rank(space, 0, [UNIT, UNIT], None)
    return space


def look_up(rig: TieringHarness, space: Namespace, keys: bytes) -> list[list[int]]:
    return [list(one) for one in rig.cache.lookup(space, 1, 1, [(0, keys), (1, keys)])[0]]


def test_a_window_waits_for_others_and_only_its_last_comes_up(rig: TieringHarness, shared: FakeTier) -> None:
    space, keys = windows(rig), keys_of(1, 2, 3, 4, 5)
    give(rig, shared, space, 1, 2, 3, 4)
    give(rig, shared, space, 1, 2, 3, 4, 5, group=1)
    assert look_up(rig, space, keys) == [[SHARED] * 5, [SHARED] * 5]
    shared.answer()
    assert look_up(rig, space, keys) == [[SHARED] * 4 + [ABSENT], [ABSENT, ABSENT, SHARED, SHARED, ABSENT]]
    rig.tiering.pump()
    groups: list[int] = []
    while shared.jobs:
        job = next(iter(shared.jobs))
        groups.append(job.group.group_index)
        shared.end(job)
    assert groups == [0] * 4 + [1] * 2
    assert look_up(rig, space, keys) == [[READY] * 4 + [ABSENT], [ABSENT, ABSENT, READY, READY, ABSENT]]


def test_a_window_is_not_read_before_its_end_is_known(rig: TieringHarness, shared: FakeTier) -> None:
    space, keys = windows(rig), keys_of(1, 2, 3)
    give(rig, shared, space, 1, 2, 3, group=1)
    shared.known.update(((rig.group(space, 1).tag, key), True) for key in split(keys))
    assert look_up(rig, space, keys) == [[SHARED] * 3, [ABSENT] * 3]
    rig.tiering.pump()
    assert not shared.jobs


# --- what is slow, and what fails ------------------------------------------------------------------


class Asker:
    """Looks single requests up: asked for, answered, and what it gets then."""

    def __init__(self, rig: TieringHarness, shared: FakeTier) -> None:
        self.rig, self.shared, self.group = rig, shared, rig.open()
        give(rig, shared, self.group, *range(1, 9))
        self.source: PromotionSource = rig.tiering.sources[1]
        self.group.counters.prefill_tokens_per_second = 10.0 * self.group.specs[0].tokens_per_block

    def __call__(self, *numbers: int) -> list[int]:
        self.rig.states(self.group, keys_of(*numbers))
        self.shared.answer()
        return self.rig.states(self.group, keys_of(*numbers), again=True)


def test_blocks_slower_to_read_than_compute_are_rarely_tried(rig: TieringHarness, shared: FakeTier) -> None:
    asked = Asker(rig, shared)  # it computes a block in a tenth of a second
    asked.source.reads.speed.measured = 5.0 * UNIT
    assert asked(1) == [SHARED], "nothing was read lately"
    assert asked(2, 3) == [ABSENT, ABSENT]
    assert asked.source.failures == {"slower": 2}
    rig.clock.now += READ_AGAIN_S
    assert asked(4) == [SHARED]
    assert asked(5) == [ABSENT]
    rig.tiering.pump()
    shared.end_all()
    asked.source.reads.speed.measured = 20.0 * UNIT
    assert asked(6) == [SHARED]
    assert asked(7, 8) == [SHARED, SHARED]
    rig.check()


def test_behind_what_is_slower_to_read_nothing_comes_up(rig: TieringHarness, shared: FakeTier) -> None:
    asked = Asker(rig, shared)
    asked.source.reads.speed.measured = 5.0 * UNIT
    assert asked(8) == [SHARED], "nothing was read lately"
    rig.put_in_tier(asked.group, keys_of(2))
    assert asked(1, 2, 3) == [ABSENT, ABSENT, ABSENT]


def test_once_a_slow_store_was_away_it_is_tried_again(rig: TieringHarness, shared: FakeTier) -> None:
    asked = Asker(rig, shared)
    asked.source.reads.speed.measured = 5.0 * UNIT
    assert asked(1) == [SHARED], "nothing was read lately"
    assert asked(2) == [ABSENT]
    shared.hangs = True
    rig.tiering.tick()
    shared.hangs = False
    assert asked(3) == [SHARED]


def test_without_tokens_of_blocks_nothing_is_slower(rig: TieringHarness, shared: FakeTier) -> None:
    space = rig.join("w", groups=[GroupSpec("full_attention", 0)])
    rig.cache.namespaces.register_rank(space, 0, [UNIT], None)
    space.counters.prefill_tokens_per_second = 1e6
    rig.tiering.sources[1].reads.speed.measured = 1.0
    give(rig, shared, space, 1, 2, 3)
    for number in (1, 2, 3):
        rig.states(space, keys_of(number))
        shared.answer()
        assert rig.states(space, keys_of(number)) == [SHARED]


def test_a_read_that_says_no_checksum_is_not_ready(rig: TieringHarness, shared: FakeTier) -> None:
    space = rig.open()
    give(rig, shared, space, 1)
    rig.states(space, keys_of(1))
    shared.answer()
    rig.states(space, keys_of(1))
    rig.tiering.pump()
    (job,) = shared.jobs
    job.on_end(Result.DONE, Block(job.group, job.key, (0,), (0,)))
    assert rig.index(space) == {}
    assert rig.tiering.sources[1].failures == {"corrupt": 1}
    rig.check()


def test_memory_of_servers_that_failed_is_bounded(
    rig: TieringHarness, shared: FakeTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvoffd.tiering.tiering.MAX_LOGGED", 100)
    reports = rig.tiering
    for number in range(1000):
        reports.error(shared, f"timeout 10.0.{number}.1:6379", "It does not answer.")
    assert len(reports._logged) == 100
    logged = len(caplog.records)
    reports.error(shared, "timeout 10.0.999.1:6379", "It does not answer.")
    assert len(caplog.records) == logged


# --- what is written there, and what goes ----------------------------------------------------------


def test_what_others_use_stays_there_whatever_this_node_drops(rig: TieringHarness, shared: FakeTier) -> None:
    space = rig.open()
    rig.put(space, keys_of(1, 2))
    rig.cache.invalidate(space, [(0, keys_of(1))])
    assert shared.removals == [(keys_of(1), False)], "it must not come straight back"
    (check,) = rig.cache.integrity.checks(rig.blocks(space, keys_of(2)))
    assert not rig.cache.integrity.check(check.slot, check.sequence, check.checksum + 1)
    assert len(shared.removals) == 1, "a whole one may come from there"
    assert (keys_of(2), False) in rig.tier.removals
    rig.cache.reset(space)
    assert len(shared.removals) == 1


def test_a_store_with_less_of_a_block_than_the_pool_drops_it(rig: TieringHarness, shared: FakeTier) -> None:
    space = rig.open()
    rig.put(space, keys_of(1), first_block=1)
    rig.put(space, keys_of(1))
    assert shared.removals == [(keys_of(1), True)]


def test_used_blocks_are_offered_again_within_the_budget(rig: TieringHarness) -> None:
    tier = rig.share(TieringSettings(mode=WriteMode.ALWAYS, per_day_bytes=8 * 4 * UNIT))
    budget = rig.tiering.writers[1].budget
    space = rig.open()
    rig.put(space, keys_of(1))
    for lease, result in enumerate((Result.DONE, Result.EXISTED)):
        rig.tiering.tick()
        tier.end_all(fault=result)
        tier.blocks.clear()  # the store forgets
        taken = budget.take(3 * UNIT)
        assert taken is not None
        budget.refund(taken)
        rig.use(space, keys_of(1), lease)
    rig.tiering.tick()
    assert len(tier.jobs) == 1


def test_the_disk_with_room_and_least_to_do_is_written_to(rig: TieringHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    full, busy, half, empty = rig.tier, rig.add_disk(), rig.add_disk(), rig.add_disk()
    full.evicted_blocks = 1
    for tier, used, queued in ((full, 1, 0), (busy, 0, 9), (half, 50, 0), (empty, 10, 0)):
        monkeypatch.setattr(tier, "stats", lambda u=used, q=queued: TierStats(100, u, queued_writes=q))
    monkeypatch.setattr(type(full), "lifetime_bytes", property(lambda tier: int(tier is full)))
    assert rig.tiering.disk_writer._targets() == [empty, half, busy, full]


def test_of_several_peers_the_one_that_a_request_names_is_asked(rig: TieringHarness) -> None:
    store, one, other = (rig.share(QUIET, name) for name in ("redis://fake", "peer://a:1", "peer://b:1"))
    space = rig.open(sizes=(UNIT,))
    for number, (peer, asked) in enumerate([("peer://b:1", (0, 1)), ("peer://c:1", (1, 1)), ("", (1, 1))]):
        keys = keys_of(number)
        for at, tier in enumerate((store, one, other)):
            tier.asked.clear()
            if at:
                give(rig, tier, space, number)
        rig.cache.lookup(space, 1, number + 1, [(0, keys)], peer=peer)
        store.answer()
        rig.cache.lookup(space, 1, number + 1, [(0, keys)], again=True, peer=peer)
        assert (len(one.asked), len(other.asked)) == asked
