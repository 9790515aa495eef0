"""Real engines of many shapes: what an engine stored it gets back, and after its restart, and no token changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.daemon import DaemonProcess
from tests.kit.engine import Completion, EngineProcess, cached, full_blocks, prompt, tokens, wait_connected, wait_stored
from tests.kit.models import make_draft, make_tiny_llama
from tests.kit.shapes import (
    PROMPTS,
    Shape,
    add_tokenizer,
    check_shape,
    make_tiny_deepseek,
    make_tiny_gemma3,
    make_tiny_glm_with_mtp,
    make_tiny_llava,
    make_tiny_qwen3_next,
    make_transformers_model,
    with_images,
)
from tests.kit.stored_blocks import keys_of, loaded
from tests.kit.wire import KvSubscriber, books

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
TORCHVISION = Path(__file__).parents[2] / ".venv-torchvision"


def of(config_class: str, **settings: Any) -> Callable[[Path], Path]:
    return lambda path: make_transformers_model(path, config_class, **settings)


SHAPES = {
    "gpt-oss": Shape(
        of("GptOssConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=128), {"num_blocks": 800}
    ),
    "gemma-3n": Shape(
        of(
            "Gemma3nTextConfig",
            num_hidden_layers=6,
            layer_types=[*["sliding_attention"] * 2, "full_attention"] * 2,
            sliding_window=256,
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=32,
            vocab_size_per_layer_input=1024,
            laurel_rank=16,
            activation_sparsity_pattern=[0.0] * 6,
            tie_word_embeddings=True,
        ),
        {"num_blocks": 1600},
    ),
    "mla": Shape(make_tiny_deepseek, varies=True),
    # vLLM's CPU kernel of linear attention takes nothing but bfloat16.
    "qwen3-next": Shape(make_tiny_qwen3_next, {"num_blocks": 800, "dtype": "bfloat16"}, varies=True),
    "prefix-match-unit": Shape(
        make_tiny_qwen3_next,
        {"num_blocks": 800, "dtype": "bfloat16", "prefix_match_unit": 32},
        varies=True,
    ),
    "fp8-kv": Shape(settings={"kv_cache_dtype": "fp8"}),
    "fp8-e5m2-kv": Shape(settings={"kv_cache_dtype": "fp8_e5m2"}),
    "compiled": Shape(settings={"enforce_eager": False}),
    "small-chunks": Shape(settings={"max_num_batched_tokens": 64, "max_num_seqs": 4}),
    "prefix-caching-off": Shape(
        settings={"enable_prefix_caching": False}, cached=[full_blocks(len(each)) for each in PROMPTS]
    ),
    "blocks-per-chunk": Shape(extra={"blocks_per_chunk": 4}, cached=[(len(each) - 1) // 128 * 128 for each in PROMPTS]),
    "generated-tokens": Shape(extra={"offload_prompt_only": False}, request={"max_tokens": 80}),
    # Drafts need blocks beside those of a load: with 30 blocks the first prompt would be computed.
    "n-gram": Shape(
        settings={
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 40, "prompt_lookup_max": 4},
            "num_blocks": 48,
            "max_model_len": 29 * 32,
        },
    ),
    "sha256-cbor": Shape(settings={"prefix_caching_hash_algo": "sha256_cbor"}),
    "bfloat16": Shape(settings={"dtype": "bfloat16"}, varies=True),
    "async-scheduling-is-forced-off": Shape(settings={"async_scheduling": True}),
    "hybrid-tensor-parallel": Shape(make_tiny_gemma3, {"num_blocks": 1600, "tensor_parallel": 2}, workers=2),
}


REPEATING = [list(range(10, 60)) * 12, list(range(100, 133)) * 10]
"""Tokens that repeat, so that some are proposed and accepted."""


def patient_daemon() -> DaemonProcess:
    """For ranks that starve each other."""
    return DaemonProcess("256MiB", limits={"lease_ttl_s": 200, "job_deadline_s": 200})


def stored_by(model: Path, ranks: int, *, varies: bool = False) -> int:
    """Bytes that an engine of so many ranks stores, which it gets back."""
    shape = Shape(settings={"tensor_parallel": ranks}, varies=varies, workers=ranks)
    with patient_daemon() as daemon:
        return check_shape(shape, model, daemon).store.bytes


@pytest.mark.usefixtures("early_server")
def test_tensor_parallel(tmp_path: Path) -> None:
    shape = Shape(settings={"tensor_parallel": 2}, workers=2)
    with patient_daemon() as daemon:
        check_shape(shape, shape.make(tmp_path / "model"), daemon, restart=False)


@pytest.mark.shapes
@pytest.mark.parametrize("name", SHAPES)
def test_shape(name: str, tmp_path: Path) -> None:
    if name.startswith("fp8") and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("vLLM has no FP8 KV cache on a CPU without AVX-512")
    shape = SHAPES[name]
    with patient_daemon() as daemon:
        check_shape(shape, shape.make(tmp_path / name), daemon)


@pytest.mark.shapes
@pytest.mark.skipif(not TORCHVISION.exists(), reason="make shapes fetches torchvision")
def test_images(tmp_path: Path) -> None:
    """The same text behind other images has blocks of its own."""
    shape = Shape(
        make_tiny_llava,
        {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 2}, "fork": False},
        environ={"PYTHONPATH": str(TORCHVISION)},
        prompts=[with_images(seeds) for seeds in ([1], [2], [3, 1], [4, 1])],
    )
    with patient_daemon() as daemon:
        check_shape(shape, shape.make(tmp_path / "llava"), daemon)


@pytest.mark.shapes
def test_latent_attention_is_stored_once_however_many_ranks_have_it(tmp_path: Path) -> None:
    """vLLM's replicated layout: one rank stores, and all ranks load its shard."""
    model = make_tiny_deepseek(tmp_path / "model")
    assert stored_by(model, 1, varies=True) == stored_by(model, 2, varies=True) > 0


