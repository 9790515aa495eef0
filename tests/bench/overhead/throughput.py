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
from tests.bench.report_file import ROOT
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import EngineProcess, wait_connected

IDLE = {
    "kv_connector": "IdleConnector",
    "kv_connector_module_path": "tests.bench.idle_connector",
    "kv_role": "kv_both",
}
REST_S = 0.5
Say = Callable[[str], None]


@dataclass(frozen=True)
class Load:
    """What both engines are given.

    Attributes:
        prompts: that arrive at once.
        prompt_tokens: of each; no two prompts share a block.
        answer_tokens: generated for each.
    """

    prompts: int = 8
    prompt_tokens: int = 513
    answer_tokens: int = 32

    @property
    def tokens(self) -> int:
        return self.prompts * (self.prompt_tokens + self.answer_tokens)


@dataclass(frozen=True)
class Turn:
    """One batch of prompts.

    Attributes:
        tokens_per_s: prompts' and answers' tokens.
        engine_cpu_s: CPU seconds of all the engine's processes.
        daemon_cpu_s: CPU seconds of the daemon.
    """

    tokens_per_s: float
    engine_cpu_s: float
    daemon_cpu_s: float


@dataclass
class Throughput:
    """Of all rounds; rounds correspond.

    Attributes:
        load: one round's.
        idle, kvoffd: turns of the engine with a connector that does nothing, and of ours.
        others: share of the machine's cores that other processes used in the round.
        stored_bytes: that the daemon copied in all turns, the uncounted ones too.
    """

    load: Load
    idle: list[Turn] = field(default_factory=list)
    kvoffd: list[Turn] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    stored_bytes: int = 0

    @property
    def ratios(self) -> list[float]:
        """Round by round; 1 means that the connector costs nothing."""
        pairs = zip(self.kvoffd, self.idle, strict=True)
        return [own.tokens_per_s / bare.tokens_per_s for own, bare in pairs]

    def to_object(self) -> dict[str, object]:
        return {
            "load": vars(self.load),
            "ratio": median(self.ratios),
            "ratios": self.ratios,
            "turns": {"idle": [vars(turn) for turn in self.idle], "kvoffd": [vars(turn) for turn in self.kvoffd]},
            "others_share": self.others,
            "stored_bytes": self.stored_bytes,
        }


def measure_throughput(
    daemon: DaemonProcess, model: Path, load: Load, starts: int, rounds: int, say: Say
) -> Throughput:
    """Start both engines ``starts`` times; each time let them take turns ``rounds`` times, one uncounted turn before.

    Only one engine works at a time, and the other one is stopped: vLLM binds the workers of both to the same core,
    where one that waits may spin for long, and the other is half as fast meanwhile. The order changes from round to
    round, so that what grows or fades over a run meets both alike; several starts, since two processes of the same
    program are not equally fast.
    """
    found = Throughput(load)
    with AdminClient(daemon.directory) as admin:
        before = admin.stats().store.bytes
        for start in range(starts):
            say(f"starting both engines, {start + 1} of {starts}")
            with ExitStack() as stack:
                idle = stack.enter_context(_engine(model, None, kv_transfer_config=IDLE))
                own = stack.enter_context(_engine(model, daemon.directory))
                wait_connected(daemon.directory)
                _take_turns(idle, own, daemon, rounds, found, say)
        found.stored_bytes = admin.stats().store.bytes - before
    assert found.stored_bytes > 0, "the daemon stored nothing"
    return found


def _take_turns(
    idle: EngineProcess, own: EngineProcess, daemon: DaemonProcess, rounds: int, found: Throughput, say: Say
) -> None:
    sides = [(idle, found.idle), (own, found.kvoffd)]
    for number in range(rounds + 1):
        say(f"round {number} of {rounds}")
        with OthersShare() as others:
            turns = []
            for (engine, measured), (other, _) in zip(sides, reversed(sides), strict=True):
                with _stopped(other):
                    turns.append((_turn(engine, daemon, found.load), measured))
        sides.reverse()
        if number > 0:
            for turn, measured in turns:
                measured.append(turn)
            found.others.append(others.share)


def _engine(model: Path, directory: Path | None, **settings: Any) -> EngineProcess:
    # The default deadline: what it costs when the daemon is late is a part of what is measured.
    return EngineProcess(
        model,
        directory,
        extra_config={"lookup_deadline_ms": 200.0, "do_no_harm": True},
        fork=False,
        environ={"PYTHONPATH": _path()},
        **settings,
    )


def _path() -> str:
    """The engine must find this package."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


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
    cpu_before = [_cpu_s(engine.pids), _cpu_s([daemon.pid])]
    began = time.perf_counter()
    answers = engine.generate(prompts, max_tokens=load.answer_tokens)
    seconds = time.perf_counter() - began
    cpu = [_cpu_s(engine.pids), _cpu_s([daemon.pid])]
    assert all(answer.cached == 0 and len(answer.tokens) == load.answer_tokens for answer in answers)
    return Turn(load.tokens / seconds, cpu[0] - cpu_before[0], cpu[1] - cpu_before[1])


def _cpu_s(pids: Sequence[int]) -> float:
    return sum(process_cpu_s(pid) for pid in pids)
