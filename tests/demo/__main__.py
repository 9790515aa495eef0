"""`make demo`: a real vLLM on CPU loses its own cache and gets its prompts back from kvoffd.

The same long prompts are sent cold, after a cache reset, to a second engine, after a restart, and to an engine of
another daemon, as on another node, which reads the first one's memory (NIXL), and a Redis server that the first one
writes to, where these are installed. Everything is written to .demo/ (model, logs, result.json); the sockets are in a
directory of their own, since their paths must be short. All processes are gone at the end, however it ends.

It fails for a wrong token, a failed request, and an engine of the first node that loads nothing. What an engine
computes although kvoffd has it is shown with its reason: on a busy machine that may be the faster way.
"""

from __future__ import annotations

import json
import logging
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvoffd_client import AdminClient
from kvoffd_proto.admin import ListPrompts
from kvoffd_proto.messages import PromptReport
from tests.kit.command import CLI
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import BLOCK_TOKENS, EngineProcess, wait_steady, wait_stored
from tests.kit.filled_tiers import wait_serving
from tests.kit.models import make_demo_llama
from tests.kit.ports import free_port
from tests.kit.redis_server import PROGRAM, RedisServer
from tests.kit.waiting import wait_until
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
LEGEND = f"""Runs after the cold one get the prompts from kvoffd.
  cache cleared: the same engine, after its own prefix cache was cleared
  second engine: one that has not computed them
  engine restarted: a new process
  another node: an engine of a second kvoffd, whose pool was empty, from the
    first one's memory, or through Redis
TTFT: mean time to first token as vLLM measures it, from a request's arrival
Tokens loaded: from kvoffd, of {LOADABLE:,} in whole blocks; the engine computes
  the rest. `kvoffd-cli stats` above is of the first node, and has more: engines
  that start later load the prompt that warms them up, too.
Same tokens: whether the answers are those of the cold run.
"""

HITS = "vllm:external_prefix_cache_hits"
OTHER_NODE = "another node"
REPORTS_S = 5.0
"""Time for engines to report what became of their prompts."""

console = Console(highlight=False)


class Run:
    """All prompts once, in one engine, one after the other: means of milliseconds, sums of tokens.

    Args:
        directory: of the engine's daemon.
    """

    def __init__(self, engine: EngineProcess, directory: Path, title: str, prompts: list[list[int]]) -> None:
        self.title, self.answers = title, []
        ttft_s, before, since = 0.0, engine.metrics(), time.time()
        for number, prompt in enumerate(prompts, 1):
            with step(f"{title}: prompt {number} of {len(prompts)}, {len(prompt):,} tokens"):
                (answer,) = engine.generate([prompt], ANSWER_TOKENS)
            ttft_s += answer.first_token_s
            self.answers.append(answer.tokens)
        after = engine.metrics()
        self.ttft_ms = 1000 * ttft_s / len(prompts)
        self.loaded = int(after.get(HITS, 0) - before.get(HITS, 0))
        self.outcomes = outcomes(directory, since, len(prompts))


def outcomes(directory: Path, since: float, count: int) -> list[str]:
    """Return what became of the prompts since a time, as their engine reported it: a line each."""

    def found() -> list[PromptReport]:
        reports = [one.report for one in admin.ask(ListPrompts).prompts]
        return [one for one in reports if one.decided_at >= since]

    with AdminClient(directory) as admin:
        with suppress(AssertionError):  # the rest of the demo is worth more than a report that is late
            wait_until(lambda: len(found()) >= count, REPORTS_S)
        return list(map(_outcome, found()))


