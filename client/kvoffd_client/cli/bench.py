"""``kvoffd-cli bench``: runs a bench and prints what it found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.table import Table
from rich.text import Text

from kvoffd_client.admin_client import AdminClient
from kvoffd_client.bench.plot import check_plot, draw
from kvoffd_client.bench.report import GpuFacts, Progress, Report, Result
from kvoffd_client.cli.failure import CliError
from kvoffd_client.cli.screen import PIPE_LIST_CELLS, emit, make_console, show
from kvoffd_client.cli.text import GAP
from kvoffd_proto.units import UnitError, exact_size, format_duration, format_size, parse_size

Bench = Callable[[Path, Progress], Report]
PIECE_STEP_BYTES = 4096


def choose_copy(memory: str, piece_sizes: Sequence[str], threads: int, gpu: int, *, compute: bool) -> Bench:
    """The bench that the options of ``bench copy`` ask for. Raises CliError."""
    if memory == "host":
        from kvoffd_client.bench.copy import HOST_BYTES, HOST_PIECES, bench_copy

        if gpu or compute:
            raise CliError("--gpu and --compute are about a GPU; add --memory cuda.")
        return partial(bench_copy, piece_sizes=_pieces(piece_sizes, HOST_BYTES) or HOST_PIECES, threads=threads)
    if memory != "cuda":
        raise CliError(f"--memory {memory!r} is neither host nor cuda.")
    from kvoffd_client.bench.copy_gpu import GPU_BYTES, GPU_PIECES, bench_copy_gpu

    if threads > 1:
        raise CliError("--threads is about host memory; for a GPU the daemon has one copy thread in each direction.")
    pieces = _pieces(piece_sizes, GPU_BYTES) or GPU_PIECES
    return partial(bench_copy_gpu, piece_sizes=pieces, ordinal=gpu, compute=compute)


def _pieces(texts: Sequence[str], most: int) -> list[int]:
    """Sizes in bytes, ascending, each once."""
    try:
        sizes = sorted({parse_size(text) for text in texts})
    except UnitError as error:
        raise CliError(f"--piece-size: {error}.") from error
    for size in sizes:
        if not 0 < size <= most or size % PIECE_STEP_BYTES:
            raise CliError(
                f"--piece-size {exact_size(size)} is not a multiple of {exact_size(PIECE_STEP_BYTES)} of at most "
                f"{exact_size(most)}."
            )
    return sizes


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
        if report.gpu is not None:
            for line in gpu_lines(report.gpu):
                emit(line)
    return 0


def _tell(what: str) -> None:
    print(f"measuring: {what}", file=sys.stderr, flush=True)


def _keep_quiet(what: str) -> None:
    """Into a pipe nobody waits and watches."""


def gpu_lines(gpu: GpuFacts) -> Iterator[str]:
    """The GPU, and what the daemon takes of it."""
    yield f"GPU: {gpu.name}, {gpu.uuid}, driver {gpu.driver}"
    if gpu.daemon_bytes is None:
        yield "daemon's memory on the GPU: not measured, since the daemon had a GPU in use already"
    else:
        yield f"daemon's memory on the GPU: {format_size(gpu.daemon_bytes)}"
    if gpu.unlockable_bytes:
        yield f"not page-locked, so slow: {format_size(gpu.unlockable_bytes)} of the pool; see `kvoffd-cli health`"


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
