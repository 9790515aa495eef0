"""Checks that this vLLM has all that the connector uses, whatever its version; workarounds for its defects."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from importlib import import_module
from typing import Any

import vllm

MINIMUM = (0, 32)
TESTED = ((0, 32), (0, 33))
"""Tested releases: major and minor number."""
_RELEASE = re.compile(r"\d+\.\d+(\.\d+)?(\+(cpu|cu\d+))?")
"""Version of a published release, for any platform. Other local parts indicate own builds."""
_TESTED = " and ".join(f"{major}.{minor}" for major, minor in TESTED)


def release_of(version: str) -> tuple[int, int] | None:
    """Return major and minor number of a version string; None if it has none."""
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return None
    return int(parts[0]), int(parts[1])


V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
USED = {
    "vllm.config:AttentionConfig": "backend hisparse_config indexer_kv_dtype use_non_causal",
    "vllm.config:AuxOutputConfig": "enabled",
    "vllm.config:CacheConfig": """
        cache_dtype enable_prefix_caching kv_cache_dtype_skip_layers prefix_caching_hash_algo""",
    "vllm.config:CompilationConfig": "static_forward_context",
    "vllm.config:KVTransferConfig": """
        engine_id is_kv_consumer is_kv_producer kv_connector_extra_config kv_load_failure_policy""",
    "vllm.config:LoRAConfig": "max_loras target_modules",
    "vllm.config:LoadConfig": "load_format",
    "vllm.config:ModelConfig": """
        code_revision dtype enable_cumem_allocator enable_sleep_mode hf_config is_encoder_decoder
        is_prefix_caching_supported max_model_len model model_class_overrides model_impl multimodal_config
        override_generation_config quantization quantization_config revision runner_type served_model_name
        trust_remote_code try_get_generation_config using_transformers_backend""",
    "vllm.config:MultiModalConfig": "language_model_only mm_processor_cache_gb",
    "vllm.config:OffloadConfig": "prefetch",
    "vllm.config:ParallelConfig": """
        cp_kv_cache_interleave_size data_parallel_size decode_context_parallel_size distributed_executor_backend
        enable_eplb nnodes_within_dp pipeline_parallel_size prefill_context_parallel_size tensor_parallel_size
        world_size""",
    "vllm.config:PrefetchOffloadConfig": "offload_group_size",
    "vllm.config:SchedulerConfig": """
        long_prefill_token_threshold max_num_batched_tokens max_num_scheduled_tokens policy""",
    "vllm.config:SpeculativeConfig": """
        draft_tensor_parallel_size method num_speculative_tokens parallel_drafting use_eagle_block_drop""",
    "vllm.config:VllmConfig": """
        additional_config attention_config aux_output_config cache_config compilation_config diffusion_config
        kernel_config kv_transfer_config load_config lora_config max_concurrent_batches max_in_flight_tokens
        model_config num_lookahead_tokens num_prefill_lookahead_tokens num_speculative_tokens offload_config
        parallel_config scheduler_config speculative_config use_v2_model_runner""",
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory": "register_connector",
    f"{V1}.base:KVConnectorBase_V1": "_get_connector_metadata",
    f"{V1}.base:KVConnectorRole": "WORKER",
    f"{V1}.base:KVConnectorTransferResults": "failed_recving finished_recving finished_sending",
    f"{V1}.offloading.common:OffloadingConnectorMetadata": "jobs_to_flush load_jobs store_jobs",
    f"{V1}.offloading.common:OffloadingWorkerMetadata": "aggregate completed_jobs transfer_stats",
    f"{V1}.offloading.common:TransferJob": "dst_spec req_id src_spec",
    f"{V1}.offloading.scheduler:OffloadingConnectorScheduler": """
        _current_batch_allocated_block_ids _maximal_prefix_lookup _sliding_window_lookup _update_req_states config
        get_num_new_matched_tokens manager""",
    f"{V1}.offloading.scheduler:RequestOffloadState": "max_offload_tokens",
    f"{V1}.offloading.scheduler:SchedulerOffloadConfig": "supports_partial_tail",
    f"{V1}.offloading.worker:OffloadingConnectorWorker": "prepare_store_kv spec start_kv_transfers worker",
    f"{V1}.offloading_connector:OffloadingConnector": """
        bind_gpu_block_pool build_connector_meta build_connector_worker_meta build_prom_metrics get_finished
        get_num_new_matched_tokens get_required_kvcache_layout handle_preemptions has_pending_push_work
        on_new_request register_kv_caches requires_piecewise_for_cudagraph reset_cache update_connector_output
        update_state_after_alloc""",
    "vllm.lora.request:LoRARequest": "load_inplace lora_int_id lora_name lora_path",
    "vllm.multimodal.inputs:MultiModalFeatureSpec": "mm_position",
    "vllm.multimodal.inputs:PlaceholderRange": "length offset",
    "vllm.v1.core.block_pool:BlockPool": "get_cached_block get_new_blocks get_usage reset_prefix_cache",
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": "blocks",
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": "block_id is_null",
    "vllm.v1.core.sched.output:KVConnectorBlockState": "boundary_state_offloads",
    "vllm.v1.core.sched.output:NewRequestData": "req_id",
    "vllm.v1.core.sched.output:SchedulerOutput": """
        kv_connector_block_state kv_connector_metadata num_scheduled_tokens preempted_req_ids scheduled_new_reqs
        total_num_scheduled_tokens""",
    "vllm.v1.kv_cache_interface:KVCacheConfig": "kv_cache_groups kv_cache_layout needs_kv_cache_zeroing num_blocks",
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": "kv_cache_spec layer_names",
    "vllm.v1.kv_cache_interface:KVCacheSpec": "block_size dcp_sharded max_memory_usage_bytes page_size_bytes",
    "vllm.v1.kv_offload.base:CanonicalKVCacheRef": "page_size_bytes tensor_idx",
    "vllm.v1.kv_offload.base:CanonicalKVCacheTensor": "tensor",
    "vllm.v1.kv_offload.base:CanonicalKVCaches": "group_data_refs tensors",
    "vllm.v1.kv_offload.base:GPULoadStoreSpec": "block_ids block_indices group_sizes",
    "vllm.v1.kv_offload.base:Locality": "LOCAL REMOTE",
    "vllm.v1.kv_offload.base:LookupResult": "HIT HIT_PENDING MISS RETRY",
    "vllm.v1.kv_offload.base:Medium": "STORAGE",
    "vllm.v1.kv_offload.base:OffloadPolicy": "REQUEST_LEVEL",
    "vllm.v1.kv_offload.base:OffloadingSpec": "blocks_per_chunk config tokens_per_block tokens_per_hash",
    "vllm.v1.kv_offload.base:ReqContext": """
        get_offload_key_position kv_hints kv_transfer_params load_tier_filter req_id""",
    "vllm.v1.kv_offload.base:TierFilter": "allows matchers",
    "vllm.v1.kv_offload.base:TransferResult": "job_id success transfer_size transfer_time",
    "vllm.v1.kv_offload.config:OffloadingCacheConfig": "blocks_per_chunk tokens_per_hash",
    "vllm.v1.kv_offload.config:OffloadingConfig": """
        cache enable_kv_cache_events engine_id extra_config groups kv_cache_layout model parallel replicated_layout""",
    "vllm.v1.kv_offload.config:OffloadingGroupConfig": "group_id tokens_per_block",
    "vllm.v1.kv_offload.config:OffloadingModelConfig": "dtype",
    "vllm.v1.kv_offload.config:OffloadingParallelConfig": "data_parallel_index rank world_size",
    "vllm.v1.kv_offload.factory:OffloadingSpecFactory": "register_spec",
    "vllm.v1.metrics.cache_hit_source:CacheHitSource": "DISK EXTERNAL_UNSPECIFIED HOST",
    "vllm.v1.outputs:KVConnectorOutput": "kv_connector_worker_meta",
    "vllm.v1.request:Request": """
        all_token_ids arrival_time block_hashes cache_salt is_finished kv_transfer_params lora_request mm_features
        num_computed_tokens num_preemptions num_prompt_tokens num_tokens pooling_params priority prompt_embeds
        request_id shared_prefix_boundary skip_reading_prefix_cache""",
}
"""Attributes that the connector reads, by class of vLLM. A test finds missing ones."""

SIGNATURES = {
    f"{V1}.offloading.scheduler:OffloadingConnectorScheduler._maximal_prefix_lookup": """
        keys req_context req group_config start_chunk_idx""",
    f"{V1}.offloading.scheduler:OffloadingConnectorScheduler._sliding_window_lookup": """
        keys sliding_window_size req_context initial_window_size""",
    f"{V1}.offloading.scheduler:OffloadingConnectorScheduler._update_req_states": "scheduler_output",
    f"{V1}.offloading.scheduler:OffloadingConnectorScheduler.get_num_new_matched_tokens": """
        request num_computed_tokens max_num_new_tokens""",
    f"{V1}.offloading.worker:OffloadingConnectorWorker.prepare_store_kv": "metadata",
    f"{V1}.offloading.worker:OffloadingConnectorWorker.start_kv_transfers": "metadata",
    f"{V1}.offloading_connector:OffloadingConnector.__init__": "vllm_config role kv_cache_config",
    "vllm.v1.core.block_pool:BlockPool.get_cached_block": "block_hash kv_cache_group_ids",
    "vllm.v1.core.block_pool:BlockPool.get_new_blocks": "num_blocks",
    "vllm.v1.core.block_pool:BlockPool.reset_prefix_cache": "",
    "vllm.v1.kv_offload.base:OffloadingSpec.__init__": "config",
    "vllm.v1.kv_offload.base:make_offload_key": "block_hash group_idx",
}
"""Parameters of functions that the connector calls or replaces."""

HAS_DEFECTS_OF_0_32 = release_of(vllm.__version__) == (0, 32)
"""Whether this vLLM needs ``forget_streamed_blocks`` and ``record_scheduled_blocks``."""


def require_vllm() -> None:
    """Raise ImportError if this vLLM is too old, or lacks something that the connector uses."""
    version = vllm.__version__
    if version == "dev":
        raise ImportError(
            "kvoffd cannot tell which engines may share blocks, because vLLM does not know its version, as when it is "
            f"run from sources that were not built. kvoffd was tested with vLLM {_TESTED}: install one of those, or "
            "build vLLM with its version."
        )
    if (release_of(version) or (0, 0)) < MINIMUM:
        raise ImportError(
            f"kvoffd's vLLM connector needs vLLM {'.'.join(map(str, MINIMUM))} or newer, but this is vLLM {version}. "
            f"It was tested with vLLM {_TESTED}."
        )
    try:
        changed = _changes()
    except ImportError as error:
        changed = [str(error)]
    _refuse(changed)


def _changes() -> list[str]:
    """Return what in this vLLM differs from USED and SIGNATURES. Raises ImportError if a module has moved."""
    changed = []
    for place, names in USED.items():
        name, cls = _find(place)
        known = _names_of(cls) if isinstance(cls, type) else set()
        changed += [f"{name}.{one}" for one in names.split() if one not in known]
    for place, names in SIGNATURES.items():
        name, function = _find(place)
        parameters = inspect.signature(function).parameters if callable(function) else ()
        if [one for one in parameters if one != "self"] != names.split():
            changed.append(f"{name}'s parameters")
    return changed or [name for name, holds in _checks().items() if not _is_true(holds)]


def _checks() -> dict[str, Callable[[], bool]]:
    """Return trials of what the connector makes, by name. Raises ImportError if a module has moved."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.v1.kv_offload import base

    def block_lists() -> bool:
        spec = base.GPULoadStoreSpec([3], [1], [0])
        return (list(spec.block_ids), list(spec.group_sizes), list(spec.block_indices)) == ([3], [1], [0])

    def positions() -> bool:
        context = base.ReqContext("request")
        context.set_offload_key_position(b"key", 32)
        return context.get_offload_key_position(b"key") == 32

    return {
        "KVConnectorTransferResults": lambda: bool(KVConnectorTransferResults(failed_recving=set())),
        "TransferResult": lambda: bool(base.TransferResult(1, True, transfer_size=1, transfer_time=1.0)),
        "GPULoadStoreSpec": block_lists,
        "make_offload_key": lambda: base.make_offload_key(b"h" * 32, 7) == b"h" * 32 + b"\0\0\0\7",
        "LookupResult": lambda: {"HIT", "HIT_PENDING", "MISS", "RETRY"} == {one.name for one in base.LookupResult},
        "ReqContext": positions,
    }