def _outcome(report: PromptReport) -> str:
    reason = f" ({report.reason})" if report.reason else ""
    return f"{report.tokens:,} tokens: {report.outcome}{reason}, {report.loaded_tokens:,} loaded"


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
        self._engines: list[EngineProcess] = []

    def play(self) -> list[Run]:
        first_node = dict[str, str]()
        ways: dict[str, dict[str, str]] = {}
        """How another node gets blocks: settings of its daemon."""
        if find_spec("nixl_cu12") is not None:
            secret, at = self._sockets / "secret", f"127.0.0.1:{free_port()}"
            secret.write_text(secrets.token_hex(32))
            secret.chmod(0o600)
            first_node |= {"peer_secret_file": str(secret), "peer_listen": at}
            ways[f"{OTHER_NODE}, its memory"] = {"peer_secret_file": str(secret), "peers": at}
        if PROGRAM is not None:
            ways[f"{OTHER_NODE}, Redis"] = {"shared": self._children.enter_context(RedisServer()).url}
            first_node |= ways[f"{OTHER_NODE}, Redis"]
        self._start_daemon(self._sockets, "kvoffd", first_node)
        first, second = self._start_engines({"engine": self._sockets, "engine-second": self._sockets})
        runs = [Run(first, self._sockets, "cold", self._prompts)]
        with step("waiting until the daemon has stored everything"):
            wait_stored(self._sockets, LOOKS)
        with step("clearing the engine's own prefix cache"):
            first.forget()
        runs.append(Run(first, self._sockets, "cache cleared", self._prompts))
        runs.append(Run(second, self._sockets, "second engine", self._prompts))
        self.stop_engines()
        if "shared" in first_node:
            with step("waiting until Redis has the prompts' blocks"):
                wait_steady(self._sockets, written, LOOKS)
        other = self._sockets / "other"
        other.mkdir()
        engines = {"engine-restarted": self._sockets} | ({"engine-other": other} if ways else {})
        turns = iter(ways.items())
        title, settings = next(turns, ("", {}))
        daemon = self._start_daemon(other, "kvoffd-other", settings) if ways else None
        restarted, *others = self._start_engines(engines)
        runs.append(Run(restarted, self._sockets, "engine restarted", self._prompts))
        for engine in others:
            runs.append(Run(engine, other, title, self._prompts))
            for title, settings in turns:
                assert daemon is not None
                daemon.stop()
                daemon = self._start_daemon(other, "kvoffd-other", settings)
                with step("clearing the engine's own prefix cache, and waiting until it has found the new daemon"):
                    engine.forget()
                    engine.generate([self._warm_up], ANSWER_TOKENS)
                runs.append(Run(engine, other, title, self._prompts))
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

    def _start_daemon(self, directory: Path, name: str, settings: dict[str, str]) -> DaemonProcess:
        with step(f"starting {name} with a pool of 1 GiB"):
            daemon = DaemonProcess("1GiB", directory, **settings)
            daemon.log_path = HOME / "logs" / f"{name}.log"
            self._children.enter_context(daemon)
            wait_serving(directory)
        return daemon

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
    """Print and write the results; return a sentence if kvoffd broke a promise."""
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
    if not any(run.title.startswith(OTHER_NODE) for run in runs):
        console.print("Another node was not tried: neither NIXL (`make venv`) nor redis-server is installed.\n")
    console.print(LEGEND, soft_wrap=True)
    for run in runs[1:]:
        if run.loaded < LOADABLE:
            console.print(
                f"{run.title}: {run.loaded:,} of {LOADABLE:,} tokens came from kvoffd, the engine computed the rest. "
                f"First tokens came after {run.ttft_ms:,.0f} ms, cold after {cold.ttft_ms:,.0f} ms. Prompt by prompt:",
                soft_wrap=True,
            )
            console.print("".join(f"  {outcome}\n" for outcome in run.outcomes), soft_wrap=True)
    equal = all(run.answers == cold.answers for run in runs)
    found = {
        "ttft_ms": {run.title: round(run.ttft_ms, 1) for run in runs},
        "loaded_tokens": {run.title: run.loaded for run in runs[1:]},
        "loadable_tokens": LOADABLE,
        "tokens_equal": equal,
    }
    (HOME / "result.json").write_text(json.dumps(found, indent=2) + "\n")
    if not equal:
        return "The tokens differ from those of the cold run; please report it, with the directory .demo/logs."
    empty = [run.title for run in runs[1:] if not run.loaded and not run.title.startswith(OTHER_NODE)]
    if empty:
        return f"Nothing came from kvoffd ({', '.join(empty)}); please report it, with the directory .demo/logs."
    return ""


def main() -> int:
    """Play, clean up, return the exit status: 0 if kvoffd kept its promises."""
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
