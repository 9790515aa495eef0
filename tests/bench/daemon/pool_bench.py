"""The bench pool: a real vLLM's time to the first token, with and without blocks in the pool."""

from __future__ import annotations

import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from kvoffd_client.admin_client import AdminClient
from tests.bench.daemon.results import BenchFailed, Progress, Report, Result

if TYPE_CHECKING:
    from vllm import LLM

FLOOR = "the same prompts again while the engine still has their blocks itself: nothing but the tail is computed"
FIRST_TOKEN, LAST_TOKEN = 3, 999
"""Every vocabulary has these."""
NO_VLLM = "This bench runs a vLLM, which is not installed here; run it with the Python that your engines run with."
ANSWER_TOKENS = 8
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_NUM_OF_RESERVED_CPU": "1", "VLLM_NO_USAGE_STATS": "1"}
"""Settings of vLLM on CPU unless the user has others: GiB of blocks, and a core that is left to the daemon."""
WAIT_S = 60.0
QUIET_S = 0.5
POLL_S = 0.05


def bench_pool(directory: Path, progress: Progress, model: str, tokens: int, prompts: int = 3) -> Report:
    """Measure vLLM's own time to the first token of ``prompts`` prompts of ``tokens`` random tokens, one by one.

    Cold: nobody has computed them. Warm: the engine has lost its own cache, the daemon has the blocks. The answers of
    both must agree. Raises BenchFailed, DaemonUnavailable.
    """
    # One token more than whole blocks have: vLLM always computes the last one.
    texts = [random.choices(range(FIRST_TOKEN, LAST_TOKEN + 1), k=tokens + 1) for _ in range(prompts + 1)]
    with silent_stdout(), own_namespace(directory, "pool") as label:
        progress("starting vLLM")
        llm = _start(directory, label, model, tokens)
        progress("prompts that nobody has computed")
        # An engine's first request pays for more than its prompt.
        _first_tokens(llm, texts[:1])
        cold, answers = _first_tokens(llm, texts[1:])
        progress("the same prompts from the engine's own cache")
        own, _ = _first_tokens(llm, texts[1:])
        _wait_for_stores(directory)
        _wait(llm.reset_prefix_cache, "vLLM did not reset its prefix cache")
        progress("the same prompts from the pool")
        warm, again = _first_tokens(llm, texts[1:])
        del llm
    if again != answers:
        raise BenchFailed("vLLM answered otherwise with blocks from the pool; please report it, with the model's name.")
    return Report(
        "pool",
        FLOOR,
        [
            Result(f"first of {tokens:,} tokens' answer, cold", median(cold), "ms", median(own)),
            Result(f"first of {tokens:,} tokens' answer, from the pool", median(warm), "ms", median(own)),
        ],
    )


def start_vllm(environment: Mapping[str, str], name: str | None, **settings: Any) -> LLM:
    """Start a vLLM with these settings, and in this environment where the user has no other. Raises BenchFailed.

    ``name``: that of the model, for the error.
    """
    for variable, value in environment.items():
        os.environ.setdefault(variable, value)
    try:
        from vllm import LLM
    except ImportError as error:
        raise BenchFailed(NO_VLLM) from error
    try:
        return LLM(**settings)
    except (ValueError, RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise BenchFailed(f"vLLM did not start with the model {name} ({reason}); its own words are above.") from error


@contextmanager
def own_namespace(directory: Path, bench: str) -> Iterator[str]:
    """Yield a label and salt for a bench's engines. Drop their blocks at the end."""
    label = f"measured {bench} {secrets.token_hex(4)}"
    try:
        yield label
    finally:
        with AdminClient(directory) as admin:
            for one in admin.namespaces().namespaces:
                if one.label == label:
                    admin.clear(one.namespace)


def _start(directory: Path, label: str, model: str, tokens: int) -> LLM:
    return start_vllm(
        ENVIRONMENT,
        model,
        model=model,
        served_model_name=label,
        skip_tokenizer_init=True,
        max_model_len=tokens + 1 + ANSWER_TOKENS,
        enforce_eager=True,
        disable_log_stats=False,
        seed=0,
        kv_transfer_config={
            "kv_connector": "KvoffdConnector",
            "kv_role": "kv_both",
            # A bench waits for slow answers instead of calling them misses.
            "kv_connector_extra_config": {
                "directory": str(directory),
                "salt": label,
                "lookup_deadline_ms": 2000.0,
                "do_no_harm": False,
            },
        },
    )


def _first_tokens(llm: LLM, texts: list[list[int]]) -> tuple[list[float], list[list[int]]]:
    """Return for each prompt the milliseconds from arrival to first token, as vLLM counts them; and the answers."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
    times: list[float] = []
    answers: list[list[int]] = []
    for text in texts:
        (output,) = llm.generate([{"prompt_token_ids": text}], sampling, use_tqdm=False)
        if output.metrics is None:
            raise BenchFailed("vLLM measured no times; its statistics are off.")
        times.append(output.metrics.first_token_latency * 1000.0)
        answers.append(list(output.outputs[0].token_ids))
    return times, answers


def _wait_for_stores(directory: Path) -> None:
    """Wait until the daemon has nothing to copy and has held the same blocks for QUIET_S."""
    with AdminClient(directory) as admin:
        last: tuple[int, int] = (-1, -1)
        since = time.monotonic()

        def unchanged_for_a_while() -> bool:
            nonlocal last, since
            stats = admin.stats()
            state = (stats.store.jobs, stats.pool.of("ready"))
            if state != last or stats.store.queued_jobs or stats.store.running_jobs:
                last, since = state, time.monotonic()
            return time.monotonic() - since > QUIET_S

        _wait(unchanged_for_a_while, "The daemon did not finish storing")


def _wait(condition: Callable[[], bool], failure: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise BenchFailed(f"{failure} within {WAIT_S:.0f} s; see the log of the engine and of the daemon.")
        time.sleep(POLL_S)


@contextmanager
def silent_stdout() -> Iterator[None]:
    """Send what vLLM and its processes write to standard output, where the report goes, to standard error."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
