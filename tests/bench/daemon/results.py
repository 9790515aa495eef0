"""What a bench found and on which machine: results beside their floors, CPU time of the daemon, plots."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import zmq
from msgspec import Struct

from kvoffd_client.admin_client import AdminClient
from kvoffd_client.errors import KvoffdClientError
from kvoffd_client.session import Closing
from kvoffd_proto.units import format_size

Progress = Callable[[str], None]
"""Called with what is measured next, in a few words."""
GPU_GB_PER_SECOND = 55.0
"""What a GPU copies in one direction over PCIe 5."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""People who cannot see all colours tell these apart too."""


class Machine(Struct, frozen=True):
    """What a bench ran on."""

    cpu: str
    cpus: int
    memory_bytes: int
    kernel: str
    python: str
    libzmq: str
    pyzmq: str
    kvoffd: str


class BenchResult(Struct, frozen=True):
    case: str
    value: float
    unit: str
    floor: float
    ratio: float
    cpu_seconds: float | None = None
    cpu_per: str | None = None
    checksum_cpu_seconds: float | None = None


class BenchGpu(Struct, frozen=True):
    name: str
    uuid: str
    driver: str
    unlockable_bytes: int
    daemon_bytes: int | None


class BenchReport(Struct, frozen=True):
    bench: str
    machine: Machine
    results: list[BenchResult]
    gpu: BenchGpu | None = None


@dataclass(frozen=True)
class Cost:
    """CPU time of the daemon, all its threads, in seconds per ``per``: a lookup, a job, a GB.

    ``checksums`` is the part of it that went into checksums; None where that was not measured.
    """

    seconds: float
    per: str
    checksums: float | None = None

    def cores_per_gpu(self) -> tuple[float, float]:
        """Return how many cores the daemon takes for a GPU at GPU_GB_PER_SECOND, and its checksums of that."""
        assert self.per == "GB"
        return self.seconds * GPU_GB_PER_SECOND, (self.checksums or 0.0) * GPU_GB_PER_SECOND


class BenchFailed(KvoffdClientError):
    """The bench could not measure. The message says what to do."""


@dataclass(frozen=True)
class Result:
    """One measured case: see ``BenchResult``. ``cpu`` is None where the daemon's CPU time was not measured."""

    case: str
    value: float
    unit: str
    floor: float
    cpu: Cost | None = None

    @property
    def ratio(self) -> float:
        """``value / floor``: for times 1 is the best possible and more is worse, for speeds less is worse."""
        return self.value / self.floor

    def to_object(self) -> BenchResult:
        cost = () if self.cpu is None else (self.cpu.seconds, self.cpu.per, self.cpu.checksums)
        return BenchResult(self.case, self.value, self.unit, self.floor, self.ratio, *cost)


@dataclass(frozen=True)
class Curve:
    """A line of the plot: (bytes of a piece, GB/s), ascending. A floor is what the machine can do at best."""

    name: str
    points: Sequence[tuple[int, float]]
    is_floor: bool = False


@dataclass(frozen=True)
class Report:
    """All results of one bench: see ``BenchReport``. ``floor`` is a sentence, ``curves`` the lines of a plot."""

    bench: str
    floor: str
    results: Sequence[Result]
    curves: Sequence[Curve] = ()
    gpu: BenchGpu | None = None

    def to_object(self) -> BenchReport:
        return BenchReport(self.bench, machine(), [item.to_object() for item in self.results], self.gpu)


