"""Reports of engines about their prompts and about themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import structs

from kvoffd.cache.asked_keys import AskedKeys, PromptOutcome
from kvoffd.cache.block_table import FOUND
from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import MissReason
from kvoffd.cache.prompt_tokens import PromptTokens
from kvoffd.errors import BadKeys, KvoffdError
from kvoffd.server.handlers import answers
from kvoffd.server.session import Session
from kvoffd.server.sessions import Sessions
from kvoffd_proto import admin as a
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode

UNLOADED: Mapping[str, MissReason] = {
    m.Outcome.LATE: MissReason.LATE,
    m.Outcome.SKIPPED: MissReason.SKIPPED,
    m.Outcome.NO_SPACE: MissReason.ENGINE_FULL,
    m.Outcome.FAILED: MissReason.LOAD_FAILED,
    "tier_late": MissReason.TIER_LATE,
    "not_loaded": MissReason.NOT_LOADED,
}
"""Miss reasons of keys that were found and not loaded, by the prompt's outcome or the reason of its first missing key.
"""


class Reports:
    """Counts what engines report, and keeps each session's latest prompts."""

    def __init__(self, cache: Cache, sessions: Sessions) -> None:
        self._cache, self._sessions = cache, sessions

    @answers(m.ReportEngine)
    def report_engine(self, session: Session, message: m.ReportEngine) -> m.Done:
        counters = session.namespaces[message.namespace].counters
        if 0 < message.prefill_tokens_per_second < m.MIN_PER_SECOND:
            speed = message.prefill_tokens_per_second
            why = f"{speed} tokens per second is not an engine's speed; report 0 if unknown."
            raise KvoffdError(why, ErrorCode.MALFORMED)
        if message.prefill_tokens_per_second:  # else unknown, as after the engine's restart
            counters.prefill_tokens_per_second = message.prefill_tokens_per_second
        counters.loaded(0)  # counts loads from before the speed was known
        counters.skipped_loads += message.skipped_loads
        counters.paused_stores += message.paused_stores
        counters.late_lookups += message.late_lookups
        counters.unknown_hints += message.unknown_hints
        session.problem = message.problem
        return m.Done(message.request_id)

    @answers(m.ReportPrompts)
    def report_prompts(self, session: Session, message: m.ReportPrompts) -> m.Done:
        """Keep reports of prompts, each with the reason why it was not loaded whole."""
        namespace, cache = session.namespaces[message.namespace], self._cache
        for one in message.prompts:
            namespace.check(one.missing_group, one.missing_key)
            if len(one.missing_key) > namespace.key_bytes:
                raise BadKeys("A report has one first missing key at most; leave the others out.")
            if not one.again and (had := one.own_tokens + one.loaded_tokens + one.other_tokens) > one.tokens:
                why = f"A prompt of {one.tokens} tokens did not have {had}; report those of the prompt only."
                raise KvoffdError(why, ErrorCode.MALFORMED)
        for one in message.prompts:
            reason = unloaded = UNLOADED.get(one.outcome) or UNLOADED.get(one.reason)
            outcome = PromptOutcome(one.own_keys, one.covered_keys, unloaded)
            counted = cache.prompts.count(session.id, one.lease_id, outcome)
            if one.missing_key and not one.reason:
                reason = _reason_when_asked(counted, one)
                if reason is not MissReason.COMPUTING:  # the others may have become known since
                    (reason,) = map(MissReason, cache.reasons_of(namespace, one.missing_group, one.missing_key))
            if reason is not None and not one.reason:
                one = structs.replace(one, reason=reason.name.lower())
            tokens: dict[str, int] = {}
            if not (one.again or one.outcome == m.Outcome.DROPPED):
                its = PromptTokens(one.tokens, one.own_tokens, one.loaded_tokens, one.other_tokens)
                tokens = cache.prompts.count_tokens(namespace, session.id, one.load_lease_id, its)
            session.prompts.append(a.LoggedPrompt(session.id, message.namespace, one, tokens))
        return m.Done(message.request_id, len(message.prompts))

    @answers(a.ListPrompts)
    def list_prompts(self, session: Session, message: a.ListPrompts) -> a.PromptsListed:
        """Return the latest prompts of all engines, in the order of their decisions."""
        found = [prompt for each in self._sessions for prompt in each.prompts if message.name in prompt.report.request]
        found.sort(key=lambda prompt: prompt.report.decided_at)
        return a.PromptsListed(message.request_id, found[-message.limit :])


def _reason_when_asked(counted: Sequence[AskedKeys], report: m.PromptReport) -> MissReason | None:
    """Return why the first missing key of a prompt was missing when it was asked for; None if that is not known."""
    at = report.missing_number - 1
    for part in counted:
        if part.chain is None or part.chain.group.index != report.missing_group or at < 0:
            continue
        if at < len(part.reasons):
            return MissReason(part.reasons[at]) if part.reasons[at] != FOUND else None
        at -= len(part.reasons)
    return None
