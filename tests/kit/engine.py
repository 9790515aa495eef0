"""A real vLLM on CPU in a process group of its own, for tests that need one. Starting one takes half a minute."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

from kvoffd_client import AdminClient, KvoffdClientError
from kvoffd_proto.admin import SessionInfo

from . import fork_servers, runner_v2
from .closing import Starting
from .engine_main import run
from .waiting import wait_until
from .wire import Books, books

START_DEADLINE_S = 900.0
"""A start takes 40 seconds of a core: five minutes where fourteen busy processes share two."""
ANSWER_DEADLINE_S = 200.0
"""A machine with a load of 30 gave an engine four tokens a second."""
STOP_DEADLINE_S = 60.0
BLOCK_TOKENS = 32
PATIENT_S = 30.0
PATIENCE = {"lookup_deadline_ms": 10_000, "do_no_harm": False}
ENGINE_ENVIRON = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # With a connector vLLM sets a core aside for it and, on two cores, ends up taking both.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # Two wait for each other by spinning: a tiny model takes half the time and a third of the CPU with one.
    "OMP_NUM_THREADS": "1",
}
_NEW = multiprocessing.get_context("spawn")


def connector_config(directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    extra = {"directory": str(directory), **options}
    return {"kv_connector": "KvoffdConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@dataclass(frozen=True)
class Completion:
    """What became of one prompt.

    Attributes:
        tokens: generated token ids.
        logprobs: their log probabilities.
        cached: prompt tokens that were not computed.
        finish: why it ended, ``length`` when all went well.
        first_token_s: time to the first token, as vLLM measures it.
        queued_at, scheduled_at, first_token_at: when the engine took the prompt, when it began a step with tokens of
            it, after what was loaded had come, and when that step ended; all by one clock, as vLLM measures it.
        transfer: kv_transfer_params for another engine; None where no connector gave any.
        likeliest: log probabilities of the likeliest tokens at each place, as many as were asked for.
    """

    tokens: list[int]
    logprobs: list[float]
    cached: int
    finish: str
    first_token_s: float
    queued_at: float = 0.0
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    transfer: dict[str, Any] | None = None
    likeliest: list[dict[int, float]] = field(default_factory=list)


class EngineProcess(Starting):
    """One engine. ``directory`` is the daemon's, None for an engine without a connector.

    With ``v2`` it has vLLM's second model runner and async scheduling, over an emulated GPU stream (``runner_v2``); by
    default the environment says whether it has.

    With ``fork`` it is forked from a process that has imported vLLM, as its core and workers are from it, and is there
    in seconds; without, it is a new process and vLLM starts them as it does for users, by spawning them on CPU.

    The connector has its defaults, unless it is ``patient``: then it waits long for the daemon and loads what is there.
    That is for tests of something else than waiting and loading, on a machine busy with other tests: a late answer is
    a miss, and a load is left out where the daemon was slow, or was stopped, in those before it.

    Of some hundred forked engines two were once in a namespace of their own; in which field was not noted. What can do
    it is the first call of a math function by several threads, which the connector prevents since
    (kvoffd_client/vllm/math_kernels.py).
    """

    def __init__(
        self,
        model: Path,
        directory: Path | None,
        *,
        v2: bool | None = None,
        num_blocks: int = 400,
        tensor_parallel: int = 1,
        extra_config: dict[str, Any] | None = None,
        transfer: dict[str, Any] | None = None,
        events: dict[str, Any] | None = None,
        fork: bool = True,
        patient: bool = False,
        environ: dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self._own = Path(tempfile.mkdtemp(prefix="kvoffd-engine-", dir="/tmp"))
        self.log_path = self._own / "engine.log"
        self._settings = {
            "model": str(model),
            "dtype": "float32",
            "block_size": BLOCK_TOKENS,
            "max_model_len": 4096,
            "num_gpu_blocks_override": num_blocks,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
            "seed": 0,
            "tensor_parallel_size": tensor_parallel,
            "kv_transfer_config": None,
            "kv_events_config": events,
            **settings,
        }
        if directory is not None:
            options = {**(PATIENCE if patient else {}), **(extra_config or {})}
            self._settings["kv_transfer_config"] = connector_config(directory, options) | (transfer or {})
        self._environ = {
            **os.environ,
            **ENGINE_ENVIRON,
            **({"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if tensor_parallel > 1 else {}),
            **(environ or {}),
        }
        self._v2 = runner_v2.wanted() if v2 is None else v2
        self._environ.pop(runner_v2.VARIABLE, None)
        if self._v2:
            self._environ.update(runner_v2.ENVIRON)
        self._fork = fork
        self._process: BaseProcess | None = None
        self._connection: Connection[Any, Any] | None = None

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    @property
    def running(self) -> bool:
        """Whether it was started, and not killed by a test."""
        return self._process is not None

    @property
    def pids(self) -> list[int]:
        return session_pids(self._process.pid) if self._process and self._process.pid else []

    def start(self) -> Self:
        self.launch()
        return self.wait_ready()

    def launch(self) -> Self:
        """Start without waiting until it serves, so that two engines may start at the same time."""
        address = self._own / "socket"
        address.unlink(missing_ok=True)
        self._listener = Listener(str(address), family="AF_UNIX")
        arguments = (str(address), str(self.log_path), self._environ, self._fork)
        self._process = (
            fork_servers.forked(run, arguments, v2=self._v2) if self._fork else _NEW.Process(target=run, args=arguments)
        )
        self._process.start()
        deadline = time.monotonic() + START_DEADLINE_S
        self._listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        while self._connection is None:
            try:
                self._connection = self._listener.accept()
            except TimeoutError:
                alive = self._process.is_alive() and time.monotonic() < deadline
                assert alive, f"the engine did not come up:\n{self.log[-4000:]}"
        self._connection.send(self._settings)  # it imports vLLM after that
        return self

    def wait_ready(self) -> Self:
        """Until it serves. Raises AssertionError with the end of its log when it does not."""
        assert self._receive(START_DEADLINE_S)[0] == "ready"
        return self

    def begin(self, command: str, **arguments: Any) -> None:
        """Send a command and do not wait for its answer; ``finish`` does."""
        self._connection.send((command, arguments))

    def finish(self) -> Any:
        """The answer of the command begun last."""
        kind, value = self._receive(ANSWER_DEADLINE_S)
        assert kind == "ok", f"{value}\n{self.log[-4000:]}"
        return value

    def call(self, command: str, **arguments: Any) -> Any:
        self.begin(command, **arguments)
        return self.finish()

    def generate(self, prompts: list[Any], max_tokens: int = 8, **arguments: Any) -> list[Completion]:
        """Have the engine answer these prompts; ``arguments`` are those of ``generate`` in engine_main.py."""
        return completions(self.call("generate", prompts=prompts, max_tokens=max_tokens, **arguments))

    def forget(self, connector: bool = False) -> None:
        """Clear the engine's own prefix cache, so that only the daemon has the blocks; and the connector's if asked."""
        # It refuses while blocks are in use, as by stores under way.
        wait_until(lambda: self.call("reset", connector=connector), interval_s=0.05)

    def control_stream(self, *, lag_s: float = 0.0, events_at_once: bool = False) -> dict[str, Any]:
        """Set how the emulated stream behaves from now on, see ``emulated_stream.control``. Only with ``v2``."""
        counted: dict[str, Any] = self.call("control_stream", lag_s=lag_s, events_at_once=events_at_once)
        return counted

    def metrics(self) -> dict[str, float]:
        value: dict[str, float] = self.call("metrics")
        return value

    def kill(self) -> None:
        """SIGKILL to every process of the engine at once. It can be started again."""
        if self._process is None:
            return
        self._process.kill()  # it may have no session of its own yet
        for pid in self.pids:
            with suppress(ProcessLookupError):  # it may have ended by the first kill
                os.kill(pid, signal.SIGKILL)
        self._process.join(STOP_DEADLINE_S)
        if self._connection is not None:
            self._connection.close()
        self._listener.close()
        self._process = self._connection = None

    def ask_to_stop(self) -> None:
        self._connection.close()

    def wait_stopped(self) -> None:
        """Until it has ended; by force where that takes too long."""
        self._process.join(STOP_DEADLINE_S)
        self.kill()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._own, ignore_errors=True)

    def _receive(self, deadline_s: float) -> tuple[str, Any]:
        if not self._connection.poll(deadline_s):
            raise AssertionError(f"the engine did not answer within {deadline_s} s:\n{self.log[-4000:]}")
        try:
            kind, value = self._connection.recv()
        except EOFError:
            raise AssertionError(f"the engine ended:\n{self.log[-6000:]}") from None
        return kind, value


def session_pids(leader: int) -> list[int]:
    """The ids of all processes of the session that ``leader`` leads."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(ProcessLookupError):
                if os.getsid(int(entry.name)) == leader:
                    found.append(int(entry.name))
    return found


