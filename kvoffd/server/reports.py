"""Reports of engines about their prompts and about themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from msgspec import structs

from kvoffd.cache.asked_keys import AskedKeys, PromptUse
from kvoffd.cache.block_table import FOUND
from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.cache.prompt_tokens import PromptTokens
from kvoffd.errors import BadKeys, KvoffdError
from kvoffd.server.handlers import answers
from kvoffd.server.session import Session
from kvoffd.server.sessions import SessionTable
from kvoffd.server.tier_supervisor import TierSupervisor
from kvoffd.server.traffic import TrafficCounts
from kvoffd_proto import admin as a
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode

UNLOADED: Mapping[str, MissReason] = {
    m.Outcome.LATE: MissReason.LATE,
    m.Outcome.SKIPPED: MissReason.SKIPPED,
    m.Outcome.NO_SPACE: MissReason.ENGINE_FULL,
    m.Outcome.FAILED: MissReason.LOAD_FAILED,
}
"""Miss reasons of keys that were found and not loaded, by the prompt's outcome."""
NOT_AWAITED: Mapping[str, MissReason] = {
    reason.name.lower(): reason for reason in (MissReason.TIER_LATE, MissReason.UNANSWERED, MissReason.EXCLUDED)
}
"""Miss reasons of keys that were coming and not waited for, as engines report them."""


class Reports:
    """Counts what engines report, and keeps each session's latest prompts."""

    def __init__(
        self, cache: Cache, sessions: SessionTable, tier_supervisor: TierSupervisor, traffic: TrafficCounts
    ) -> None:
        self._cache, self._sessions = cache, sessions
        self._tier_supervisor, self._traffic = tier_supervisor, traffic

    @answers(m.ReportEngine)
    def report_engine(self, session: Session, message: m.ReportEngine) -> m.Done:
        namespace = session.namespaces[message.namespace]
        counters = namespace.counters
        if 0 < message.prefill_tokens_per_second < m.MIN_PER_SECOND:
            speed = message.prefill_tokens_per_second
            why = f"{speed} tokens per second is not an engine's speed; report 0 if unknown."
            raise KvoffdError(why, ErrorCode.MALFORMED)
        if message.prefill_tokens_per_second:  # else unknown, as after the engine's restart
            counters.prefill_tokens_per_second = message.prefill_tokens_per_second
        counters.count_loaded(0)  # counts loads from before the speed was known
        counters.skipped_loads += message.skipped_loads
        counters.paused_stores += message.paused_stores
        counters.late_lookups += message.late_lookups
        if not namespace.of_bench:
            self._traffic.date_back("late_lookups", message.late_lookups, message.late_age_s)
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
        for one in message.prompts:  # all are valid: nothing is counted of a message that is refused
            unloaded, not_awaited = UNLOADED.get(one.outcome), NOT_AWAITED.get(one.reason)
            outcome = PromptUse(one.own_keys, one.covered_keys, unloaded, one.coming_keys, not_awaited)
            counted = cache.prompts.count(session.id, one.lease_id, outcome)
            self._count_missed_for_tiers(counted)
            reason, tiers = self._reason_of(namespace, one, counted)
            tokens: dict[str, int] = {}
            if not (one.again or one.outcome == m.Outcome.DROPPED):
                its = PromptTokens(one.tokens, one.own_tokens, one.loaded_tokens, one.other_tokens)
                tokens = cache.prompts.count_tokens(namespace, session.id, one.load_lease_id, its)
            explained = structs.replace(one, reason=reason)
            session.prompts.append(a.LoggedPrompt(session.id, message.namespace, explained, tokens, tiers))
        return m.Done(message.request_id, len(message.prompts))

    @answers(a.ListPrompts)
    def list_prompts(self, session: Session, message: a.ListPrompts) -> a.PromptsListed:
        return a.PromptsListed(message.request_id, self.latest(message.limit, message.name))

    def latest(self, limit: int, name: str = "") -> list[a.LoggedPrompt]:
        """Return the latest prompts of all engines whose request id has ``name``, in the order of their decisions."""
        found: list[a.LoggedPrompt] = []
        for session in self._sessions:
            named = (prompt for prompt in reversed(session.prompts) if name in prompt.report.request)
            found += reversed([*islice(named, limit)])
        found.sort(key=lambda prompt: prompt.report.decided_at)
        return found[-limit:]

    def _count_missed_for_tiers(self, counted: Sequence[AskedKeys]) -> None:
        """Have each tier that was down count the keys that it may have had."""
        if (tiering := self._tier_supervisor.tiering) is not None:
            down = dict.fromkeys(name for part in counted for name in part.down)
            tiering.count_missed([*down], sum(part.reasons.count(MissReason.TIER_DOWN) for part in counted))

    def _reason_of(
        self, namespace: Namespace, report: m.PromptReport, counted: Sequence[AskedKeys]
    ) -> tuple[str, list[str]]:
        """Return why a prompt's first missing key was missing, or why nothing was loaded, and the tiers concerned.

        The reason is, of these, the first that there is: that by which the key was ``counted``, what the engine says,
        what the cache knows of the key now, and what the outcome says.
        """
        found = _reason_counted(report, counted)
        if found is None and report.reason:
            return report.reason, []
        if found is None and report.missing_key:
            group = namespace.group(report.missing_group)
            found = MissReason(self._cache.life.reasons_of(group, report.missing_key)[0])
        if found is None:
            found = UNLOADED.get(report.outcome)
        tiers: list[str] = []
        if found is MissReason.TIER_FAILED and (tiering := self._tier_supervisor.tiering) is not None:
            tiers = tiering.failing
        elif found is MissReason.TIER_DOWN:
            tiers = list(dict.fromkeys(name for part in counted for name in part.down))
        elif found in NOT_AWAITED.values():
            tiers = list(dict.fromkeys(name for part in counted for name in part.sources))
        return "" if found is None else found.name.lower(), tiers


def _reason_counted(report: m.PromptReport, counted: Sequence[AskedKeys]) -> MissReason | None:
    """Return the reason by which a prompt's first missing key was counted; None if it was not."""
    for part in counted:
        is_its_group = part.chain is not None and part.chain.group.index == report.missing_group
        if is_its_group and (entry := part.reason_of(report.missing_key)) not in (None, FOUND):
            return MissReason(entry)
    return None
