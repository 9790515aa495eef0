"""A real engine before a program that answers the wire wrongly: it computes what it would without a daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.kit.engine import cached, completions, prompt, tokens
from tests.kit.waiting import wait_until
from tests.vllm import hostile_daemon as ways
from tests.vllm.engine_home import EngineHome
from tests.vllm.hostile_daemon import HostileDaemon

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

LENGTHS = [300, 500, 900]
PROMPTS = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]


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
    "way", [ways.strange_failures, ways.wrong_states, ways.noise, ways.silence, ways.lifeline_noise]
)
def test_wrong_answers(
    home: EngineHome, daemon: HostileDaemon, expected: list[list[int]], way: Callable[[HostileDaemon], None]
) -> None:
    """No token changes, no request fails, and nothing counts as loaded."""
    daemon.begin(way)

    def asked() -> bool:
        home.engine.forget()
        answers = home.engine.generate(PROMPTS)
        assert tokens(answers) == expected
        assert [answer.finish for answer in answers] == ["length"] * len(LENGTHS)
        assert cached(answers) == [0] * len(LENGTHS)
        return daemon.asked > 0

    wait_until(asked, 60)  # a client that gets nonsense is at times not connected


def test_endless_loads_end_with_the_daemon(home: EngineHome, daemon: HostileDaemon, expected: list[list[int]]) -> None:
    daemon.begin(ways.endless_loads)
    home.engine.forget()
    home.engine.begin("generate", prompts=PROMPTS, max_tokens=8)
    wait_until(lambda: len(daemon.seen_jobs(loads=True)) == len(LENGTHS), 60)
    daemon.stop()
    assert tokens(completions(home.engine.finish())) == expected