def _is_true(holds: Callable[[], bool]) -> bool:
    try:
        return holds()
    except Exception:  # of any kind, in another release
        return False


def _find(place: str) -> tuple[str, Any]:
    """Return the name in ``place`` and what it names, None if that is gone."""
    module, _, name = place.partition(":")
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return name, found


def _names_of(cls: type) -> set[str]:
    """Return the attributes of a class's objects, including those set by constructors."""
    names = set(dir(cls))
    for base in cls.__mro__:
        names |= vars(base).get("__annotations__", {}).keys()
        for made in ("__init__", "__post_init__"):
            names |= {*getattr(getattr(vars(base).get(made), "__code__", None), "co_names", ())}
    return names


def require_methods(*classes: type) -> None:
    """Raise ImportError if these classes of the connector lack methods that vLLM requires."""
    _refuse([f"{cls.__mro__[1].__name__}'s methods" for cls in classes if inspect.isabstract(cls)])


def _refuse(changed: list[str]) -> None:
    if changed:
        raise ImportError(
            f"kvoffd's vLLM connector does not fit vLLM {vllm.__version__}, which has changed: {'; '.join(changed)}. "
            f"This kvoffd was tested with vLLM {_TESTED}: install one of those, or a newer kvoffd."
        )


def untested() -> str:
    """Return a sentence if this vLLM is not a tested release, else an empty string."""
    if _RELEASE.fullmatch(vllm.__version__) and release_of(vllm.__version__) in TESTED:
        return ""
    return (
        f"This kvoffd was tested with the releases {_TESTED} of vLLM, but this is vLLM {vllm.__version__}. Its "
        "interfaces fit. It shares blocks only with engines of exactly this version."
    )


