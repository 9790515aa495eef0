"""Tokens per second of a real vLLM at 0 % hits: KvoffdConnector, storing, against a connector that does nothing."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from kvoffd_client import AdminClient
from tests.bench.cpu_time import OthersShare, process_cpu_s
from tests.bench.report_file import ROOT, markdown_table, spread
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import EngineProcess, wait_connected

IDLE = {
    "kv_connector": "IdleConnector",
    "kv_connector_module_path": "tests.bench.idle_connector",
    "kv_role": "kv_both",
}
REST_S = 0.5
TARGET = 0.98


@dataclass(frozen=True)
class Load:
    """What both engines are given: prompts that arrive at once, none of which shares a block with another."""

    prompts: int = 8
    prompt_tokens: int = 513
    answer_tokens: int = 32


@dataclass(frozen=True)
class Turn:
    """One batch of prompts: prompts' and answers' tokens a second; CPU seconds of the engine and of the daemon."""

    tokens_per_s: float
    engine_cpu_s: float
    daemon_cpu_s: float


@dataclass
class Throughput:
    """All turns, one a round; rounds correspond. ``others`` is the share of the cores that other processes used."""

    idle: list[Turn] = field(default_factory=list)
    kvoffd: list[Turn] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Round by round; 1 means that the connector costs nothing."""
        return [own.tokens_per_s / bare.tokens_per_s for own, bare in zip(self.kvoffd, self.idle, strict=True)]


def measure_throughput(
    daemon: DaemonProcess, model: Path, load: Load, starts: int, rounds: int, say: Callable[[str], None]
) -> Throughput:
    """Start both engines ``starts`` times; each time let them take turns ``rounds`` times, one uncounted turn before.

    Only one engine works at a time, and the other one is stopped: vLLM binds the workers of both to the same core,
    where one that waits may spin for long, and the other is half as fast meanwhile. The order changes from round to
    round, so that what grows or fades over a run meets both alike; several starts, since two processes of the same
    program are not equally fast.
    """
    found = Throughput()
    for start in range(starts):
        say(f"starting both engines, {start + 1} of {starts}")
        with ExitStack() as stack:
            idle = stack.enter_context(_engine(model, None, kv_transfer_config=IDLE))
            own = stack.enter_context(_engine(model, daemon.directory))
            wait_connected(daemon.directory)
            sides = [(idle, found.idle), (own, found.kvoffd)]
            for number in range(rounds + 1):
                say(f"round {number} of {rounds}")
                with OthersShare() as others:
                    turns = []
                    for (engine, measured), (other, _) in zip(sides, reversed(sides), strict=True):
                        with _stopped(other):
                            turns.append((_turn(engine, daemon, load), measured))
                sides.reverse()
                if number > 0:
                    for turn, measured in turns:
                        measured.append(turn)
                    found.others.append(others.share)
    with AdminClient(daemon.directory) as admin:
        assert admin.stats().store.bytes > 0, "the daemon stored nothing"
    return found


def _engine(model: Path, directory: Path | None, **settings: Any) -> EngineProcess:
    # The default deadline: what it costs when the daemon is late is a part of what is measured.
    extra_config = {"lookup_deadline_ms": 200.0, "do_no_harm": True}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # it must find this package
    return EngineProcess(
        model, directory, extra_config=extra_config, fork=False, environ={"PYTHONPATH": path}, **settings
    )


@contextmanager
def _stopped(engine: EngineProcess) -> Iterator[None]:
    pids = engine.pids
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def _turn(engine: EngineProcess, daemon: DaemonProcess, load: Load) -> Turn:
    """One batch of prompts that nobody has seen."""
    time.sleep(REST_S)
    prompts = [random.choices(range(3, 1000), k=load.prompt_tokens) for _ in range(load.prompts)]
    engine_cpu_s, daemon_cpu_s = _cpu_s(engine.pids), _cpu_s([daemon.pid])
    began = time.perf_counter()
    answers = engine.generate(prompts, max_tokens=load.answer_tokens)
    seconds = time.perf_counter() - began
    assert all(answer.cached == 0 and len(answer.tokens) == load.answer_tokens for answer in answers)
    tokens = load.prompts * (load.prompt_tokens + load.answer_tokens)
    return Turn(tokens / seconds, _cpu_s(engine.pids) - engine_cpu_s, _cpu_s([daemon.pid]) - daemon_cpu_s)


def _cpu_s(pids: Sequence[int]) -> float:
    return sum(process_cpu_s(pid) for pid in pids)


def throughput_table(found: Throughput, load: Load, model: str) -> str:
    """The engine's part as Markdown."""
    rows = [["connector", "tokens/s", "CPU s of the engine", "CPU s of the daemon"]]
    for name, turns in (("does nothing", found.idle), ("KvoffdConnector", found.kvoffd)):
        columns = zip(*((turn.tokens_per_s, turn.engine_cpu_s, turn.daemon_cpu_s) for turn in turns), strict=True)
        rows.append([name, *map(spread, columns)])
    title = (
        f"## vLLM on CPU at 0 % hits, model {model}, float32, blocks of 32; a round: {load.prompts} prompts of "
        f"{load.prompt_tokens} tokens, {load.answer_tokens} answered; {len(found.ratios)} rounds, median (quartiles)"
    )
    met = "met" if median(found.ratios) >= TARGET else "MISSED"
    verdict = f"* Ratio, round by round: {spread(found.ratios)}; {met} (target at least {TARGET})."
    others = f"{median(found.others):.0%} of the cores in the median round, {max(found.others):.0%} at most"
    return "\n\n".join([title, markdown_table(rows), verdict, f"Other processes used {others}."])
