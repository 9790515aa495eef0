"""vLLM's own configuration objects for an engine that is never started."""

from __future__ import annotations

import json
import os
from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.structured_output import StructuredOutputManager

HEADS = {"num_kv_heads": 4, "head_size": 32, "dtype": torch.float32}


_made: dict[str, Any] = {}
"""By model, arguments and environment, the configurations that were made: one takes many times as long as a copy."""


def _engine_config(model: Path, settings: dict[str, Any]) -> Any:
    environ = sorted((name, text) for name, text in os.environ.items() if name.startswith("VLLM_"))
    written_at = (model / "config.json").stat().st_mtime_ns
    key = json.dumps([str(model), written_at, settings, environ], sort_keys=True, default=str)
    if key not in _made:
        _made[key] = EngineArgs(model=str(model), **settings).create_engine_config()
    return deepcopy(_made[key])


def make_config(model: Path, extra_config: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """A VllmConfig with the connector in it."""
    settings = {"dtype": "float32", "block_size": 32, "enforce_eager": True, "skip_tokenizer_init": True, **arguments}
    config = _engine_config(model, settings)
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="KvoffdConnector", kv_role="kv_both", kv_connector_extra_config=extra_config or {}
    )
    config.cache_config.kv_cache_layout = "LBHNC"
    if "mamba_cache_mode" in arguments:  # 0.33 takes it back where the model has no states, as the tests' has none
        config.cache_config.mamba_cache_mode = arguments["mamba_cache_mode"]
    return config


def kv_cache_configs(config: Any, stages: list[dict[str, Any]], memory: list[int]) -> list[KVCacheConfig]:
    """The KV caches that an engine plans for its workers' layers."""
    utils = import_module("vllm.v1.core.kv_cache_utils")
    if hasattr(utils, "get_kv_cache_configs"):
        return utils.get_kv_cache_configs(config, stages, memory)
    planning = import_module("vllm.v1.core.kv_cache_planning")  # of 0.33
    groups = planning.get_global_kv_cache_groups(config, stages)
    return planning.get_kv_cache_configs(config, stages, memory, groups)


def full_attention(**changes: Any) -> FullAttentionSpec:
    """Full attention of 4 heads of 32 in float32, blocks of 32 tokens."""
    return FullAttentionSpec(**{"block_size": 32, **HEADS, **changes})


def recurrent_state(**changes: Any) -> MambaSpec:
    """States of a recurrent layer, in pages as large as full attention's."""
    page = {"shapes": ((4, 32),), "dtypes": (torch.float32,), "page_size_padded": full_attention().page_size_bytes}
    return MambaSpec(**{"block_size": 32, "mamba_cache_mode": "align", **page, **changes})


def cache_config(*groups: KVCacheGroupSpec) -> KVCacheConfig:
    """A KV cache of these groups, else of one with two layers of full attention."""
    found = groups or (KVCacheGroupSpec(layer_names=["layer.0", "layer.1"], kv_cache_spec=full_attention()),)
    return KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=list(found), kv_cache_layout="LBHNC")


def make_scheduler(config: Any, blocks: int, *groups: KVCacheGroupSpec, hash_tokens: int = 32) -> tuple[Any, Any]:
    """vLLM's own scheduler with the connector in it, of an engine with so many blocks; and what hashes its requests."""
    config.cache_config.num_gpu_blocks = blocks
    init_none_hash(sha256)
    cache = replace(cache_config(*groups), num_blocks=blocks)
    block_tokens = 32 * config.parallel_config.decode_context_parallel_size
    scheduler = Scheduler(config, cache, StructuredOutputManager(config), block_tokens, hash_tokens, log_stats=True)
    return scheduler, get_request_block_hasher(hash_tokens, sha256)