def version_factor() -> str:
    """Return the part of vLLM's version in the fingerprint: all of it if it is not a tested release."""
    return vllm.__version__ if untested() else ".".join(map(str, release_of(vllm.__version__) or ()))


def check_version(*, strict: bool) -> None:
    """Raise ValueError if ``strict`` requires a tested release and this vLLM is not one."""
    if strict and (sentence := untested()):
        raise ValueError(f"kvoffd cannot serve this engine because strict_version is set. {sentence}")


def forget_streamed_blocks(scheduler: Any, request_ids: Iterable[str]) -> None:
    """Make 0.32's offloading scheduler forget the blocks of requests that are scheduled as new.

    0.32 appends the blocks of a new request to those already recorded for it. But the next part of a streamed input
    (vLLM's session) is scheduled as a new request with all blocks of the parts before, and so is, with Model Runner V2,
    a request that resumes after a preemption. (For the latter vLLM also forgets the old blocks when it asks whether it
    can be loaded.)
    """
    for request_id in request_ids:
        if (status := scheduler._req_status.get(request_id)) is not None:
            for group in status.group_states:
                group.block_ids.clear()


def record_scheduled_blocks(scheduler: Any, block_ids: Iterable[int]) -> None:
    """Make stores that read these blocks end before this step.

    0.32 records only blocks that it loads itself or computes. With MultiConnector another connector may load into them,
    and a store of their previous contents would copy its bytes.
    """
    scheduler._current_batch_allocated_block_ids.update(block_ids)


