"""A real engine with too few blocks: pre-emptions and block fences change no token."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.kit.daemon import DaemonProcess
from tests.kit.engine import BLOCK_TOKENS, EngineProcess, prompt, tokens, wait_books, wait_connected
from tests.kit.models import make_tiny_llama

# Nightly: CI has pressure under the second model runner, see test_engine_v2.
pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(400)]

PROMPTS = [prompt(seed, length) for seed, length in enumerate([800, 1100, 950, 1030, 870, 1000])]
MAX_TOKENS = 80
FEW_BLOCKS = 126
"""Of the about 195 that all six requests would fill: four are taken in, and grow until one is pre-empted."""


def wait_settled(daemon: DaemonProcess, ready_blocks: int) -> None:
    """Until the engine is connected, no store runs and at least so many blocks can be read."""
    wait_connected(daemon.directory)
    wait_books(
        daemon.directory,
        lambda found: found.store.running_jobs + found.store.queued_jobs == 0 and found.ready_blocks >= ready_blocks,
        60,
    )


@pytest.mark.usefixtures("early_server")
@pytest.mark.parametrize(
    ("blocks_per_chunk", "fault", "store_fence_timeout_s"),
    [
        pytest.param(1, "store slow 0.2", 30.0, id="fences-wait"),
        pytest.param(4, "store waits", 0.05, id="fences-give-up"),
    ],
)
def test_pressure_changes_no_token(
    tmp_path: Path, blocks_per_chunk: int, fault: str, store_fence_timeout_s: float
) -> None:
    extra = {
        "offload_prompt_only": False,
        "blocks_per_chunk": blocks_per_chunk,
        "store_fence_timeout_s": store_fence_timeout_s,
    }
    model = make_tiny_llama(tmp_path / "model")
    with (
        closing(DaemonProcess("256MiB", faults=True)) as daemon,
        EngineProcess(
            model, daemon.directory, num_blocks=FEW_BLOCKS, max_model_len=2048, patient=True, extra_config=extra
        ) as engine,
    ):
        # Three at a time, for which there are blocks enough.
        expected = [*engine.generate(PROMPTS[:3], MAX_TOKENS), *engine.generate(PROMPTS[3:], MAX_TOKENS)]
        assert not engine.metrics()["vllm:num_preemptions"]
        daemon.start()
        wait_settled(daemon, 0)
        engine.forget()
        with daemon.fault(fault):
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
        assert tokens(run) == tokens(expected)
        assert all(answer.finish == "length" for answer in run)
    assert metrics["vllm:num_preemptions"] > 0
    assert metrics["vllm:kv_offload_load_bytes"] > 0
    assert sum(answer.cached for answer in runs[-1]) >= len(PROMPTS) * BLOCK_TOKENS
    # A store that runs when its time is up is given up by the client; what waits is cancelled.
    assert failed_stores > 0 or fault != "store waits"
