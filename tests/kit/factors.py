"""Factors of a made-up engine, from which ``namespace_of`` makes a namespace."""

from __future__ import annotations

from typing import Any

GROUP: dict[str, Any] = {
    "group_id": 0,
    "kind": "full_attention",
    "tokens_per_block": 32,
    "window_tokens": 0,
    "page_bytes": 16384,
    "layers": 4,
    "layout": "aa",
}
FACTS: dict[str, Any] = {
    "vllm_release": "0.32",
    "model": "org/model",
    "revision": "main",
    "weights": "cafe",
    "model_config": "beef",
    "weights_dtype": "torch.bfloat16",
    "quantization": "",
    "kv_cache_dtype": "bfloat16",
    "dummy_weights": False,
    "tokens_per_hash": 32,
    "blocks_per_chunk": 2,
    "hash_algorithm": "sha256",
    "hash_probe": "00" * 32,
    "hash_lookahead_tokens": 0,
    "private": "",
    "tensor_parallel": 2,
    "pipeline_parallel": 1,
    "prefill_context_parallel": 1,
    "decode_context_parallel": 1,
    "world_size": 2,
    "kv_layout": "LBHNC",
    "context_parallel_interleave": 1,
    "multimodal": "",
    "device_type": "cpu",
    "device_name": "",
    "attention_backend": "",
    "computation": "",
    "model_runner": "v1",
    "speculative": "",
    "salt": "",
    "groups": [GROUP],
}


def other(value: object) -> object:
    """A value of the same type that differs."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    assert isinstance(value, str)
    return "11" * 32 if len(value) == 64 else value + "x"
