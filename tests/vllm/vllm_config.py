"""vLLM's own configuration objects for an engine that is never started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

HEADS = {"num_kv_heads": 4, "head_size": 32, "dtype": torch.float32}


def make_config(model: Path, extra_config: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """A VllmConfig with the connector in it."""
    settings = {"dtype": "float32", "block_size": 32, "enforce_eager": True, "skip_tokenizer_init": True, **arguments}
    config = EngineArgs(model=str(model), **settings).create_engine_config()
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="KvoffdConnector", kv_role="kv_both", kv_connector_extra_config=extra_config or {}
    )
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


def full_attention(**changes: Any) -> FullAttentionSpec:
    """Full attention of 4 heads of 32 in float32, blocks of 32 tokens."""
    return FullAttentionSpec(**{"block_size": 32, **HEADS, **changes})


def cache_config(*groups: KVCacheGroupSpec) -> KVCacheConfig:
    """A KV cache of these groups, else of one with two layers of full attention."""
    found = groups or (KVCacheGroupSpec(layer_names=["layer.0", "layer.1"], kv_cache_spec=full_attention()),)
    return KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=list(found), kv_cache_layout="LBHNC")
