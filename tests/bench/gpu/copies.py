"""How fast blocks go from a GPU to the pool and come back, beside one large copy of pinned memory."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from kvoffd_client import AdminClient, NamespaceSpec, SchedulerClient, WorkerClient
from kvoffd_client.cuda_export import export_segments
from kvoffd_client.memory import Registration
from kvoffd_client.session import ClientOptions, Closing
from kvoffd_proto.messages import GroupKeys, GroupTransfer, PageRef, TensorLayout
from kvoffd_proto.units import format_size
from tests.bench.gpu.driver import BenchDriver
from tests.kit.waiting import wait_until

KEY_BYTES = 32
LAYERS = 64
"""As a model of 32 B parameters has. Stores of small pieces are rows from 32 on."""
MAX_BLOCK_BYTES = 4 << 20
"""With large pieces fewer layers make a block, so that every pool has room for it."""
GRANULARITY = 2 << 20
"""Smaller allocations share one of this size, which would be exported whole."""
STREAM_JOBS = 6
"""Jobs of a stream of stores or of loads. The pool must hold half as many again."""
IN_FLIGHT = 2
"""Jobs at a time: one is copied while the daemon takes in the next, as under an engine with much to do."""
WAIT_S = 30.0
PINNING_WAIT_S = 60.0
Row = dict[str, Any]


class Floor(Closing):
    """One copy of ``nbytes`` at a time between pinned memory and the GPU's, or one each way at once."""

    def __init__(self, driver: BenchDriver, nbytes: int) -> None:
        self._driver, self._nbytes = driver, nbytes
        self._memory = [(driver.allocate(nbytes), driver.allocate_pinned(nbytes)) for _ in range(2)]
        self._streams = [driver.create_stream(urgent=False) for _ in range(2)]

    def gb_per_s(self, *, store: bool = False, load: bool = False) -> float:
        (stored, to_host), (loaded, from_host) = self._memory
        copies = [(to_host, stored)] * store + [(loaded, from_host)] * load
        began = time.perf_counter()
        for (target, source), stream in zip(copies, self._streams, strict=False):
            self._driver.copy(target, source, self._nbytes, stream)
        for stream in self._streams:
            self._driver.wait_stream(stream)
        return len(copies) * self._nbytes / (time.perf_counter() - began) / 1e9

    def close(self) -> None:
        for stream in self._streams:
            self._driver.destroy_stream(stream)
        for on_gpu, pinned in self._memory:
            self._driver.free(on_gpu)
            self._driver.free_pinned(pinned)


