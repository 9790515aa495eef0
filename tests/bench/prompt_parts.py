"""What a new prompt of 64 tokens takes with kvoffd, in its parts: CPU, waits and wake-ups of the connector's calls.

Beside a connector that does nothing, and one that asks another process for an echo by ZeroMQ and waits for it, which is
the least that asking a daemon can take. ``python -m tests.bench.prompt_parts``, with the Python that has vLLM, starts a
daemon and the engines. One engine runs at a time, since the workers of one that has just run keep a core busy for a
while. Recording takes some 5 µs a call.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.new_prompts import CACHED_TOKENS, new_prompts
from tests.bench.report_file import ROOT, markdown_table, print_report, run_facts
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import BLOCK_TOKENS, EngineProcess, connector_config, wait_connected
from tests.kit.models import make_tiny_llama
from tests.kit.waiting import wait_until

TOKENS = 64
IDLE, KVOFFD = "does nothing", "kvoffd"
KINDS = {IDLE: "TimedIdle", "with an echo": "TimedEcho", KVOFFD: "TimedKvoffd"}
"""Classes of ``timed_connectors.py``."""
CACHE_BLOCKS = 2 * CACHED_TOKENS // BLOCK_TOKENS
REST_S = 0.5
"""Pause before a prompt: the workers' threads spin for 0.3 s after the one before."""
WARM_UP = 5
PROCESSES = 2
"""Of an engine that have a connector: its core, with the scheduler's half, and its worker."""
Record = tuple[str, float, float, float, int]
"""Name of a call, when it began, its seconds, its thread's seconds of CPU, and how often the thread waited."""
Spent = dict[str, tuple[float, int]]
"""Seconds of CPU of threads, and how often they waited, by name."""


@dataclass(frozen=True)
class Prompt:
    """When a prompt was sent, when it had its first token, and when the next one was sent, by time.monotonic()."""

    sent_at: float
    first_token_at: float
    ended_at: float


@dataclass(frozen=True)
class Part:
    """Some calls: how many, milliseconds of CPU and of waits, and how often their threads waited."""

    calls: float = 0.0
    cpu_ms: float = 0.0
    waits_ms: float = 0.0
    wakes: float = 0.0

    @classmethod
    def of(cls, records: Iterable[Record]) -> Part:
        found = [*records]
        cpu_s = sum(cpu for _, _, _, cpu, _ in found)
        waits_s = sum(max(0.0, seconds - cpu) for _, _, seconds, cpu, _ in found)
        return cls(len(found), 1e3 * cpu_s, 1e3 * waits_s, sum(one[4] for one in found))

    @classmethod
    def median(cls, parts: Sequence[Part]) -> Part:
        """Each figure's median."""
        return cls(*(median(figures) for figures in zip(*map(astuple, parts), strict=True)))


@dataclass(frozen=True)
class Turn:
    """What one engine did.

    Attributes:
        first_token_ms: of each prompt, as vLLM measures it.
        records: calls of its connector, of both halves.
        threads: what the client's own threads took meanwhile, and the daemon's.
    """

    prompts: Sequence[Prompt]
    first_token_ms: Sequence[float]
    records: Sequence[Record]
    threads: Spent

    def parts(self, name: str = "", *, after: bool = False) -> list[Part]:
        """The calls of a name, or all, of each prompt, that began until its first token, or ``after`` it."""
        found = []
        for one in self.prompts:
            begin, end = (one.first_token_at, one.ended_at) if after else (one.sent_at, one.first_token_at)
            found.append(Part.of(each for each in self.records if name in ("", each[0]) and begin <= each[1] < end))
        return found