def wait_connected(
    directory: Path, workers: int = 1, deadline_s: float = 30.0, pids: Callable[[], Container[int]] | None = None
) -> None:
    """Until an engine's scheduler and all its workers are connected and the workers' memory is registered.

    ``pids``: only processes of these ids count; None for all. While it waits the daemon may die and come back.
    """

    def connected() -> bool:
        wanted = pids and pids()
        try:
            with AdminClient(directory, PATIENT_S) as admin:
                listed = admin.sessions().sessions
        except KvoffdClientError:
            return False
        sessions[:] = [one for one in listed if wanted is None or one.pid in wanted]
        registered = sum(session.registrations for session in sessions if session.role == "worker")
        return registered >= workers and any(session.role == "scheduler" for session in sessions)

    sessions: list[SessionInfo] = []
    wait_until(connected, deadline_s, explain=lambda: sessions)


def wait_books(directory: Path, condition: Callable[[Books], object], deadline_s: float = 30.0) -> Books:
    """The first books of the daemon that fulfil ``condition``."""
    found: list[Books] = []

    def fulfilled() -> object:
        found[:] = [books(directory)]
        return condition(found[0])

    wait_until(fulfilled, deadline_s, explain=lambda: found, interval_s=0.02)
    return found[0]


def wait_steady(directory: Path, figure: Callable[[Books], int], looks: int) -> Books:
    """Until a figure of the daemon's books is above 0, and the same so many times, 20 ms apart."""
    seen: list[int] = []

    def steady(found: Books) -> bool:
        seen.append(figure(found))
        return seen[-1] > 0 and seen[-looks:] == [seen[-1]] * looks

    return wait_books(directory, steady, 100.0)


def wait_stored(directory: Path, looks: int = 6) -> Books:
    """Until blocks are there and no more come: answers do not wait for stores."""

    def stored(found: Books) -> int:
        return 0 if found.store.running_jobs or found.store.queued_jobs else found.ready_blocks

    return wait_steady(directory, stored, looks)


def tokens(answers: list[Completion]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def cached(answers: list[Completion]) -> list[int]:
    return [answer.cached for answer in answers]


def completions(answer: list[dict[str, Any]]) -> list[Completion]:
    """The answer of the command ``generate`` as objects."""
    return [Completion(**item) for item in answer]


def prompt(seed: int, length: int) -> list[int]:
    """A prompt of ``length`` tokens; different seeds differ from the first token on."""
    return [(i * i * 7 + seed * 131 + (i * seed) % 11) % 1000 + 3 for i in range(length)]


def full_blocks(length: int) -> int:
    """Tokens in the full blocks of a prompt, but for the one that vLLM always computes."""
    return (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
