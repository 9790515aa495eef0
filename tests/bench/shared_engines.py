"""What an engine feels of a dark store: ``python -m tests.bench.shared_engines [ROUNDS]`` (10 minutes).

Needs redis-server and vLLM. One vLLM on CPU answers new prompts. In each round its daemon is started twice, in random
order: with a store that is killed as soon as the daemon has reached it, and without one. Printed is the ratio of the
tokens a second in the two parts of a round, with its interval of 95 %. Two engines beside each other differ by more
than what is looked for, also where neither's daemon has a store.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from kvoffd_client import AdminClient
from tests.bench.intervals import ratio_text
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import EngineProcess, prompt, wait_connected
from tests.kit.models import make_tiny_llama
from tests.kit.redis_server import RedisServer
from tests.kit.waiting import wait_until

ROUNDS = 30
TURNS = 24
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 120, 8
PAUSE_S = 0.15
"""Between two turns: the threads of the engine spin for a while."""


class Bench:
    """An engine, and the directory of its daemons."""

    def __init__(self, engine: EngineProcess, directory: Path) -> None:
        self._engine, self._directory = engine, directory
        self._seed = 0

    def _turn(self) -> float:
        prompts = [prompt(self._seed + number, PROMPT_TOKENS) for number in range(PROMPTS)]
        self._seed += PROMPTS
        time.sleep(PAUSE_S)
        started = time.perf_counter()
        self._engine.generate(prompts, ANSWER_TOKENS)
        return time.perf_counter() - started

    def seconds(self, *, dark: bool) -> float:
        """Seconds of a turn, the median of TURNS, with a new daemon."""
        with ExitStack() as stack:
            server = stack.enter_context(RedisServer()) if dark else None
            flags = {"shared": server.url} if server else {}
            stack.enter_context(DaemonProcess("256MiB", self._directory, **flags))
            admin = stack.enter_context(AdminClient(self._directory))
            wait_connected(self._directory)
            self._turn()
            if server:
                wait_until(lambda: admin.stats().shared[0].up)
                server.kill()
                while admin.stats().shared[0].up:  # it is noticed when something is asked for
                    self._turn()
            self._turn()
            found = float(np.median([self._turn() for _ in range(TURNS)]))
            assert admin.stats().store.jobs, "the engine stored nothing"
        return found


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f}; {rounds} rounds of {TURNS} turns of {PROMPTS} prompts")
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvoffd-", dir="/tmp")))
        model, directory = make_tiny_llama(root / "model"), root / "daemon"
        directory.mkdir()
        with DaemonProcess("256MiB", directory):
            bench = Bench(stack.enter_context(EngineProcess(model, directory)), directory)
        logs = np.empty(rounds)
        for number in range(rounds):
            times = {dark: bench.seconds(dark=dark) for dark in random.sample((False, True), 2)}
            logs[number] = np.log(times[False] / times[True])
            print(f"{number}: {times[True] * 1e3:.1f} ms dark, {times[False] * 1e3:.1f} without", flush=True)
        print(f"throughput, store dark to none: {ratio_text(logs, np.median)} median, {ratio_text(logs, np.mean)} mean")


if __name__ == "__main__":
    main()