def machine() -> Machine:
    """Return facts about this machine that make results comparable."""
    return Machine(
        cpu=_cpu_model(),
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        python=platform.python_version(),
        libzmq=zmq.zmq_version(),
        pyzmq=zmq.pyzmq_version(),
        kvoffd=version("kvoffd"),
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of ``values`` (at least one) that the share ``share`` (0 to 1) of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def median_percentile(rounds: Sequence[Sequence[float]], share: float) -> float:
    """Return the median of the rounds' percentiles: one disturbed round does not count."""
    return median(percentile(values, share) for values in rounds)


def measure_latency(
    case: str, rounds: int, samples: int, operation: Callable[[], float], floor: Callable[[], float]
) -> list[Result]:
    """Run ``operation`` and ``floor`` in turn, ``samples`` times in each of ``rounds``; return the p50 and the p99.

    Both return the seconds they took.
    """
    pairs_by_round = [[(operation() * 1e6, floor() * 1e6) for _ in range(samples)] for _ in range(rounds)]
    measured, floors = zip(*(zip(*pairs, strict=True) for pairs in pairs_by_round), strict=True)
    return [
        Result(f"{case}, {name}", median_percentile(measured, share), "µs", median_percentile(floors, share))
        for name, share in (("p50", 0.5), ("p99", 0.99))
    ]


class CpuMeter(Closing):
    """Measures the CPU time of the daemon in ``directory``, by its own counters. Raises DaemonUnavailable."""

    def __init__(self, directory: Path) -> None:
        self._admin = AdminClient(directory)
        self._used = self._checksums = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Add what the daemon uses during the ``with`` block to what was measured before."""
        used, checksums = self._read()
        yield
        used_then, checksums_then = self._read()
        self._used += used_then - used
        self._checksums += checksums_then - checksums

    def cost(self, count: float, per: str, *, checksums: bool = False) -> Cost:
        """Return what was measured since the last call, divided by ``count``; ``checksums`` adds their part of it."""
        cost = Cost(self._used / count, per, self._checksums / count if checksums else None)
        self._used = self._checksums = 0.0
        return cost

    def _read(self) -> tuple[float, float]:
        """Return the CPU seconds of all that the daemon did, and those of its checksums."""
        stats = self._admin.stats()
        return stats.cpu_seconds, stats.store.checksum_seconds + stats.load.checksum_seconds

    def close(self) -> None:
        self._admin.close()


def check_plot(path: Path) -> None:
    """Raise BenchFailed, before anything is measured, where the plot cannot be drawn or written."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        # Only plots need matplotlib.
        raise BenchFailed(
            "A plot needs matplotlib, which is not installed; install it with: pip install matplotlib."
        ) from error
    if path.suffix.lower() != ".png":
        raise BenchFailed(f"The plot is a PNG file; give it a name that ends in .png instead of {path.name}.")
    if not path.absolute().parent.is_dir():
        raise BenchFailed(f"The plot cannot be written: there is no directory {path.absolute().parent}.")


@contextmanager
def plot_into(path: Path) -> Iterator[Any]:
    """Yield matplotlib's axes, and write what is drawn on them. Raises BenchFailed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    yield figure.add_subplot()
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise BenchFailed(f"The plot cannot be written to {path}: {error.strerror}.") from error


def draw_plot(report: Report, path: Path) -> None:
    """Write throughput against piece size, floors dashed, to ``path``. Raises BenchFailed."""
    sizes = sorted({size for curve in report.curves for size, _ in curve.points})
    measured = [curve for curve in report.curves if not curve.is_floor]
    floors = [curve for curve in report.curves if curve.is_floor]
    here = machine()
    gpu = "" if report.gpu is None else f"{report.gpu.name}, "
    with plot_into(path) as axes:
        for curve, colour in zip(measured, COLOURS, strict=False):
            axes.plot(*zip(*curve.points, strict=True), marker="o", color=colour, label=curve.name)
        for curve, dashes in zip(floors, ("--", ":", "-."), strict=False):
            axes.plot(*zip(*curve.points, strict=True), linestyle=dashes, color="0.35", label=f"floor: {curve.name}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [format_size(size).replace(".00 ", " ").replace(".0 ", " ") for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("bytes of a piece (one layer's page of one block)")
        axes.set_ylabel("GB/s")
        axes.set_title(f"kvoffd {here.kvoffd}: {report.bench}\n{gpu}{here.cpu}, {here.cpus} CPUs", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
