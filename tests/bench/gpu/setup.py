"""Where the parts measure, and how large."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.kit.daemon import DaemonProcess
from tests.kit.exporter import Exporter

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MEMORY_SHARE = 0.3
"""Of what is available, the largest pool that is pinned."""

Found = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """Where and how large to measure.

    Attributes:
        library: path of the driver; "" for the system's.
        double: whether it is the tests' double, on which nothing takes as long as on a GPU, and sizes are small. Parts
            of vLLM then run its build for CPU.
        model: the Llama of these parts.
        directory: of this run, in memory where there is space: models, which each engine reads, and logs.
        keep: keeps on disk what a part has found so far.
    """

    library: str
    double: bool
    model: str = "3b"
    directory: Path = Path("/nowhere")
    keep: Callable[[Mapping[str, Any]], None] = lambda found: None

    def daemon(self, pool_bytes: int, **flags: str) -> DaemonProcess:
        """A daemon that uses CUDA while engines are there and no longer; to be started."""
        used = {"cuda_library": self.library, "pin_pool": "use", **flags}
        return DaemonProcess(str(pool_bytes), limits={"pin_linger_s": 0}, **used)

    def exporter(self, daemon: DaemonProcess, kind: str = "ordinary", **shape: int) -> Exporter:
        return Exporter(daemon.directory, self.library, kind, **shape)

    @cached_property
    def pools(self) -> list[int]:
        """Sizes of pools that are pinned."""
        if self.double:
            return [64 * MIB, 128 * MIB]
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * KIB
        return [size for size in (GIB, 4 * GIB, 16 * GIB, 32 * GIB) if size <= MEMORY_SHARE * available]
