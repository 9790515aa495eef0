"""What prompts feel of kvoffd beside a connector that does nothing, on an idle machine and on a busy one.

New prompts, and one that the engine has in its own cache. ``python -m tests.bench.new_prompts``, with the Python that
has vLLM, starts a daemon and both engines. Busy means a busy loop of Python for each core, at normal priority. Times
are vLLM's own, from a prompt's arrival to its first token.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvoffd_client import AdminClient
from tests.bench.report_file import ROOT, markdown_table
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import BLOCK_TOKENS, EngineProcess
from tests.kit.models import make_tiny_llama

IDLE, KVOFFD = "does nothing", "kvoffd"
SIZES, CACHED_TOKENS, ROW = (64, 256), 4096, 3
CACHE_BLOCKS = 4 * CACHED_TOKENS // BLOCK_TOKENS
"""Of an engine's cache: few, so that all are in use soon."""
CONNECTOR = {
    "kv_connector": "IdleConnector",
    "kv_connector_module_path": "tests.bench.idle_connector",
    "kv_role": "kv_both",
}
REST_S = 0.03
"""Pause before a prompt: what the one before left to do is done by then."""
Rounds = list[tuple[list[float], list[float]]]
"""Milliseconds of the prompts of each round, with the connector that does nothing, and with kvoffd's."""
TURN_PAUSE_S = 0.3
"""Pause between the engines' turns: the threads of the one that ran spin for a while."""


def engine_of(model: Path, directory: Path | None, **settings: Any) -> EngineProcess:
    """An engine as users start one, with the defaults of its connector."""
    return EngineProcess(
        model,
        directory,
        num_blocks=CACHE_BLOCKS,
        max_model_len=CACHED_TOKENS + 1,
        max_num_batched_tokens=CACHED_TOKENS + 1,
        fork=False,
        environ={"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"},
        **settings,
    )


def new_prompts(tokens: int, count: int) -> list[list[int]]:
    return [random.choices(range(3, 1000), k=tokens) for _ in range(count)]


def first_tokens(engine: EngineProcess, prompts: Sequence[list[int]], row: int = 1) -> list[float]:
    """Milliseconds to the first token of each prompt, or of the last of each ``row`` that follow without a pause."""
    found = []
    for number, prompt in enumerate(prompts, 1):
        if row == 1 or number % row == 1:
            time.sleep(REST_S)
        (answer,) = engine.generate([prompt], max_tokens=1)
        if not number % row:
            found.append(1e3 * answer.first_token_s)
    return found


def measure_turn(engine: EngineProcess, count: int, known: list[int]) -> dict[str, list[float]]:
    """Milliseconds to the first token of ``count`` prompts of each kind."""
    times = {}
    for tokens in SIZES:
        times[f"{tokens:,} tokens"] = first_tokens(engine, new_prompts(tokens, count))
        times[f"{tokens:,} tokens, last of {ROW}"] = first_tokens(engine, new_prompts(tokens, ROW * count), ROW)
    # New prompts may have taken the known one's place in the cache: its first time does not count.
    times[f"{CACHED_TOKENS:,} tokens in its cache"] = first_tokens(engine, [known] * (count + 1))[1:]
    return times


def later(rounds: Sequence[tuple[list[float], list[float]]]) -> str:
    """By how much the median of a round is later, the median of all rounds, and between which two it is at 95 %."""
    each = np.array([np.median(kvoffd) - np.median(idle) for idle, kvoffd in rounds])
    drawn = np.median(np.random.default_rng(1).choice(each, (2000, len(each))), axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return f"{np.median(each):+.2f} ({low:+.2f} to {high:+.2f})"


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.new_prompts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--loops", type=int, default=os.cpu_count() or 1, help="that keep the machine busy; 0: idle")
    parser.add_argument("--v2", action="store_true", help="vLLM's second model runner, over an emulated stream")
    parser.add_argument("--prompts", type=int, default=15, help="in a turn, of each size")
    options = parser.parse_args()
    before, ready = os.getloadavg()[0], prepared(options.v2)
    with ready as (daemon, engines, known):
        rounds = measure_rounds(engines, known, options.rounds, options.prompts, options.loops)
        with AdminClient(daemon.directory) as admin:
            (namespace,) = admin.stats().namespaces
    print(f"Load average before: {before:.1f}. Lookups: {namespace.lookups}, late: {namespace.late_lookups}.\n")
    print(table(rounds))


@contextmanager
def prepared(v2: bool) -> Iterator[tuple[DaemonProcess, dict[str, EngineProcess], list[int]]]:
    """A daemon, both engines, whose caches are in use, and a prompt for their caches."""
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess("512MiB"))
        model = make_tiny_llama(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tiny")
        engines = {
            IDLE: stack.enter_context(engine_of(model, None, kv_transfer_config=CONNECTOR, v2=v2)),
            KVOFFD: stack.enter_context(engine_of(model, daemon.directory, v2=v2)),
        }
        (known,) = new_prompts(CACHED_TOKENS, 1)
        for engine in engines.values():
            # Every block of the cache is written once: the first write to a page costs the kernel's time.
            first_tokens(engine, new_prompts(CACHED_TOKENS, 5))
        yield daemon, engines, known


def measure_rounds(
    engines: dict[str, EngineProcess], known: list[int], count: int, prompts: int, loops: int
) -> dict[str, Rounds]:
    """What each round found by kind and state of the machine."""
    found: dict[str, Rounds] = {}
    for state in ("idle", "busy") if loops else ("idle",):
        with busy_loops(loops if state == "busy" else 0):
            for _ in range(count):
                sides = {}
                # In another order each time, so that what grows or fades meets both alike.
                for name, engine in random.sample(list(engines.items()), len(engines)):
                    time.sleep(TURN_PAUSE_S)
                    sides[name] = measure_turn(engine, prompts, known)
                for kind, taken in sides[IDLE].items():
                    found.setdefault(f"{kind}, {state}", []).append((taken, sides[KVOFFD][kind]))
    return found


def table(found: dict[str, Rounds]) -> str:
    rows = [["ms to the first token, does nothing / kvoffd", "p50", "p90", "p99", "prompts", "later by, in a round"]]
    for kind, rounds in found.items():
        both = [[one for taken in side for one in taken] for side in zip(*rounds, strict=True)]
        shares = np.percentile(both, [50, 90, 99], axis=1, method="inverted_cdf")
        cells = [f"{idle:.2f} / {kvoffd:.2f}" for idle, kvoffd in shares.tolist()]
        rows.append([kind, *cells, str(len(both[1])), later(rounds)])
    return markdown_table(rows)


if __name__ == "__main__":
    main()
