"""The bench engine: what an engine's new prompts feel of kvoffd, beside a connector that does nothing."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tests.bench.daemon import BLOCK_TOKENS, NEW_PROMPT_TOKENS
from tests.bench.daemon.pool_bench import ENVIRONMENT as POOL_ENVIRONMENT
from tests.bench.daemon.pool_bench import FIRST_TOKEN, LAST_TOKEN, own_namespace, silent_stdout, start_vllm
from tests.bench.daemon.results import BenchFailed, Progress, Report, Result, percentile

if TYPE_CHECKING:
    from vllm import LLM

FLOOR = "the same prompts in an engine with a connector that does nothing; each had its turns"
ENVIRONMENT = POOL_ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 131_072,
}
"""The model unless the user has another; vLLM makes its weights up."""
IDLE, KVOFFD = "does nothing", "kvoffd"
LOADED_REQUESTS = 4
"""Requests that run beside the measured one in an engine under load."""
LOADED_ANSWER = 2048
REST_S = 0.03
"""Pause before a prompt in an engine that is idle: what the one before left to do is done by then."""
STEP_S = 0.005
"""In an engine under load a prompt comes at a random time within so many seconds."""
TURN_PAUSE_S = 0.3
"""Pause between the engines' turns: the threads of the one that ran spin for a while."""
FIRST_TOKEN_DEADLINE_S = 30.0

Case: TypeAlias = tuple[int, bool]
"""Tokens of a prompt, and whether other requests run."""


@dataclass(frozen=True)
class NewPrompts:
    """What is asked of the engines.

    Attributes:
        sizes: tokens of the prompts.
        rounds: how often the engines take turns.
        prompts: in a turn, of each size, in an idle engine and again in one under load.
    """

    sizes: Sequence[int] = NEW_PROMPT_TOKENS
    rounds: int = 8
    prompts: int = 8

    @property
    def cases(self) -> list[Case]:
        return [(tokens, loaded) for loaded in (False, True) for tokens in self.sizes]

    @property
    def cache_blocks(self) -> int:
        """Blocks of an engine's cache: few, so that all are in use soon, and enough for the load beside a prompt."""
        return 4 * max(self.sizes) // BLOCK_TOKENS + LOADED_REQUESTS * 64


def bench_engine(directory: Path, progress: Progress, asked: NewPrompts, model: str | None = None) -> Report:
    """Measure the time to the first token of prompts that nobody has computed, in two engines that take turns.

    One has a connector that does nothing, the other kvoffd over the daemon in ``directory``; each is a vLLM with its
    core in a process of its own. ``model`` None means a tiny one. Raises BenchFailed, DaemonUnavailable.
    """
    found: dict[tuple[str, Case], list[float]] = {(name, case): [] for name in (IDLE, KVOFFD) for case in asked.cases}
    with (
        silent_stdout(),
        tempfile.TemporaryDirectory(prefix="kvoffd-bench-") as made,
        own_namespace(directory, "engine") as label,
    ):
        engines = []
        for name in (IDLE, KVOFFD):
            progress(f"starting vLLM: {name}")
            llm = _start(_connector(name, directory, label), label, model, asked, Path(made))
            engines.append((name, Engine(llm, asked)))
        for number in range(asked.rounds):
            progress(f"round {number + 1} of {asked.rounds}")
            # In another order each time, so that what grows or fades meets both alike.
            for name, engine in random.sample(engines, len(engines)):
                time.sleep(TURN_PAUSE_S)
                for case in asked.cases:
                    found[name, case] += engine.first_tokens(case, asked.prompts)
        del engines, engine, llm
    return Report("engine", FLOOR, [result for case in asked.cases for result in _results(case, found)])


def _results(case: Case, found: dict[tuple[str, Case], list[float]]) -> Iterator[Result]:
    tokens, loaded = case
    for name, share in (("p50", 0.5), ("p90", 0.9)):
        value, floor = (percentile(found[engine, case], share) * 1e6 for engine in (KVOFFD, IDLE))
        yield Result(f"{tokens:,} tokens, {'under load' if loaded else 'idle'}, {name}", value, "µs", floor)


class Engine:
    """One vLLM, warm: what only its first requests pay for is paid."""

    def __init__(self, llm: LLM, asked: NewPrompts) -> None:
        self._engine = llm.llm_engine
        self._serial = 0
        longest = max(asked.sizes)
        # Every block of the cache is written once: the first write to a page costs the kernel's time.
        for _ in range(asked.cache_blocks * BLOCK_TOKENS // longest + 1):
            self._first_token(longest)

    def first_tokens(self, case: Case, prompts: int) -> list[float]:
        """Return the seconds to the first token of new prompts, one after the other."""
        tokens, loaded = case
        found = []
        with self._load(LOADED_REQUESTS if loaded else 0):
            for _ in range(prompts):
                if loaded:
                    self._pass(random.uniform(STEP_S, 2 * STEP_S))
                else:
                    time.sleep(REST_S)
                found.append(self._first_token(tokens))
        return found

    def _first_token(self, tokens: int) -> float:
        prompt = _prompt(tokens)
        began = time.perf_counter()
        name = self._add(prompt, 1)
        while time.perf_counter() - began < FIRST_TOKEN_DEADLINE_S:
            if any(output.request_id == name for output in self._engine.step()):
                return time.perf_counter() - began
        raise BenchFailed(f"vLLM gave no token within {FIRST_TOKEN_DEADLINE_S:.0f} s; see its own words above.")

    @contextmanager
    def _load(self, requests: int) -> Iterator[None]:
        names = [self._add(_prompt(BLOCK_TOKENS), LOADED_ANSWER) for _ in range(requests)]
        self._pass(10 * STEP_S)
        yield
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _pass(self, seconds: float) -> None:
        """Take the running requests' tokens for a while."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until and self._engine.has_unfinished_requests():
            self._engine.step()

    def _add(self, prompt: list[int], answer_tokens: int) -> str:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=answer_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        self._serial += 1
        name = str(self._serial)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name


def _prompt(tokens: int) -> list[int]:
    return random.choices(range(FIRST_TOKEN, LAST_TOKEN + 1), k=tokens)


def _start(connector: dict[str, Any], label: str, model: str | None, asked: NewPrompts, made: Path) -> LLM:
    (made / "config.json").write_text(json.dumps(TINY_LLAMA))
    longest = max(asked.sizes) + LOADED_ANSWER
    return start_vllm(
        ENVIRONMENT,
        model,
        model=model or str(made),
        served_model_name=label,
        load_format="auto" if model else "dummy",
        dtype="float32",
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=asked.cache_blocks,
        max_model_len=longest,
        max_num_batched_tokens=longest,
        skip_tokenizer_init=True,
        enforce_eager=True,
        seed=0,
        kv_transfer_config={"kv_role": "kv_both"} | connector,
    )


def _connector(name: str, directory: Path, salt: str) -> dict[str, Any]:
    if name == IDLE:
        module = "tests.bench.daemon.idle_connector"
        return {"kv_connector": "IdleConnector", "kv_connector_module_path": module}
    options = {"directory": str(directory), "salt": salt}
    return {"kv_connector": "KvoffdConnector", "kv_connector_extra_config": options}
