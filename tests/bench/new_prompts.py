"""What prompts feel of kvoffd beside a connector that does nothing, on an idle machine and on a busy one.

New prompts, and one that the engine has in its own cache. ``python -m tests.bench.new_prompts``, with the Python that
has vLLM, starts a daemon of its own. Busy means a busy loop of Python for each core, at normal priority.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffd_client import AdminClient
from kvoffd_client.testing import running_daemon
from tests.bench.report_file import markdown_table, percentile
from tests.kit.models import make_tiny_llama

if TYPE_CHECKING:
    from vllm import LLM

IDLE, KVOFFD = "does nothing", "kvoffd"
SIZES, CACHED_TOKENS = (64, 1024), 4096
BLOCK_TOKENS = 32
CACHE_BLOCKS = 4 * CACHED_TOKENS // BLOCK_TOKENS
"""Of an engine's cache: few, so that all are in use soon."""
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
REST_S = 0.03
"""Pause before a prompt: what the one before left to do is done by then."""
TURN_PAUSE_S = 0.3
"""Pause between the engines' turns: the threads of the one that ran spin for a while."""
DEADLINE_S = 30.0


class Engine:
    """One vLLM, warm: what only its first requests pay for is paid. And a prompt that it has computed."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.llm_engine
        self._serial = 0
        self._known = _prompt(CACHED_TOKENS)
        # Every block of the cache is written once: the first write to a page costs the kernel's time.
        for _ in range(CACHE_BLOCKS * BLOCK_TOKENS // CACHED_TOKENS + 1):
            self._first_token(_prompt(CACHED_TOKENS))

    def new(self, tokens: int, prompts: int) -> list[float]:
        """The seconds to the first token of new prompts, one after the other."""
        return [self._first_token(_prompt(tokens)) for _ in range(prompts)]

    def cached(self, prompts: int) -> list[float]:
        """The same of the known prompt; new prompts may have taken its place in the cache before."""
        return [self._first_token(self._known) for _ in range(prompts + 1)][1:]

    def _first_token(self, prompt: list[int]) -> float:
        from vllm import SamplingParams

        time.sleep(REST_S)
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
        self._serial += 1
        name = str(self._serial)
        began = time.perf_counter()
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while not any(output.request_id == name for output in self._engine.step()):
            assert time.perf_counter() < began + DEADLINE_S, "vLLM gives no token"
        return time.perf_counter() - began

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def _prompt(tokens: int) -> list[int]:
    return random.choices(range(3, 1000), k=tokens)


def start(model: Path, **connector: Any) -> Engine:
    os.environ.update(ENVIRONMENT)
    from vllm import LLM

    llm = LLM(
        model=str(model),
        dtype="float32",
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=CACHE_BLOCKS,
        max_model_len=CACHED_TOKENS + 1,
        max_num_batched_tokens=CACHED_TOKENS + 1,
        hf_overrides={"max_position_embeddings": CACHED_TOKENS + 1},
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_transfer_config={"kv_role": "kv_both"} | connector,
    )
    return Engine(llm)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.new_prompts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--loops", type=int, default=os.cpu_count() or 1, help="that keep the machine busy")
    parser.add_argument("--prompts", type=int, default=15, help="in a turn, of each size")
    options = parser.parse_args()
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    before = os.getloadavg()[0]
    with ExitStack() as stack:
        directory = stack.enter_context(running_daemon("512MiB"))
        model = make_tiny_llama(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tiny")
        with redirect_stdout(sys.stderr):
            engines = {
                IDLE: start(model, kv_connector="IdleConnector", kv_connector_module_path="tests.bench.idle_connector"),
                KVOFFD: start(
                    model, kv_connector="KvoffdConnector", kv_connector_extra_config={"directory": str(directory)}
                ),
            }
        for engine in engines.values():
            stack.callback(engine.close)
        for state in ("idle", "busy"):
            with busy_loops(options.loops if state == "busy" else 0):
                for _ in range(options.rounds):
                    # In another order each time, so that what grows or fades meets both alike.
                    for name, engine in random.sample(list(engines.items()), len(engines)):
                        time.sleep(TURN_PAUSE_S)
                        times = {f"{tokens:,}": engine.new(tokens, options.prompts) for tokens in SIZES}
                        times[f"{CACHED_TOKENS:,} in its cache"] = engine.cached(options.prompts)
                        for kind, seconds in times.items():
                            found.setdefault((kind, state), {IDLE: [], KVOFFD: []})[name] += seconds
        with AdminClient(directory) as admin:
            (namespace,) = admin.stats().namespaces
    print(f"Load average before: {before:.1f}. Lookups: {namespace.lookups}, late: {namespace.late_lookups}.\n")
    rows = [["ms to the first token, does nothing / kvoffd", "p50", "p90", "p99", "prompts"]]
    for (kind, state), sides in found.items():
        cells = [
            " / ".join(f"{1e3 * percentile(seconds, share):.2f}" for seconds in sides.values())
            for share in (0.5, 0.9, 0.99)
        ]
        rows.append([f"{kind} tokens, {state}", *cells, str(len(sides[KVOFFD]))])
    print(markdown_table(rows))


if __name__ == "__main__":
    main()
