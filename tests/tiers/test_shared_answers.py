"""What a shared tier knows of keys without asking: how long each answer stands, and no more is kept than bounds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import is_
from typing import Any

import pytest

from kvoffd.system.threads import Workers
from kvoffd.tiers import answers as module
from kvoffd.tiers.answers import HIDDEN_S, NO_S, YES_S, Answer, Ask
from kvoffd.tiers.asking_thread import AskingThread
from kvoffd.tiers.block_threads import ObjectReadEnd
from kvoffd.tiers.fleet_clears import Raise
from kvoffd.tiers.header import HEADER_BYTES, Block, BlockGroup, encode_header, make_block_group
from kvoffd.tiers.shared import SharedTier as Tier
from kvoffd.tiers.store import Credentials, open_store
from kvoffd.tiers.tier import ABSENT, ASKED, PRESENT, Result
from tests.kit.clock import Clock

GROUP = make_block_group(b"1" * 32, 0, 0, (5000,))
KEY = b"k" * 32
ASK_S = 0.02


class Waiting(Workers[Any, Any]):
    """Does nothing: the test ends what was asked."""

    def _start(self) -> None: ...


class Rig:
    """A tier that is reachable, over a store that is never connected to."""

    def __init__(self, name: str = "redis://nowhere") -> None:
        self.clock = Clock()
        self.heard: list[tuple[bytes, bool]] = []
        self.tier = Tier(
            name,
            open_store("redis://nowhere", Credentials()),
            pool=memoryview(bytearray(5000)),
            clock=self.clock,
            post=lambda call: None,
            listener=self,
            ask_deadline_s=ASK_S,
            make_workers=Waiting,
        )
        self.tier.breaker.probed(True)

    def answered(self, tier: object, group: object, keys: Sequence[bytes], found: Sequence[bool], _: object) -> None:
        self.heard += zip(keys, found, strict=True)

    def blocks_stored(self, *_: object) -> None: ...

    def blocks_removed(self, *_: object) -> None: ...

    def error(self, *_: object) -> None: ...

    def answer(self, found: bool, generation: int = 0) -> None:
        """Answer all that is asked."""
        for ask in [one for one in self.tier._asking._waiting if isinstance(one, Ask)]:
            self.tier._asking.end(Answer(0.001, generation, [found] * len(ask.keys)), partial(is_, ask))

    def find(self, keys: Sequence[bytes] = (KEY,), *, prefix: bool = True) -> list[int]:
        return list(self.tier.find(GROUP, keys, prefix=prefix).states)


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.mark.parametrize(("found", "seconds"), [(True, YES_S), (False, NO_S)])
def test_each_answer_stands_for_its_time_and_is_asked_for_then(rig: Rig, found: bool, seconds: float) -> None:
    assert rig.find() == [ASKED]
    rig.answer(found)
    assert rig.heard == [(KEY, found)]
    rig.clock.now += seconds - 0.01
    assert rig.find() == [PRESENT if found else ABSENT]
    rig.clock.now += 0.02
    assert rig.find() == [ASKED]
    assert rig.tier.counters.asked_keys == 2


def take_questions(rig: Rig) -> str:
    """Take all questions as the asking thread does; return the namespaces of asks, and ``.`` for other questions."""
    waiting, taken = rig.tier._asking._waiting, ""
    while waiting:
        (one,) = rig.tier._next_question(waiting)
        taken += one.group.fingerprint[:1].decode() if isinstance(one, Ask) else "."
    return taken


def test_namespaces_ask_in_turn(rig: Rig) -> None:
    """By the number of keys, each in its order; a question of another kind is passed by none."""
    groups = {name: make_block_group(name.encode() * 32, 0, 0, (5000,)) for name in "123"}

    def ask(name: str, *counts: int) -> None:
        for number, count in enumerate(counts):
            keys = [bytes([number, at]) * 16 for at in range(count)]
            assert set(rig.tier.find(groups[name], keys, prefix=True).states) == {ASKED}

    take_questions(rig)
    ask("1", *[100] * 5)
    ask("2", *[50] * 3)
    assert take_questions(rig) == "12212111"
    rig.clock.now += 10.0
    ask("1", 10, 10)
    rig.tier._asking.put(Raise(rig.tier.clears, b"1" * 32, 0, 0, 0.0))
    ask("2", 10)
    assert take_questions(rig) == "11.2"


def test_asks_that_are_too_late_cost_their_namespace_no_turn(rig: Rig) -> None:
    """They are not asked. With more of them than time, all that it asked would be too late."""
    one, other = (make_block_group(name * 32, 0, 0, (5000,)) for name in (b"1", b"2"))

    def ask(group: BlockGroup, numbers: range) -> None:
        for number in numbers:
            rig.tier.find(group, [bytes([number, at]) * 16 for at in range(100)], prefix=True)

    take_questions(rig)
    ask(one, range(3))
    rig.clock.now += 10.0
    ask(one, range(3, 4))
    ask(other, range(3))
    assert take_questions(rig) == "1111222"


def test_a_namespace_leaves_others_a_part_of_what_may_be_asked(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ASKED", 100)
    keys, other = [bytes([at]) * 32 for at in range(100)], make_block_group(b"2" * 32, 0, 0, (5000,))
    assert rig.find(keys) == [ASKED] * 75 + [ABSENT] * 25
    assert list(rig.tier.find(other, keys[:10], prefix=True).states) == [ASKED] * 10
    rig.answer(True)
    assert not rig.tier._answers.asked_of
    assert rig.find(keys) == [PRESENT] * 75 + [ASKED] * 25


@pytest.mark.parametrize("asked", [False, True])
def test_invalidated_keys_stay_absent_whatever_is_answered(rig: Rig, asked: bool) -> None:
    if asked:
        assert rig.find() == [ASKED]
    rig.tier.remove(GROUP, [KEY])
    assert rig.find() == [ABSENT]
    rig.answer(True)
    rig.clock.now += HIDDEN_S - 0.01
    assert rig.find() == [ABSENT]
    assert not rig.tier.read(GROUP, KEY, [0], 1e9, lambda *_: None)
    rig.clock.now += 0.02
    assert rig.find() == [ASKED]
    rig.answer(True)
    assert rig.find() == [PRESENT]


@pytest.mark.parametrize(("result", "seconds"), [(Result.FAILED, 2.0), (Result.GONE, 2.0), (Result.CORRUPT, HIDDEN_S)])
def test_a_block_whose_read_failed_is_absent_as_long_as_its_store_says(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, result: Result, seconds: float
) -> None:
    """A peer that was killed is back within seconds; wrong bytes stay wrong."""
    monkeypatch.setattr(rig.tier._store, "failed_s", 2.0)
    rig.find()
    rig.answer(True)
    ends: list[Result] = []
    assert rig.tier.read(GROUP, KEY, [0], 1e9, lambda result, _: ends.append(result))
    for _ in range(2):  # a failed read is tried once more
        rig.tier._reading.end(ObjectReadEnd(result))
    assert ends == [result]
    rig.clock.now += seconds - 0.01
    assert rig.find() == [ABSENT]
    rig.clock.now += 0.02
    assert rig.find() == [ASKED]


@pytest.mark.parametrize("result", [Result.DONE, Result.EXISTED])
def test_invalidated_while_written_a_block_is_not_read(rig: Rig, result: Result) -> None:
    ends: list[Result] = []
    assert rig.tier.write(Block(GROUP, KEY, (0,), (1,)), [0], ends.append)
    rig.tier.remove(GROUP, [KEY])
    rig.tier._writing.end(result)
    assert ends == [result]
    assert rig.find() == [ABSENT]


def test_a_read_waits_for_its_turn_until_the_store_is_left_alone(rig: Rig) -> None:
    rig.find()
    rig.answer(True)
    ends: list[Result] = []
    assert rig.tier.read(GROUP, KEY, [0], 0.1, lambda result, block: ends.append(result))
    rig.clock.now += 1000.0
    rig.tier.tick()
    assert not ends
    assert rig.tier.stats().queued_reads == 1
    rig.tier.breaker.failed("read", at_once=True)
    rig.tier.tick()
    assert ends == [Result.FAILED]
    assert rig.tier.stats().queued_reads == 0


def test_what_was_there_is_believed_longer_than_it_is_found(rig: Rig) -> None:
    assert rig.tier.wants(GROUP, [KEY]) == [True]
    rig.find()
    rig.answer(True)
    rig.clock.now += YES_S + 1
    assert rig.tier.wants(GROUP, [KEY]) == [False]
    assert rig.tier.read(GROUP, KEY, [0], 1e9, lambda *_: None)
    rig.clock.now += 60.0
    assert rig.tier.wants(GROUP, [KEY]) == [True]
    assert not rig.tier.read(GROUP, KEY, [0], 1e9, lambda *_: None)


@pytest.mark.parametrize(("ranks", "fit"), [(64, True), (198, True), (199, False), (4096, False)])
def test_a_block_of_too_many_ranks_is_not_written(rig: Rig, ranks: int, fit: bool) -> None:
    group = make_block_group(GROUP.fingerprint, 0, 0, (1,) * ranks)
    block = Block(group, b"k" * 64, (0,) * ranks, (1,) * ranks)
    assert rig.tier.wants(group, [block.key]) == [fit]
    assert rig.tier.write(block, range(ranks), lambda _: None) == fit
    assert (len(encode_header(block)) == HEADER_BYTES) == fit


def test_a_prefix_ends_at_a_gap_and_a_window_is_its_last_keys(rig: Rig) -> None:
    keys = [number.to_bytes(32, "big") for number in range(9000)]
    rig.find(keys[2:3])
    rig.answer(False)
    assert rig.find(keys[:5]) == [ASKED, ASKED, ABSENT, ABSENT, ABSENT]
    assert rig.find(keys[1:5], prefix=False) == [ASKED, ABSENT, ASKED, ASKED]
    rig.answer(False)
    for found in (ASKED, ABSENT):  # lookups that wait do not walk to the beginning
        assert rig.find(keys[10:], prefix=False) == [ABSENT] * (8990 - 8192) + [found] * 8192
        if found is ASKED:
            rig.answer(False)


def test_no_more_is_kept_than_the_bounds_and_the_newest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ANSWERS", 1000)
    rig = Rig()
    keys = [number.to_bytes(32, "big") for number in range(5000)]
    for at in range(0, 5000, 50):
        group = make_block_group(GROUP.fingerprint, 0, at % 3, (5000,))
        rig.tier.find(group, keys[at : at + 50], prefix=True)
        rig.answer(True)
        rig.clock.now += 0.001
    assert list(rig.tier.find(group, keys[4950:], prefix=True).states) == [PRESENT] * 50
    assert rig.tier._answers._table.nbytes <= 16 * 1100


def test_a_place_that_no_peer_has_asks_nothing_and_is_free_at_once() -> None:
    """A peer that a request names gets it while the helper starts, for which a question would wait."""
    rig = Rig("")
    assert rig.tier.idle
    rig.tier.tick()
    assert rig.tier.idle


def test_wrong_bytes_that_come_after_a_clear_cost_no_block_that_was_stored_since(rig: Rig) -> None:
    """In the store the new block has the same name but for the generation."""
    rig.find()
    rig.answer(True)
    assert rig.tier.read(GROUP, KEY, [0], 1e9, lambda *_: None)
    rig.tier.generations.hear(GROUP.fingerprint, 5)
    rig.tier._reading.end(ObjectReadEnd(Result.CORRUPT))
    (removal,) = rig.tier._writing._waiting
    assert removal.stored.generation == 0


PARTS: list[tuple[list[tuple[int, list[bool]]], int, list[bool]]] = [
    ([(0, [True]), (0, [True])], 0, [True, True]),
    ([(0, [True]), (7, [True]), (7, [True])], 7, [False, False]),
    ([(7, [False]), (7, [True]), (7, [False]), (7, [True])], 7, [True, True]),
    ([(7, [False]), (8, [True])], 8, [False, False]),
]


@pytest.mark.parametrize(("answers", "generation", "found"), PARTS)
def test_what_was_found_before_a_clear_is_not_found_by_its_generation(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, answers: list[tuple[int, list[bool]]], generation: int, found: list[bool]
) -> None:
    """Keys are asked for in parts, each again by a generation that is new; another node may clear between any two."""
    store, left = rig.tier._store, iter(answers)
    monkeypatch.setattr(store, "keys_at_once", 1)
    monkeypatch.setattr(store, "connect", lambda: None)
    monkeypatch.setattr(store, "ask", lambda *_, **__: next(left, (generation, [False])))
    ask = Ask(rig.tier._answers, GROUP, [KEY, b"l" * 32], False, rig.clock() + 10.0)
    answer = ask.run(AskingThread(rig.tier, store, rig.clock))
    assert answer is not None
    assert (answer.generation, answer.found) == (generation, found)