@pytest.mark.shapes
def test_heads_that_several_ranks_have_are_stored_by_each_of_them(tmp_path: Path) -> None:
    """One KV head at TP 2: vLLM gives each rank a copy, and only for latent attention says that they are equal."""
    model = make_transformers_model(tmp_path / "model", "LlamaConfig", num_key_value_heads=1)
    assert stored_by(model, 2) == 2 * stored_by(model, 1) > 0


@pytest.mark.shapes
@pytest.mark.parametrize(("method", "layers"), [("eagle", 1), ("mtp", 1), ("draft_model", 4)])
def test_a_draft_models_blocks_do_not_depend_on_draft_tokens(method: str, layers: int, tmp_path: Path) -> None:
    """One engine loads what another stored that drafts fewer tokens, and both would have stored the same bytes."""
    if method == "mtp":
        model = draft = make_tiny_glm_with_mtp(tmp_path / "model")
    else:
        model, draft = make_tiny_llama(tmp_path / "model"), make_draft(tmp_path / "draft", eagle=method == "eagle")
    with DaemonProcess("256MiB") as daemon, KvSubscriber(daemon.directory) as heard:

        def answers(tokens: int, salt: str) -> list[Completion]:
            drafting = {"method": method, "model": str(draft), "num_speculative_tokens": tokens}
            options = {"offload_prompt_only": False, "salt": salt}
            with EngineProcess(
                model, daemon.directory, patient=True, extra_config=options, speculative_config=drafting
            ) as engine:
                wait_connected(daemon.directory)
                found = engine.generate(REPEATING, max_tokens=80)
                wait_stored(daemon.directory)
                engine.forget()
                again = engine.generate(REPEATING, max_tokens=80)
                counted = engine.metrics()
            accepted = counted["vllm:spec_decode_num_accepted_tokens"]
            assert 0 < accepted < counted["vllm:spec_decode_num_draft_tokens"]
            assert [answer.tokens for answer in again] == [answer.tokens for answer in found]
            own[salt, tokens] = cached(again)
            return found

        own: dict[tuple[str, int], list[int]] = {}
        first, other, shared = answers(3, "one"), answers(4, "two"), answers(4, "one")
        assert [answer.cached for answer in (*first, *other)] == [0] * 4
        assert cached(shared) == own["one", 3] == own["two", 4]
        assert min(own["one", 3]) > 0
        for some in (other, shared):
            assert [answer.tokens for answer in some] == [answer.tokens for answer in first]
        one, two = (name for name, found in books(daemon.directory).namespaces.items() if found.stored_blocks)
        facts = json.loads(books(daemon.directory).listed[one].description)
        assert facts["groups"][0]["layers"] == 4 + layers
        keys = [key for key in keys_of(heard, one) if key in keys_of(heard, two)]
        assert len(keys) > sum(full_blocks(len(each)) for each in REPEATING) // 32
        with loaded(daemon.directory, one, keys) as mine, loaded(daemon.directory, two, keys) as others:
            left, right = (each._pages[0].view(np.float32) for each in (mine, others))
            np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-3)


