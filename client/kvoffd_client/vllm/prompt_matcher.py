"""Decides how much of a prompt is loaded when vLLM comes to it, or that it waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from kvoffd_client.vllm.engine_facts import CacheShape
from kvoffd_client.vllm.load_admission import Admission, LoadAdmission
from kvoffd_client.vllm.manager import KvoffdManager
from kvoffd_client.vllm.request_state import RequestState

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

DROPPED_CHUNKS = 4
"""Chunks at the end of a hit that vLLM's scan leaves out at most: for the last token, for drafts, and for states."""
Found: TypeAlias = tuple[int | None, bool]
"""Result of vLLM's scan: tokens that can be loaded, or None if the request must wait; the other is not used."""


class PromptMatcher:
    """Decides how many tokens of a prompt are loaded. vLLM comes to each one that is not scheduled, in each step.

    It waits if one of these says so, asked in this order:

    1. ``PromptWaits.pass_over``: it is parked.
    2. ``_must_wait``: whatever it may load must wait for other prompts' loads. Where only a scan can tell, a few of a
       step continue.
    3. ``AdapterContents.await_content``: the workers have not reported its LoRA adapter.
    4. ``PromptWaits.prepare_scan``: it has no answer to its lookup.
    5. ``_scan``, or the last scan's result if that still holds: blocks are being promoted, or loaded for another
       prompt.
    6. ``_admit``: a load has no space yet, or the prompt would hold up an earlier one that is being loaded.

    Args:
        tail_tokens: tokens per hash if tails (``tails.py``) are stored, else 0.
        scan: vLLM's scan of a request's answer, given its tokens in vLLM's own cache.
        scan_part: the same, given also the most tokens to load.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        manager: KvoffdManager,
        shape: CacheShape,
        tail_tokens: int,
        *,
        scan: Callable[[Request, int], Found],
        scan_part: Callable[[Request, int, int], Found],
    ) -> None:
        self._manager, self._waits, self._shape = manager, manager.waits, shape
        self._scan_all, self._scan_part = scan, scan_part
        self._admission = LoadAdmission(vllm_config, kv_cache_config, manager.clock, manager.lookups.loading)
        self._tail_tokens = tail_tokens
        self._has_drafts = vllm_config.speculative_config is not None
        self._read_ahead_tokens = vllm_config.num_prefill_lookahead_tokens
        self._pool: BlockPool | None = None

    def bind_pool(self, pool: BlockPool) -> None:
        """Take vLLM's blocks, before the first request."""
        self._pool = self._admission.pool = pool

    def begin_step(self) -> None:
        """Begin a step, in which no load was deferred and others have ended."""
        self._admission.begin_step()

    def record_scheduled(self, request: Request, loaded_tokens: int) -> None:
        """Record that a request is scheduled, to load this many tokens; to compute if these are 0."""
        # Later prompts wait for its load no longer than computing the same would take.
        self._admission.record_scheduled(request, computed_s=loaded_tokens / self._manager.times.rate)

    def match(self, request: Request, own_tokens: int) -> int | None:
        """Return the tokens to load for a request whose ``own_tokens`` are in vLLM's own cache; None if it waits."""
        manager, waits = self._manager, self._waits
        if waits.pass_over(request.request_id, own_tokens):
            return None
        state = manager.requests[request.request_id]
        if self._must_wait(state, own_tokens):
            return None
        manager.namespace.want_digests()
        if manager.adapters.await_content(state):
            return None
        has_all = own_tokens >= self._shape.usable_tokens(request.num_tokens, own_tokens)
        may_have_tail = self._may_have_tail(request, own_tokens)
        if not waits.prepare_scan(state, own_tokens, engine_has_all=has_all, may_have_tail=may_have_tail):
            return None
        if (found := waits.found_before(state, own_tokens)) is not None:
            tokens: int | None = found.tokens
        else:
            tokens = self._scan(state, own_tokens)
            waits.record_scan(state, own_tokens, tokens)
        return None if tokens is None else self._admit(state, own_tokens, tokens)

    # --- before the scan ---------------------------------------------------------------------------

    def _must_wait(self, state: RequestState, own_tokens: int) -> bool:
        """Return whether a request waits in this step, whatever a scan would find.

        One with much left to compute waits for an earlier one's load (``waits_for_earlier``), and one to be loaded for
        a load that waits for space (``has_deferred``). If only a scan can tell which it is, it waits once enough
        requests were scanned in this step.
        """
        admission, waits, request = self._admission, self._waits, state.request
        if not admission.holds_up_others:
            return False
        if (found := waits.found_before(state, own_tokens)) is not None:
            is_load = found.tokens > 0 and not self._manager.harm.skips_load(found.tokens)
            to_compute = admission.waits_for_earlier(request, own_tokens + found.tokens)
            return to_compute or (is_load and admission.has_deferred)
        if (loadable := waits.loadable(state, own_tokens)) is None:
            return False
        least, most = loadable
        if admission.waits_for_earlier(request, own_tokens + most):
            return True  # whatever it loads, too much is left to compute
        if admission.has_deferred and self._has_load(request, least, most):
            return True  # it is loaded, after the deferred one
        if not most:
            return False  # it computes, and as asked above need not wait for that
        # Only a scan can tell: it waits if it is loaded, or if it loads so little that too much is left to compute.
        may_wait = admission.has_deferred or admission.waits_for_earlier(request, own_tokens + least)
        return may_wait and not waits.take_scan(state)

    def _has_load(self, request: Request, least: int, most: int) -> bool:
        """Return whether vLLM's scan of a request must find a load, and one that is not skipped for being slow, if it
        can find ``least`` to ``most`` tokens less DROPPED_CHUNKS."""
        is_limited = request.mm_features or "max_load_tokens" in (request.kv_transfer_params or ())
        fewest = least - DROPPED_CHUNKS * self._shape.chunk_tokens
        return fewest > 0 and not is_limited and not self._manager.harm.may_skip(fewest, most)

    def _may_have_tail(self, request: Request, own_tokens: int) -> bool:
        """Return whether a prompt may have a tail that is not in vLLM's own cache.

        vLLM tells connectors of whole blocks in it only. So its pool is asked for the prompt's longest tail; not with
        drafts, where tails have another hash in 0.33.
        """
        size, prompt_tokens = self._tail_tokens, request.num_prompt_tokens
        if not size or own_tokens + size >= prompt_tokens:
            return False
        tail_end = (prompt_tokens - 1) // size  # in hashes
        beyond, hashes = tail_end * size - own_tokens, request.block_hashes
        # Whole blocks of vLLM's cache end at own_tokens. So it lacks the next one, and can use no tail behind that.
        is_in_next_block = 0 < beyond < self._shape.block_tokens and tail_end <= len(hashes)
        if self._pool is None or not is_in_next_block or self._has_drafts:
            return True
        return not self._pool.get_cached_block(hashes[tail_end - 1], self._shape.group_ids)

    # --- the scan, and after it --------------------------------------------------------------------

    def _scan(self, state: RequestState, own_tokens: int) -> int | None:
        """Return the tokens that can be loaded by vLLM's scan of the answer; None if the request must wait."""
        request = state.request
        tokens, _ = self._scan_all(request, own_tokens)
        if state.scan.tails.wanted:  # vLLM has asked for these in the scan, see ScannedTails
            if not self._waits.look_up_tails(state, own_tokens):
                return None
            tokens, _ = self._scan_all(request, own_tokens)
        if state.scan.tails.is_awaited:  # vLLM defers a request for a tail only without other hits
            return None
        state.scan.tails.may_ask = False  # no lookup follows the scans below
        while tokens and request.mm_features and self._needs_two_images(request, own_tokens + tokens):
            size = self._shape.chunk_tokens  # load a chunk less
            most = (own_tokens + tokens - 1) // size * size - own_tokens
            tokens, _ = self._scan_part(request, own_tokens, max(most, 0))
        return tokens

    def _needs_two_images(self, request: Request, end: int) -> bool:
        """Return whether the tokens behind a hit, with those that a draft reads ahead, belong to more than one image.

        vLLM's scheduler would compute neither image if the encoder takes one in a step: it stops before the second
        image, less what the draft reads ahead, which is where the hit ends. The request, and all behind it, would wait
        forever.
        """
        images = [feature.mm_position for feature in request.mm_features]
        return sum(at.offset <= end + self._read_ahead_tokens and at.offset + at.length > end for at in images) > 1

    def _admit(self, state: RequestState, own_tokens: int, tokens: int) -> int | None:
        """Return how many of the ``tokens`` found are loaded now; None if the request waits for other loads, or because
        the next step reads another adapter."""
        if self._shape.full_attention and self._shape.has_windows_or_states:
            self._mark_shared_prefix(state, own_tokens + tokens)
        if not tokens or self._manager.skip_slow_load(state, tokens):
            return 0 if self._admission.admit_compute(state.request, own_tokens) else None
        if (adapter := state.request.lora_request) is not None and not self._manager.adapters.may_want(adapter):
            return None
        admission = self._admission.admit_load(state.request, own_tokens + tokens)
        if admission is Admission.ONLY_COMPUTE:
            self._manager.refuse_load(state)
            return 0
        return tokens if admission is Admission.LOAD else None

    def _mark_shared_prefix(self, state: RequestState, found: int) -> None:
        """Make vLLM keep and offer the windows and states at the end of the prefix that the daemon has.

        vLLM keeps those at the end of each prompt, and where prompts in its own cache diverge. Without this, a common
        prefix of prompts that never meet there would get no window or state, and never be a hit.
        ``found`` tokens are loaded or in vLLM's own cache.
        """
        if (answer := state.answer) is None:
            return
        request, groups = state.request, self._manager.groups
        tokens = min(answer.leading_ready(at) * groups[at].tokens_per_chunk for at in self._shape.full_attention)
        if found < tokens < request.num_prompt_tokens:
            request.shared_prefix_boundary = max(request.shared_prefix_boundary, tokens)
