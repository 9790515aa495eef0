"""A real engine before a program that answers the wire wrongly: it computes what it would without a daemon."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tests.kit import hostile_daemon as ways
from tests.kit.engine import completions, prompt, tokens
from tests.kit.engine_home import EngineHome
from tests.kit.hostile_daemon import HostileDaemon
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

LENGTHS = [300, 500, 900]
PROMPTS = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
MOST_DESCRIPTORS = 700

WAYS = [ways.strange_failures, ways.wrong_states, ways.others_replies, ways.noise, ways.silence, ways.lifeline_noise]
MORE_WAYS = [ways.others_jobs, ways.strange_events, ways.least_limits, ways.descriptors]
ASKED_NOTHING = [ways.no_frames]
"""With these no session lasts until its first lookup."""


@pytest.fixture(scope="module")
def expected(home: EngineHome) -> list[list[int]]:
    """What the prompts give without a daemon."""
    home.ensure_no_daemon()
    home.engine.forget()
    return tokens(home.engine.generate(PROMPTS))


@pytest.fixture
def daemon(home: EngineHome) -> Iterator[HostileDaemon]:
    home.ensure_no_daemon()
    made = HostileDaemon(home.directory)
    yield made
    made.stop()


@pytest.mark.parametrize(
    "way",
    [*WAYS, *(pytest.param(way, marks=pytest.mark.nightly) for way in MORE_WAYS + ASKED_NOTHING)],
    ids=lambda way: way.__name__,
)
def test_wrong_answers(
    home: EngineHome, daemon: HostileDaemon, expected: list[list[int]], way: Callable[[HostileDaemon], None]
) -> None:
    """No token changes, no request fails, and nothing counts as loaded."""
    daemon.begin(way)
    daemon.wait_engine(registered=way not in ASKED_NOTHING)

    def asked() -> bool:
        home.engine.forget()
        answers = home.engine.generate(PROMPTS)
        assert tokens(answers) == expected
        assert [answer.finish for answer in answers] == ["length"] * len(LENGTHS)
        assert [answer.cached for answer in answers] == [0] * len(LENGTHS)
        return daemon.asked > 0 or way in ASKED_NOTHING

    wait_until(asked, 60)  # a client that gets nonsense is at times not connected
    assert max(len(os.listdir(f"/proc/{pid}/fd")) for pid in home.engine.pids) < MOST_DESCRIPTORS


def test_loads_that_never_end_end_with_the_daemon(
    home: EngineHome, daemon: HostileDaemon, expected: list[list[int]]
) -> None:
    daemon.begin(ways.endless_loads)
    daemon.wait_engine()
    home.engine.forget()
    home.engine.begin("generate", prompts=PROMPTS, max_tokens=8)
    wait_until(lambda: daemon.loads == len(LENGTHS), 60)
    daemon.stop()
    assert tokens(completions(home.engine.finish())) == expected
