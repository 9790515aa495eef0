"""A vLLM with its asynchronous front end, as ``vllm serve`` has it, in a process of its own; and what it is asked.

Times are a client's: from a request's sending to the output that brings a token.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count, pairwise
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.kit.closing import Starting

START_S, ANSWER_S = 100.0, 90.0
RESET_S, DECODES_S = 20.0, 20.0
MANY_TOKENS = 100_000
"""More than any request gets."""
MAX_ERRORS, TAIL_CHARACTERS = 10, 1500
ENVIRON = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # Of the build for CPU, on a small machine.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
}
FENCE_TIMES = "tests.bench.gpu.fence_times.FenceTimes"
SPAWN = multiprocessing.get_context("spawn")

Asked = tuple[int, int]
"""A prompt: its seed and its length in tokens."""


class Answer(NamedTuple):
    """What became of a prompt: milliseconds to its first token, tokens that were not computed, tokens, log
    probabilities of these, and why it ended."""

    ttft_ms: float
    cached: int
    tokens: list[int]
    logprobs: list[float]
    finish: str


class Engine(Starting):
    """One engine; what it says is in ``log``. Its processes are a group within this process's session.

    ``directory``: where its log is until it is closed. ``patience``: how many times longer than on a GPU it may take.
    """

    def __init__(
        self, settings: Mapping[str, Any], environ: Mapping[str, str], directory: Path, patience: float = 1.0
    ) -> None:
        self._own = Path(tempfile.mkdtemp(prefix="engine-", dir=directory))
        self._settings = {"worker_extension_cls": FENCE_TIMES, **settings}
        self._environ = {**ENVIRON, **environ}
        self._process: SpawnProcess | None = None
        self._connection: Connection[Any, Any] | None = None
        self.start_s = 0.0
        self._patience = patience

    @property
    def log(self) -> str:
        path = self._own / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def _last_words(self) -> str:
        """Lines with errors, since the cause is far above the end, and the end."""
        errors = [line[:400] for line in self.log.splitlines() if "Error" in line]
        return "\n".join([*errors[:MAX_ERRORS], "...", self.log[-TAIL_CHARACTERS:]])

    def start(self) -> Engine:
        began = time.monotonic()
        self._connection, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=run, args=(theirs, self._settings, self._own / "log"))
        with theirs, patch.dict(os.environ, self._environ):
            self._process.start()
        self._receive(START_S)
        self.start_s = time.monotonic() - began
        return self

    def call(self, command: str, **arguments: Any) -> Any:
        self._connection.send((command, arguments))
        return self._receive(ANSWER_S)

    def ask(
        self, prompts: Sequence[Asked], tokens: int, per_second: float | None = None, *, logprobs: bool = False
    ) -> list[Answer]:
        """The prompts one after the other, or at this rate, whether those before have ended or not."""
        how = {"tokens": tokens, "per_second": per_second, "logprobs": logprobs}
        answers: list[Answer] = self.call("ask", prompts=prompts, **how)
        return answers

    def _receive(self, deadline_s: float) -> Any:
        deadline_s *= self._patience
        if not self._connection.poll(deadline_s):
            raise AssertionError(f"the engine did not answer within {deadline_s:g} s: {self._last_words}")
        try:
            kind, value = self._connection.recv()
        except EOFError:
            raise AssertionError(f"the engine ended: {self._last_words}") from None
        if kind == "error":
            raise AssertionError(f"{value}; {self._last_words}")
        return value

    def kill(self) -> None:
        """SIGKILL to all its processes. It can be started again."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()  # it may have no group yet
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._own, ignore_errors=True)


# --- in its process ---------------------------------------------------------------------------------

NUMBERS = count()
LAST_TOKEN = 1000
"""Below the tiny models' vocabularies."""


def run(connection: Connection[Any, Any], settings: dict[str, Any], log: Path) -> None:
    os.setpgid(0, 0)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # multiprocessing has its parent's path alone
    with connection, suppress(EOFError):
        asyncio.run(serve(connection, settings))


async def serve(connection: Connection[Any, Any], settings: dict[str, Any]) -> None:
    """Make the engine, then answer ``(command, arguments)`` until the other end is closed."""
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))
    except Exception as error:
        connection.send(("error", f"{type(error).__name__}: {error}"))
        raise
    connection.send(("ok", None))
    while True:
        command, arguments = await asyncio.to_thread(connection.recv)
        try:
            connection.send(("ok", await COMMANDS[command](engine, **arguments)))
        except Exception as error:
            connection.send(("error", f"{type(error).__name__}: {error}"))


def tokens_of(prompt: Asked) -> list[int]:
    seed, length = prompt
    return random.Random(seed).choices(range(3, LAST_TOKEN), k=length)