def record_new_blocks(pool: Any, new: set[int]) -> None:
    """Add to ``new`` the ids of blocks that vLLM's pool allocates for writing: all but cache hits."""
    give = pool.get_new_blocks

    @wraps(give)
    def get_new_blocks(num_blocks: int) -> Any:
        blocks = give(num_blocks)
        new.update([block.block_id for block in blocks])
        return blocks

    pool.get_new_blocks = get_new_blocks


def notice_resets(pool: Any, handle_reset: Callable[[], None]) -> None:
    """Call ``handle_reset`` whenever vLLM's pool has forgotten its cached blocks.

    The event that it queues then is not enough: with several batches in flight vLLM may take that from the queue before
    the connector makes a step in which it could see it.
    """
    reset = pool.reset_prefix_cache

    @wraps(reset)
    def reset_prefix_cache() -> bool:
        done: bool = reset()
        if done:
            handle_reset()
        return done

    pool.reset_prefix_cache = reset_prefix_cache


def skip_fence_for_readers(scheduler: Any, only_read: Callable[[], set[int]]) -> None:
    """Do not wait for stores before a step that only reads their blocks.

    When a request begins, vLLM treats all its blocks as blocks to be written, also hits of its own cache.
    """
    update = scheduler._update_req_states

    @wraps(update)
    def update_req_states(scheduler_output: Any) -> None:
        update(scheduler_output)
        scheduler._current_batch_allocated_block_ids.difference_update(only_read())

    scheduler._update_req_states = update_req_states


def patch_v2_runner_fence(runner: Any, fence: Callable[[Any], None]) -> bool:
    """Call ``fence``, a handle_preemptions(), before vLLM's Model Runner V2 writes to blocks.

    V1 calls it before anything else. V2 calls it just before the forward pass, after it has zeroed new blocks and
    copied others (of mamba layers and mixed-precision caches), which stores may still read. That later call remains.
    False if the runner is not V2.
    """
    write = getattr(runner, "update_requests", None)  # not in V1
    if not callable(write):
        return False

    @wraps(write)
    def update_requests(scheduler_output: Any) -> Any:
        for metadata in _offloading_metadata(scheduler_output.kv_connector_metadata):
            if metadata.jobs_to_flush:
                fence(metadata)
        return write(scheduler_output)

    runner.update_requests = update_requests
    return True


def _offloading_metadata(metadata: object) -> Iterator[Any]:
    """Yield the connector's own metadata, also inside MultiConnector's; no other connector there has this class."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata

    if isinstance(metadata, OffloadingConnectorMetadata):
        yield metadata
    for child in getattr(metadata, "metadata", ()):
        yield from _offloading_metadata(child)
