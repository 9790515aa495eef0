"""How fast blocks go from a GPU to the pool and come back, and what a GPU that computes feels of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from kvoffd_client.admin_client import AdminClient
from kvoffd_client.bench.copy import KIB, MIB, Copies, curves_of, measure_copies
from kvoffd_client.bench.engine import BenchEngine
from kvoffd_client.bench.gpu import Gpu
from kvoffd_client.bench.load_generators import Crowd
from kvoffd_client.bench.place import BOTH
from kvoffd_client.bench.report import BenchFailed, GpuFacts, Progress, Report, Result

GPU_PIECES = (16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, MIB)
GPU_BYTES = 128 * MIB
PAGE_BYTES = 4096
PINNING_WAIT_S = 60.0
"""For each part of the pool: locking 256 MiB takes some milliseconds."""
LETTING_GO_S = 5.0
"""A GPU that is in use for longer is an engine's."""
POLL_S = 0.05


def bench_copy_gpu(
    directory: Path,
    progress: Progress,
    piece_sizes: Sequence[int] = GPU_PIECES,
    total_bytes: int = GPU_BYTES,
    rounds: int = 7,
    ordinal: int = 0,
    compute: bool = False,
    slice_s: float = 1.0,
) -> Report:
    """Measure copies of GPU number ``ordinal``; see ``measure_copies``. Nothing is measured before the pool is pinned.

    The floor is one copy of ``total_bytes`` from or to pinned memory, or one each way at once. With ``compute`` a
    process has the GPU compute, for each size of pieces ``rounds`` times ``slice_s`` seconds while the daemon is idle
    and while it copies. Raises BenchFailed, DaemonUnavailable, KvoffdClientError.
    """
    felt: list[Result] = []
    with ExitStack() as stack:
        gpu = stack.enter_context(Gpu(ordinal, total_bytes))
        facts = _take_into_use(stack, directory, progress, gpu)
        then: Callable[[Copies, str], None] | None = None
        if compute:
            crowd = stack.enter_context(Crowd("computes", directory, ordinal, 1))

            def then(copies: Copies, piece: str) -> None:
                progress(f"a GPU that computes, pieces of {piece}")
                felt.extend(_measure_beside(copies, crowd, gpu, piece, rounds, slice_s))

        results = measure_copies(directory, progress, gpu, piece_sizes, total_bytes, rounds, then=then)
        floor = f"{gpu.floor}; of the computing: the same while the daemon is idle" if compute else gpu.floor
        return Report("copy", floor, [*results, *felt], curves_of(gpu, piece_sizes, results), facts)


def _take_into_use(stack: ExitStack, directory: Path, progress: Progress, gpu: Gpu) -> GpuFacts:
    """Have the daemon take the GPU into use, by an engine that stays, and wait until the pool is pinned."""
    progress("what the daemon takes of the GPU")
    with AdminClient(directory) as admin:
        in_use = not _is_let_go(admin)
        memory = gpu.allocate(PAGE_BYTES)
        before = gpu.free_bytes
        stack.enter_context(BenchEngine(directory, "copy", 1, 1, PAGE_BYTES, memory))
        unlockable = _wait_pinned(admin)
        taken = None if in_use else before - gpu.free_bytes
    return GpuFacts(gpu.name, gpu.uuid, gpu.driver_version, unlockable, taken)


def _is_let_go(admin: AdminClient) -> bool:
    """The daemon has no GPU in use, or not any more after a while: as when a bench has just ended."""
    until = time.monotonic() + LETTING_GO_S
    while True:
        pool = admin.stats().pool
        if not pool.page_locked_bytes and not pool.unlockable_bytes:
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(POLL_S)


def _wait_pinned(admin: AdminClient) -> int:
    """Until the daemon has tried to pin all of its pool; return the bytes that the driver refused."""
    last, since = -1, time.monotonic()
    while True:
        pool = admin.stats().pool
        seen = pool.page_locked_bytes + pool.unlockable_bytes
        if seen >= pool.pool_bytes:
            return pool.unlockable_bytes
        if seen != last:
            last, since = seen, time.monotonic()
        if time.monotonic() - since > PINNING_WAIT_S:
            raise BenchFailed(
                f"The daemon pinned nothing more of its pool for {PINNING_WAIT_S:.0f} s; see its log and the driver's."
            )
        time.sleep(POLL_S)


def _measure_beside(copies: Copies, crowd: Crowd, gpu: Gpu, piece: str, rounds: int, slice_s: float) -> list[Result]:
    """Steps per second of the process that computes, and what the daemon copies meanwhile; alternating."""
    alone: list[float] = []
    beside: list[float] = []
    speeds: list[float] = []
    floors: list[float] = []
    for _ in range(rounds):
        crowd.start()
        time.sleep(slice_s)
        alone.append(_rate(crowd))
        floors.append(gpu.speed(BOTH) / 1e9)
        crowd.start()
        until = time.monotonic() + slice_s
        while time.monotonic() < until:
            copies.store()
            speeds.append(copies.both_bytes / copies.both() / 1e9)
        beside.append(_rate(crowd))
    return [
        Result(f"computing while it copies, pieces of {piece}", median(beside), "steps/s", median(alone)),
        Result(f"{BOTH}, beside computing, pieces of {piece}", median(speeds), "GB/s", median(floors)),
    ]


def _rate(crowd: Crowd) -> float:
    (done,) = crowd.stop()
    return done.count / done.seconds
