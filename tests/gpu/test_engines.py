"""A real vLLM on a GPU with a daemon, in the shapes that no CPU has. Needs a vLLM built for CUDA beside kvoffd."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvoffd_client import AdminClient
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import EngineProcess, prompt, wait_connected, wait_stored
from tests.kit.gpu_machine import real_gpus
from tests.kit.models import make_demo_llama, make_tiny_llama
from tests.kit.shapes import Shape, check_shape, make_tiny_deepseek

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

# vLLM computes a share of a big GPU's memory for its cache; a tiny model needs none of it.
GPU: Mapping[str, Any] = {"dtype": "bfloat16", "fork": False, "gpu_memory_utilization": 0.3}
SHAPES = {
    "flash-attention": Shape(settings=GPU, varies=True),
    # It has no kernels for the heads of 32 that the tiny Llama has.
    "flashinfer": Shape(make_demo_llama, {**GPU, "attention_backend": "FLASHINFER"}, varies=True),
    "flashmla": Shape(make_tiny_deepseek, {**GPU, "attention_backend": "FLASHMLA", "block_size": 64}, varies=True),
    "cuda-graphs-and-async-scheduling": Shape(
        settings={**GPU, "enforce_eager": False, "async_scheduling": True}, varies=True
    ),
    "tensor-parallel": Shape(settings={**GPU, "tensor_parallel": 2}, workers=2, varies=True),
}


@pytest.fixture(autouse=True)
def engine_on_gpu() -> None:
    """Skips where no engine can run on a GPU."""
    if not real_gpus():
        pytest.skip("no GPU here")
    platforms = pytest.importorskip("vllm.platforms", reason="vLLM is not installed")
    if not platforms.current_platform.is_cuda():
        pytest.skip("this vLLM was not built for CUDA")


@pytest.mark.parametrize("name", SHAPES)
def test_shape(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    if shape.workers > real_gpus():
        pytest.skip(f"{shape.workers} GPUs are needed")
    with DaemonProcess("256MiB") as daemon:
        after = check_shape(shape, shape.make(tmp_path / name), daemon)
    assert (after.store.refused_batches, after.load.refused_batches) == (0, 0)


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_slept_loads_its_blocks(level: int, tmp_path: Path) -> None:
    """Its memory comes from vLLM's cumem allocator: virtual memory that sleep unmaps and wake-up maps anew."""
    import vllm

    if tuple(int(part) for part in vllm.__version__.split(".")[:2]) < (0, 33):
        pytest.skip("before vLLM 0.33 no connector hears of sleep")
    asked = [prompt(1, 900)]
    model = make_tiny_llama(tmp_path / "model")
    with DaemonProcess("64MiB") as daemon, AdminClient(daemon.directory) as admin:
        with EngineProcess(model, daemon.directory, patient=True, enable_sleep_mode=True, **GPU) as engine:
            wait_connected(daemon.directory)
            engine.generate(asked)
            (own,) = engine.generate(asked)
            wait_stored(daemon.directory)
            engine.call("nap", level=level)
            if level == 2:  # which throws the weights away
                engine.call("reload_weights", path=str(model))
                engine.forget(connector=True)
            wait_connected(daemon.directory)
            (warm,) = engine.generate(asked)
        assert (warm.tokens, warm.cached) == (own.tokens, own.cached)
        after = admin.stats()
        assert after.load.failed_jobs == 0
        assert (after.store.refused_batches, after.load.refused_batches) == (0, 0)
