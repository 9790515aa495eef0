"""What an engine learned of itself, for operators, and what its users say of their requests."""

from __future__ import annotations

from typing import Annotated

from kvoffd_proto.wire import MAX_GROUPS, SCHEDULER, Done, Fingerprint, GroupKeys, Request, Section, doc, exchange

MAX_REPORTED = 1_000_000
"""In one message: sums of what anybody may claim must stay numbers."""
MOST_PER_SECOND = 1e12
"""Infinity is no speed."""
MAX_PRIORITY = 10
MAX_RETAIN_S = 86_400
Speed = Annotated[float, doc(ge=0, le=MOST_PER_SECOND)]


@exchange(Section.SCHEDULER, SCHEDULER)
class ReportEngine(Request[Done], frozen=True):
    """Tells how fast an engine computes and loads, and what it left out since it last told that."""

    namespace: Fingerprint
    prefill_tokens_per_second: Annotated[Speed, doc("Prompt tokens that it computes a second; 0 if not known.")]
    load_tokens_per_second: Annotated[Speed, doc("Tokens that loads bring it a second; 0 if not known.")]
    skipped_loads: Annotated[int, doc("Loads that it left out, since computing is faster.", ge=0, le=MAX_REPORTED)] = 0
    paused_stores: Annotated[
        int, doc("Stores that it left out, since it had waited for stores too often.", ge=0, le=MAX_REPORTED)
    ] = 0
    late_lookups: Annotated[
        int, doc("Lookups whose answers it did not wait for any longer.", ge=0, le=MAX_REPORTED)
    ] = 0


@exchange(Section.SCHEDULER, SCHEDULER)
class Hint(Request[Done], frozen=True):
    """Says how long the blocks of a request should stay. Nothing is promised; marks of an earlier Hint are replaced."""

    namespace: Fingerprint
    groups: Annotated[list[GroupKeys], doc("Keys of the request, root of the prefix first.", max_length=MAX_GROUPS)]
    priority: Annotated[
        int,
        doc(
            "Below 0, the blocks go before others; above 0, after them; 0 takes marks away.",
            ge=-MAX_PRIORITY,
            le=MAX_PRIORITY,
        ),
    ]
    retain_ms: Annotated[
        int, doc("How long a priority above 0 counts, in milliseconds.", ge=0, le=1000 * MAX_RETAIN_S)
    ] = 0
