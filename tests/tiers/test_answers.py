"""Answers of a shared store: how long each stands, and that no more are kept than the bound."""

from __future__ import annotations

import pytest

from kvoffd.tiers.shared import answers as module
from kvoffd.tiers.shared.answers import FAILED_S, NO_S, YES_S, Answers
from kvoffd.tiers.shared.breaker import FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker
from kvoffd.tiers.shared.redis import CONNECT_S
from kvoffd.tiers.shared.workers import PROBE_S
from kvoffd.tiers.tier import Answer
from tests.kit.clock import Clock

ONE = b"1" * 32
KEY = b"k" * 32
ASK_S = 0.02


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def answers(clock: Clock) -> Answers:
    return Answers(clock, ASK_S)


def of(answers: Answers) -> Answer:
    (found,) = answers.of(ONE, 0, [KEY])
    return found


def test_each_answer_stands_for_its_time(answers: Answers, clock: Clock) -> None:
    assert of(answers) is Answer.UNKNOWN
    answers.answered(ONE, 0, [KEY], [True])
    clock.now += YES_S - 0.01
    assert of(answers) is Answer.YES
    clock.now += 0.02
    assert of(answers) is Answer.UNKNOWN
    answers.answered(ONE, 0, [KEY], [False])
    clock.now += NO_S - 0.01
    assert of(answers) is Answer.NO
    clock.now += 0.02
    assert of(answers) is Answer.UNKNOWN


def test_a_question_without_an_answer_is_a_no_after_the_deadline(answers: Answers, clock: Clock) -> None:
    answers.give(ONE, 0, [KEY], Answer.ASKED)
    clock.now += ASK_S - 0.001
    assert of(answers) is Answer.ASKED
    clock.now += 0.002
    assert of(answers) is Answer.NO
    clock.now += NO_S
    assert of(answers) is Answer.UNKNOWN


def test_what_failed_stays_absent_whatever_is_answered_meanwhile(answers: Answers, clock: Clock) -> None:
    answers.refuse(ONE, 0, KEY)
    answers.answered(ONE, 0, [KEY], [True])
    clock.now += FAILED_S - 0.01
    assert of(answers) is Answer.NO
    clock.now += 0.02
    answers.answered(ONE, 0, [KEY], [True])
    assert of(answers) is Answer.YES


def test_what_was_there_is_believed_longer_than_it_is_read(answers: Answers, clock: Clock) -> None:
    answers.set_lengths(ONE, 0, [5, 7])
    answers.answered(ONE, 0, [KEY], [True])
    clock.now += YES_S + 1
    assert KEY not in answers.within(ONE, 0, YES_S)
    assert [shard.length for shard in answers.within(ONE, 0, 60.0)[KEY].shards] == [5, 7]
    assert KEY not in answers.within(ONE, 1, 60.0)
    answers.forget(ONE)
    assert list(answers.within(ONE, 0, 60.0)) == []
    assert len(answers) == 0


def test_no_more_are_kept_than_the_bound_and_the_newest_stay(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ANSWERS", 1000)
    keys = [number.to_bytes(32, "big") for number in range(5000)]
    for at in range(0, 5000, 50):
        answers.answered(ONE, at % 3, keys[at : at + 50], [True] * 50)
        assert len(answers) <= 1000
    assert all(answers.of(ONE, 4950 % 3, keys[4950:])[number] is Answer.YES for number in range(50))


def test_what_is_remembered_of_failures_and_of_groups_is_bounded(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_REFUSED", 100)
    monkeypatch.setattr(module, "MOST_GROUPS", 10)
    for number in range(1000):  # as one who invalidates what was never there
        answers.refuse(number.to_bytes(32, "big"), number % 64, KEY)
        assert len(answers._refused) <= 100
        assert len(answers._groups) <= 10
    assert len(answers) <= 10
    answers.answered(number.to_bytes(32, "big"), number % 64, [KEY], [True])
    assert answers.of(number.to_bytes(32, "big"), number % 64, [KEY]) == [Answer.NO]


def test_what_failed_is_absent_also_where_its_answer_was_forgotten(answers: Answers) -> None:
    answers.refuse(ONE, 0, KEY)
    answers.forget(ONE)
    answers.give(ONE, 0, [KEY], Answer.ASKED)
    answers.answered(ONE, 0, [KEY], [True])
    assert of(answers) is Answer.NO


def test_the_breaker_opens_after_three_failures_and_probes_ever_less_often(clock: Clock) -> None:
    breaker = Breaker(clock, jitter=lambda: 0.5)
    assert breaker.open
    assert breaker.probe_in_s == 0
    breaker.probe_succeeded()
    for _ in range(2):
        breaker.failed("read")
    breaker.succeeded("read")
    for _ in range(2):
        breaker.failed("read")
        breaker.failed("ask")
        breaker.succeeded("ask")
        assert not breaker.open
    breaker.failed("read")
    assert breaker.open
    assert breaker.opened == 1
    pauses = []
    for _ in range(4):
        pauses.append(breaker.probe_in_s)
        clock.now += breaker.probe_in_s
        breaker.failed("read")
        assert breaker.probe_in_s == 0, "only a probe's failure puts the next one off"
        breaker.probe_failed()
    assert pauses == [1.0, 2.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert 1.25 * LONGEST_PAUSE_S + max(CONNECT_S, PROBE_S) < 5.0, "a server that is back is used within 5 s"
    breaker.probe_succeeded()
    breaker.succeeded("ask")
    breaker.failed("read")
    assert breaker.open, "one more of what opened it"
    assert breaker.probe_in_s == LONGEST_PAUSE_S
    breaker.probe_succeeded()
    breaker.succeeded("read")
    breaker.failed("read")
    assert not breaker.open
    breaker.failed("ask", at_once=True)
    assert breaker.open
    assert breaker.probe_in_s == FIRST_PAUSE_S
