"""What the daemon itself needs for copies of many GPUs: lanes over a driver that only counts.

``python -m tests.bench.lanes`` runs one lane for each of ``--gpus`` GPUs, all of them in one process, as the daemon
does: transfers are submitted, cut, launched, waited for, accounted and settled, but no byte moves. What it prints is
therefore a ceiling: what the daemon's own work allows, with the checksums left out, which ``kvoffd-cli bench copy``
measures.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from kvoffd.transfer.cuda.cuda_engine import CudaEngine
from kvoffd.transfer.cuda.driver import BatchCopy, CopyCalls, CudaDriver
from kvoffd.transfer.cuda.gpu_copy import PinnedChunks
from kvoffd.transfer.engine import Direction, Outcome, Transfer
from kvoffd.transfer.plan import Plan
from kvoffd_client.bench.results import machine
from tests.bench.report_file import add_report_options, publish_report, run_facts

KIB, MIB = 1 << 10, 1 << 20
POOL_ADDRESS, GPU_ADDRESS = 1 << 40, 7 << 44
DRIVER_NS = 640
"""CPU time of NVIDIA's driver for a piece of a batch: pieces of 8 KiB go at 12 to 13 GB/s."""


class CountingDriver:
    """As much of a CudaDriver as an engine asks of one; its streams are numbers."""

    gathers = False

    def __init__(self, library: ctypes.CDLL, stream: int) -> None:
        self._library = library
        self._stream = stream
        self._event = 0

    def set_context(self, context: int) -> None: ...

    def create_stream(self, *, urgent: bool) -> int:
        return self._stream + urgent

    def create_event(self) -> int:
        self._event += 1
        return self._event

    def destroy_stream(self, stream: int) -> None: ...

    def destroy_event(self, event: int) -> None: ...

    def batch_copy(self) -> BatchCopy:
        return cast(BatchCopy, self)

    def copy_calls(self, batch: BatchCopy) -> CopyCalls:
        names = ("copy", "batch", "record", "wait")
        return CopyCalls(
            **{name: ctypes.cast(getattr(self._library, f"count_{name}"), ctypes.c_void_p) for name in names}
        )


class Feeder:
    """Keeps ``in_flight`` transfers of one plan with an engine, each submitted when another has ended."""

    def __init__(self, engine: CudaEngine, plan: Plan, in_flight: int, transfers: int) -> None:
        self._engine, self._plan = engine, plan
        self._left = transfers
        self._running = in_flight
        self._lock = threading.Lock()
        self.done = threading.Event()
        for _ in range(in_flight):
            self._submit()

    def _submit(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left < 0:
                self._running -= 1
                if not self._running:
                    self.done.set()
                return
        self._engine.submit(Transfer(Direction.LOAD, self._plan, float("inf"), self._on_done))

    def _on_done(self, transfer: Transfer, outcome: Outcome, seconds: float) -> None:
        assert outcome is Outcome.DONE
        self._submit()


@dataclass(frozen=True)
class Measured:
    """One size of pieces: TB/s of all lanes together, CPU nanoseconds of the daemon for a piece, calls for a piece."""

    piece_bytes: int
    terabytes_per_second: float
    cpu_ns_per_piece: float
    pieces_per_call: float


def compile_driver(directory: Path) -> ctypes.CDLL:
    source, path = Path(__file__).with_name("counting_driver.c"), directory / "counting.so"
    subprocess.run(["cc", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", path, source], check=True)
    return ctypes.CDLL(str(path))


def scattered(pieces: int, piece_bytes: int) -> Plan:
    """Return a load of that many pieces, none of which could be merged."""
    order = np.random.default_rng(1).permutation(pieces).astype(np.uint64)
    number = np.arange(pieces, dtype=np.uint64)
    size = np.full(pieces, piece_bytes, dtype=np.uint64)
    to, source = order * np.uint64(2 * piece_bytes), number * np.uint64(piece_bytes)
    return Plan(to + np.uint64(GPU_ADDRESS), source + np.uint64(POOL_ADDRESS), size, pieces * piece_bytes)


def measure(library: ctypes.CDLL, gpus: int, piece_bytes: int, job_bytes: int, transfers: int) -> Measured:
    """Copy ``transfers`` plans on each of ``gpus`` lanes."""
    plan = scattered(job_bytes // piece_bytes, piece_bytes)
    pinned = PinnedChunks(np.ones(1 << 12, dtype=np.bool_), 256 * MIB, POOL_ADDRESS // (256 * MIB))
    engines = [
        CudaEngine(cast(CudaDriver, CountingDriver(library, 2 * number)), 0, pinned, name=f"GPU {number}")
        for number in range(gpus)
    ]
    for engine in engines:
        engine.open()
    before = _counted(library, gpus)
    began, cpu = time.perf_counter(), time.process_time()
    feeders = [Feeder(engine, plan, 2, transfers) for engine in engines]
    for feeder in feeders:
        assert feeder.done.wait(120)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    for engine in engines:
        assert engine.close(10)
    nbytes, pieces, calls = _counted(library, gpus) - before
    assert nbytes == gpus * transfers * plan.nbytes
    return Measured(piece_bytes, nbytes / seconds / 1e12, cpu / pieces * 1e9, pieces / calls)


def _counted(library: ctypes.CDLL, gpus: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    total = np.zeros(3, dtype=np.int64)
    for stream in range(2 * gpus):
        out = (ctypes.c_uint64 * 3)()
        library.counted(ctypes.c_uint64(stream), out)
        total += np.array(out, dtype=np.int64)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--job-mib", type=int, default=64, help="MiB of each transfer (default 64)")
    parser.add_argument("--transfers", type=int, default=2000, help="transfers of each lane and size (default 2000)")
    parser.add_argument("--rounds", type=int, default=5)
    add_report_options(parser)
    options = parser.parse_args()
    found: dict[int, list[Measured]] = {size: [] for size in (8 * KIB, 32 * KIB, 64 * KIB, 256 * KIB)}
    with tempfile.TemporaryDirectory() as directory:
        library = compile_driver(Path(directory))
        for _ in range(options.rounds):
            for size, rounds in found.items():
                rounds.append(measure(library, options.gpus, size, options.job_mib * MIB, options.transfers))
    lines = ["| pieces | TB/s | CPU of a piece | beside NVIDIA's driver | pieces in a call |", "|---|---|---|---|---|"]
    for size, rounds in found.items():
        one = sorted(rounds, key=lambda each: each.terabytes_per_second)[len(rounds) // 2]
        share = one.cpu_ns_per_piece / DRIVER_NS
        lines.append(
            f"| {size // KIB} KiB | {one.terabytes_per_second:.2f} | {one.cpu_ns_per_piece:.1f} ns | {share:.1%} | "
            f"{one.pieces_per_call:.0f} |"
        )
    facts = run_facts(
        f"python -m tests.bench.lanes --gpus {options.gpus} --job-mib {options.job_mib}",
        machine() | {"load average": os.getloadavg()[0]},
    )
    results = {"results": {str(size): [vars(one) for one in rounds] for size, rounds in found.items()}}
    publish_report(options, "The ceiling of the copy lanes", facts, results, "\n".join(lines))


if __name__ == "__main__":
    main()