async def generate(
    engine: Any, prompt: Asked, tokens: int, logprobs: bool = False, arrivals: list[float] | None = None
) -> Answer:
    """One prompt's answer, greedy. ``arrivals`` gets the times of its outputs."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    arrivals = [] if arrivals is None else arrivals
    wanted = SamplingParams(
        max_tokens=tokens,
        temperature=0,
        detokenize=False,
        ignore_eos=True,
        logprobs=0 if logprobs else None,
        output_kind=RequestOutputKind.DELTA,
    )
    given = {"prompt_token_ids": tokens_of(prompt)}
    made: list[int] = []
    found: list[float] = []
    finish, cached, began = "", 0, time.perf_counter()
    async for output in engine.generate(given, wanted, f"bench-{next(NUMBERS)}"):
        arrivals.append(time.perf_counter())
        (sample,) = output.outputs
        made += sample.token_ids
        found += [next(iter(step.values())).logprob for step in sample.logprobs or ()]
        finish, cached = str(sample.finish_reason), output.num_cached_tokens or 0
    return Answer(1000 * (arrivals[0] - began), cached, made, found, finish)


async def ask(
    engine: Any, prompts: Sequence[Asked], tokens: int, per_second: float | None, logprobs: bool
) -> list[Answer]:
    if per_second is None:
        return [await generate(engine, prompt, tokens, logprobs) for prompt in prompts]

    async def later(number: int, prompt: Asked) -> Answer:
        await asyncio.sleep(number / per_second)
        return await generate(engine, prompt, tokens, logprobs)

    return await asyncio.gather(*(later(number, prompt) for number, prompt in enumerate(prompts)))


async def beside(
    engine: Any, decoding: Sequence[Asked], prompts: Sequence[Asked], rest_s: float, seconds: float
) -> dict[str, Any]:
    """Steps of requests that decode, while other prompts come one after the other, with ``rest_s`` between them."""
    arrivals: list[list[float]] = [[] for _ in decoding]
    first, *_ = running = [
        asyncio.create_task(generate(engine, prompt, MANY_TOKENS, arrivals=times))
        for prompt, times in zip(decoding, arrivals, strict=True)
    ]
    events: list[tuple[float, float]] = []
    answers: list[Answer] = []
    try:
        async with asyncio.timeout(DECODES_S):
            while not all(len(times) > 1 for times in arrivals):  # noqa: ASYNC110 - before anything is measured
                await asyncio.sleep(0.001)
        await asyncio.sleep(rest_s)
        until = time.perf_counter() + seconds
        for prompt in prompts:
            if time.perf_counter() > until or first.done():
                break
            sent_at, times = time.perf_counter(), list[float]()
            answers.append(await generate(engine, prompt, 1, arrivals=times))
            events.append((sent_at, times[0]))
            await asyncio.sleep(2 * rest_s)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    began = max(times[1] for times in arrivals)
    gaps = gaps_by_state([at for at in arrivals[0] if at >= began], events, rest_s)
    return {"gaps_ms": gaps, "ttft_ms": [one.ttft_ms for one in answers], "cached": [one.cached for one in answers]}


def gaps_by_state(
    arrivals: Sequence[float], events: Sequence[tuple[float, float]], rest_s: float
) -> dict[str, list[float]]:
    """Milliseconds between the tokens of one request, by what else was there then.

    ``during`` an event, from a prompt's sending to its first token; ``after`` it, for ``rest_s``; else ``alone``.
    """
    gaps: dict[str, list[float]] = {"alone": [], "during": [], "after": []}
    for before, after in pairwise(arrivals):
        if any(before < answered_at and after > sent_at for sent_at, answered_at in events):
            state = "during"
        elif any(before < answered_at + rest_s and after > answered_at for _, answered_at in events):
            state = "after"
        else:
            state = "alone"
        gaps[state].append(1000 * (after - before))
    return gaps


async def reset(engine: Any) -> None:
    """Clear the engine's own prefix cache, which vLLM refuses while blocks are used, as by stores that run."""
    deadline = time.monotonic() + RESET_S
    while not await engine.reset_prefix_cache():
        assert time.monotonic() < deadline, "vLLM's own cache cannot be reset"
        await generate(engine, (-next(NUMBERS), 40), 2)  # an engine reads of ended stores in its steps
        await asyncio.sleep(0.02)


async def fence_times(engine: Any) -> list[float]:
    """Milliseconds of each call of handle_preemptions since the last time; the slowest worker's."""
    found: list[list[float]] = await engine.collective_rpc("take_fence_times")
    return max(found, key=sum)


async def metrics(engine: Any) -> dict[str, float]:
    from vllm.v1.metrics.reader import get_metrics_snapshot

    return {one.name: one.value for one in get_metrics_snapshot() if hasattr(one, "value")}


COMMANDS = {"ask": ask, "beside": beside, "fence_times": fence_times, "metrics": metrics, "reset": reset}
