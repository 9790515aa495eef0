"""How an engine's answers compare, as ``kvoffd-cli verify`` judges."""

from __future__ import annotations

from typing import Any

from kvoffd_client.cli.verify import MAX_NOISE_NATS, OutputDifference, difference
from kvoffd_client.cli.verify import TIE_NATS as TIE_NATS


def compare(computed: Any, own: Any, given: Any, nats: float = TIE_NATS) -> tuple[bool, OutputDifference]:
    """Return whether an answer is as the computed one or that from vLLM's own prefix cache, and how it differs from the
    first. All have the log probabilities of several tokens at each place. ``nats``: difference that says nothing."""
    found, noise = difference(computed, given), difference(computed, own).farthest
    nats = max(nats, 2 * min(noise, MAX_NOISE_NATS))
    return found.within(nats) or difference(own, given).within(nats), found
