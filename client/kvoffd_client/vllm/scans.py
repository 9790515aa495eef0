"""vLLM's searches for hits, over one byte for each of a request's chunks and not over a call for each key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext

from kvoffd_client.vllm.chunk_groups import ChunkGroups, Place
from kvoffd_client.vllm.keyed_lookup import COMES, HIT, MISS, RESULTS, KeyedLookup, result_of
from kvoffd_client.vllm.tails import ScannedTails

if TYPE_CHECKING:
    from kvoffd_client.vllm.request_state import RequestState


@dataclass(slots=True, eq=False)
class PreparedScan:
    """Facts for vLLM's next scan of a request, and its results: those of one answer, the same while vLLM scans.

    Attributes:
        own_tokens: leading tokens in vLLM's own cache.
        engine_has_all: those are all that vLLM can use.
        may_load: blocks may be looked up for the request.
        answer: the answer that the scan sees; None if it sees none.
        is_late: the request lacks an answer, and has stopped waiting for it.
        results: results of each group's chunks, a byte each, see ``keyed_lookup``.
        tails: the tails for which vLLM asks.
    """

    own_tokens: int = 0
    engine_has_all: bool = False
    may_load: bool = True
    answer: KeyedLookup | None = None
    is_late: bool = False
    results: Mapping[int, bytes] = field(default_factory=dict)
    tails: ScannedTails = field(default_factory=ScannedTails)

    def show(self, answer: KeyedLookup | None, awaited: frozenset[int], *, may_ask_tails: bool) -> None:
        """Set the results: those of an answer for a request that waits for keys of the ``awaited`` states."""
        self.answer, self.tails.may_ask = answer, may_ask_tails
        if answer is not None:
            self.results = answer.results(awaited)
            if answer.tails:
                self.tails.results = {key: result_of(state, awaited) for key, state in answer.tail_states().items()}

    def result(self, key: OffloadKey, place: Place) -> LookupResult:
        """Return vLLM's result for a key."""
        if place.is_tail:
            return self.tails.result(key)
        results = self.results.get(place.group, b"")
        return RESULTS[results[place.chunk]] if 0 <= place.chunk < len(results) else LookupResult.MISS


def leading_hits(results: bytes) -> int | None:
    """Return the number of chunks before the first MISS; None if one of them COMES."""
    end = results.find(MISS)
    leading = results if end < 0 else results[:end]
    return None if COMES in leading else len(leading)


def last_window(results: bytes, size: int, last_size: int) -> int:
    """Return the end of the last window: ``size`` HITs, or ``last_size`` at the end of ``results``.

    ``last_size`` is not less than ``size``: where the hit ends inside a chunk, its window begins a chunk earlier. By
    vLLM's rule only the window at the end needs that: once there is a gap, a hit ends with a chunk, and ``size`` are
    enough. If there is no window, return the number of leading HITs. ``results`` has no COMES.
    """
    if results.endswith(HIT * last_size):
        return len(results)
    # The HITs behind the last MISS are less than ``last_size``, so no window ends there.
    found = results.rfind(HIT * size, 0, results.rfind(MISS) + 1)
    return found + size if found >= 0 else len(results) - len(results.lstrip(HIT))


def replace_searches(scheduler: Any, groups: ChunkGroups, requests: Mapping[str, RequestState]) -> None:
    """Replace the two searches of vLLM's offloading scheduler: search the bytes of a request's ``scan``.

    Windows with chunks that are being promoted are few, and left to vLLM's own search.
    """
    search_windows = scheduler._sliding_window_lookup
    indices = {group.group_id: index for index, group in enumerate(groups)}

    def maximal_prefix_lookup(
        keys: Sequence[OffloadKey], req_context: ReqContext, req: Any, group_config: Any, start_chunk_idx: int
    ) -> int | None:
        results = requests[req_context.req_id].scan.results.get(indices[group_config.group_idx], b"")
        return leading_hits(_cut(results, start_chunk_idx, len(keys)))

    def sliding_window_lookup(
        keys: Sequence[OffloadKey],
        sliding_window_size: int,
        req_context: ReqContext,
        initial_window_size: int | None = None,
    ) -> int | None:
        first = groups.place_in_prompt(keys[0], req_context)
        results = requests[req_context.req_id].scan.results.get(first.group, b"")
        cut = _cut(results, max(0, first.chunk), len(keys))
        if COMES in cut:
            found: int | None = search_windows(keys, sliding_window_size, req_context, initial_window_size)
            return found
        return last_window(cut, sliding_window_size, initial_window_size or sliding_window_size)

    scheduler._maximal_prefix_lookup = maximal_prefix_lookup
    scheduler._sliding_window_lookup = sliding_window_lookup


def _cut(results: bytes, start: int, count: int) -> bytes:
    """Return the results of ``count`` chunks from ``start`` on; chunks without one are MISS."""
    return results[start : start + count].ljust(count, MISS)