@pytest.mark.shapes
def test_embeddings_of_a_causal_model(tmp_path: Path) -> None:
    asked = {"prompts": list(PROMPTS)}
    with DaemonProcess("64MiB") as daemon:
        model = add_tokenizer(make_tiny_llama(tmp_path / "model"))
        engine = EngineProcess(
            model, daemon.directory, patient=True, runner="pooling", convert="embed", skip_tokenizer_init=False
        )
        with engine:
            wait_connected(daemon.directory)
            cold = engine.call("embed", **asked)
            wait_stored(daemon.directory)
            engine.forget()
            warm = engine.call("embed", **asked)
        for (computed, none), (loaded, cached), tokens in zip(cold, warm, PROMPTS, strict=True):
            assert (none, cached) == (0, full_blocks(len(tokens)))
            assert loaded == pytest.approx(computed, rel=1e-3, abs=1e-5)
        assert cold[0][0] != pytest.approx(cold[1][0], rel=1e-2, abs=1e-3)
        assert books(daemon.directory).load.failed_jobs == 0


NATS = 0.002
"""How far a log probability in float32 may be off; in bfloat16 as far as vLLM's own cache is, and this."""
EXACT_BLOCKS = [1, 2, 3, 4, 5, 8, 9, 12]
"""Blocks of prompts that end with a block; of 4, 8 and 12 with a chunk of four."""
EXACT: dict[str, Shape] = {
    "full": Shape(),
    "chunks": Shape(extra={"blocks_per_chunk": 4}),
    "eagle": Shape(),
    "eagle-chunks": Shape(extra={"blocks_per_chunk": 4}),
    "tails": Shape(
        make_tiny_qwen3_next, {"dtype": "bfloat16", "num_blocks": 800, "prefix_match_unit": 32}, varies=True
    ),
}


@pytest.mark.shapes
@pytest.mark.parametrize("name", EXACT)
def test_prompts_of_whole_blocks_and_chunks_have_the_log_probabilities_of_computed_ones(
    name: str, tmp_path: Path
) -> None:
    """And those on either side. A load that brings other bytes is told from a good one."""
    shape = EXACT[name]
    settings: dict[str, Any] = dict(shape.settings)
    if "eagle" in name:
        draft = make_draft(tmp_path / "draft", eagle=True)
        settings["speculative_config"] = {"method": "eagle", "model": str(draft), "num_speculative_tokens": 3}
    with (
        DaemonProcess("512MiB", faults=True, limits={"lease_ttl_s": 200, "job_deadline_s": 200}) as daemon,
        EngineProcess(
            shape.make(tmp_path / "model"), daemon.directory, patient=True, extra_config=dict(shape.extra), **settings
        ) as engine,
    ):
        wait_connected(daemon.directory)
        (namespace,) = books(daemon.directory).listed.values()
        block = json.loads(namespace.description)["groups"][0]["tokens_per_block"]
        lengths = [blocks * block + more for blocks in EXACT_BLOCKS for more in (-1, 0, 1)]
        prompts = [prompt(length, length) for length in lengths if length < 4000]

        def ask() -> list[Completion]:
            return [engine.generate([each], max_tokens=4, sampling={"logprobs": 5})[0] for each in prompts]

        cold, own = ask(), ask()
        wait_stored(daemon.directory)
        engine.forget()
        warm = ask()
        engine.forget()
        with daemon.fault("load lies"):
            wrong = ask()
        assert books(daemon.directory).load.failed_jobs == 0
    off = [distance(one, other) for one, other in zip(cold, own, strict=True)]
    found = [distance(one, other) for one, other in zip(cold, warm, strict=True)]
    lied = [distance(one, other) for one, other in zip(cold, wrong, strict=True) if other.cached]
    assert cached(cold) == [0] * len(prompts)
    for length, answer in zip(lengths, warm, strict=False):
        whole = 4 * block if shape.extra else block
        # A prompt of one block, which is to be computed anyway, is not loaded.
        assert name == "tails" or answer.cached == (length // whole * whole if length > block else 0)
    assert name != "tails" or cached(warm) == cached(own)
    assert shape.varies or tokens(warm) == tokens(cold)
    assert max(found) < NATS + 2 * shape.varies * max(off)
    assert min(lied) > max(found) + NATS


def distance(one: Completion, other: Completion) -> float:
    """Return how far the first token's log probabilities are apart, in nats."""
    left, right = one.likeliest[0], other.likeliest[0]
    if common := left.keys() & right.keys():
        return max(abs(left[token] - right[token]) for token in common)
    return float("inf")