def measure(kind: str, model: Path, daemon: DaemonProcess, count: int) -> Turn:
    """Have an engine with this connector answer ``count`` new prompts, one after the other."""
    transfer: dict[str, Any] = {"kv_role": "kv_both"} if kind != KVOFFD else connector_config(daemon.directory, {})
    transfer |= {"kv_connector": KINDS[kind], "kv_connector_module_path": "tests.bench.timed_connectors"}
    with tempfile.TemporaryDirectory() as directory:
        environ = {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR", "TESTS_RECORDS": directory}
        settings = {"max_model_len": CACHED_TOKENS + 1, "max_num_batched_tokens": CACHED_TOKENS + 1}
        with EngineProcess(
            model,
            None,
            num_blocks=CACHE_BLOCKS,
            fork=False,
            environ=environ,
            kv_transfer_config=transfer,
            **settings,
        ) as engine:
            if kind == KVOFFD:
                wait_connected(daemon.directory)
            # Every block of the cache is written once: the first write to a page costs the kernel's time.
            for prompt in new_prompts(CACHED_TOKENS, WARM_UP) + new_prompts(TOKENS, WARM_UP):
                engine.generate([prompt], max_tokens=1)
            return _measure(engine, Path(directory), daemon, count)


def _measure(engine: EngineProcess, directory: Path, daemon: DaemonProcess, count: int) -> Turn:
    time.sleep(REST_S)
    (_, before), daemon_before = _take(directory), _spent_by(daemon.pid)
    sent, answers = [], []
    for prompt in new_prompts(TOKENS, count):
        sent.append(time.monotonic())
        answers += engine.generate([prompt], max_tokens=1)
        time.sleep(REST_S)
    sent.append(time.monotonic())
    (records, after), daemon_after = _take(directory), _spent_by(daemon.pid)
    prompts = [
        Prompt(begin, answer.first_token_at, end) for begin, answer, end in zip(sent, answers, sent[1:], strict=False)
    ]
    threads = {name: _less(now, before.get(name, (0.0, 0))) for name, now in after.items()}
    threads["the daemon"] = _less(daemon_after, daemon_before)
    return Turn(prompts, [1e3 * one.first_token_s for one in answers], records, threads)


def _less(now: tuple[float, int], before: tuple[float, int]) -> tuple[float, int]:
    return now[0] - before[0], now[1] - before[1]


def _take(directory: Path) -> tuple[list[Record], Spent]:
    """Have an engine's processes write what they have recorded so far, and read it."""
    pids = [int(path.stem) for path in directory.glob("*.pid")]
    assert len(pids) == PROCESSES
    records: list[Record] = []
    threads: Spent = {}
    for pid in pids:
        (path := directory / f"{pid}.json").unlink(missing_ok=True)
        os.kill(pid, signal.SIGUSR1)
        wait_until(path.exists)
        found = json.loads(path.read_text())
        records += [tuple(one) for one in found["records"]]
        threads |= {name: tuple(spent) for name, spent in found["threads"].items()}
    return records, threads


def _spent_by(pid: int) -> tuple[float, int]:
    """Seconds of CPU of all threads of a process, and how often they waited."""
    cpu_s, waits = 0.0, 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        cpu_s += int((task / "schedstat").read_text().split()[0]) / 1e9
        waits += next(
            int(line.split()[1]) for line in (task / "status").read_text().splitlines() if line.startswith("voluntary")
        )
    return cpu_s, waits


def page(found: dict[str, list[Turn]]) -> str:
    rows = [["ms of a prompt of 64 tokens, medians", *found]]
    firsts = {kind: median(ms for turn in each for ms in turn.first_token_ms) for kind, each in found.items()}
    calls = {kind: Part.median([part for turn in each for part in turn.parts()]) for kind, each in found.items()}
    later = {
        kind: Part.median([part for turn in each for part in turn.parts(after=True)]) for kind, each in found.items()
    }
    rows += [
        ["first token", *(f"{ms:.2f}" for ms in firsts.values())],
        ["later than with a connector that does nothing", *(f"{ms - firsts[IDLE]:+.2f}" for ms in firsts.values())],
        ["in the connector's calls until then: CPU", *(f"{one.cpu_ms:.2f}" for one in calls.values())],
        ["waits in them", *(f"{one.waits_ms:.2f}" for one in calls.values())],
        ["calls, and wake-ups in them", *(f"{one.calls:.0f}, {one.wakes:.0f}" for one in calls.values())],
        ["in calls after it: CPU", *(f"{one.cpu_ms:.2f}" for one in later.values())],
    ]
    return "\n\n".join([markdown_table(rows), *(_calls(kind, each) for kind, each in found.items())])


def _calls(kind: str, turns: Sequence[Turn]) -> str:
    """The connector's calls, and what the threads took."""
    names = sorted({record[0] for turn in turns for record in turn.records})
    rows = [[f"{kind}: call", "calls", "CPU, µs", "waits, µs", "wake-ups", "calls after the token", "CPU, µs"]]
    for name in names:
        until, after = (
            Part.median([part for turn in turns for part in turn.parts(name, after=after)]) for after in (False, True)
        )
        figures = [until.calls, 1e3 * until.cpu_ms, 1e3 * until.waits_ms, until.wakes, after.calls, 1e3 * after.cpu_ms]
        rows.append([f"`{name}`", *(f"{one:.0f}" for one in figures)])
    rows.sort(key=lambda row: -float(row[2]) if row[2].isdecimal() else -1e9)
    prompts = sum(len(turn.prompts) for turn in turns)
    lines = []
    for name in sorted({name for turn in turns for name in turn.threads}):
        cpu_s, waits = (sum(turn.threads[name][at] for turn in turns) for at in (0, 1))
        lines.append(f"* `{name}`: {1e6 * cpu_s / prompts:.0f} µs of CPU and {waits / prompts:.0f} wake-ups a prompt")
    return markdown_table(rows) + "\n\nThreads, what they do between prompts included:\n\n" + "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.prompt_parts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="engines of each kind, one after the other")
    parser.add_argument("--prompts", type=int, default=40, help="of each engine")
    given = parser.parse_args(arguments)
    found: dict[str, list[Turn]] = {kind: [] for kind in KINDS}
    facts = run_facts(" ".join(["python -m tests.bench.prompt_parts", *arguments]))
    with DaemonProcess("256MiB") as daemon, tempfile.TemporaryDirectory() as place:
        model = make_tiny_llama(Path(place, "model"))
        for _ in range(given.rounds):
            for kind in random.sample(list(KINDS), len(KINDS)):  # what grows or fades meets all alike
                print(f"measuring: {kind}", file=sys.stderr, flush=True)
                found[kind].append(measure(kind, model, daemon, given.prompts))
    print_report("A new prompt in its parts", facts, page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
