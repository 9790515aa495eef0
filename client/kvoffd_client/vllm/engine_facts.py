"""The engine's properties that lookups, stores and loads depend on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, get_kv_cache_spec_kind, iter_layer_specs

if TYPE_CHECKING:
    from vllm.config import SchedulerConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

ASSUMED_RATE, ASSUMED_CPU_RATE = 10_000.0, 500.0
"""Assumed prefill rates in tokens per second, on a GPU and on a CPU, while the rate is unknown. Estimates for a large
GPU and for few cores."""


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """Properties of an engine's configuration. Groups are the offloaded ones, by index on the wire.

    Attributes:
        shard_bytes: by group, approximate bytes of one worker's shard of a block.
        most_running, prompt_step_tokens: see ``PrefillRate``.
        step_tokens, by_priority: see ``PromptQueue``.
        may_pause: an idle engine may pause in a step, because no other rank waits for it.
        state_groups: groups of recurrent layers, whose states vLLM offers separately.
        only_prefixes: all groups are of full attention.
        tail_tokens: tokens per hash if tails (``tails.py``) are stored, else 0.
        assumed_rate: prefill rate in tokens per second, while it is unknown.
        publishes_events: the engine publishes KV events.
    """

    shard_bytes: Sequence[int]
    most_running: int
    prompt_step_tokens: int
    step_tokens: int = 8192
    by_priority: bool = False
    may_pause: bool = True
    state_groups: Collection[int] = ()
    only_prefixes: bool = True
    tail_tokens: int = 0
    assumed_rate: float = ASSUMED_RATE
    publishes_events: bool = False


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """Shape of an engine's KV cache, and what of a prompt it can use.

    Attributes:
        block_tokens: tokens of the smallest block.
        chunk_tokens: tokens of the largest chunk.
        blocks_per_chunk: the engine's blocks per key.
        dropped_tokens: tokens that vLLM finds in its own cache and computes again, for the hidden states that EAGLE and
            MTP read.
        group_ids: vLLM's numbers of the offloaded groups.
        attention_ids: those of groups of attention.
        full_attention: vLLM's kind of each group of full attention, by index on the wire.
        has_windows_or_states: some group is not of full attention.
    """

    block_tokens: int
    chunk_tokens: int
    blocks_per_chunk: int
    dropped_tokens: int
    group_ids: list[int]
    attention_ids: list[int]
    full_attention: dict[int, str]
    has_windows_or_states: bool

    def usable_tokens(self, tokens: int, own_tokens: int) -> int:
        """Return how many of a request's tokens vLLM can use from its own cache, which has ``own_tokens``: whole
        blocks, without the last token.

        With EAGLE it finds a block less in its cache, but loads that block too, if the cache has nothing of the prompt.
        """
        usable = (tokens - 1) // self.block_tokens * self.block_tokens
        return usable - self.dropped_tokens if own_tokens else usable


def step_tokens_of(config: SchedulerConfig) -> int:
    """Return the most tokens that an engine computes in a step."""
    return int(config.max_num_scheduled_tokens or config.max_num_batched_tokens)


def prompt_step_tokens_of(config: SchedulerConfig) -> int:
    """Return the most tokens of a prompt that an engine computes in a step."""
    tokens = step_tokens_of(config)
    return min(tokens, config.long_prefill_token_threshold or tokens)


def facts_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, stores_tails: bool
) -> tuple[EngineFacts, CacheShape]:
    """Return the properties of an engine. ``stores_tails``: vLLM offers tails for stores."""
    offloading = build_offloading_config(vllm_config, kv_cache_config)
    cache, scheduler, speculation = offloading.cache, vllm_config.scheduler_config, vllm_config.speculative_config
    groups = [kv_cache_config.kv_cache_groups[group.group_id] for group in offloading.groups]
    specs = [next(iter(iter_layer_specs(whole.kv_cache_spec))) for whole in groups]
    pages = [spec.page_size_bytes * len(whole.layer_names) for spec, whole in zip(specs, groups, strict=True)]
    full_attention = {
        index: get_kv_cache_spec_kind(spec).value
        for index, spec in enumerate(specs)
        if isinstance(spec, FullAttentionSpec)
    }
    only_prefixes = len(full_attention) == len(groups)
    block_tokens = min(group.tokens_per_block for group in offloading.groups)
    drops_block = speculation is not None and speculation.use_eagle_block_drop()
    shape = CacheShape(
        block_tokens=block_tokens,
        chunk_tokens=max(group.tokens_per_block for group in offloading.groups) * cache.blocks_per_chunk,
        blocks_per_chunk=cache.blocks_per_chunk,
        dropped_tokens=block_tokens if drops_block and only_prefixes else 0,
        group_ids=[group.group_id for group in offloading.groups],
        attention_ids=[
            group.group_id
            for group, spec in zip(offloading.groups, specs, strict=True)
            if isinstance(spec, AttentionSpec)
        ],
        full_attention=full_attention,
        has_windows_or_states=not only_prefixes,
    )
    facts = EngineFacts(
        shard_bytes=[page * cache.blocks_per_chunk for page in pages],
        most_running=vllm_config.max_concurrent_batches,
        prompt_step_tokens=prompt_step_tokens_of(scheduler),
        step_tokens=step_tokens_of(scheduler),
        by_priority=scheduler.policy == "priority",
        may_pause=vllm_config.parallel_config.data_parallel_size == 1,
        state_groups=[index for index, spec in enumerate(specs) if getattr(spec, "mamba_cache_mode", "") == "align"],
        only_prefixes=only_prefixes,
        tail_tokens=cache.tokens_per_hash if stores_tails else 0,
        assumed_rate=ASSUMED_CPU_RATE if current_platform.is_cpu() else ASSUMED_RATE,
        publishes_events=offloading.enable_kv_cache_events,
    )
    return facts, shape
