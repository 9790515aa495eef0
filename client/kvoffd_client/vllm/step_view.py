"""What vLLM's schedulers are told of requests and steps that they would not see, or misread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import dropwhile
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestOffloadState,
)
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.request import RequestStatus

from kvoffd_client.vllm.connector_metadata import GROUP_ID_BYTES

if TYPE_CHECKING:
    from kvoffd_client.vllm.vllm_types import KVCacheBlocks, KVCacheManager, Request, SchedulerOutput, VllmConfig


def shown(output: SchedulerOutput, requests: Mapping[str, RequestOffloadState]) -> SchedulerOutput:
    """Return what vLLM's scheduler chose, less what its offloading scheduler misreads.

    The tokens of new requests are left out: they are read for stores alone, and those of a new request are prepared in
    the step after its first, since its user waits for the first token; not where layers have windows, out of which the
    prompt's blocks go in that step, to be taken by others where blocks are short. A request that was preempted by a
    reset and is loaded in the next step is left out of the preempted ones, of which it is asserted that only stores are
    under way. So are states of recurrent layers that a request asks not to be stored (``max_offload_tokens``): it is
    asserted that there are none inside a block.

    A session's next part is scheduled as a new request that has all blocks of the session, and 0.32 puts them behind
    those that it knows: what it knows is forgotten first.
    """
    for request in output.scheduled_new_reqs:
        for group in status.group_states if (status := requests.get(request.req_id)) is not None else ():
            group.block_ids.clear()
    for request_id in output.finished_req_ids:
        if (status := requests.get(request_id)) is not None:
            _forget_uncomputed(status)
    changes: dict[str, Any] = {}
    new = {one.req_id for one in output.scheduled_new_reqs if not _has_windows(requests.get(one.req_id))}
    if new:
        changes["num_scheduled_tokens"] = {
            request_id: tokens for request_id, tokens in output.num_scheduled_tokens.items() if request_id not in new
        }
    if loading := {request_id for request_id in output.preempted_req_ids or () if _is_loaded(requests.get(request_id))}:
        changes["preempted_req_ids"] = (output.preempted_req_ids or set()) - loading
    if (state := output.kv_connector_block_state) is not None and state.boundary_state_offloads:
        wanted = {
            request_id: [one for one in offered if _is_wanted(requests.get(request_id), one[2])]
            for request_id, offered in state.boundary_state_offloads.items()
        }
        changes["kv_connector_block_state"] = replace(state, boundary_state_offloads=wanted)
    return replace(output, **changes) if changes else output


class _TakenBlocks(set[int]):
    """Blocks that a step gives away, less those of a prefix that vLLM found in its own cache: they are read only."""

    def __init__(self, taken: Iterable[int]) -> None:
        super().__init__(taken)
        self.found: set[int] = set()

    def add(self, block_id: int) -> None:
        if block_id not in self.found:
            super().add(block_id)

    def update(self, *block_ids: Iterable[int]) -> None:
        for each in block_ids:
            super().update(set(each) - self.found)


def note_allocated(scheduler: OffloadingConnectorScheduler, request: Request, blocks: KVCacheBlocks) -> None:
    """Have stores that read a request's new blocks end before this step, and no others.

    vLLM has those end too that read what it found in its own cache, and the engine stands still until they have, though
    nobody writes there. And 0.32 notes blocks only where it loads them itself, or computes: below MultiConnector
    another connector may load into them, and a store of who had them before would take its bytes.
    """
    taken = scheduler._current_batch_allocated_block_ids
    if not isinstance(taken, _TakenBlocks):
        taken = scheduler._current_batch_allocated_block_ids = _TakenBlocks(taken)
    status = scheduler._req_status.get(request.request_id)
    computed = max(request.num_computed_tokens, status.num_locally_computed_tokens if status is not None else 0)
    groups = scheduler.config.kv_group_configs
    # With groups that are not offloaded (DeepSeek V4.1's windows) vLLM may drop what it found after it told of it.
    for group in groups if len(groups) == len(blocks.blocks) else ():
        if not group.requires_cow_source:
            found = blocks.blocks[group.group_idx][: computed // group.tokens_per_block]
            taken.found.update(block.block_id for block in found)
    taken.update(block.block_id for group in blocks.blocks for block in group if not block.is_null)


def note_shared_prefix(
    scheduler: OffloadingConnectorScheduler, request: Request, ready: Callable[[int], int], found: int
) -> None:
    """Have vLLM keep, and offer, the windows and states where a prompt parts from those that the daemon has.

    It keeps those at the end of each prompt, and where two part that meet in its own cache. Of prompts that begin alike
    and do not meet there no window or state would ever be stored with which their beginning is a hit. ``ready`` tells
    of how many blocks of a group the daemon has the beginning; ``found`` tokens are loaded, or in vLLM's own cache.
    """
    groups = scheduler._full_attention_groups
    if not groups or not scheduler._sliding_window_groups:
        return
    tokens = min(ready(index) * scheduler.config.kv_group_configs[index].tokens_per_chunk for index in groups)
    if found < tokens < request.num_prompt_tokens:
        request.shared_prefix_boundary = max(request.shared_prefix_boundary, tokens)


def loadable_tokens(cache: KVCacheManager, config: VllmConfig, request: Request, chunk_tokens: int) -> int:
    """Return how long a loaded beginning of a request may be: all its tokens, else as many chunks as are possible.

    With speculation vLLM loads only where the blocks of a step's drafts are free beside those of the load. A prompt for
    which they never are, in an engine that runs nothing else, would wait for ever, and all prompts behind it; without a
    load, or with a shorter one, it is computed.
    """
    drafts = 1 + config.num_speculative_tokens + config.num_lookahead_tokens
    kept_free = sum(  # as the scheduler reckons; managers of states reckon with their drafts themselves
        cdiv(drafts, manager.block_size)
        for manager in cache.coordinator.single_type_managers
        if not isinstance(manager.kv_cache_spec, MambaSpec)
    )
    room = cache.block_pool.num_gpu_blocks - 1 - kept_free  # one is the null block

    whole = (request.num_tokens - 1) // chunk_tokens * chunk_tokens
    lengths = (request.num_tokens, *range(whole, 0, -chunk_tokens))
    return next((tokens for tokens in lengths if _needed_blocks(cache, request, tokens - 1, tokens) <= room), 0)


class LoadedRequests:
    """The requests that were loaded and have computed nothing since. vLLM can take their blocks from none of them.

    Where layers have windows vLLM keeps too few blocks free for what they compute next: of a window it takes the blocks
    that were left behind for held. With the cache full of loads none could go on, and nothing behind them. Nor could
    others where one whose load failed, for which vLLM keeps blocks free, stands behind another that would be loaded.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._drafts = config.num_speculative_tokens + config.num_lookahead_tokens
        self._step_tokens = config.scheduler_config.max_num_batched_tokens
        self._max_tokens = config.model_config.max_model_len
        self._requests: set[Request] = set()

    def note(self, request: Request, *, loads: bool) -> None:
        """Note that a request is scheduled, to be loaded or to compute."""
        self._requests = {each for each in self._requests if not each.is_finished()} - {request}
        if loads:
            self._requests.add(request)

    def leave_room(self, cache: KVCacheManager, request: Request, found: int, tokens: int) -> bool | None:
        """Return whether ``request`` and each of these can go on once ``tokens`` of it are in the cache, now ``found``.

        None where that is not so now, and may be when others have gone on.
        """
        others = [each for each in self._requests if each is not request and not each.is_finished()]
        if tokens == found:
            failed = request in self._requests
            return None if failed and any(each.num_computed_tokens for each in others) else True
        if not all(each.num_computed_tokens for each in others):
            return None  # one whose load failed is first
        if all(manager.max_admission_blocks_per_request is None for manager in cache.coordinator.single_type_managers):
            return True  # no windows
        needed = functools.partial(_needed_blocks, cache)

        def end_of_step(of: Request, computed: int) -> int:
            end = min(of.num_tokens, computed + self._step_tokens) + self._drafts
            return min(end, self._max_tokens)

        after_load = end_of_step(request, tokens)
        if not others:
            return needed(request, tokens, after_load) < cache.block_pool.num_gpu_blocks  # one is the null block
        blocks, there = None, 0
        if found:
            blocks, there, *_ = cache.coordinator.find_longest_cache_hit(request.block_hashes, found)
        free = cache.block_pool.get_num_free_blocks()
        left = free - needed(request, tokens, tokens, blocks, there)
        fits = needed(request, tokens, after_load, blocks, there) <= free and all(
            needed(each, each.num_computed_tokens, end_of_step(each, each.num_computed_tokens)) <= left
            for each in others
        )
        return True if fits else None


