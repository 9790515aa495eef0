"""``kvoffd-cli bench``: measures lookups and copies, each with a lower bound (floor) from the same run."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING

import typer

from kvoffd_client.admin_client import AdminClient
from kvoffd_client.cli.format import print_json, print_line, print_status, print_table
from kvoffd_client.cli.target import (
    TEST_WAIT_S,
    CliError,
    Directory,
    Evict,
    PlainJson,
    announce,
    bench_engine,
    local_directory,
)
from kvoffd_proto.messages import GroupKeys
from kvoffd_proto.units import format_count, format_size

if TYPE_CHECKING:
    # Slow to import.
    from kvoffd_client.fake_engine import EngineResult, FakeEngine

KIB, MIB = 1 << 10, 1 << 20
KEY_BYTES = 32
ROUNDS = 7
"""Measurements of each case and its floor."""
SAMPLES = 50
"""Lookups per round."""
LOOKUP_KEYS = (64, 1_000, 8_000)
LOOKUP_PAGE_BYTES = 4 * KIB
PIECES = (16 * KIB, 64 * KIB, 256 * KIB, MIB)
MAX_LAYERS, MAX_BLOCK_BYTES = 16, 4 * MIB
COPIED_BYTES = 128 * MIB
"""Bytes copied per direction and round; less if the pool is small."""
COPY_JOBS = 4
POOL_PART = 4
"""A bench uses at most one in this many bytes of the pool."""
EVICTED = (
    "Blocks of the bench were not stored, or were evicted; run it while engines are idle, with a larger pool, or with "
    "--evict."
)

ECHO = """
import ctypes, signal, sys, zmq
signal.signal(signal.SIGINT, signal.SIG_IGN)
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the parent
router = zmq.Context().socket(zmq.ROUTER)
router.bind(sys.argv[1])
while True:
    sender, frame = router.recv_multipart()
    router.send_multipart((sender, bytes(int.from_bytes(frame[:4], "little"))))
