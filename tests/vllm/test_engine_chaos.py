"""A real engine whose daemon is killed and stopped at random: no token changes, no request fails."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvoffd_client import AdminClient, DaemonUnavailable
from kvoffd_proto.messages import StatsReply
from tests.chaos.supervisor import Supervisor
from tests.support.engine import (
    BLOCK_TOKENS,
    EngineProcess,
    completions,
    full_blocks,
    prompt,
    wait_connected,
    wait_stats,
)
from tests.support.models import make_tiny_llama
from tests.support.waiting import wait_until

SHM = Path("/dev/shm")
ROUNDS = int(os.environ.get("ENGINE_CHAOS_ROUNDS", "8"))
LENGTHS = [1500, 300, 900, 1200, 700, 400]
MAX_TOKENS = 24
DEADLINE_S = 60.0

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(400 + 20 * ROUNDS),
    pytest.mark.skipif(not os.access(SHM, os.W_OK), reason="/dev/shm is not there"),
]


class Harness:
    """An engine, what it says without a daemon, and a daemon that is started again whenever it ends."""

    def __init__(self, model: Path, pool_file: Path) -> None:
        self.supervisor = Supervisor("256MiB", pool_file)
        self.engine = EngineProcess(model, self.supervisor.directory)
        self.prompts = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
        self.expected: list[list[int]] = []

    def wait_stats(self, condition: str) -> StatsReply:
        """Statistics once ``connected``, or once all full blocks are ``stored`` too."""
        self.supervisor.wait_serving(1)
        wanted = sum(length // BLOCK_TOKENS for length in LENGTHS) if condition == "stored" else 0

        def found() -> StatsReply | None:
            try:
                with AdminClient(self.supervisor.directory) as admin:
                    wait_connected(admin)
                    return wait_stats(
                        admin, lambda stats: sum(item.ready_blocks for item in stats.namespaces) >= wanted, DEADLINE_S
                    )
            except DaemonUnavailable:
                return None  # on a busy machine the watchdog ends a daemon that was stopped shortly, only now

        return wait_until(found, DEADLINE_S)


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    pool = TemporaryDirectory(dir=SHM)
    made = Harness(make_tiny_llama(tmp_path_factory.mktemp("models") / "model"), Path(pool.name) / "pool")
    try:
        made.engine.start()
        answers = made.engine.generate(made.prompts, MAX_TOKENS)
        assert all(answer.cached == 0 for answer in answers)
        made.expected = [answer.tokens for answer in answers]
        made.supervisor.start().wait_serving(1)
        yield made
    finally:
        made.engine.close()
        made.supervisor.close()
        pool.cleanup()


def strike(supervisor: Supervisor, kind: str, rng: random.Random) -> None:
    match kind:
        case "kill":
            supervisor.signal(signal.SIGKILL)
        case "terminate":
            supervisor.signal(signal.SIGTERM)
        case "stop until the watchdog":
            supervisor.signal(signal.SIGSTOP)
        case _:
            supervisor.signal(signal.SIGSTOP)
            time.sleep(rng.uniform(0.05, 0.6))
            supervisor.signal(signal.SIGCONT)


KINDS = ("kill", "kill", "terminate", "stop until the watchdog", "stop shortly")


def test_whatever_happens_to_the_daemon_no_request_fails_and_no_token_changes(harness: Harness) -> None:
    seed = random.SystemRandom().getrandbits(31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    struck: Counter[str] = Counter()
    loaded = longest = 0.0
    for number in range(ROUNDS):
        harness.wait_stats("connected")
        harness.engine.forget()
        order = rng.sample(range(len(LENGTHS)), rng.randint(3, len(LENGTHS)))
        lives = harness.supervisor.lives
        begun = time.monotonic()
        harness.engine.begin("generate", prompts=[harness.prompts[place] for place in order], max_tokens=MAX_TOKENS)
        time.sleep(rng.uniform(0.0, 0.8))
        kind = rng.choice(KINDS)
        struck[kind] += 1
        strike(harness.supervisor, kind, rng)
        answers = completions(harness.engine.finish())
        longest = max(longest, time.monotonic() - begun)
        assert [answer.tokens for answer in answers] == [harness.expected[place] for place in order], (number, kind)
        assert all(answer.finish == "length" for answer in answers)
        loaded += sum(answer.cached for answer in answers)
        harness.supervisor.wait_serving(lives + (kind != "stop shortly"))
    failed_loads = harness.engine.metrics().get("vllm:kvoffd_failed_loads", 0)
    print(
        f"{ROUNDS} rounds {dict(struck)}: {loaded:.0f} tokens loaded, {failed_loads:.0f} loads failed and were "
        f"recomputed, longest round {longest:.1f} s, {harness.supervisor.lives} daemons"
    )
    assert loaded > 0


def test_what_was_stored_before_a_kill_is_loaded_after_it_and_gives_the_same_tokens(harness: Harness) -> None:
    harness.wait_stats("connected")
    harness.engine.forget()
    harness.engine.generate(harness.prompts, MAX_TOKENS)
    before = harness.wait_stats("stored")
    lives = harness.supervisor.lives
    harness.supervisor.signal(signal.SIGKILL)
    harness.supervisor.wait_serving(lives + 1)
    adopted = harness.wait_stats("connected")
    assert adopted.epoch != before.epoch
    assert adopted.pool.ready_bytes >= 0.999 * before.pool.ready_bytes
    harness.engine.forget()
    answers = harness.engine.generate(harness.prompts, MAX_TOKENS)
    assert [answer.tokens for answer in answers] == harness.expected
    assert [answer.cached for answer in answers] == [full_blocks(length) for length in LENGTHS]
    after = harness.wait_stats("connected")
    print(f"{sum(answer.cached for answer in answers)} tokens loaded from blocks stored before the kill")
    assert after.epoch == adopted.epoch
    assert after.load.bytes > 0
