"""Options of ``kv_connector_extra_config``, and checks of the engine's configuration at its start."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import vllm
from msgspec import Meta, Struct
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import iter_layer_specs

from kvoffd_client.session import ClientOptions
from kvoffd_client.vllm.hints import HintsOption
from kvoffd_proto.paths import default_directory

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

VLLM_KEYS = frozenset(
    {
        "block_size",
        "blocks_per_chunk",
        "offload_prompt_only",
        "self_describing_kv_events",
        "spec_module_path",
        "spec_name",
    }
)
"""vLLM's own keys for its offloading connector (0.32 and 0.33), which pass through."""
REFUSED = {
    "canonical_layout": "it keeps each tensor parallel rank's shards as they are (engines of one size share them)",
    "sync_load_budget_bytes": "a load that fails inside a step cannot be recomputed",
}
"""Unsupported options of vLLM's offloading, with the reason."""

Positive = Annotated[float, Meta(gt=0, lt=3_600_000)]


class ConnectorOptions(Struct, frozen=True):
    """The connector's own options, checked.

    Attributes:
        directory: directory of the daemon's sockets; empty for $KVOFFD_DIRECTORY, else /run/kvoffd for root and where
            it exists, else $XDG_RUNTIME_DIR/kvoffd.
        salt: part of the namespace's fingerprint; engines with different salts share nothing.
        lookup_deadline_ms: a lookup without an answer by then is a miss. With ``do_no_harm`` it is a miss earlier if
            computing the prompt is faster, or after late answers; and later for a very long prompt, see
            ``AnswerWait``.
        disk_wait_ms: longest wait of a request for blocks from disk or a shared store; 0: use only ready blocks. With
            ``do_no_harm`` it waits only while loading is expected to be faster than computing.
        store_fence_timeout_s: longest wait of vLLM for a running store before its blocks are reused; then the store is
            abandoned, and the daemon never commits it.
        do_no_harm: skip loads that take longer than computing, pause stores that vLLM waits for, and wait for a lookup
            no longer than computing takes.
        kv_layout: layout of the engine's KV cache: "vllm" as for vLLM's own offloading, or "block_outermost", with all
            layers of a block contiguous and copied as one piece. On a CPU it is always vLLM's.
        hints: which hints of requests are obeyed: "off" for none, "no_release" for all but ``kv.release``, or "all".
        strict_version: refuse untested vLLM releases; by default they get a warning.
    """

    directory: str = ""
    salt: str = ""
    lookup_deadline_ms: Positive = 200.0
    disk_wait_ms: Annotated[float, Meta(ge=0, lt=3_600_000)] = 120_000.0
    store_fence_timeout_s: Positive = 2.0
    do_no_harm: bool = True
    kv_layout: Literal["vllm", "block_outermost"] = "vllm"
    hints: HintsOption = "no_release"
    strict_version: bool = False

    @property
    def lookup_deadline_s(self) -> float:
        return self.lookup_deadline_ms / 1000

    @property
    def disk_wait_s(self) -> float:
        return self.disk_wait_ms / 1000

    @property
    def client_options(self) -> ClientOptions:
        """Options of the scheduler's client, whose timeouts must not be shorter than the lookup's deadline."""
        return ClientOptions(
            request_timeout_s=max(self.lookup_deadline_s, ClientOptions.request_timeout_s),
            unresponsive_after_s=max(self.lookup_deadline_s, ClientOptions.unresponsive_after_s),
        )

    @property
    def socket_directory(self) -> str:
        return self.directory or str(default_directory())


OWN_KEYS = ConnectorOptions.__struct_fields__


def parse_options(extra_config: Mapping[str, object]) -> tuple[ConnectorOptions, list[str]]:
    """Return the options, and the keys that neither kvoffd nor vLLM's offloading connector knows.

    Raises:
        ValueError: a misspelt key, a value of a wrong type or range, or an unsupported option of vLLM. The message
            names the key.
    """
    unknown = []
    for key in extra_config.keys() - VLLM_KEYS - {*OWN_KEYS}:
        near = difflib.get_close_matches(key, OWN_KEYS, n=1, cutoff=0.75)
        if key in REFUSED:
            problem = f"KvoffdConnector does not support {key}: {REFUSED[key]}. Leave it out."
            if not extra_config[key]:
                continue
        elif near:
            problem = f"{key!r} is not an option of KvoffdConnector; did you mean {near[0]!r}?"
        elif key.startswith("kvoffd"):
            problem = f"{key!r} is not an option of KvoffdConnector; the options are {', '.join(OWN_KEYS)}."
        else:
            unknown.append(key)
            continue
        raise ValueError(f"kv_connector_extra_config: {problem}")
    try:
        return msgspec.convert(dict(extra_config), ConnectorOptions), unknown
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_connector_extra_config: {error}.") from error


