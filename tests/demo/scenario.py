"""What the demo does: the same long prompts cold, after a cache reset, in a second engine, after a restart, and on what
is another node for all they know: another daemon, which shares a server with the first.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvoffd_client import AdminClient
from kvoffd_client.session import Closing
from kvoffd_proto.stats import DaemonStats
from tests.kit.daemon import START_DEADLINE_S, DaemonProcess
from tests.kit.engine import BLOCK_TOKENS, EngineProcess
from tests.kit.redis_server import PROGRAM, RedisServer
from tests.kit.waiting import wait_until

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# None is a whole number of blocks: the tail of each is computed again, as in real life.
PROMPT_LENGTHS = (6013, 5003, 4007)
WARM_UP_TOKENS = 2500
# Enough steps after the prompt's for vLLM to hand over all stores, and enough tokens to compare.
ANSWER_TOKENS = 16
POOL_SIZE = "1GiB"
ENGINE_BLOCKS = 600
STORE_TIMEOUT_S = 60.0
# Stores have ended when the daemon has nothing to do and holds the same bytes for this long.
QUIET_S = 0.5
POLL_S = 0.1
HITS = "vllm:external_prefix_cache_hits"
LATE = "vllm:kvoffd_late_lookups"

Step = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Answer:
    """One prompt's outcome. ``loaded_tokens`` came from kvoffd; ``late_lookups`` were not answered in time."""

    ttft_ms: float
    loaded_tokens: int
    tokens: list[int]
    late_lookups: int = 0


@dataclass(frozen=True)
class Pass:
    """All prompts once, in one engine, one after the other."""

    title: str
    answers: tuple[Answer, ...]

    @property
    def ttft_ms(self) -> float:
        """Mean time to first token over the prompts, in milliseconds."""
        return sum(answer.ttft_ms for answer in self.answers) / len(self.answers)

    @property
    def loaded_tokens(self) -> int:
        """Prompt tokens that came from kvoffd, over all prompts."""
        return sum(answer.loaded_tokens for answer in self.answers)

    @property
    def late_lookups(self) -> int:
        """Lookups that the engine did not wait for any longer: it computed these prompts."""
        return sum(answer.late_lookups for answer in self.answers)

    def same_tokens(self, other: Pass) -> bool:
        """Whether every prompt was answered with the same tokens."""
        return [answer.tokens for answer in self.answers] == [answer.tokens for answer in other.answers]


@dataclass(frozen=True)
class Outcome:
    """The passes. ``another_node`` is None where there is neither Valkey nor Redis."""

    cold: Pass
    warm: Pass
    second_engine: Pass
    restarted: Pass
    another_node: Pass | None

    @property
    def passes(self) -> tuple[Pass, ...]:
        """In the order they were run."""
        there = () if self.another_node is None else (self.another_node,)
        return (self.cold, self.warm, self.second_engine, self.restarted, *there)

    @property
    def tokens_equal(self) -> bool:
        """Whether kvoffd made no difference to any token."""
        return all(later.same_tokens(self.cold) for later in self.passes)

    @property
    def loaded_tokens(self) -> int:
        """Prompt tokens that came from kvoffd in each pass after the cold one; the least of them where they differ."""
        return min(later.loaded_tokens for later in self.passes[1:])

    def as_json(self) -> dict[str, object]:
        """What .demo/result.json holds."""
        return {
            "cold_ttft_ms": round(self.cold.ttft_ms, 1),
            "warm_ttft_ms": round(self.warm.ttft_ms, 1),
            "second_engine_ttft_ms": round(self.second_engine.ttft_ms, 1),
            "restarted_ttft_ms": round(self.restarted.ttft_ms, 1),
            "another_node_ttft_ms": None if self.another_node is None else round(self.another_node.ttft_ms, 1),
            "tokens_equal": self.tokens_equal,
            "loaded_tokens": self.loaded_tokens,
            "prompt_tokens": sum(PROMPT_LENGTHS),
        }


