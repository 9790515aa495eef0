"""Draws a report's curves into a PNG file. Needs matplotlib, which nothing else here does."""

from __future__ import annotations

from pathlib import Path

from kvoffd_client.bench.report import BenchFailed, Report, machine
from kvoffd_proto.units import format_size

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Told apart by the colour-blind too."""


def check_plot(path: Path) -> None:
    """Raise BenchFailed, before anything is measured, where the plot cannot be drawn or written."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BenchFailed(
            "A plot needs matplotlib, which is not installed; install it with: pip install 'kvoffd[plot]'."
        ) from error
    if path.suffix.lower() != ".png":
        raise BenchFailed(f"The plot is a PNG file; give it a name that ends in .png instead of {path.name}.")
    if not path.absolute().parent.is_dir():
        raise BenchFailed(f"The plot cannot be written: there is no directory {path.absolute().parent}.")


def draw(report: Report, path: Path) -> None:
    """Write throughput against piece size, floors dashed, to ``path``. Raises BenchFailed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    sizes = sorted({size for curve in report.curves for size, _ in curve.points})
    measured = [curve for curve in report.curves if not curve.is_floor]
    floors = [curve for curve in report.curves if curve.is_floor]
    for curve, colour in zip(measured, COLOURS, strict=False):
        axes.plot(*zip(*curve.points, strict=True), marker="o", color=colour, label=curve.name)
    for curve, dashes in zip(floors, ("--", ":", "-."), strict=False):
        axes.plot(*zip(*curve.points, strict=True), linestyle=dashes, color="0.35", label=f"floor: {curve.name}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [_whole(size) for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bytes of a piece (one layer's page of one block)")
    axes.set_ylabel("GB/s")
    facts = machine()
    gpu = "" if report.gpu is None else f"{report.gpu.name}, "
    axes.set_title(f"kvoffd {facts['kvoffd']}: {report.bench}\n{gpu}{facts['cpu']}, {facts['cpus']} CPUs", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise BenchFailed(f"The plot cannot be written to {path}: {error.strerror}.") from error


def _whole(size: int) -> str:
    """``64 KiB`` instead of ``64.0 KiB``."""
    return format_size(size).replace(".00 ", " ").replace(".0 ", " ")
