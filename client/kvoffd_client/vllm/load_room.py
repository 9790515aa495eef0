"""How many blocks loads may take, so that what is computed after them finds some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    get_kv_cache_spec_sliding_window,
    iter_layer_specs,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

LOADED_SHARE = 3 / 4
"""Part of the KV cache for requests that were loaded and have computed nothing since. One alone may have all."""
STUCK_S = 1.0
"""Others wait this long for a request whose load has ended and that vLLM does not schedule. Then they compute."""


@dataclass(slots=True, eq=False)
class Loaded:
    """A request that was loaded and has computed nothing since.

    Attributes:
        blocks: that all of it takes at most; 0 before it was counted.
        ended_at: when its load was first seen to have ended; None before.
        passed: its load failed, and it was passed over once.
    """

    blocks: float = 0
    ended_at: float | None = None
    passed: bool = False


class LoadRoom:
    """Admits loads to the KV cache.

    vLLM can take the blocks of a loaded request from it only once it has computed something. Where layers have windows
    vLLM keeps too few blocks free for that: of a window it takes the blocks that were left behind for held. With
    speculation it loads only where the blocks of a step's drafts are free besides those of the load. So a cache full of
    loads would stand still for ever, with all that waits behind them.

    For a request whose load failed vLLM keeps as many free blocks as it needs, until it is scheduled. A load that does
    not fit besides them would hold up all requests behind it, and that one among them.

    Args:
        clock: what time is measured with, as time.monotonic().
        is_loading: whether a request, by its id, is being loaded.

    Attributes:
        pool: vLLM's blocks; None before they are known.
        is_full: a load was put off in this step. Those behind it are put off too, so that they do not pass it.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        clock: Callable[[], float],
        is_loading: Callable[[str], bool],
    ) -> None:
        self._clock, self._is_loading = clock, is_loading
        groups = kv_cache_config.kv_cache_groups
        self._specs = [next(iter(iter_layer_specs(one.kv_cache_spec))) for one in groups if not one.host_resident]
        self._most = [_most_blocks(spec, vllm_config) for spec in self._specs]
        self._context_parallel = vllm_config.parallel_config.decode_context_parallel_size
        self._step_tokens = vllm_config.max_in_flight_tokens
        self._drafts = vllm_config.num_speculative_tokens + vllm_config.num_lookahead_tokens
        speculates = bool(vllm_config.num_speculative_tokens)
        windowed = any(isinstance(spec, MambaSpec) or _window_of(spec) for spec in self._specs)
        step = [
            cdiv(1 + self._drafts, self._block_tokens(one)) for one in self._specs if not isinstance(one, MambaSpec)
        ]
        self._kept_free: int = sum(step) if speculates else 0
        self._blocks: float = kv_cache_config.num_blocks - 1 if speculates or windowed else inf  # one is the null block
        self._loaded: dict[Request, Loaded] = {}
        self.pool: BlockPool | None = None
        self.is_full = False

    def note(self, request: Request, *, loads: bool) -> None:
        """Note that a request is scheduled, to be loaded or to compute."""
        self._loaded = {each: one for each, one in self._loaded.items() if not each.is_finished()}
        self._loaded.pop(request, None)
        if loads:
            self._loaded[request] = Loaded()

    def admits(self, request: Request, computed: int, *, loads: bool) -> bool | None:
        """Return whether a request may be loaded, or computed without a load, now.

        ``computed`` of its tokens will be in the cache then. False: it must be computed. None: not in this step.
        """
        if loads and self.is_full:
            return None
        if not loads:
            # vLLM keeps one whose load failed before those that hold blocks, until it is passed over once.
            failed = self._loaded.get(request)
            if failed is None or failed.passed:
                return True
            failed.passed = True
            return None
        others = self._others(request)
        if self._fits(request, computed, others):
            return True
        oldest = self._clock() - STUCK_S
        moving = {each: one for each, one in others.items() if one.ended_at is None or one.ended_at > oldest}
        if not others or (len(moving) < len(others) and self._fits(request, computed, moving)):
            return False
        self.is_full = True
        return None

    def _others(self, request: Request) -> dict[Request, Loaded]:
        """Return the other requests that were loaded and have computed nothing since."""
        others = {each: one for each, one in self._loaded.items() if each is not request and not each.is_finished()}
        for each, one in others.items():
            if one.ended_at is None and not self._is_loading(each.request_id):
                one.blocks, one.ended_at = 0, self._clock()
            one.blocks = one.blocks or self._blocks_of(each.num_tokens + self._drafts, each.num_computed_tokens)
        return others

    def _fits(self, request: Request, computed: int, others: dict[Request, Loaded]) -> bool:
        """Whether a request fits besides the others while it loads, and when ``computed`` tokens are in the cache."""
        blocks = self._blocks_of(request.num_tokens + self._drafts, computed)
        if not others:
            return max(blocks, self._blocks_of(computed, computed) + self._kept_free) <= self._blocks
        failed = sum(one.blocks for each, one in others.items() if not each.num_computed_tokens)
        free = self.pool.get_num_free_blocks() if self.pool is not None else inf
        if failed and blocks + failed + self._kept_free > free:
            return False
        taken = blocks + self._kept_free + sum(one.blocks for one in others.values())
        return taken <= LOADED_SHARE * self._blocks

    def _blocks_of(self, tokens: int, computed: int) -> float:
        """Most blocks that a request of ``tokens`` may have at once when ``computed`` of them are computed."""
        blocks = 0.0
        for spec, most in zip(self._specs, self._most, strict=True):
            size = self._block_tokens(spec)
            if window := _window_of(spec):
                needed = cdiv(min(tokens, window + min(tokens - computed, self._step_tokens)), size) + 1
            else:
                needed = cdiv(tokens, size) + (spec.num_speculative_blocks if isinstance(spec, MambaSpec) else 0)
            blocks += min(needed, most)
        return blocks

    def _block_tokens(self, spec: KVCacheSpec) -> int:
        return int(spec.block_size) * (self._context_parallel if spec.dcp_sharded else 1)


def _most_blocks(spec: KVCacheSpec, vllm_config: VllmConfig) -> float:
    """Return how many blocks of this vLLM gives a request at most, however long it is."""
    if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "all":
        return inf
    return float(cdiv(spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes))


def _window_of(spec: KVCacheSpec) -> int:
    """Tokens that a request needs of this at most, while it continues; 0: all."""
    is_chunked = isinstance(spec, ChunkedLocalAttentionSpec)
    return int((spec.attention_chunk_size if is_chunked else get_kv_cache_spec_sliding_window(spec)) or 0)
