"""What the daemon itself needs for copies of many GPUs: lanes over a driver that copies nothing and counts.

``python -m tests.bench.lane_ceiling --lanes 8 --transfers 1000 --piece-bytes 65536``. One lane for each GPU, all of
them in one process, as in the daemon: transfers are queued, cut, launched, waited for, accounted and settled, but no
byte moves and no checksum is taken. What it finds is therefore a ceiling.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import threading
import time
from typing import cast

import numpy as np
import numpy.typing as npt

from kvoffd.system.native import LIBRARY
from kvoffd.transfer.cuda.cuda_engine import CudaEngine
from kvoffd.transfer.cuda.driver import BatchCopy, CopyCalls, CudaDriver
from kvoffd.transfer.cuda.gpu_copy import PinnedChunks
from kvoffd.transfer.engine import Transfer
from kvoffd.transfer.plan import Direction, Plan

_JOB_BYTES = 64 << 20
_POOL_ADDRESS, _GPU_ADDRESS = 1 << 40, 7 << 44
_STREAMS = 128
_WAIT_S = 60.0
"""For one transfer more to end."""


class _CountingDriver:
    """As much of a CudaDriver as an engine asks of one; its streams are numbers."""

    gathers = False

    def __init__(self, library: ctypes.CDLL, stream: int) -> None:
        self._library = library
        self._stream = stream
        self.event = 0

    def set_context(self, context: int) -> None: ...

    def create_stream(self, *, urgent: bool) -> int:
        return self._stream + urgent

    def create_event(self) -> int:
        self.event += 1
        return self.event

    def destroy_stream(self, stream: int) -> None: ...

    def destroy_event(self, event: int) -> None: ...

    def batch_copy(self) -> BatchCopy:
        return BatchCopy(0, 0)

    def copy_calls(self, batch: BatchCopy) -> CopyCalls:
        calls = {name: getattr(self._library, f"kvoffd_count_{name}") for name in ("copy", "batch", "record", "wait")}
        return CopyCalls(**{name: ctypes.cast(function, ctypes.c_void_p) for name, function in calls.items()})


def scattered(pieces: int, piece_bytes: int) -> Plan:
    """Return a load of that many pieces, none of which could be merged."""
    order = np.random.default_rng(1).permutation(pieces).astype(np.uint64)
    number = np.arange(pieces, dtype=np.uint64)
    size = np.full(pieces, piece_bytes, dtype=np.uint64)
    to, source = order * np.uint64(2 * piece_bytes), number * np.uint64(piece_bytes)
    return Plan(to + np.uint64(_GPU_ADDRESS), source + np.uint64(_POOL_ADDRESS), size, pieces * piece_bytes)


def measure(lanes: int, piece_bytes: int, transfers: int) -> dict[str, float]:
    """Copy ``transfers`` plans of 64 MiB on each lane; return bytes and CPU seconds a second and so on, by name."""
    library = ctypes.CDLL(str(LIBRARY))
    plan = scattered(_JOB_BYTES // piece_bytes, piece_bytes)
    chunks = PinnedChunks(np.ones(1, dtype=np.bool_), _JOB_BYTES, _POOL_ADDRESS // _JOB_BYTES)
    drivers = [cast(CudaDriver, _CountingDriver(library, 2 * number)) for number in range(lanes)]
    engines = [CudaEngine(driver, 0, chunks) for driver in drivers]
    for engine in engines:
        engine.open()
    before, ended = _counted(library), threading.Semaphore(0)
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(transfers):
        for engine in engines:
            engine.submit(Transfer(Direction.LOAD, plan, float("inf"), lambda *_: ended.release()))
    for _ in range(transfers * lanes):
        if not ended.acquire(timeout=_WAIT_S):
            raise TimeoutError(f"No transfer ended for {_WAIT_S:.0f} s.")
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    for engine in engines:
        engine.close(10)
    nbytes, pieces, calls = (_counted(library) - before).tolist()
    if nbytes != lanes * transfers * plan.nbytes:
        raise AssertionError(f"{nbytes} bytes were copied.")
    return {
        "piece_bytes": piece_bytes,
        "bytes_per_second": nbytes / seconds,
        "cpu_seconds_per_piece": cpu / pieces,
        "pieces_per_call": pieces / calls,
    }


def _counted(library: ctypes.CDLL) -> npt.NDArray[np.int64]:
    """Return bytes, pieces and calls of all streams."""
    counts = ((ctypes.c_uint64 * 3) * _STREAMS)()
    for stream in range(_STREAMS):
        library.kvoffd_counted(ctypes.c_uint64(stream), counts[stream])
    total: npt.NDArray[np.int64] = np.array(counts, dtype=np.int64).sum(axis=0)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lanes", type=int, required=True, help=f"up to {_STREAMS // 2}")
    parser.add_argument("--transfers", type=int, required=True, help="of 64 MiB, on each lane")
    parser.add_argument("--piece-bytes", type=int, required=True)
    options = parser.parse_args()
    print(json.dumps(measure(options.lanes, options.piece_bytes, options.transfers)))


if __name__ == "__main__":
    main()
