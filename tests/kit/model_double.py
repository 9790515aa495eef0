"""A vLLM worker whose model computes nothing: a step takes as long as its tokens do at a stated rate.

Everything around it is real: vLLM's engine, scheduler and connector, and KV cache memory that the daemon reads and
writes. It has no weights to load, so an engine of any size starts in seconds. ``llama_8b`` writes the configuration of
such a model, and ``EngineProcess(path, ..., **DOUBLE)`` starts an engine of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 16
"""Tokens of a block, as vLLM's default on a GPU."""
DOUBLE: dict[str, Any] = {
    "worker_cls": "tests.kit.model_worker.ModelWorker",
    # As on one GPU: scheduler and worker are one process. Of "uni" vLLM makes two processes on a CPU.
    "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
    "dtype": "bfloat16",
    "block_size": BLOCK_TOKENS,
    # Its steps end before the call returns: with async scheduling the connector would measure almost no time for one.
    "v2": False,
}
"""Settings of an ``EngineProcess`` that has it."""
RATE = "MODEL_TOKENS_PER_SECOND"
"""Variable of the engine's environment: the rate. Steps take no time where it is not set."""
LAYERS = 32
LAYER_BYTES = 4096
"""Bytes of a token in one layer: 8 heads of 128, keys and values, 2 bytes each."""
MAX_TOKENS = 1 << 18


def llama_8b(path: Path, layers: int = LAYERS) -> Path:
    """Write the configuration of Llama 3.1 8B, or of one with fewer layers, into the directory ``path``."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    return path
