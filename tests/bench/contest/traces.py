"""Slices of traces that a small machine holds, in the form that ``vllm bench serve --dataset-name timed_trace`` reads.

A trace has one request a line, as Mooncake publishes them and ``kvoffd-cli trace record`` writes them. Whole
conversations are drawn, lengths are divided by a power of two, and time runs evenly faster.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PUBLISHED_BLOCK_TOKENS = 512
"""Tokens of a published trace's block, where its lines do not say it."""
ANSWER_TOKENS = 8
"""Tokens of an answer where a trace has none, as those that kvoffd recorded."""
MAX_ANSWER_TOKENS = 32
FITTING_PART = 0.95
"""Part of the prompts that must be within the limit; longer ones are left out."""
COMMON_PART, COMMON = 0.01, 64
"""A key that more requests have than this part, and this many, begins no conversation: it is a system prompt's."""


@dataclass(frozen=True)
class Slice:
    """A slice of a trace.

    Attributes:
        file: JSON lines.
        block_tokens: tokens of a key.
        requests, tokens: number of prompts, and of their tokens.
        repeated: tokens of keys that an earlier request had after the same keys.
        divisor: what the trace's lengths were divided by.
        seconds_per_unit: multiplier of the timestamps.
    """

    file: Path
    block_tokens: int
    requests: int
    tokens: int
    repeated: int
    divisor: int
    seconds_per_unit: float


def slice_of(trace: Path, file: Path, *, most: int, max_tokens: int, seconds: float, seed: int = 0) -> Slice:
    """Write a slice of at most ``most`` requests that takes ``seconds``; prompts have at most ``max_tokens``.

    Raises ValueError if the trace has no request that fits.
    """
    lines = [one for one in _lines(trace) if one.get("hash_ids") and one.get("hint") is None]
    if not lines:
        raise ValueError(f"{trace} is not a trace: none of its lines has hash_ids.")
    block_tokens = int(lines[0].get("block_tokens") or PUBLISHED_BLOCK_TOKENS)
    divisor = 1
    while divisor < block_tokens and _fitting(lines, divisor, max_tokens) < FITTING_PART:
        divisor *= 2
    lines = [one for one in lines if _length(one, divisor) <= max_tokens]
    chosen = _conversations(lines, most, seed)
    first, last = chosen[0]["timestamp"], chosen[-1]["timestamp"]
    made = [
        {
            "timestamp": one["timestamp"] - first,
            "input_length": _length(one, divisor),
            "output_length": min(MAX_ANSWER_TOKENS, max(1, one.get("output_length", ANSWER_TOKENS) // divisor)),
            "hash_ids": one["hash_ids"],
        }
        for one in chosen
    ]
    file.write_text("".join(json.dumps(one) + "\n" for one in made))
    seen: set[int] = set()
    repeated = 0
    for one in made:
        known = [key in seen for key in one["hash_ids"]]
        repeated += min(
            one["input_length"], block_tokens // divisor * (known.index(False) if False in known else len(known))
        )
        seen.update(one["hash_ids"])
    return Slice(
        file=file,
        block_tokens=block_tokens // divisor,
        requests=len(made),
        tokens=sum(one["input_length"] for one in made),
        repeated=repeated,
        divisor=divisor,
        seconds_per_unit=seconds / max(1, last - first),
    )


def _lines(trace: Path) -> list[dict[str, Any]]:
    opened = gzip.open if trace.suffix == ".gz" else open
    with opened(trace, "rt") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def _length(line: dict[str, Any], divisor: int) -> int:
    return max(1, int(line["input_length"]) // divisor)


def _fitting(lines: list[dict[str, Any]], divisor: int, max_tokens: int) -> float:
    return sum(_length(one, divisor) <= max_tokens for one in lines) / len(lines)


def _conversations(lines: list[dict[str, Any]], most: int, seed: int) -> list[dict[str, Any]]:
    """Return whole conversations in the trace's order, drawn at random, until there are ``most`` requests."""
    if len(lines) <= most:
        return lines
    uses = Counter(key for one in lines for key in one["hash_ids"])
    limit = max(COMMON, COMMON_PART * len(lines))
    whose = [next((key for key in one["hash_ids"] if uses[key] <= limit), one["hash_ids"][-1]) for one in lines]
    requests = Counter(whose)
    names = sorted(requests)
    random.Random(seed).shuffle(names)
    chosen, count = set[int](), 0
    for name in names:
        if count + requests[name] <= most:
            chosen.add(name)
            count += requests[name]
    return [one for one, name in zip(lines, whose, strict=True) if name in chosen]
