"""What prompts feel of kvoffd beside a connector that does nothing, on an idle machine and on a busy one.

New ones, and one that the engine has in its own cache.

    .venv/bin/python -m tests.bench.new_prompts [--rounds 10] [--prompts 15]

It starts a daemon of its own. Busy means a
busy loop of Python for each core, at normal priority.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffd_client import AdminClient, KvoffdClientError
from tests.bench.daemon.engine_bench import (
    IDLE,
    KVOFFD,
    REST_S,
    TURN_PAUSE_S,
    Engine,
    NewPrompts,
    _connector,
    _start,
)
from tests.bench.daemon.pool_bench import FIRST_TOKEN, LAST_TOKEN

if TYPE_CHECKING:
    from vllm import LLM

SIZES = (64, 1024)
CACHED_TOKENS = 4096
LABEL = "new-prompts"


@contextmanager
def running_daemon() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvoffd-new-prompts-") as made:
        command = [str(Path(sys.executable).with_name("kvoffd")), "serve", "--directory", made, "--pool-size", "512MiB"]
        with subprocess.Popen([*command, "--http-address", ""], stderr=subprocess.DEVNULL) as daemon:
            try:
                yield Path(made)
            finally:
                daemon.terminate()


def wait_ready(directory: Path, deadline_s: float = 30.0) -> None:
    until = time.monotonic() + deadline_s
    while True:
        try:
            with AdminClient(directory) as admin:
                admin.health()
                return
        except KvoffdClientError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


class PromptsOnceMore(Engine):
    """An engine, and a prompt that it has computed."""

    def __init__(self, llm: LLM, asked: NewPrompts) -> None:
        super().__init__(llm, asked)
        self._known = random.choices(range(FIRST_TOKEN, LAST_TOKEN + 1), k=CACHED_TOKENS)

    def cached(self, prompts: int) -> list[float]:
        """The seconds to the first token of that prompt; new prompts may have taken its place in the cache before."""
        return [self._once_more() for _ in range(prompts + 1)][1:]

    def _once_more(self) -> float:
        time.sleep(REST_S)
        began = time.perf_counter()
        name = self._add(self._known, 1)
        while not any(output.request_id == name for output in self._engine.step()):
            pass
        return time.perf_counter() - began


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--state-seconds", type=float, default=120.0, help="begin no round of a state after that")
    parser.add_argument("--loops", type=int, default=os.cpu_count() or 1, help="that keep the machine busy")
    parser.add_argument("--prompts", type=int, default=15, help="in a turn, of each size")
    options = parser.parse_args()
    asked = NewPrompts((*SIZES, CACHED_TOKENS))
    found: dict[tuple[str, str, str], list[float]] = {}
    print(f"load average {os.getloadavg()[0]:.1f} before", flush=True)
    with ExitStack() as stack:
        directory = stack.enter_context(running_daemon())
        wait_ready(directory)
        made = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = [
            (name, PromptsOnceMore(_start(_connector(name, directory, LABEL), LABEL, None, asked, made), asked))
            for name in (IDLE, KVOFFD)
        ]
        for _, engine in engines:
            stack.callback(engine._engine.engine_core.shutdown)
        for state in ("idle", "busy"):
            with busy_loops(options.loops) if state == "busy" else ExitStack():
                until = time.monotonic() + options.state_seconds
                for _ in range(options.rounds):
                    if time.monotonic() > until:
                        break
                    for name, engine in random.sample(engines, len(engines)):
                        time.sleep(TURN_PAUSE_S)
                        times = {
                            f"{tokens:,}": engine.first_tokens((tokens, False), options.prompts) for tokens in SIZES
                        }
                        times[f"{CACHED_TOKENS:,} in its cache"] = engine.cached(options.prompts)
                        for kind, seconds in times.items():
                            found.setdefault((name, kind, state), []).extend(seconds)
        with AdminClient(directory) as admin:
            for namespace in admin.stats().namespaces:
                late = getattr(namespace, "late_lookups", "not counted")
                rate = namespace.prefill_tokens_per_second
                print(f"lookups {namespace.lookups}, late {late}, prefill rate {rate:.0f} tokens/s")
            print("health:", [cause.reason for cause in admin.health().causes] or "ok")
    print("ms to the first token, does nothing / kvoffd")
    for kind in dict.fromkeys(kind for _, kind, _ in found):
        for state in ("idle", "busy"):
            both = [found[name, kind, state] for name in (IDLE, KVOFFD)]
            cells = [
                " / ".join(f"{1e3 * percentile(values, share):.2f}" for values in both) for share in (0.5, 0.9, 0.99)
            ]
            print(f"| {kind} tokens, {state} | {' | '.join(cells)} | {len(both[1])} prompts", flush=True)


if __name__ == "__main__":
    main()
