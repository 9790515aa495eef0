"""The bench copy: how fast blocks go to the pool and come back, from host memory or a GPU's."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

import numpy as np

from kvoffd_client.admin_client import AdminClient
from kvoffd_proto.units import format_size
from tests.bench.daemon import (
    GPU_JOB_BYTES,
    GPU_PIECES,
    HOST_JOB_BYTES,
    HOST_PIECES,
    MIB,
    PAGE_BYTES,
    POOL_JOBS,
    STREAM_JOBS,
)
from tests.bench.daemon.gpu_device import GpuDevice
from tests.bench.daemon.host_device import BOTH, DIRECTIONS, LOAD, STORE, Device, HostDevice, Memcpy
from tests.bench.daemon.load_generators import LoadGenerators
from tests.bench.daemon.results import BenchFailed, BenchGpu, Cost, CpuMeter, Curve, Progress, Report, Result
from tests.bench.daemon.synthetic_engine import BlockIds, SyntheticEngine, random_keys

ROUNDS = 7
LAYERS = 16
"""As many as a model of 1 B parameters has: the daemon's work for one key is spread over so many pieces."""
MAX_BLOCK_BYTES = 4 * MIB
"""With large pieces fewer layers make a block, so that every pool has room for it."""
POOL_SHARE = 0.75
"""Of the pool, what the blocks may take: slots of other sizes have parts of it."""
IN_FLIGHT = 2
"""Jobs for each copy thread: one is copied while the daemon takes in the next, as under an engine with much to do."""
PINNING_WAIT_S = 60.0
"""For each part of the pool: locking 256 MiB takes some milliseconds."""
RELEASE_WAIT_S = 5.0
"""If the daemon has a GPU in use for longer than this, then for an engine and not for a bench that has just ended."""
POLL_S = 0.05


def bench_copy(
    directory: Path,
    progress: Progress,
    piece_sizes: Sequence[int] = HOST_PIECES,
    job_bytes: int = HOST_JOB_BYTES,
    rounds: int = ROUNDS,
    threads: int = 1,
) -> Report:
    """Measure copies of host memory; see ``_measure_copies``. The floor is memcpy by as many threads.

    Raises BenchFailed, DaemonUnavailable.
    """
    job_bytes = _fitting_job_bytes(directory, job_bytes, piece_sizes, threads)
    with Memcpy(job_bytes, 2 * threads) as memcpy:
        device = HostDevice(memcpy, job_bytes, threads)
        pieces = _measure_copies(directory, progress, device, piece_sizes, job_bytes, rounds, threads)
        results = [result for _, _, measured in pieces for result in measured]
        return Report("copy", device.floor, results, _curves(device, piece_sizes, results))


def bench_copy_gpu(
    directory: Path,
    progress: Progress,
    piece_sizes: Sequence[int] = GPU_PIECES,
    job_bytes: int = GPU_JOB_BYTES,
    rounds: int = ROUNDS,
    ordinal: int = 0,
    compute: bool = False,
    slice_s: float = 1.0,
) -> Report:
    """Measure copies of GPU number ``ordinal``; see ``_measure_copies``. Nothing is measured before the pool is pinned.

    The floor is one copy of ``job_bytes`` from or to pinned memory, or one each way at once. With ``compute`` a
    process has the GPU compute, for each size of pieces ``rounds`` times ``slice_s`` seconds while the daemon is idle
    and while it copies. Raises BenchFailed, DaemonUnavailable, KvoffdClientError.
    """
    results: list[Result] = []
    beside_compute: list[Result] = []
    with ExitStack() as stack:
        job_bytes = _fitting_job_bytes(directory, job_bytes, piece_sizes)
        gpu = stack.enter_context(GpuDevice(ordinal, job_bytes))
        facts = _let_daemon_use_gpu(stack, directory, progress, gpu)
        floor = gpu.floor
        if compute:
            load = stack.enter_context(LoadGenerators("computes", directory, ordinal, 1))
            floor = f"{gpu.floor}; of the computing: the same while the daemon is idle"
        pieces = _measure_copies(directory, progress, gpu, piece_sizes, job_bytes, rounds)
        # Closed before the GPU is, whatever happens.
        for piece, copies, measured in stack.enter_context(closing(pieces)):
            results += measured
            if compute:
                progress(f"a GPU that computes, pieces of {piece}")
                beside_compute += _measure_beside_compute(copies, load, gpu, piece, rounds, slice_s)
        return Report("copy", floor, [*results, *beside_compute], _curves(gpu, piece_sizes, results), facts)


