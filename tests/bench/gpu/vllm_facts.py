"""What can be said of vLLM on this machine before an engine is started, the first call of CUDA last.

``python -m tests.bench.gpu.vllm_facts`` prints a line of JSON for each fact, so that a crash hides what comes after it
alone.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import time
from collections.abc import Callable
from typing import Any

PACKAGES = ("torch", "triton", "vllm", "transformers", "numpy", "numba", "pydantic", "pyzmq", "msgspec", "kvoffd")
# The compiled operators, and what imports most of an engine.
MODULES = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.cumem_allocator",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3_next",
    "kvoffd_client.vllm.connector",
)
OPERATORS = ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "rotary_embedding")
TOLERANCE = 0.1
"""bfloat16's, over rows of 512."""


def say(name: str, ask: Callable[..., object], *arguments: str) -> None:
    """Print what ``ask`` returns, or why it fails."""
    try:
        answer = ask(*arguments)
    except Exception as error:
        answer = f"{type(error).__name__}: {str(error)[:400]}"
    print(json.dumps({name: answer}), flush=True)


def versions() -> dict[str, str]:
    there = {one.name: one.version for one in importlib.metadata.distributions()}
    return {name: there.get(name, "not there") for name in PACKAGES}


def import_module(name: str) -> str:
    began = time.monotonic()
    importlib.import_module(name)
    return f"{time.monotonic() - began:.1f} s"


def gpu() -> str:
    import torch

    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.major}.{properties.minor}, {properties.total_memory >> 30} GiB"


def missing_operators() -> list[str]:
    import torch

    return [name for name in OPERATORS if not hasattr(torch.ops._C, name)]


def judged(result: Any, wanted: Any) -> str:
    """How far an operator's result is from what torch computes."""
    far = float((result.float() - wanted).abs().max())
    return f"{'right' if far < TOLERANCE else 'WRONG'}, {far:.3g} off"


def random(*sizes: int) -> Any:
    import torch

    return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)


def norm() -> str:
    import torch

    given, weight = random(64, 512), torch.ones(512, device="cuda", dtype=torch.bfloat16)
    result = torch.empty_like(given)
    torch.ops._C.rms_norm(result, given, weight, 1e-6)
    return judged(result, given.float() * torch.rsqrt(given.float().pow(2).mean(-1, keepdim=True) + 1e-6))


def silu() -> str:
    import torch

    given, result = random(64, 512), random(64, 256)
    torch.ops._C.silu_and_mul(result, given)
    return judged(result, torch.nn.functional.silu(given[:, :256].float()) * given[:, 256:].float())


def flash_attention_3() -> str:
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    query, (key, value) = random(128, 8, 128), (random(8, 16, 2, 128) for _ in "kv")
    numbers = {"device": "cuda", "dtype": torch.int32}
    result = flash_attn_varlen_func(
        query,
        key,
        value,
        max_seqlen_q=128,
        cu_seqlens_q=torch.tensor([0, 128], **numbers),
        max_seqlen_k=128,
        seqused_k=torch.tensor([128], **numbers),
        causal=True,
        block_table=torch.arange(8, **numbers)[None],
        fa_version=3,
    )
    keys, values = (each.reshape(128, 2, 128).repeat_interleave(4, 1).transpose(0, 1).float() for each in (key, value))
    attention = torch.nn.functional.scaled_dot_product_attention
    return judged(result.transpose(0, 1), attention(query.transpose(0, 1).float(), keys, values, is_causal=True))


if __name__ == "__main__":
    say("packages", versions)
    for name in MODULES:
        say(f"import {name}", import_module, name)
    say("operators that are missing", missing_operators)
    # From here on with CUDA.
    for ask in (gpu, norm, silu, flash_attention_3):
        say(ask.__name__, ask)
