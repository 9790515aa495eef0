"""``kvoffd-cli bench engine``: what an engine's new prompts feel of kvoffd, beside a connector that does nothing."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffd_client.bench import BLOCK_TOKENS, NEW_PROMPT_TOKENS
from kvoffd_client.bench.results import BenchFailed, Progress, machine, percentile
from kvoffd_client.bench.tiny_models import make_tiny_llama
from kvoffd_client.bench.ttft import FIRST_TOKEN, LAST_TOKEN, NO_VLLM, silent_stdout

if TYPE_CHECKING:
    from vllm import LLM

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Settings of vLLM on CPU unless the user has others: GiB of blocks, and a core that is left to the daemon."""
NONE, IDLE, KVOFFD = "no connector", "does nothing", "kvoffd"
LOADED_REQUESTS = 4
"""Requests that run beside the measured one in an engine under load."""
LOADED_ANSWER = 100_000
REST_S = 0.03
"""Pause before a prompt in an engine that is idle: what the one before left to do is done by then."""
STEP_S = 0.005
"""In an engine under load a prompt comes at a random time within so many seconds."""
SETTLE_S = 0.1
FIRST_TOKEN_DEADLINE_S = 30.0
SHARES = (("p50", 0.5), ("p90", 0.9))


@dataclass(frozen=True)
class NewPrompts:
    """What is asked of the engines.

    Attributes:
        sizes: tokens of the prompts, ascending.
        rounds: how often the engines take turns.
        prompts: in a turn, of each size, in an idle engine and again in one under load.
    """

    sizes: Sequence[int] = NEW_PROMPT_TOKENS
    rounds: int = 8
    prompts: int = 8

    @property
    def longest(self) -> int:
        return max(self.sizes)


