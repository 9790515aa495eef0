"""Requests of every kind to one real engine: what it stored it gets back, and after its restart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvoffd_client import AdminClient
from tests.kit.engine import (
    BLOCK_TOKENS,
    Completion,
    EngineProcess,
    completions,
    full_blocks,
    prompt,
    wait_stored,
)
from tests.kit.models import TINY_LLAMA
from tests.kit.waiting import wait_until
from tests.kit.wire import books
from tests.vllm.engine_home import EngineHome

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LENGTH = 500
EMBEDDINGS = np.random.default_rng(3).standard_normal((LENGTH, TINY_LLAMA.hidden), np.float32)
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {"prompts": [prompt(1, LENGTH)]},
    "several-samples": {
        "prompts": [prompt(2, LENGTH)],
        # The likeliest token, but by sampling: vLLM allows n above 1 with no temperature of 0.
        "sampling": {"n": 3, "temperature": 1.0, "top_k": 1},
    },
    "cache-salt": {"prompts": [prompt(1, LENGTH)], "salt": "tenant"},
    "prompt-logprobs": {"prompts": [prompt(3, LENGTH)], "sampling": {"prompt_logprobs": 1}},
    "structured-output": {
        "prompts": [prompt(4, LENGTH)],
        "sampling": {"structured_outputs": {"regex": "[a-f]{40}"}, "detokenize": True},
    },
    "prompt-embeddings": {"prompts": [EMBEDDINGS]},
    "after-an-abort": {"prompts": [prompt(5, LENGTH)]},
}


@dataclass(frozen=True)
class Answers:
    """What each kind of request got, from an empty cache, from the daemon, and from it in a new process."""

    home: EngineHome
    cold: dict[str, Completion]
    warm: dict[str, Completion]
    restarted: dict[str, Completion]


def ask_each_kind(engine: EngineProcess) -> dict[str, Completion]:
    asked = {}
    for name, request in REQUESTS.items():
        if name == "after-an-abort":
            engine.call("abort", prompt=request["prompts"][0], steps=2)
        (asked[name],) = completions(engine.call("generate", **{"max_tokens": 16, **request}))
    return asked


def loaded_tokens(name: str) -> int:
    """How many tokens of a prompt are not computed when the daemon has it."""
    # vLLM reads no cache where it must say how likely each token of the prompt was.
    return 0 if name == "prompt-logprobs" else full_blocks(LENGTH)


@pytest.fixture(scope="module")
def answers(home: EngineHome) -> Iterator[Answers]:
    home.ensure_no_daemon()
    home.engine.forget()
    home.ensure_daemon()
    directory = home.directory
    cold = ask_each_kind(home.engine)
    wait_stored(directory)
    home.engine.forget()
    warm = ask_each_kind(home.engine)
    home.engine.kill()
    home.ensure_daemon()
    yield Answers(home, cold, warm, ask_each_kind(home.engine))
    after = books(directory)
    assert (after.load.failed_jobs, after.leases) == (0, 0)


@pytest.mark.parametrize("name", REQUESTS)
def test_request(name: str, answers: Answers) -> None:
    cold, warm, restarted = answers.cold[name], answers.warm[name], answers.restarted[name]
    assert warm.tokens == restarted.tokens == cold.tokens
    assert len(cold.tokens) == 16 * (3 if name == "several-samples" else 1)
    # Of several samples the last one finds the first one's blocks, and an aborted request has stored what it computed.
    assert cold.cached == 0 or name in ("several-samples", "after-an-abort")
    assert [warm.cached, restarted.cached] == [loaded_tokens(name)] * 2


def test_a_prompt_that_comes_in_parts(answers: Answers) -> None:
    """Streaming input: the first part is loaded, and a request of the whole prompt finds the blocks of all parts."""
    engine, directory = answers.home.engine, answers.home.directory
    parts = [prompt(80, LENGTH), prompt(81, 150), prompt(82, 90)]
    engine.forget()
    cold = engine.call("stream", parts=parts, max_tokens=8)
    wait_stored(directory)
    engine.forget()
    warm = engine.call("stream", parts=parts, max_tokens=8)
    assert [tokens for tokens, _ in warm] == [tokens for tokens, _ in cold]
    assert (cold[0][1], warm[0][1]) == (0, full_blocks(LENGTH))
    wait_stored(directory)
    # vLLM takes the last token of an answer back when the next part comes.
    whole = [*parts[0], *cold[0][0][:-1], *parts[1], *cold[1][0][:-1], *parts[2]]
    engine.forget()
    (answer,) = engine.generate([whole], max_tokens=8)
    assert (answer.tokens, answer.cached) == (cold[2][0], full_blocks(len(whole)))


def test_what_vllms_own_cache_has_is_no_miss(answers: Answers) -> None:
    """What operators see as missed is what vLLM computed, by its own counters."""
    engine, directory = answers.home.engine, answers.home.directory
    asked = 0

    def traffic() -> Any:
        with AdminClient(directory) as admin:
            return admin.stats().since_start

    def ask(*seeds: int, length: int = LENGTH) -> None:
        nonlocal asked
        engine.generate([prompt(seed, length) for seed in seeds], max_tokens=1)
        asked += len(seeds) * (length // BLOCK_TOKENS)
        wait_stored(directory)

    def computed() -> float:
        """Tokens of prompts that vLLM computed."""
        found = engine.metrics()
        own, external = (found[f"vllm:{name}prefix_cache_hits"] for name in ("", "external_"))
        return found["vllm:prefix_cache_queries"] - own - external

    engine.forget()
    time.sleep(1.5)  # earlier prompts are reported once a second
    before, computed_before = traffic(), computed()
    ask(90, 91)
    with AdminClient(directory) as admin:
        admin.clear()
    ask(90, 91)
    ask(90, length=LENGTH + 200)
    engine.forget()
    ask(90, length=LENGTH + 200)
    after = wait_until(lambda: (found := traffic()).asked_keys >= before.asked_keys + asked and found)
    assert after.asked_keys == before.asked_keys + asked
    missed = sum(after.misses.values()) - sum(before.misses.values())
    tails = 4 * (LENGTH % BLOCK_TOKENS) + 2 * ((LENGTH + 200) % BLOCK_TOKENS)
    assert missed * BLOCK_TOKENS == computed() - computed_before - tails
    assert missed == 2 * (LENGTH // BLOCK_TOKENS) + 6
    assert after.loaded_keys - before.loaded_keys == (LENGTH + 200) // BLOCK_TOKENS
    assert after.not_needed_keys - before.not_needed_keys == 3 * (LENGTH // BLOCK_TOKENS)
