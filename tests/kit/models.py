"""Models small enough for a test, with real random weights: real tokens come out, and they depend on the KV bytes.

vLLM's own ``load_format=dummy`` fills weights with values so small that every prompt gets the same logits, which
would hide any corruption. Here each matrix is scaled by its fan-in, so that attention looks at far tokens and a
wrong KV block changes the output. Weights are float32 and drawn from fixed seeds: the same bytes on every machine.
There is no tokenizer; prompts are token ids (``skip_tokenizer_init``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
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
VOCABULARY = 1024


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


TINY_LLAMA = Shape(hidden=256, intermediate=512, layers=4, heads=8, kv_heads=4, head_dim=32)
# Sized so that a prefill of some thousand tokens takes seconds on one or two CPU cores.
DEMO_LLAMA = Shape(hidden=512, intermediate=1536, layers=8, heads=8, kv_heads=4, head_dim=64)


def make_tiny_llama(path: Path, seed: int = 0, vocabulary: int = VOCABULARY) -> Path:
    """Write a Llama of 4 layers, all of full attention, into the directory ``path``; at once when it is there."""
    return _write(path, llama_config(TINY_LLAMA, vocabulary), lambda: _llama_weights(TINY_LLAMA, seed, vocabulary))


def make_draft(path: Path, eagle: bool) -> Path:
    """Write a draft model for the tiny Llama into ``path``, some of whose drafts are right: the Llama with some noise.

    With ``eagle`` it is one layer of the Llama, over the next token's embedding and half of the Llama's hidden state.
    """
    random, shape = np.random.default_rng(5), TINY_LLAMA
    weights, config = _llama_weights(shape, 0), llama_config(shape)
    if eagle:
        first = {name.removeprefix("model."): each for name, each in weights.items() if ".layers.0." in name}
        weights = {name: each for name, each in first.items() if "input_layernorm" not in name}
        weights["fc.weight"] = np.hstack([np.eye(shape.hidden), np.eye(shape.hidden) / 2]).astype(np.float32)
        config["num_hidden_layers"] = 1
    else:
        for each in weights.values():
            each += np.float32(0.03 * each.std()) * random.standard_normal(each.shape, np.float32)
    return _write(path, config, lambda: weights)


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


def make_demo_llama(path: Path, vocabulary: int = VOCABULARY) -> Path:
    """Write the demo's Llama, 8 layers of full attention, into the directory ``path``; at once when it is there."""
    return _write(path, llama_config(DEMO_LLAMA, vocabulary), lambda: _llama_weights(DEMO_LLAMA, 2, vocabulary))


def llama_config(shape: Shape, vocabulary: int = VOCABULARY) -> ModelConfig:
    """The configuration of a Llama in float32."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def llama_parameters(shape: Shape, vocabulary: int = VOCABULARY) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Yield each parameter's name, its shape and its standard deviation; 0 for those that are ones."""

    def matrix(name: str, rows: int, columns: int, gain: float) -> tuple[str, tuple[int, ...], float]:
        return f"{name}.weight", (rows, columns), gain / columns**0.5

    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (vocabulary, shape.hidden), 1.0
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield matrix(f"{prefix}.self_attn.q_proj", query, shape.hidden, ATTENTION_GAIN)
        yield matrix(f"{prefix}.self_attn.k_proj", key_value, shape.hidden, ATTENTION_GAIN)
        yield matrix(f"{prefix}.self_attn.v_proj", key_value, shape.hidden, ATTENTION_GAIN)
        yield matrix(f"{prefix}.self_attn.o_proj", shape.hidden, query, ATTENTION_GAIN)
        yield matrix(f"{prefix}.mlp.gate_proj", shape.intermediate, shape.hidden, MLP_GAIN)
        yield matrix(f"{prefix}.mlp.up_proj", shape.intermediate, shape.hidden, MLP_GAIN)
        yield matrix(f"{prefix}.mlp.down_proj", shape.hidden, shape.intermediate, MLP_GAIN)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", (shape.hidden,), 0.0
    yield matrix("lm_head", vocabulary, shape.hidden, HEAD_GAIN)
    yield "model.norm.weight", (shape.hidden,), 0.0


def _llama_weights(shape: Shape, seed: int, vocabulary: int = VOCABULARY) -> Weights:
    random = np.random.default_rng(seed)
    return {
        name: random.standard_normal(sizes, np.float32) * np.float32(deviation)
        if deviation
        else np.ones(sizes, np.float32)
        for name, sizes, deviation in llama_parameters(shape, vocabulary)
    }


def _write(path: Path, config: ModelConfig, weights: Callable[[], Weights]) -> Path:
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
