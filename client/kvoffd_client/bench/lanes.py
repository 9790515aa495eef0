"""``kvoffd-cli bench copy --lanes``: what the daemon's own work allows, whatever driver and memory do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median

from kvoffd_client.bench import LANE_PIECES
from kvoffd_client.bench.echo import ChildProcess
from kvoffd_client.bench.results import GPU_GB_PER_SECOND, Cost, Progress, Report, Result
from kvoffd_proto.units import format_size, plural

ROUNDS = 5
TRANSFERS = 1000
"""Of 64 MiB, on each lane."""
_PROGRAM = "kvoffd.transfer.cuda.lane_ceiling"


def bench_lanes(progress: Progress, lanes: int, piece_sizes: Sequence[int] = LANE_PIECES) -> Report:
    """Measure ``lanes`` copy threads of the daemon's code, in a process of their own, over a driver that only counts.

    The floor is what as many GPUs copy at best. Raises BenchFailed where the daemon is not installed beside the client.
    """
    found: dict[int, list[dict[str, float]]] = {size: [] for size in piece_sizes}
    for _ in range(ROUNDS):
        for size, measured in found.items():
            progress(f"{lanes} lane{plural(lanes)}, pieces of {format_size(size)}")
            options = {"--lanes": lanes, "--transfers": TRANSFERS, "--piece-bytes": size}
            with ChildProcess(_PROGRAM, *(str(word) for option in options.items() for word in option)) as process:
                failure = "The daemon's copy lanes did not run; the error is above. Install kvoffd in this Python."
                measured.append(json.loads(process.read_line(failure)))
    results = [
        Result(
            f"{lanes} lane{plural(lanes)}, pieces of {format_size(size)}",
            median(one["bytes_per_second"] for one in measured) / 1e12,
            "TB/s",
            lanes * GPU_GB_PER_SECOND / 1e3,
            Cost(median(one["cpu_seconds_per_piece"] for one in measured), "piece"),
        )
        for size, measured in found.items()
    ]
    floor = f"{GPU_GB_PER_SECOND:.0f} GB/s for each GPU, one way; no byte is moved and no checksum taken here"
    return Report("copy lanes", floor, results)
