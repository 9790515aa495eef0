"""`make demo`: a real vLLM on CPU loses its own cache and gets its prompts back from kvoffd.

The same long prompts are sent cold, after a cache reset, to a second engine, after a restart, and to an engine of
another daemon which shares a server with the first, as on another node. Everything is written to .demo/ (model, logs,
result.json); the sockets are in a directory of their own, since their paths must be short. All processes are gone at
the end, however it ends.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.kit.command import CLI
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import BLOCK_TOKENS, EngineProcess, wait_steady, wait_stored
from tests.kit.filled_tiers import wait_serving
from tests.kit.models import make_demo_llama
from tests.kit.redis_server import PROGRAM, RedisServer
from tests.kit.wire import Books

HOME = Path(".demo")
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PROMPT_LENGTHS = (6013, 5003, 4007)
"""None is a whole number of blocks: the tail of each is computed again, as in real life."""
LOADABLE = sum(length // BLOCK_TOKENS * BLOCK_TOKENS for length in PROMPT_LENGTHS)
WARM_UP_TOKENS = 2500
ANSWER_TOKENS = 16
"""Enough steps after the prompt's for vLLM to hand over all stores, and enough tokens to compare."""
LOOKS = 25
"""Stores have ended when the daemon has nothing to do and the same blocks at so many looks, half a second long."""
LEGEND = f"""Every run after the cold one has to get the prompts from kvoffd.
  cache cleared: the same engine, after its own prefix cache was cleared
  second engine: one that has not computed them
  engine restarted: a new process
  another node: an engine of a second kvoffd, whose pool was empty, through a shared store
TTFT: time to first token as vLLM measures it, from a request's arrival to its first token; the mean.
Tokens loaded: from kvoffd, of {LOADABLE:,} in whole blocks; the engine computes the rest. `kvoffd-cli stats` above is
  of the first node, and has more: engines that start later load the prompt that warms them up, too.
Same tokens: whether the answers are those of the cold run.
"""

console = Console(highlight=False)


class Run:
    """All prompts once, in one engine, one after the other: means of milliseconds, sums of tokens."""

    def __init__(self, engine: EngineProcess, title: str, prompts: list[list[int]]) -> None:
        self.title, self.answers = title, []
        ttft_s, before = 0.0, engine.metrics()
        for number, prompt in enumerate(prompts, 1):
            with step(f"{title}: prompt {number} of {len(prompts)}, {len(prompt):,} tokens"):
                (answer,) = engine.generate([prompt], ANSWER_TOKENS)
            ttft_s += answer.first_token_s
            self.answers.append(answer.tokens)
        after = engine.metrics()
        self.ttft_ms = 1000 * ttft_s / len(prompts)
        names = ("vllm:external_prefix_cache_hits", "vllm:kvoffd_late_lookups")
        self.loaded, self.late = (int(after.get(name, 0) - before.get(name, 0)) for name in names)


@contextmanager
def step(title: str) -> Iterator[None]:
    """Show what is being waited for, and leave a line with the time it took."""
    started = time.monotonic()
    with console.status(title) if console.is_terminal else ExitStack():
        yield
    console.print(f"{time.monotonic() - started:6.1f} s  {title}", markup=False, soft_wrap=True)


