"""The page of what was measured, and whether anything grew faster than the logarithm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from kvoffd.memory_estimate import SLOT_BYTES
from tests.bench.report_file import markdown_table, number, percentile

Result = dict[str, Any]
"""What ``fill.measure`` or ``restart.restart`` returned."""
SHARD_BYTES = 32
"""What each further shard of a block may take; the first is ``memory_estimate``'s."""


class Figure(NamedTuple):
    """One number of a result, and how it is called."""

    name: str
    unit: str
    of: Callable[[Result], float]
    part: str = "fill"
    rare: bool = False
    """Whether others' load on the machine makes it: drawn, and not judged."""


def at(name: str, share: float) -> Callable[[Result], float]:
    """The microseconds that this share of some seconds does not exceed; nan where there are none."""
    return lambda result: 1e6 * percentile(result[name] or [math.nan], share)


def bytes_of_block(result: Result) -> float:
    """Bytes of a block in a pool that was filled twice; the keys without blocks are not counted."""
    return float(result["churned" if "churned" in result else "filled"]["without_ghosts"])


FIGURES = (
    Figure("memory of a block", "bytes", bytes_of_block),
    Figure("lookup of 1,000 keys until the answer", "µs", at("answer_seconds", 0.5)),
    Figure("the same, p99", "µs", at("answer_seconds", 0.99), rare=True),
    Figure("the same with all that follows the answer", "µs", at("lookup_seconds", 0.5)),
    Figure("the same, p99", "µs", at("lookup_seconds", 0.99), rare=True),
    Figure("store of 64 blocks into a full pool", "µs", at("store_seconds", 0.5)),
    Figure("the same, p99", "µs", at("store_seconds", 0.99), rare=True),
    Figure("first hit after a restart", "s", lambda result: float(result["first_hit_seconds"]), "restart"),
)


class Growth(NamedTuple):
    """How a figure grew from the least number of blocks to the most."""

    figure: str
    shards: int
    least: float
    most: float
    factor: float
    logarithm: float

    @property
    def holds(self) -> bool:
        """Whether the figure grew no faster than the logarithm of the number of blocks."""
        return self.factor <= self.logarithm


def growth(results: dict[str, list[Result]]) -> list[Growth]:
    """Compare each figure at the least and the most blocks, for each number of shards."""
    found = []
    for figure in FIGURES:
        if figure.rare:
            continue
        for shards in sorted({one["shards"] for one in results[figure.part]}):
            points = curve(results, figure, shards)
            if len(points) > 1:
                (few, least), (many, most) = points[0], points[-1]
                found.append(Growth(figure.name, shards, least, most, most / least, math.log(many) / math.log(few)))
    return found


def curve(results: dict[str, list[Result]], figure: Figure, shards: int) -> list[tuple[int, float]]:
    """Number of blocks and value, ascending."""
    points = [(one["blocks"], figure.of(one)) for one in results[figure.part] if one["shards"] == shards]
    return sorted(point for point in points if not math.isnan(point[1]))


def bound_of(shards: int) -> int:
    """Bytes that a block may take."""
    return SLOT_BYTES + SHARD_BYTES * (shards - 1)


def page(results: dict[str, Any]) -> str:
    """All tables, with what they mean."""
    parts = [
        "## What a block costs in memory\n",
        "Private memory of a process with the daemon's cache, over what it had before the first block, in bytes of a "
        "block. The slot table's 128 bytes a shard are not in it. Keys without blocks are counted apart: of the "
        "policy's memory the part that they are of all keys it knows. *Again* is after as many blocks more, for which "
        "others were evicted.\n",
        markdown_table([_MEMORY_HEAD, *map(_memory_row, results["fill"])]),
        "\n## Lookups and stores\n",
        "In µs, in the same process, without sockets and copies: a lookup of 1,000 keys that are all ready, anywhere "
        "among all, until its answer and with all that follows it (pins, the policy, the lease's end); one rank's "
        "store of 64 new blocks into a full pool, from keys to blocks that are ready, with the evictions for them.\n",
        markdown_table([_TIME_HEAD, *map(_time_row, results["fill"])]),
        "\n## The first hit after a restart\n",
        "A daemon process that gets a full pool from its service manager, from its start on: until a lookup finds the "
        "1,000 blocks that were stored last, with which all others are there; lookups afterwards, by an engine over "
        "the socket, and the process's private memory. The pool has no pages: touching it and reading it for its "
        "checksums is left out.\n",
        markdown_table([_RESTART_HEAD, *map(_restart_row, results["restart"])]),
        "\n## Growth\n",
        "Medians, from the fewest blocks to the most; the logarithm of their number grows by the last factor.\n",
        markdown_table([_GROWTH_HEAD, *map(_growth_row, growth(results))]),
    ]
    return "\n".join(parts)


_MEMORY_HEAD = [
    "blocks", "shards", "filled", "again", "of it the policy", "allowed", "evicted", "declined", "ghosts",
    "bytes of a ghost",
]  # fmt: skip
_TIME_HEAD = ["blocks", "shards", "answer p50", "p99", "lookup p50", "p99", "store p50", "p99", "stores"]
_RESTART_HEAD = ["blocks", "shards", "serves, s", "first hit, s", "lookup p50, µs", "p99", "memory"]
_GROWTH_HEAD = ["figure", "shards", "fewest blocks", "most blocks", "factor", "logarithm", "slower than it"]


def _memory_row(one: Result) -> list[str]:
    again = one.get("churned")
    last = again or one["filled"]
    return [
        f"{one['blocks']:,}",
        str(one["shards"]),
        number(one["filled"]["without_ghosts"]),
        number(again["without_ghosts"]) if again else "",
        number(last["policy"]),
        str(bound_of(one["shards"])),
        f"{one.get('evicted', 0):,}",
        f"{one.get('declined', 0):,}",
        f"{last['ghosts']:,}",
        number(last["ghost_bytes"] / max(1, last["ghosts"])),
    ]


def _time_row(one: Result) -> list[str]:
    times = [one[name] for name in ("answer_seconds", "lookup_seconds", "store_seconds")]
    cells = [number(1e6 * percentile(each, share)) if each else "" for each in times for share in (0.5, 0.99)]
    return [f"{one['blocks']:,}", str(one["shards"]), *cells, str(len(one["store_seconds"]))]


def _restart_row(one: Result) -> list[str]:
    return [
        f"{one['blocks']:,}",
        str(one["shards"]),
        *(number(one[name]) for name in ("open_seconds", "first_hit_seconds")),
        *(number(1e6 * percentile(one["answer_seconds"], share)) for share in (0.5, 0.99)),
        f"{one['private_bytes'] / 2**20:,.0f} MiB",
    ]


def _growth_row(one: Growth) -> list[str]:
    values = [number(value) for value in (one.least, one.most, one.factor, one.logarithm)]
    return [one.figure, str(one.shards), *values, "yes" if one.holds else "NO"]
