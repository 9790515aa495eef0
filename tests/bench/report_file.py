"""The report of a program of this folder: facts about the run, and Markdown tables."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_facts(command: str) -> dict[str, object]:
    """When, from which commit, with which command, on which machine and under which load it is measured."""
    try:
        git = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:
        commit = "unknown, as there is no git"
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit,
        "command": command,
        "machine": machine() | {"load_before": os.getloadavg()[0]},
    }


def machine() -> dict[str, object]:
    """Facts about this machine that make results comparable."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(names, platform.machine()),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "pyzmq": version("pyzmq"),
        "kvoffd": version("kvoffd"),
    }


def in_child(program: str, *arguments: str) -> dict[str, Any]:
    """What a program of this folder, run with these arguments in a process of its own, prints as JSON."""
    command = [sys.executable, "-m", f"tests.bench.{program}", *arguments]
    found: dict[str, Any] = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    return found


def print_report(title: str, facts: dict[str, object], tables: str) -> None:
    print(f"# {title}", "", *(f"* {name}: {fact_text(fact)}" for name, fact in facts.items()), "", tables, sep="\n")


def fact_text(fact: object) -> str:
    """Return a fact as a report shows it; of a dict the names and values."""
    if isinstance(fact, dict):
        return ", ".join(f"{name} {fact_text(value)}" for name, value in fact.items())
    return str(fact)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose first row is the header, aligned to be read as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in rows]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def number(value: float) -> str:
    """Return three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    digits = 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"
