"""A real engine with too few blocks: pre-emptions and block fences change no token."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from kvoffd_client import AdminClient
from kvoffd_proto.messages import StatsReply
from tests.kit.engine import BLOCK_TOKENS, EngineProcess, full_blocks, prompt, wait_connected, wait_stats
from tests.kit.faulty_daemon import FaultyDaemon
from tests.kit.models import make_tiny_gemma3, make_tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

PROMPTS = [prompt(seed, length) for seed, length in enumerate([800, 1100, 950, 1030, 870, 1000])]
MAX_TOKENS = 150
FEW_BLOCKS = 130
"""Of the about 215 that all six requests would fill."""


def wait_settled(daemon: FaultyDaemon, ready_blocks: int) -> None:
    """Until the engine is connected, no store runs and at least so many blocks can be read."""

    def settled(stats: StatsReply) -> bool:
        idle = stats.store.running_jobs + stats.store.queued_jobs == 0
        return idle and sum(item.ready_blocks for item in stats.namespaces) >= ready_blocks

    with AdminClient(daemon.directory) as admin:
        wait_connected(admin)
        wait_stats(admin, settled, 60)


@pytest.mark.parametrize(
    ("blocks_per_chunk", "store_seconds", "store_fence_timeout_s"),
    [
        pytest.param(1, 0.2, 30.0, id="fences-wait", marks=pytest.mark.shapes),
        pytest.param(4, 8.0, 0.2, id="fences-give-up"),
    ],
)
def test_under_block_pressure_tokens_are_those_without_a_daemon(
    tmp_path: Path, blocks_per_chunk: int, store_seconds: float, store_fence_timeout_s: float
) -> None:
    extra = {
        "offload_prompt_only": False,
        "blocks_per_chunk": blocks_per_chunk,
        "store_fence_timeout_s": store_fence_timeout_s,
    }
    model = make_tiny_llama(tmp_path / "model")
    with (
        closing(FaultyDaemon("256MiB")) as daemon,
        EngineProcess(model, daemon.directory, num_blocks=FEW_BLOCKS, extra_config=extra) as engine,
    ):
        # Three at a time, for which there are blocks enough.
        expected = [*engine.generate(PROMPTS[:3], MAX_TOKENS), *engine.generate(PROMPTS[3:], MAX_TOKENS)]
        assert not engine.metrics()["vllm:num_preemptions"]
        daemon.start()
        wait_settled(daemon, 0)
        engine.forget()
        with daemon.fault(f"store slow {store_seconds}"):
            runs = [engine.generate(PROMPTS, MAX_TOKENS)]
            engine.forget()
            runs.append(engine.generate(PROMPTS, MAX_TOKENS))
        failed_stores = engine.metrics().get("vllm:kvoffd_failed_stores", 0)
        for stored in (0, len(PROMPTS)):
            wait_settled(daemon, stored)
            engine.forget()
            runs.append(engine.generate(PROMPTS, MAX_TOKENS))
        metrics = engine.metrics()
    for run in runs:
        assert [answer.tokens for answer in run] == [answer.tokens for answer in expected]
        assert all(answer.finish == "length" for answer in run)
    assert metrics["vllm:num_preemptions"] > 0
    assert metrics["vllm:kv_offload_load_bytes"] > 0
    assert sum(answer.cached for answer in runs[-1]) >= len(PROMPTS) * BLOCK_TOKENS
    # A store that runs when its time is up is given up by the client; what waits is cancelled.
    assert failed_stores > 0 or store_seconds < store_fence_timeout_s


def test_loads_leave_blocks_for_what_is_computed_after_them(tmp_path: Path) -> None:
    """Two prompts with windows fill the KV cache but for 2 blocks, and to go on each needs one in all six groups."""
    prompts = [prompt(seed, 1100) for seed in (1, 2)]
    few = {"num_blocks": 151, "max_model_len": 1152, "max_num_batched_tokens": 128}
    with (
        closing(FaultyDaemon("256MiB").start()) as daemon,
        EngineProcess(make_tiny_gemma3(tmp_path / "model"), daemon.directory, **few) as engine,
    ):
        wait_settled(daemon, 0)
        cold = [engine.generate([each])[0] for each in prompts]
        wait_settled(daemon, len(prompts) * 34)
        engine.forget()
        loaded = engine.generate(prompts)
    assert [answer.tokens for answer in loaded] == [answer.tokens for answer in cold]
    assert [answer.cached for answer in loaded] == [full_blocks(1100)] * 2