CPU_CACHE_DTYPES = {"auto", "fp8", "fp8_e4m3", "fp8_e5m2"}
"""The KV cache dtypes of vLLM's CPU backend. vLLM 0.32 starts with others too; its kernel then writes the model's type
at places computed for the cache's. In a bfloat16 cache of a float32 model, block 1 lies where 2 and 3 are."""

HAS_SLEEP_HOOKS = hasattr(OffloadingConnector, "restore_kv_caches")


def check_engine(vllm_config: VllmConfig) -> None:
    """Raise ValueError if an engine of this configuration (vllm.config.VllmConfig) cannot use kvoffd."""
    reason = _problem(vllm_config)
    if reason:
        raise ValueError(f"kvoffd cannot serve this engine: {reason}")


def check_groups(kv_cache_config: KVCacheConfig, extra_config: Mapping[str, object]) -> None:
    """Raise ValueError if the engine's KV cache groups (KVCacheConfig) cannot be offloaded."""
    if not get_offloading_group_ids(kv_cache_config):
        raise ValueError(
            "kvoffd cannot serve this engine: its model has no KV cache group with prefix caching, so later prompts "
            "cannot reuse anything. Start it without --kv-transfer-config."
        )
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in iter_layer_specs(group.kv_cache_spec)]
    if any(getattr(spec, "non_causal", False) for spec in specs):
        raise ValueError(
            "kvoffd cannot serve this engine: its attention is not causal, so the KV of a prefix depends on the tokens "
            "that follow. Start it without --kv-transfer-config."
        )
    if any(hasattr(spec, "rswa_window") for spec in specs) and not extra_config.get("offload_prompt_only", True):
        raise ValueError(
            "kvoffd cannot serve this engine: its layers attend to a window of generated tokens but to all prompt "
            "tokens, so prompts must not use blocks of generated tokens (R-SWA). Leave out offload_prompt_only."
        )


@functools.cache
def machine_id() -> str:
    """Return an id of this machine, the same in all its containers; empty if unknown."""
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
    cache_dtype = vllm_config.cache_config.cache_dtype
    if current_platform.is_cpu() and cache_dtype not in {*CPU_CACHE_DTYPES, str(model.dtype).removeprefix("torch.")}:
        return (
            f"vLLM's CPU backend does not support a KV cache of {cache_dtype}: it writes beyond the blocks, so "
            "that loaded prompts would get other answers. Start it without --kv-cache-dtype."
        )
    if model.is_encoder_decoder:
        return (
            "vLLM gives no KV connector the cache of an encoder-decoder model. Start it without --kv-transfer-config."
        )
    if parallel.nnodes_within_dp > 1:
        return (
            f"its workers are on {parallel.nnodes_within_dp} nodes, but a daemon serves one node. Use tensor and "
            "pipeline parallelism within a node, and data parallelism between nodes."
        )
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        return (
            "with external_launcher each rank schedules on its own and all must decide the same, but the daemon's "
            "answers reach them in different steps. Start it without --kv-transfer-config, or with "
            "--distributed-executor-backend mp."
        )
    if (model.enable_sleep_mode or model.enable_cumem_allocator) and not HAS_SLEEP_HOOKS:
        return (
            f"vLLM {vllm.__version__} does not notify connectors before it sleeps or frees its KV cache. Start it "
            "without sleep mode and without --enable-cumem-allocator, which permits sleep too, or use vLLM 0.33."
        )
    if model.runner_type == "pooling" and not model.is_prefix_caching_supported:
        return (
            "its pooling type needs all tokens of a prompt to be computed, so vLLM supports no prefix caching for it, "
            "and nothing can be loaded. Start it without --kv-transfer-config, or with the pooling type LAST if the "
            "model was trained for that."
        )
    if vllm_config.aux_output_config.enabled:
        return (
            "it returns the routed experts of prompts, but has them only for tokens that it computed itself: the first "
            "loaded prompt would end it. Start it without --enable-return-routed-experts, or without "
            "--kv-transfer-config."
        )
    if vllm_config.attention_config.hisparse_config is not None:
        return (
            "with HiSparse most of the KV cache is in vLLM's own host pool, and KV connectors have access only to the "
            "rest, so prompts would be incomplete. Start it without HiSparse, or without kvoffd."
        )
    if vllm_config.offload_config.prefetch.offload_group_size:
        return (
            "its layers share buffers on the GPU, so the digest that detects updated weights would not cover all of "
            "them. Start it without --offload-group-size; --cpu-offload-gb works."
        )
    multimodal = model.multimodal_config
    if (
        multimodal is not None
        and not multimodal.language_model_only
        and multimodal.mm_processor_cache_gb == 0
        and not vllm_config.cache_config.enable_prefix_caching
    ):
        return (
            "with prefix caching off and mm_processor_cache_gb=0 vLLM numbers images instead of hashing them, so one "
            "user's image would be confused with another's. Start it with --enable-prefix-caching, or with an "
            "--mm-processor-cache-gb above 0."
        )
    return ""