@dataclass
class Latencies:
    """Milliseconds to the first token, in one case, by engine.

    Attributes:
        tokens: of a prompt.
        loaded: other requests ran.
    """

    tokens: int
    loaded: bool
    ms: dict[str, list[float]] = field(default_factory=dict)

    @property
    def case(self) -> str:
        return f"{self.tokens:,} tokens, {'under load' if self.loaded else 'idle'}"

    def rows(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield for each percentile its name and the engines' values."""
        for name, share in SHARES:
            yield name, {engine: percentile(values, share) for engine, values in self.ms.items()}


@dataclass(frozen=True)
class EngineReport:
    """What was measured: of each case all first tokens."""

    asked: NewPrompts
    cases: Sequence[Latencies]
    vllm: str

    def to_object(self) -> dict[str, object]:
        """Return the object that ``--json`` prints."""
        results = [
            {
                "tokens": case.tokens,
                "loaded": case.loaded,
                "percentile": name,
                "ms": values,
                "more_than_does_nothing_ms": values[KVOFFD] - values[IDLE],
                "ratio": values[KVOFFD] / values[IDLE],
            }
            for case in self.cases
            for name, values in case.rows()
        ]
        first_tokens = [{"tokens": case.tokens, "loaded": case.loaded, "ms": case.ms} for case in self.cases]
        return {
            "bench": "engine",
            "machine": machine() | {"vllm": self.vllm},
            "rounds": self.asked.rounds,
            "prompts_of_a_turn": self.asked.prompts,
            "loaded_requests": LOADED_REQUESTS,
            "results": results,
            "first_tokens": first_tokens,
        }


def bench_engine(directory: Path, progress: Progress, asked: NewPrompts, model: str | None = None) -> EngineReport:
    """Measure the time to the first token of prompts that nobody has computed, in three engines that take turns.

    One has no connector, one a connector that does nothing, one kvoffd over the daemon in ``directory``; each is a vLLM
    with its core in a process of its own. Only one runs at a time, the others are stopped: vLLM on CPU binds them to
    the same cores. ``model`` None means a tiny Llama that is made for it. Raises BenchFailed, DaemonUnavailable.
    """
    with silent_stdout(), tempfile.TemporaryDirectory(prefix="kvoffd-bench-") as made:
        name = model or str(make_tiny_llama(Path(made) / "model"))
        engines: list[Engine] = []
        try:
            for connector in (NONE, IDLE, KVOFFD):
                progress(f"starting vLLM: {connector}")
                engines.append(Engine(connector, name, asked, directory))
            cases = [Latencies(tokens, loaded) for loaded in (False, True) for tokens in asked.sizes]
            for number in range(asked.rounds + 1):
                progress(f"round {number} of {asked.rounds}")
                # In another order each time, so that what grows or fades meets all alike.
                for engine in random.sample(engines, len(engines)):
                    with engine.running():
                        for case in cases:
                            found = engine.first_tokens(case.tokens, asked.prompts, loaded=case.loaded)
                            if number > 0:  # the first turn is a warm-up
                                case.ms.setdefault(engine.connector, []).extend(found)
        finally:
            for engine in engines:
                engine.resume()
    import vllm

    order = (NONE, IDLE, KVOFFD)
    for case in cases:
        case.ms = {connector: case.ms[connector] for connector in order}
    return EngineReport(asked, cases, vllm.__version__)


class Engine:
    """One vLLM and its processes, stopped while it is not ``running``."""

    def __init__(self, connector: str, model: str, asked: NewPrompts, directory: Path) -> None:
        self.connector = connector
        before = set(_children())
        self._llm = _start(connector, model, asked, directory)
        self._pids = sorted(set(_children()) - before)
        self._serial = 0
        self._touch_all_blocks(asked)
        self._signal(signal.SIGSTOP)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the engine run in the ``with`` block."""
        self._signal(signal.SIGCONT)
        time.sleep(SETTLE_S)
        yield
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run, so that it can end."""
        self._signal(signal.SIGCONT)

    def first_tokens(self, tokens: int, prompts: int, *, loaded: bool) -> list[float]:
        """Return the milliseconds to the first token of new prompts, one after the other."""
        with self._load(LOADED_REQUESTS if loaded else 0) as running:
            found = []
            for _ in range(prompts):
                if running:
                    self._pass(random.uniform(STEP_S, 2 * STEP_S))
                else:
                    time.sleep(REST_S)
                found.append(self._first_token(tokens) * 1000)
        return found

    def _first_token(self, tokens: int) -> float:
        prompt = _prompt(tokens)
        began = time.perf_counter()
        name = self._add(prompt, 1)
        while time.perf_counter() - began < FIRST_TOKEN_DEADLINE_S:
            if any(output.request_id == name for output in self._llm.llm_engine.step()):
                return time.perf_counter() - began
        raise BenchFailed(f"vLLM gave no token within {FIRST_TOKEN_DEADLINE_S:.0f} s; see its own words above.")

    @contextmanager
    def _load(self, requests: int) -> Iterator[bool]:
        names = [self._add(_prompt(BLOCK_TOKENS), LOADED_ANSWER) for _ in range(requests)]
        if names:
            self._pass(10 * STEP_S)
        yield bool(names)
        if names:
            self._llm.llm_engine.abort_request(names)
        while self._llm.llm_engine.has_unfinished_requests():
            self._llm.llm_engine.step()

    def _pass(self, seconds: float) -> None:
        """Take the running requests' tokens for a while."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            self._llm.llm_engine.step()

    def _add(self, prompt: list[int], answer_tokens: int) -> str:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=answer_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        self._serial += 1
        name = str(self._serial)
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name

    def _touch_all_blocks(self, asked: NewPrompts) -> None:
        """Have every block of the KV cache written once: the first write to a page costs the kernel's time."""
        blocks = _blocks(asked)
        for _ in range(-(-blocks * BLOCK_TOKENS // asked.longest) + 1):
            self._first_token(asked.longest)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass  # a helper that has ended; an engine that has is seen by its next answer


def _blocks(asked: NewPrompts) -> int:
    """Blocks of an engine's cache: few, so that all are in use soon, and enough for the load beside a prompt."""
    return 4 * asked.longest // BLOCK_TOKENS + LOADED_REQUESTS * 64


def _prompt(tokens: int) -> list[int]:
    return random.choices(range(FIRST_TOKEN, LAST_TOKEN + 1), k=tokens)


def _start(connector: str, model: str, asked: NewPrompts, directory: Path) -> LLM:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM
    except ImportError as error:
        raise BenchFailed(NO_VLLM) from error
    try:
        return LLM(
            model=model,
            dtype="float32",
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=_blocks(asked),
            max_model_len=asked.longest + 2048,
            max_num_batched_tokens=asked.longest + 2048,
            skip_tokenizer_init=True,
            enforce_eager=True,
            disable_log_stats=False,
            seed=0,
            kv_transfer_config=_transfer(connector, directory),
        )
    except (ValueError, RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise BenchFailed(f"vLLM did not start with the model {model} ({reason}); its own words are above.") from error


def _transfer(connector: str, directory: Path) -> dict[str, Any] | None:
    if connector == NONE:
        return None
    if connector == IDLE:
        return {
            "kv_connector": "IdleConnector",
            "kv_connector_module_path": "kvoffd_client.bench.idle_connector",
            "kv_role": "kv_both",
        }
    return {
        "kv_connector": "KvoffdConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"directory": str(directory)},
    }


def _children() -> Iterator[int]:
    """Yield the ids of all processes below this one."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                # The name of the program, in parentheses, may hold anything.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    for pid in parents:
        above = parents.get(pid)
        while above is not None and above != os.getpid():
            above = parents.get(above)
        if above is not None:
            yield pid