def loadable_tokens() -> int:
    """Tokens of all prompts that lie in whole blocks: what a warm pass loads."""
    return sum(length // BLOCK_TOKENS * BLOCK_TOKENS for length in PROMPT_LENGTHS)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off what interrupts the demo: a process that was started is known before."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for one in came:
        signal.raise_signal(one)


class Scenario:
    """Runs the passes. Closing ``children`` ends whatever runs still, at once."""

    def __init__(self, model: Path, sockets: Path, logs: Path, step: Step, children: ExitStack) -> None:
        self._model = model
        self._sockets = sockets
        self.daemons = {"kvoffd": sockets}
        """By the name of its log, the directory of each daemon's sockets."""
        self._logs = logs
        self._step = step
        self._children = children
        self._engines: list[EngineProcess] = []
        self._shared: dict[str, str] = {}
        prompts = random.Random(7)
        self._prompts = [prompts.choices(range(3, 1000), k=length) for length in PROMPT_LENGTHS]
        self._warm_up = prompts.choices(range(3, 1000), k=WARM_UP_TOKENS)

    def run(self) -> Outcome:
        """Everything but the start of the daemon."""
        first, second_engine = self._start_engines(
            {"The engine": ("engine.log", self._sockets), "A second engine": ("engine-second.log", self._sockets)}
        )
        cold = self._send_all(first, "cold")
        with self._step("waiting until the daemon has stored everything"):
            self._wait_for_stores()
        with self._step("clearing the engine's own prefix cache"):
            first.forget()
        warm = self._send_all(first, "cache cleared")
        second = self._send_all(second_engine, "second engine")
        self.stop_engines()
        engines = {"The restarted engine": ("engine-restarted.log", self._sockets)}
        if self._shared:
            with self._step("waiting until the shared store has the prompts' blocks"):
                self._wait_for_writes()
            other = self.daemons["kvoffd-other"] = self._sockets / "other"
            other.mkdir()
            self._start_daemon(other, "kvoffd-other.log", "a second kvoffd, as on another node: its pool is empty")
            engines["The engine of another node"] = ("engine-other.log", other)
        restarted_engine, *elsewhere = self._start_engines(engines)
        restarted = self._send_all(restarted_engine, "engine restarted")
        another_node = self._send_all(elsewhere[0], "another node") if elsewhere else None
        return Outcome(cold, warm, second, restarted, another_node)

    def start_daemon(self) -> None:
        """Start the daemon, and before it a server to be shared, if there is one."""
        if PROGRAM is not None:
            server = RedisServer()
            self._begin(server, server.start)
            # The defaults, 20 ms and 2 s, are for a store with cores of its own. Here two nodes and the store have one
            # machine, and it may have few.
            self._shared = {"shared": server.url, "shared_ask_deadline": "1s", "shared_deadline": "30s"}
        self._start_daemon(self._sockets, "kvoffd.log", f"kvoffd with a pool of {POOL_SIZE}")

    def _start_daemon(self, directory: Path, log: str, what: str) -> None:
        """Start a daemon and wait until it takes sessions."""
        with self._step(f"starting {what}"):
            daemon = DaemonProcess(POOL_SIZE, directory, **self._shared)
            daemon.log_path = self._logs / log
            self._begin(daemon, lambda: daemon.start(wait=False))
            daemon.wait_ready()
            with AdminClient(directory) as admin:
                wait_until(
                    lambda: admin.health().ready and all(one.up for one in admin.stats().shared),
                    START_DEADLINE_S,
                    explain=lambda: daemon.log,
                )

    def _begin(self, process: Closing, start: Callable[[], object]) -> None:
        """Start a process that ends with ``children``."""
        self._children.callback(process.close)
        with uninterrupted():
            start()

    def stop_engines(self) -> None:
        """Stop every engine that runs, in good order, all at once."""
        with self._step("stopping the engines"):
            for engine in self._engines:
                engine.ask_to_stop()
            while self._engines:
                self._engines.pop().wait_stopped()

    def _start_engines(self, wanted: Mapping[str, tuple[str, Path]]) -> list[EngineProcess]:
        """Start engines, given their names, logs and daemons, at the same time: a start has one core busy."""
        what = " and ".join(f"{name.lower()} (its log: {self._logs / log})" for name, (log, _) in wanted.items())
        with self._step(f"starting vLLM: {what}"):
            for log, directory in wanted.values():
                engine = EngineProcess(
                    self._model,
                    directory,
                    num_blocks=ENGINE_BLOCKS,
                    max_model_len=8192,
                    fork=False,
                    # The connector has its defaults, as with users.
                    patient=False,
                    # Block hashes begin with it: equal in every engine, or nothing is found again.
                    environ={"PYTHONHASHSEED": "0"},
                )
                engine.log_path = self._logs / log
                self._begin(engine, engine.launch)
                self._engines.append(engine)
            for engine in self._engines:
                engine.wait_ready()
            for engine in self._engines:
                # An engine's first request pays for more than its prompt: buffers are made, code is loaded.
                self._send(engine, self._warm_up)
        return list(self._engines)

    def _send_all(self, engine: EngineProcess, title: str) -> Pass:
        answers = []
        for number, prompt in enumerate(self._prompts, 1):
            with self._step(f"{title}: prompt {number} of {len(self._prompts)}, {len(prompt):,} tokens"):
                answers.append(self._send(engine, prompt))
        return Pass(title, tuple(answers))

    def _send(self, engine: EngineProcess, prompt: list[int]) -> Answer:
        before = engine.metrics()
        (answer,) = engine.generate([prompt], ANSWER_TOKENS)
        after = engine.metrics()
        loaded, late = (int(after.get(name, 0) - before.get(name, 0)) for name in (HITS, LATE))
        return Answer(1000 * answer.first_token_s, loaded, answer.tokens, late)

    def _wait_for_stores(self) -> None:
        self._wait_quiet(lambda stats: None if is_storing(stats) else stats.pool.of("ready"))

    def _wait_for_writes(self) -> None:
        self._wait_quiet(lambda stats: None if stats.shared[0].queued_writes else stats.shared[0].written_blocks)

    def _wait_quiet(self, figure: Callable[[DaemonStats], int | None]) -> None:
        """Until a figure, which is None while work is waiting, has stayed above 0 and the same for a while."""
        last, since = 0, time.monotonic()
        with AdminClient(self._sockets) as admin:

            def quiet() -> bool:
                nonlocal last, since
                found = figure(admin.stats()) or 0
                if found != last or not found:
                    last, since = found, time.monotonic()
                return time.monotonic() - since >= QUIET_S

            wait_until(quiet, STORE_TIMEOUT_S, explain=admin.stats, interval_s=POLL_S)


def is_storing(stats: DaemonStats) -> bool:
    """Whether any store waits, runs or is half done."""
    return stats.store.queued_jobs + stats.store.running_jobs > 0 or stats.pool.of("filling") > 0
