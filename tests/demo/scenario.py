"""What the demo does: the same long prompts cold, after a cache reset, in a second engine, after a restart, and on what
is another node for all they know: another daemon, which shares a server with the first.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from kvoffd_client import AdminClient, KvoffdClientError
from kvoffd_proto.messages import StatsReply
from kvoffd_proto.sockets import SocketPaths
from tests.demo.processes import Child, Daemon, DemoFailed, Engine, SharedServer, uninterrupted

BLOCK_TOKENS = 32
# None is a whole number of blocks: the tail of each is computed again, as in real life.
PROMPT_LENGTHS = (6013, 5003, 4007)
WARM_UP_TOKENS = 2500
# Enough steps after the prompt's for vLLM to hand over all stores, and enough tokens to compare.
ANSWER_TOKENS = 16
POOL_SIZE = "1GiB"
DAEMON_TIMEOUT_S = 60.0
ENGINE_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 300.0
STORE_TIMEOUT_S = 60.0
# Stores have ended when the daemon has nothing to do and holds the same bytes for this long.
QUIET_S = 0.5
POLL_S = 0.1

ChildT = TypeVar("ChildT", bound=Child)
Step = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Answer:
    """One prompt's outcome. ``loaded_tokens`` came from kvoffd, ``own_tokens`` from the engine's own prefix cache."""

    ttft_ms: float
    loaded_tokens: int
    own_tokens: int
    tokens: tuple[int, ...]


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


class Scenario:
    """Runs the passes. Closing ``children`` ends whatever runs still, at once."""

    def __init__(self, model: Path, sockets: Path, logs: Path, step: Step, children: ExitStack) -> None:
        self._model = model
        self._sockets = sockets
        self._logs = logs
        self._step = step
        self._children = children
        self._engines: list[Engine] = []
        self._shared = ""
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
            first.ask({"op": "reset"}, REQUEST_TIMEOUT_S)
        warm = self._send_all(first, "cache cleared")
        second = self._send_all(second_engine, "second engine")
        self.stop_engines()
        engines = {"The restarted engine": ("engine-restarted.log", self._sockets)}
        if self._shared:
            with self._step("waiting until the shared server has what was used twice"):
                self._wait_for_writes()
            other = self._sockets / "other"
            other.mkdir()
            self._start_daemon(other, "kvoffd-other.log", "the daemon of another node, whose pool is empty")
            engines["The engine of another node"] = ("engine-other.log", other)
        restarted_engine, *elsewhere = self._start_engines(engines)
        restarted = self._send_all(restarted_engine, "engine restarted")
        another_node = self._send_all(elsewhere[0], "another node") if elsewhere else None
        return Outcome(cold, warm, second, restarted, another_node)

    def start_daemon(self) -> None:
        """Start the daemon, and before it a server to be shared, if there is one."""
        if (program := SharedServer.program()) is not None:
            self._shared = self._begin(lambda: SharedServer(program, self._logs / "shared-server.log")).url
        self._start_daemon(self._sockets, "kvoffd.log", f"kvoffd with a pool of {POOL_SIZE}")

    def _start_daemon(self, directory: Path, log: str, what: str) -> None:
        """Start a daemon and wait until it takes sessions."""
        with self._step(f"starting {what}"):
            daemon = self._begin(lambda: Daemon(directory, POOL_SIZE, self._logs / log, self._shared))
            deadline = time.monotonic() + DAEMON_TIMEOUT_S
            while not self._daemon_is_ready(directory):
                daemon.check_alive()
                if time.monotonic() > deadline:
                    raise daemon.failure(f"took no sessions within {DAEMON_TIMEOUT_S:.0f} s")
                time.sleep(POLL_S)

    def _begin(self, start: Callable[[], ChildT]) -> ChildT:
        """Start a process that ends with ``children``."""
        with uninterrupted():
            child = start()
            self._children.callback(child.abort)
        return child

    def stop_engines(self) -> None:
        """Stop every engine that runs, in good order, all at once."""
        with self._step("stopping the engines"):
            for engine in self._engines:
                engine.ask_to_stop()
            while self._engines:
                self._engines.pop().stop()

    def _daemon_is_ready(self, directory: Path) -> bool:
        if not SocketPaths(directory).lifeline.exists():
            return False
        try:
            with AdminClient(directory) as admin:
                return admin.health().ready and all(one.reachable for one in admin.stats().shared)
        except KvoffdClientError:
            return False

    def _start_engines(self, wanted: Mapping[str, tuple[str, Path]]) -> list[Engine]:
        """Start engines, given their names, logs and daemons, at the same time: a start has one core busy."""
        what = " and ".join(f"{name.lower()} (its log: {self._logs / log})" for name, (log, _) in wanted.items())
        engines: list[Engine] = []
        with self._step(f"starting vLLM: {what}"):
            for name, (log, directory) in wanted.items():
                engines.append(self._begin(partial(Engine, name, self._arguments(directory), self._logs / log)))
            self._engines += engines
            for engine in engines:
                engine.receive(ENGINE_TIMEOUT_S)
            for engine in engines:
                # An engine's first request pays for more than its prompt: buffers are made, code is loaded.
                self._send(engine, self._warm_up)
        return engines

    def _arguments(self, directory: Path) -> dict[str, object]:
        """What vLLM is started with to use the daemon in ``directory``."""
        return {
            "model": str(self._model),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "max_model_len": 8192,
            "block_size": BLOCK_TOKENS,
            "enforce_eager": True,
            "disable_log_stats": False,
            "seed": 0,
            "kv_transfer_config": {
                "kv_connector": "KvoffdConnector",
                "kv_role": "kv_both",
                # A machine busy with other things may answer a lookup late; a late answer is a miss.
                "kv_connector_extra_config": {
                    "directory": str(directory),
                    "lookup_deadline_ms": 2000.0,
                    "disk_wait_ms": 5000.0,
                },
            },
        }

    def _send_all(self, engine: Engine, title: str) -> Pass:
        answers = []
        for number, prompt in enumerate(self._prompts, 1):
            with self._step(f"{title}: prompt {number} of {len(self._prompts)}, {len(prompt):,} tokens"):
                answers.append(self._send(engine, prompt))
        return Pass(title, tuple(answers))

    def _send(self, engine: Engine, prompt: list[int]) -> Answer:
        reply = engine.ask({"op": "generate", "prompt": prompt, "max_tokens": ANSWER_TOKENS}, REQUEST_TIMEOUT_S)
        loaded = cast(int, reply["loaded_tokens"])
        return Answer(
            ttft_ms=cast(float, reply["ttft_ms"]),
            loaded_tokens=loaded,
            own_tokens=cast(int, reply["cached_tokens"]) - loaded,
            tokens=tuple(cast(list[int], reply["tokens"])),
        )

    def _wait_for_stores(self) -> None:
        deadline = time.monotonic() + STORE_TIMEOUT_S
        quiet_since, held_bytes = time.monotonic(), -1
        with AdminClient(self._sockets) as admin:
            while time.monotonic() - quiet_since < QUIET_S:
                if time.monotonic() > deadline:
                    raise DemoFailed(f"The daemon was still busy storing after {STORE_TIMEOUT_S:.0f} s.")
                stats = admin.stats()
                if is_storing(stats) or stats.pool.ready_bytes != held_bytes:
                    quiet_since, held_bytes = time.monotonic(), stats.pool.ready_bytes
                time.sleep(POLL_S)

    def _wait_for_writes(self) -> None:
        deadline, written_at, written = time.monotonic() + STORE_TIMEOUT_S, time.monotonic(), -1
        with AdminClient(self._sockets) as admin:
            while written <= 0 or time.monotonic() - written_at < QUIET_S:
                if time.monotonic() > deadline:
                    raise DemoFailed(f"The shared server was still being written after {STORE_TIMEOUT_S:.0f} s.")
                (shared,) = admin.stats().shared
                if shared.written_blocks != written or shared.queued_writes:
                    written_at, written = time.monotonic(), shared.written_blocks
                time.sleep(POLL_S)


def is_storing(stats: StatsReply) -> bool:
    """Whether any store waits, runs or is half done."""
    return stats.store.queued_jobs + stats.store.running_jobs > 0 or stats.pool.writing_bytes > 0
