"""What an engine does whose loads take longer than computing: ``python -m tests.tools.slow_loads [SECONDS]``.

A real vLLM on CPU computes prompts, whose blocks a daemon keeps. Then each load takes SECONDS longer (1.5), and the
same prompts come again and again. Told are the time that they took, how many tokens were loaded, and whether the
answers are the same; at the end what the daemon's statistics and the engine's log say.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from kvoffd_client import AdminClient
from kvoffd_client.vllm.harm import REPORT_EVERY_S
from tests.support.engine import EngineProcess, prompt, wait_connected
from tests.support.faulty_daemon import FaultyDaemon
from tests.support.models import make_tiny_llama

PROMPTS = [prompt(seed, 1500) for seed in range(3)]
NEW = [[prompt(100 + 6 * turn + number, 1500) for number in range(6)] for turn in range(3)]
"""Computed first: an engine's first steps are slow."""
TURNS = 5


def main(slow_s: float) -> None:
    with (
        TemporaryDirectory() as directory,
        FaultyDaemon("256MiB") as daemon,
        # Small steps, of which a few in a row are timed.
        EngineProcess(
            make_tiny_llama(Path(directory, "model")), daemon.directory, max_num_batched_tokens=512
        ) as engine,
        AdminClient(daemon.directory) as admin,
    ):
        wait_connected(admin)
        for prompts in NEW:
            engine.generate(prompts)
        expected = [answer.tokens for answer in engine.generate(PROMPTS)]

        def ask(what: str) -> None:
            engine.forget()
            began = time.monotonic()
            answers = engine.generate(PROMPTS)
            same = "the same" if [answer.tokens for answer in answers] == expected else "OTHER"
            loaded = sum(answer.cached for answer in answers)
            skipped = engine.metrics().get("vllm:kvoffd_slow_loads_skipped", 0)
            took = time.monotonic() - began
            print(f"{what}: {took:.2f} s, {loaded:,} tokens loaded, {skipped:.0f} loads skipped, {same} answers")

        ask("loads as they are")
        with daemon.fault(f"load slow {slow_s}"):
            for turn in range(TURNS):
                ask(f"loads that take {slow_s} s longer, {turn + 1}")
        time.sleep(REPORT_EVERY_S)
        engine.generate(PROMPTS)  # a step, in which the daemon is told
        (one,) = admin.stats().namespaces
        print(
            f"stats: computes {one.prefill_tokens_per_second:,.0f} tokens a second, loads bring "
            f"{one.load_tokens_per_second:,.0f}, {one.skipped_loads} skipped"
        )
        print("\n".join(line for line in engine.log.splitlines() if "loads of about" in line))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.5)
