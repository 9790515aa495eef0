"""Rows of the contest: what one side did in one workload, in one round."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np

from tests.bench.contest.client import Traffic
from tests.bench.contest.engine import COMPUTED, OUTSIDE, OWN, Counts

MAX_CAUSE = 300
"""Characters that a row keeps of why it is lost."""


@dataclass
class Row:
    """One side in one workload, in one round.

    Attributes:
        part, workload, side, round: which.
        requests: number of answers.
        ttft_ms: p50, p90 and p99 of milliseconds to the first token.
        gap_ms: p50 and p99 of milliseconds between tokens.
        seconds: from the first sending to the last answer's end.
        prompt_tokens: tokens of all prompts, as vLLM counts them.
        computed, own, outside: those that were computed, in vLLM's own cache, and loaded from outside.
        engine_cpu_s, cache_cpu_s: CPU seconds of the engine's processes, and of the cache's outside.
        preempted: requests that vLLM pre-empted.
        connector: what the connector counted, if not 0.
        answers: a digest of each answer.
        failed: causes of requests that failed.
        verdict: what a program of others concluded.
        lost: why there is no result; empty where there is one.
    """

    part: str
    workload: str
    side: str
    round: int
    requests: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    prompt_tokens: int = 0
    computed: int = 0
    own: int = 0
    outside: int = 0
    engine_cpu_s: float = 0.0
    cache_cpu_s: float = 0.0
    preempted: int = 0
    connector: dict[str, int] = field(default_factory=dict)
    answers: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    verdict: str = ""
    lost: str = ""

    def fill(self, traffic: Traffic, counts: Counts) -> None:
        """Take over what the client saw and what the engine counted.

        Raises AssertionError if no request was answered, or vLLM's sources do not add up to its prompts' tokens.
        """
        assert traffic.ttft_s or not traffic.failed, f"no request was answered: {traffic.failed[0]}"
        sources = counts.by_source
        self.computed, self.own, self.outside = (sources.get(name, 0) for name in (COMPUTED, OWN, OUTSIDE))
        self.prompt_tokens = counts.prompt_tokens
        assert self.computed + self.own + self.outside == self.prompt_tokens, f"vLLM's counts differ: {counts}"
        self.requests = len(traffic.answers) or len(traffic.ttft_s)
        self.ttft_ms = [1000 * one for one in percentiles(traffic.ttft_s, 50, 90, 99)]
        self.gap_ms = [1000 * one for one in percentiles(traffic.gaps_s, 50, 99)]
        self.seconds = traffic.seconds
        self.engine_cpu_s, self.cache_cpu_s = counts.engine_cpu_s, counts.cache_cpu_s
        self.preempted = counts.preempted
        self.connector = {name: count for name, count in counts.connector.items() if count}
        self.answers = [blake2b(repr(one).encode(), digest_size=6).hexdigest() for one in traffic.answers]
        self.failed = [one[:MAX_CAUSE] for one in traffic.failed]
        self.verdict = traffic.verdict

    @classmethod
    def read(cls, file: Path) -> list[Row]:
        """Read the rows of a file that ``append`` wrote."""
        return [cls(**json.loads(line)) for line in file.read_text().splitlines()]

    def append(self, file: Path) -> None:
        with file.open("a") as lines:
            lines.write(json.dumps(asdict(self)) + "\n")


def percentiles(values: Sequence[float], *parts: float) -> list[float]:
    """Return percentiles, an empty list if there are no values."""
    return [float(one) for one in np.percentile(values, parts)] if values else []
