"""Llamas small enough for a bench or a test, with real random weights: the tokens depend on the bytes of the KV cache.

vLLM's own ``load_format=dummy`` fills weights with values so small that every prompt gets the same logits, which
would hide any corruption. Here each matrix is scaled by its fan-in, so that attention looks at far tokens and a
wrong KV block changes the output. Weights are float32 and drawn from fixed seeds: the same bytes on every machine.
There is no tokenizer; prompts are token ids (``skip_tokenizer_init``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Weights: TypeAlias = dict[str, npt.NDArray[np.float32]]
ModelConfig: TypeAlias = dict[str, object]

# Standard deviation of a weight times the square root of its fan-in. Attention gets more than one, so that its
# softmax picks out tokens rather than averaging over all of them.
ATTENTION_GAIN = 1.9
MLP_GAIN = 1.0
HEAD_GAIN = 1.6


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder, in the words of a Hugging Face config."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int = 1024
    max_positions: int = 8192

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, all layers, in float32."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 4


TINY_LLAMA = Shape(hidden=256, intermediate=512, layers=4, heads=8, kv_heads=4, head_dim=32)


def make_tiny_llama(path: Path, seed: int = 0) -> Path:
    """Write a Llama of 4 layers, all of full attention, into the directory ``path``; at once when it is there."""
    return write_model(path, llama_config(TINY_LLAMA), lambda: llama_weights(TINY_LLAMA, seed))


def llama_config(shape: Shape) -> ModelConfig:
    """Return the config.json of a Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        **common_config(shape),
    }


def common_config(shape: Shape) -> ModelConfig:
    """Return what the configs of all decoders say."""
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def llama_weights(shape: Shape, seed: int) -> Weights:
    """Return a Llama's weights by name."""
    weights = decoder_weights(shape, np.random.default_rng(seed))
    for name in norm_names(shape, ["input_layernorm", "post_attention_layernorm"]):
        weights[name] = np.ones(shape.hidden, np.float32)
    return weights


def decoder_weights(shape: Shape, random: np.random.Generator) -> Weights:
    """Return all weights of a decoder but its norms'."""

    def matrix(rows: int, columns: int, gain: float) -> npt.NDArray[np.float32]:
        return random.standard_normal((rows, columns), np.float32) * np.float32(gain / columns**0.5)

    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {"model.embed_tokens.weight": random.standard_normal((shape.vocabulary, shape.hidden), np.float32)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        weights[f"{prefix}.self_attn.q_proj.weight"] = matrix(query, shape.hidden, ATTENTION_GAIN)
        weights[f"{prefix}.self_attn.k_proj.weight"] = matrix(key_value, shape.hidden, ATTENTION_GAIN)
        weights[f"{prefix}.self_attn.v_proj.weight"] = matrix(key_value, shape.hidden, ATTENTION_GAIN)
        weights[f"{prefix}.self_attn.o_proj.weight"] = matrix(shape.hidden, query, ATTENTION_GAIN)
        weights[f"{prefix}.mlp.gate_proj.weight"] = matrix(shape.intermediate, shape.hidden, MLP_GAIN)
        weights[f"{prefix}.mlp.up_proj.weight"] = matrix(shape.intermediate, shape.hidden, MLP_GAIN)
        weights[f"{prefix}.mlp.down_proj.weight"] = matrix(shape.hidden, shape.intermediate, MLP_GAIN)
    weights["lm_head.weight"] = matrix(shape.vocabulary, shape.hidden, HEAD_GAIN)
    return weights


def norm_names(shape: Shape, norms: list[str]) -> list[str]:
    """Return the names of the norms' weights."""
    of_layers = [f"model.layers.{layer}.{norm}.weight" for layer in range(shape.layers) for norm in norms]
    return [*of_layers, "model.norm.weight"]


def write_model(path: Path, config: ModelConfig, weights: Callable[[], Weights]) -> Path:
    """Write a model into the directory ``path``; at once when it is there."""
    text = json.dumps(config, indent=2)
    config_file = path / "config.json"
    # The configuration is written last: where it is there and the same, the weights beside it are whole.
    if config_file.exists() and config_file.read_text() == text:
        return path
    # Not at the top: who only asks for a shape needs no safetensors.
    from safetensors.numpy import save_file

    path.mkdir(parents=True, exist_ok=True)
    config_file.unlink(missing_ok=True)
    save_file(weights(), path / "model.safetensors", metadata={"format": "pt"})
    config_file.write_text(text)
    return path