def _fitting_job_bytes(directory: Path, wanted_bytes: int, piece_sizes: Sequence[int], threads: int = 1) -> int:
    """Return ``wanted_bytes``, or as many as leave POOL_JOBS jobs room in the pool. Raises BenchFailed."""
    with AdminClient(directory) as admin:
        pool_bytes = admin.stats().pool.usable_bytes
    block_bytes = threads * max(_layers(piece_bytes) * piece_bytes for piece_bytes in piece_sizes)
    jobs_bytes = int(POOL_SHARE * pool_bytes) // POOL_JOBS
    if jobs_bytes < block_bytes:
        needed = format_size(POOL_JOBS * block_bytes / POOL_SHARE)
        raise BenchFailed(
            f"The pool has {format_size(pool_bytes)}, and pieces of {format_size(max(piece_sizes))} need {needed}; "
            "give smaller ones with --piece-size."
        )
    return min(wanted_bytes, jobs_bytes // block_bytes * block_bytes)


def _layers(piece_bytes: int) -> int:
    return max(1, min(LAYERS, MAX_BLOCK_BYTES // piece_bytes))


def _measure_copies(
    directory: Path,
    progress: Progress,
    device: Device,
    piece_sizes: Sequence[int],
    job_bytes: int,
    rounds: int,
    threads: int = 1,
) -> Generator[tuple[str, CopyJobs, list[Result]]]:
    """Measure streams of stores, of loads, and both at once, then single jobs, in pieces, alternating with the floor.

    A piece is one layer's page of one engine block. The blocks of a job are scattered over the engine's memory, so that
    no two pieces can be copied as one. Times are those of the public WorkerClient, control messages included. Jobs of
    ``job_bytes`` divided by the daemon's copy ``threads`` per direction come in streams of STREAM_JOBS per thread, of
    which IN_FLIGHT are in flight; then as many at a time as there are threads. The pool holds POOL_JOBS times
    ``job_bytes``. Yields the name of each size of pieces, the engine's jobs, open until the next, and the results.
    Raises BenchFailed, DaemonUnavailable.
    """
    with CpuMeter(directory) as meter:
        for piece_bytes in piece_sizes:
            piece = format_size(piece_bytes)
            progress(f"pieces of {piece}")
            layers = _layers(piece_bytes)
            keys = max(1, job_bytes // (layers * piece_bytes * threads))
            blocks = 2 * IN_FLIGHT * threads * keys
            memory = device.allocate(layers * blocks * piece_bytes)
            with SyntheticEngine(directory, f"copy {piece}", layers, blocks, piece_bytes, memory) as engine:
                copies = CopyJobs(engine, keys, threads)
                yield piece, copies, _measure_piece_size(copies, device, meter, piece, rounds)


@dataclass
class _Case:
    """One way of copying, and what was measured of it in each round.

    Attributes:
        name: name of the case in results.
        direction: the one of DIRECTIONS whose floor is its floor.
        copy: copies, and returns the seconds.
        nbytes: bytes that ``copy`` copies.
        speeds, floors: GB/s.
        costs: CPU time of the daemon.
    """

    name: str
    direction: str
    copy: Callable[[], float]
    nbytes: int
    speeds: list[float] = field(default_factory=list)
    floors: list[float] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)


class CopyJobs:
    """Jobs of ``keys`` keys each, by one engine with blocks for as many stores and loads as are in flight at most."""

    def __init__(self, engine: SyntheticEngine, keys: int, threads: int) -> None:
        self._engine = engine
        self._keys = keys
        self._random = np.random.default_rng(1)
        self._stored: list[bytes] = []
        self.threads = threads
        self.job_bytes = keys * engine.block_bytes
        self.alone_bytes = threads * self.job_bytes
        """Bytes that ``store_alone`` and ``load_alone`` copy."""
        self.stream_bytes = STREAM_JOBS * self.alone_bytes
        """Bytes that ``store`` and ``load`` copy."""
        self.both_bytes = 2 * (STREAM_JOBS // 2) * self.alone_bytes
        """Bytes that ``both`` copies."""

    def store(self) -> float:
        """Store new keys in a stream; return the seconds."""
        self._engine.drop_blocks()
        self._stored = self._new_keys(STREAM_JOBS)
        return self._stream(self._stored, [], IN_FLIGHT)

    def load(self) -> float:
        """Load what ``store`` stored in a stream; return the seconds."""
        return self._stream([], self._stored, IN_FLIGHT)

    def both(self) -> float:
        """Store new keys while those of ``store`` are loaded; return the seconds.

        Only half as many of each, since the pool must hold them together with those of ``store``.
        """
        return self._stream(
            self._new_keys(STREAM_JOBS // 2), self._stored[: STREAM_JOBS // 2 * self.threads], IN_FLIGHT
        )

    def store_alone(self) -> float:
        """Store new keys in one job for each thread; return the seconds."""
        self._engine.drop_blocks()
        self._stored = self._new_keys(1)
        return self._stream(self._stored, [], 1)

    def load_alone(self) -> float:
        """Load what ``store_alone`` stored in one job for each thread; return the seconds."""
        return self._stream([], self._stored, 1)

    def _new_keys(self, jobs: int) -> list[bytes]:
        return [random_keys(self._keys) for _ in range(jobs * self.threads)]

    def _stream(self, stores: Sequence[bytes], loads: Sequence[bytes], in_flight: int) -> float:
        """Copy all jobs, at most ``in_flight`` of each kind for each thread at a time; return the seconds."""
        engine, most = self._engine, in_flight * self.threads
        leases = [engine.lease(keys) for keys in loads]
        # Block ids by kind (stores, loads) and place: a block is in one job at a time.
        block_ids = [[self._block_ids(kind * most + place) for place in range(most)] for kind in range(2)]
        free = [list(range(most)) for _ in range(2)]
        running: dict[int, tuple[int, int]] = {}
        waiting = [list(range(len(stores)))[::-1], list(range(len(loads)))[::-1]]
        begin = time.perf_counter()
        while running or any(waiting):
            for kind in (0, 1):
                while waiting[kind] and free[kind]:
                    index, place = waiting[kind].pop(), free[kind].pop()
                    if kind:
                        job = engine.begin_load(leases[index], loads[index], block_ids[kind][place])
                    else:
                        job = engine.begin_store(stores[index], block_ids[kind][place])
                    running[job] = (kind, place)
            for result in engine.wait_results(1):
                kind, place = running.pop(result.job_id)
                free[kind].append(place)
                engine.check((STORE, LOAD)[kind], [result], self._keys)
        return time.perf_counter() - begin

    def _block_ids(self, place: int) -> BlockIds:
        """Return the blocks at ``place``, each once, in an order without neighbours that could be merged."""
        return (self._random.permutation(self._keys) + place * self._keys).astype(np.int32)


def _measure_piece_size(copies: CopyJobs, device: Device, meter: CpuMeter, piece: str, rounds: int) -> list[Result]:
    cases = (
        _Case(STORE, STORE, copies.store, copies.stream_bytes),
        _Case(LOAD, LOAD, copies.load, copies.stream_bytes),
        _Case(BOTH, BOTH, copies.both, copies.both_bytes),
        _Case(f"{STORE}, one at a time", STORE, copies.store_alone, copies.alone_bytes),
        _Case(f"{LOAD}, one at a time", LOAD, copies.load_alone, copies.alone_bytes),
    )
    for round_number in range(rounds + 1):
        for case in cases:
            with meter.measure():
                seconds = case.copy()
            cost = meter.cost(case.nbytes / 1e9, "GB", checksums=True)
            floor = device.floor_speed(case.direction)
            if round_number:  # The first one warms up.
                case.speeds.append(case.nbytes / seconds / 1e9)
                case.floors.append(floor / 1e9)
                case.costs.append(cost)
    return [
        Result(
            f"{case.name}, pieces of {piece}",
            median(case.speeds),
            "GB/s",
            median(case.floors),
            Cost(mean(cost.seconds for cost in case.costs), "GB", mean(cost.checksums or 0.0 for cost in case.costs)),
        )
        for case in cases
    ]


def _curves(device: Device, piece_sizes: Sequence[int], results: Sequence[Result]) -> list[Curve]:
    """Return the lines of the plot: streams in each of DIRECTIONS, which come first of each piece size, and floors."""
    cases = len(results) // len(piece_sizes)
    streams = {direction: results[index::cases] for index, direction in enumerate(DIRECTIONS)}

    def curve(name: str, values: Sequence[float], *, is_floor: bool = False) -> Curve:
        return Curve(name, list(zip(piece_sizes, values, strict=True)), is_floor)

    measured = [curve(direction, [result.value for result in found]) for direction, found in streams.items()]
    return measured + [
        curve(name, [result.floor for result in streams[direction]], is_floor=True)
        for direction, name in device.floor_curves
    ]


def _let_daemon_use_gpu(stack: ExitStack, directory: Path, progress: Progress, gpu: GpuDevice) -> BenchGpu:
    """Register an engine on the GPU until ``stack`` ends, and wait until the daemon has pinned the pool."""
    progress("what the daemon takes of the GPU")
    with AdminClient(directory) as admin:
        in_use = not _wait_gpu_unused(admin)
        memory = gpu.allocate(PAGE_BYTES)
        before = gpu.free_bytes
        stack.enter_context(SyntheticEngine(directory, "copy", 1, 1, PAGE_BYTES, memory))
        unlockable = _wait_pinned(admin)
        taken = None if in_use else before - gpu.free_bytes
    return BenchGpu(gpu.name, gpu.uuid, gpu.driver_version, unlockable, taken)


def _wait_gpu_unused(admin: AdminClient) -> bool:
    """Return whether the daemon uses no GPU, or none any more after a while, as when a bench has just ended."""
    deadline = time.monotonic() + RELEASE_WAIT_S
    while True:
        pool = admin.stats().pool
        if not pool.pinned_for_gpu_bytes and not pool.unpinnable_bytes:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)


def _wait_pinned(admin: AdminClient) -> int:
    """Wait until the daemon has tried to pin all of its pool; return the bytes that the driver refused."""
    last, since = -1, time.monotonic()
    while True:
        pool = admin.stats().pool
        tried = pool.pinned_for_gpu_bytes + pool.unpinnable_bytes
        if tried >= pool.size_bytes:
            return pool.unpinnable_bytes
        if tried != last:
            last, since = tried, time.monotonic()
        if time.monotonic() - since > PINNING_WAIT_S:
            raise BenchFailed(
                f"The daemon pinned nothing more of its pool for {PINNING_WAIT_S:.0f} s; see its log and the driver's."
            )
        time.sleep(POLL_S)


def _measure_beside_compute(
    copies: CopyJobs, load: LoadGenerators, gpu: GpuDevice, piece: str, rounds: int, slice_s: float
) -> list[Result]:
    """Steps per second of the process that computes, and what the daemon copies meanwhile; alternating."""
    alone: list[float] = []
    beside: list[float] = []
    speeds: list[float] = []
    floors: list[float] = []
    for _ in range(rounds):
        load.start()
        time.sleep(slice_s)
        alone.append(load.stop()[0].rate)
        floors.append(gpu.floor_speed(BOTH) / 1e9)
        load.start()
        end = time.monotonic() + slice_s
        while time.monotonic() < end:
            copies.store()
            speeds.append(copies.both_bytes / copies.both() / 1e9)
        beside.append(load.stop()[0].rate)
    return [
        Result(f"computing while it copies, pieces of {piece}", median(beside), "steps/s", median(alone)),
        Result(f"{BOTH}, beside computing, pieces of {piece}", median(speeds), "GB/s", median(floors)),
    ]
