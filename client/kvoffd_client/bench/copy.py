"""How fast blocks go out to the pool and come back."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from kvoffd_client.bench.engine import BenchEngine, random_keys
from kvoffd_client.bench.report import Progress, Report, Result
from kvoffd_client.memory import SharedMemory
from kvoffd_proto.units import format_size

FLOOR = "one thread's memcpy of as many bytes in one piece, between two memfds"
KIB, MIB = 2**10, 2**20
LAYERS = 16
"""As many as a model of 1 B parameters has: what one key costs is spread over so many pieces."""
MAX_BLOCK_BYTES = 4 * MIB
"""With large pieces fewer layers make a block, so that every pool has room for it."""
_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = ctypes.c_void_p


def bench_copy(
    directory: Path,
    progress: Progress,
    piece_sizes: Sequence[int] = (16 * KIB, 64 * KIB, 256 * KIB, MIB),
    job_bytes: int = 64 * MIB,
    rounds: int = 7,
) -> Report:
    """Measure stores and loads of ``job_bytes`` in pieces, alternating with the floor.

    A piece is one layer's page of one engine block. The blocks of a job are scattered over the engine's memory, so that
    no two pieces can be copied as one. Times are those of the public WorkerClient, control messages included.
    Raises BenchFailed, DaemonUnavailable.
    """
    results: list[Result] = []
    with Memcpy(job_bytes) as memcpy:
        for piece in piece_sizes:
            label = format_size(piece)
            progress(f"pieces of {label}")
            layers = max(1, min(LAYERS, MAX_BLOCK_BYTES // piece))
            keys = job_bytes // (layers * piece)
            with BenchEngine(directory, f"copy {label}", layers, keys, piece) as engine:
                results += _measure(engine, memcpy, keys, f"pieces of {label}, {format_size(job_bytes)} a job", rounds)
    return Report("copy", FLOOR, results)


def _measure(engine: BenchEngine, memcpy: Memcpy, keys: int, case: str, rounds: int) -> list[Result]:
    random = np.random.default_rng(1)
    total = keys * engine.job_bytes
    stores, loads, floors = [], [], []
    for _ in range(rounds + 1):
        names = random_keys(keys)
        stores.append(total / engine.store(names, _scattered(random, keys)) / 1e9)
        floors.append(memcpy.speed(total) / 1e9)
        loads.append(total / engine.load(names, _scattered(random, keys)) / 1e9)
        engine.forget()
    # The first round touches the bench's memory in the daemon: it warms up and does not count.
    floor = median(floors[1:])
    return [
        Result(f"store, {case}", median(stores[1:]), "GB/s", floor),
        Result(f"load, {case}", median(loads[1:]), "GB/s", floor),
    ]


def _scattered(random: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Each block once, in an order without neighbours that could be merged (all but never by chance)."""
    return random.permutation(count).astype(np.int32)


class Memcpy:
    """Two touched memfds, and one thread that copies from one to the other."""

    def __init__(self, size_bytes: int) -> None:
        self._source, self._target = (
            SharedMemory(size_bytes, "memcpy-source"),
            SharedMemory(size_bytes, "memcpy-target"),
        )
        self._source.view.fill(1)
        self._target.view.fill(2)

    def speed(self, size_bytes: int) -> float:
        """Copy the first ``size_bytes``; return bytes per second."""
        target, source = self._target.view.ctypes.data, self._source.view.ctypes.data
        begin = time.perf_counter()
        _memmove(target, source, size_bytes)
        return size_bytes / (time.perf_counter() - begin)

    def close(self) -> None:
        """Free the memory."""
        self._source.close()
        self._target.close()

    def __enter__(self) -> Memcpy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
