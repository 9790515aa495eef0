"""Why a request hit or missed: a report of each, sent to the daemon for ``clients --requests``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvoffd_client.vllm.connector_metadata import ChunkGroup, of_adapter
from kvoffd_proto.messages import ABSENT, READY, SHARED, WRITING, Outcome, RequestReport

if TYPE_CHECKING:
    from kvoffd_client.vllm.manager import RequestState


def report_of(state: RequestState, groups: Sequence[ChunkGroup], loaded_tokens: int) -> RequestReport:
    """Report a request that was scheduled, and loads so many tokens."""
    request, last, below = state.request, state.last, state.from_tiers
    asked, states = list[tuple[int, bytes]](), b""
    if last is not None:
        asked = [(index, chunk) for index, chunks in last.chunks.items() for chunk in chunks]
        states = b"".join(last.ticket.states)
    from_store = list(below.values()).count(SHARED)
    ready = [asked[at] for at, one in enumerate(states) if one == READY] if below else []
    risen = sum(chunk + groups[index].suffix in below for index, chunk in ready)
    group, missing, reason = 0, b"", ""
    leading = len(states) - len(states.lstrip(bytes([READY])))
    if leading < len(states):
        group, chunk = asked[leading]
        missing = of_adapter([chunk], state.adapter)[0] if state.adapter else chunk
        reason = "" if states[leading] == ABSENT else "partial" if states[leading] == WRITING else "tier_late"
    if loaded_tokens:
        outcome = Outcome.LOADED
    elif state.load_failed:
        outcome = Outcome.FAILED
    elif request.num_prompt_tokens < min(one.tokens_per_chunk for one in groups):
        outcome = Outcome.SHORT
    elif state.disabled or last is None or last.ticket.failed:
        outcome = Outcome.UNUSED
    elif last.given_up:
        outcome = Outcome.LATE
    elif not last.ticket.done:  # nobody waited for the answer
        outcome = Outcome.HELD
    elif state.skip_counted:
        outcome = Outcome.SKIPPED
    else:
        outcome = Outcome.HELD if leading else Outcome.MISSED
    return RequestReport(
        request.request_id[:128],
        time.time(),
        request.num_prompt_tokens,
        len(states),
        states.count(READY) - risen,
        len(below) - from_store,
        from_store,
        outcome,
        loaded_tokens,
        group,
        missing,
        reason,
        leading + 1 if missing else 0,
    )
