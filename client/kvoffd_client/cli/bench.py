"""``kvoffd-cli bench``: runs a bench and prints what it found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from rich.table import Table
from rich.text import Text

from kvoffd_client.admin import AdminClient
from kvoffd_client.bench.plot import check_plot, draw
from kvoffd_client.bench.report import Progress, Report, Result
from kvoffd_client.cli.screen import PIPE_LIST_CELLS, emit, make_console, show
from kvoffd_client.cli.text import GAP
from kvoffd_proto.units import format_duration

Bench = Callable[[Path, Progress], Report]


def run_bench(bench: Bench, directory: Path, *, as_json: bool, plot: Path | None = None) -> int:
    """Run ``bench`` against the daemon in ``directory`` and print its report; draw it into ``plot``."""
    if plot is not None:
        check_plot(plot)
    with AdminClient(directory) as admin:
        admin.health()  # says at once, and in a sentence, that there is no daemon
    report = bench(directory, _tell if sys.stderr.isatty() else _keep_quiet)
    if plot is not None:
        draw(report, plot)
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
    of_checksums = any(result.cpu is not None and result.cpu.checksums is not None for result in report.results)
    for title in ("value", "floor", "value/floor", "daemon CPU", *["of it checksums"] * of_checksums):
        table.add_column(title, justify="right", no_wrap=True)
    for result in report.results:
        checksums = None if result.cpu is None else result.cpu.checksums
        table.add_row(
            Text(result.case),
            _amount(result, result.value),
            _amount(result, result.floor),
            f"{result.ratio:.2f}",
            "" if result.cpu is None else f"{format_duration(result.cpu.seconds)}/{result.cpu.per}",
            *["" if checksums is None else format_duration(checksums)] * of_checksums,
        )
    return table


def _amount(result: Result, value: float) -> str:
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f} {result.unit}"
