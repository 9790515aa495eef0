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
# What an engine imports, and the compiled operators.
MODULES = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.cumem_allocator",
    "vllm.platforms.cuda",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.attention.backends.gdn_attn",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3_next",
    "vllm.model_executor.warmup.kernel_warmup",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "kvoffd_client.vllm.connector",
)
OPERATORS = ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "rotary_embedding")
TOLERANCE = 0.1
"""bfloat16's, over rows of 512."""


def say(name: str, what: object) -> None:
    print(json.dumps({name: what}), flush=True)


def version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not there"


def import_module(name: str) -> str:
    began = time.monotonic()
    try:
        importlib.import_module(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"{time.monotonic() - began:.1f} s"


def check(operator: Callable[[], float]) -> str:
    """Run an operator; how far its result is from what torch computes."""
    import torch

    try:
        far = operator()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"{'right' if far < TOLERANCE else 'WRONG'}, {far:.3g} off"


def checks() -> dict[str, Callable[[], float]]:
    import torch

    def random(*sizes: int) -> Any:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)

    def norm() -> float:
        given, weight = random(64, 512), torch.ones(512, device="cuda", dtype=torch.bfloat16)
        result = torch.empty_like(given)
        torch.ops._C.rms_norm(result, given, weight, 1e-6)
        wanted = given.float() * torch.rsqrt(given.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return float((result.float() - wanted).abs().max())

    def silu() -> float:
        given, result = random(64, 512), random(64, 256)
        torch.ops._C.silu_and_mul(result, given)
        wanted = torch.nn.functional.silu(given[:, :256].float()) * given[:, 256:].float()
        return float((result.float() - wanted).abs().max())

    def flash_attention_3() -> float:
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
        keys, values = (
            each.reshape(128, 2, 128).repeat_interleave(4, 1).transpose(0, 1).float() for each in (key, value)
        )
        attention = torch.nn.functional.scaled_dot_product_attention
        wanted = attention(query.transpose(0, 1).float(), keys, values, is_causal=True)
        return float((result.float() - wanted.transpose(0, 1)).abs().max())

    return {one.__name__: one for one in (norm, silu, flash_attention_3)}


def main() -> None:
    say("packages", {name: version_of(name) for name in PACKAGES})
    for name in MODULES:
        say(f"import {name}", import_module(name))
    import torch

    say("operators that are missing", [name for name in OPERATORS if not hasattr(torch.ops._C, name)])
    # From here on with CUDA.
    try:
        properties = torch.cuda.get_device_properties(0)
    except Exception as error:
        say("gpu", f"none: {type(error).__name__}: {str(error).splitlines()[0]}")
        return
    say("gpu", f"{properties.name}, {properties.major}.{properties.minor}, {properties.total_memory >> 30} GiB")
    say("computes", {name: check(operator) for name, operator in checks().items()})


if __name__ == "__main__":
    main()
