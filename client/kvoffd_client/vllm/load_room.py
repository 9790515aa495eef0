"""How many blocks loads may take, so that what is computed after them finds some."""

from __future__ import annotations

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
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

LOADED_SHARE = 3 / 4
"""Of the KV cache that requests may have which were loaded and have computed nothing since."""


class LoadRoom:
    """Admits loads to the KV cache.

    vLLM can take the blocks of a loaded request from it only once it has computed something. Where layers have windows
    vLLM keeps too few blocks free for that: of a window it takes the blocks that were left behind for held. With
    speculation it loads only where the blocks of a step's drafts are free beside those of the load. So a cache full of
    loads would stand still for ever, with all that waits behind them. Nor could others go on where one whose load
    failed, for which vLLM keeps blocks free, stands behind another that would be loaded.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._specs = [next(iter(iter_layer_specs(group.kv_cache_spec))) for group in kv_cache_config.kv_cache_groups]
        self._context_parallel = vllm_config.parallel_config.decode_context_parallel_size
        self._step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._drafts = vllm_config.num_speculative_tokens + vllm_config.num_lookahead_tokens
        speculates = bool(vllm_config.num_speculative_tokens)
        self._needed = speculates or any(_is_state(spec) or _window_of(spec) for spec in self._specs)
        drafts = [cdiv(1 + self._drafts, self._block_tokens(spec)) for spec in self._specs if not _is_state(spec)]
        kept_free = sum(drafts) if speculates else 0
        self._room = int(LOADED_SHARE * (kv_cache_config.num_blocks - 1 - kept_free))  # one is the null block
        self._loaded: set[Request] = set()

    def note(self, request: Request, *, loads: bool) -> None:
        """Note that a request is scheduled, to be loaded or to compute."""
        self._loaded = {each for each in self._loaded if not each.is_finished()} - {request}
        if loads:
            self._loaded.add(request)

    def admits(self, request: Request, computed: int, *, loads: bool) -> bool | None:
        """Return whether a request may be loaded, or computed without a load, now.

        ``computed`` of its tokens will be in the cache then. False: it must be computed, since it is too long. None:
        perhaps when others have ended.
        """
        others = [each for each in self._loaded if each is not request and not each.is_finished()]
        if not loads:
            failed = request in self._loaded
            return None if failed and any(each.num_computed_tokens for each in others) else True
        if not all(each.num_computed_tokens for each in others):
            return None  # one whose load failed is first
        if not self._needed:
            return True
        blocks = self._blocks_of(request, computed)
        if blocks + sum(self._blocks_of(each, each.num_computed_tokens) for each in others) <= self._room:
            return True
        return None if others else False

    def _blocks_of(self, request: Request, computed: int) -> int:
        """Blocks that all of a request may have at once, of which so many tokens are computed."""
        tokens, blocks = request.num_tokens + self._drafts, 0
        for spec in self._specs:
            if _is_state(spec):
                blocks += 2 + int(spec.num_speculative_blocks)
            elif window := _window_of(spec):
                in_window = min(tokens, window + min(tokens - computed, self._step_tokens))
                blocks += cdiv(in_window, self._block_tokens(spec)) + 1
            else:
                blocks += cdiv(tokens, self._block_tokens(spec))
        return blocks

    def _block_tokens(self, spec: KVCacheSpec) -> int:
        return int(spec.block_size) * (self._context_parallel if spec.dcp_sharded else 1)


def _is_state(spec: KVCacheSpec) -> bool:
    """Whether a request has a few blocks of this, however long it is."""
    return isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "all"


def _window_of(spec: KVCacheSpec) -> int:
    """Tokens that a request needs of this at most, while it goes on; 0: all."""
    is_chunked = isinstance(spec, ChunkedLocalAttentionSpec)
    return int((spec.attention_chunk_size if is_chunked else get_kv_cache_spec_sliding_window(spec)) or 0)