class Demo:
    """Runs everything. Closing ``children`` ends whatever runs still, at once."""

    def __init__(self, children: ExitStack) -> None:
        self._children = children
        self._sockets = Path(tempfile.mkdtemp(prefix="kvoffd-demo-"))
        children.callback(shutil.rmtree, self._sockets, ignore_errors=True)
        shutil.rmtree(HOME / "logs", ignore_errors=True)
        (HOME / "logs").mkdir(parents=True)
        with step("writing a small Llama with random weights"):
            self._model = make_demo_llama(HOME / "model").absolute()
        rng = random.Random(7)
        self._prompts = [rng.choices(range(3, 1000), k=length) for length in PROMPT_LENGTHS]
        self._warm_up = rng.choices(range(3, 1000), k=WARM_UP_TOKENS)
        self._shared: dict[str, str] = {}
        self._engines: list[EngineProcess] = []

    def play(self) -> list[Run]:
        if PROGRAM is not None:
            self._shared = {"shared": self._children.enter_context(RedisServer()).url}
        self._start_daemon(self._sockets, "kvoffd")
        first, second = self._start_engines({"engine": self._sockets, "engine-second": self._sockets})
        runs = [Run(first, "cold", self._prompts)]
        with step("waiting until the daemon has stored everything"):
            wait_stored(self._sockets, LOOKS)
        with step("clearing the engine's own prefix cache"):
            first.forget()
        runs += [Run(first, "cache cleared", self._prompts), Run(second, "second engine", self._prompts)]
        self.stop_engines()
        wanted = {"engine-restarted": self._sockets}
        if self._shared:
            with step("waiting until the shared store has the prompts' blocks"):
                wait_steady(self._sockets, written, LOOKS)
            other = wanted["engine-other"] = self._sockets / "other"
            other.mkdir()
            self._start_daemon(other, "kvoffd-other")
        for engine, title in zip(self._start_engines(wanted), ("engine restarted", "another node"), strict=False):
            runs.append(Run(engine, title, self._prompts))
        print("$ kvoffd-cli stats", flush=True)
        environ = {name: text for name, text in os.environ.items() if not name.startswith("KVOFFD_")}  # the user's own
        subprocess.run([CLI, "stats", "--directory", str(self._sockets)], check=True, env=environ, timeout=30.0)
        return runs

    def stop_engines(self) -> None:
        """Stop every engine that runs, in good order, all at once."""
        with step("stopping the engines"):
            for engine in self._engines:
                engine.ask_to_stop()
            while self._engines:
                self._engines.pop().wait_stopped()

    def _start_daemon(self, directory: Path, name: str) -> None:
        with step(f"starting {name} with a pool of 1 GiB"):
            daemon = DaemonProcess("1GiB", directory, **self._shared)
            daemon.log_path = HOME / "logs" / f"{name}.log"
            self._children.enter_context(daemon)
            wait_serving(directory)

    def _start_engines(self, wanted: dict[str, Path]) -> list[EngineProcess]:
        """Start engines, given their names and daemons, at the same time: a start has one core busy."""
        with step(f"starting vLLM: {', '.join(wanted)} (logs in {HOME / 'logs'})"):
            for name, directory in wanted.items():
                engine = EngineProcess(
                    self._model,
                    directory,
                    num_blocks=600,
                    max_model_len=8192,
                    fork=False,
                    # Block hashes begin with it: equal in every engine, or nothing is found again.
                    environ={"PYTHONHASHSEED": "0"},
                )
                engine.log_path = HOME / "logs" / f"{name}.log"
                self._children.callback(engine.close)
                engine.launch()
                self._engines.append(engine)
            for engine in self._engines:
                engine.wait_ready()
            for engine in self._engines:
                # An engine's first request pays for more than its prompt: buffers are made, code is loaded.
                engine.generate([self._warm_up], ANSWER_TOKENS)
        return list(self._engines)


def written(found: Books) -> int:
    return 0 if found.shared[0].queued_writes else int(found.shared[0].written_blocks)


def show(runs: list[Run]) -> str:
    """Print and write what came out; return a sentence where kvoffd did not do what the demo is to show."""
    cold = runs[0]
    table = Table(title=f"{len(PROMPT_LENGTHS)} prompts, {sum(PROMPT_LENGTHS):,} tokens, one after the other")
    for column in ("run", "TTFT", "of cold", "tokens loaded", "same tokens"):
        table.add_column(column, justify="left" if column in ("run", "same tokens") else "right")
    for run in runs:
        same = "-" if run is cold else "yes" if run.answers == cold.answers else "NO"
        part = f"{100 * run.ttft_ms / cold.ttft_ms:.0f} %"
        table.add_row(run.title, f"{run.ttft_ms:,.0f} ms", part, f"{run.loaded:,}", same)
    console.print()
    console.print(table)
    if PROGRAM is None:
        console.print("Another node was not tried: there is no redis-server (`make servers` installs one).\n")
    console.print(LEGEND)
    equal = all(run.answers == cold.answers for run in runs)
    found = {
        "ttft_ms": {run.title: round(run.ttft_ms, 1) for run in runs},
        "loaded_tokens": min(run.loaded for run in runs[1:]),
        "prompt_tokens": sum(PROMPT_LENGTHS),
        "tokens_equal": equal,
    }
    (HOME / "result.json").write_text(json.dumps(found, indent=2) + "\n")
    if not equal:
        return "The tokens differ from those of the cold run; please report it, with the directory .demo/logs."
    missed = [f"{run.title}: {run.loaded:,} ({run.late} lookups late)" for run in runs[1:] if run.loaded < LOADABLE]
    if not missed:
        return ""
    return (
        f"Not all of {LOADABLE:,} tokens came from kvoffd. {'; '.join(missed)}.\nOn a machine that is busy with other "
        "things engines may rightly compute instead: try again when it is quiet. Otherwise please report it, with the "
        "directory .demo/logs."
    )


def main() -> int:
    """Play, clean up, return the exit status: 0 when everything was as promised."""
    # The client logs what it survives, such as a daemon that is not up yet; here the steps say what matters.
    logging.getLogger("kvoffd_client").addHandler(logging.NullHandler())
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with ExitStack() as children:
            try:
                demo = Demo(children)
                complaint = show(demo.play())
                demo.stop_engines()
            finally:
                # A second Ctrl-C must not interrupt the cleaning up, which ends in seconds.
                for number in INTERRUPTS:
                    signal.signal(number, signal.SIG_IGN)
    except AssertionError as failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; everything that was started has been stopped.", file=sys.stderr)
        return 130
    if complaint:
        print(f"\n{complaint}", file=sys.stderr)
        return 1
    print(f"\nAll numbers are in {HOME / 'result.json'}; all processes have been stopped.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
