"""What a metric is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from kvoffd_proto.messages import StatsReply

Sample = tuple[tuple[str, ...], float]


@dataclass(frozen=True)
class MetricSpec:
    """One metric: what it is called, what it means, and how its samples (label values, value) are read."""

    name: str
    kind: Literal["counter", "gauge"]
    description: str
    labels: tuple[str, ...]
    read: Callable[[StatsReply], Iterable[Sample]]
