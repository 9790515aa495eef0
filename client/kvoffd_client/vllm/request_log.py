"""Why a request hit or missed: a report of each, told to the daemon for ``clients --requests``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvoffd_client.vllm.connector_metadata import ChunkGroup, of_adapter
from kvoffd_proto.messages import ABSENT, READY, SHARED, WRITING, Outcome, RequestReport

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvoffd_client.vllm.manager import KeyedLookup, RequestState

MAX_WAITING = 256
"""The most requests of the latest steps that are reported."""


class RequestLog:
    """Takes note when a request is scheduled, and reports it a step later: the first token does not wait for that."""

    def __init__(self, groups: Sequence[ChunkGroup]) -> None:
        self._groups = groups
        self._scheduled: list[tuple[Request, RequestState, KeyedLookup | None, int]] = []

    def scheduled(self, request: Request, state: RequestState, loaded_tokens: int) -> None:
        """A request is scheduled, and loads so many tokens. Only its first time counts: it may be preempted."""
        if not state.logged and len(self._scheduled) < MAX_WAITING:
            state.logged = True
            self._scheduled.append((request, state, state.last, loaded_tokens))

    def report(self, tell: Callable[[RequestReport], object]) -> None:
        """Report what was scheduled since the last call."""
        scheduled, self._scheduled = self._scheduled, []
        for request, state, last, loaded_tokens in scheduled:
            tell(self._report_of(request, state, last, loaded_tokens))

    def _report_of(
        self, request: Request, state: RequestState, last: KeyedLookup | None, loaded_tokens: int
    ) -> RequestReport:
        asked, states = list[tuple[int, bytes]](), b""
        if last is not None:
            asked = [(index, chunk) for index, chunks in last.chunks.items() for chunk in chunks]
            states = b"".join(last.ticket.states)
        below = state.from_tiers
        from_store = list(below.values()).count(SHARED)
        ready = [asked[at] for at, one in enumerate(states) if one == READY] if below else []
        risen = sum(chunk + self._groups[index].suffix in below for index, chunk in ready)
        group, missing, reason = 0, b"", ""
        at = len(states) - len(states.lstrip(bytes([READY])))
        if at < len(states):
            group, chunk = asked[at]
            missing = of_adapter([chunk], state.adapter)[0] if state.adapter else chunk
            reason = "" if states[at] == ABSENT else "partial" if states[at] == WRITING else "tier_late"
        return RequestReport(
            request.request_id[:128],
            time.time(),
            request.num_prompt_tokens,
            len(states),
            states.count(READY) - risen,
            len(below) - from_store,
            from_store,
            self._outcome(request, state, last, loaded_tokens, leading=at),
            loaded_tokens,
            group,
            missing,
            reason,
            at + 1 if missing else 0,
        )

    def _outcome(
        self, request: Request, state: RequestState, last: KeyedLookup | None, loaded_tokens: int, *, leading: int
    ) -> Outcome:
        if loaded_tokens:
            return Outcome.LOADED
        if state.load_failed:
            return Outcome.FAILED
        if request.num_prompt_tokens < min(group.tokens_per_chunk for group in self._groups):
            return Outcome.SHORT
        if state.disabled or last is None or last.ticket.failed:
            return Outcome.UNUSED
        if last.given_up:
            return Outcome.LATE
        if not last.ticket.done:  # nobody waited for the answer
            return Outcome.HELD
        if state.skip_counted:
            return Outcome.SKIPPED
        return Outcome.HELD if leading else Outcome.MISSED