def _needed_blocks(
    cache: KVCacheManager, request: Request, computed: int, end: int, found: Any = None, found_tokens: int = 0
) -> int:
    """Return how many blocks vLLM allocates for a request up to a token, of which so many will have been computed.

    ``found``: blocks of its own cache that vLLM would begin with, which have ``found_tokens``.
    """
    return cache.coordinator.get_num_blocks_to_allocate(
        request.request_id,
        num_tokens=end,
        new_computed_blocks=cache.empty_kv_cache_blocks.blocks if found is None else found,
        num_encoder_tokens=0,
        total_computed_tokens=computed,
        num_local_computed_tokens=found_tokens,
        num_tokens_main_model=end,
    )


def without_holes(status: RequestOffloadState | None, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
    """Leave out of the keys of a store the chunks that have lost a block, as those wider than a window do.

    vLLM's list of a job's blocks says from which block on a group's first chunk is there, and of no other that lacks.
    """
    if status is None or status.config.blocks_per_chunk == 1:
        return list(keys)
    per_chunk = status.config.blocks_per_chunk
    kept: list[OffloadKey] = []
    begun: set[bytes] = set()
    groups = {
        config.group_idx.to_bytes(GROUP_ID_BYTES, "big"): (config.tokens_per_chunk, state.block_ids)
        for config, state in zip(status.config.kv_group_configs, status.group_states, strict=True)
        if config.sliding_window_size_in_chunks is not None and not config.requires_cow_source
    }
    for key in keys:
        suffix = key[-GROUP_ID_BYTES:]
        end = status.req_context.get_offload_key_position(key)
        if end is not None and suffix in groups:
            per_key, block_ids = groups[suffix]
            first = (end // per_key - 1) * per_chunk
            blocks = block_ids[first : first + per_chunk]
            if suffix not in begun:  # of the first one those in front may lack
                blocks = list(dropwhile(lambda block_id: block_id == 0, blocks))
            if 0 in blocks:
                continue
            begun.add(suffix)
        kept.append(key)
    return kept


def _has_windows(status: RequestOffloadState | None) -> bool:
    groups = status.config.kv_group_configs if status is not None else ()
    return any(group.sliding_window_size_in_chunks is not None for group in groups)


def _is_loaded(status: RequestOffloadState | None) -> bool:
    return status is not None and status.req.status is RequestStatus.WAITING_FOR_REMOTE_KVS


def _is_wanted(status: RequestOffloadState | None, tokens: int) -> bool:
    """Whether the state after so many tokens of a request may be stored."""
    return status is not None and (status.max_offload_tokens is None or tokens <= status.max_offload_tokens)


def _forget_uncomputed(status: RequestOffloadState) -> None:
    """Forget the blocks of a finished request that were not computed, or that it has no more.

    All of a prompt would be stored, although a request that ends with an error may have computed a part of it, and one
    that was preempted while its last token was on its way has lost its blocks to others.
    """
    request = status.req
    if request.num_computed_tokens >= max(request.num_prompt_tokens, request.num_tokens - 1):
        return
    for group, state in zip(status.config.kv_group_configs, status.group_states, strict=True):
        del state.block_ids[request.num_computed_tokens // group.tokens_per_block :]