class CopyJobs(Closing):
    """Jobs of ``keys`` keys each, by an engine without a model whose memory is the GPU's.

    The blocks of a job lie scattered, so that no two pieces are copied as one. Times are those of the public clients,
    messages included.

    ``apart``: each layer is an allocation of its own, as torch makes them.
    """

    def __init__(
        self, directory: Path, driver: BenchDriver, piece_bytes: int, job_bytes: int, *, apart: bool = False
    ) -> None:
        layers = max(1, min(LAYERS, MAX_BLOCK_BYTES // piece_bytes))
        self._keys = job_bytes // (layers * piece_bytes)
        blocks = 2 * IN_FLIGHT * self._keys
        self._job_bytes = self._keys * layers * piece_bytes
        self._driver = driver
        together = 1 if apart else layers
        nbytes = -(-together * blocks * piece_bytes // GRANULARITY) * GRANULARITY
        self._allocations = sorted(driver.allocate(nbytes) for _ in range(layers // together))
        segments = export_segments([(address, nbytes) for address in self._allocations], driver)
        assert [segment.address for segment in segments] == self._allocations
        places = [divmod(layer, together) for layer in range(layers)]
        tensors = [TensorLayout(number, at * blocks * piece_bytes, piece_bytes, blocks) for number, at in places]
        pages = tuple(PageRef(layer, piece_bytes) for layer in range(layers))
        memory = Registration(0, 1, tuple(segments), tuple(tensors), (pages,))
        namespace = NamespaceSpec.named("bench gpu", layers=layers, page_bytes=piece_bytes, process=os.getpid())
        options = ClientOptions(request_timeout_s=WAIT_S)
        self._scheduler = SchedulerClient(directory, namespace, options=options)
        self._worker = WorkerClient(directory, namespace, memory, options=options)
        assert self._worker.wait_ready(WAIT_S), self._worker.problem
        assert self._scheduler.wait_ready(WAIT_S), self._scheduler.problem
        self._job_ids, self._order = itertools.count(1), np.random.default_rng(1)
        self._stored: list[bytes] = []

    def store(self, jobs: int = STREAM_JOBS, in_flight: int = IN_FLIGHT) -> float:
        """Store new keys in place of the last ones; return GB/s."""
        assert self._scheduler.reset(WAIT_S)
        self._stored = self._new_keys(jobs)
        return self._stream(self._stored, [], in_flight)

    def load(self, in_flight: int = IN_FLIGHT) -> float:
        """Load what was stored last; return GB/s."""
        return self._stream([], self._stored, in_flight)

    def both(self) -> float:
        """Store new keys while those of the last stream are loaded, half as many of each; return GB/s."""
        half = STREAM_JOBS // 2
        return self._stream(self._new_keys(half), self._stored[:half], IN_FLIGHT)

    def _new_keys(self, jobs: int) -> list[bytes]:
        return [os.urandom(KEY_BYTES * self._keys) for _ in range(jobs)]

    def _stream(self, stores: Sequence[bytes], loads: Sequence[bytes], in_flight: int) -> float:
        leases = [self._lease(keys) for keys in loads]
        waiting: list[list[tuple[bytes, int]]] = [[(keys, 0) for keys in stores], list(zip(loads, leases, strict=True))]
        free = [[self._block_ids(kind * in_flight + place) for place in range(in_flight)] for kind in (0, 1)]
        running: dict[int, tuple[int, bytes]] = {}
        began = time.perf_counter()
        while running or any(waiting):
            for kind in (0, 1):
                while waiting[kind] and free[kind]:
                    (keys, lease_id), block_ids, job_id = waiting[kind].pop(), free[kind].pop(), next(self._job_ids)
                    part = GroupTransfer(0, keys, block_ids)
                    if kind:
                        self._worker.load(job_id, lease_id, [part])
                    else:
                        self._worker.store(job_id, [part])
                    running[job_id] = kind, block_ids
            results = self._worker.wait_results(WAIT_S)
            assert results, f"no job ended in {WAIT_S:.0f} s; see the daemon's log"
            for result in results:
                assert result.ok, result.error
                assert result.bytes == self._job_bytes, f"{result.bytes} bytes of {self._job_bytes} were copied"
                kind, block_ids = running.pop(result.job_id)
                free[kind].append(block_ids)
        return (len(stores) + len(loads)) * self._job_bytes / (time.perf_counter() - began) / 1e9

    def _block_ids(self, place: int) -> bytes:
        return (self._order.permutation(self._keys) + place * self._keys).astype(np.int32).tobytes()

    def _lease(self, keys: bytes) -> int:
        lookup = self._scheduler.lookup([GroupKeys(0, keys)])
        assert lookup.wait(WAIT_S), self._scheduler.problem
        assert lookup.leading_ready() == self._keys, "blocks of the bench were evicted"
        return lookup.lease_id

    def close(self) -> None:
        self._scheduler.reset(WAIT_S)
        # Memory of a GPU must not be freed while the daemon has it mapped.
        assert self._worker.unregister(WAIT_S), self._worker.problem
        self._worker.close()
        self._scheduler.close()
        for address in self._allocations:
            self._driver.free(address)


def measure_copies(
    directory: Path, piece_sizes: Sequence[int], job_bytes: int, rounds: int, apart: Sequence[int] = ()
) -> list[Row]:
    """Streams of stores, of loads and of both at once, then single jobs, in turns with their floors. GB/s.

    ``apart``: sizes of pieces whose layers lie in an allocation each.
    """
    rows: list[Row] = []
    driver = BenchDriver()
    with ExitStack() as undo:
        undo.enter_context(driver.context(driver.devices()[0]))
        admin = undo.enter_context(AdminClient(directory))

        undo.enter_context(CopyJobs(directory, driver, GRANULARITY, 2 * GRANULARITY))  # the GPU stays in use
        wait_until(lambda: has_tried_to_pin(admin), PINNING_WAIT_S)
        floor = undo.enter_context(Floor(driver, job_bytes))

        def used() -> tuple[float, float, int]:
            """CPU seconds of the daemon, those of its checksums, and bytes that it copied."""
            stats = admin.stats()
            both = stats.store, stats.load
            return stats.cpu_seconds, sum(one.checksum_seconds for one in both), sum(one.bytes for one in both)

        for piece_bytes, is_apart in [*((size, False) for size in piece_sizes), *((size, True) for size in apart)]:
            pieces = f"pieces of {format_size(piece_bytes)}{', layers apart' if is_apart else ''}"
            print(pieces, flush=True)
            with CopyJobs(directory, driver, piece_bytes, job_bytes, apart=is_apart) as jobs:
                cases: list[tuple[str, Callable[[], float], dict[str, bool]]] = [
                    ("store", jobs.store, {"store": True}),
                    ("load", jobs.load, {"load": True}),
                    ("store and load at once", jobs.both, {"store": True, "load": True}),
                    ("store, one at a time", partial(jobs.store, 1, 1), {"store": True}),
                    ("load, one at a time", partial(jobs.load, 1), {"load": True}),
                ]
                measured: dict[str, list[tuple[float, ...]]] = {name: [] for name, _, _ in cases}
                for _ in range(rounds + 1):
                    for name, copy, ways in cases:
                        before = used()
                        speed = copy()
                        cpu_s, checksum_s, nbytes = (after - then for after, then in zip(used(), before, strict=True))
                        measured[name].append(
                            (speed, floor.gb_per_s(**ways), 1e9 * cpu_s / nbytes, 1e9 * checksum_s / nbytes)
                        )
                for name, found in measured.items():
                    speeds, floors, cpu, checksums = zip(*found[1:], strict=True)  # the first one warms up
                    value, floor_speed = median(speeds), median(floors)
                    row = {"case": f"{name}, {pieces}", "value": value, "unit": "GB/s", "floor": floor_speed}
                    costs = {"cpu_s_per_gb": mean(cpu), "checksum_s_per_gb": mean(checksums)}
                    rows.append(row | {"ratio": value / floor_speed} | costs)
    return rows


def has_tried_to_pin(admin: AdminClient) -> bool:
    """Whether the daemon has tried to pin all of its pool."""
    pool = admin.stats().pool
    return pool.pinned_for_gpu_bytes + pool.unpinnable_bytes >= pool.size_bytes
