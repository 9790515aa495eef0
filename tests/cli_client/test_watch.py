"""Looking again and again, in virtual time."""

from __future__ import annotations

from itertools import islice

import msgspec
import pytest

from kvoffd_client.cli.watch import pages
from kvoffd_client.errors import DaemonUnavailable
from kvoffd_proto.messages import StatsReply


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Source:
    """Answers with each of ``answers`` in turn; None is a daemon that is not there. Takes ``cost_s`` an answer."""

    def __init__(self, clock: Clock, answers: list[StatsReply | None], cost_s: float = 0.0) -> None:
        self._clock = clock
        self._answers = iter(answers)
        self._cost_s = cost_s

    def stats(self) -> StatsReply:
        self._clock.now += self._cost_s
        answer = next(self._answers)
        if answer is None:
            raise DaemonUnavailable("No daemon.")
        return answer


def test_each_page_compares_with_the_one_before(busy: StatsReply, fresh: StatsReply) -> None:
    clock = Clock()
    source = Source(clock, [fresh, busy, fresh])
    first, second, third = islice(pages(source, 1.0, clock, clock.sleep), 3)
    assert (first.now, first.before) == (fresh, None)
    assert (second.now, second.before) == (busy, fresh)
    assert (third.now, third.before) == (fresh, busy)
    assert clock.slept == [1.0, 1.0]


def test_the_time_of_an_answer_does_not_add_to_the_interval(fresh: StatsReply) -> None:
    clock = Clock()
    source = Source(clock, [fresh] * 4, cost_s=0.25)
    list(islice(pages(source, 1.0, clock, clock.sleep), 4))
    assert clock.slept == [1.0, 0.75, 0.75]


def test_slow_answers_are_not_made_up_for(fresh: StatsReply) -> None:
    clock = Clock()
    source = Source(clock, [fresh] * 4, cost_s=5.0)
    list(islice(pages(source, 1.0, clock, clock.sleep), 4))
    assert clock.slept == [1.0, 0.0, 0.0]


def test_a_daemon_that_goes_is_told_and_waited_for(fresh: StatsReply, busy: StatsReply) -> None:
    clock = Clock()
    source = Source(clock, [fresh, None, None, busy])
    _, gone, still_gone, back = islice(pages(source, 1.0, clock, clock.sleep), 4)
    for page in (gone, still_gone):
        assert page.now is fresh
        assert page.notice.startswith("No daemon. Trying again; these numbers are of ")
        assert page.notice.count("Trying") == 1
    assert (back.now, back.notice) == (busy, "")
    assert back.before is fresh


def test_without_a_daemon_at_the_start_there_is_nothing_to_watch(fresh: StatsReply) -> None:
    clock = Clock()
    with pytest.raises(DaemonUnavailable):
        next(pages(Source(clock, [None]), 1.0, clock, clock.sleep))


def test_a_reply_of_the_past_gives_no_speed(busy: StatsReply) -> None:
    clock = Clock()
    older = msgspec.structs.replace(busy, uptime_seconds=1.0)
    _, page = islice(pages(Source(clock, [busy, older]), 1.0, clock, clock.sleep), 2)
    assert page.now is older
