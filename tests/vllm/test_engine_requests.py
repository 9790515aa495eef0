"""Requests of every kind to one real engine: what it stored it gets back, and after its restart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffd_client import AdminClient
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import (
    BLOCK_TOKENS,
    Completion,
    EngineProcess,
    completions,
    full_blocks,
    prompt,
    wait_connected,
    wait_stats,
)
from tests.kit.models import TINY_LLAMA, make_tiny_llama, write_lora_adapter
from tests.kit.ports import free_port
from tests.kit.router_daemon import Subscriber
from tests.kit.shapes import add_tokenizer, wait_stored

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
    """What each kind of request got, from an empty cache, from the daemon, and from it in a new process.

    ``told`` is what a router that came after the first of them was told: by hash of a block its parent and its tokens.
    """

    engine: EngineProcess
    admin: AdminClient
    cold: dict[str, Completion]
    warm: dict[str, Completion]
    restarted: dict[str, Completion]
    told: dict[int, tuple[int | None, tuple[int, ...]]]


def told_blocks(port: int, admin: AdminClient) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    """What a router is told that comes now."""
    routers = admin.stats().routers
    assert routers is not None
    with Subscriber(port) as router:
        while len(router.blocks) < routers.told_blocks:
            assert router.take_one()
        return {block: found for (_, block), found in router.blocks.items()}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    model: Path = add_tokenizer(make_tiny_llama(tmp_path_factory.mktemp("models") / "model"))
    port = free_port()
    with (
        DaemonProcess("64MiB", event_address=f"127.0.0.1:{port}") as daemon,
        AdminClient(daemon.directory) as admin,
    ):
        engine = EngineProcess(
            model,
            daemon.directory,
            skip_tokenizer_init=False,
            enable_prompt_embeds=True,
            enable_lora=True,
            max_lora_rank=8,
            # Each prompt is computed in several steps, as long ones are.
            max_num_batched_tokens=128,
            max_num_seqs=8,
            scheduling_policy="priority",
        )

        def ask() -> dict[str, Completion]:
            asked = {}
            for name, request in REQUESTS.items():
                if name == "after-an-abort":
                    engine.call("abort", prompt=request["prompts"][0], steps=3)
                (asked[name],) = completions(engine.call("generate", **{"max_tokens": 16, **request}))
            return asked

        try:
            engine.start()
            wait_connected(admin)
            cold = ask()
            wait_stored(admin)
            told = told_blocks(port, admin)
            engine.forget()
            warm = ask()
            engine.kill()
            engine.start()
            wait_connected(admin)
            yield Answers(engine, admin, cold, warm, ask(), told)
            stats = admin.stats()
            assert (stats.load.failed_jobs, stats.store.failed_jobs, stats.leases) == (0, 0, 0)
        finally:
            engine.close()


@pytest.mark.parametrize("name", REQUESTS)
def test_request(name: str, answers: Answers) -> None:
    cold, warm, restarted = answers.cold[name], answers.warm[name], answers.restarted[name]
    assert warm.tokens == restarted.tokens == cold.tokens
    assert len(cold.tokens) == 16 * (3 if name == "several-samples" else 1)
    # Of several samples the last one finds the first one's blocks, and an aborted request has stored what it computed.
    assert cold.cached == 0 or name in ("several-samples", "after-an-abort")
    # vLLM reads no cache where it must say how likely each token of the prompt was.
    expected = 0 if name == "prompt-logprobs" else full_blocks(LENGTH)
    assert [warm.cached, restarted.cached] == [expected] * 2


def test_routers_are_told_the_tokens_of_prompts_whose_hashes_are_of_tokens_alone(answers: Answers) -> None:
    by_tokens = {(parent, tokens): block for block, (parent, tokens) in answers.told.items()}
    assert len(by_tokens) == len(answers.told), "a salted prompt was told as the plain one of its tokens"
    for name in ("plain", "several-samples", "prompt-logprobs", "structured-output", "after-an-abort"):
        (tokens,) = REQUESTS[name]["prompts"]
        parent = None
        for start in range(0, full_blocks(LENGTH), BLOCK_TOKENS):
            parent = by_tokens[parent, tuple(tokens[start : start + BLOCK_TOKENS])]
    first = {tuple(one["prompts"][0][:BLOCK_TOKENS]) for name, one in REQUESTS.items() if name != "prompt-embeddings"}
    assert {tokens for parent, tokens in answers.told.values() if parent is None} == first


def test_blocks_follow_the_content_of_a_lora_adapter_that_is_replaced_at_its_path(
    answers: Answers, tmp_path: Path
) -> None:
    engine, admin, everything = answers.engine, answers.admin, full_blocks(LENGTH)

    def once(path: Path | None, name: str = "an adapter", number: int = 1) -> tuple[list[int], int]:
        """The tokens of a prompt with an adapter, and how many of the prompt's own were not computed."""
        adapter = (name, number, str(path)) if path else None
        (completion,) = engine.generate([prompt(6, LENGTH)], adapter=adapter)
        return completion.tokens, completion.cached

    def wait_blocks(more: int) -> None:
        wait_stats(admin, lambda stats: stats.namespaces[0].ready_blocks == before + more * (LENGTH // BLOCK_TOKENS))

    before = admin.stats().namespaces[0].ready_blocks
    adapter = write_lora_adapter(tmp_path / "adapter", seed=1)
    first, cached = once(adapter)
    assert cached == 0
    wait_blocks(1)
    engine.forget()
    assert once(adapter) == (first, everything)
    plain, cached = once(None)
    assert cached == 0
    assert plain != first
    wait_blocks(2)

    # Its files are replaced while it is loaded: what is in memory is still the first.
    write_lora_adapter(adapter, seed=2)
    engine.forget()
    assert once(adapter) == (first, 0)
    assert "the files of the LoRA adapter an adapter changed" in engine.log
    # It is loaded anew, as that line says.
    engine.forget(connector=True)
    second, cached = once(adapter, number=2)
    assert cached == 0
    assert second != first
    wait_blocks(3)
    engine.forget()
    assert once(adapter, number=2) == (second, everything)
    assert once(None) == (plain, everything)
    # The control: the same content at another path, which no block has.
    other = write_lora_adapter(tmp_path / "other", seed=2)
    assert once(other, "another", 3) == (second, 0)
