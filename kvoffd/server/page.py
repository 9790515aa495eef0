"""The content of the page at ``/``: statistics, the last hour in steps, engines, the latest prompts, and findings.

``PageFacts`` is gathered in the daemon's loop. ``page_of`` makes the page's JSON of it, in any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from msgspec import Struct

from kvoffd.observe.meters import HOUR_S, MINUTE_S
from kvoffd_proto.admin import LoggedPrompt, NamespaceInfo, SessionInfo
from kvoffd_proto.engines import engines_of
from kvoffd_proto.findings import Facts, command_of, find
from kvoffd_proto.messages import doc
from kvoffd_proto.prompts import outcome_sentence, why_computed
from kvoffd_proto.stats import FEW_DURATIONS, DaemonStats, Histogram, Window, engine_name, namespace_id, namespace_name

if TYPE_CHECKING:
    from kvoffd.server.service import Service

MAX_PROMPTS = 50
"""Latest prompts on the page."""


class Step(Struct, frozen=True, omit_defaults=True):
    """Traffic of some seconds of the last hour; fields as in ``Traffic``."""

    ago: Annotated[float, doc("Seconds since its end.")]
    seconds: Annotated[float, doc("Its length.")]
    prompt_tokens: dict[str, int] = {}
    loaded_tokens: int = 0
    saved_seconds: float = 0.0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    lookups: int = 0


class LookupTimes(Struct, frozen=True):
    """Durations of lookups in the last minute, or the last hour if the minute has few."""

    seconds: Annotated[float, doc("Length of the period.")]
    count: int
    p99_seconds: Annotated[float | None, doc("None if there were few.")]
    summary: Annotated[str, doc("In words.")]


class EngineRow(Struct, frozen=True):
    """One engine, as ``kvoffd-cli clients`` lists it."""

    name: str
    software: Annotated[str, doc("Its versions, and its host or pod.")]
    pids: Annotated[list[int], doc("Empty in another pid namespace.")]
    workers: int
    namespaces: Annotated[list[str], doc("Labels with ids.")]
    idle_seconds: float
    stored_bytes: Annotated[int, doc("Since it connected.")]
    loaded_bytes: Annotated[int, doc("Since it connected.")]
    pinned_bytes: int
    problem: str


class PromptRow(Struct, frozen=True):
    """One prompt, as ``kvoffd-cli clients --requests`` lists it."""

    at: Annotated[float, doc("Time of the decision, in seconds since 1970.")]
    request: str
    engine: str
    namespace: Annotated[str, doc("Its id.")]
    all_tokens: int
    tokens: Annotated[dict[str, int], doc("By source, as in ``LoggedPrompt``.")]
    outcome: str
    why: Annotated[str, doc("Why tokens were computed; empty if nothing says so.")]
    sentence: Annotated[str, doc("All that is known.")]


class FindingRow(Struct, frozen=True):
    """One finding of ``kvoffd-cli doctor``; ``command`` is the part of ``fix`` that can be typed, or empty."""

    level: str
    check: str
    text: str
    fix: str
    command: str


class Page(Struct, frozen=True):
    """Answer of ``/page.json``."""

    stats: DaemonStats
    steps: Annotated[list[Step], doc("The last hour, oldest first; the last one is not finished.")]
    lookups: LookupTimes
    engines: list[EngineRow]
    prompts: Annotated[list[PromptRow], doc("Newest first.")]
    findings: Annotated[list[FindingRow], doc("Most important first.")]


@dataclass(frozen=True)
class PageFacts:
    """State of the daemon at one time, from which the page is made."""

    stats: DaemonStats
    steps: list[tuple[float, Window]]
    lookups: tuple[Histogram, Histogram]
    """Durations of the last minute and the last hour."""
    prompts: list[LoggedPrompt]
    sessions: list[SessionInfo]
    namespaces: list[NamespaceInfo]


def page_facts(service: Service) -> PageFacts:
    """Gather the facts. Changes nothing. For the loop's thread."""
    traffic = service.traffic
    return PageFacts(
        stats=service.statistics.read(),
        steps=traffic.last_hour_in_steps(traffic.total()),
        lookups=(service.lookups.recent.in_last(MINUTE_S), service.lookups.recent.in_last(HOUR_S)),
        prompts=service.reports.latest(MAX_PROMPTS),
        sessions=service.sessions.infos(),
        namespaces=service.namespaces.infos(),
    )


def page_of(facts: PageFacts) -> Page:
    """Return the page. Findings about the machine, and about engines' own metrics, are those of the command alone."""
    names = {one.session_id: engine_name(one.name, one.role) for one in facts.sessions}
    found = find(Facts(facts.stats, facts.namespaces, facts.sessions))
    return Page(
        stats=facts.stats,
        steps=[_step(ago, window) for ago, window in facts.steps],
        lookups=_lookup_times(facts),
        engines=_engine_rows(facts),
        prompts=[_prompt_row(one, names.get(one.session_id, "")) for one in reversed(facts.prompts)],
        findings=[
            FindingRow(one.level, one.check, f"{one.evidence} {one.meaning}".rstrip(), one.fix, command_of(one))
            for one in found
        ],
    )


def _step(ago: float, window: Window) -> Step:
    return Step(
        ago=round(ago, 1),
        seconds=round(window.seconds, 3),
        prompt_tokens=window.prompt_tokens,
        loaded_tokens=window.loaded_tokens,
        saved_seconds=round(window.saved_seconds, 3),
        loaded_bytes=window.loaded_bytes,
        stored_bytes=window.stored_bytes,
        lookups=window.lookups,
    )


def _lookup_times(facts: PageFacts) -> LookupTimes:
    minute, hour = facts.lookups
    few = minute.count < FEW_DURATIONS
    window, found = (facts.stats.last_hour, hour) if few else (facts.stats.last_minute, minute)
    p99 = found.quantile(0.99) if found.count >= FEW_DURATIONS else None
    return LookupTimes(window.seconds, found.count, p99, found.summary())


def _engine_rows(facts: PageFacts) -> list[EngineRow]:
    labels = {one.namespace: one.label for one in facts.namespaces}
    return [
        EngineRow(
            name=row.name,
            software=row.software,
            pids=row.pids,
            workers=row.workers,
            namespaces=list(map(namespace_name, row.labels, row.namespaces)),
            idle_seconds=row.idle_seconds,
            stored_bytes=row.stored_bytes,
            loaded_bytes=row.loaded_bytes,
            pinned_bytes=row.pinned_bytes,
            problem=row.problem,
        )
        for row in engines_of(facts.sessions, labels)
    ]


def _prompt_row(logged: LoggedPrompt, engine: str) -> PromptRow:
    report = logged.report
    return PromptRow(
        at=report.decided_at,
        request=report.request,
        engine=engine,
        namespace=namespace_id(logged.namespace),
        all_tokens=report.tokens,
        tokens=logged.tokens,
        outcome=report.outcome,
        why=why_computed(report),
        sentence=outcome_sentence(logged),
    )