"""

bench_app = typer.Typer(
    help="""Measure lookups and copies, each with its floor.

    Run it without other load: engines wait for it. Its blocks are in a namespace of their own, go to no disk or
    store, evict nothing without --evict, and are dropped at the end. The policy ignores them. Their lookups are not
    counted; their copies are, in the metrics that begin with kvoffd_copy.
    """,
    rich_markup_mode=None,
)


@dataclass
class Result:
    """One case. ``value`` and ``floor`` are in ``unit``; ``ratio`` is value / floor."""

    case: str
    value: float
    unit: str
    floor: float
    ratio: float


@bench_app.command()
def lookup(evict: Evict = False, directory: Directory = None, json: PlainJson = False) -> None:
    """Measure lookups.

    They have 64, 1,000 and 8,000 keys, all found or all missing. The floor is a ZeroMQ echo.
    """
    most_bytes = max(LOOKUP_KEYS) * LOOKUP_PAGE_BYTES
    where = local_directory(directory)
    with _bench(where, most_bytes, evict):
        floor = "a ZeroMQ echo of the same size, from DEALER to ROUTER in another process and back"
        _print("lookup", floor, list(_lookups(where, evict)), as_json=json)


@bench_app.command()
def copy(evict: Evict = False, directory: Directory = None, json: PlainJson = False) -> None:
    """Measure stores and loads.

    They copy pieces of 16 KiB to 1 MiB; a piece is one layer's part of a block. The floor is memcpy.
    """
    where = local_directory(directory)
    with _bench(where, COPY_JOBS * MAX_BLOCK_BYTES, evict, copies=True) as admin:
        if admin.stats().pool.size_bytes < (least_bytes := POOL_PART * COPIED_BYTES):
            why = f"The pool is below {format_size(least_bytes)}: ratios are low, since little is copied per job."
            print(f"kvoffd-cli: {why}", file=sys.stderr)
        _print("copy", "memcpy of the same bytes by one thread", list(_copies(where, admin, evict)), as_json=json)


@contextmanager
def _bench(directory: Path, least_bytes: int, evict: bool, *, copies: bool = False) -> Iterator[AdminClient]:
    """Yield a client; say what it takes. Raises CliError."""
    with AdminClient(directory) as admin:
        pool = admin.stats().pool
        if pool.usable_bytes < POOL_PART * least_bytes:
            needed = format_size(POOL_PART * least_bytes)
            raise CliError(f"The pool has {format_size(pool.usable_bytes)}; this bench needs a pool of {needed}.")
        taken_bytes = max(least_bytes, _copied_bytes(pool.usable_bytes) if copies else 0)
        announce("bench", taken_bytes, pool.of("free"), evicts=evict)
        yield admin


def _copied_bytes(usable_bytes: int) -> int:
    return min(COPIED_BYTES, usable_bytes // POOL_PART)


def _lookups(directory: Path, evict: bool) -> Iterator[Result]:
    stored = [os.urandom(KEY_BYTES) for _ in range(max(LOOKUP_KEYS))]
    step = 1_000  # the engine's blocks, from which all keys are stored
    with bench_engine(directory, "bench lookup", evict, 1, step, LOOKUP_PAGE_BYTES) as engine, echo_process() as echo:
        for at in range(0, len(stored), step):
            if not engine.store(stored[at : at + step], range(step), TEST_WAIT_S).ok:
                raise CliError(EVICTED)
            _look_up(engine, b"".join(stored[at : at + step]), step, hold=True)
        for count in LOOKUP_KEYS:
            missing = [os.urandom(KEY_BYTES) for _ in range(count)]
            for keys, what, expected in ((stored[:count], "found", count), (missing, "missing", 0)):
                print_status(f"measuring: {format_count(count)} keys, all {what}")
                joined = b"".join(keys)
                look_up = partial(_look_up, engine, joined, expected)
                # Lookup and LookupReply have about 130 and 60 bytes besides the keys and their states.
                echoed = partial(echo, 130 + len(joined), 60 + count)
                measured, floors = _in_turns(look_up, echoed, SAMPLES)
                for name, at in (("p50", 49), ("p99", 98)):
                    value, floor = (1e6 * quantiles(values, n=100)[at] for values in (measured, floors))
                    case = f"{format_count(count)} keys, all {what}, {name}"
                    yield Result(case, value, "µs", floor, value / floor)


def _look_up(engine: FakeEngine, keys: bytes, expected: int, *, hold: bool = False) -> float:
    """Return the seconds of a lookup. ``hold`` keeps the lease until the next reset, so that the policy does not evict
    the blocks."""
    begin = time.perf_counter()
    answer = engine.scheduler.lookup([GroupKeys(0, keys)])
    answered = answer.wait(TEST_WAIT_S)
    seconds = time.perf_counter() - begin
    if not hold:
        engine.scheduler.release(answer.lease_id)
    if not answered or answer.failed:
        raise CliError("The daemon stopped answering; see its log.")
    if answer.leading_ready() != expected:
        raise CliError(EVICTED)
    return seconds


@contextmanager
def echo_process() -> Iterator[Callable[[int, int], float]]:
    """Run an echo server; yield a function that sends and receives these numbers of bytes, and returns the seconds."""
    import zmq

    with tempfile.TemporaryDirectory(prefix="kvoffd-echo-", dir="/tmp") as made, zmq.Context() as sockets:
        address = f"ipc://{made}/echo"
        process = subprocess.Popen([sys.executable, "-c", ECHO, address], stdin=subprocess.DEVNULL)
        dealer = sockets.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, round(1000 * TEST_WAIT_S))
        dealer.connect(address)

        def echo(asked_bytes: int, answer_bytes: int) -> float:
            request = answer_bytes.to_bytes(4, "little").ljust(asked_bytes, b"\xa5")
            begin = time.perf_counter()
            dealer.send(request)
            dealer.recv()
            return time.perf_counter() - begin

        try:
            echo(64, 64)
            yield echo
        finally:
            dealer.close()
            process.kill()
            process.wait()


def _copies(directory: Path, admin: AdminClient, evict: bool) -> Iterator[Result]:
    usable_bytes = admin.stats().pool.usable_bytes
    for piece_bytes in PIECES:
        layers = min(MAX_LAYERS, MAX_BLOCK_BYTES // piece_bytes)
        keys_per_job = _copied_bytes(usable_bytes) // COPY_JOBS // (layers * piece_bytes)
        count = COPY_JOBS * keys_per_job
        nbytes = count * layers * piece_bytes
        print_status(f"measuring: pieces of {format_size(piece_bytes)}")
        with (
            bench_engine(directory, "bench copy", evict, layers, count, piece_bytes) as engine,
            memcpy_of(nbytes) as memcpy,
        ):
            engine.fill(range(count), seed=1)
            blocks = list(range(count))
            random.Random(1).shuffle(blocks)  # so that no pieces are adjacent
            jobs = [blocks[at : at + keys_per_job] for at in range(0, count, keys_per_job)]
            keys: list[list[bytes]] = []  # of each job, those that were stored last
            for what, operation in (("stores", _store), ("loads", _load)):
                times = _in_turns(partial(operation, engine, jobs, keys), memcpy, 1)
                value, floor = (nbytes / 1e9 / median(seconds) for seconds in times)
                case = f"{what}, pieces of {format_size(piece_bytes)}"
                yield Result(case, value, "GB/s", floor, value / floor)


def _store(engine: FakeEngine, jobs: list[list[int]], keys: list[list[bytes]]) -> float:
    """Drop the last blocks and store those of all jobs under new keys; return the seconds."""
    engine.scheduler.reset(TEST_WAIT_S)
    keys[:] = [[os.urandom(KEY_BYTES) for _ in job] for job in jobs]
    seconds = 0.0
    for job_keys, job in zip(keys, jobs, strict=True):
        seconds += _timed(engine, engine.store, job_keys, job)
        _look_up(engine, b"".join(job_keys), len(job_keys), hold=True)
    return seconds


def _load(engine: FakeEngine, jobs: list[list[int]], keys: list[list[bytes]]) -> float:
    """Load the keys that were stored last; return the seconds without the lookups."""
    seconds = 0.0
    for job_keys, job in zip(keys, jobs, strict=True):
        engine.lookup(job_keys, TEST_WAIT_S)
        seconds += _timed(engine, engine.load, job_keys, job)
    return seconds


def _timed(engine: FakeEngine, copy: Callable[..., EngineResult], keys: list[bytes], job: list[int]) -> float:
    begin = time.perf_counter()
    result = copy(keys, job, TEST_WAIT_S)
    seconds = time.perf_counter() - begin
    if result.bytes != len(keys) * engine.layers * engine.page_bytes:
        raise CliError(EVICTED)
    return seconds


@contextmanager
def memcpy_of(nbytes: int) -> Iterator[Callable[[], float]]:
    """Yield a function that copies ``nbytes`` between two memfds and returns the seconds."""
    from kvoffd_client.memory import SharedMemory

    memmove = ctypes.CDLL(None).memmove
    memmove.argtypes, memmove.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_void_p
    with SharedMemory(nbytes, "kvoffd-bench-source") as source, SharedMemory(nbytes, "kvoffd-bench-target") as target:
        source.view.fill(1)
        target.view.fill(2)

        def memcpy() -> float:
            begin = time.perf_counter()
            memmove(target.view.ctypes.data, source.view.ctypes.data, nbytes)
            return time.perf_counter() - begin

        yield memcpy


def _in_turns(
    operation: Callable[[], float], floor: Callable[[], float], samples: int
) -> tuple[list[float], list[float]]:
    """Return the times of ROUNDS rounds of an operation and its floor, alternating, after a warm-up round."""
    pairs = [(operation(), floor()) for _ in range(samples * (ROUNDS + 1))][samples:]
    return [one for one, _ in pairs], [one for _, one in pairs]


def _print(bench: str, floor: str, results: Sequence[Result], *, as_json: bool) -> None:
    print_status()
    if as_json:
        print_json({"bench": bench, "floor": floor, "results": [vars(one) for one in results]})
        return

    def shown(value: float, unit: str) -> str:
        return f"{value:,.{2 if value < 10 else 0}f} {unit}"

    rows = [(one.case, shown(one.value, one.unit), shown(one.floor, one.unit), f"{one.ratio:.2f}") for one in results]
    print_table((bench, ">value", ">floor", ">value/floor"), rows)
    better = "higher" if rows and results[0].unit == "GB/s" else "lower"
    print_line(f"\nfloor: {floor}; {better} value/floor is better")
