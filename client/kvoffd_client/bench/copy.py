"""How fast blocks go out to the pool and come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

import numpy as np

from kvoffd_client.bench.engine import BenchEngine, BlockIds, random_keys
from kvoffd_client.bench.memcpy import Memcpy
from kvoffd_client.bench.meter import CpuMeter
from kvoffd_client.bench.place import BOTH, LOAD, STORE, WAYS, HostPlace, Place
from kvoffd_client.bench.report import Cost, Curve, Progress, Report, Result
from kvoffd_proto.units import format_size

KIB, MIB = 2**10, 2**20
LAYERS = 16
"""As many as a model of 1 B parameters has: what one key costs is spread over so many pieces."""
MAX_BLOCK_BYTES = 4 * MIB
"""With large pieces fewer layers make a block, so that every pool has room for it."""
HOST_PIECES = (16 * KIB, 64 * KIB, 256 * KIB, MIB)
HOST_BYTES = 64 * MIB
JOBS = 6
"""In a stream, for each copy thread."""
ALONE = 2
"""Ways of copying besides WAYS: single stores and loads."""
IN_FLIGHT = 2
"""For each copy thread: one job is copied while the next one is taken in, as under an engine that has much to do."""


def bench_copy(
    directory: Path,
    progress: Progress,
    piece_sizes: Sequence[int] = HOST_PIECES,
    total_bytes: int = HOST_BYTES,
    rounds: int = 7,
    threads: int = 1,
) -> Report:
    """Measure copies of host memory; see ``measure_copies``. The floor is memcpy by as many threads.

    Raises BenchFailed, DaemonUnavailable.
    """
    with Memcpy(total_bytes, 2 * threads) as memcpy:
        place = HostPlace(memcpy, total_bytes, threads)
        results = measure_copies(directory, progress, place, piece_sizes, total_bytes, rounds, threads)
        return Report("copy", place.floor, results, curves_of(place, piece_sizes, results))


def measure_copies(
    directory: Path,
    progress: Progress,
    place: Place,
    piece_sizes: Sequence[int],
    total_bytes: int,
    rounds: int,
    threads: int = 1,
    then: Callable[[Copies, str], None] | None = None,
) -> list[Result]:
    """Measure streams of stores, of loads, and both at once, then single jobs, in pieces, alternating with the floor.

    A piece is one layer's page of one engine block. The blocks of a job are scattered over the engine's memory, so that
    no two pieces can be copied as one. Times are those of the public WorkerClient, control messages included. Jobs of
    ``total_bytes`` divided by the daemon's copy ``threads`` per direction come in streams of six per thread, of which
    two are in flight; then as many at a time as there are threads. The pool must hold nine times ``total_bytes``.
    ``then`` is called with the engine's jobs after each size of pieces. Raises BenchFailed, DaemonUnavailable.
    """
    results: list[Result] = []
    with CpuMeter(directory) as meter:
        for piece in piece_sizes:
            size = format_size(piece)
            progress(f"pieces of {size}")
            layers = max(1, min(LAYERS, MAX_BLOCK_BYTES // piece))
            keys = max(1, total_bytes // (layers * piece * threads))
            blocks = 2 * IN_FLIGHT * threads * keys
            memory = place.allocate(layers * blocks * piece)
            with BenchEngine(directory, f"copy {size}", layers, blocks, piece, memory) as engine:
                copies = Copies(engine, keys, threads)
                results += _measure(copies, place, meter, size, rounds)
                if then is not None:
                    then(copies, size)
    return results


@dataclass
class _Way:
    """One way of copying and what was measured of it, by round."""

    name: str
    copy: Callable[[], float]
    floor: str
    """Which of WAYS."""
    nbytes: int
    """That it copies."""
    speeds: list[float] = field(default_factory=list)
    floors: list[float] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)


class Copies:
    """Jobs of ``keys`` keys each, by one engine with blocks for as many stores and loads as are in flight at most."""

    def __init__(self, engine: BenchEngine, keys: int, threads: int) -> None:
        self._engine = engine
        self._keys = keys
        self._random = np.random.default_rng(1)
        self._stored: list[bytes] = []
        self.threads = threads
        self.job_bytes = keys * engine.job_bytes
        self.alone_bytes = threads * self.job_bytes
        """Bytes that ``store_alone`` and ``load_alone`` copy."""
        self.stream_bytes = JOBS * self.alone_bytes
        """Bytes that ``store`` and ``load`` copy."""
        self.both_bytes = 2 * (JOBS // 2) * self.alone_bytes
        """Bytes that ``both`` copies."""

    def store(self) -> float:
        """Store keys that are new, in a stream; return the seconds."""
        self._engine.forget()
        self._stored = self._names(JOBS)
        return self._stream(self._stored, [], IN_FLIGHT)

    def load(self) -> float:
        """Load what was stored, in a stream."""
        return self._stream([], self._stored, IN_FLIGHT)

    def both(self) -> float:
        """Store new keys while those of the last stream are loaded. Only half as many: they must fit the pool too."""
        return self._stream(self._names(JOBS // 2), self._stored[: JOBS // 2 * self.threads], IN_FLIGHT)

    def store_alone(self) -> float:
        """Store new keys, in one job for each thread."""
        self._engine.forget()
        self._stored = self._names(1)
        return self._stream(self._stored, [], 1)

    def load_alone(self) -> float:
        """Load what ``store_alone`` stored, in one job for each thread."""
        return self._stream([], self._stored, 1)

    def _names(self, jobs: int) -> list[bytes]:
        return [random_keys(self._keys) for _ in range(jobs * self.threads)]

    def _stream(self, stores: Sequence[bytes], loads: Sequence[bytes], in_flight: int) -> float:
        """Begin the jobs in order, as many as may be in flight of each kind, and a new one for each that ends."""
        engine, most = self._engine, in_flight * self.threads
        leases = [engine.lookup(names)[0].lease_id for names in loads]
        # By kind; a block is in one job at a time.
        blocks = [[self._blocks(half * most + place) for place in range(most)] for half in range(2)]
        free = [list(range(most)) for _ in range(2)]
        begun: dict[int, tuple[int, int]] = {}
        waiting = [list(range(len(stores)))[::-1], list(range(len(loads)))[::-1]]
        begin = time.perf_counter()
        while begun or any(waiting):
            for kind in (0, 1):
                while waiting[kind] and free[kind]:
                    index, place = waiting[kind].pop(), free[kind].pop()
                    if kind:
                        job = engine.begin_load(leases[index], loads[index], blocks[kind][place])
                    else:
                        job = engine.begin_store(stores[index], blocks[kind][place])
                    begun[job] = (kind, place)
            for result in engine.results(1):
                kind, place = begun.pop(result.job_id)
                free[kind].append(place)
                engine.check((STORE, LOAD)[kind], [result], self.job_bytes)
        return time.perf_counter() - begin

    def _blocks(self, place: int) -> BlockIds:
        """A job's share of the engine's blocks, each once, in an order without neighbours that could be merged."""
        return (self._random.permutation(self._keys) + place * self._keys).astype(np.int32)


def _measure(copies: Copies, place: Place, meter: CpuMeter, piece: str, rounds: int) -> list[Result]:
    ways = (
        _Way(STORE, copies.store, STORE, copies.stream_bytes),
        _Way(LOAD, copies.load, LOAD, copies.stream_bytes),
        _Way(BOTH, copies.both, BOTH, copies.both_bytes),
        _Way(f"{STORE}, one at a time", copies.store_alone, STORE, copies.alone_bytes),
        _Way(f"{LOAD}, one at a time", copies.load_alone, LOAD, copies.alone_bytes),
    )
    for round_number in range(rounds + 1):
        for way in ways:
            meter.start()
            seconds = way.copy()
            meter.stop()
            cost = meter.cost(way.nbytes / 1e9, "GB", checksums=True)
            floor = place.speed(way.floor)
            if round_number:  # the first one warms up
                way.speeds.append(way.nbytes / seconds / 1e9)
                way.floors.append(floor / 1e9)
                way.costs.append(cost)
    return [
        Result(
            f"{way.name}, pieces of {piece}",
            median(way.speeds),
            "GB/s",
            median(way.floors),
            Cost(mean(cost.seconds for cost in way.costs), "GB", mean(cost.checksums or 0.0 for cost in way.costs)),
        )
        for way in ways
    ]


def curves_of(place: Place, piece_sizes: Sequence[int], results: Sequence[Result]) -> list[Curve]:
    """What ``measure_copies`` found, for the plot."""
    found = {way: results[index :: len(WAYS) + ALONE] for index, way in enumerate(WAYS)}

    def curve(name: str, values: Sequence[float], *, is_floor: bool = False) -> Curve:
        return Curve(name, list(zip(piece_sizes, values, strict=True)), is_floor)

    measured = [curve(way, [result.value for result in found[way]]) for way in WAYS]
    return measured + [
        curve(name, [result.floor for result in found[way]], is_floor=True) for way, name in place.curves
    ]
