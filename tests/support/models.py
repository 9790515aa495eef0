"""The models of the tests, beside the tiny Llama of the bench: see ``kvoffd_client.bench.tiny_models``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from kvoffd_client.bench.tiny_models import (
    TINY_LLAMA,
    ModelConfig,
    Shape,
    Weights,
    common_config,
    decoder_weights,
    llama_config,
    llama_weights,
    make_tiny_llama,
    norm_names,
    write_model,
)

__all__ = ["TINY_LLAMA", "make_tiny_llama"]

TINY_GEMMA3 = Shape(hidden=128, intermediate=256, layers=6, heads=4, kv_heads=2, head_dim=32, max_positions=4096)
# Sized so that a prefill of some thousand tokens takes seconds on one or two CPU cores.
DEMO_LLAMA = Shape(hidden=512, intermediate=1536, layers=8, heads=8, kv_heads=4, head_dim=64)


def make_draft(path: Path, eagle: bool) -> Path:
    """Write a draft model for the tiny Llama into ``path``, some of whose drafts are right: the Llama with some noise.

    With ``eagle`` it is one layer of the Llama, over the next token's embedding and half of the Llama's hidden state.
    """
    from safetensors.numpy import save_file

    random, shape = np.random.default_rng(5), TINY_LLAMA
    weights, config = llama_weights(shape, 0), llama_config(shape)
    if eagle:
        first = {name.removeprefix("model."): each for name, each in weights.items() if ".layers.0." in name}
        weights = {name: each for name, each in first.items() if "input_layernorm" not in name}
        weights["fc.weight"] = np.hstack([np.eye(shape.hidden), np.eye(shape.hidden) / 2]).astype(np.float32)
        config["num_hidden_layers"] = 1
    else:
        for each in weights.values():
            each += np.float32(0.03 * each.std()) * random.standard_normal(each.shape, np.float32)
    path.mkdir(parents=True)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_lora_adapter(path: Path, seed: int) -> Path:
    """Write a LoRA adapter of rank 8 for the tiny Llama's queries and values into ``path``, as PEFT does."""
    from safetensors.numpy import save_file

    random, shape = np.random.default_rng(seed), TINY_LLAMA
    sizes = {"q_proj": shape.heads * shape.head_dim, "v_proj": shape.kv_heads * shape.head_dim}
    weights: Weights = {}
    for layer in range(shape.layers):
        for name, rows in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = random.standard_normal((8, shape.hidden), np.float32) / 16
            weights[f"{prefix}.lora_B.weight"] = random.standard_normal((rows, 8), np.float32) / 4
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "target_modules": list(sizes)}
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def make_demo_llama(path: Path) -> Path:
    """Write the demo's Llama, 8 layers of full attention, into the directory ``path``; at once when it is there."""
    return write_model(path, llama_config(DEMO_LLAMA), lambda: llama_weights(DEMO_LLAMA, seed=2))


def make_tiny_gemma3(path: Path) -> Path:
    """Write a Gemma 3 of 5 layers with a sliding window of 256 tokens and 1 of full attention into ``path``.

    vLLM makes two or more KV cache groups of it: the hybrid case.
    """
    return write_model(path, _gemma3_config(TINY_GEMMA3, window=256), lambda: _gemma3_weights(TINY_GEMMA3, seed=1))


def _gemma3_config(shape: Shape, window: int) -> ModelConfig:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": window,
        "layer_types": ["sliding_attention"] * (shape.layers - 1) + ["full_attention"],
        "query_pre_attn_scalar": shape.head_dim,
        "pad_token_id": 0,
        **common_config(shape),
    }


def _gemma3_weights(shape: Shape, seed: int) -> Weights:
    weights = decoder_weights(shape, np.random.default_rng(seed))
    norms = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    # Gemma's norms multiply by one plus the weight.
    for name in norm_names(shape, norms):
        weights[name] = np.zeros(shape.hidden, np.float32)
    for layer in range(shape.layers):
        for norm in ("q_norm", "k_norm"):
            weights[f"model.layers.{layer}.self_attn.{norm}.weight"] = np.zeros(shape.head_dim, np.float32)
    return weights
