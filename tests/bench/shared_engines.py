"""What engines feel of a dark store: ``python -m tests.bench.shared_engines [TURNS]`` (redis-server, vLLM; 10 minutes).

Two vLLMs on CPU, each with a daemon of its own. One daemon's store was killed, the other has none. The engines take
turns, in random order, with the same number of new prompts. Printed is the ratio of their tokens a second, with its
interval of 95 %, and that of two engines whose daemons both have no store: so much the machine itself makes of it.
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
from tests.support.daemon import DaemonProcess
from tests.support.engine import EngineProcess, prompt, wait_connected
from tests.support.models import make_tiny_llama
from tests.support.redis_server import RedisServer

TURNS = 120
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 120, 8
PAUSE_S = 0.15
"""Between two turns: the threads of the engine that ran spin for a while."""


class Turns:
    """Engines that answer new prompts, one engine after the other."""

    def __init__(self) -> None:
        self._seed = 0

    def seconds(self, engine: EngineProcess) -> float:
        prompts = [prompt(self._seed + number, PROMPT_TOKENS) for number in range(PROMPTS)]
        self._seed += PROMPTS
        time.sleep(PAUSE_S)
        started = time.perf_counter()
        engine.generate(prompts, ANSWER_TOKENS)
        return time.perf_counter() - started

    def ratio(self, one: EngineProcess, other: EngineProcess, count: int) -> str:
        """Tokens a second of one engine by those of the other."""
        found = np.empty((count, 2))
        for turn in found:
            for which in random.sample((0, 1), 2):
                turn[which] = self.seconds((one, other)[which])
        return ratio_text(np.log(found[:, 1] / found[:, 0]), np.median)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else TURNS
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {count} turns of {PROMPTS} prompts each")
    with ExitStack() as stack:
        model = make_tiny_llama(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model")
        server = stack.enter_context(RedisServer())
        daemons = [stack.enter_context(DaemonProcess("256MiB", **flags)) for flags in ({"shared": server.url}, {}, {})]
        engines = [stack.enter_context(EngineProcess(model, daemon.directory)) for daemon in daemons]
        for daemon in daemons:
            wait_connected(stack.enter_context(AdminClient(daemon.directory)))
        admin = stack.enter_context(AdminClient(daemons[0].directory))
        turns = Turns()
        for engine in engines:
            turns.seconds(engine)
        server.kill()
        while admin.stats().shared[0].reachable:  # it is noticed when something is asked for
            turns.seconds(engines[0])
        print(f"store dark, to none:    {turns.ratio(engines[0], engines[1], count)}", flush=True)
        print(f"none, to none:          {turns.ratio(engines[2], engines[1], count)}", flush=True)


if __name__ == "__main__":
    main()
