"""Reports of why a prompt hit or missed: for operators, and for the daemon, which counts the keys by them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import structs
from vllm.v1.kv_offload.base import OffloadKey

from kvoffd_client.scheduler_client import LookupFuture, SchedulerClient
from kvoffd_client.vllm.connector_metadata import ChunkGroup, of_adapter
from kvoffd_client.vllm.keyed_lookup import NOT_COMING, KeyedLookup
from kvoffd_proto.messages import ABSENT, COMING, MAX_HINTS, READY, SHARED, WRITING, Outcome, PromptReport

if TYPE_CHECKING:
    from vllm.v1.request import Request

_TIER_ONLY = bytes(0 if state in NOT_COMING else state for state in range(256))
MAX_REQUEST_ID = 128
"""Characters of a request's id in its report."""


@dataclass(slots=True, eq=False)
class PromptRecord:
    """Facts about a prompt until it is scheduled.

    Attributes:
        counted: the lookup whose keys the daemon counts when the outcome is reported; None once it is.
        counted_by: client and session that sent it: only that session's daemon counts it.
        own_tokens: leading tokens in vLLM's own cache, at the last scan.
        engine_has_all: those are all that vLLM can use.
        asks_tails: tails were looked up for it, so a load may end inside a chunk.
        may_load: blocks may be looked up for it.
        is_late: it gave up its turn to be looked up.
        skipped: its load was skipped because computing is faster.
        refused: its blocks were not loaded because the KV cache had no space.
        from_tiers: by group, the last state of each chunk that was, or was to be, promoted for it; 0 for others.
        tails_from_tiers: the same of tails, by vLLM's keys.
        is_decided: its outcome was reported.
        of_load: the report of a prompt that is being loaded; sent when the load ends.
        hints: what became of its hints, by what they are called.
    """

    counted: LookupFuture | None = None
    counted_by: tuple[SchedulerClient, int] | None = None
    own_tokens: int = 0
    engine_has_all: bool = False
    asks_tails: bool = False
    may_load: bool = True
    is_late: bool = False
    skipped: bool = False
    refused: bool = False
    from_tiers: dict[int, bytes] = field(default_factory=dict)
    tails_from_tiers: dict[OffloadKey, int] = field(default_factory=dict)
    is_decided: bool = False
    of_load: PromptReport | None = None
    hints: dict[str, str] = field(default_factory=dict)

    def came_from_tiers(self, answer: KeyedLookup) -> None:
        """Record which chunks an answer reports as being promoted."""
        if not answer.is_coming:
            return
        self.tails_from_tiers |= {key: state for key, state in answer.tail_states().items() if state in COMING}
        for index in answer.chunks:
            coming = answer.chunk_states(index)
            if coming.strip(NOT_COMING):
                before = self.from_tiers.get(index, b"").ljust(len(coming), b"\0")
                now = coming.translate(_TIER_ONLY) + before[len(coming) :]
                self.from_tiers[index] = bytes([new or old for new, old in zip(now, before, strict=True)])

    def tier_of(self, index: int, place: int) -> int:
        """Return the state that a chunk had while it was promoted; 0 if it was found in the pool."""
        states = self.from_tiers.get(index, b"")
        return states[place] if place < len(states) else 0

    def decide(
        self,
        request: Request,
        groups: Sequence[ChunkGroup],
        last: KeyedLookup | None,
        adapter: bytes,
        *,
        loaded_tokens: int = 0,
        elsewhere: bool = False,
        dropped: bool = False,
    ) -> PromptReport:
        """Return the report of a request that is scheduled with ``loaded_tokens`` or, if ``dropped``, ended before.

        ``last``: its last lookup. ``elsewhere``: another connector loads it.
        """
        self.is_decided = True
        counted, self.counted = self.counted, None
        # Leading keys by group: of the whole prompt, in the engine's own cache, and those that need not be computed.
        whole = [request.num_tokens // one.tokens_per_chunk for one in groups]
        own = covered = [self.own_tokens // one.tokens_per_chunk for one in groups]
        if loaded_tokens:  # the last chunk may be loaded in part
            end = self.own_tokens + loaded_tokens
            if self.asks_tails and not self.engine_has_all and end < request.num_tokens - 1:
                end -= end % groups[0].tokens_per_chunk  # it ends with a tail, or with a chunk
            covered = [min(count, -(-end // one.tokens_per_chunk)) for count, one in zip(whole, groups, strict=True)]
        elif dropped or elsewhere:
            own = covered = whole
        elif self.engine_has_all:  # vLLM computes the last token in any case, and with it the block that ends there
            covered = whole
        if loaded_tokens:
            outcome = Outcome.LOADED
        elif dropped:
            outcome = Outcome.DROPPED
        elif not any(whole):
            outcome = Outcome.TOO_SHORT
        elif elsewhere or (self.engine_has_all and self.may_load and not (last is None or last.future.failed)):
            outcome = Outcome.NOT_NEEDED
        elif self.is_late:
            outcome = Outcome.LATE
        elif not self.may_load or last is None or last.future.failed:
            outcome = Outcome.UNUSED
        elif last.given_up or not last.future.done:
            outcome = Outcome.LATE
        elif self.skipped:
            outcome = Outcome.SKIPPED
        elif self.refused:
            outcome = Outcome.NO_SPACE
        else:
            outcome = Outcome.MISSED
        group, missing, number, reason = _first_missing(last, covered, adapter)
        after_gap = 0
        if missing and last is not None:
            after_gap = sum(last.chunk_states(index).count(READY, covered[index]) for index in last.chunks)
        keys, ready, promoted, from_tiers, from_store = 0, 0, 0, 0, 0
        if last is not None:
            states = last.states
            keys, ready = sum(map(len, states)), sum(one.count(READY) for one in states)
        for index, tiers in self.from_tiers.items():
            from_tiers += len(tiers) - tiers.count(0)
            from_store += tiers.count(SHARED)
            found = last.chunk_states(index) if last is not None else b""
            promoted += sum(tier != 0 and state == READY for tier, state in zip(tiers, found, strict=False))
        return PromptReport(
            request=request.request_id[:MAX_REQUEST_ID],
            decided_at=time.time(),
            tokens=request.num_prompt_tokens,
            keys=keys,
            found_pool=ready - promoted,
            found_disk=from_tiers - from_store,
            found_shared=from_store,
            outcome=outcome,
            loaded_tokens=loaded_tokens,
            missing_group=group,
            missing_key=missing,
            reason=reason,
            missing_number=number,
            own_tokens=self.own_tokens,
            lease_id=counted.lease_id if counted is not None else 0,
            own_keys=own,
            covered_keys=covered,
            after_gap=after_gap,
            hints="; ".join(f"{name} {what}" for name, what in self.hints.items())[:MAX_HINTS],
        )


def failed(report: PromptReport) -> PromptReport:
    """Return the report of a prompt whose load failed, so that it is computed."""
    return structs.replace(report, outcome=Outcome.FAILED, loaded_tokens=0, covered_keys=report.own_keys)


def _first_missing(last: KeyedLookup | None, covered: Sequence[int], adapter: bytes) -> tuple[int, bytes, int, str]:
    """Return the first key that was neither covered nor ready: group, key, its position among all keys looked up, from
    1, and the reason if it is known here."""
    before = 0
    for (index, chunks), states in zip(last.chunks.items(), last.states, strict=False) if last is not None else ():
        for at in range(covered[index], len(states)):
            if states[at] != READY:
                key = of_adapter([chunks[at]], adapter)[0] if adapter else chunks[at]
                reason = "" if states[at] == ABSENT else "partial" if states[at] == WRITING else "tier_late"
                return index, key, before + at + 1, reason
        before += len(states)
    return 0, b"", 0, ""
