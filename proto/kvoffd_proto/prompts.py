"""Sentences about one prompt: where its tokens came from, and why others were computed.

``clients --requests``, ``verify`` and the page say the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from kvoffd_proto.admin import LoggedPrompt
from kvoffd_proto.messages import Mark, Outcome, PromptReport
from kvoffd_proto.stats import MISS_REASONS, reason_name
from kvoffd_proto.units import format_count, plural, printable

OUTCOMES = {
    Outcome.LOADED: ("loaded {loaded} of {tokens} tokens", ""),
    Outcome.MISSED: ("loaded nothing of {tokens} tokens", ""),
    Outcome.NOT_NEEDED: ("loaded nothing of {tokens} tokens", "the engine's own cache had all it can use"),
    Outcome.DROPPED: ("ended before it was scheduled: {tokens} tokens", ""),
    Outcome.TOO_SHORT: ("looked up nothing", "its {tokens} tokens are less than a block"),
    Outcome.SKIPPED: ("loaded nothing of {tokens} tokens", "computing them was faster than loading"),
    Outcome.NO_SPACE: ("loaded nothing of {tokens} tokens", "the engine's KV cache had no space for them"),
    Outcome.LATE: (
        "loaded nothing of {tokens} tokens",
        "late, the engine did not wait longer for the daemon's answer",
    ),
    Outcome.FAILED: ("computed {tokens} tokens", "a load failed, see the engine's log"),
    Outcome.UNUSED: ("looked up nothing", "the engine was not connected, or the request may not use the cache"),
}
"""The outcome of a prompt in words, and its reason where the outcome gives one."""
MARKS = {
    Mark.CACHE_SALT: "cache_salt",
    Mark.LORA: "LoRA adapter",
    Mark.MULTIMODAL: "images, audio or video",
    Mark.EMBEDDINGS: "embeddings",
}
"""Parts of a request that its keys contain, in words."""


def request_sentence(logged: LoggedPrompt) -> str:
    """Return the outcome of a request and why: ``14:05:22 cmpl-7 loaded 64 of 128 tokens: 64 from the pool, ...``."""
    clock = time.strftime("%H:%M:%S", time.localtime(logged.report.decided_at))
    return f"{clock} {printable(logged.report.request)} {outcome_sentence(logged)}"


def outcome_sentence(logged: LoggedPrompt) -> str:
    """Return the same without the time and the request's id."""
    report = logged.report
    sentence = f"{': '.join(filter(None, _outcome(report)))}."
    if set(logged.tokens) - {"computed"}:
        sentence += f" {', '.join(_tokens_by_source(logged.tokens))}."
    if report.hints:
        sentence += f" Hints: {printable(report.hints)}."
    if not report.keys:
        return sentence
    places = {"in the pool": report.found_pool, "on a disk": report.found_disk, "in a store": report.found_shared}
    there = ", ".join(f"{format_count(count)} {place}" for place, count in places.items() if count)
    sentence += f" Of {format_count(report.keys)} key{plural(report.keys)} kvoffd had {there or 'none'}."
    if report.asked_shared > report.found_shared:
        if report.unanswered:
            said = "had not answered"
        elif report.found_shared:
            said = f"has {format_count(report.found_shared)}"
        else:
            said = "did not answer" if report.reason == "tier_down" else "has none"
        sentence += f" A store was asked for {format_count(report.asked_shared)} and {said}."
    if report.missing_key:
        sentence += _first_missing(report, logged.tiers)
        if report.after_gap and report.outcome in (Outcome.LOADED, Outcome.MISSED):
            count = f"{format_count(report.after_gap)} key{plural(report.after_gap)}"
            sentence += f" Without it {count} found after it cannot be loaded."
    return sentence


def why_computed(report: PromptReport) -> str:
    """Return in some words why tokens of a prompt were computed: by its outcome, else by its first missing key.

    Empty if neither says so, as for the last tokens of a prompt that was loaded.
    """
    return _outcome(report)[1] or (_meaning(report) if report.missing_key else "")


def _outcome(report: PromptReport) -> tuple[str, str]:
    """Return what became of a prompt, and why; empty if only its missing key says so."""
    counts = {"loaded": format_count(report.loaded_tokens), "tokens": format_count(report.tokens)}
    if report.outcome not in set(Outcome):
        return f"{printable(report.outcome)}: {counts['tokens']} tokens", ""
    what, why = OUTCOMES[Outcome(report.outcome)]
    return what.format(**counts), why.format(**counts)


def _meaning(report: PromptReport) -> str:
    """Return why a prompt's first missing key was missing."""
    return MISS_REASONS.get(report.reason, printable(report.reason))


def _tokens_by_source(tokens: Mapping[str, int]) -> Iterator[str]:
    """Yield phrases such as ``64 from redis://cache:6379``."""
    for source, count in tokens.items():
        where = {"engine": "its own cache", "other": "another connector", "pool": "the pool", "disk": "a disk"}
        place = "computed" if source == "computed" else f"from {where.get(source, printable(source))}"
        yield f"{format_count(count)} {place}"


def _first_missing(report: PromptReport, tiers: Sequence[str]) -> str:
    """Return a sentence or two on why a request's first missing key was missing, because of these tiers."""
    name = ": ".join(filter(None, (reason_name(report.reason), ", ".join(map(printable, tiers)))))
    number = f" number {format_count(report.missing_number)}," if report.missing_number else ""
    which = "that neither had" if report.own_tokens else "missing"  # neither the engine nor kvoffd
    sentence = f" The first key {which},{number} {report.missing_key.hex()[:12]}: {_meaning(report)} ({name})."
    marks = [words for mark, words in MARKS.items() if mark in report.marks]
    if marks and report.reason in ("unknown", "forgotten"):
        sentence += f" Its keys contain its {' and '.join(marks)}: only prompts with the same share them."
    return sentence
