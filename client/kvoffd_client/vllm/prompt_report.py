"""Reports of why a prompt hit or missed: for operators, and for the daemon, which counts the keys by them."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import structs
from vllm.v1.kv_offload.base import OffloadKey

from kvoffd_client.scheduler_client import LookupFuture, SchedulerClient
from kvoffd_client.vllm.connector_metadata import ChunkGroup, wire_keys
from kvoffd_client.vllm.keyed_lookup import NOT_COMING, KeyedLookup
from kvoffd_proto.messages import (
    COMING,
    MAX_HINTS,
    PENDING,
    READY,
    SHARED,
    WRITING,
    Mark,
    Outcome,
    PromptReport,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request

ASKED = 255
"""State of a chunk that is SHARED only because a store is being asked for it."""
_TIER_ONLY = bytes(0 if state in NOT_COMING else state for state in range(256))
_WHILE_ASKING = bytes(ASKED if state == SHARED else state for state in _TIER_ONLY)
EXCLUDED = "excluded"
"""Reason of a key that the request excludes by its ``kv_load_tiers``."""
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
        from_tiers: by group, the last state of each chunk that was, or was to be, promoted for it, or ASKED; 0 for
            others.
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
        table = _WHILE_ASKING if answer.future.asking else _TIER_ONLY
        self.tails_from_tiers |= {key: state for key, state in answer.tail_states().items() if state in COMING}
        for index in answer.chunks:
            states = answer.chunk_states(index)
            if states.strip(NOT_COMING):
                before, now = self.from_tiers.get(index, b"").ljust(len(states), b"\0"), states.translate(table)
                merged = [old if old and new in (0, ASKED) else new for old, new in zip(before, now, strict=False)]
                self.from_tiers[index] = bytes(merged) + before[len(states) :]

    def tier_of(self, index: int, place: int) -> int:
        """Return the state that a chunk had while it was promoted; 0 if it was found in the pool."""
        state = self.from_tiers.get(index, b"")[place : place + 1]
        return SHARED if state == bytes([ASKED]) else state[0] if state else 0

    def decide(
        self,
        request: Request,
        groups: Sequence[ChunkGroup],
        last: KeyedLookup | None,
        adapter: bytes,
        tiers: Collection[int],
        *,
        loaded_tokens: int = 0,
        load_lease_id: int = 0,
        dropped: bool = False,
    ) -> PromptReport:
        """Return the report of a request that is scheduled with ``loaded_tokens`` or, if ``dropped``, ended before.

        ``last``: its last lookup. ``tiers``: states of blocks that it may wait for. ``load_lease_id``: lease under
        which it loads.
        """
        again, self.is_decided = self.is_decided, True
        own_tokens, other_tokens = self.own_tokens, 0
        if not dropped:
            # vLLM knows now what it computes: not the end of a prompt in its cache, which is less than a block, and
            # not what another connector loads, which is more.
            own_tokens = request.num_computed_tokens - loaded_tokens
            if (more := own_tokens - self.own_tokens) >= min(one.tokens_per_chunk for one in groups):
                own_tokens, other_tokens = self.own_tokens, more
        counted, self.counted = self.counted, None
        # Leading keys by group: of the whole prompt, in the engine's own cache, and those that need not be computed.
        whole = [request.num_tokens // one.tokens_per_chunk for one in groups]
        own = covered = [self.own_tokens // one.tokens_per_chunk for one in groups]
        if loaded_tokens:  # the last chunk may be loaded in part
            end = self.own_tokens + loaded_tokens
            if self.asks_tails and not self.engine_has_all and end < request.num_tokens - 1:
                end -= end % groups[0].tokens_per_chunk  # it ends with a tail, or with a chunk
            covered = [min(count, -(-end // one.tokens_per_chunk)) for count, one in zip(whole, groups, strict=True)]
        elif dropped or other_tokens:
            own = covered = whole
        elif self.engine_has_all:  # vLLM computes the last token in any case, and with it the block that ends there
            covered = whole
        if loaded_tokens:
            outcome = Outcome.LOADED
        elif dropped:
            outcome = Outcome.DROPPED
        elif not any(whole):
            outcome = Outcome.TOO_SHORT
        else:
            outcome = self._why_computed(last, is_loaded_elsewhere=other_tokens > 0)
        group, missing, number, reason = _first_missing(last, covered, adapter, tiers)
        after_gap = 0
        if missing and last is not None:
            after_gap = sum(last.chunk_states(index).count(READY, covered[index]) for index in last.chunks)
        keys, unanswered, ready, promoted, from_disk, from_store, asked = 0, 0, 0, 0, 0, 0, 0
        if last is not None:
            states, unanswered = last.states, last.future.asking
            keys, ready = sum(map(len, states)), sum(one.count(READY) for one in states)
        for index, before in self.from_tiers.items():
            found = last.chunk_states(index) if last is not None else b""
            came = [state for state, now in zip(before, found, strict=False) if state and now == READY]
            promoted += len(came)
            from_disk += before.count(PENDING)
            from_store += before.count(SHARED) + came.count(ASKED)
            asked += before.count(SHARED) + before.count(ASKED)
        return PromptReport(
            request=request.request_id[:MAX_REQUEST_ID],
            decided_at=time.time(),
            tokens=request.num_prompt_tokens,
            keys=keys,
            found_pool=ready - promoted,
            found_disk=from_disk,
            found_shared=from_store,
            outcome=outcome,
            loaded_tokens=loaded_tokens,
            missing_group=group,
            missing_key=missing,
            reason=reason,
            missing_number=number,
            own_tokens=own_tokens,
            lease_id=counted.lease_id if counted is not None else 0,
            own_keys=own,
            covered_keys=covered,
            after_gap=after_gap,
            load_lease_id=load_lease_id,
            other_tokens=other_tokens,
            again=again,
            asked_shared=asked,
            unanswered=min(asked, unanswered),
            marks=_marks_of(request) + [Mark.KV_LOAD_TIERS.value] * (reason == EXCLUDED),
            hints="; ".join(f"{name} {what}" for name, what in self.hints.items())[:MAX_HINTS],
            coming_keys=_coming(last, covered) if missing else [],
        )

    def _why_computed(self, last: KeyedLookup | None, *, is_loaded_elsewhere: bool) -> Outcome:
        """Return the outcome of a prompt of a block or more that computes. Another connector may load it."""
        was_looked_up = self.may_load and last is not None and not last.future.failed
        if is_loaded_elsewhere or (self.engine_has_all and was_looked_up):
            return Outcome.NOT_NEEDED
        if self.is_late:
            return Outcome.LATE
        if not was_looked_up or last is None:
            return Outcome.UNUSED
        if last.given_up or not last.future.done:
            return Outcome.LATE
        if self.skipped:
            return Outcome.SKIPPED
        return Outcome.NO_SPACE if self.refused else Outcome.MISSED


def failed(report: PromptReport) -> PromptReport:
    """Return the report of a prompt whose load failed, so that it is computed."""
    return structs.replace(report, outcome=Outcome.FAILED, loaded_tokens=0, covered_keys=report.own_keys)


def _marks_of(request: Request) -> list[str]:
    """Return what the keys of a request contain besides its tokens."""
    marks = {
        Mark.CACHE_SALT: bool(request.cache_salt),
        Mark.LORA: request.lora_request is not None,
        Mark.MULTIMODAL: bool(request.mm_features),
        Mark.EMBEDDINGS: request.prompt_embeds is not None,
    }
    return [mark.value for mark, is_set in marks.items() if is_set]


def _first_missing(
    last: KeyedLookup | None, covered: Sequence[int], adapter: bytes, tiers: Collection[int]
) -> tuple[int, bytes, int, str]:
    """Return the first key that was neither covered nor ready: group, key, its position among all keys looked up, from
    1, and the reason if it is known here."""
    before = 0
    for (index, chunks), states in zip(last.chunks.items(), last.states, strict=False) if last is not None else ():
        for at in range(covered[index], len(states)):
            if states[at] != READY:
                (key,) = wire_keys([chunks[at]], adapter)
                return index, key, before + at + 1, _reason_of(last, states[at], tiers)
        before += len(states)
    return 0, b"", 0, ""


def _coming(last: KeyedLookup | None, covered: Sequence[int]) -> list[int]:
    """Return by group how many keys behind the covered ones were ready or coming, without a gap."""
    found = [last.chunk_states(index)[count:] if last is not None else b"" for index, count in enumerate(covered)]
    return [len(states) - len(states.lstrip(bytes([READY, *COMING]))) for states in found]


def _reason_of(last: KeyedLookup | None, state: int, tiers: Collection[int]) -> str:
    """Return why a key that is not READY was missing; empty if the daemon knows."""
    if state not in COMING:
        return "partial" if state == WRITING else ""
    if state not in tiers:
        return EXCLUDED
    return "unanswered" if state == SHARED and last is not None and last.future.asking else "tier_late"
