"""What kvoffd cannot serve is refused at the engine's start, with a sentence that says what to change."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import iter_layer_specs

from kvoffd_client.vllm import CONNECTOR_NAME

if TYPE_CHECKING:
    from kvoffd_client.vllm.vllm_types import KVCacheConfig, KVTransferConfig, VllmConfig

HAS_SLEEP_HOOKS = hasattr(OffloadingConnector, "restore_kv_caches")


def check_engine(vllm_config: VllmConfig) -> None:
    """Raise ValueError where an engine of this configuration (vllm.config.VllmConfig) cannot use kvoffd."""
    reason = _problem(vllm_config)
    if reason:
        raise ValueError(f"kvoffd cannot serve this engine: {reason}")


def check_groups(kv_cache_config: KVCacheConfig) -> None:
    """Raise ValueError where no KV cache group of the engine (KVCacheConfig) can be kept outside it."""
    if not get_offloading_group_ids(kv_cache_config):
        raise ValueError(
            "kvoffd cannot serve this engine: its model keeps nothing that a later prompt could use (no KV cache group "
            "with prefix caching). Start it without --kv-transfer-config."
        )
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in iter_layer_specs(group.kv_cache_spec)]
    if any(getattr(spec, "non_causal", False) for spec in specs):
        raise ValueError(
            "kvoffd cannot serve this engine: its attention is not causal, so what a prefix gives depends on what "
            "follows it. Start it without --kv-transfer-config."
        )


def parents_of(connector: KVConnectorBase_V1) -> list[tuple[KVConnectorBase_V1, KVTransferConfig]]:
    """Return the connectors that are building this one, as MultiConnector does, and their kv_transfer_configs.

    The innermost comes first. They stand on the call stack only: vLLM gives a child a copy of its configuration, with
    no way back to the one that the scheduler reads.
    """
    found: list[tuple[KVConnectorBase_V1, KVTransferConfig]] = []
    frame = sys._getframe(1).f_back
    while frame is not None:
        parent, config = frame.f_locals.get("self"), frame.f_locals.get("vllm_config")
        if isinstance(parent, KVConnectorBase_V1) and parent is not connector and config is not None:
            found.append((parent, config.kv_transfer_config))
        frame = frame.f_back
    return found


def check_siblings(parents: Sequence[tuple[KVConnectorBase_V1, KVTransferConfig]]) -> None:
    """Raise ValueError where a MultiConnector has another child that cannot be beside this one; see ``parents_of``."""
    if not parents:
        return
    names = _children(parents[-1][1].kv_connector_extra_config)
    if names.count(CONNECTOR_NAME) > 1:
        raise ValueError(
            f"kvoffd cannot serve this engine: MultiConnector names {CONNECTOR_NAME} {names.count(CONNECTOR_NAME)} "
            "times, and an engine's KV cache can be shared with one daemon only; name it once. For more room give the "
            "daemon a larger pool or a disk."
        )
    if OffloadingConnector.__name__ in names:
        raise ValueError(
            f"kvoffd cannot serve this engine: MultiConnector names both {CONNECTOR_NAME} and "
            f"{OffloadingConnector.__name__}, whose metrics vLLM registers under the same names, which ends its "
            "server; name one of them."
        )


@functools.cache
def machine_id() -> str:
    """Return what tells this machine from another one, the same in all its containers; empty where it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _problem(vllm_config: VllmConfig) -> str:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        return (
            f"vLLM runs on {current_platform.device_name or 'another platform'}, and kvoffd moves KV blocks of NVIDIA "
            "GPUs and of CPUs only. Start it without --kv-transfer-config."
        )
    if model.is_encoder_decoder:
        return (
            "vLLM gives no KV connector the cache of an encoder-decoder model. Start it without --kv-transfer-config."
        )
    if parallel.nnodes_within_dp > 1:
        return (
            f"its workers are on {parallel.nnodes_within_dp} nodes, and a daemon has the blocks of one node. Use "
            "tensor and pipeline parallelism within a node, and data parallelism between nodes."
        )
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        return (
            "with external_launcher each rank schedules on its own, and all must do the same, but what the daemon has "
            "is known to one of them a step earlier than to another. Start it without --kv-transfer-config, or with "
            "--distributed-executor-backend mp."
        )
    if (model.enable_sleep_mode or model.enable_cumem_allocator) and not HAS_SLEEP_HOOKS:
        return (
            f"vLLM {vllm.__version__} does not tell connectors when it goes to sleep or releases its KV cache, and a "
            "sleeping engine has none. Start it without sleep mode and without --enable-cumem-allocator, with which it "
            "can sleep too, or use vLLM 0.33."
        )
    if model.runner_type == "pooling" and not model.is_prefix_caching_supported:
        return (
            "its way of pooling needs all tokens of a prompt to be computed, so vLLM supports no prefix caching for "
            "it, and nothing can be loaded. Start it without --kv-transfer-config, or with LAST as its pooling type "
            "if the model was trained for that."
        )
    if vllm_config.aux_output_config.enabled:
        return (
            "it is to return the routed experts of prompts, and has those of tokens that it computed itself: the first "
            "prompt that comes from the daemon would end it. Start it without --enable-return-routed-experts, or "
            "without --kv-transfer-config."
        )
    if vllm_config.offload_config.prefetch.offload_group_size:
        return (
            "its layers take turns in buffers on the GPU, so the digest that tells updated weights would not see "
            "all of them. Start it without --offload-group-size; --cpu-offload-gb works."
        )
    multimodal = model.multimodal_config
    if (
        multimodal is not None
        and not multimodal.language_model_only
        and multimodal.mm_processor_cache_gb == 0
        and not vllm_config.cache_config.enable_prefix_caching
    ):
        return (
            "with prefix caching off and mm_processor_cache_gb=0 vLLM does not hash images but numbers them, so one "
            "user's image would be taken for another's. Start it with --enable-prefix-caching, or with an "
            "--mm-processor-cache-gb above 0."
        )
    return ""


def _children(extra_config: Mapping[str, Any]) -> list[str]:
    """Return the names of all connectors below a MultiConnector, those of nested ones too."""
    names: list[str] = []
    for child in extra_config.get("connectors", []):
        names += [child["kv_connector"], *_children(child.get("kv_connector_extra_config", {}))]
    return names
