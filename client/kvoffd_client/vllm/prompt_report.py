"""Reports of why a prompt hit or missed: for operators, and for the daemon, which counts the keys by them."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from kvoffd_client.vllm.chunk_groups import ChunkGroup, wire_keys
from kvoffd_client.vllm.keyed_lookup import KeyedLookup
from kvoffd_client.vllm.promoted_blocks import ASKED, LACKED, PromotedBlocks
from kvoffd_client.vllm.request_state import PromptWait, RequestState
from kvoffd_proto.messages import (
    COMING,
    MAX_HINTS_CHARACTERS,
    MAX_REQUEST_CHARACTERS,
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

EXCLUDED = "excluded"
"""Reason of a key that the request excludes by its ``kv_load_tiers``."""


class LeadingKeys(NamedTuple):
    """Numbers of a prompt's leading keys, by group.

    Attributes:
        whole: all its keys.
        own: those in the engine's own cache.
        covered: those that need not be computed.
    """

    whole: list[int]
    own: list[int]
    covered: list[int]


class MissingKey(NamedTuple):
    """The first key that a prompt lacked.

    Attributes:
        group: index of its group on the wire.
        number: its position among all keys of the lookup, from 1; 0 if none was missing.
        reason: why it was missing; empty if the daemon knows.
    """

    group: int = 0
    key: bytes = b""
    number: int = 0
    reason: str = ""


class FoundKeys(NamedTuple):
    """Numbers of the keys of the lookup that decided about a prompt, as in ``PromptReport``."""

    keys: int
    found_pool: int
    found_disk: int
    found_shared: int
    asked_shared: int
    unanswered: int


def report_of(
    state: RequestState,
    wait: PromptWait,
    promoted: PromotedBlocks,
    groups: Sequence[ChunkGroup],
    *,
    loaded_tokens: int = 0,
    load_lease_id: int = 0,
    dropped: bool = False,
) -> PromptReport:
    """Return the report of a request that is scheduled with ``loaded_tokens`` or, if ``dropped``, ended before.

    ``wait``: its wait that has ended. ``promoted``: its blocks that came from tiers before. ``load_lease_id``: lease
    under which it loads.
    """
    request, scan, adapter = state.request, state.scan, state.adapter.content
    # The lookup that decided is not the last one if that was sent early, to have the next answer in time.
    lookup = state.last if dropped or scan.answer is None else scan.answer
    own_tokens, other_tokens = scan.own_tokens, 0
    if not dropped:
        own_tokens, other_tokens = _computed_tokens(state, groups, loaded_tokens)
    leading = _leading_keys(state, groups, loaded_tokens, computes_none=dropped or other_tokens > 0)
    if loaded_tokens:
        outcome = Outcome.LOADED
    elif dropped:
        outcome = Outcome.DROPPED
    elif not any(leading.whole):
        outcome = Outcome.TOO_SHORT
    else:
        outcome = _why_computed(state, wait, lookup, is_loaded_elsewhere=other_tokens > 0)
    missing, found = _first_missing(lookup, leading.covered, adapter, state.tiers), _found_keys(lookup, promoted)
    after_gap = 0
    if missing.number and lookup is not None:
        after_gap = sum(lookup.chunk_states(index).count(READY, leading.covered[index]) for index in lookup.chunks)
    return PromptReport(
        request=request.request_id[:MAX_REQUEST_CHARACTERS],
        decided_at=time.time(),
        tokens=request.num_prompt_tokens,
        keys=found.keys,
        found_pool=found.found_pool,
        found_disk=found.found_disk,
        found_shared=found.found_shared,
        outcome=outcome,
        loaded_tokens=loaded_tokens,
        missing_group=missing.group,
        missing_key=missing.key,
        reason=missing.reason,
        missing_number=missing.number,
        own_tokens=own_tokens,
        lease_id=wait.counted.lease_id if wait.counted is not None else 0,
        own_keys=leading.own,
        covered_keys=leading.covered,
        after_gap=after_gap,
        load_lease_id=load_lease_id,
        other_tokens=other_tokens,
        again=state.was_reported,
        asked_shared=found.asked_shared,
        unanswered=found.unanswered,
        marks=_marks_of(request) + [Mark.KV_LOAD_TIERS.value] * (missing.reason == EXCLUDED),
        hints="; ".join(f"{name} {what}" for name, what in state.hint_notes.items())[:MAX_HINTS_CHARACTERS],
        coming_keys=_coming(lookup, leading.covered) if missing.number else [],
    )


def _computed_tokens(state: RequestState, groups: Sequence[ChunkGroup], loaded_tokens: int) -> tuple[int, int]:
    """Return how many tokens of a request that is scheduled are in the engine's own cache, and how many another
    connector loads.

    vLLM does not say which is which, but counts both as computed. It told the scan of whole blocks in its cache only:
    what it has beyond these is less than a block, what another connector loads is a block or more.
    """
    own_tokens = state.request.num_computed_tokens - loaded_tokens
    beyond = own_tokens - state.scan.own_tokens
    if beyond >= min(one.tokens_per_block for one in groups):
        return state.scan.own_tokens, beyond
    return own_tokens, 0


def _leading_keys(
    state: RequestState, groups: Sequence[ChunkGroup], loaded_tokens: int, *, computes_none: bool
) -> LeadingKeys:
    """Return a request's leading keys. ``computes_none``: without a load this engine computes none of them either."""
    request, scan = state.request, state.scan
    whole = [request.num_tokens // one.tokens_per_chunk for one in groups]
    own = [scan.own_tokens // one.tokens_per_chunk for one in groups]
    if loaded_tokens:
        # A load may end inside a chunk: before the last token, or where a limit of vLLM ends it. That chunk's key was
        # used. But where a tail ends the load, the tail's key was used instead.
        end = scan.own_tokens + loaded_tokens
        ends_before_last_token = end < request.num_tokens - 1
        if state.tails and not scan.engine_has_all and ends_before_last_token:
            end -= end % groups[0].tokens_per_chunk
        ends = [-(-end // one.tokens_per_chunk) for one in groups]
        return LeadingKeys(whole, own, [*map(min, whole, ends)])
    if computes_none:
        return LeadingKeys(whole, whole, whole)
    # vLLM computes the last token in any case, and with it the block that ends there.
    return LeadingKeys(whole, own, whole if scan.engine_has_all else own)


def _found_keys(lookup: KeyedLookup | None, promoted: PromotedBlocks) -> FoundKeys:
    """Return where the keys of a lookup were found: what is ready was in the pool, unless it was promoted before.

    ``promoted`` has what earlier answers said of each chunk: PENDING if it came from a disk, SHARED if from a store;
    ASKED if a store had not answered, LACKED if it had not the chunk; 0 if it was in the pool, or nowhere. A store was
    asked for all but those of PENDING and 0.
    """
    keys = ready = unanswered = came_up = from_disk = from_store = asked = 0
    if lookup is not None:
        states, unanswered = lookup.states, lookup.future.asking
        keys, ready = sum(map(len, states)), sum(one.count(READY) for one in states)
    for index, before in promoted.chunks.items():
        now = lookup.chunk_states(index) if lookup is not None else b""
        promoted_from = [old for old, new in zip(before, now, strict=False) if old not in (0, LACKED) and new == READY]
        came_up += len(promoted_from)
        from_disk += before.count(PENDING)
        from_store += before.count(SHARED) + promoted_from.count(ASKED)  # a store had it, since it is ready
        asked += before.count(SHARED) + before.count(ASKED) + before.count(LACKED)
    # ``unanswered`` is of all keys of the last lookup, tails included, and ``asked`` of the chunks.
    return FoundKeys(keys, ready - came_up, from_disk, from_store, asked, min(asked, unanswered))


def _why_computed(
    state: RequestState, wait: PromptWait, lookup: KeyedLookup | None, *, is_loaded_elsewhere: bool
) -> Outcome:
    """Return the outcome of a prompt of a block or more that computes. Another connector may load it."""
    was_looked_up = state.scan.may_load and lookup is not None and not lookup.future.failed
    if is_loaded_elsewhere or (state.scan.engine_has_all and was_looked_up):
        return Outcome.NOT_NEEDED
    if state.scan.is_late:
        return Outcome.LATE
    if not was_looked_up:
        return Outcome.UNUSED
    if wait.skipped:
        return Outcome.SKIPPED
    return Outcome.NO_SPACE if wait.refused else Outcome.MISSED


def report_of_failed(report: PromptReport) -> PromptReport:
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
    lookup: KeyedLookup | None, covered: Sequence[int], adapter: bytes, tiers: Collection[int]
) -> MissingKey:
    """Return the first key that was neither covered nor ready."""
    before = 0
    if lookup is None:
        return MissingKey()
    for (index, chunks), states in zip(lookup.chunks.items(), lookup.states, strict=False):
        for at in range(covered[index], len(states)):
            if states[at] != READY:
                (key,) = wire_keys([chunks[at]], adapter)
                return MissingKey(index, key, before + at + 1, _reason_of(lookup, states[at], tiers))
        before += len(states)
    return MissingKey()


def _coming(lookup: KeyedLookup | None, covered: Sequence[int]) -> list[int]:
    """Return by group how many keys behind the covered ones were ready or coming, without a gap."""
    found = [lookup.chunk_states(index)[count:] if lookup is not None else b"" for index, count in enumerate(covered)]
    return [len(states) - len(states.lstrip(bytes([READY, *COMING]))) for states in found]


def _reason_of(lookup: KeyedLookup, key_state: int, tiers: Collection[int]) -> str:
    """Return why a key that is not READY was missing; empty if the daemon knows."""
    if key_state not in COMING:
        return "partial" if key_state == WRITING else ""
    if key_state not in tiers:
        return EXCLUDED
    return "unanswered" if key_state == SHARED and lookup.future.asking else "tier_late"
