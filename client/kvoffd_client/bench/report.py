"""What a bench found, and on which machine."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

import zmq

from kvoffd_client.errors import KvoffdClientError

Progress = Callable[[str], None]
"""Told what is measured now, in a few words."""


@dataclass(frozen=True)
class Cost:
    """CPU time of the daemon, all its threads, in seconds per ``per``: a lookup, a job, a GB.

    ``checksums`` is the part of it that went into checksums, where that is told.
    """

    seconds: float
    per: str
    checksums: float | None = None


class BenchFailed(KvoffdClientError):
    """The bench could not measure. The message says what to do."""


@dataclass(frozen=True)
class Result:
    """One measured case.

    Attributes:
        case: what was measured.
        value: how it came out.
        unit: unit of value and floor.
        floor: what the machine can do at best in the same unit, measured in the same run.
        cpu: what it cost the daemon, where that was measured.
    """

    case: str
    value: float
    unit: str
    floor: float
    cpu: Cost | None = None

    @property
    def ratio(self) -> float:
        """``value / floor``: for times 1 is the best possible and more is worse, for speeds less is worse."""
        return self.value / self.floor

    def to_object(self) -> dict[str, object]:
        """One object of ``results``."""
        found: dict[str, object] = {
            "case": self.case,
            "value": self.value,
            "unit": self.unit,
            "floor": self.floor,
            "ratio": self.ratio,
        }
        if self.cpu is not None:
            found |= {"cpu_seconds": self.cpu.seconds, "cpu_per": self.cpu.per}
            if self.cpu.checksums is not None:
                found["checksum_cpu_seconds"] = self.cpu.checksums
        return found


@dataclass(frozen=True)
class Curve:
    """Speeds by piece size, for the plot.

    Attributes:
        name: of the line.
        points: (bytes of a piece, GB/s), ascending.
        is_floor: what the machine can do, not what the daemon does.
    """

    name: str
    points: Sequence[tuple[int, float]]
    is_floor: bool = False


@dataclass(frozen=True)
class GpuFacts:
    """What makes results on a GPU comparable, and what the daemon takes of its memory.

    Attributes:
        name: as NVIDIA sells it.
        uuid: of the GPU, or of the MIG instance.
        driver: its release and the CUDA version it knows.
        unlockable_bytes: of the pool; the driver would not pin them, so that their copies are slow.
        daemon_bytes: by how much the GPU's free memory shrank while the daemon took it into use; None where the daemon
            had a GPU in use already.
    """

    name: str
    uuid: str
    driver: str
    unlockable_bytes: int
    daemon_bytes: int | None


@dataclass(frozen=True)
class Report:
    """All results of one bench.

    Attributes:
        bench: its name.
        floor: what the floor is, in a sentence.
        results: in the order in which they were measured.
        curves: what a plot of them shows; empty where there is nothing to draw.
        gpu: the GPU that it was measured on; None for host memory.
    """

    bench: str
    floor: str
    results: Sequence[Result]
    curves: Sequence[Curve] = ()
    gpu: GpuFacts | None = None

    def to_object(self) -> dict[str, object]:
        """The one object that ``--json`` prints."""
        gpu = {} if self.gpu is None else {"gpu": asdict(self.gpu)}
        return {
            "bench": self.bench,
            "machine": machine(),
            **gpu,
            "results": [item.to_object() for item in self.results],
        }


def machine() -> dict[str, object]:
    """Facts that make results comparable."""
    return {
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "libzmq": zmq.zmq_version(),
        "pyzmq": zmq.pyzmq_version(),
        "kvoffd": version("kvoffd"),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` (0 to 1) of ``values`` do not exceed. ``values`` must not be empty."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def median_percentile(rounds: Sequence[Sequence[float]], share: float) -> float:
    """The percentile of each round, and of these the median: one disturbed round does not count."""
    return median(percentile(values, share) for values in rounds)
