"""How fast blocks go out to the pool and come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

import numpy as np

from kvoffd_client.bench.engine import KEY_BYTES, BenchEngine, BlockIds, random_keys
from kvoffd_client.bench.memcpy import Memcpy
from kvoffd_client.bench.meter import CpuMeter
from kvoffd_client.bench.report import Cost, Curve, Progress, Report, Result
from kvoffd_proto.units import format_size

KIB, MIB = 2**10, 2**20
LAYERS = 16
"""As many as a model of 1 B parameters has: what one key costs is spread over so many pieces."""
MAX_BLOCK_BYTES = 4 * MIB
"""With large pieces fewer layers make a block, so that every pool has room for it."""
STORE, LOAD, BOTH = "store", "load", "store and load at once"


def bench_copy(
    directory: Path,
    progress: Progress,
    piece_sizes: Sequence[int] = (16 * KIB, 64 * KIB, 256 * KIB, MIB),
    total_bytes: int = 64 * MIB,
    rounds: int = 7,
    threads: int = 1,
) -> Report:
    """Measure stores, loads, and both at once of ``total_bytes`` each in pieces, alternating with the floor.

    A piece is one layer's page of one engine block. The blocks of a job are scattered over the engine's memory, so that
    no two pieces can be copied as one. Times are those of the public WorkerClient, control messages included, for as
    many jobs at once as the daemon has copy ``threads`` for each direction; the floor copies with as many threads.
    Raises BenchFailed, DaemonUnavailable.
    """
    results: list[Result] = []
    with Memcpy(total_bytes, 2 * threads) as memcpy, CpuMeter(directory) as meter:
        for piece in piece_sizes:
            progress(f"pieces of {format_size(piece)}")
            layers = max(1, min(LAYERS, MAX_BLOCK_BYTES // piece))
            keys = total_bytes // (layers * piece)
            with BenchEngine(directory, f"copy {format_size(piece)}", layers, 2 * keys, piece) as engine:
                results += _measure(_Copies(engine, keys, threads), memcpy, meter, format_size(piece), rounds, threads)
    with_threads = f"{threads} threads' memcpy" if threads > 1 else "one thread's memcpy"
    floor = f"{with_threads} of as many bytes in large pieces between two memfds; at once: by twice as many threads"
    return Report("copy", floor, results, _curves(piece_sizes, results))


@dataclass
class _Way:
    """One way of copying and what was measured of it, by round."""

    name: str
    copy: Callable[[], float]
    directions: int
    speeds: list[float] = field(default_factory=list)
    floors: list[float] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)


class _Copies:
    """Stores and loads of ``keys`` keys, in so many jobs, by one engine with twice as many blocks."""

    def __init__(self, engine: BenchEngine, keys: int, jobs: int) -> None:
        self._engine = engine
        self._jobs = min(jobs, keys)
        self._random = np.random.default_rng(1)
        self._keys = keys
        self._stored = b""
        self.nbytes = keys * engine.job_bytes

    def store(self) -> float:
        """Store keys that are new; return the seconds."""
        self._engine.forget()
        self._stored = random_keys(self._keys)
        return self._timed(self._parts(self._stored, 0), ())

    def load(self) -> float:
        """Load what was stored."""
        return self._timed((), self._parts(self._stored, 0))

    def both(self) -> float:
        """Store new keys while those of the last store are loaded into other blocks."""
        return self._timed(self._parts(random_keys(self._keys), 0), self._parts(self._stored, self._keys))

    def _timed(self, stores: Sequence[tuple[bytes, BlockIds]], loads: Sequence[tuple[bytes, BlockIds]]) -> float:
        leases = [self._engine.lookup(names)[0].lease_id for names, _ in loads]
        begin = time.perf_counter()
        for index in range(self._jobs):
            if index < len(stores):
                self._engine.begin_store(*stores[index])
            if index < len(loads):
                self._engine.begin_load(leases[index], *loads[index])
        results = self._engine.results(len(stores) + len(loads))
        seconds = time.perf_counter() - begin
        self._engine.check("store" if stores else "load", results, self.nbytes * (bool(stores) + bool(loads)))
        return seconds

    def _parts(self, names: bytes, first_block: int) -> list[tuple[bytes, BlockIds]]:
        """The keys by job, each block once, in an order without neighbours that could be merged."""
        blocks = (self._random.permutation(self._keys) + first_block).astype(np.int32)
        return [
            (names[part[0] * KEY_BYTES : (part[-1] + 1) * KEY_BYTES], blocks[part])
            for part in np.array_split(np.arange(self._keys), self._jobs)
        ]


def _measure(copies: _Copies, memcpy: Memcpy, meter: CpuMeter, piece: str, rounds: int, threads: int) -> list[Result]:
    ways = (_Way(STORE, copies.store, 1), _Way(LOAD, copies.load, 1), _Way(BOTH, copies.both, 2))
    for round_number in range(rounds + 1):
        for way in ways:
            nbytes = way.directions * copies.nbytes
            meter.start()
            seconds = way.copy()
            meter.stop()
            cost = meter.cost(nbytes / 1e9, "GB", checksums=True)
            floor = memcpy.speed(copies.nbytes, way.directions * threads)
            if round_number:  # the first one warms up
                way.speeds.append(nbytes / seconds / 1e9)
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


def _curves(piece_sizes: Sequence[int], results: Sequence[Result]) -> list[Curve]:
    curves: list[Curve] = []
    for index, way in enumerate((STORE, LOAD, BOTH)):
        found = results[index::3]
        curves.append(Curve(way, [(size, item.value) for size, item in zip(piece_sizes, found, strict=True)]))
    for index, name in ((0, "memcpy, one direction"), (2, "memcpy, at once")):
        points = [(size, item.floor) for size, item in zip(piece_sizes, results[index::3], strict=True)]
        curves.append(Curve(name, points, is_floor=True))
    return curves
