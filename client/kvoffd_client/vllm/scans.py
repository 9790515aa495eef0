"""vLLM's searches for hits, over one byte for each of a request's chunks and not over a call for each key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kvoffd_client.vllm.connector_metadata import GROUP_ID_BYTES
from kvoffd_client.vllm.keyed_lookup import COMES, HIT, MISS

ResultsOf = Callable[[str, int], tuple[bytes, int]]
"""Returns the results of a request's chunks in a group, see ``keyed_lookup``, and the tokens of a chunk."""


def leading_hits(results: bytes) -> int | None:
    """Return the number of chunks before the first MISS; None if one of them COMES."""
    end = results.find(MISS)
    leading = results if end < 0 else results[:end]
    return None if COMES in leading else len(leading)


def last_window(results: bytes, size: int, last_size: int) -> int:
    """Return the end of the last window of ``size`` HITs, or of ``last_size`` if it ends at the last chunk.

    If there is none, the number of leading HITs. ``results`` has no COMES.
    """
    if results.endswith(HIT * last_size):
        return len(results)
    # HITs at the end that are too few for the last window are not of an earlier one.
    found = results.rfind(HIT * size, 0, results.rfind(MISS) + 1)
    return found + size if found >= 0 else len(results) - len(results.lstrip(HIT))


def scan_bytes(scheduler: Any, results_of: ResultsOf) -> None:
    """Have vLLM's offloading scheduler search the bytes of ``results_of``; it has two searches.

    Windows of which some chunks come, which are few, are left to vLLM's own search.
    """
    search_windows = scheduler._sliding_window_lookup

    def maximal_prefix_lookup(
        keys: Sequence[OffloadKey], req_context: ReqContext, req: Any, group_config: Any, start_chunk_idx: int
    ) -> int | None:
        results, _ = results_of(req_context.req_id, group_config.group_idx)
        return leading_hits(_cut(results, start_chunk_idx, len(keys)))

    def sliding_window_lookup(
        keys: Sequence[OffloadKey],
        sliding_window_size: int,
        req_context: ReqContext,
        initial_window_size: int | None = None,
    ) -> int | None:
        group_id = int.from_bytes(keys[0][-GROUP_ID_BYTES:], "big")
        results, tokens = results_of(req_context.req_id, group_id)
        start = (req_context.get_offload_key_position(keys[0]) or tokens) // tokens - 1
        cut = _cut(results, start, len(keys))
        if COMES in cut:
            found: int | None = search_windows(keys, sliding_window_size, req_context, initial_window_size)
            return found
        return last_window(cut, sliding_window_size, initial_window_size or sliding_window_size)

    scheduler._maximal_prefix_lookup = maximal_prefix_lookup
    scheduler._sliding_window_lookup = sliding_window_lookup


def _cut(results: bytes, start: int, count: int) -> bytes:
    """Return the results of ``count`` chunks from ``start`` on; chunks without one are MISS."""
    return results[start : start + count].ljust(count, MISS)
