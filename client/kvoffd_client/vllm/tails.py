"""Tails: beginnings of chunks, where vLLM stores the states of recurrent layers at the ends of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import LookupResult, OffloadKey


@dataclass(slots=True, eq=False)
class ScannedTails:
    """The tails in one of vLLM's scans of a request.

    In a scan vLLM asks for a tail at each position inside the chunk behind the last one that is a hit, in all groups.
    These are many, of which one is a hit at most, so only those are looked up for which it has asked:

    1. ``PromptMatcher._may_have_tail`` says whether there may be one beyond vLLM's own cache.
    2. The first scan sees the answer about the chunks. Here are the tails that it asks for (``wanted``).
    3. ``PromptWaits.look_up_tails`` has them looked up with the chunks, now and whenever the request is looked up again
       (``RequestState.tails``). The request waits for the answer.
    4. The second scan sees that answer, and asks for no others. If it finds a tail that is being promoted, the request
       waits for that.
    5. ``KvoffdManager.prepare_load`` shows the daemon which of them are loaded: it counts no lookups of tails.

    Attributes:
        results: results of the tails that were looked up.
        may_ask: further tails may be looked up.
        wanted: further tails for which vLLM asked in this scan, the longest first.
        is_awaited: the request waits for an answer about tails, or for a tail that is being promoted.
    """

    results: Mapping[OffloadKey, LookupResult] = field(default_factory=dict)
    may_ask: bool = False
    wanted: list[OffloadKey] = field(default_factory=list)
    is_awaited: bool = False

    def result(self, key: OffloadKey) -> LookupResult:
        """Return vLLM's result for a tail, and record that vLLM asked for it."""
        if (result := self.results.get(key)) is not None:
            self.is_awaited |= result is LookupResult.HIT_PENDING
            return result
        if not self.may_ask:
            return LookupResult.MISS
        self.wanted.append(key)
        return LookupResult.RETRY  # so that vLLM asks for the others too
