"""Limits the blocks that loads take, so that some stay free to compute, and keeps long prompts behind earlier loads."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import TYPE_CHECKING, TypeAlias

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    get_kv_cache_spec_sliding_window,
    iter_layer_specs,
)

from kvoffd_client.vllm.engine_facts import prompt_step_tokens_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

LOADED_SHARE = 3 / 4
"""Share of the KV cache for loaded requests that have not computed since. One alone may use 100 %."""
STUCK_S = 1.0
"""Time that others wait for a loaded request that vLLM does not schedule. Then they compute."""
LONGEST_DELAY_S = 1.0
"""Longest time from the begin of a load for which later long prompts wait for it."""
SortKey: TypeAlias = tuple[float, float]
"""Sort key of a waiting request in vLLM: its priority, or 0, and its time of arrival."""
BEHIND_ALL: SortKey = inf, inf


class Admission(Enum):
    """Whether a request may be loaded."""

    LOAD = auto()
    LATER = auto()
    """It waits at least until the next step."""
    ONLY_COMPUTE = auto()
    """The KV cache has no space for its load, or loaded requests that vLLM does not schedule would keep it waiting."""


@dataclass(slots=True, eq=False)
class Loaded:
    """A request that was loaded and has not computed since.

    Attributes:
        awaited_until: time until which later long prompts wait for its load.
        blocks: most blocks that it can need; 0 while unknown.
        ended_at: time when the end of its load was noticed; None before.
        passed: whether it was passed over once after its load failed.
    """

    awaited_until: float
    blocks: float = 0
    ended_at: float | None = None
    passed: bool = False


class LoadAdmission:
    """Admits loads to the KV cache so that they cannot deadlock it.

    vLLM can preempt a loaded request only after it has computed something. With sliding windows vLLM reserves too few
    free blocks: it counts blocks that the window has left as still held. With speculation it also needs free blocks for
    a step's drafts. So a cache full of loads would block for ever, with all requests behind them.

    vLLM gives a step's tokens to running requests first. A prompt of several steps that begins while an earlier request
    is loaded would take all of them until it is computed, and the earlier one would come later than without a load. So
    it begins after the load, or once that could have been computed, or after LONGEST_DELAY_S.

    For a request whose load failed, vLLM reserves the free blocks that it needs until it is scheduled. A load that does
    not fit in addition would block all requests behind it, including that one.

    Args:
        clock: clock such as time.monotonic().
        loading: ids of the requests that are being loaded.

    Attributes:
        pool: vLLM's blocks; None before they are known.
        has_deferred: whether a load was deferred in this step. Later loads are then deferred too, to keep the order.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        clock: Callable[[], float],
        loading: Collection[str],
    ) -> None:
        self._clock, self._loading = clock, loading
        groups = kv_cache_config.kv_cache_groups
        self._specs = [next(iter(iter_layer_specs(one.kv_cache_spec))) for one in groups if not one.host_resident]
        """Spec of a layer of each group: blocks of its other layers have as many tokens, and as large a window."""
        self._most_by_spec = [_most_blocks(spec, vllm_config) for spec in self._specs]
        """Most blocks of each spec that vLLM gives to a request of any length."""
        self._context_parallel = vllm_config.parallel_config.decode_context_parallel_size
        self._step_tokens = vllm_config.max_in_flight_tokens
        self._prompt_step_tokens = prompt_step_tokens_of(vllm_config.scheduler_config)
        self._by_priority = vllm_config.scheduler_config.policy == "priority"
        self._drafts = vllm_config.num_speculative_tokens + vllm_config.num_lookahead_tokens
        speculates = bool(vllm_config.num_speculative_tokens)
        windowed = any(isinstance(spec, MambaSpec) or _window_of(spec) for spec in self._specs)
        of_drafts = [
            cdiv(1 + self._drafts, self._block_tokens(one)) for one in self._specs if not isinstance(one, MambaSpec)
        ]
        self._kept_free: int = sum(of_drafts) if speculates else 0
        """Blocks that a step with drafts needs."""
        can_block = speculates or windowed
        self._limited_blocks: float = kv_cache_config.num_blocks - 1 if can_block else inf  # one is the null block
        """Blocks of the KV cache, if loads could deadlock it; else infinity."""
        self._loaded: dict[Request, Loaded] = {}
        self._first_awaited: SortKey | None = None
        """Key of the first request for whose load later ones wait in this step; None while unknown."""
        self.pool: BlockPool | None = None
        self.has_deferred = False

    def begin_step(self) -> None:
        """Begin a step, in which no load was deferred and others have ended."""
        self.has_deferred, self._first_awaited = False, None

    def record_scheduled(self, request: Request, *, computed_s: float) -> None:
        """Record that a request is scheduled. ``computed_s``: time to compute what it loads; 0 if it loads nothing."""
        self._loaded = {other: load for other, load in self._loaded.items() if not other.is_finished()}
        self._loaded.pop(request, None)
        self._first_awaited = None
        if computed_s:
            self._loaded[request] = Loaded(self._clock() + min(computed_s, LONGEST_DELAY_S))

    @property
    def holds_up_others(self) -> bool:
        """Whether some requests wait in this step for the loads of others."""
        return self.has_deferred or self._first_awaited_key() < BEHIND_ALL

    def waits_for_earlier(self, request: Request, cached: int) -> bool:
        """Return whether a request, ``cached`` of whose tokens are in the cache, would take several steps' tokens from
        one that came earlier and is being loaded."""
        takes_several = request.num_tokens - cached > self._prompt_step_tokens
        return takes_several and self._first_awaited_key() < self._sort_key(request)

    def _first_awaited_key(self) -> SortKey:
        """Return the key of the first request for whose load later ones wait; BEHIND_ALL if there is none."""
        if self._first_awaited is None:
            now, loads = self._clock(), self._loaded.items()
            awaited = (one for one, load in loads if load.awaited_until > now and one.request_id in self._loading)
            self._first_awaited = min(map(self._sort_key, awaited), default=BEHIND_ALL)
        return self._first_awaited

    def admit_compute(self, request: Request, cached: int) -> bool:
        """Return whether a request may be scheduled in this step without a load; ``cached`` of its tokens are in the
        cache. One whose load failed is passed over once."""
        failed = self._loaded.get(request)  # a loaded request is asked for again only after its load failed
        if failed is not None and not failed.passed:
            # vLLM keeps it in kv_holding_waiting, before all others, until it is passed over.
            failed.passed = True
            return False
        return not self.waits_for_earlier(request, cached)

    def admit_load(self, request: Request, cached: int) -> Admission:
        """Return whether a request may be scheduled in this step to be loaded, after which ``cached`` of its tokens
        are in the cache. Once one was deferred, later ones of the step are too."""
        if self.has_deferred or self.waits_for_earlier(request, cached):
            return Admission.LATER
        others = self._update_others(request)
        if self._fits(request, cached, others):
            return Admission.LOAD
        if not others:
            return Admission.ONLY_COMPUTE
        oldest = self._clock() - STUCK_S
        moving = {other: load for other, load in others.items() if load.ended_at is None or load.ended_at > oldest}
        if len(moving) < len(others) and self._fits(request, cached, moving):
            return Admission.ONLY_COMPUTE  # only those that vLLM does not schedule keep it waiting
        self.has_deferred = True
        return Admission.LATER

    def _sort_key(self, request: Request) -> SortKey:
        return request.priority if self._by_priority else 0, request.arrival_time

    def _update_others(self, request: Request) -> dict[Request, Loaded]:
        """Record which loads of other requests have ended, and the blocks of each. Return those that have not computed
        since."""
        others = {
            other: load for other, load in self._loaded.items() if other is not request and not other.is_finished()
        }
        for other, load in others.items():
            if load.ended_at is None and other.request_id not in self._loading:
                load.blocks, load.ended_at = 0, self._clock()  # counted again: after a failure all tokens are computed
            load.blocks = load.blocks or self._blocks_of(other.num_tokens + self._drafts, other.num_computed_tokens)
        return others

    def _fits(self, request: Request, cached: int, others: dict[Request, Loaded]) -> bool:
        """Return whether a request fits besides the others, during its load and with ``cached`` tokens cached."""
        if not others and self._limited_blocks == inf:
            return True
        blocks = self._blocks_of(request.num_tokens + self._drafts, cached)
        if not others:
            return self._fits_alone(blocks, cached)
        if not self._fits_besides_failed(blocks, others):
            return False
        taken = blocks + self._kept_free + sum(load.blocks for load in others.values())
        return taken <= LOADED_SHARE * self._limited_blocks

    def _fits_alone(self, blocks: float, cached: int) -> bool:
        """Return whether the KV cache has a request's ``blocks``, which it needs once it computes, and what it needs
        before that: the blocks that it loads, with those that stay free for drafts."""
        return max(blocks, self._blocks_of(cached, cached) + self._kept_free) <= self._limited_blocks

    def _fits_besides_failed(self, blocks: float, others: dict[Request, Loaded]) -> bool:
        """Return whether ``blocks`` are free besides those that vLLM keeps for the others whose load failed: those of
        which nothing is computed."""
        failed = sum(load.blocks for other, load in others.items() if not other.num_computed_tokens)
        free = self.pool.get_num_free_blocks() if self.pool is not None else inf
        return not failed or blocks + failed + self._kept_free <= free

    def _blocks_of(self, tokens: int, cached: int) -> float:
        """Return the most blocks that a request of ``tokens``, ``cached`` of them computed, may have at once."""
        blocks = 0.0
        for spec, most in zip(self._specs, self._most_by_spec, strict=True):
            size = self._block_tokens(spec)
            if window := _window_of(spec):
                needed = cdiv(min(tokens, window + min(tokens - cached, self._step_tokens)), size) + 1
            else:
                needed = cdiv(tokens, size) + (spec.num_speculative_blocks if isinstance(spec, MambaSpec) else 0)
            blocks += min(needed, most)
        return blocks

    def _block_tokens(self, spec: KVCacheSpec) -> int:
        return int(spec.block_size) * (self._context_parallel if spec.dcp_sharded else 1)


def _most_blocks(spec: KVCacheSpec, vllm_config: VllmConfig) -> float:
    """Return the most blocks of this spec that vLLM gives to a request of any length."""
    if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "all":
        return inf
    return float(cdiv(spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes))


def _window_of(spec: KVCacheSpec) -> int:
    """Return the tokens in the window of this spec; 0 for all."""
    is_chunked = isinstance(spec, ChunkedLocalAttentionSpec)
    return int((spec.attention_chunk_size if is_chunked else get_kv_cache_spec_sliding_window(spec)) or 0)
