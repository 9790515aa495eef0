"""What an engine learned of itself, for operators."""

from __future__ import annotations

from typing import Annotated

from kvoffd_proto.wire import SCHEDULER, Done, Fingerprint, Request, Section, doc, exchange

MAX_REPORTED = 1_000_000
"""In one message: sums of what anybody may claim must stay numbers."""
MOST_PER_SECOND = 1e12
"""Infinity is no speed."""
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
