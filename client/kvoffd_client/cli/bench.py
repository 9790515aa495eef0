"""``kvoffd-cli bench``: runs a bench and prints what it found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from rich.table import Table
from rich.text import Text

from kvoffd_client.admin import AdminClient
from kvoffd_client.bench.copy import bench_copy
from kvoffd_client.bench.jobs import bench_jobs
from kvoffd_client.bench.lookup import bench_lookup
from kvoffd_client.bench.report import Progress, Report, Result
from kvoffd_client.cli.screen import PIPE_LIST_CELLS, emit, make_console, show
from kvoffd_client.cli.text import GAP

BENCHES: dict[str, Callable[[Path, Progress], Report]] = {
    "lookup": bench_lookup,
    "copy": bench_copy,
    "jobs": bench_jobs,
}


def run_bench(name: str, directory: Path, *, as_json: bool) -> int:
    """Run the bench ``name`` against the daemon in ``directory`` and print its report."""
    with AdminClient(directory) as admin:
        admin.health()  # says at once, and in a sentence, that there is no daemon
    report = BENCHES[name](directory, _tell if sys.stderr.isatty() else _keep_quiet)
    if as_json:
        emit(json.dumps(report.to_object(), ensure_ascii=False))
    else:
        show(make_console(pipe_cells=PIPE_LIST_CELLS), report_table(report))
        emit(f"\nfloor: {report.floor}")
    return 0


def _tell(what: str) -> None:
    print(f"measuring: {what}", file=sys.stderr, flush=True)


def _keep_quiet(what: str) -> None:
    """Into a pipe nobody waits and watches."""


def report_table(report: Report) -> Table:
    """One line per case."""
    table = Table(box=None, padding=GAP, pad_edge=False, header_style="bold")
    table.add_column(report.bench, no_wrap=True)
    for title in ("value", "floor", "value/floor"):
        table.add_column(title, justify="right", no_wrap=True)
    for result in report.results:
        table.add_row(
            Text(result.case), _amount(result, result.value), _amount(result, result.floor), f"{result.ratio:.2f}"
        )
    return table


def _amount(result: Result, value: float) -> str:
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f} {result.unit}"
